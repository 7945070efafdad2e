"""Ctrl-C and SIGTERM for a command that ends between two steps, with nothing half written."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Interrupted(Exception):
    """A signal came. Its number is the exit code, less 128."""

    def __init__(self, number: int) -> None:
        super().__init__("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        self.number = number


@contextmanager
def interrupts() -> Generator[Callable[[], None]]:
    """A function that raises Interrupted once a signal has come. A second signal acts as usual, at once.

    Only the main thread may set handlers: elsewhere signals are left as they are.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def note(number: int, frame: object) -> None:
        came.append(number)
        restore()

    def check() -> None:
        if came:
            raise Interrupted(came[0])

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    for number in before:
        if before[number] is not signal.SIG_IGN:  # as a shell's background job is started
            signal.signal(number, note)
    try:
        yield check
    finally:
        restore()
