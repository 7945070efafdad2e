"""The user's own terminal, joined to a command with a tty on the other side of a connection."""

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Generator
from typing import Protocol


class Terminal(Protocol):
    """The far side: dflash_ops.ssh.RemoteProcess."""

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]: ...
    def write(self, data: bytes) -> None: ...
    def close_stdin(self) -> None: ...
    def resize(self, columns: int, rows: int) -> None: ...
    def fileno(self) -> int: ...


def size() -> tuple[int, int]:
    """Columns and rows of the terminal that the keys come from, 80 x 24 when there is none.

    Not what COLUMNS and LINES say: they don't follow a window whose size is changed.
    """
    try:
        terminal = os.get_terminal_size(sys.stdin.fileno())
    except OSError:
        terminal = shutil.get_terminal_size()
    return terminal.columns, terminal.lines


def attach(remote: Terminal) -> None:
    """Passes keys there and output here until the command ends. Without a terminal, stdin is passed as it is."""
    keys = sys.stdin.fileno()
    with _raw(keys), _resizing(remote):
        ended = typed_out = False
        while not ended:
            ready, _, _ = select.select([remote] if typed_out else [remote, keys], [], [], 0.5)
            if keys in ready:
                data = os.read(keys, 4096)
                typed_out = not data
                with contextlib.suppress(OSError):  # it has just ended
                    remote.write(data) if data else remote.close_stdin()
            out, err, ended = remote.read(0)
            for part in (out, err):
                if part:
                    sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()


@contextlib.contextmanager
def _raw(keys: int) -> Generator[None, None, None]:
    """The terminal passes every key unread: Ctrl-C goes to the far side."""
    if not os.isatty(keys):
        yield
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setraw(keys, termios.TCSADRAIN)  # what was typed meanwhile stays
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(remote: Terminal) -> Generator[None, None, None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def resized(number: int, frame: object) -> None:
        remote.resize(*size())

    before = signal.signal(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
