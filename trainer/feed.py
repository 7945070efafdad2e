"""Which rows each step learns from, and which are measured when: the plan that makes a training repeatable."""

# torch leaves `from_numpy` untyped.
# pyright: reportUnknownMemberType=false

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.blocks import anchor_candidates, sample_anchors
from trainer.config import TrainConfig
from trainer.data import Cursor, Row, Rows, make_row
from trainer.features import RowBatch
from trainer.prepared import Prepared

NAMED = 6  # places that a message names

T = TypeVar("T")

Anchors = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]  # of a row: anchors and keep


@dataclass(frozen=True)
class StepSource:
    """Where a step's rows come from."""

    step: int
    rows: tuple[int, ...]  # their numbers
    lines: tuple[tuple[int, ...], ...]  # of each row the lines of its documents in the source
    after: Cursor  # of the row behind them
    prepared: Prepared

    def __str__(self) -> str:
        """For an error: the rows and the first of their lines."""
        lines = [line for row in self.lines for line in row]
        named = ", ".join(self.prepared.place(line) for line in lines[:NAMED])
        more = f" and {len(lines) - NAMED} more lines" if len(lines) > NAMED else ""
        return f"step {self.step}: rows {self.rows[0]}-{self.rows[-1]} ({named}{more})"


class Feed:
    """The batches of a training. Those to learn from all have the same shape: `micro_rows` rows and `anchors` anchors.

    Of a step's rows, drafter r of R learns from those at r, r + R, r + 2R, ..., in batches of `micro_rows`; a last one
    that isn't full is filled up with rows of padding. Batches come in turn for all drafters. Held-out ones hold all
    anchors that their rows have, so many that they are a multiple of `anchors`.

    Raises DataError when there is nothing to learn from within a row.
    """

    def __init__(self, config: TrainConfig, train: Prepared, heldout: Prepared | None, replicas: int = 1) -> None:
        """replicas: drafters that share the rows."""
        settings = config.train
        self._row_tokens = config.data.row_tokens
        self._steps, self._eval_every = settings.steps, settings.eval_every
        self._anchors, self._seed = settings.anchors, settings.seed
        self._train = train
        self.rows = Rows(train, row_tokens=self._row_tokens, seed=settings.seed, shuffle=config.data.shuffle)
        self._held = Rows(heldout, row_tokens=self._row_tokens, seed=0, shuffle=False) if heldout else None
        self._replicas = replicas
        self._rows_per_step = settings.rows_per_step
        self.micro_rows = settings.micro_rows or -(-settings.rows_per_step // replicas)
        self.batches_per_step = len(list(self._shared_out(range(settings.rows_per_step))))
        self.heldout_batches = -(-self._held.epoch_rows() // self.micro_rows) if self._held else 0
        self._sources: dict[int, StepSource] = {}

    @property
    def report(self) -> tuple[str, ...]:
        """What is cut and left out for the rows' length, and how full they are; one line each."""
        return self.rows.report + (self._held.report if self._held else ())

    def batches(self, done: int, cursor: Cursor, *, measured: bool = True) -> Iterator[RowBatch]:
        """All that comes after `done` steps, from a cursor on: a step's batches, then the held-out ones when due.

        measured: False: those that were due after the last step that is done come first.
        """
        if not measured:
            yield from self._heldout()
        for step in range(done + 1, self._steps + 1):
            rows: list[Row] = []
            for _ in range(self._rows_per_step):
                row, cursor = self.rows.row(cursor)
                rows.append(row)
            # Known before the step's first batch is handed out, to whichever thread.
            self._sources[step] = StepSource(
                step, tuple(row.number for row in rows), tuple(row.lines for row in rows), cursor, self._train
            )
            for replica, own in self._shared_out(rows):
                yield replace(row_batch(self._filled_up(own), self._anchors, self._seed), replica=replica)
            if self.measures_after(step):
                yield from self._heldout()

    def source(self, step: int) -> StepSource:
        """Where a step's rows come from, once its first batch is there. Forgets the steps before it.

        How many there are is up to how far the threads work ahead, so it is the reader who says what is over.
        """
        for earlier in [known for known in list(self._sources) if known < step]:
            del self._sources[earlier]
        return self._sources[step]

    def measures_after(self, step: int) -> bool:
        """Whether the held-out data is measured after a step: each `eval_every` steps, and at the end."""
        due = step == self._steps or (self._eval_every > 0 and step % self._eval_every == 0)
        return due and self._held is not None

    def _shared_out(self, rows: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
        """A step's batches: whose each is, and its rows; first one for each drafter, then a second one, ..."""
        shares = [rows[replica :: self._replicas] for replica in range(self._replicas)]
        for start in range(0, len(shares[0]), self.micro_rows):  # the first has the most
            for replica, share in enumerate(shares):
                if own := share[start : start + self.micro_rows]:
                    yield replica, own

    def _filled_up(self, rows: Sequence[Row]) -> list[Row]:
        return [*rows, *[make_row(0, [], self._row_tokens)] * (self.micro_rows - len(rows))]

    def _heldout(self) -> Iterator[RowBatch]:
        """All held-out rows, a batch for each drafter in turn."""
        assert self._held is not None
        left, turns = self._held.once(), itertools.cycle(range(self._replicas))
        while rows := list(itertools.islice(left, self.micro_rows)):
            yield replace(all_anchors_batch(self._filled_up(rows), self._anchors), replica=next(turns))


def row_batch(rows: Sequence[Row], anchors: int, seed: int) -> RowBatch:
    """Rows as tensors on the CPU, with the anchors that seed and row number draw."""
    return _batch(rows, [sample_anchors(row.loss_mask, row.document_ids, anchors, [seed, row.number]) for row in rows])


def all_anchors_batch(rows: Sequence[Row], multiple: int) -> RowBatch:
    """Rows as tensors on the CPU with every anchor they have, filled up to a multiple of `multiple`."""
    found = [np.flatnonzero(anchor_candidates(row.loss_mask, row.document_ids)) for row in rows]
    width = max(1, -(-max(map(len, found)) // multiple)) * multiple
    filled = [np.pad(anchors.astype(np.int64), (0, width - len(anchors))) for anchors in found]
    return _batch(rows, [(anchors, np.arange(width) < len(own)) for anchors, own in zip(filled, found, strict=True)])


def _batch(rows: Sequence[Row], anchors: Sequence[Anchors]) -> RowBatch:
    def stack(arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))

    return RowBatch(
        stack([row.ids for row in rows]),
        stack([row.loss_mask for row in rows]),
        stack([row.document_ids for row in rows]),
        stack([row.positions for row in rows]),
        stack([chosen for chosen, _ in anchors]),
        stack([keep for _, keep in anchors]),
        numbers=tuple(row.number for row in rows),
        lines=tuple(row.lines for row in rows),
    )
