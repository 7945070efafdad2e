"""The container's end of a conversation: requests as lines of JSON, bytes in frames, signs of life in between.

The other end sends an empty line now and then. When it has left (its stdin's end: a dropped link, a killed client), or
was silent for 30 s, whoever waits here is told so: `hear` gives None, `read` and `check` raise Left. Standard library
only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

SILENCE_SECONDS = 30.0
_CHUNK = 1 << 20
# How often `check` really looks: it is called for every file.
_LOOK_SECONDS = 0.05


class Left(Exception):
    """The other end has gone: what it wanted is not wanted any more."""


class Talk:
    """Reads from a descriptor; only one thread may."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._heard = bytearray()
        self._ended = False
        self._looked_at = self._heard_at = time.monotonic()

    def hear(self) -> dict[str, Any] | None:
        """The next request; None when the other end has left."""
        while True:
            line, found, rest = self._heard.partition(b"\n")
            if found:
                self._heard[:] = rest
                if line.strip():
                    return json.loads(line)
            elif not self._fill(SILENCE_SECONDS):
                return None

    def check(self) -> None:
        """Between two pieces of work: raises Left when nobody waits for it any more."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        # No more than that: what is on its way in frames is not for here.
        while not self._ended and len(self._heard) < _CHUNK and select.select([self._descriptor], [], [], 0)[0]:
            self._fill(0.0)
        if self._ended or now - self._heard_at > SILENCE_SECONDS:
            raise Left

    def take(self, count: int) -> bytes:
        """That many bytes, as they follow a line."""
        while len(self._heard) < count:
            if not self._fill(SILENCE_SECONDS):
                raise Left
        data = bytes(self._heard[:count])
        del self._heard[:count]
        return data

    def _fill(self, seconds: float) -> bool:
        """Waits for more; False when there is none."""
        if self._ended or not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        part = os.read(self._descriptor, _CHUNK)
        self._heard_at = time.monotonic()
        self._heard += part
        self._ended = not part
        return bool(part)


class Frames:
    """What comes in frames, {"bytes": N} and N bytes each until {"end": true}, as a file that can be read."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._rest = b""
        self._ended = False

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        wanted = size
        while wanted != 0:
            if not self._rest and not self._next():
                break
            part = self._rest if wanted < 0 else self._rest[:wanted]
            self._rest = self._rest[len(part) :]
            parts.append(part)
            wanted -= len(part) if wanted > 0 else 0
        return b"".join(parts)

    def _next(self) -> bool:
        if self._ended:
            return False
        request = self._talk.hear()
        if request is None:
            raise Left
        self._ended = bool(request.get("end"))
        self._rest = b"" if self._ended else self._talk.take(int(request["bytes"]))
        return not self._ended
