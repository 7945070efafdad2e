"""Writes the records of a run: status.json, metrics.jsonl, and a line of log for each logged step."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.records import SCHEMA_VERSION, RunDir, Status, StepRecord, read_metrics, read_status


class Journal:
    """The records of one training. `say` prints a line of the log."""

    def __init__(self, run_dir: RunDir, total_steps: int, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
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

    def resume(self, step: int, first_loss: float | None, checkpoint: str | None) -> None:
        """Goes on after `step`: records of later steps, and a torn last line, go away, since these steps come again."""
        kept: list[StepRecord] = []
        if self._run_dir.metrics.exists():
            kept = [r for r in read_metrics(self._run_dir.metrics.read_bytes()) if r.step <= step]
            replace_file(self._run_dir.metrics, b"".join(_line(record) for record in kept))
        last = kept[-1] if kept else None
        measured = next((record for record in reversed(kept) if record.heldout_loss is not None), None)
        self.update(
            step=step,
            first_loss=first_loss,
            checkpoint=checkpoint,
            loss=last and last.loss,
            accept=last and last.accept,
            tokens_per_s=last and last.tokens_per_s,
            heldout_loss=measured and measured.heldout_loss,
            heldout_accept=measured and measured.heldout_accept,
        )

    def record(self, record: StepRecord) -> None:
        """Appends a step's figures to metrics.jsonl, brings status.json up to date, prints the line."""
        with self._run_dir.metrics.open("ab") as file:
            file.write(_line(record))
        measured = {"heldout_loss": record.heldout_loss, "heldout_accept": record.heldout_accept}
        self.update(
            state="training",
            step=record.step,
            loss=record.loss,
            first_loss=record.loss if self.status.first_loss is None else self.status.first_loss,
            accept=record.accept,
            tokens_per_s=record.tokens_per_s,
            **(measured if record.heldout_loss is not None else {}),
        )
        self._say(step_line(record, self.status.total_steps))


class Clock:
    """Time and tokens since the training began, and since the record before."""

    def __init__(self) -> None:
        self._began = self._lap = time.monotonic()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def lap(self) -> float:
        """Tokens per second since the last call."""
        here = time.monotonic()
        speed = self._tokens / max(here - self._lap, 1e-9)
        self._lap, self._tokens = here, 0
        return speed


def step_line(record: StepRecord, total_steps: int) -> str:
    """The log's line for a step."""
    line = (
        f"step {record.step}/{total_steps} loss {record.loss:.4f} accept {record.accept:.2f} "
        f"lr {record.lr:.1e} {record.tokens_per_s:.0f} tok/s"
    )
    if record.heldout_loss is not None:
        line += f" | held-out loss {record.heldout_loss:.4f} accept {record.heldout_accept:.2f}"
    return line


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def replace_file(path: Path, content: bytes) -> None:
    building = path.with_name(f".{path.name}.tmp")
    building.write_bytes(content)
    building.replace(path)


def _line(record: StepRecord) -> bytes:
    return record.model_dump_json(exclude_none=True).encode() + b"\n"
