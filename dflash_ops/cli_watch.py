"""`dflash-ops train watch`, `plot` and `board`: read words, call verbs, show their values.

cli_train.py registers them.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import leaving, progress, render
from dflash_ops.cli_runs import AnyRun, leave_by_ctrl_c, not_empty
from dflash_ops.cli_words import InventoryFile, Json, Target, find_container
from dflash_ops.errors import NotFoundError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.plot import Curve
    from dflash_ops.shell import Shell
    from dflash_ops.watching import View

AnyRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help="Ids or names. Default: the run that goes on, else the newest."),
]


def watch(
    run: AnyRun = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document a line, whenever something has changed.")
    ] = False,
) -> None:
    """Watch a run on a page of its own: curves, speed, time left, queues, GPUs, the log's last lines.

    Ctrl-C leaves it; the run goes on. The exit code is the run's verdict: 0, 100 failed, 103 stopped.
    """
    from dflash_ops import render_runs, train, watching
    from dflash_ops.shell import Shell
    from dflash_ops.watch_page import Painter

    if not as_json and not os.isatty(1):
        raise UsageFault("watch draws on a terminal", next="dflash-ops train watch --json, or dflash-ops train logs -f")
    container = find_container(inventory, target)
    with Shell() as shell:
        name = run or train.newest(shell, container).id
        if as_json:
            last = leave_by_ctrl_c(
                lambda: watching.watch(shell, container, name, on_view=_print, interval=interval, on_break=_note)
            )
        else:

            def page() -> watching.View:
                with Painter(sys.stdout, _size) as painter, _left_by_signals():
                    return watching.watch(shell, container, name, on_view=painter.show, interval=interval)

            last = leave_by_ctrl_c(page)
    leaving.due(last.run.exit_code)
    if not as_json:
        render_runs.show_run(last.run)
    raise typer.Exit(last.run.exit_code)


@contextlib.contextmanager
def _left_by_signals() -> Generator[None, None, None]:
    """What would end us at once ends the page first, as Ctrl-C does: the terminal gets its old content back."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _size() -> tuple[int, int]:
    """Columns and rows of the terminal, as they are now."""
    size = os.get_terminal_size(1)
    return size.columns, size.lines


def _print(view: "View") -> None:
    with render.written():
        print(json.dumps(view.to_json()), flush=True)


def _note(words: str) -> None:
    render.note(f"{words}; going on")


def plot(
    runs: AnyRuns = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The picture: .png, .svg, .pdf or .html.")
    ] = Path("runs.png"),
    smooth: Annotated[int, typer.Option(min=1, metavar="STEPS", help="A moving mean over so many steps.")] = 1,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Draw the curves of runs into one picture. RUN may also be the folder of a fetched run."""
    from dflash_ops import plot as verbs

    curves = _curves(runs or [], target, inventory)
    verbs.write(curves, out, smooth=smooth)
    document = {"file": str(out), "runs": [{"run_id": it.label, "points": len(it.points)} for it in curves]}

    def people() -> None:
        steps = ", ".join(f"{it.label}: {len(it.points)} points" for it in curves)
        render.say(f"{out} ({steps})")

    render.show(document, as_json=as_json, people=people)


def _curves(names: list[str], target: str | None, inventory: Path | None) -> "list[Curve]":
    from dflash_ops import watching
    from dflash_ops.plot import Curve
    from dflash_ops.shell import Shell

    folders = {name: Path(name) for name in names if "/" in name or Path(name, "metrics.jsonl").is_file()}
    found = {
        name: Curve(folder.resolve().name, "fetched", watching.read_fetched(folder)) for name, folder in folders.items()
    }
    if len(folders) < len(names) or not names:
        container = find_container(inventory, target)
        with Shell() as shell:
            for name in names or [_newest(shell, container)]:
                if name not in folders:
                    view = watching.look(shell, container, not_empty(name) or "")
                    found[name] = Curve(view.run.id, view.run.verdict(), view.points)
    return [found[name] for name in dict.fromkeys(names or found)]


def _newest(shell: "Shell", container: "Container") -> str:
    from dflash_ops import train

    return train.newest(shell, container).id


def board(
    context: typer.Context,
    runs: AnyRuns = None,
    into: Annotated[
        Path | None, typer.Option("-o", "--into", metavar="FOLDER", help="Where the events are kept. Default: a cache.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 6006,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address that it listens on.")] = "localhost",
    fetch_only: Annotated[bool, typer.Option("--fetch-only", help="Fetches the events and starts nothing.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
) -> None:
    """Fetch the TensorBoard events of runs and open TensorBoard on them. Run it again for newer events."""
    import platformdirs

    from dflash_ops import keeping, train
    from dflash_ops import plot as verbs
    from dflash_ops.command import Command, Local
    from dflash_ops.shell import Shell

    container, way = find_container(inventory, target), progress.shown(debug=bool(context.obj))
    folder = (
        into or Path(platformdirs.user_cache_dir("dflash-ops")) / "board" / f"{container.host.name}-{container.vmid}"
    )
    words = None if fetch_only else verbs.tensorboard(folder, port, host)  # before the fetch, which may take long
    with Shell() as shell:
        found = [train.status(shell, container, name) for name in runs] if runs else [train.newest(shell, container)]
        for run in found:
            done = keeping.fetch_only(shell, container, run, folder, keeping.EVENTS, progress=way)
            if not done.files:
                raise NotFoundError(
                    f"run {run.id} has no events", where=str(container), next="dflash-ops train plot draws its metrics"
                )
            render.say(f"{done.paths[0]}: {render.size(done.size)}")
        sys.stdout.flush()
        if words is not None:
            raise typer.Exit(shell.interactive(Local(), Command(words)))
