"""A table of many rows, drawn as `render.table` draws it: rich measures every cell many times over, which takes
seconds for a thousand rows."""

import shutil
import sys
from collections.abc import Iterable, Sequence

from dflash_ops import render

MANY = 100


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """As `render.table`, which draws it when it has few rows, or when the terminal is too narrow for them."""
    listed = list(rows)
    if len(listed) <= MANY or not _drawn(columns, listed, set(right), spare):
        render.table(columns, listed, right=right, spare=spare)


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[object]], right: set[str], spare: Sequence[str]) -> bool:
    cells = [["-" if cell is None else render.clean(str(cell)) for cell in row] for row in (columns, *rows)]
    if not all(cell.isascii() and cell == cell.rstrip() for row in cells for cell in row):
        return False  # how wide that is, and what becomes of blanks at an end, rich knows
    by_column = dict(zip(columns, zip(*cells, strict=True), strict=True))
    widths = {name: max(map(len, column)) for name, column in by_column.items()}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name in spare:
        if room is None or _width(widths) <= room:
            break
        del widths[name]
    if room is not None and _width(widths) > room:
        return False
    placed = [
        [cell.rjust(width) if name in right else cell.ljust(width) for cell in by_column[name]]
        for name, width in widths.items()
    ]
    head, *lines = (f" {'   '.join(line)} " for line in zip(*placed, strict=True))
    empty = " " * len(head)
    render.say("\n".join((empty, head, f" {'─' * (len(head) - 2)} ", *lines, empty)))
    return True


def _width(widths: dict[str, int]) -> int:
    return sum(widths.values()) + 3 * len(widths) - 1
