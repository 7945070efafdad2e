"""Ends a process that hangs, and says what each thread was doing.

    with Watchdog(900, on_stall=tell, what="the training") as watchdog:
        watchdog.ask(pipeline.doing)
        for step in ...:
            ...
            watchdog.beat()

Where no beat comes for so many seconds, a lock, a kernel or a file system holds the process for good: no error will be
raised and no thread can be joined. What is on the disk is whole; starting again is worth more than waiting.
"""

# pyright: reportPrivateUsage=false
# (Python has no other way to the stacks of all threads)

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from types import TracebackType

STALLED_CODE = 14  # of a process that the watchdog has ended
TELLING_SECONDS = 10.0  # for a report to be written: the disk or the log's reader may be what hangs
FRAMES = 40  # of a thread's stack, the innermost


def nothing(text: str) -> None:
    pass


class Watchdog:
    """Watches over one process from a daemon thread, while its block is open.

    It counts only the seconds in which its own thread could run: a process that was stopped and goes on did not stall.
    What it can't end is a process in which C code holds Python's lock for good; of that one the stacks are written, by
    faulthandler, after twice the seconds.
    """

    def __init__(
        self,
        seconds: float,
        on_stall: Callable[[str], None] = nothing,
        *,
        what: str = "the process",
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """seconds: without a beat, that are too many; 0 for no watch.

        on_stall: gets the report, whose first line is whole in itself, once it is on stderr; it has ten seconds. what:
        that stands still, for the report. leave: ends the process, given STALLED_CODE.
        """
        self._seconds, self._on_stall, self._what, self._leave = seconds, on_stall, what, leave
        self._limit = seconds  # at this moment
        self._asked: list[Callable[[], Mapping[str, str]]] = []
        self._beaten = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Something got on. From any thread, as often as you like."""
        self._beaten = True

    @contextlib.contextmanager
    def allow(self, seconds: float) -> Generator[None]:
        """In its block so many seconds without a beat are not too many: for what can't tell that it gets on.

        The longer of these and the watchdog's own count. From one thread. Where there is no watch it begins none.
        """
        before, self._limit = self._limit, max(self._limit, seconds)
        try:
            yield
        finally:
            self.beat()
            self._limit = before  # after the beat: see _watch

    def ask(self, doing: Callable[[], Mapping[str, str]]) -> None:
        """Has a report say what threads do, by their names. It must wait for nothing."""
        self._asked.append(doing)

    def _watch(self) -> None:
        tick = min(1.0, self._seconds / 8)
        quiet, before = 0.0, time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            quiet += min(now - before, 2 * tick)
            before = now
            limit = self._limit  # before the beat is looked at: it comes first when the limit falls
            if self._beaten:
                self._beaten, quiet = False, 0.0
            if quiet >= limit:
                self._stalled(limit)
                return
            _dump_unless_again_within(2 * limit)

    def _stalled(self, limit: float) -> None:
        report = self._report(limit)
        for tell in (_write, self._on_stall):
            teller = threading.Thread(target=_try, args=(tell, report), name="watchdog's report", daemon=True)
            teller.start()
            teller.join(TELLING_SECONDS)
        if not self._over.is_set():  # the block was left meanwhile: nothing hangs
            self._leave(STALLED_CODE)

    def _report(self, limit: float) -> str:
        still = f"{self._what} stands still: nothing got on for {limit:g} s"
        lines = [f"{still}; the process ends with code {STALLED_CODE}"]
        for doing in self._asked:
            try:
                lines += [f"{name!r} {words}" for name, words in doing().items()]
            except Exception as error:  # the stacks are worth more than these lines
                lines.append(f"what some threads do can't be told: {type(error).__name__}: {error}")
        return "\n".join([*lines, *stacks()]) + "\n"

    def __enter__(self) -> "Watchdog":
        if self._seconds > 0:
            _dump_unless_again_within(2 * self._seconds)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        if self._seconds > 0:
            self._thread.join(3 * TELLING_SECONDS)  # it may be telling, which must not come after what the caller tells
            faulthandler.cancel_dump_traceback_later()


def stacks() -> list[str]:
    """Every thread's stack, under its name, line by line."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, f'{ident}, not of Python')!r}:")
        lines += [line.rstrip() for line in traceback.format_stack(frame)[-FRAMES:]]
    return lines


def stacks_on(number: int) -> None:
    """From now on the signal has every thread's stack written to stderr, wherever the main thread is.

    By a thread, which holds Python's lock meanwhile: faulthandler's handler walks the stacks of threads that run, and
    that has ended a training with SIGSEGV.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(number, _caught)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def tell() -> None:
        while came := os.read(reading, 1):
            if came[0] == number:
                _try(_write, "\n".join(stacks()) + "\n")

    threading.Thread(target=tell, name="stacks", daemon=True).start()


def _caught(number: int, frame: object) -> None:
    """All is done by the thread."""


def _dump_unless_again_within(seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError):  # no stderr
        faulthandler.dump_traceback_later(seconds, file=2)


def _write(report: str) -> None:
    print(report, end="", file=sys.stderr, flush=True)


def _try(tell: Callable[[str], None], report: str) -> None:
    with contextlib.suppress(Exception):
        tell(report)
