"""The drafter on data that it doesn't learn from."""

# tolist is partly untyped.
# pyright: reportUnknownMemberType=false

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from trainer.acceptance import summarise
from trainer.features import FeatureBatch
from trainer.learner import Measured
from trainer.loss import LossTerms


@dataclass(frozen=True)
class HeldoutFigures:
    """Over every place in the answers that a block can start at; nan where there is none."""

    loss: float
    accept: float  # acceptance length, teacher-forced, bonus token included
    cycle_accept: float  # tokens a cycle of a walk through each answer, bonus token included, mean over the answers


class Measures(Protocol):
    """A Learner, or Replicas."""

    def measure_all(self, batch: FeatureBatch) -> Measured: ...


def heldout_figures(
    drafters: Measures, batches: Iterable[FeatureBatch], stop: threading.Event, *, late: int = 1
) -> HeldoutFigures | None:
    """Measures all held-out batches; None when `stop` cut the measurement.

    late: how many batches are queued before the answers of the first are waited for: one for each drafter, so that all
    have something to do. Sums are made in the batches' order, whoever measures them.
    """
    total: LossTerms | None = None
    answers: list[list[int]] = []
    waiting: deque[Measured] = deque()
    for batch in batches:
        if stop.is_set():
            return None
        measured = drafters.measure_all(batch)
        total = measured.terms if total is None else total + measured.terms
        waiting.append(measured)
        if len(waiting) > late:
            answers += waiting.popleft().answers()
    assert total is not None, "held-out data has at least one row"
    for measured in waiting:
        answers += measured.answers()
    loss, _, accept = cast(list[float], total.figures().tolist())
    return HeldoutFigures(loss, accept, summarise(answers).macro)
