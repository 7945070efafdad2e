"""What a long command has finished so far: a file of JSON lines that outlives its end, however that comes.

The first line holds the settings that the others were made with. Each finished piece is one line, written with one call
as soon as it is there, in the order of finishing, so that a killed process loses at most the line that it was writing.
The next start drops such a torn last line and goes on behind it; with other settings it refuses.
"""

import fcntl
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

HEADER = "made_with"


class FinishedError(ValueError):
    """The file can't be gone on with; the text says why."""


class Finished:
    """An open file of finished pieces, each with a number of its own. One process at a time has it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Open or begin the file. Raises FinishedError, OSError.

        settings: what JSON can hold; equal ones may go on. `say` gets what was dropped.
        """
        self.path, self.settings = path, settings
        self.numbers: set[int] = set()
        """The finished pieces: some 60 bytes each."""
        self._partial: dict[int, int] = {}
        """Where the newest piece is of each conversation that ended with turns unasked."""
        self._order, self._offsets = array("q"), array("q")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            size = self._read(json.loads(json.dumps(settings)), say)
            if size == 0:
                os.ftruncate(self._file, 0)
                size = self._write({HEADER: settings})
            self._size = size
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FinishedError(f"{self.path} is being written by another process") from error
        if os.fstat(self._file).st_nlink == 0:
            raise FinishedError(f"{self.path} was finished by another process just now")

    def _read(self, settings: Mapping[str, Any], say: Callable[[str], None]) -> int:
        """Where the last whole line ends; what lies behind is cut off."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                found = _object(line)
                if found is None:
                    if file.read(1):
                        raise FinishedError(f"{self.path} line {number} is damaged: take it out to go on without it")
                    say(f"{self.path}: the last line was torn, {len(line):,} bytes of it are dropped")
                    os.ftruncate(self._file, end)
                    break
                if number == 1:
                    self._compare(cast("object", found.get(HEADER)), settings)
                elif not found.get("closed"):  # what older versions ended samples of prompts with
                    self._note(found, end)
                end += len(line)
        return end

    def _compare(self, found: object, settings: Mapping[str, Any]) -> None:
        if not isinstance(found, dict):
            raise FinishedError(f"{self.path} is no file of this command's: name another --out, or remove it")
        if told := differences(cast("dict[str, Any]", found), settings):
            raise FinishedError(
                f"{self.path} was begun with other settings: {told}. To go on, give those; to begin anew, remove it"
            )

    def _note(self, found: Mapping[str, Any], offset: int) -> None:
        number = found["number"]
        if number in self.numbers:
            return
        if found.get("unasked_turns"):
            self._partial[number] = offset
            return
        self._partial.pop(number, None)
        self.numbers.add(number)
        self._order.append(number)
        self._offsets.append(offset)

    def add(self, piece: Mapping[str, Any]) -> None:
        """Write a finished piece, which has a "number". Raises OSError; what was written before is whole."""
        offset = self._size
        self._size += self._write(piece)
        self._note(piece, offset)

    def __len__(self) -> int:
        """Conversations of which something is kept."""
        return len(self.numbers) + len(self._partial)

    def partial(self, number: int) -> dict[str, Any] | None:
        """What there is of a conversation that ended with turns unasked."""
        if (offset := self._partial.get(number)) is None:
            return None
        with self.path.open("rb") as file:
            file.seek(offset)
            return json.loads(file.readline())

    def _write(self, value: Mapping[str, Any]) -> int:
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        written = 0
        while written < len(line):
            written += os.write(self._file, line[written:])
        return len(line)

    def pieces(self) -> Iterator[dict[str, Any]]:
        """All pieces, by their numbers; of conversations with turns unasked, what there is."""
        order = np.array([*self._order, *self._partial], dtype=np.int64)
        offsets = np.array([*self._offsets, *self._partial.values()], dtype=np.int64)
        with self.path.open("rb") as file:
            for place in np.argsort(order, kind="stable"):
                file.seek(int(offsets[place]))
                yield json.loads(file.readline())

    def close(self) -> None:
        """The lock ends with it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        self.path.unlink()


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In what two groups of settings differ, in words; empty: in nothing."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return ", ".join(f"{name} was {found.get(name)!r}, now {wanted.get(name)!r}" for name in names)


def _object(line: bytes) -> dict[str, Any] | None:
    """A whole line's object; None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
