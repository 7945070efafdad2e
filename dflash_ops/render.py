"""The one place that prints a verb's value: a table or a line for people, one JSON document for programs.

JSON: `schema_version`, then the value's fields; null for what is not known; sizes in bytes. Control characters in
names never reach the terminal.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from dflash_ops import hints
from dflash_ops.errors import OpsError

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1


def show(value: Any, *, as_json: bool, people: Callable[[], None]) -> None:
    """Prints a verb's value, a dataclass or a mapping of plain values and dataclasses: by `people`, or as JSON."""
    with written():
        if as_json:
            document: dict[str, Any] = _plain(value)
            print(json.dumps({"schema_version": SCHEMA_VERSION, **document}))
        else:
            people()


def say(text: str) -> None:
    """A line for people; commands in it go where ours went."""
    print(clean(hints.here(text)))


def verbatim(text: str) -> None:
    """What is somebody else's text, and stays as it is."""
    print(clean(text))


def note(text: str) -> None:
    """A line on stderr: progress, hints, warnings. BrokenPipeError when its reader has gone; a full disk behind it is
    no failure of what the line is about."""
    try:
        sys.stderr.write(clean(hints.here(text)) + "\n")  # in one piece: several threads may have something to say
        sys.stderr.flush()
    except BrokenPipeError:
        raise
    except OSError:
        discard(2)  # what it still holds would fail again


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """A table. Names in `right` are columns of numbers. None is shown as -.

    spare: columns that a narrow terminal goes without, the first one first. What still does not fit is folded.
    """
    from rich.console import Console

    kept, cells = list(columns), [list(row) for row in rows]
    console = Console()
    if not console.is_terminal:  # a pipe has no width; nothing is left out or folded there
        console = Console(width=10_000)
    shown = _drawn(kept, cells, set(right))
    for name in spare:
        if Console(width=10_000).measure(shown).maximum <= console.width:
            break
        place = kept.index(name)
        for row in (kept, *cells):
            del row[place]
        shown = _drawn(kept, cells, set(right))
    console.print(shown)


def _drawn(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: set[str]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text("-" if cell is None else clean(str(cell))) for cell in row))
    return drawn


@contextlib.contextmanager
def written(descriptor: int = 1) -> Generator[None, None, None]:
    """The block does nothing but write to this stream. A full disk under `> file` is OpsError, said once; a reader that
    has gone stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(descriptor)
        raise unwritten(error) from error


def unwritten(error: OSError) -> OpsError:
    """What a user is told of a full disk, or another fault of it, under our output."""
    why, where = error.strerror or str(error), str(error.filename or "")
    return OpsError("the output can't be written", where=where, why=why, next="free some space, or write elsewhere")


def discard(descriptor: int = 1) -> None:
    """What is still to be written to this stream goes nowhere: the last flushes of Python must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def size(count: int | None) -> str:
    """Bytes for people: 12.3 MiB."""
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    amount, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.1f} {units[0]}"


def count(number: int, thing: str) -> str:
    """So many of a thing: 1 file, 2 files."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def clean(text: str) -> str:
    """The text with control characters and lone surrogates as escapes: safe for any terminal and any encoding."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode("ascii") for char in text
    )


@runtime_checkable
class _Document(Protocol):
    """A value that says itself what its JSON is."""

    def to_json(self) -> dict[str, Any]: ...


def _plain(value: Any) -> Any:
    if isinstance(value, _Document):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    return value
