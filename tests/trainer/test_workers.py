"""How busy the workers are said to be."""

from typing import cast

import pytest

from trainer import workers
from trainer.busy import Busy, DeviceClock
from trainer.layout import Layout
from trainer.records import WorkerSeconds
from trainer.workers import Meter


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.device, self.thread, self.skips = Busy(), Busy(), 0

    def read(self) -> Busy:
        return self.device

    def skip(self) -> None:
        self.skips += 1

    def add(self, device: Busy, thread: Busy) -> None:
        self.device, self.thread = self.device + device, self.thread + thread


def meter_of(target: Hand, drafter: Hand) -> Meter:
    return Meter(
        Layout((("cuda:0",),), ("cuda:1",)),
        {"target": cast(DeviceClock, target)},
        {"drafter": cast(DeviceClock, drafter)},
        queues=lambda: {"source": 1, "target": 2},
        threads=lambda: {"target": target.thread, "drafter": drafter.thread},
        most_drafters=4,
    )


def test_seconds_are_those_since_the_record_before() -> None:
    target, drafter = Hand(), Hand()
    target.add(Busy(5, 5), Busy(1, 2, 3))  # before the training
    meter = meter_of(target, drafter)
    target.add(Busy(3, 1), Busy(1, 0, 3))
    drafter.add(Busy(2, 2), Busy(1, 3))
    load = meter.load()
    assert load.queues == {"source": 1, "target": 2}
    assert load.workers == {
        "target": WorkerSeconds(working=3, waiting=1),
        "drafter": WorkerSeconds(working=2, waiting=2),
    }
    assert meter.load().workers["target"] == WorkerSeconds(working=0, waiting=0)
    target.add(Busy(), Busy(0, 4, 1))  # it got nothing to do
    assert meter.load().workers["target"] == WorkerSeconds(working=0, waiting=5)


def test_what_is_no_training_is_nobody_s_work_or_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that waits half its time for rows does so still when a long decoding, for which it had to wait for
    room, came in between."""
    said: list[Busy] = []
    monkeypatch.setattr(workers, "ADVICE_SECONDS", 0.0)

    def noted(targets: list[Busy], drafters: list[Busy], **more: object) -> str:
        said.append(targets[0])
        return "as it is"

    monkeypatch.setattr(workers, "advice", noted)
    target, drafter = Hand(), Hand()
    meter = meter_of(target, drafter)
    target.add(Busy(10, 10), Busy(5, 15, 0))
    with pytest.raises(OSError), meter.paused():
        target.add(Busy(7, 0), Busy(1, 0, 100))
        raise OSError  # a save that failed
    target.add(Busy(10, 10), Busy(5, 15, 0))
    load = meter.load()
    assert load.workers["target"] == WorkerSeconds(working=20, waiting=20)
    assert said == [Busy(20, 20, 0)] and load.advice == "as it is"
    assert target.skips == drafter.skips == 1
