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

from dflash_ops import leaving

_BEGIN_BYTES = 4096


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


def attach(remote: Terminal) -> bytes:
    """Passes keys there and output here until the command ends. Without a terminal, stdin is passed as it is. Gives the
    begin of the output."""
    keys, begin = sys.stdin.fileno(), bytearray()
    with _raw(keys), _resized() as resized:
        ended = typed_out = False
        while not ended:
            ready, _, _ = select.select([remote, resized] if typed_out else [remote, resized, keys], [], [], 0.5)
            if resized in ready:
                os.read(resized, 4096)
                remote.resize(*size())
            if keys in ready:
                data = os.read(keys, 4096)
                typed_out = not data
                with contextlib.suppress(OSError):  # it has just ended
                    remote.write(data) if data else remote.close_stdin()
            out, err, ended = remote.read(0)
            for part in (out, err):
                if part:
                    sys.stdout.buffer.write(part)
                    begin += part[: _BEGIN_BYTES - len(begin)]
            sys.stdout.buffer.flush()
    return bytes(begin)


@contextlib.contextmanager
def _raw(keys: int) -> Generator[None, None, None]:
    """The terminal passes every key unread: Ctrl-C goes to the far side."""
    if not os.isatty(keys):
        yield
        return
    before = termios.tcgetattr(keys)

    def restore() -> None:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)

    with leaving.undone(restore):
        tty.setraw(keys, termios.TCSADRAIN)  # what was typed meanwhile stays
        yield


@contextlib.contextmanager
def _resized() -> Generator[int, None, None]:
    """A descriptor with something to read once the window's size has changed. The handler does no more than that: it
    may run in the middle of whatever this thread does with the connection."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def tell(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # full: enough has been said
            os.write(writing, b".")

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGWINCH, tell) if main else None
    try:
        yield reading
    finally:
        if main:
            signal.signal(signal.SIGWINCH, before)
        os.close(reading)
        os.close(writing)
