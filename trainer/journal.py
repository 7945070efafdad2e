"""Writes the records of a run: status.json, metrics.jsonl, TensorBoard's events, a line of log for each logged step."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.events import Events
from trainer.records import SCHEMA_VERSION, RunDir, Status, StepRecord, read_metrics, read_status

HELDOUT = ("heldout_loss", "heldout_accept", "heldout_cycle_accept")  # always measured together


class Journal:
    """The records of one training. `say` prints a line of the log."""

    def __init__(self, run_dir: RunDir, total_steps: int, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._events = Events(run_dir.events, say)
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self.status = Status(state="starting", step=0, total_steps=total_steps, updated_at=now())
        # A run started again: until it resumes, what it had reached is still the truth.
        if run_dir.status.exists() and (before := read_status(run_dir.status.read_bytes())):
            self.status = before
        self.update(schema_version=SCHEMA_VERSION, state="starting", total_steps=total_steps, error=None)

    def update(self, **changes: Any) -> None:
        """Changes status.json, by rename: a reader never sees half of it."""
        self.status = Status.model_validate({**self.status.model_dump(), **changes, "updated_at": now()})
        replace_file(self._run_dir.status, self.status.model_dump_json(indent=2).encode())

    def goes_on_from(self, step: int) -> None:
        """Tells of the checkpoint's step before it is resumed from: a stop or an error may come first.

        A later step that this run has told of stays.
        """
        if self.status.step < step:
            self.update(step=step)

    def resume(self, step: int, first_loss: float | None, checkpoint: str | None, skipped: int = 0) -> None:
        """Goes on after `step`: records of later steps, and a torn last line, go away, since these steps come again."""
        kept: list[StepRecord] = []
        if self._run_dir.metrics.exists():
            kept = [r for r in read_metrics(self._run_dir.metrics.read_bytes()) if r.step <= step]
            replace_file(self._run_dir.metrics, b"".join(_line(record) for record in kept))
        self._events.resume(step)
        last = kept[-1] if kept else None
        learned = next((record for record in reversed(kept) if record.loss is not None), None)
        measured = next((record for record in reversed(kept) if record.heldout_loss is not None), None)
        decoded = next((record for record in reversed(kept) if record.decoded_accept is not None), None)
        self.update(
            step=step,
            first_loss=first_loss,
            checkpoint=checkpoint,
            loss=learned and learned.loss,
            accept=learned and learned.accept,
            tokens_per_s=last and last.tokens_per_s,
            heldout_loss=measured and measured.heldout_loss,
            heldout_accept=measured and measured.heldout_accept,
            heldout_cycle_accept=measured and measured.heldout_cycle_accept,
            decoded_accept=decoded and decoded.decoded_accept,
            skipped=skipped,
        )

    def amend(self, step: int, figures: Mapping[str, Any]) -> None:
        """Adds what was measured after a step to its record, which was written before. None there: it was not told."""
        if not self._run_dir.metrics.exists():
            return
        records = read_metrics(self._run_dir.metrics.read_bytes())
        if not records or records[-1].step != step:
            return
        records[-1] = StepRecord.model_validate({**records[-1].model_dump(), **figures})
        replace_file(self._run_dir.metrics, b"".join(_line(record) for record in records))
        self._events.write(records[-1])
        self.update(
            **{name: value for name, value in figures.items() if name in Status.model_fields and value is not None}
        )
        self._say(step_line(records[-1], self.status.total_steps))

    def record(self, record: StepRecord) -> None:
        """Appends a step's figures to metrics.jsonl and the events, brings status.json up to date, prints the line."""
        with self._run_dir.metrics.open("ab") as file:
            file.write(_line(record))
        self._events.write(record)
        # A skipped step has no figures: those of the last one that was learned from stay.
        learned = {"loss": record.loss, "accept": record.accept} if record.loss is not None else {}
        heldout = {name: getattr(record, name) for name in HELDOUT} if record.heldout_loss is not None else {}
        if record.decoded_accept is not None:
            heldout["decoded_accept"] = record.decoded_accept
        self.update(
            state="training",
            step=record.step,
            first_loss=record.loss if self.status.first_loss is None else self.status.first_loss,
            tokens_per_s=record.tokens_per_s,
            skipped=record.skipped,
            **learned,
            **heldout,
        )
        self._say(step_line(record, self.status.total_steps))


class Clock:
    """Time since the training began; time of training and tokens since the record before."""

    def __init__(self) -> None:
        self._began = self._lap = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """What is done meanwhile is no training: its time does not count in a lap."""
        before = time.monotonic()
        try:
            yield
        finally:
            self._lap += time.monotonic() - before

    def lap(self) -> float:
        """Tokens per second of training since the last call."""
        here = time.monotonic()
        speed = self._tokens / max(here - self._lap, 1e-9)
        self._lap, self._tokens = here, 0
        return speed


def step_line(record: StepRecord, total_steps: int) -> str:
    """The log's line for a step."""
    line = f"step {record.step}/{total_steps} "
    if record.loss is None:
        line += f"skipped ({record.skipped} so far): its loss or gradient is not finite, "
    else:
        line += f"loss {record.loss:.4f} accept {_figure(record.accept)} "
    line += f"lr {record.lr:.1e} {record.tokens_per_s:.0f} tok/s"
    if record.heldout_loss is not None:
        line += f" | held-out loss {record.heldout_loss:.4f} accept {_figure(record.heldout_accept)}"
    if record.heldout_cycle_accept is not None:
        line += f", {record.heldout_cycle_accept:.2f} a cycle"
    if record.decoded_accept is not None:
        line += f" | decoded {record.decoded_accept:.2f} a cycle, micro {_figure(record.decoded_accept_micro)}"
    if record.decoded_histogram:
        line += f" ({' '.join(f'{tau}:{count}' for tau, count in record.decoded_histogram.items())})"
    return line


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def replace_file(path: Path, content: bytes) -> None:
    building = path.with_name(f".{path.name}.tmp")
    building.write_bytes(content)
    building.replace(path)


def _line(record: StepRecord) -> bytes:
    return record.model_dump_json(exclude_none=True).encode() + b"\n"
