"""Threads with bounded queues: order, errors, and an end in every case."""

import threading
import time
from collections.abc import Iterator
from itertools import count, islice

import pytest

from trainer import pipeline as module
from trainer.pipeline import Pipeline


def workers() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"source", "double", "text"}


def double(number: int) -> int:
    return 2 * number


def test_results_come_in_order_through_all_stages() -> None:
    with Pipeline[str](range(200), [("double", double), ("text", str)], depth=3) as results:
        assert list(results) == [str(2 * n) for n in range(200)]
    assert not workers()


def test_without_stages_the_source_comes_through() -> None:
    with Pipeline[int](range(5), [], depth=1) as results:
        assert list(results) == list(range(5))


def test_the_source_runs_ahead_by_the_depth_and_no_further() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in count():
            made.append(number)
            yield number

    with Pipeline[int](source(), [("double", double)], depth=2) as results:
        taken = list(islice(results, 3))
        time.sleep(0.2)  # long enough for a source without bounds to run far
        ahead = len(made)
    assert taken == [0, 2, 4]
    assert ahead <= 3 + 2 * 2 + 2  # taken, two queues of two, one in each thread's hands
    assert not workers()


def wait_for_depths(pipeline: Pipeline[int], **expected: int) -> None:
    end = time.monotonic() + 30
    while pipeline.depths() != expected:
        assert time.monotonic() < end, pipeline.depths()
        time.sleep(0.01)


def test_its_depths_say_what_waits_where() -> None:
    go_on = threading.Event()

    def held_up(number: int) -> int:
        go_on.wait()
        return number

    with Pipeline[int](range(20), [("double", held_up)], depth=2) as results:
        wait_for_depths(results, source=2, double=0)  # and one in the hands of each thread
        go_on.set()
        wait_for_depths(results, source=2, double=2)
        assert list(results) == list(range(20))
        assert results.depths() == {"source": 0, "double": 0}


@pytest.mark.parametrize("where", ["source", "first", "last"])
def test_the_first_error_reaches_the_caller_and_everything_stops(where: str) -> None:
    def source() -> Iterator[int]:
        for number in count():
            if where == "source" and number == 20:
                raise LookupError("row 20")
            yield number

    def failing(number: int) -> int:
        if number == 20:
            raise LookupError("row 20")
        return number

    stages = [("double", failing if where == "first" else int), ("text", failing if where == "last" else int)]
    with pytest.raises(LookupError, match="row 20"), Pipeline[int](source(), stages, depth=2) as results:
        for _ in results:
            pass
    assert not workers()


def test_an_error_of_the_caller_stops_everything() -> None:
    with pytest.raises(ZeroDivisionError), Pipeline[int](count(), [("double", double)], depth=2) as results:
        for number in results:
            _ = 1 / (number - 10)
    assert not workers()


def test_a_stage_that_does_not_stop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.1)

    def stuck(number: int) -> int:
        release.wait()
        return number

    with Pipeline[int](range(3), [("double", stuck)], 2) as results:
        pass
    assert results.left_behind == ["double"]
    release.set()
