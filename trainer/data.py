"""Prepared documents as rows of packed tokens without end.

    prepared = open_prepared(Path("run/prepared/train"))
    rows = Rows(prepared, row_tokens=1024, seed=0, shuffle=True)
    row, cursor = rows.row(Cursor())

A row follows from its cursor, the data, and the settings alone: a training's place in the data is the next row's
cursor. Memory does not grow with the data: documents are mapped from the disk (prepared.py), an epoch's order is
computed and not stored (shuffle.py), and it is packed by groups of 4096 documents, so that any place is reached without
reading what lies before.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from trainer.documents import Bools, Document, Integers
from trainer.prepared import SLICE, DataError, Prepared
from trainer.shuffle import Permutation

GROUP = 4096  # documents that are packed together


class Cursor(BaseModel):
    """A place in the data: the next row's number, and where in which epoch's order it is packed."""

    model_config = ConfigDict(frozen=True)
    row: int = 0
    epoch: int = 0
    group: int = 0
    """Which 4096 documents of the epoch's order."""
    index: int = 0
    """Which of that group's rows."""


@dataclass(frozen=True)
class Row:
    """Documents side by side, padded to the row's length."""

    number: int
    ids: Integers  # 0 where padding
    loss_mask: Bools
    document_ids: Integers  # 0, 1, ... in the row; -1 where padding
    positions: Integers  # from 0 in each document; 0 where padding
    lines: tuple[int, ...] = ()  # each document's line in the source

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids >= 0).sum())


def make_row(number: int, documents: Sequence[Document], row_tokens: int, lines: Sequence[int] = ()) -> Row:
    """Documents side by side in one row. None at all makes a row of padding."""
    ids = np.zeros(row_tokens, dtype=np.int64)
    loss_mask = np.zeros(row_tokens, dtype=np.bool_)
    document_ids = np.full(row_tokens, -1, dtype=np.int64)
    positions = np.zeros(row_tokens, dtype=np.int64)
    start = 0
    for index, document in enumerate(documents):
        here = slice(start, start + len(document))
        ids[here], loss_mask[here], document_ids[here] = document.ids, document.loss_mask, index
        positions[here] = np.arange(len(document))
        start += len(document)
    return Row(number, ids, loss_mask, document_ids, positions, tuple(lines))


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Fills rows with documents: long ones first, each into the fullest row with room. Returns indices, ascending.

    Rows come in the order of their first documents. Documents whose lengths have as many bits are taken as they come,
    so that another order gives them other neighbours; that costs about a hundredth of the rows.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i].bit_length()):
        length = lengths[document]
        fitting = bisect_left(room, (length, -1))
        if fitting < len(room):
            left, row = room.pop(fitting)
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(document)
        if left > length:
            insort(room, (left - length, row))
    return sorted(sorted(row) for row in rows)


class Rows:
    """Rows without end: epoch after epoch, each in a new order when shuffled. For one thread at a time.

    Raises DataError when no document has anything to learn within `row_tokens`.
    """

    def __init__(self, prepared: Prepared, *, row_tokens: int, seed: int, shuffle: bool) -> None:
        self.prepared, self.row_tokens = prepared, row_tokens
        self._seed, self._shuffle = seed, shuffle
        self.groups = -(-len(prepared) // GROUP)
        self._packed: dict[tuple[int, int], list[list[int]]] = {}  # the groups asked for last
        self.cut = self.skipped = learned = 0
        for start in range(0, len(prepared), SLICE):
            documents = np.arange(start, min(start + SLICE, len(prepared)))
            lengths, useful = prepared.lengths(documents), self._useful(documents)
            self.skipped += int((~useful).sum())
            self.cut += int((useful & (lengths > row_tokens)).sum())
            learned += int(np.minimum(lengths[useful], row_tokens).sum())
        if self.skipped == len(prepared):
            raise DataError(
                f"data {prepared.meta.source.name}: none of its {len(prepared):,} conversations has an answer of two "
                f"tokens within {row_tokens}: raise data.row_tokens"
            )
        first = next(rows for group in range(self.groups) if (rows := self._group(0, group)))
        held = sum(int(np.minimum(prepared.lengths(np.array(row)), row_tokens).sum()) for row in first)
        self.fill = held / (len(first) * row_tokens)
        """Share of a row that is no padding, in the first group."""
        self.about_rows = max(1, round(learned / (row_tokens * self.fill)))
        """Rows in an epoch: exact with one group, else by the first group's fill."""

    @property
    def report(self) -> tuple[str, ...]:
        """What was cut and left out for the rows' length, one line each."""
        name, all_documents = self.prepared.meta.source.name, f"{len(self.prepared):,} conversations"
        lines: list[str] = []
        if self.cut:
            lines.append(f"cut {self.cut:,} of {all_documents} of {name} to {self.row_tokens} tokens")
        if self.skipped:
            lines.append(
                f"left out {self.skipped:,} of {all_documents} of {name}: no answer of two tokens within "
                f"{self.row_tokens}"
            )
        lines.append(f"{name}: about {self.about_rows:,} rows an epoch, {self.fill:.1%} full")
        return tuple(lines)

    @property
    def packing(self) -> str:
        """What a cursor is a place in, beside the documents: another packing has other rows there."""
        order = f"shuffled by seed {self._seed}" if self._shuffle else "in their own order"
        return f"rows of {self.row_tokens} tokens, {order}"

    def row(self, cursor: Cursor) -> tuple[Row, Cursor]:
        """The row at a cursor, and the next one's cursor. One beyond what is there now goes on behind it."""
        cursor = self._settled(cursor)
        chosen = self._group(cursor.epoch, cursor.group)[cursor.index]
        documents = [self.prepared.document(i, self.row_tokens) for i in chosen]
        row = make_row(cursor.row, documents, self.row_tokens, [self.prepared.line(i) for i in chosen])
        return row, self._settled(cursor.model_copy(update={"row": cursor.row + 1, "index": cursor.index + 1}))

    def cursor(self, number: int) -> Cursor:
        """The place of a row by its number alone: packs all that lies before, without reading it."""
        cursor = self._settled(Cursor())
        while True:
            here = len(self._group(cursor.epoch, cursor.group))
            if number < cursor.row + here:
                return cursor.model_copy(update={"row": number, "index": number - cursor.row})
            cursor = self._settled(cursor.model_copy(update={"row": cursor.row + here, "index": here}))

    def epoch_rows(self, epoch: int = 0) -> int:
        """How many rows an epoch has, exactly: packs all of it."""
        return sum(len(self._group(epoch, group)) for group in range(self.groups))

    def once(self) -> Iterator[Row]:
        """The rows of the first epoch."""
        cursor = self._settled(Cursor())
        while cursor.epoch == 0:
            row, cursor = self.row(cursor)
            yield row

    def _settled(self, cursor: Cursor) -> Cursor:
        """The same place, with a group and an index that are there."""
        epoch, group, index = cursor.epoch, cursor.group, cursor.index
        while True:
            if group >= self.groups:
                epoch, group, index = epoch + 1, 0, 0
            elif index >= len(self._group(epoch, group)):
                group, index = group + 1, 0
            else:
                return Cursor(row=cursor.row, epoch=epoch, group=group, index=index)

    def _group(self, epoch: int, group: int) -> list[list[int]]:
        """The rows of a group, as the indices of their documents."""
        if (epoch, group) not in self._packed:
            if len(self._packed) == 2:
                self._packed.pop(next(iter(self._packed)))
            self._packed[epoch, group] = self._pack(epoch, group)
        return self._packed[epoch, group]

    def _pack(self, epoch: int, group: int) -> list[list[int]]:
        size = len(self.prepared)
        documents = np.arange(group * GROUP, min((group + 1) * GROUP, size))
        if self._shuffle:
            documents = Permutation(size, (self._seed, epoch))(documents)
        documents = documents[self._useful(documents)]
        lengths = np.minimum(self.prepared.lengths(documents), self.row_tokens)
        packed = pack([int(length) for length in lengths], self.row_tokens)
        rows = [[int(documents[i]) for i in row] for row in packed]
        if self._shuffle and rows:
            # Full rows of few long documents and rows of many short ones would else come in a row.
            order = Permutation(len(rows), (self._seed, epoch, group))(np.arange(len(rows)))
            rows = [rows[int(i)] for i in order]
        return rows

    def _useful(self, documents: Integers) -> Bools:
        """Which documents have a place for an anchor in their first `row_tokens`."""
        return self.prepared.firsts(documents) + 2 <= self.row_tokens
