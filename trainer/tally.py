"""The steps of a training as they are told: figures read, skipped steps counted, records written.

On a GPU a step's figures are read one step late, so that nothing waits for the device while it has work queued; before
a measurement, a checkpoint and the end they are read at once. On the CPU there is nothing to wait for.
"""

# torch's memory functions are partly untyped.
# pyright: reportUnknownMemberType=false

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.acceptance import CycleFigures
from trainer.checkpoint import Progress
from trainer.feed import StepSource
from trainer.heldout import HeldoutFigures
from trainer.journal import Clock, Journal, now
from trainer.learner import Figures, StepFigures
from trainer.records import StepRecord, WorkerSeconds
from trainer.start import Say, TrainingError

MOST_SKIPPED_IN_A_ROW = 5  # as many steps that are not finite stop the training


@dataclass(frozen=True)
class Step:
    """A step that was taken; its figures may still be on their way."""

    source: StepSource  # its number, and which rows it learned from
    lr: float
    tokens: int
    figures: StepFigures
    heldout: HeldoutFigures | None = None  # measured after it
    decoded: CycleFigures | None = None  # by real decoding after it


@dataclass(frozen=True)
class Load:
    """How busy the workers are."""

    queues: dict[str, int]  # batches that each stage has made and nobody has taken yet
    workers: dict[str, WorkerSeconds]  # since it was asked for the last time
    advice: str | None = None  # what would make the training faster


class Tally:
    """Reads the figures of steps in their order."""

    def __init__(
        self,
        journal: Journal,
        *,
        devices: Sequence[torch.device],
        log_every: int,
        load: Callable[[], Load],
        skipped: int = 0,
        skipped_in_a_row: Sequence[str] = (),
        say: Say,
    ) -> None:
        """devices: whose memory is told, a drafter's first. load: asked once for each record.

        skipped, skipped_in_a_row: as Progress has them.
        """
        self.skipped, self.skipped_in_a_row = skipped, tuple(skipped_in_a_row)
        self._journal, self._devices, self._log_every, self._say = journal, devices, log_every, say
        self._load = load
        self._late = 1 if devices[0].type == "cuda" else 0
        self._waiting: deque[Step] = deque()
        self._clock = Clock()

    def paused(self) -> AbstractContextManager[None]:
        """For measuring and saving, once all is settled: not counted in tokens per second."""
        return self._clock.paused()

    def add(self, step: Step) -> None:
        """Takes a step, and settles those that it is time for."""
        self._waiting.append(step)
        self.settle(leave=self._late)

    def settle(self, leave: int = 0) -> None:
        """Reads the figures of all steps but the last `leave`, and waits for them.

        Raises TrainingError when five in a row were skipped.
        """
        while len(self._waiting) > leave:
            step = self._waiting.popleft()
            figures = step.figures.read()
            self._clock.add(step.tokens)
            self._count(step, figures)
            is_last = step.source.step == self._journal.status.total_steps
            told = (
                step.source.step % self._log_every == 0
                or step.source.step == 1
                or is_last
                or step.heldout
                or step.decoded
            )
            if told or not figures.finite:
                self._tell(step, figures)
            if len(self.skipped_in_a_row) >= MOST_SKIPPED_IN_A_ROW:
                raise TrainingError(
                    f"{len(self.skipped_in_a_row)} steps in a row had a loss or gradient that is not finite: "
                    f"{'; '.join(self.skipped_in_a_row)}. Look at these rows, or go on from the last checkpoint with "
                    f"a lower train.lr"
                )

    def noted(self, done: Progress) -> Progress:
        """The progress of a checkpoint after the last settled step."""
        first_loss = self._journal.status.first_loss
        more = {"first_loss": first_loss, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return done.model_copy(update=more)

    def _count(self, step: Step, figures: Figures) -> None:
        if figures.finite:
            self.skipped_in_a_row = ()
            return
        self.skipped += 1
        self.skipped_in_a_row += (str(step.source),)
        self._say(f"loss {figures.loss}, gradient norm {figures.grad_norm} at {step.source}")

    def _tell(self, step: Step, figures: Figures) -> None:
        load = self._load()
        self._journal.record(self._record(step, figures, load))
        if load.advice != self._journal.status.advice:
            self._journal.update(advice=load.advice)
            if load.advice:
                self._say(load.advice)

    def _record(self, step: Step, figures: Figures, load: Load) -> StepRecord:
        learned = figures.finite
        return StepRecord(
            step=step.source.step,
            loss=number(figures.loss) if learned else None,
            accuracy=number(figures.accuracy) if learned else None,
            accuracy_by_slot=tuple(figures.accuracy_by_slot) if learned else None,
            accept=number(figures.accept) if learned else None,
            lr=step.lr,
            grad_norm=number(figures.grad_norm) if learned else None,
            skipped=self.skipped,
            tokens=step.tokens,
            tokens_per_s=self._clock.lap(),
            queues=load.queues,
            workers=load.workers,
            memory_mib=memory_mib(self._devices),
            seconds=self._clock.seconds(),
            time=now(),
            **measured_figures(step.heldout, step.decoded),
        )


def measured_figures(heldout: HeldoutFigures | None, decoded: CycleFigures | None) -> dict[str, Any]:
    """What a record tells of what was measured after its step."""
    return {
        "heldout_loss": heldout and number(heldout.loss),
        "heldout_accept": heldout and number(heldout.accept),
        "heldout_cycle_accept": heldout and number(heldout.cycle_accept),
        "decoded_accept": decoded and number(decoded.macro),
        "decoded_accept_micro": decoded and number(decoded.micro),
        "decoded_histogram": decoded and decoded.histogram,
    }


def number(value: float) -> float | None:
    """None for what is no number: JSON has neither nan nor infinity."""
    return value if math.isfinite(value) else None


def memory_mib(devices: Sequence[torch.device]) -> float | None:
    """The most memory that torch has had allocated on one of the GPUs; without a GPU the most that the process held."""
    gpus = {device for device in devices if device.type == "cuda"}
    if gpus:
        return max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:")), None)
