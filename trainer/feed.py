"""Which rows each step learns from, and which are measured when: the plan that makes a training repeatable."""

# torch leaves `from_numpy` untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.blocks import sample_anchors
from trainer.config import TrainConfig
from trainer.data import Documents, Row, Rows, make_row
from trainer.features import RowBatch

HELDOUT_SEED = 2**31  # held-out rows have anchors of their own, the same at each measurement


class Feed:
    """The batches of a training. All have the same shape: `micro_rows` rows."""

    def __init__(self, config: TrainConfig, train: Documents, heldout: Documents | None) -> None:
        settings = config.train
        self._row_tokens = config.data.row_tokens
        self._steps, self._eval_every = settings.steps, settings.eval_every
        self._anchors, self._seed = settings.anchors, settings.seed
        self.rows = Rows(train, row_tokens=self._row_tokens, seed=settings.seed, shuffle=config.data.shuffle)
        self.micro_rows = settings.micro_rows or settings.rows_per_step
        self.batches_per_step = settings.rows_per_step // self.micro_rows
        self._heldout = self._batches(rows_once(heldout, self._row_tokens)) if heldout else []
        self.heldout_batches = len(self._heldout)

    def batches(self, done: int, row: int) -> Iterator[RowBatch]:
        """All that comes after `done` steps, from `row` on: a step's batches, then the held-out ones when due."""
        for step in range(done + 1, self._steps + 1):
            for _ in range(self.batches_per_step):
                yield self.learning_batch(row)
                row += self.micro_rows
            if self.measures_after(step):
                yield from self._heldout

    def learning_batch(self, row: int) -> RowBatch:
        """The rows from number `row` on."""
        rows = [self.rows.row(number) for number in range(row, row + self.micro_rows)]
        return row_batch(rows, self._anchors, self._seed)

    def measures_after(self, step: int) -> bool:
        """Whether the held-out data is measured after a step: each `eval_every` steps, and at the end."""
        due = step == self._steps or (self._eval_every > 0 and step % self._eval_every == 0)
        return due and bool(self._heldout)

    def _batches(self, rows: Sequence[Row]) -> list[RowBatch]:
        """All rows; the last batch is filled up with rows of padding, since the shapes are static."""
        padding = make_row(0, [], self._row_tokens)
        cut = [list(rows[start : start + self.micro_rows]) for start in range(0, len(rows), self.micro_rows)]
        filled = [batch + [padding] * (self.micro_rows - len(batch)) for batch in cut]
        return [row_batch(batch, self._anchors, HELDOUT_SEED) for batch in filled]


def rows_once(documents: Documents, row_tokens: int) -> list[Row]:
    """All documents once, as rows."""
    rows = Rows(documents, row_tokens=row_tokens, seed=0, shuffle=False)
    return [rows.row(number) for number in range(rows.epoch_rows())]


def row_batch(rows: Sequence[Row], anchors: int, seed: int) -> RowBatch:
    """Rows as tensors on the CPU, with the anchors that seed and row number draw."""
    drawn = [sample_anchors(row.loss_mask, row.document_ids, anchors, [seed, row.number]) for row in rows]

    def stack(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))

    return RowBatch(
        stack([row.ids for row in rows]),
        stack([row.loss_mask for row in rows]),
        stack([row.document_ids for row in rows]),
        stack([row.positions for row in rows]),
        stack([anchors for anchors, _ in drawn]),
        stack([keep for _, keep in drawn]),
    )
