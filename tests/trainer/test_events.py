"""TensorBoard's events, read back by tensorboard's own reader."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_journal import record

from trainer.events import Events


def silent(line: str) -> None:
    raise AssertionError(line)


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard shows them."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_everything_of_a_record_is_drawn(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "accuracy_by_slot": (0.75, None, 0.25),
        "skipped": 2,
        "queues": {"source": 2, "target": 1},
        "memory_mib": 1000.0,
        "heldout_loss": 4.5,
        "heldout_accept": 1.25,
        "heldout_cycle_accept": 1.5,
        "decoded_accept": 1.75,
        "decoded_accept_micro": 1.25,
        "decoded_histogram": {1: 3, 12: 1},
    }
    events = Events(tmp_path / "events", silent)
    events.write(record(7, loss=4.0).model_copy(update=changes))
    assert read_back(tmp_path / "events") == {
        "train/loss": [(7, 4.0)],
        "train/accuracy": [(7, 0.5)],
        "train/acceptance": [(7, 1.5)],
        "train/grad_norm": [(7, 1.0)],
        "train/lr": [(7, pytest.approx(6e-4))],
        "train/skipped_steps": [(7, 2.0)],
        "heldout/loss": [(7, 4.5)],
        "heldout/acceptance": [(7, 1.25)],
        "heldout/acceptance_by_cycle": [(7, 1.5)],
        "decoded/acceptance": [(7, 1.75)],
        "decoded/acceptance_micro": [(7, 1.25)],
        "decoded_cycles/01": [(7, 0.75)],
        "decoded_cycles/12": [(7, 0.25)],
        "speed/tokens_per_s": [(7, 1234.0)],
        "speed/memory_mib": [(7, 1000.0)],
        "accuracy_by_slot/01": [(7, 0.75)],
        "accuracy_by_slot/03": [(7, 0.25)],
        "queue/source": [(7, 2.0)],
        "queue/target": [(7, 1.0)],
    }


def test_a_skipped_step_draws_no_loss(tmp_path: Path) -> None:
    events = Events(tmp_path, silent)
    skipped = {"loss": None, "accuracy": None, "accept": None, "grad_norm": None, "skipped": 1}
    for step in (1, 2, 3):
        events.write(record(step).model_copy(update=skipped if step == 2 else {}))
    shown = read_back(tmp_path)
    assert [step for step, _ in shown["train/loss"]] == [1, 3]
    assert shown["train/skipped_steps"] == [(1, 0.0), (2, 1.0), (3, 0.0)]


def test_repeated_steps_are_drawn_once_however_often_a_run_starts(tmp_path: Path) -> None:
    for start in range(12):  # more than nine: files are read in the order of their names
        events = Events(tmp_path, silent)
        events.resume(start)
        for step in range(start + 1, start + 4):
            events.write(record(step, loss=100 * start + step))
    expected = [(step, 100.0 * min(step - 1, 11) + step) for step in range(1, 15)]
    assert read_back(tmp_path)["train/loss"] == expected


def test_a_torn_end_of_a_killed_start_hides_nothing_that_comes_after(tmp_path: Path) -> None:
    events = Events(tmp_path, silent)
    for step in (1, 2, 3):
        events.write(record(step))
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 5)
    again = Events(tmp_path, silent)
    again.resume(2)
    for step in (3, 4):
        again.write(record(step))
    assert [step for step, _ in read_back(tmp_path)["train/loss"]] == [1, 2, 3, 4]


def test_a_start_that_records_nothing_leaves_no_file(tmp_path: Path) -> None:
    Events(tmp_path / "events", silent).resume(5)
    assert not (tmp_path / "events").exists()


def test_a_folder_that_can_not_be_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    said: list[str] = []
    events = Events(tmp_path / "events", said.append)
    for step in (1, 2, 3):
        events.write(record(step))
    assert said == [f"no more TensorBoard events are written to {tmp_path / 'events'}: File exists"]


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    events = Events(tmp_path, said.append)
    events.write(record(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (file,) = tmp_path.iterdir()
    # Past this size a write fails, as on a full disk (Python ignores the signal that comes with it).
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, before[1]))
    try:
        for step in (2, 3, 4):
            events.write(record(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == [f"no more TensorBoard events are written to {tmp_path}: File too large"]
    assert read_back(tmp_path)["train/loss"] == [(1, 2.0)]


def test_without_tensorboard_a_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what makes an import of it fail
    said: list[str] = []
    events = Events(tmp_path / "events", said.append)
    for step in (1, 2):
        events.write(record(step))
    assert said == ["no TensorBoard events are written: the package tensorboard is not installed"]
    assert not (tmp_path / "events").exists()


WRITING = """
import sys
from trainer.events import Events
assert not [name for name in sys.modules if name.startswith("tensor")]
from pathlib import Path
from trainer.records import StepRecord
step = StepRecord(step=1, loss=1.0, lr=1.0, tokens=1, tokens_per_s=1.0, seconds=1.0, time="")
Events(Path(sys.argv[1]), print).write(step)
print(sorted({"tensorflow", "torch"} & set(sys.modules)))
"""


def test_it_is_imported_only_where_something_is_written_and_warns_of_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITING, str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "[]\n"
    assert read_back(tmp_path)["train/loss"] == [(1, 1.0)]
