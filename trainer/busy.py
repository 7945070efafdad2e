"""What the workers' time goes into."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

Phase = Literal["working", "waiting_in", "waiting_out", "ended"]


@dataclass(frozen=True)
class Busy:
    """Seconds of one worker."""

    working: float = 0.0
    waiting_in: float = 0.0
    """For something to work on."""
    waiting_out: float = 0.0
    """For room for what it made."""

    @property
    def total(self) -> float:
        return self.working + self.waiting_in + self.waiting_out

    def __sub__(self, earlier: Busy) -> Busy:
        """What came in between."""
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
        self._state = (_more(self._state, now), phase, now)

    @property
    def phase(self) -> tuple[Phase, float]:
        """What the thread does, and for how many seconds already."""
        _, phase, since = self._state
        return phase, time.perf_counter() - since

    def read(self) -> Busy:
        """All its seconds, those of the phase under way included."""
        return _more(self._state, time.perf_counter())


def _more(state: tuple[Busy, Phase, float], now: float) -> Busy:
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
