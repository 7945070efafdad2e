"""Programs that run as long as somebody waits for them: their lines are passed on as they come, and a link that ends,
or is silent for 30 s, ends them. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from dflash_ops.remote import answers
from dflash_ops.remote.answers import Fault

_SILENCE_SECONDS = 30.0
_BEAT_SECONDS = 5.0
_LAST_LINES = 40
_LINE_BYTES = 1 << 16  # what is longer is passed on in pieces: a bar of progress may have no line end at all
_READ_BYTES = 1 << 16  # as much as a pipe holds
_KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.2  # how often the silence is judged while the other end takes nothing


class Attending:
    """The other end: what it says, and what it is told while a program runs."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._heard_at = time.monotonic()

    def hear(self) -> dict[str, Any] | None:
        """Its next request; None when it has left. It may take long, as long as it shows signs of life."""
        while True:
            line, found, rest = self._bytes.partition(b"\n")
            if found:
                self._bytes[:] = rest
                if line.strip():
                    return json.loads(line)
            elif not self._listen(_SILENCE_SECONDS):
                return None

    def run(
        self, words: list[str], env: Mapping[str, str], *, cwd: str = "/", out: IO[bytes] | None = None
    ) -> tuple[int, list[str]]:
        """Runs a program to its end; gives its exit code and its last lines. Each line is passed on as {"event":
        "line"}; with `out` only those of stderr, and stdout goes there. Fault when the other end leaves. What the
        program has left in its process group is killed."""
        program = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if out is None else out,
            stderr=subprocess.STDOUT if out is None else subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        stream = program.stdout if out is None else program.stderr
        assert stream is not None
        try:
            lines = self._follow(program, stream.fileno())
        finally:
            # Nobody has waited for it yet, so its number, and that of its group, is nobody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it
                program.wait(_KILL_SECONDS)
            stream.close()
        return program.returncode, lines

    def _listen(self, seconds: float) -> bool:
        """Reads what has come; False when it has left, or was silent for too long."""
        if select.select([0], [], [], seconds)[0]:
            part = os.read(0, _READ_BYTES)
            self._bytes += part
            self._heard_at = time.monotonic()
            return bool(part)
        return time.monotonic() - self._heard_at < _SILENCE_SECONDS

    def _tell(self, said: str) -> None:
        """Writes lines of JSON. While the other end takes nothing, it is listened to: Fault when it has left."""
        rest = memoryview(said.encode())
        while rest:
            if select.select([0], [1], [], _LOOK_SECONDS)[1]:
                try:
                    rest = rest[os.write(1, rest[: select.PIPE_BUF]) :]  # no more, else it may block all the same
                except (BrokenPipeError, ConnectionResetError):
                    raise _left(half_said=True) from None
            elif not self._listen(0):
                raise _left(half_said=True)

    def _follow(self, program: subprocess.Popen[bytes], stream: int) -> list[str]:
        """Until the program has ended, whether or not its stream has: a program may close it and work on, and a child
        that lives on may keep it open. Gives its last lines."""
        rest, lines, is_open = b"", deque[str](maxlen=_LAST_LINES), True
        beat = time.monotonic() + _BEAT_SECONDS
        head = _event("line")[:-2]  # made once: there may be millions of lines
        while True:
            ended = _has_ended(program)  # before the read: then that is all that it said
            patience = 0.0 if ended else 0.2 if is_open else 0.02
            ready = select.select([0, stream] if is_open else [0], [], [], patience)[0]
            if not self._listen(0):
                raise _left()
            if time.monotonic() > beat:
                beat = time.monotonic() + _BEAT_SECONDS
                self._tell(_event("busy"))
            part = os.read(stream, _READ_BYTES) if stream in ready else b""
            is_open = is_open and (stream not in ready or bool(part))
            *whole, rest = (rest + part).split(b"\n")
            if len(rest) > _LINE_BYTES or not is_open or ended:
                whole, rest = [*whole, rest], b""
            texts = [text for line in whole if (text := line.decode("utf-8", "replace").strip())]
            lines.extend(texts)
            self._tell("".join([f'{head}, "text": {json.dumps(text)}}}\n' for text in texts]))
            if ended:
                return list(lines)


def _event(name: str) -> str:
    """An event without more to it, as `answers.say` says it; ends with `}` and the line's end."""
    return json.dumps({"schema_version": answers.SCHEMA_VERSION, "ok": True, "event": name}) + "\n"


def _has_ended(program: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without taking its exit code: until somebody does, its number is not given to another."""
    return os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _left(*, half_said: bool = False) -> Fault:
    """The fault when the other end has left. Nobody may take what is said from now on, or half a line lies before it:
    then it goes nowhere, else the saying of it would never end. Where a write would pass, it is said."""
    if half_said or not select.select([], [1], [], 0)[1]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return Fault("failed", "the link broke while a program ran in the container", "", "run it again")
