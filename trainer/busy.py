"""What the workers' time goes into, and which layout would make more of it.

A Stopwatch has a thread's own seconds. On a GPU these lie, as kernels are queued and the thread goes on: there a
DeviceClock has its stream's. Imports torch only where a device is asked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

BALANCED = 0.10  # of the time: who waits less than this wants no advice, nor what is faster by less

Phase = Literal["working", "waiting_in", "waiting_out", "ended"]
Kind = Literal["first", "start", "end"]  # of a mark; what is before a first one is not counted


@dataclass(frozen=True)
class Busy:
    """Seconds of one worker. The difference of two readings is what came in between."""

    working: float = 0.0
    waiting_in: float = 0.0
    """For something to work on."""
    waiting_out: float = 0.0
    """For room for what it made."""

    @property
    def total(self) -> float:
        return self.working + self.waiting_in + self.waiting_out

    def split_like(self, host: Busy) -> Busy:
        """The same seconds, what is waiting divided as the host's: a stream can't tell what it waited for."""
        waiting, of_host = self.waiting_in + self.waiting_out, host.waiting_in + host.waiting_out
        out = waiting * host.waiting_out / of_host if of_host else 0.0
        return Busy(self.working, waiting - out, out)

    def __add__(self, more: Busy) -> Busy:
        return Busy(
            self.working + more.working,
            self.waiting_in + more.waiting_in,
            self.waiting_out + more.waiting_out,
        )

    def __sub__(self, earlier: Busy) -> Busy:
        return Busy(
            self.working - earlier.working,
            self.waiting_in - earlier.waiting_in,
            self.waiting_out - earlier.waiting_out,
        )


class Stopwatch:
    """Seconds of one thread by what it does. That thread turns it; any thread reads it, without a lock."""

    def __init__(self) -> None:
        # One tuple, replaced whole: a reader never sees half a change.
        self._state: tuple[Busy, Phase, float] = (Busy(), "ended", time.perf_counter())

    def turn(self, phase: Phase) -> None:
        """From now on the thread does this."""
        now = time.perf_counter()
        self._state = (_spent(self._state, now), phase, now)

    @property
    def phase(self) -> tuple[Phase, float]:
        """What the thread does, and for how many seconds already."""
        _, phase, since = self._state
        return phase, time.perf_counter() - since

    def read(self) -> Busy:
        """All its seconds, those of the phase under way included."""
        return _spent(self._state, time.perf_counter())


def _spent(state: tuple[Busy, Phase, float], now: float) -> Busy:
    so_far, phase, since = state
    spent = now - since
    match phase:
        case "working":
            return Busy(so_far.working + spent, so_far.waiting_in, so_far.waiting_out)
        case "waiting_in":
            return Busy(so_far.working, so_far.waiting_in + spent, so_far.waiting_out)
        case "waiting_out":
            return Busy(so_far.working, so_far.waiting_in, so_far.waiting_out + spent)
        case "ended":
            return so_far


class Mark(Protocol):
    """A point of a stream, as torch.cuda.Event is one."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds."""
        ...


class HostMark:
    """Now."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any, /) -> float:
        return 1000 * (end_event.seconds - self.seconds)


class DeviceClock:
    """Seconds that a device works on one worker's pieces, and waits between them, on the stream that is current.

        clock.start(); ...; clock.end()

    A worker whose stream waits for another's event starts its piece behind that wait, which so counts as waiting.
    Nothing here waits for the device: what is read is what it has got through by then. A piece without an end (it
    failed) counts as nothing. Starts and ends of one clock come from one thread at a time; any thread may read.
    """

    def __init__(self, device: torch.device, mark: Callable[[], Mark] | None = None) -> None:
        """mark: makes a mark at the current stream's end, for tests."""
        self._mark = mark or (_event_maker(device) if device.type == "cuda" else HostMark)
        self._lock = threading.Lock()
        self._coming: deque[tuple[Kind, Mark]] = deque()  # marks that the device had not reached when last asked
        self._reached: tuple[Kind, Mark] | None = None  # the last one that it had
        self._working = self._waiting = 0.0
        self._afresh = True

    def start(self) -> None:
        with self._lock:
            self._add("first" if self._afresh else "start")
            self._afresh = False

    def end(self) -> None:
        with self._lock:
            self._add("end")

    def skip(self) -> None:
        """What comes until the next start (measuring, saving) is no waiting. From any thread."""
        with self._lock:
            self._afresh = True

    def read(self) -> Busy:
        """Seconds until the last mark that the device has reached; all waiting as waiting_in (see split_like)."""
        with self._lock:
            self._look()
            return Busy(self._working, self._waiting)

    def _add(self, kind: Kind) -> None:
        self._coming.append((kind, self._mark()))
        self._look()  # also here: nobody may ever read, and marks must not pile up

    def _look(self) -> None:
        while self._coming and self._coming[0][1].query():
            kind, mark = self._coming.popleft()
            match self._reached, kind:
                case ("start" | "first", before), "end":
                    self._working += before.elapsed_time(mark) / 1000
                case ("end", before), "start":
                    self._waiting += before.elapsed_time(mark) / 1000
                case _:
                    pass
            self._reached = kind, mark


def _event_maker(device: torch.device) -> Callable[[], Mark]:
    import torch

    def make() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return make


def advice(
    targets: Sequence[Busy],
    drafters: Sequence[Busy],
    *,
    target_devices: Sequence[Sequence[str]],
    draft_devices: Sequence[str],
    gpus: int | None = None,
    most_drafters: int | None = None,
) -> str | None:
    """A line on what would make the training faster, from seconds of one stretch of it; None when nothing would.

    targets, drafters: of each worker. Targets wait for rows (in) and for room (out), drafters for features (either).
    target_devices, draft_devices: whose they are, several for a target that is spread. gpus: how many there are, those
    that nobody uses too. most_drafters: how many there may be, as many as a step has rows.

    The work of a row is taken to cost the same whoever does it: with t device seconds of target work and d of drafter
    work a row, n targets and m drafters get through min(n / t, m / d) rows a second; g GPUs that have a target and a
    drafter each, through g / (t + d). None also where workers share a device: their seconds don't tell what each costs.
    """
    used = [*chain.from_iterable(target_devices), *draft_devices]
    unknown = not targets or not drafters or any(worker.total <= 0 for worker in (*targets, *drafters))
    if unknown or len(set(used)) < len(used):
        return None
    for_rows, for_room = _share(targets, "waiting_in"), _share(targets, "waiting_out")
    for_features = _share(drafters, "waiting_in") + _share(drafters, "waiting_out")
    load_t, load_d = _share(targets, "working"), _share(drafters, "working")
    if max(for_rows + for_room, for_features) < BALANCED or not load_t or not load_d:
        return None
    room = f"the targets wait {for_room:.0%} of the time for room"
    features = f"the drafters wait {for_features:.0%} of the time for features"
    if min(for_rows, for_features) >= BALANCED and for_rows >= for_room:
        return (
            f"the targets wait {for_rows:.0%} of the time for rows: only what reads these faster makes it faster (the "
            f"prepared data on a faster disk, less other work on the CPU), no other layout"
        )
    if load_t <= load_d and for_room < BALANCED:
        return None
    n, m = len(targets), len(drafters)
    spread = [len(devices) for devices in target_devices]
    room_for = max(gpus or 0, len(used))
    split, gain = _best_split(n * load_t, m * load_d, spread, m, room_for, most_drafters or room_for)
    # A GPU that has both is never idle; a target that is spread needs more than one, and each drafter as many rows.
    both = room_for / (n * load_t + m * load_d) / min(1 / load_t, 1 / load_d)
    can = max(spread) == 1 and "cpu" not in used and (most_drafters or room_for) % room_for == 0
    by_turns = min(for_room, for_features) >= BALANCED  # then the rate now is less than what the work allows
    if can and not by_turns and both >= max(gain, 1.0) * (1 + BALANCED):
        reached = f"would reach about {both:.1f} times as many tokens/s"
        return (
            f"{features if load_t > load_d else room}: a target and a drafter on each of the {room_for} GPUs "
            f"{reached}, if there is memory for both (train --dry-run tells)"
        )
    better = f"({n}+{m} -> {split[0]}+{split[1]} would reach about {gain:.1f} times as many tokens/s)"
    if gain < 1 + BALANCED:
        if min(for_room, for_features) >= BALANCED:
            return f"{room} and {features}, by turns: raise layout.depth or layout.queue_mib"
        if load_t > load_d:
            more = f"train.anchors could be about {load_t / load_d:.1f} times as many at the same speed"
            return f"{features}: another target worker would need another GPU, or {more}"
        return f"{room}: another drafter would need another GPU; fewer train.anchors are faster too"
    if load_t > load_d:
        return f"{features}: {_another(split[0] - n, 'target worker')} {better}, or raise train.anchors"
    return f"{room}: {_another(split[1] - m, 'drafter')} {better}, or fewer train.anchors"


def _best_split(
    work_t: float, work_d: float, spread: Sequence[int], drafters: int, gpus: int, most_drafters: int
) -> tuple[tuple[int, int], float]:
    """Numbers of targets and drafters, and how many times as fast as now; of equally fast ones the nearest.

    work_t, work_d: what all do now, in workers that never wait. spread: over how many GPUs each target is.
    """
    targets = len(spread)

    def rate(split: tuple[int, int]) -> float:
        return min(split[0] / work_t, split[1] / work_d)

    def gpus_of(n: int) -> int:
        return sum(spread) + (n - targets) * (max(spread) if n > targets else min(spread))

    splits = [(n, m) for n in range(1, gpus + 1) for m in range(1, min(gpus - gpus_of(n), most_drafters) + 1)]
    now = targets, drafters
    best = max(splits, key=lambda s: (round(rate(s), 9), -abs(s[0] - targets) - abs(s[1] - drafters)), default=now)
    return best, rate(best) / rate(now)


def _share(workers: Sequence[Busy], part: Literal["working", "waiting_in", "waiting_out"]) -> float:
    """Of the workers' time, on average."""
    return sum(getattr(worker, part) / worker.total for worker in workers) / len(workers)


def _another(count: int, what: str) -> str:
    return f"another {what}" if count == 1 else f"{count} more {what}s"
