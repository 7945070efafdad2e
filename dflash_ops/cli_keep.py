"""`dflash-ops train attach`, `fetch` and `rm`: read words, call one verb, show its value.

cli_train.py registers them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import cli_data, progress, render
from dflash_ops.cli_runs import AnyRun, not_empty
from dflash_ops.cli_words import InventoryFile, Json, Target, find_container
from dflash_ops.errors import CancelledError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.keeping import Removed


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
    render_runs.note_verdict(found)
    raise typer.Exit(found.exit_code)


def fetch(
    context: typer.Context,
    run: AnyRun = None,
    into: Annotated[
        Path, typer.Option("-o", "--into", metavar="FOLDER", help="It comes into a folder of its id below this one.")
    ] = Path(),
    checkpoints: Annotated[
        str,
        typer.Option(metavar="newest|all|none|NAME", help="Which checkpoints come with it.", callback=not_empty),
    ] = "newest",
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Copy a run to this machine: metrics, events, logs, records and checkpoints, each file checked.

    What is here already does not travel; after a broken link or Ctrl-C the same command goes on where it stopped.
    """
    from dflash_ops import keeping, train
    from dflash_ops.shell import Shell

    container, way = find_container(inventory, target), progress.shown(debug=bool(context.obj))
    with Shell() as shell:
        found = train.status(shell, container, run) if run else train.newest(shell, container)
        done = keeping.fetch(shell, container, found, into, checkpoints=checkpoints, progress=way)
    render.show(done, as_json=as_json, people=lambda: cli_data.show_moved(done, here=True))


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids, or a name for the newest run of it.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Does not ask.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Remove runs with their checkpoints and logs. Asks first; never one that goes on."""
    from dflash_ops import keeping
    from dflash_ops.shell import Shell

    for name in runs:
        not_empty(name)
    container = find_container(inventory, target)
    with Shell() as shell:
        if not yes:
            would_go = keeping.remove(shell, container, runs, dry_run=True)
            _ask(would_go)
            runs = [it.run_id for it in would_go]  # a name may mean another one by now
        removed = keeping.remove(shell, container, runs)

    def people() -> None:
        for it in removed:
            render.say(f"removed {it.run_id}, {render.size(it.size)}")

    render.show({"container": str(container), "removed": removed}, as_json=as_json, people=people)


def _ask(would_go: "list[Removed]") -> None:
    if not os.isatty(0):
        raise UsageFault("rm asks before it removes", why="stdin is no terminal", next="the same with --yes")
    for it in would_go:
        checkpoints = "1 checkpoint" if it.checkpoints == 1 else f"{it.checkpoints} checkpoints"
        render.note(f"{it.run_id}: {checkpoints}, {render.size(it.size)}")
    sys.stderr.write(f"Remove {'it' if len(would_go) == 1 else f'these {len(would_go)} runs'} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CancelledError("nothing was removed")
