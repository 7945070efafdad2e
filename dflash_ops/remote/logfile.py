"""A run's log: appended to, rotated, and read by offsets that rotation does not change.

`log` is what is written now; `log.BEGIN-END` are the older parts, named by the offsets of their bytes in the whole log.
`log.times` says, a record a second at most, when the line at an offset was written.
A reader keeps a lock on the part that it reads, and parts are given up oldest first and only unlocked: whoever reads on
loses no byte. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

PART_BYTES = 64 << 20
PARTS = 8
LAST_LINES = 50
_TAIL_BYTES = 64 * 1024
_TOLD_BYTES = 4 << 30
_CHUNK = 256 * 1024
_BLOCK = 64 * 1024
_PART = re.compile(r"log\.(\d{12,})-(\d{12,})")
_TRIES = 20
# Of log.times: milliseconds since the epoch, and the offset of the line that was written then.
_TIME = b"%015d %015d\n"
_TIME_BYTES = 32
_TIME_MS = 1000


class Log:
    """Appends to the run's log, byte for byte; a full disk costs bytes, never the trainer.

    What could not be written is counted, and said in the log as soon as there is room again. part_bytes: where a part
    ends, at the last end of a line before, or at the next one where there is none. told_bytes: when
    a slow reader keeps so much, the log says so.
    """

    def __init__(
        self, path: Path, part_bytes: int = PART_BYTES, parts: int = PARTS, told_bytes: int = _TOLD_BYTES
    ) -> None:
        self._path, self._part_bytes, self._parts = path, part_bytes, parts
        self._descriptor = -1
        self._begin = self._size = 0
        self._missing = 0
        self._why = ""
        self._timed_ms = 0
        self._told_bytes, self._told = told_bytes, 0
        self.lost = 0
        self.tail = b""

    @property
    def end(self) -> int:
        """Bytes of the whole log so far."""
        return self._begin + self._size

    def write(self, data: bytes) -> None:
        if self._size >= self._part_bytes and (self.tail.endswith(b"\n") or self._size >= 2 * self._part_bytes):
            self._rotate()
        room = self._part_bytes - self._size
        if len(data) > room:
            cut = (data.rfind(b"\n", 0, room) + 1 if room > 0 else 0) or data.find(b"\n") + 1
            if 0 < cut < len(data):
                self._write(data[:cut])
                data = data[cut:]
                if self._rotate():
                    self.write(data)
                    return
        self._write(data)

    def _write(self, data: bytes) -> None:
        self._note_time()
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._missing:
            notice = f"\n[dflash-ops: {self._missing} bytes of this log were lost here: {self._why}]\n".encode()
            if self._append(notice) < len(notice):
                self._lose(len(data))
                return
            self._missing = 0
        written = self._append(data)
        if written < len(data):
            self._lose(len(data) - written)

    def note(self, text: str) -> None:
        """A line of our own, on a line of its own."""
        start = "" if not self.tail or self.tail.endswith(b"\n") else "\n"
        self.write(f"{start}[dflash-ops: {text}]\n".encode("utf-8", "replace"))

    def last_lines(self) -> list[str]:
        lines = self.tail.decode("utf-8", "replace").split("\n")
        if lines and not lines[-1]:
            lines.pop()
        return [line[-2000:] for line in lines[-LAST_LINES:]]

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, data: bytes) -> int:
        """How many of the bytes are in the file now."""
        done = 0
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self._why = error.strerror or str(error)
        self._size += done
        return done

    def _note_time(self) -> None:
        """A record for `since_offset`, once a second. Without room for it there is none: that is no reason to fail."""
        moment = time.time_ns() // 1_000_000
        if 0 <= moment - self._timed_ms < _TIME_MS:
            return
        self._timed_ms = moment
        unfinished = len(self.tail) - (self.tail.rfind(b"\n") + 1)
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path.with_name("log.times"), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                end = os.fstat(descriptor).st_size // _TIME_BYTES * _TIME_BYTES  # over half a record, after a full disk
                os.pwrite(descriptor, _TIME % (moment, max(0, self.end - unfinished)), end)
            finally:
                os.close(descriptor)

    def _lose(self, count: int) -> None:
        self._missing += count
        self.lost += count

    def _rotate(self) -> bool:
        """Begins another part; False where that can't be."""
        try:
            os.rename(self._path, self._path.with_name(f"log.{self._begin:012d}-{self.end:012d}"))
        except OSError:
            return False  # this part grows on
        self.close()
        self._begin, self._size = self.end, 0
        kept = parts(self._path.parent)
        while len(kept) >= self._parts and _give_up(kept[0][2]):
            kept.pop(0)
        held = (kept[-1][1] - kept[0][0]) // self._told_bytes if kept else 0
        if held > self._told and self.tail.endswith(b"\n"):
            size = (kept[-1][1] - kept[0][0]) >> 20
            self.note(f"{len(kept)} parts of this log, {size} MiB, are kept for a reader that is slow: end its logs -f")
        self._told = held
        return True


def _give_up(part: Path) -> bool:
    """Removes the part, unless somebody reads it."""
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)
    except OSError:
        return False
    return True


def parts(folder: Path) -> list[tuple[int, int, Path]]:
    """The rotated parts with the offsets of their begin and end, oldest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = ((match, folder / match.string) for match in map(_PART.fullmatch, names) if match)
    return sorted((int(match.group(1)), int(match.group(2)), path) for match, path in found)


def end(folder: Path) -> int:
    """Bytes of the whole log so far, those of parts that were given up included."""
    for _ in range(_TRIES):
        current = _stat(folder / "log")
        rotated = parts(folder)
        if _same(current, _stat(folder / "log")):
            return (rotated[-1][1] if rotated else 0) + (current.st_size if current else 0)
    return 0


class Reader:
    """Reads the log from an offset on, across parts. `offset`: of the next byte; what is gone is passed over."""

    def __init__(self, folder: Path, offset: int) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._begin = 0
        self.offset = offset
        self._open()
        if self._file is not None:
            self.offset = max(self.offset, self._begin)

    def read(self, limit: int = _CHUNK) -> bytes:
        """The next bytes, at most `limit`; none when there are no more by now."""
        for _ in range(_TRIES):
            if self._file is None:
                self._open()
                if self._file is None:
                    return b""
            self._file.seek(self.offset - self._begin)
            data = self._file.read(limit)
            if data:
                self.offset += len(data)
                return data
            if _same(os.fstat(self._file.fileno()), _stat(self._folder / "log")):
                return b""
            # Rotated: a last look, for it may have been written to before it was; then on to the next one.
            data = self._file.read(limit)
            if data:
                self.offset += len(data)
                return data
            before, begin, self._file = self._file, self._begin, None
            self._open()
            if self._file is None:  # nothing has been written behind it yet
                self._file, self._begin = before, begin
                return b""
            before.close()  # only now: as long as this one is locked, the next one can't be given up
        return b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Opens and locks the part that holds the offset, or the first behind it."""
        for _ in range(_TRIES):
            path = self._folder / "log"
            current = _stat(path)
            rotated = parts(self._folder)
            begin = rotated[-1][1] if rotated else 0
            for first, last, part in rotated:
                if last > self.offset:
                    begin, path = first, part
                    break
            try:
                file = open(path, "rb")  # noqa: SIM115 # kept, with its lock
            except FileNotFoundError:
                if path.name == "log":
                    return  # nothing has been written there yet
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            state = os.fstat(file.fileno())
            # Given up meanwhile, or `log` is another one than before the parts were listed: then its begin is a guess.
            if state.st_nlink and (path.name != "log" or _same(state, current)):
                self._file, self._begin = file, begin
                return
            file.close()


def tail_offset(folder: Path, lines: int | None) -> int:
    """Where the last `lines` lines begin; None: where what is kept begins. Reads from the end, however long it is."""
    rotated = parts(folder)
    oldest = rotated[0][0] if rotated else 0
    if lines is None:
        return oldest
    total = end(folder)
    if lines == 0:
        return total
    begin = rotated[-1][1] if rotated else 0
    found = 0
    for start, path in [(begin, folder / "log"), *((first, part) for first, _, part in reversed(rotated))]:
        try:
            with open(path, "rb") as file:
                position = file.seek(0, os.SEEK_END)
                while position > 0:
                    before = max(0, position - _BLOCK)
                    file.seek(before)
                    block = file.read(position - before)
                    at = len(block)
                    while (at := block.rfind(b"\n", 0, at)) >= 0:
                        # The line feed that ends the log ends its last line: it begins no other.
                        if start + before + at != total - 1:
                            found += 1
                        if found == lines:
                            return start + before + at + 1
                    position = before
        except OSError:
            continue
    return oldest


def since_offset(folder: Path, moment: float) -> int | None:
    """Where the lines begin that were written from `moment` on, in seconds since the epoch; up to a second of earlier
    ones come with them. None when the log has no times: a supervisor of an earlier version writes it."""
    try:
        with open(folder / "log.times", "rb") as file:
            low, high = 0, os.fstat(file.fileno()).st_size // _TIME_BYTES
            records = high
            # The first record that is newer than a second before: what an older one stands for was written by then.
            while low < high:
                middle = (low + high) // 2
                file.seek(middle * _TIME_BYTES)
                if int(file.read(15)) > moment * 1000 - _TIME_MS:
                    high = middle
                else:
                    low = middle + 1
            if low == records:
                return end(folder)
            file.seek(low * _TIME_BYTES + 16)
            return int(file.read(15))
    except (OSError, ValueError):
        return None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
