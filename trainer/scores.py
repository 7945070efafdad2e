"""Which of a training's checkpoints is its best: their scores, and what may be compared with what."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

HINT_VERSION = 1


@dataclass(frozen=True)
class Score:
    """How good a drafter is: its acceptance length, higher is better; and what that was measured on."""

    value: float
    measured: Literal["decoded", "cycle"]  # by real decoding, or by a walk through the held-out answers
    heldout: str = ""  # digest of the held-out data; "": it was not said, which may be compared with anything
    how: str = ""  # the settings that it depends on; "": likewise

    def same_data(self, other: "Score") -> bool:
        return _same(self.heldout, other.heldout)

    def comparable(self, other: "Score") -> bool:
        return self.measured == other.measured and self.same_data(other) and _same(self.how, other.how)

    def __str__(self) -> str:
        how = "decoded" if self.measured == "decoded" else "by a walk through the held-out answers"
        return f"{self.value:.2f} tokens a cycle, {how}" + (f" ({self.how})" if self.how else "")


def _same(one: str, other: str) -> bool:
    return one == other or not one or not other


class Best(BaseModel):
    """best.json: made anew from the checkpoints' own scores at each save, for people and other programs."""

    schema_version: int = HINT_VERSION
    name: str
    score: float
    measured: Literal["decoded", "cycle"]


def read_hint(file: Path) -> Best | str | None:
    """best.json: what it says, or what is wrong with it; None when there is none. Raises OSError."""
    try:
        best = Best.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (IsADirectoryError, ValueError, RecursionError):
        return f"{file.name} is damaged"
    if best.schema_version > HINT_VERSION:
        return f"{file.name} is of schema_version {best.schema_version}, newer than this trainer's {HINT_VERSION}"
    return best


def ranking(scored: Iterable[tuple[Path, Score]]) -> list[tuple[Path, Score]]:
    """The best one first. `scored` comes newest first.

    What was measured as the newest one was goes before all that can't be compared with it. Of the same data, what was
    decoded goes before any estimate. Of equal ones the older goes first.
    """
    rest, ranked = list(scored), list[tuple[Path, Score]]()
    while rest:
        data = [score for _, score in rest if score.same_data(rest[0][1])]
        first = next((score for score in data if score.measured == "decoded"), data[0])
        group = [each for each in rest if each[1].comparable(first)]
        ranked += sorted(reversed(group), key=lambda each: -each[1].value)
        rest = [each for each in rest if each not in group]
    return ranked
