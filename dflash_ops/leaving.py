"""What must be put back on the user's terminal whatever ends this program: the echo, the cursor."""

import contextlib
import os
import signal
from collections.abc import Callable, Generator
from typing import NoReturn

_left: list[Callable[[], None]] = []
_begun = False  # to leave


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


def _do(undo: Callable[[], None]) -> None:
    # Twice does no harm, and Ctrl-C may come in between; no lock, which a handler could wait for in vain.
    with contextlib.suppress(Exception):  # the terminal may be gone
        undo()
    with contextlib.suppress(ValueError):
        _left.remove(undo)
