"""`dflash-ops train attach`, `fetch` and `rm`: read words, call one verb, show its value.

cli_train.py registers them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import cli_data, leaving, render
from dflash_ops.cli_many import There, in_containers
from dflash_ops.cli_runs import AnyRun, not_empty
from dflash_ops.cli_words import InventoryFile, Target, find_container
from dflash_ops.errors import CancelledError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.data import Moved
    from dflash_ops.keeping import Removed
    from dflash_ops.many import At


def attach(run: AnyRun = None, target: Target = None, inventory: InventoryFile = None) -> None:
    """Show a run's tmux window on this terminal. C-b d leaves it; Ctrl-C asks whether to stop the run."""
    from dflash_ops import keeping, render_runs, train
    from dflash_ops.shell import Shell

    if not (os.isatty(0) and os.isatty(1)):
        raise UsageFault("attach needs a terminal", next="dflash-ops train logs -f")
    container = find_container(inventory, target)
    with Shell() as shell:
        found = keeping.attach(shell, container, run or train.newest(shell, container).id)
    if found.state.live:
        render.note(f"left it; run {found.id} goes on")
        return
    leaving.due(found.exit_code)
    render_runs.note_verdict(found)
    raise typer.Exit(found.exit_code)


@in_containers
def fetch(
    there: There,
    run: AnyRun = None,
    into: Annotated[
        Path, typer.Option("-o", "--into", metavar="FOLDER", help="It comes into a folder of its id below this one.")
    ] = Path(),
    checkpoints: Annotated[
        str,
        typer.Option(metavar="newest|all|none|NAME", help="Which checkpoints come with it.", callback=not_empty),
    ] = "newest",
) -> None:
    """Copy a run to this machine: metrics, events, logs, records and checkpoints, each file checked.

    What is here already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped.
    """
    from dflash_ops import keeping, train

    def copy(at: "At[Container]") -> "Moved":
        found = train.status(at.shell, at.place, run) if run else train.newest(at.shell, at.place)
        return keeping.fetch(at.shell, at.place, found, into, checkpoints=checkpoints, progress=at.way)

    there.serve(copy, lambda done: cli_data.show_moved(done, here=True))


@in_containers
def rm(
    there: There,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, or a name for the newest run of it.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Does not ask.")] = False,
) -> None:
    """Remove runs with their checkpoints and logs. Asks first; never one that goes on."""
    from dflash_ops import keeping

    for name in runs:
        not_empty(name)

    def look(at: "At[Container]") -> "list[Removed]":
        return keeping.remove(at.shell, at.place, runs, dry_run=True)

    # A name may mean another run once the question is answered.
    looks = {} if yes else there.look(look)
    if looks:
        _ask({it.name if there.many else "": it.value for it in looks.values() if it.value is not None})

    def remove(at: "At[Container]") -> "tuple[Container, list[Removed]]":
        ids = [it.run_id for it in looks[at.name].result()] if looks else runs
        return at.place, keeping.remove(at.shell, at.place, ids)

    there.serve(
        remove,
        lambda done: _show_removed(done[1]),
        document=lambda done: {"container": str(done[0]), "removed": done[1]},
    )


def _show_removed(removed: "list[Removed]") -> None:
    for it in removed:
        render.say(f"removed {it.run_id}, {render.size(it.size)}")


def _ask(would_go: "dict[str, list[Removed]]") -> None:
    """Asks once for the runs of all containers; by the containers' names, which are shown unless empty."""
    every = [(name, it) for name, runs in would_go.items() for it in runs]
    if not every:
        return
    if not os.isatty(0):
        raise UsageFault("rm asks before it removes", why="stdin is no terminal", next="the same with --yes")
    for name, it in every:
        what = f"{render.count(it.checkpoints, 'checkpoint')}, {render.size(it.size)}"
        render.note(f"{name}{': ' if name else ''}{it.run_id}: {what}")
    sys.stderr.write(f"Remove {'it' if len(every) == 1 else f'these {len(every)} runs'} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CancelledError("nothing was removed")
