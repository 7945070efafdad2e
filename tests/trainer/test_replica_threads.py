"""The threads of replicas: the first error of any, room for batches, early ends, and what watches them."""

import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_learner import ROWS
from test_replicas import CPU, batch_of, learn, learners_of, workers_left

from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Learner, features_of
from trainer.replicas import Replicas
from trainer.target import TargetModel, load_target


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float32)


class Failure(Exception):
    pass


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_error_of_any_replica_is_raised_with_its_traceback_and_place(
    target: TargetModel, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners, own, told = learners_of(target, 3), Failure("this one"), list[tuple[str, BaseException]]()
    batches = [batch_of(target, learners[0], [row], n) for n, row in enumerate(ROWS[:3])]

    def broken(batch: FeatureBatch) -> None:
        raise own

    def failed(error: BaseException) -> None:
        told.append((threading.current_thread().name, error))
        raise RuntimeError("a diagnosis that fails itself")

    monkeypatch.setattr(learners[failing], "learn", broken)
    with pytest.raises(Failure) as raised, Replicas(learners, failed=failed) as replicas:
        for _ in range(3):  # sooner or later: the caller is told when it calls again
            for batch in batches:
                replicas.learn(batch)
        replicas.update(1e-2)
    assert raised.value is own and told == [(f"drafter-{failing}", own)]
    assert own.__notes__ == [f"raised in the worker drafter-{failing} (cpu)"]
    assert "broken" in [frame.name for frame in traceback.extract_tb(own.__traceback__)]
    assert workers_left() == [] and replicas.left_behind == []


def test_what_fails_because_all_is_stopping_is_not_told(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    learners, began, go = learners_of(target, 2), threading.Event(), threading.Event()
    told: list[BaseException] = []

    def fails_first(batch: FeatureBatch) -> None:
        assert began.wait(60)
        raise Failure("the first")

    def fails_later(batch: FeatureBatch) -> None:
        began.set()
        assert go.wait(60)
        raise Failure("a later one")

    monkeypatch.setattr(learners[1], "learn", fails_first)
    monkeypatch.setattr(learners[0], "learn", fails_later)
    with pytest.raises(Failure, match="the first"), Replicas(learners, failed=told.append) as replicas:
        replicas.learn(batch_of(target, learners[0], ROWS[:1], 0))
        replicas.learn(batch_of(target, learners[0], ROWS[:1], 1))
        try:
            replicas.update(1e-2)
        finally:
            go.set()
    assert [str(error) for error in told] == ["the first"] and workers_left() == []


def test_a_replica_has_one_batch_in_hand_and_one_waiting_and_leaving_early_drops_them(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners, go, began = learners_of(target, 2), threading.Event(), threading.Semaphore(0)
    learn_of, learned = Learner.learn, list[FeatureBatch]()

    def held(self: Learner, batch: FeatureBatch) -> None:
        began.release()
        assert go.wait(60)
        learned.append(batch)
        learn_of(self, batch)

    monkeypatch.setattr(Learner, "learn", held)
    batches = [batch_of(target, learners[0], ROWS[:1], n) for n in (0, 0, 0, 1)]

    def let_go() -> None:
        """When the block is being left."""
        end = time.monotonic() + 60
        while not replicas._closed and time.monotonic() < end:
            time.sleep(0.001)
        go.set()

    with Replicas(learners) as replicas:
        assert sorted(workers_left()) == ["drafter-0", "drafter-1"]
        replicas.learn(batches[0])
        assert began.acquire(timeout=60)
        replicas.learn(batches[1])
        third = threading.Thread(target=lambda: replicas.learn(batches[2]))
        third.start()
        third.join(0.1)
        assert third.is_alive()  # there is no room for it
        assert replicas.doing()["drafter-0 (cpu)"].startswith("works on a batch, for ")
        assert replicas.doing()["drafter-1 (cpu)"].startswith("waits for a batch, for ")
        go.set()
        third.join(60)
        assert not third.is_alive()
        replicas.update(1e-2)
        assert learned == batches[:3]
        go.clear()
        replicas.learn(batches[3])
        for _ in range(3):
            assert began.acquire(timeout=60)
        replicas.learn(batches[3])
        leaving = threading.Thread(target=let_go)
        leaving.start()
    leaving.join(60)
    assert learned == batches
    assert workers_left() == [] and replicas.left_behind == []
    assert replicas.doing()["drafter-1 (cpu)"].startswith("has ended")
    with pytest.raises(AssertionError, match="inside the with block"):
        replicas.update(1e-2)


class Marks:
    """In a DeviceClock's place."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.marks.append(f"{name} in {threading.current_thread().name}")


def test_beats_and_clocks_tell_of_the_work_and_of_pauses(target: TargetModel) -> None:
    learners, beats = learners_of(target, 2), list[str]()
    replicas = Replicas(learners, beat=lambda: beats.append(threading.current_thread().name))
    assert set(replicas.busy()) == set(replicas.clocks) == {"drafter-0", "drafter-1"}
    clocks = {name: Marks() for name in replicas.clocks}
    replicas.clocks.update(clocks)  # type: ignore[arg-type]
    with replicas:
        learn(replicas, target, ROWS[:3], 2)
        assert sorted(beats) == ["MainThread", "drafter-0", "drafter-0", "drafter-1"]
        with replicas.paused():
            replicas.measure_all(batch_of(target, learners[0], ROWS))
    pieces = ["start in drafter-0", "end in drafter-0"]
    around = ["start in MainThread", "end in MainThread", "skip in MainThread", "skip in MainThread"]
    assert clocks["drafter-0"].marks == [*pieces, *pieces, *around]
    assert clocks["drafter-1"].marks == [piece.replace("0", "1") for piece in pieces] + around


@given(data=st.data(), count=st.integers(1, 4), owners=st.lists(st.integers(0, 3), max_size=12))
def test_whatever_fails_or_stops_order_is_kept_and_no_thread_is_left(
    target: TargetModel, data: st.DataObject, count: int, owners: list[int]
) -> None:
    """Any batches, an error at any of them or at none, and the block left after any."""
    owners = [owner % count for owner in owners]
    bad = data.draw(st.one_of(st.none(), st.integers(0, len(owners))))
    end = data.draw(st.integers(0, len(owners)))
    learners, learned = learners_of(target, count), list[tuple[int, int]]()
    rows = row_batch(ROWS[:1], 4, 0)
    batch = features_of(target, rows, learners[0].model.config, CPU)
    own = Failure("bad")

    def learning(batch: FeatureBatch) -> None:
        number, replica = batch.tokens, batch.rows.replica
        if number == bad:
            raise own
        learned.append((replica, number))

    for learner in learners:
        learner.learn = learning  # type: ignore[method-assign]
    error: BaseException | None = None
    try:
        with Replicas(learners) as replicas:
            for number, owner in enumerate(owners[:end]):
                replicas.learn(replace(batch, tokens=number, rows=replace(rows, replica=owner)))
            if data.draw(st.booleans()):
                with replicas.paused():
                    assert len(learned) == end
    except Failure as raised:
        error = raised
    assert workers_left() == [] and replicas.left_behind == []
    for replica in range(count):
        numbers = [number for owner, number in learned if owner == replica]
        given_to = [number for number, owner in enumerate(owners[:end]) if owner == replica]
        assert numbers == given_to[: len(numbers)]
    assert error is None or (error is own and bad is not None and bad < end)
