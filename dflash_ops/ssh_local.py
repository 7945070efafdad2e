"""The processes on this machine that SSH needs: `ssh -G`, asked for what its configuration says, and ProxyCommands."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
from pathlib import Path

from dflash_ops.errors import ConfigError
from dflash_ops.ssh_config import Here, Jump

# The last words of a ProxyCommand are kept, for an error to tell.
_WORDS_BYTES = 2000


def here(*, by_database: bool) -> Here:
    """Who and where we are. by_database: home and name come from the user database, as ssh takes them; else from the
    environment first, as Python does."""
    home, user = str(Path("~").expanduser()), ""
    if by_database:
        import pwd

        with contextlib.suppress(KeyError):  # a user without an entry: ssh itself would refuse
            entry = pwd.getpwuid(os.getuid())
            home, user = entry.pw_dir, entry.pw_name
    if not user:
        import getpass

        user = getpass.getuser()
    return Here(home, user, os.getuid(), socket.gethostname(), os.environ)


def _words(jump: Jump, file: Path | None) -> tuple[str, ...]:
    return (
        *(("-F", str(file)) if file else ()),
        *(("-p", str(jump.port)) if jump.port is not None else ()),
        *(("-l", jump.user) if jump.user is not None else ()),
        "--",
        jump.name,
    )


class Question:
    """A running `ssh -G`, begun at once; `answer` waits for it, `end` ends it."""

    def __init__(self, jump: Jump, file: Path | None) -> None:
        self._jump, self._file = jump, file
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError, PermissionError):
            self._process = subprocess.Popen(
                ("ssh", "-G", *_words(jump, file)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that a command of Match exec ends with it
            )

    def answer(self, seconds: float) -> str | None:
        """What it printed; None when there is no such ssh. ConfigError when it refuses, or says nothing in time."""
        if self._process is None:
            return None
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"`ssh -G` gave no answer within {seconds:g} s",
                where=self._jump.name,
                why="a Match exec, or a name server, that hangs",
                next=self._next(),
            ) from None
        text = err.decode("utf-8", "replace")
        if self._process.returncode == 0:
            return out.decode("utf-8", "surrogateescape")
        # Before OpenSSH 6.8 there is no -G; ssh does nothing at all for a user whom the database does not know.
        if any(words in text for words in ("option -- G", "illegal option", "No user exists for uid")):
            return None
        lines = [
            line.strip() for line in text.split("\n") if line.strip() and not line.startswith(("usage:", "Pseudo-"))
        ]
        raise ConfigError(
            "the ssh configuration can't be used",
            where=self._jump.name,
            why="; ".join(lines[:2]) or f"ssh -G ended with {self._process.returncode}",
            next=self._next(),
        )

    def _next(self) -> str:
        asked = shlex.join(word for word in _words(self._jump, self._file) if word != "--")
        return f"correct {self._file or '~/.ssh/config'}; try: ssh -G {asked}"

    def end(self) -> None:
        if self._process is not None:
            _end(self._process)
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()


class Proxy:
    """A ProxyCommand: `socket` is our end of its stdin and stdout. It ends with `close`."""

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        shell = os.environ.get("SHELL") or "/bin/sh"
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # As ssh starts it; a session of its own, so that our Ctrl-C does not cut the line under a stop.
                    (shell, "-c", f"exec {command}"),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise
        self._said = b""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream, contextlib.suppress(OSError, ValueError):
            while data := os.read(stream.fileno(), 1 << 12):
                self._said = (self._said + data)[-_WORDS_BYTES:]

    def last_words(self) -> str:
        """What it said on stderr at last, and how it ended if it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # it closes its output just before it ends
            self._listener.join(0.5)
        said = self._said.decode("utf-8", "replace").strip().split("\n")[-1]
        code = self._process.poll()
        return "; ".join(part for part in (said, "" if code is None else f"it ended with {code}") if part)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
        _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is the first of its own session, and what it has started."""
    if process.poll() is None:
        for number, seconds in ((signal.SIGTERM, 0.3), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return
