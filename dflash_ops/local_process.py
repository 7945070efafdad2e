"""A command on this machine."""

import contextlib
import os
import select
import selectors
import subprocess

from dflash_ops.command import Command


def on_terminal(command: Command) -> int:
    """Runs a command on the user's own terminal; gives its exit code."""
    return subprocess.call([os.fsencode(word) for word in command.argv], env={**os.environ, **command.env})


class LocalProcess:
    """Behind the same methods as a command behind a channel."""

    def __init__(self, command: Command) -> None:
        words = [os.fsencode(word) for word in command.argv]
        pipe = subprocess.PIPE
        environment = {**os.environ, **command.env}
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, bufsize=0)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]:
        got = {self._out: b"", self._err: b""}
        for key, _ in self._selector.select(seconds):
            got[key.fileobj] = os.read(key.fd, 1 << 20)  # pyright: ignore[reportArgumentType] (it is what we registered)
            if not got[key.fileobj]:  # pyright: ignore[reportArgumentType]
                self._selector.unregister(key.fileobj)
        return got[self._out], got[self._err], not self._selector.get_map()

    def write(self, data: bytes, seconds: float | None = None) -> None:
        """Blocks while the command does not read, at most `seconds` (TimeoutError)."""
        view = memoryview(data)
        while view:
            if not select.select([], [self._stdin], [], seconds)[1]:
                raise TimeoutError
            view = view[self._stdin.write(view[: select.PIPE_BUF]) or 0 :]

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._stdin.close()

    def code(self, seconds: float) -> int | None:
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        # stdin is closed by whoever writes to it: a descriptor closed under a writer could be somebody else's by then.
        self._selector.close()
        self._out.close()
        self._err.close()
