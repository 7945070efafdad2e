"""What a run's folder holds, as far as the trainer writes it. Imports neither torch nor transformers.

Readers may be older or newer than the writer: they ignore keys they don't know; `schema_version` says what they read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEMA_VERSION = 1

State = Literal["starting", "training", "stopped", "finished", "failed"]


class Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class Status(Record):
    """status.json: where the training stands. Loss and the like are None until the first step is logged."""

    schema_version: int = SCHEMA_VERSION
    state: State
    step: int
    """Steps done."""
    total_steps: int
    loss: float | None = None
    """Training loss of the last logged step that was not skipped."""
    first_loss: float | None = None
    """Training loss of the first such step of the whole training, resumed parts included."""
    accept: float | None = None
    """Acceptance length of that step, teacher-forced over the sampled anchors, bonus token included."""
    heldout_loss: float | None = None
    heldout_accept: float | None = None
    """The same two over all anchors of the held-out data, at their last measurement."""
    heldout_cycle_accept: float | None = None
    """Acceptance length of a walk through the held-out answers in decoding's cycles, at that measurement."""
    decoded_accept: float | None = None
    """Acceptance length of real decoding of held-out prompts, mean over the answers, at its last measurement."""
    skipped: int = 0
    """Steps of the whole training that changed nothing, because their loss or gradient was not finite."""
    tokens_per_s: float | None = None
    """Tokens per second since the record before (tokens as in StepRecord)."""
    advice: str | None = None
    """What would make the training faster, by what the workers waited for. None: nothing, or not known yet."""
    checkpoint: str | None = None
    """Name of the newest checkpoint in checkpoints/."""
    updated_at: str
    """RFC 3339, UTC."""
    error: str | None = None
    """Why the training failed, one line."""


class WorkerSeconds(Record):
    """What a worker's time went into. On a GPU it is the time of the worker's queue there, else that of its thread."""

    working: float
    waiting: float
    """For something to work on, or for room for what it made."""


class StepRecord(Record):
    """One line of metrics.jsonl: the figures of one step, not of the steps since the line before."""

    schema_version: int = SCHEMA_VERSION
    step: int
    """1 for the first."""
    loss: float | None = None
    """None, as accuracy, accept and grad_norm, for a step that was skipped: its loss or gradient was not finite."""
    accuracy: float | None = None
    """Share of supervised slots whose best token is the label."""
    accuracy_by_slot: tuple[float | None, ...] | None = None
    """The same for each slot of a block, from the one behind the anchor on; None for a slot that had no label."""
    accept: float | None = None
    """Acceptance length, teacher-forced over the sampled anchors, bonus token included: 1 to block."""
    lr: float
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping."""
    skipped: int = 0
    """Steps skipped so far, this one included."""
    tokens: int
    """Tokens of conversations, prompts included and padding not, that this step's rows held."""
    tokens_per_s: float
    """Such tokens per second, over the steps since the record before."""
    queues: dict[str, int] | None = None
    """Batches that each thread of the pipeline has made and nobody has taken yet."""
    workers: dict[str, WorkerSeconds] | None = None
    """Of each target worker and each drafter: seconds since the record before."""
    memory_mib: float | None = None
    """Most memory used so far: allocated by torch on the GPU; on the CPU the process's resident set."""
    seconds: float
    """Since this process began to train."""
    time: str
    """RFC 3339, UTC."""
    heldout_loss: float | None = None
    heldout_accept: float | None = None
    """Over all anchors of the held-out data, when it was measured after this step; acceptance teacher-forced."""
    heldout_cycle_accept: float | None = None
    """Tokens a cycle of a walk through the held-out answers (a -> a + accepted + 1), bonus token included: what
    decoding reaches where the answers are the target's own greedy ones."""
    decoded_accept: float | None = None
    """Tokens a cycle of real decoding of held-out prompts at temperature 0, bonus token included: mean over answers."""
    decoded_accept_micro: float | None = None
    """The same, mean over all cycles."""
    decoded_histogram: dict[int, int] | None = None
    """Tokens of a cycle -> cycles that gave as many."""


@dataclass(frozen=True)
class RunDir:
    """The files of a run."""

    path: Path

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def prepared(self) -> Path:
        return self.path / "prepared"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def read_status(content: bytes) -> Status | None:
    """A status.json; None when there is none to be read in it."""
    try:
        return Status.model_validate_json(content)
    except ValidationError:
        return None


def read_metrics(content: bytes) -> list[StepRecord]:
    """The whole lines of a metrics.jsonl; a torn last line, or one from a writer we don't understand, is left out."""
    records: list[StepRecord] = []
    for line in content.split(b"\n"):
        try:
            records.append(StepRecord.model_validate_json(line))
        except ValidationError:
            continue
    return records
