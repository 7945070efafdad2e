"""The drafter on data that it doesn't learn from."""

# tolist is partly untyped.
# pyright: reportUnknownMemberType=false

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from trainer.acceptance import summarise
from trainer.features import FeatureBatch
from trainer.learner import Learner, Measured
from trainer.loss import LossTerms


@dataclass(frozen=True)
class HeldoutFigures:
    """Over every place in the answers that a block can start at; nan where there is none."""

    loss: float
    accept: float  # acceptance length, teacher-forced, bonus token included
    cycle_accept: float  # tokens a cycle of a walk through each answer, bonus token included, mean over the answers


def heldout_figures(learner: Learner, batches: Iterable[FeatureBatch], stop: threading.Event) -> HeldoutFigures | None:
    """Measures all held-out batches; None when `stop` cut the measurement."""
    total: LossTerms | None = None
    answers: list[list[int]] = []
    before: Measured | None = None
    for batch in batches:
        if stop.is_set():
            return None
        measured = learner.measure_all(batch)
        total = measured.terms if total is None else total + measured.terms
        if before:  # one batch late: the device has this one to do meanwhile
            answers += before.answers()
        before = measured
    assert total is not None and before is not None, "held-out data has at least one row"
    answers += before.answers()
    loss, _, accept = cast(list[float], total.figures().tolist())
    return HeldoutFigures(loss, accept, summarise(answers).macro)
