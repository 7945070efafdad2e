"""When a step's figures are read: on a GPU one step late, elsewhere at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from trainer import journal as journal_module
from trainer import tally as module
from trainer.checkpoint import Progress
from trainer.data import Cursor
from trainer.feed import StepSource
from trainer.heldout import HeldoutFigures
from trainer.journal import Journal
from trainer.learner import Figures, StepFigures
from trainer.prepared import Prepared
from trainer.records import RunDir, WorkerSeconds, read_metrics, read_status
from trainer.start import TrainingError
from trainer.tally import Load, Step, Tally

DATA = cast(Prepared, SimpleNamespace(place=lambda line: f"data:{line}"))  # pyright: ignore[reportUnknownLambdaType]


class Fake:
    """A step's figures that note when they are read."""

    def __init__(self, number: int, read: list[int], *, finite: bool = True) -> None:
        self._number, self._read, self._finite = number, read, finite

    def read(self) -> Figures:
        self._read.append(self._number)
        return Figures(float(self._number), 0.5, 1.5, 1.0, self._finite, [0.5, None])


class Bench:
    """A tally of ten steps on a GPU that isn't there."""

    def __init__(self, folder: Path, device: str = "cuda", **more: object) -> None:
        self.read: list[int] = []
        self.lines: list[str] = []
        self.run = RunDir(folder)
        self.journal = Journal(self.run, 10, self.lines.append)
        self.advice: str | None = None
        self.tally = Tally(
            self.journal, devices=[torch.device(device)], log_every=3, say=self.lines.append, load=self.load, **more
        )  # pyright: ignore[reportArgumentType]

    def load(self) -> Load:
        return Load({"source": 1, "target": 2}, {"target": WorkerSeconds(working=3.0, waiting=1.0)}, self.advice)

    def add(self, number: int, *, finite: bool = True, heldout: HeldoutFigures | None = None) -> None:
        source = StepSource(number, (number - 1,), ((number,),), Cursor(row=number), DATA)
        figures = cast(StepFigures, Fake(number, self.read, finite=finite))
        self.tally.add(Step(source, 1e-3, 100, figures, heldout))

    def told(self) -> list[int]:
        return [record.step for record in read_metrics(self.run.metrics.read_bytes())]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_mib", lambda devices: 12.5)  # pyright: ignore[reportUnknownLambdaType]


def test_on_a_gpu_a_step_is_read_once_the_next_is_queued(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(1, 5):
        bench.add(number)
        assert bench.read == list(range(1, number))
    bench.tally.settle()
    assert bench.read == [1, 2, 3, 4]
    assert bench.told() == [1, 3]


def test_what_is_measured_or_saved_between_two_records_does_not_count_in_their_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 100 tokens takes a second; after the 2nd 50 seconds are measured, after the 3rd 20 are saved."""
    now = [0.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])
    bench = Bench(tmp_path, "cpu")
    for number in range(1, 7):
        now[0] += 1.0
        heldout = HeldoutFigures(4.0, 1.25, 1.5) if number == 2 else None
        if heldout:
            with bench.tally.paused():
                now[0] += 50.0
        bench.add(number, heldout=heldout)
        if number == 3:
            with pytest.raises(OSError), bench.tally.paused():
                now[0] += 20.0
                raise OSError
    records = read_metrics(bench.run.metrics.read_bytes())
    assert [(record.step, record.tokens_per_s) for record in records] == [(1, 100), (2, 100), (3, 100), (6, 100)]
    assert [record.seconds for record in records] == [1, 52, 53, 76]


def test_on_the_cpu_a_step_is_read_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cpu")
    for number in range(1, 4):
        bench.add(number)
        assert bench.read == list(range(1, number + 1))


def test_the_first_the_last_a_measured_and_a_skipped_step_are_told_in_any_case(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(1, 11):
        heldout = HeldoutFigures(4.0, 1.25, 1.5) if number == 5 else None
        bench.add(number, finite=number != 7, heldout=heldout)
    bench.tally.settle()
    assert bench.told() == [1, 3, 5, 6, 7, 9, 10]
    record = read_metrics(bench.run.metrics.read_bytes())[2]
    assert (record.loss, record.heldout_loss, record.heldout_accept, record.heldout_cycle_accept) == (5, 4, 1.25, 1.5)
    assert (record.queues, record.memory_mib, record.tokens) == ({"source": 1, "target": 2}, 12.5, 100)
    assert record.workers == {"target": WorkerSeconds(working=3.0, waiting=1.0)}
    assert record.accuracy_by_slot == (0.5, None) and record.tokens_per_s > 0
    skipped = read_metrics(bench.run.metrics.read_bytes())[4]
    assert (skipped.step, skipped.skipped, skipped.lr, skipped.tokens) == (7, 1, 1e-3, 100)
    assert skipped.loss is skipped.accuracy is skipped.accuracy_by_slot is skipped.accept is skipped.grad_norm is None


def test_five_skipped_steps_are_an_error_as_soon_as_the_fifth_is_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(1, 6):
        bench.add(number, finite=False)
    with pytest.raises(TrainingError, match=r"5 steps in a row .*: step 1: .*; step 5: ") as caught:
        bench.add(6)
    assert bench.read == [1, 2, 3, 4, 5] and bench.told() == [1, 2, 3, 4, 5]
    assert "data:5" in str(caught.value)


def test_steps_skipped_before_a_resume_count_and_a_good_one_begins_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cpu", skipped=7, skipped_in_a_row=["step 1: x", "step 2: x", "step 3: x"])
    bench.add(4, finite=False)
    noted = bench.tally.noted(Progress(step=4, row=4, data_digest=""))
    assert noted.skipped == 8 and len(noted.skipped_in_a_row) == 4 and noted.first_loss is None
    bench.add(6)
    noted = bench.tally.noted(Progress(step=6, row=6, data_digest=""))
    assert (noted.skipped, noted.skipped_in_a_row, noted.first_loss) == (8, (), 6.0)


def test_the_process_memory_is_told_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = module.memory_mib([torch.device("cpu")])
    held = torch.ones(64, 2**20, dtype=torch.uint8)
    after = module.memory_mib([torch.device("cpu")])
    assert before is not None and after is not None and before > 10
    assert after >= before and held.numel() == 64 * 2**20


def test_advice_is_said_when_it_changes_and_kept_in_the_status(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cpu")
    for number, advice in enumerate([None, None, "add a target", "add a target", "add a target", None, "raise"], 1):
        bench.advice = advice
        bench.add(number, finite=number not in (3, 4))
        status = read_status(bench.run.status.read_bytes())
        expected = {1: None, 2: None, 6: None, 7: None}.get(number, "add a target")
        assert status is not None and status.advice == expected
    assert [line for line in bench.lines if line in ("add a target", "raise")] == ["add a target"]
