"""A command's own output, without what the login shell printed before it began."""

from dflash_ops.command import Command, Host
from dflash_ops.conversation import CODE_SECONDS, Process, brief
from dflash_ops.errors import TimedOutError, UnreachableError
from dflash_ops.shell_text import mark

# How long a host may take to begin a command: a login script asks a directory server, a disk spins up.
START_SECONDS = 30.0

_KEPT_BYTES = 4096  # of what came before the mark, for the case that none comes


class Framed:
    """A process of a line that was made with `token`. Its output begins behind the marks; `started` once it does."""

    def __init__(self, host: Host, command: Command, process: Process, token: str) -> None:
        self._host, self._command, self._process = host, command, process
        self._out, self._err = _Stream(mark(token)), _Stream(mark(token))

    @property
    def started(self) -> bool:
        return self._out.begun

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]:
        out, err, ended = self._process.read(seconds)
        out, err = self._out.behind_mark(out), self._err.behind_mark(err)
        if ended and not self._out.begun:
            raise self._refused()
        return out, err, ended

    def write(self, data: bytes, seconds: float | None = None) -> None:
        self._process.write(data, seconds)

    def close_stdin(self) -> None:
        self._process.close_stdin()

    def code(self, seconds: float) -> int | None:
        return self._process.code(seconds)

    def end(self) -> None:
        self._process.end()

    def too_slow(self) -> TimedOutError:
        return TimedOutError(
            f"the login shell has not begun our command in {START_SECONDS:g} s",
            where=str(self._host),
            why=self._said() or brief(self._command),
            next=f"see what it waits for: ssh {self._host.address} true",
        )

    def _refused(self) -> UnreachableError:
        code = self._process.code(CODE_SECONDS)  # raises when it was the link that ended
        return UnreachableError(
            "the login shell did not run our command",
            where=str(self._host),
            why=self._said() or f"it ended with code {code} and said nothing",
            next=f"ssh {self._host.address} true; a shell such as nologin, or a forced command, can't be used",
        )

    def _said(self) -> str:
        """The last words before the mark that never came."""
        for stream in (self._err, self._out):
            lines = [line.strip() for line in stream.before.decode("utf-8", "replace").split("\n") if line.strip()]
            if lines:
                return lines[-1]
        return ""


class _Stream:
    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self.begun = False
        self.before = bytearray()

    def behind_mark(self, data: bytes) -> bytes:
        if self.begun or not data:
            return data
        self.before += data
        at = self.before.find(self._mark)
        if at < 0:
            del self.before[:-_KEPT_BYTES]
            return b""
        self.begun = True
        rest = bytes(self.before[at + len(self._mark) :])
        self.before.clear()
        return rest
