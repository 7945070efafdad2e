"""Many places at once for people: live rows on a terminal, a line for each elsewhere; and the sum of it all.

All of it goes to stderr: stdout is for the values.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from dflash_ops import hints, leaving, render, ssh_ask
from dflash_ops.command import Container, Host
from dflash_ops.errors import OpsError
from dflash_ops.many import Board, Interrupted, Outcome

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.table import Table

P = TypeVar("P", Container, Host)
T = TypeVar("T")

# What is left of a terminal's rows for those of the places: the rest is the head, a line that counts, and the prompt.
_ROWS_BESIDE = 4


class Lines(Board):
    """A line for each place that fails, and what is to stay. done: one for those that don't, too; steps: and one for
    each step."""

    def __init__(self, *, done: bool = False, steps: bool = False) -> None:
        self._done, self._steps = done, steps

    def step(self, name: str, text: str) -> None:
        if self._steps:
            render.note(f"{name}: {text}")

    def note(self, name: str, text: str) -> None:
        render.note(hints.of(name, f"{name}: {text}"))

    def end(self, name: str, error: OpsError | None, seconds: float) -> None:
        if self._done or error is not None:
            render.note(f"{name}: {_result(error)}, {seconds:.1f} s")


@dataclass
class _Row:
    step: str = ""
    begun_at: float | None = None
    seconds: float = 0.0
    result: str = ""


class Rows(Board):
    """A row for each place, drawn anew four times a second while the block runs; nothing of it is left then."""

    def __init__(self, names: Sequence[str]) -> None:
        from rich.console import Console

        self._rows = {name: _Row() for name in names}
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._live = self._drawing()
        self._cursor = leaving.undone(_show_cursor)

    def _drawing(self) -> "Live":
        from rich.live import Live

        return Live(
            self,
            console=self._console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> "Rows":
        self._cursor.__enter__()  # Ctrl-C may come before all is begun, and before all is ended
        self._live.start()
        ssh_ask.around = self._paused
        return self

    def __exit__(self, *_: object) -> None:
        ssh_ask.around = contextlib.nullcontext
        self._live.stop()
        self._cursor.__exit__(None, None, None)

    @contextlib.contextmanager
    def _paused(self) -> Generator[None, None, None]:
        """While somebody is asked on the same terminal."""
        self._live.stop()
        try:
            yield
        finally:
            self._live = self._drawing()  # below the question, which stays
            self._live.start()

    def begin(self, name: str) -> None:
        with self._lock:
            row = self._rows[name]
            row.begun_at, row.step = time.monotonic(), row.step or "working"

    def step(self, name: str, text: str) -> None:
        with self._lock:
            self._rows[name].step = render.clean(text.strip())

    def note(self, name: str, text: str) -> None:
        self._console.print(
            render.clean(hints.of(name, f"{name}: {text}")), markup=False, highlight=False, soft_wrap=True
        )

    def end(self, name: str, error: OpsError | None, seconds: float) -> None:
        with self._lock:
            row = self._rows[name]
            row.seconds, row.result = seconds, _result(error)
            if error is not None:
                row.step = render.clean(error.what)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        with self._lock:
            yield self._drawn(max(1, console.height - _ROWS_BESIDE))

    def _drawn(self, room: int) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column("WHERE", no_wrap=True)
        table.add_column("STEP", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("SECONDS", justify="right", no_wrap=True)
        table.add_column("RESULT", no_wrap=True)
        shown = self._most_telling(room)
        for name, row in shown:
            seconds = row.seconds if row.result or row.begun_at is None else time.monotonic() - row.begun_at
            cells = (name, row.step, "" if row.begun_at is None else f"{seconds:.1f}", row.result or _doing(row))
            table.add_row(*(Text(render.clean(cell)) for cell in cells))
        if len(shown) < len(self._rows):
            done = sum(bool(row.result) for row in self._rows.values())
            waiting = sum(row.begun_at is None and not row.result for row in self._rows.values())
            table.add_row("…", Text(f"of {len(self._rows)}: {done} done, {waiting} waiting"), "", "")
        return table

    def _most_telling(self, room: int) -> list[tuple[str, _Row]]:
        """The rows that a terminal has room for: what works or has failed first, then what is done, then what waits."""

        def rank(item: tuple[int, tuple[str, _Row]]) -> int:
            row = item[1][1]
            if row.result:
                return 2 if row.result == "done" else 0
            return 3 if row.begun_at is None else 1

        chosen = sorted(sorted(enumerate(self._rows.items()), key=rank)[:room])
        return [item for _, item in chosen]


def _show_cursor() -> None:
    os.write(2, b"\x1b[?25h")


def _doing(row: _Row) -> str:
    return "waits" if row.begun_at is None else "…"


def _result(error: OpsError | None) -> str:
    if isinstance(error, Interrupted):
        return "interrupted"
    return "done" if error is None else f"failed ({error.exit_code})"


def board(names: Sequence[str], *, quiet: bool, debug: bool) -> Board:
    """What this process shows meanwhile: rows on a terminal, elsewhere lines, of failures alone when it is to be
    quiet."""
    if sys.stderr.isatty():
        return Rows(names)
    return Lines(done=not quiet, steps=debug)


def show(outcomes: "Sequence[Outcome[P, T]]", people: Callable[[T], None]) -> None:
    """Each value under its name, on stdout; each error on stderr."""
    for outcome in outcomes:
        with hints.at(None if isinstance(outcome.place, Host) else outcome.name):
            if outcome.error is None:
                render.say(f"{outcome.name}:")
                people(cast(T, outcome.value))
            else:
                sys.stdout.flush()  # both may be one terminal
                render.note(f"dflash-ops: {outcome.name}: {outcome.error.line()}")


def note_sum(outcomes: "Sequence[Outcome[P, T]]", codes: Sequence[int]) -> None:
    """How many are done, and who is not."""
    sys.stdout.flush()
    bad = [f"{it.name} ({code})" for it, code in zip(outcomes, codes, strict=True) if code]
    not_done = f"; not: {', '.join(bad)}" if bad else ""
    render.note(f"{len(outcomes) - len(bad)} of {len(outcomes)} done{not_done}")
