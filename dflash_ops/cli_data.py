"""`dflash-ops put` and `get`: read words, call one verb, show its value. cli.py registers both."""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import progress, render
from dflash_ops.cli_words import InventoryFile, Json, Target, a_path, find_container
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.data import Moved


def put(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="LOCAL... shared/REMOTE", help="Files and folders, then where they go."),
    ],
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Copy files and folders into the container's shared folder, checked there. REMOTE ends with / to name a folder.

    What is there already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped."""
    from dflash_ops import data
    from dflash_ops.shell import Shell

    if len(words) < 2:
        raise UsageFault("put needs a file and a place", where=" ".join(words), next="put FILE shared/data/")
    sources = [a_path(word) for word in words[:-1]]
    container, way = find_container(inventory, target), progress.shown(debug=bool(context.obj))
    with Shell() as shell:
        done = data.put(shell, container, sources, words[-1], progress=way)
    render.show(done, as_json=as_json, people=lambda: show_moved(done))


def get(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="shared/REMOTE", help="A file or folder of shared/ or runs/.")],
    local: Annotated[
        str, typer.Argument(metavar="[LOCAL]", help="A name for it here, or a folder for it, which may end with /.")
    ] = ".",
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Copy a file or folder out of the container, checked here. Default: into the working folder.

    What is here already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped."""
    from dflash_ops import data
    from dflash_ops.shell import Shell

    place = a_path(local)
    if local.endswith("/"):
        place = place / PurePosixPath(source).name
    container, way = find_container(inventory, target), progress.shown(debug=bool(context.obj))
    with Shell() as shell:
        done = data.get(shell, container, source, place, progress=way)
    render.show(done, as_json=as_json, people=lambda: show_moved(done, here=True))


def show_moved(done: "Moved", *, here: bool = False) -> None:
    """Where it lies now, and what travelled."""
    for path in done.paths:
        render.say(path if here else f"{done.container}: {path}")
    for line in done.left_out:
        render.note(f"left out {line}")
    there = f", {done.unchanged} there already" if done.unchanged else ""
    files = "1 file" if done.files == 1 else f"{done.files} files"
    render.say(f"{files}, {render.size(done.size)}{there}; {render.size(done.sent)} sent in {done.seconds:.2f} s")
