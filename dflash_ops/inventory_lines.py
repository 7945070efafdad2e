"""At which line of an inventory a key stands. Pure.

The TOML reader of the standard library keeps no lines. A statement alone (a header, or a key with its value) is TOML
too, so each is read by itself, once for all keys that are asked for.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

# A statement of many lines is read anew at each line that may be its last: this many characters in all, and no more.
_MOST_READ = 200_000
_ENDS = ("]", "}", '"""', "'''")  # one of these is on the last line of a statement that has several

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Statement:
    """A statement of a TOML text. line, end: the first line, and the one after its last, counted from 0; says: what it
    is alone; {} for comments and empty lines."""

    line: int
    end: int
    says: dict[str, Any]
    header: bool


def statements(text: str) -> Iterator[Statement]:
    """The statements of a text that is TOML, in their order; fewer where there is too much to read."""
    lines = text.split("\n")
    left, begin = _MOST_READ + len(text), 0
    while begin < len(lines):
        says, end = None, begin
        while says is None and end < len(lines):
            end += 1
            if end > begin + 1 and not any(mark in lines[end - 1] for mark in _ENDS):
                continue
            chunk = "\n".join((*lines[begin:end], ""))
            left -= len(chunk)
            if left < 0:
                return
            says = _read(chunk)
        if says is None:
            return
        yield Statement(begin, end, says, bool(says) and lines[begin].lstrip().startswith("["))
        begin = end


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


class Lines:
    """The lines of a text's keys; nothing is read before the first one is asked for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[Path, int] | None = None

    def of(self, path: Sequence[str | int]) -> int | None:
        """The line, from 1, at which the statement begins that first says `path`, or as much of it as there is."""
        if self._found is None:
            self._found = _all(self._text)
        whole = tuple(path)
        return next((self._found[cut] for end in range(len(whole), 0, -1) if (cut := whole[:end]) in self._found), None)


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line of one path; see `Lines.of`."""
    return Lines(text).of(path)


def _all(text: str) -> dict[Path, int]:
    found: dict[Path, int] = {}
    arrays: dict[Path, int] = {}  # an array of tables -> the index of its last one
    table: Path = ()
    for it in statements(text):
        if it.header:
            table = ()
            here: Any = it.says
            while isinstance(here, dict) and here:
                part, here = next(iter(cast(dict[str, Any], here).items()))
                table += (part,)
                found.setdefault(table, it.line + 1)
                if isinstance(here, list):
                    arrays[table] = arrays.get(table, -1) + 1
                    here = {}
                if table in arrays:
                    table += (arrays[table],)
                    found.setdefault(table, it.line + 1)
        else:
            _keep(found, table, it.says, it.line + 1)
    return found


def _keep(found: dict[Path, int], table: Path, says: dict[str, Any], line: int) -> None:
    """Every key that a statement says, and every item of its arrays."""
    ahead: list[tuple[Path, Any]] = [(table, says)]
    while ahead:
        path, value = ahead.pop()
        items = (
            cast(dict[str, Any], value).items()
            if isinstance(value, dict)
            else enumerate(cast(list[Any], value))
            if isinstance(value, list)
            else ()
        )
        for part, inner in items:
            found.setdefault((*path, part), line)
            ahead.append(((*path, part), inner))
