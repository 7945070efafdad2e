"""A running command, and talking with one line by line."""

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol

from dflash_ops.command import Command, Place, Result
from dflash_ops.errors import TimedOutError

# How often a wait looks round, in seconds. A wait without an end would lose a Ctrl-C that comes to another thread, or
# just before this one begins to wait for a lock: Python then only notes it.
TICK_SECONDS = 0.5
# An exit code follows the end of the output at once, unless the link broke.
CODE_SECONDS = 15.0

_BEAT_SECONDS = 5.0


class Process(Protocol):
    """A running command: dflash_ops.ssh.RemoteProcess or dflash_ops.shell.LocalProcess."""

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]: ...
    def write(self, data: bytes, seconds: float | None = None) -> None: ...
    def close_stdin(self) -> None: ...
    def code(self, seconds: float) -> int | None: ...
    def end(self) -> None: ...


class Conversation:
    """A command that we talk with, line by line. It ends when its stdin does; `shell.converse` makes it."""

    def __init__(self, place: Place, command: Command, process: Process, timeout: float) -> None:
        self._place, self._command, self._process, self._timeout = place, command, process, timeout
        self._out = bytearray()
        self._err = bytearray()
        self._ended = False
        self._speaking = threading.Lock()  # what two threads say does not mix

    def say(self, data: bytes) -> None:
        """Sends bytes. An ended command is not an error here: the next `hear` says how it ended. TimedOutError when it
        does not read them."""
        with self._speaking:
            try:
                self._process.write(data, self._timeout)
            except TimeoutError:
                raise timed_out(self._place, self._command, self._timeout) from None
            except OSError:
                return

    def speaks(self) -> bool:
        """Waits for its first words; False when it ended without any on stdout."""
        self._read(lambda: bool(self._out), self._timeout)
        return bool(self._out)

    def hear(self, *, timeout: float | None = None) -> bytes | None:
        """The next line without its line break; None when the command has ended its output."""
        self._read(lambda: b"\n" in self._out, self._timeout if timeout is None else timeout)
        return self._line() if self._out else None

    def heard(self) -> list[bytes]:
        """The whole lines that have come meanwhile; does not wait."""
        if not self._ended:
            out, err, self._ended = self._process.read(0)
            self._out += out
            self._err += err
        lines: list[bytes] = []
        while b"\n" in self._out:
            lines.append(self._line())
        return lines

    def take(self, count: int, *, timeout: float | None = None) -> bytes:
        """The next bytes, at most `count`; none when the command has ended its output."""
        self._read(lambda: bool(self._out), self._timeout if timeout is None else timeout)
        part = bytes(memoryview(self._out)[:count])
        del self._out[:count]
        return part

    @property
    def ended(self) -> bool:
        """Whether the command is known to have ended its output, which may still hold lines."""
        return self._ended

    @contextlib.contextmanager
    def beating(self) -> Generator[None, None, None]:
        """Sends an empty line every 5 s while the block runs: a sign of life for a command that would else give up."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(TimedOutError):  # whoever talks with it hears of that
                while not done.wait(_BEAT_SECONDS):
                    self.say(b"\n")

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_BEAT_SECONDS)

    def finish(self, *, timeout: float | None = None) -> Result:
        """Ends its stdin, waits for its end, and gives what it left unheard."""
        self._process.close_stdin()
        self._read(lambda: False, self._timeout if timeout is None else timeout)
        code = self._process.code(CODE_SECONDS)
        if code is None:
            raise timed_out(self._place, self._command, CODE_SECONDS)
        return Result(self._place, self._command, code, bytes(self._out), bytes(self._err))

    def end(self) -> None:
        """Lets go of it: its stdin ends, and nobody waits."""
        self._process.close_stdin()
        self._process.end()

    def _line(self) -> bytes:
        end = self._out.find(b"\n")
        text = bytes(self._out if end < 0 else memoryview(self._out)[:end])
        del self._out[: len(text) + 1]  # from the front, which costs nothing
        return text

    def _read(self, enough: Callable[[], bool], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not self._ended and not enough():
            left = deadline - time.monotonic()
            if left <= 0:
                raise timed_out(self._place, self._command, limit)
            out, err, self._ended = self._process.read(min(left, TICK_SECONDS))
            self._out += out
            self._err += err


def feed_process(process: Process, head: bytes, stdin: int | None) -> None:
    """Gives the command its input and ends it, beside the reading of its output."""

    def feed() -> None:
        # OSError: the command ended without reading it all, which its exit code tells.
        with contextlib.suppress(OSError):
            if head:
                process.write(head)
            while stdin is not None and (part := os.read(stdin, 1 << 16)):
                process.write(part)
        process.close_stdin()

    if not head and stdin is None:
        process.close_stdin()
    else:
        threading.Thread(target=feed, name="stdin", daemon=True).start()


def brief(command: Command) -> str:
    """A command's first words, for an error's line."""
    return shlex.join(command.argv[:3])[:80]


def timed_out(place: Place, command: Command, seconds: float) -> TimedOutError:
    return TimedOutError(
        f"no answer within {seconds:g} s", where=str(place), why=brief(command), next="see whether it still runs there"
    )
