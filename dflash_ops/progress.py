"""What a verb says while it works: on stderr of a terminal, else nowhere; never on stdout, which `--json` needs whole.

A verb gets a `Progress`. `step` says what comes next; `bytes` shows a bar with bytes, speed and the time left while its
block runs. A plain `Progress()` says nothing: verbs take it as their default.

    way = progress.shown(debug=False)
    way.step("asking lab / container 200")
    with way.bytes("sending model.safetensors", total=size, done=offset) as advance:
        advance(count)
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from dflash_ops import render

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Advance = Callable[[int], None]

# What is sent faster than this needs no bar: it would be gone before anybody has read it.
_SMALL_BYTES = 1 << 20


class Progress:
    """Says nothing."""

    def step(self, text: str) -> None:
        """What begins now, in a few words."""

    @contextlib.contextmanager
    def bytes(self, what: str, total: int, done: int = 0) -> Generator[Advance, None, None]:
        """total: bytes of the whole; done: how many were there before. The block calls what it gets with how many more
        are done."""
        del what, total, done
        yield lambda count: None


class Lines(Progress):
    """One line on stderr for each step: for --debug into a file."""

    def step(self, text: str) -> None:
        render.note(text)


class Terminal(Lines):
    """A line for each step, a bar for bytes."""

    @functools.cached_property
    def _bars(self) -> "Bars":
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        return Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def step(self, text: str) -> None:
        self._bars.console.print(render.clean(text), markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bytes(self, what: str, total: int, done: int = 0) -> Generator[Advance, None, None]:
        if total - done < _SMALL_BYTES:
            yield lambda count: None
            return
        task = self._bars.add_task(render.clean(what), total=total, completed=done)
        try:
            with self._bars:
                yield lambda count: self._bars.advance(task, count)
        finally:
            self._bars.remove_task(task)


class Countdown:
    """Called with what is waited for and the seconds left: one line on a terminal's stderr, elsewhere nothing."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, doing: str, left: int) -> None:
        if sys.stderr.isatty():
            self._shown = True
            sys.stderr.write(f"\r\x1b[K{render.clean(doing)} ({left} s)")
            sys.stderr.flush()

    def close(self) -> None:
        """Takes the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def shown(*, debug: bool = False) -> Progress:
    """The progress of this process: bars on a terminal, plain steps with --debug elsewhere, else nothing."""
    if sys.stderr.isatty():
        return Terminal()
    return Lines() if debug else Progress()
