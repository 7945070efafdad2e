"""`dflash-ops put` and `get`: read words, call one verb, show its value. cli.py registers both."""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import render
from dflash_ops.cli_many import There, in_containers
from dflash_ops.cli_words import a_path
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.data import Moved
    from dflash_ops.many import At


@in_containers
def put(
    there: There,
    words: Annotated[
        list[str],
        typer.Argument(metavar="LOCAL... shared/REMOTE", help="Files and folders, then where they go."),
    ],
) -> None:
    """Copy files and folders into the container's shared folder, checked there. REMOTE ends with / to name a folder.

    What is there already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped."""
    from dflash_ops import data

    if len(words) < 2:
        raise UsageFault("put needs a file and a place", where=" ".join(words), next="dflash-ops put FILE shared/data/")
    sources = [a_path(word) for word in words[:-1]]
    there.serve(lambda at: data.put(at.shell, at.place, sources, words[-1], progress=at.way), show_moved)


@in_containers
def get(
    there: There,
    source: Annotated[str, typer.Argument(metavar="shared/REMOTE", help="A file or folder of shared/ or runs/.")],
    local: Annotated[
        str, typer.Argument(metavar="[LOCAL]", help="A name for it here, or a folder for it, which may end with /.")
    ] = ".",
) -> None:
    """Copy a file or folder out of the container, checked here. Default: into the working folder.

    What is here already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped. With
    --on LOCAL is a folder, and each container's copy comes into a folder of its name there."""
    from dflash_ops import data

    place, name = a_path(local), PurePosixPath(source).name
    if local.endswith("/"):
        place = place / name

    def fetch(at: "At[Container]") -> "Moved":
        into = a_path(local) / at.name / name if there.many else place
        return data.get(at.shell, at.place, source, into, progress=at.way)

    there.serve(fetch, lambda done: show_moved(done, here=True))


def show_moved(done: "Moved", *, here: bool = False) -> None:
    """Where it lies now, and what travelled."""
    for path in done.paths:
        render.say(path if here else f"{done.container}: {path}")
    for line in done.left_out:
        render.note(f"left out {line}")
    there = f", {done.unchanged} there already" if done.unchanged else ""
    sent = f"{render.size(done.sent)} sent in {done.seconds:.2f} s"
    render.say(f"{render.count(done.files, 'file')}, {render.size(done.size)}{there}; {sent}")
