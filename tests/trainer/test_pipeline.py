"""Threads with bounded queues: order, errors, and an end in every case."""

import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import busy
from trainer import pipeline as module
from trainer.busy import Busy
from trainer.pipeline import Pipeline, Stage, Worker, left_running

BOUND = 30.0  # seconds, for what comes at once


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if isinstance(thread, Worker)]


def double(number: int) -> int:
    return 2 * number


DOUBLE = Stage("double", [double])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def wait_until_holding(pipeline: Pipeline[Any], **items: int) -> None:
    """Until these threads have these items and no room for them."""
    wait_until(lambda: all(f"waits to put item {n} among" in pipeline.doing()[name] for name, n in items.items()))


def test_results_come_in_order_through_all_stages() -> None:
    with Pipeline[str](range(200), [DOUBLE, Stage("text", [str])], depth=3) as results:
        assert list(results) == [str(2 * n) for n in range(200)]
    assert not workers() and not left_running()


def test_without_stages_the_source_comes_through() -> None:
    with Pipeline[int](range(5), [], depth=1) as results:
        assert list(results) == list(range(5))


def test_the_source_runs_ahead_by_the_depth_and_no_further() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in count():
            made.append(number)
            yield number

    with Pipeline[int](source(), [DOUBLE], depth=2) as results:
        taken = list(islice(results, 3))
        wait_until_holding(results, double=5, source=8)
        ahead = len(made)
    assert taken == [0, 2, 4]
    assert ahead == 3 + 2 * 2 + 2  # taken, two queues of two, one in each thread's hands
    assert not workers()


def test_its_depths_say_what_waits_where() -> None:
    go_on = threading.Event()

    def held_up(number: int) -> int:
        go_on.wait()
        return number

    with Pipeline[int](range(20), [Stage("double", [held_up])], depth=2) as results:
        wait_until(lambda: results.depths() == {"source": 2, "double": 0})  # and one in the hands of each thread
        go_on.set()
        wait_until(lambda: results.depths() == {"source": 2, "double": 2})
        assert list(results) == list(range(20))
        assert results.depths() == {"source": 0, "double": 0}


def test_as_many_items_are_worked_on_as_a_stage_has_functions() -> None:
    together = threading.Barrier(4)

    def meet(number: int) -> tuple[int, str]:
        together.wait(BOUND)
        return number, threading.current_thread().name

    with Pipeline[tuple[int, str]](range(40), [Stage("target", [meet] * 4)], depth=2) as results:
        seen = list(results)
    assert [number for number, _ in seen] == list(range(40))
    assert {name for _, name in seen} == {"target-0", "target-1", "target-2", "target-3"}


@pytest.mark.parametrize("limits", [{"depth": 1}, {"depth": 9, "most_bytes": 1, "size": lambda item: 5}])
def test_an_item_that_is_behind_its_successors_finds_room_and_its_place(limits: dict[str, Any]) -> None:
    made = [threading.Event() for _ in range(31)]
    made[30].set()

    def backwards(number: int) -> int:
        """Of two items, the first is ready after the second."""
        assert number % 2 or made[number + 1].wait(BOUND)
        made[number].set()
        return number

    with Pipeline[int](range(30), [Stage("target", [backwards] * 3)], **limits) as results:
        assert list(results) == list(range(30))


def test_no_more_bytes_wait_than_may() -> None:
    sizes = [3, 3, 3, 2, 100, 2]
    with Pipeline[int](sizes, [], depth=9, most_bytes=7, size=int) as results:
        taken = iter(results)
        wait_until(lambda: "item 2 among what 'source' has made (2 of at most 9" in results.doing()["source"])
        assert "6 of at most 7 bytes" in results.doing()["source"]
        assert next(taken) == 3
        wait_until_holding(results, source=3)
        assert [next(taken) for _ in range(2)] == [3, 3]
        wait_until_holding(results, source=4)  # more than may wait at all
        assert list(taken) == [2, 100, 2]


# --- errors and ends ---


@pytest.mark.parametrize("where", ["source", "first", "last"])
def test_the_first_error_reaches_the_caller_and_everything_stops(where: str) -> None:
    error = LookupError("row 20")

    def source() -> Iterator[int]:
        for number in count():
            if where == "source" and number == 20:
                raise error
            yield number

    def failing(number: int) -> int:
        if number == 20:
            raise error
        return number

    stages = [
        Stage("first", [failing if where == "first" else int]),
        Stage("last", [failing if where == "last" else int] * 2),
    ]
    with pytest.raises(LookupError) as caught, Pipeline[int](source(), stages, depth=2) as results:
        for _ in results:
            pass
    assert caught.value is error
    assert ("source" if where == "source" else "failing") in [f.name for f in traceback.extract_tb(error.__traceback__)]
    note = error.__notes__[0].replace("last-0", "last").replace("last-1", "last")
    assert note == f"raised in the worker {where!r}, at item 20 of the source, counted from 0"
    assert not workers()


def test_later_errors_are_dropped_however_long_the_first_is_looked_at() -> None:
    failed, second = list[BaseException](), threading.Event()

    def stage(number: int) -> int:
        if number == 1:
            assert first.wait(BOUND)
            second.set()
        raise ValueError(number)

    first = threading.Event()

    def look(error: BaseException) -> None:
        failed.append(error)
        first.set()
        assert second.wait(BOUND)
        doing = results.doing
        wait_until(lambda: "has ended" in (doing()["target-0"], doing()["target-1"]))  # whose error is dropped
        raise RuntimeError("of the looking")

    stages = [Stage("target", [stage, stage])]
    with pytest.raises(ValueError) as caught, Pipeline[int](range(2), stages, depth=2, failed=look) as results:
        list(results)
    assert caught.value.args == (0,) and failed == [caught.value]


def test_an_error_of_the_caller_stops_everything() -> None:
    with pytest.raises(ZeroDivisionError), Pipeline[int](count(), [DOUBLE], depth=2) as results:
        for number in results:
            _ = 1 / (number - 10)
    assert not workers()


def test_what_fails_because_all_is_stopping_is_nobodys_error() -> None:
    failed, at_work, release = list[BaseException](), threading.Event(), threading.Event()

    def stage(number: int) -> int:
        at_work.set()
        assert release.wait(BOUND)
        raise ValueError(number)

    with Pipeline[int](count(), [Stage("target", [stage])], depth=2, failed=failed.append) as results:
        assert at_work.wait(BOUND)
        threading.Timer(0.05, release.set).start()  # when the block has been left
    assert list(results) == [] and failed == []


def test_a_stage_that_does_not_stop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, release = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.1)

    def stuck(number: int) -> int:
        inside.set()
        release.wait()
        return number

    def free(number: int) -> int:
        assert inside.wait(BOUND)
        return number

    with Pipeline[int](range(3), [Stage("double", [free, stuck])], 2) as results:
        assert inside.wait(BOUND)
    assert results.left_behind == ["double-1"]
    assert left_running()
    release.set()
    wait_until(lambda: not left_running())


def test_a_thread_that_can_not_be_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Worker.start

    def refused(worker: Worker) -> None:
        if worker.name == "double":
            raise RuntimeError("can't start new thread")
        start(worker)

    monkeypatch.setattr(Worker, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"), Pipeline[int](count(), [DOUBLE], depth=2):
        pass
    assert not workers()


def test_a_wake_up_that_is_lost_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(threading.Condition):
        def notify_all(self) -> None:
            pass

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(module, "threading", SimpleNamespace(**{**vars(threading), "Condition": Deaf}))
    with Pipeline[int](range(9), [Stage("double", [double] * 2)], depth=1) as results:
        assert list(results) == [2 * n for n in range(9)]
    assert results.left_behind == []


@pytest.mark.parametrize(
    ("stages", "depth", "reason"),
    [
        ([DOUBLE, DOUBLE], 1, "two threads of a pipeline would have one name: source, double, double"),
        ([Stage("source", [double])], 1, "two threads of a pipeline would have one name: source, source"),
        ([Stage("double", [double] * 2), Stage("double-1", [double])], 1, "would have one name: source, double-0, "),
        ([Stage("double", [])], 1, "the stage 'double' has no function"),
        ([DOUBLE], 0, "depth 0: there must be room for an item between two stages"),
    ],
)
def test_what_can_not_work_is_refused(stages: list[Stage], depth: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Pipeline[int](range(3), stages, depth)


class Item:
    """Something large that can be asked whether it is still there."""


def test_what_nobody_needs_any_more_is_let_go_of() -> None:
    made, more = list[weakref.ref[Item]](), threading.Event()

    def source() -> Iterator[Item]:
        for number in count():
            if number == 3:
                assert more.wait(BOUND)
            item = Item()
            made.append(weakref.ref(item))
            yield item
            del item

    def same(item: Item) -> Item:
        return item

    with Pipeline[Item](source(), [Stage("target", [same])], depth=2) as results:
        taken = iter(results)
        for _ in range(3):
            next(taken)
        assert not any(item() for item in made)  # though each thread waits for its next
        more.set()
        wait_until_holding(results, target=5, source=8)
    assert len(made) == 9 and not any(item() for item in made)  # in the queues neither


# --- what it says of itself ---


def test_seconds_go_to_what_each_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(busy, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    go_on = threading.Event()

    def held_up(number: int) -> int:
        assert go_on.wait(BOUND)
        return number

    stages = [Stage("target", [held_up, held_up]), Stage("text", [str])]
    pipeline = Pipeline[str](range(9), stages, depth=2)
    assert pipeline.doing() == dict.fromkeys(("source", "target-0", "target-1", "text"), "was not started")
    with pipeline:
        wait_until_holding(pipeline, source=4)
        wait_until(lambda: [w.split()[0] for w in pipeline.doing().values()] == ["waits", "works", "works", "waits"])
        clock.now = 100.0
        assert pipeline.busy() == {
            "source": Busy(waiting_out=100),
            "target-0": Busy(working=100),
            "target-1": Busy(working=100),
            "text": Busy(waiting_in=100),
        }
        assert pipeline.doing()["text"].endswith("(0 of at most 2 items wait there; item 0 is next), for 100.0 s")
        go_on.set()
        assert list(pipeline) == list("012345678")
    clock.now = 200.0
    assert pipeline.busy()["target-0"] == Busy(working=100)
    assert set(pipeline.doing().values()) == {"has ended"}


def test_each_item_that_gets_on_is_a_beat() -> None:
    beats: list[str] = []
    with Pipeline[int](
        range(5), [DOUBLE], depth=2, beat=lambda: beats.append(threading.current_thread().name)
    ) as results:
        list(results)
    assert sorted(beats) == sorted(["source", "double", threading.current_thread().name] * 5)


# --- anything ---


class Injected(Exception):
    pass


@dataclass(frozen=True)
class Course:
    """What becomes of a pipeline: `failures` are (place, item), where 0 is the source and n the nth stage."""

    items: int
    depth: int
    most_bytes: int | None
    counts: list[int]
    failures: list[tuple[int, int]]
    stop_after: int | None
    seed: int


@st.composite
def courses(draw: st.DrawFn) -> Course:
    items = draw(st.integers(0, 30))
    counts = draw(st.lists(st.integers(1, 4), max_size=3))
    failure = st.tuples(st.integers(0, len(counts)), st.integers(0, max(0, items - 1)))
    return Course(
        items,
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(0, 12)),
        counts,
        draw(st.lists(failure, max_size=2 if items else 0)),
        draw(st.none() | st.integers(0, items)),
        draw(st.integers(0, 2**32)),
    )


@given(courses())
def test_whatever_happens(course: Course) -> None:
    """Order is kept, nothing is lost or made twice, the first error is raised, no thread is left."""
    rng = random.Random(course.seed)
    # Where the threads lose time: enough for items to overtake each other.
    delays = [[rng.choice((0.0, 0.0, 0.0, 0.0005)) for _ in range(31)] for _ in range(4)]
    sizes = [rng.randrange(7) for _ in range(31)]
    waiting, waiting_bytes, failed = [0], [0], list[BaseException]()

    def at(place: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        def stage(item: tuple[int, ...]) -> tuple[int, ...]:
            number = item[0]
            waiting.extend(pipeline.depths().values())
            waiting_bytes.extend(channel._bytes for channel in pipeline._channels)
            if delays[place][number]:
                time.sleep(delays[place][number])
            if (place, number) in course.failures:
                raise Injected(place, number)
            return (*item, place)

        return stage

    def source() -> Iterator[tuple[int, ...]]:
        make = at(0)
        for number in range(course.items):
            yield make((number,))

    stages = [Stage(f"stage{place}", [at(place)] * n) for place, n in enumerate(course.counts, start=1)]
    pipeline = Pipeline[tuple[int, ...]](
        source(),
        stages,
        depth=course.depth,
        most_bytes=course.most_bytes,
        size=lambda item: sizes[item[0]],
        failed=failed.append,
    )
    results, error = list[tuple[int, ...]](), None
    try:
        with pipeline:
            for result in islice(pipeline, course.stop_after):
                results.append(result)
    except Injected as raised:
        error = raised
    assert not workers() and pipeline.left_behind == []
    assert results == [(number, *range(len(course.counts) + 1)) for number in range(len(results))]
    assert max(waiting) <= course.depth + 1
    assert course.most_bytes is None or max(waiting_bytes) <= course.most_bytes + max(sizes)
    if error is not None:
        assert failed == [error] and error.args in course.failures
        assert "raised in the worker" in error.__notes__[0]
        assert len(results) <= error.args[1]
    elif course.stop_after is None:
        assert not course.failures and len(results) == course.items
    else:
        assert len(results) == course.stop_after
