"""A run's metrics.jsonl as points of curves: read on from where the last reading ended, thinned, in constant memory.

Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

# What is drawn of a record; the others may be long (accuracy_by_slot, histograms).
FIELDS = (
    "step",
    "loss",
    "accept",
    "tokens",
    "tokens_per_s",
    "lr",
    "grad_norm",
    "seconds",
    "time",
    "skipped",
    "heldout_loss",
    "heldout_accept",
    "heldout_cycle_accept",
    "decoded_accept",
)
# The newest record also tells how the machine is used.
LAST_FIELDS = ("queues", "workers", "memory_mib")
# Measured now and then: such a record is kept longer than its neighbours.
_MEASURED = re.compile(rb'"(?:heldout_loss|decoded_accept)": ?[0-9]')
_CHUNK = 1 << 18


class Thinned:
    """At most `limit` of the lines that were added, evenly chosen."""

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._count = max(2, limit), 1, 0
        self.lines: list[bytes] = []

    def add(self, line: bytes) -> None:
        if self._count % self._stride == 0:
            self.lines.append(line)
            if len(self.lines) > self._limit:
                self.lines = self.lines[::2]
                self._stride *= 2
        self._count += 1


class Metrics:
    """Reads a metrics.jsonl that grows. A resumed trainer may write it anew, by rename: then it is all read again."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._inode, self._offset = 0, 0

    def read(self) -> dict[str, Any] | None:
        """What is new: {"anew": whether earlier points are void, "points", "last": the newest record}; None: nothing.
        A line that is no record is passed over; half a line at the end is read when it is whole."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except OSError:
            return None
        with file:
            state = os.fstat(file.fileno())
            anew = state.st_ino != self._inode or state.st_size < self._offset
            if anew:
                self._inode, self._offset = state.st_ino, 0
            file.seek(self._offset)
            plain, measured, last, held = Thinned(self._limit), Thinned(self._limit // 4), b"", b""
            while data := file.read(_CHUNK):
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    (measured if _MEASURED.search(line) else plain).add(line)
                    last = line
                self._offset += len(data)
            self._offset -= len(held)
        if not last and not anew:
            return None
        points = {record["step"]: record for record in map(_record, (*plain.lines, *measured.lines, last)) if record}
        newest = _record(last, (*FIELDS, *LAST_FIELDS))
        return {"anew": anew, "points": [points[step] for step in sorted(points)], "last": newest}


def _record(line: bytes, names: tuple[str, ...] = FIELDS) -> dict[str, Any] | None:
    """The fields of a line that are known; None for what is no record of a step."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    record = cast("dict[str, Any]", value)
    if type(record.get("step")) is not int or abs(record["step"]) >= 1e15:
        return None
    return {name: record[name] for name in names if name in record and _SOUND.get(name, _is_number)(record[name])}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # false for NaN as well


def _are_queues(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, cast("dict[str, Any]", value).values()))


def _are_workers(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(it, dict) and all(_is_number(cast("dict[str, Any]", it).get(key)) for key in ("working", "waiting"))
        for it in cast("dict[str, Any]", value).values()
    )


# What a foreign trainer writes otherwise is not drawn, and ends no page.
_SOUND: dict[str, Callable[[Any], bool]] = {
    "time": lambda value: isinstance(value, str),
    "queues": _are_queues,
    "workers": _are_workers,
}
