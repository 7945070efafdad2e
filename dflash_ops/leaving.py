"""How this program ends: what must be put back on the user's terminal whatever ends it (the echo, the cursor), that no
reader keeps it after Ctrl-C, and with which exit code where its words can't be written."""

import _thread
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Generator
from typing import NoReturn

_left: list[Callable[[], None]] = []
_begun = False  # to leave
_watched = False  # for readers that have stopped
_due = 0
# After Ctrl-C, for whoever reads what is still to be written.
_UNREAD_SECONDS = 1.0


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Generator[None, None, None]:
    """Calls `undo` when the block ends, or by `now` if the program ends before that."""
    _left.append(undo)
    try:
        yield
    finally:
        _do(undo)


def begun() -> bool:
    """Whether the program is ending: whoever would change the terminal now must not."""
    return _begun


def now() -> None:
    """Puts back what is left of it, the last first. May be called at any moment, also by a signal's handler."""
    global _begun
    _begun = True
    for undo in reversed(_left[:]):
        _do(undo)


def by_signal(number: int, frame: object) -> NoReturn:
    """A handler for a signal that ends the program: it does so after all is put back."""
    now()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def by_ctrl_c(number: int, frame: object) -> NoReturn:
    """A handler for Ctrl-C: KeyboardInterrupt, and from now on no stream that nobody reads holds the program, whatever
    is written on its way out. (`| less`: it has stopped to read then, and keeps its end open.)"""
    global _watched
    if not _watched:
        _watched = True
        _thread.start_new_thread(_end_when_unread, ())  # the main one may wait where no signal reaches it
    raise KeyboardInterrupt


def _end_when_unread() -> None:
    with contextlib.suppress(OSError, ValueError):
        while True:
            for descriptor in (1, 2):
                if not select.select([], [descriptor], [], _UNREAD_SECONDS)[1]:
                    _thread.start_new_thread(now, ())  # on a terminal that is stopped it would not end
                    time.sleep(0.1)
                    os._exit(128 + signal.SIGINT)
            time.sleep(0.05)


def due(code: int) -> None:
    """Keeps what the command is to end with, before that is shown: a stream that takes no more is the lesser news."""
    global _due
    _due = code


def code_due() -> int:
    """The last exit code that `due` was told of; 0 for none."""
    return _due


def _do(undo: Callable[[], None]) -> None:
    # Twice does no harm, and Ctrl-C may come in between; no lock, which a handler could wait for in vain.
    with contextlib.suppress(Exception):  # the terminal may be gone
        undo()
    with contextlib.suppress(ValueError):
        _left.remove(undo)
