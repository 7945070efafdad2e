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
        "line"}; with `out` only those of stderr, and stdout goes there. Fault when the other end leaves."""
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
            return self._follow(program, stream.fileno())
        finally:
            if program.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it
                    program.wait(_KILL_SECONDS)
            stream.close()

    def _listen(self, seconds: float) -> bool:
        """Reads what has come; False when it has left, or was silent for too long."""
        if select.select([0], [], [], seconds)[0]:
            part = os.read(0, _READ_BYTES)
            self._bytes += part
            self._heard_at = time.monotonic()
            return bool(part)
        return time.monotonic() - self._heard_at < _SILENCE_SECONDS

    def _follow(self, program: subprocess.Popen[bytes], stream: int) -> tuple[int, list[str]]:
        """Until the program has ended, whether or not its stream has: a program may close it and work on, and a child
        that lives on may keep it open."""
        rest, lines, is_open, beat = b"", list[str](), True, time.monotonic() + _BEAT_SECONDS
        while True:
            code = program.poll()  # before the read: then that is all that it said
            patience = 0.0 if code is not None else 0.2 if is_open else 0.02
            ready = select.select([0, stream] if is_open else [0], [], [], patience)[0]
            if not self._listen(0):
                raise Fault("failed", "the link broke while a program ran in the container", "", "run it again")
            if time.monotonic() > beat:
                beat = time.monotonic() + _BEAT_SECONDS
                answers.say({"event": "busy"})
            part = os.read(stream, _READ_BYTES) if stream in ready else b""
            is_open = is_open and (stream not in ready or bool(part))
            *whole, rest = (rest + part).split(b"\n")
            if len(rest) > _LINE_BYTES or not is_open or code is not None:
                whole, rest = [*whole, rest], b""
            for line in whole:
                text = line.decode("utf-8", "replace").strip()
                if text:
                    lines = [*lines[-_LAST_LINES:], text]
                    answers.say({"event": "line", "text": text})
            if code is not None:
                return code, lines
