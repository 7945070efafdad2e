"""TensorBoard's events of a run: `tensorboard --logdir RUN_DIR/events` draws what metrics.jsonl holds.

The files are written here and not by torch's SummaryWriter: that one writes from a thread of its own, in which a full
disk is an error that nobody sees, and names its files by the second, so that of two starts within one the later may be
read first. Only tensorboard's own records and messages are used; TensorFlow is not needed.
"""

# tensorboard has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# pyright: reportMissingImports=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import time
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from trainer.records import StepRecord


class Events:
    """The events of one training. What goes wrong here is said once, and the training goes on without."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._first = 1  # step from which on the events of earlier starts no longer count
        self._file: Path | None = None
        self._encode: Callable[..., bytes] | None = None
        self._over = False  # can't be written; has been said

    def resume(self, step: int) -> None:
        """What comes is behind `step`; later events of an earlier start no longer count.

        Loads tensorboard, before other threads run: see threads.py.
        """
        self._first, self._file = step + 1, None
        try:
            self._encode = encoder()
        except ImportError:
            self._give_up("no TensorBoard events are written: the package tensorboard is not installed")

    def write(self, record: StepRecord) -> None:
        """Adds a step's figures."""
        if self._encode is None and not self._over:
            self.resume(self._first - 1)
        if self._encode is None or self._over:
            return
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars(record).items()]
        content = self._encode(step=record.step, summary={"value": values})
        try:
            if self._file is None:
                self._file = self._next_file()
                start = self._encode(step=self._first, session_log={"status": "START"})
                content = self._encode(file_version="brain.Event:2") + start + content
            with self._file.open("ab") as file:
                file.write(content)
        except OSError as error:
            self._give_up(f"no more TensorBoard events are written to {self._folder}: {error.strerror or error}")

    def _next_file(self) -> Path:
        """The name of a file that is read after those that are there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = (path.name.rpartition(".")[2] for path in self._folder.glob("events.out.tfevents.*"))
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return self._folder / f"events.out.tfevents.{last + 1:06d}"

    def _give_up(self, why: str) -> None:
        self._over = True
        self._say(why)


def scalars(record: StepRecord) -> dict[str, float]:
    """What is drawn of a step, by tag; what a record doesn't have is left out."""
    found: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/accuracy": record.accuracy,
        "train/acceptance": record.accept,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/skipped_steps": record.skipped,
        "heldout/loss": record.heldout_loss,
        "heldout/acceptance": record.heldout_accept,
        "heldout/acceptance_by_cycle": record.heldout_cycle_accept,
        "decoded/acceptance": record.decoded_accept,
        "decoded/acceptance_micro": record.decoded_accept_micro,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/memory_mib": record.memory_mib,
    }
    found |= {
        f"accuracy_by_slot/{slot:02d}": share for slot, share in enumerate(record.accuracy_by_slot or (), start=1)
    }
    cycles = record.decoded_histogram or {}
    found |= {f"decoded_cycles/{tau:02d}": count / sum(cycles.values()) for tau, count in cycles.items()}
    found |= {f"queue/{name}": waiting for name, waiting in (record.queues or {}).items()}
    for name, seconds in (record.workers or {}).items():
        if total := seconds.working + seconds.waiting:
            found[f"waiting/{name}"] = seconds.waiting / total
    return {tag: float(value) for tag, value in found.items() if value is not None}


def encoder() -> Callable[..., bytes]:
    """What makes one event of now, by its fields, into a record of an event file. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's, about its own libraries
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

    def encode(**fields: Any) -> bytes:
        record = BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        return record.getvalue()

    return encode
