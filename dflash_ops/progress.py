"""What a verb says while it works: on stderr of a terminal, else nowhere; never on stdout, which `--json` needs whole.

A verb gets a `Progress`. `step` says what comes next; `bytes` shows a bar with bytes, speed and the time left while its
block runs. A plain `Progress()` says nothing: verbs take it as their default.

    way = progress.shown(debug=False)
    way.step("asking lab / container 200")
    with way.bytes("sending model.safetensors", total=size, done=offset) as advance:
        advance(count)
"""

import contextlib
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

    def __init__(self, bars: "Bars") -> None:
        self._bars = bars

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


def shown(*, debug: bool = False) -> Progress:
    """The progress of this process: bars on a terminal, plain steps with --debug elsewhere, else nothing."""
    if not sys.stderr.isatty():
        return Lines() if debug else Progress()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
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
    return Terminal(bars)
