"""Where the workers' time goes, and what is advised for it."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer import busy as module
from trainer.busy import BALANCED, Busy, DeviceClock, Stopwatch, advice


class Time:
    """Stands for the module time: goes on when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_a_stopwatch_divides_the_seconds_by_what_the_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    watch = Stopwatch()
    clock.now += 100
    assert watch.read() == Busy()
    for phase, seconds in (("waiting_in", 1), ("working", 2), ("waiting_out", 4), ("working", 8)):
        watch.turn(phase)  # type: ignore[arg-type]
        clock.now += seconds
    assert watch.read() == Busy(working=10, waiting_in=1, waiting_out=4)
    assert watch.read().total == 15
    assert watch.phase == ("working", 8)
    before = watch.read()
    clock.now += 16
    watch.turn("ended")
    clock.now += 32
    assert watch.read() - before == Busy(working=16)


def test_a_devices_waiting_is_divided_as_the_threads() -> None:
    device, host = Busy(working=5, waiting_in=8), Busy(working=1, waiting_in=1, waiting_out=3)
    assert device.split_like(host) == Busy(working=5, waiting_in=2, waiting_out=6)
    assert device.split_like(Busy(working=1)) == device


def test_a_clock_on_the_cpu_counts_pieces_and_what_is_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    pieces = DeviceClock(torch.device("cpu"))
    for working, waiting in ((1, 10), (2, 20)):
        pieces.start()
        clock.now += working
        pieces.end()
        clock.now += waiting
    assert pieces.read() == Busy(working=3, waiting_in=10)  # what comes after the last is not known yet
    pieces.skip()
    clock.now += 40
    pieces.start()
    clock.now += 4
    assert pieces.read() == Busy(working=3, waiting_in=10)
    pieces.end()
    assert pieces.read() == Busy(working=7, waiting_in=10)
    clock.now += 80
    pieces.start()  # one that fails
    clock.now += 160
    pieces.start()
    clock.now += 320
    pieces.end()
    assert pieces.read() == Busy(working=327, waiting_in=90)


class Stream:
    """Stands for a GPU's: marks are reached when it gets there, at its own time."""

    def __init__(self) -> None:
        self.marks: list[Stream.Event] = []

    class Event:
        milliseconds: float | None = None

        def query(self) -> bool:
            return self.milliseconds is not None

        def elapsed_time(self, end_event: Any, /) -> float:
            assert self.query() and end_event.query(), "torch would raise"
            return end_event.milliseconds - self.milliseconds

    def mark(self) -> "Stream.Event":
        self.marks.append(self.Event())
        return self.marks[-1]


def test_a_clock_on_a_gpu_waits_for_nothing_and_reads_what_was_reached() -> None:
    stream = Stream()
    pieces = DeviceClock(torch.device("cpu"), stream.mark)
    for _ in range(3):
        pieces.start()
        pieces.end()
    assert pieces.read() == Busy()
    for event, milliseconds in zip(stream.marks, (500, 1500, 2000), strict=False):
        event.milliseconds = milliseconds
    assert pieces.read() == pieces.read() == Busy(working=1, waiting_in=0.5)
    for event, milliseconds in zip(stream.marks[3:], (4000, 4250, 4500), strict=True):
        event.milliseconds = milliseconds
    assert pieces.read() == Busy(working=3.25, waiting_in=0.75)


def test_marks_that_nobody_reads_do_not_pile_up() -> None:
    stream = Stream()
    pieces = DeviceClock(torch.device("cpu"), stream.mark)
    for number in range(100):
        (pieces.end if number % 2 else pieces.start)()
        stream.marks[-1].milliseconds = number
    assert len(pieces._coming) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_clock_on_a_gpu_counts_kernels_and_the_wait_for_another_stream() -> None:
    device, cycles = torch.device("cuda:0"), 1_000_000_000  # about half a second
    ours, theirs = torch.cuda.Stream(device), torch.cuda.Stream(device)
    pieces, there = DeviceClock(device), torch.cuda.Event()
    with torch.cuda.stream(ours):
        pieces.start()
        pieces.end()
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(cycles)
        there.record()
    with torch.cuda.stream(ours):
        ours.wait_event(there)
        pieces.start()
        torch.cuda._sleep(cycles // 4)
        pieces.end()
    pieces.read()
    assert not there.query()  # all is queued, nothing has waited
    ours.synchronize()
    seen = pieces.read()
    assert seen.waiting_in > seen.working > 0


# --- advice ---


def said(
    targets: Sequence[Busy], drafters: Sequence[Busy], spread: int = 1, gpus: int | None = None, most: int | None = None
) -> str | None:
    """Each worker on a device of its own."""
    target_devices = [[f"cuda:{n * spread + k}" for k in range(spread)] for n in range(len(targets))]
    draft_devices = [f"cuda:{len(targets) * spread + n}" for n in range(len(drafters))]
    return advice(
        targets, drafters, target_devices=target_devices, draft_devices=draft_devices, gpus=gpus, most_drafters=most
    )


def target(working: float, rows: float = 0.0, room: float = 0.0) -> Busy:
    return Busy(working, rows, room)


def drafter(working: float, features: float = 0.0) -> Busy:
    return Busy(working, features)


FULL = Busy(working=100)


@pytest.mark.parametrize(
    ("targets", "drafters", "more", "expected"),
    [
        ([FULL] * 5, [FULL] * 3, {}, None),
        ([target(95, room=5)] * 5, [drafter(91, 9)] * 3, {}, None),
        (
            [FULL] * 5,
            [drafter(50, 50)] * 3,
            {},
            "the drafters wait 50% of the time for features: another target worker (5+3 -> 6+2 would reach about 1.2 "
            "times as many tokens/s), or raise train.anchors",
        ),
        (
            [target(40, room=60)] * 6,
            [FULL] * 2,
            {},
            "the targets wait 60% of the time for room: 2 more drafters (6+2 -> 4+4 would reach about 1.7 times as "
            "many tokens/s), or fewer train.anchors",
        ),
        (  # one drafter a row of a step at most
            [target(40, room=60)] * 6,
            [FULL] * 2,
            {"most": 3},
            "the targets wait 60% of the time for room: another drafter (6+2 -> 5+3 would reach about 1.5 times as "
            "many tokens/s), or fewer train.anchors",
        ),
        (  # a GPU that nobody uses; a step has two rows
            [FULL],
            [drafter(60, 40)],
            {"gpus": 3, "most": 2},
            "the drafters wait 40% of the time for features: another target worker (1+1 -> 2+1 would reach about 1.7 "
            "times as many tokens/s), or raise train.anchors",
        ),
        (  # a step has one row only
            [FULL],
            [drafter(60, 40)],
            {"most": 1},
            "the drafters wait 40% of the time for features: another target worker would need another GPU, or "
            "train.anchors could be about 1.7 times as many at the same speed",
        ),
        (
            [target(50, room=50)],
            [FULL],
            {"most": 1},
            "the targets wait 50% of the time for room: another drafter would need another GPU; fewer train.anchors "
            "are faster too",
        ),
        (  # of 1 + 1, of which one waits, none would
            [target(50, room=50)],
            [FULL],
            {},
            "the targets wait 50% of the time for room: a target and a drafter on each of the 2 GPUs would reach about "
            "1.3 times as many tokens/s, if there is memory for both (train --dry-run tells)",
        ),
        (
            [FULL],
            [drafter(60, 40)],
            {},
            "the drafters wait 40% of the time for features: a target and a drafter on each of the 2 GPUs would reach "
            "about 1.2 times as many tokens/s, if there is memory for both (train --dry-run tells)",
        ),
        (  # a target over two GPUs: one more takes two drafters' place
            [FULL] * 2,
            [drafter(25, 75)] * 4,
            {"spread": 2},
            "the drafters wait 75% of the time for features: another target worker (2+4 -> 3+2 would reach about 1.5 "
            "times as many tokens/s), or raise train.anchors",
        ),
        (  # three drafters of a step of four rows: one has two of them
            [target(40, room=60)] * 2,
            [FULL],
            {"most": 4},
            "the targets wait 60% of the time for room: another drafter (2+1 -> 1+2 would reach about 1.2 times as "
            "many tokens/s), or fewer train.anchors",
        ),
        (  # by turns: the rate is less than what the work allows, whoever does it
            [target(50, room=50)],
            [drafter(65, 35)],
            {},
            "the targets wait 50% of the time for room and the drafters wait 35% of the time for features, by turns: "
            "raise layout.depth or layout.queue_mib",
        ),
        (
            [target(60, rows=40)] * 5,
            [drafter(55, 45)] * 3,
            {},
            "the targets wait 40% of the time for rows: only what reads these faster makes it faster (the prepared "
            "data on a faster disk, less other work on the CPU), no other layout",
        ),
        (
            [target(70, rows=2, room=28)] * 5,
            [drafter(72, 28)] * 3,
            {},
            "the targets wait 28% of the time for room and the drafters wait 28% of the time for features, by turns: "
            "raise layout.depth or layout.queue_mib",
        ),
        ([target(80, rows=20)] * 5, [drafter(95, 5)] * 3, {}, None),
        ([], [], {}, None),
        ([Busy()], [Busy()], {}, None),
        ([target(0, rows=9)], [drafter(0, 9)], {}, None),
    ],
)
def test_advice(targets: list[Busy], drafters: list[Busy], more: dict[str, int], expected: str | None) -> None:
    assert said(targets, drafters, **more) == expected


@pytest.mark.parametrize(
    ("target_devices", "draft_devices"),
    [([["cuda:0"]], ["cuda:0"]), ([["cpu"]], ["cpu"]), ([["cuda:0", "cuda:1"]], ["cuda:1"])],
)
def test_who_shares_a_device_is_not_advised(target_devices: list[list[str]], draft_devices: list[str]) -> None:
    assert advice([FULL], [drafter(1, 9)], target_devices=target_devices, draft_devices=draft_devices) is None


def test_a_cpu_is_no_gpu_that_could_have_both() -> None:
    line = advice([target(50, room=50)], [FULL], target_devices=[["cuda:0"]], draft_devices=["cpu"])
    assert line is not None and "on each" not in line


@given(
    targets=st.integers(1, 7),
    drafters=st.integers(1, 7),
    target_seconds=st.floats(0.01, 100),
    drafter_seconds=st.floats(0.01, 100),
)
def test_the_advised_split_is_the_best_of_the_model(
    targets: int, drafters: int, target_seconds: float, drafter_seconds: float
) -> None:
    """By brute force, from what the workers of an ideal run of this layout would wait."""

    def rate(n: int, m: int) -> float:
        return min(n / target_seconds, m / drafter_seconds)  # rows a second

    now, gpus = rate(targets, drafters), targets + drafters
    busy_t, busy_d = now * target_seconds / targets, now * drafter_seconds / drafters  # of the time
    line = said([target(busy_t, room=1 - busy_t)] * targets, [drafter(busy_d, 1 - busy_d)] * drafters)
    best = max(rate(n, gpus - n) for n in range(1, gpus)) / now
    both = gpus / (target_seconds + drafter_seconds) / now  # on each GPU
    assume(abs(best - 1 - BALANCED) > 1e-6 and abs(both - best * (1 + BALANCED)) > 1e-6)
    if max(1 - busy_t, 1 - busy_d) < BALANCED:
        assert line is None
        return
    assert line is not None
    if both > best * (1 + BALANCED):
        assert f"on each of the {gpus} GPUs" in line
        assert float(line.partition("about ")[2].partition(" ")[0]) == pytest.approx(both, abs=0.051)
        return
    assert "on each of" not in line
    if best < 1 + BALANCED:
        assert "->" not in line
        return
    before, _, after = line.partition(f"({targets}+{drafters} -> ")
    n, m = map(int, after.partition(" ")[0].split("+"))
    assert n + m <= gpus and rate(n, m) / now == pytest.approx(best)
    assert float(after.partition("about ")[2].partition(" ")[0]) == pytest.approx(best, abs=0.051)
    assert before.startswith("the drafters wait" if n > targets else "the targets wait")


def test_a_clock_may_be_read_from_another_thread() -> None:
    pieces, over, seen = DeviceClock(torch.device("cpu")), threading.Event(), [Busy()]

    def read() -> None:
        while not over.is_set():
            seen.append(pieces.read())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        pieces.start()
        pieces.end()
    over.set()
    reader.join(30)
    totals = [busy.total for busy in seen]
    assert totals == sorted(totals)
