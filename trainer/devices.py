"""The words that [layout] names devices by. Knows neither torch nor which devices there are.

A worker's devices are a tuple of names: one, or several for a target that is spread over them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

Devices = tuple[str, ...]

_WORD = re.compile(r"(?P<plain>auto|cpu)|cuda(:(?P<first>\d+)(-(?P<last>\d+)|(?P<more>(\+\d+)+))?)?", re.ASCII)
MOST = 1024  # workers that a range may mean: a slip of the finger makes no list that fills the memory


def words(value: object) -> tuple[str, ...]:
    """One word, or a list of them, as a config has it. Raises ValueError for anything else, and for an empty list."""
    given: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, list | tuple) and value else [value]
    for word in given:
        if not isinstance(word, str):
            raise _none_of(word)
    return tuple(given)


def _none_of(word: object) -> ValueError:
    return ValueError(f"{word!r} is none of auto, cpu, cuda:N, cuda:0-4 (a worker on each), cuda:0+1 (one on both)")


def workers(word: str) -> tuple[Devices, ...]:
    """The workers that a word means, each with its devices.

    "auto", "cpu" and "cuda:3" are one worker, "cuda:0-4" five, "cuda:0+1" one whose target is spread over both GPUs.
    Raises ValueError for any other word.
    """
    found = _WORD.fullmatch(word)
    if found is None:
        raise _none_of(word)
    if found["plain"]:
        return ((word,),)
    first = int(found["first"] or 0)
    if found["more"]:
        places = (first, *(int(number) for number in found["more"][1:].split("+")))
        if len({*places}) < len(places):
            raise ValueError(f"{word!r} names a GPU twice")
        return (tuple(f"cuda:{place}" for place in places),)
    last = int(found["last"] or first)
    if not first <= last < first + MOST:
        raise ValueError(f"{word!r} is no range: write the lower number first, and at most {MOST} of them")
    return tuple((f"cuda:{place}",) for place in range(first, last + 1))


def all_workers(words: Iterable[str]) -> tuple[Devices, ...]:
    """The workers of a list of words, in its order. Raises ValueError."""
    return tuple(devices for word in words for devices in workers(word))


def drafters(words: Iterable[str]) -> Devices:
    """The drafters' devices, in order. Raises ValueError, for a spread one too."""
    found = all_workers(words)
    for devices in found:
        if len(devices) > 1:
            raise ValueError(f"{plus(devices)!r}: a drafter is not spread over GPUs; cuda:0-1 is a drafter on each")
    return tuple(devices[0] for devices in found)


def fault(targets: Sequence[Devices], drafters: Devices, *, rows: int, allow_shared: bool, reduce: str) -> str | None:
    """Why these workers can't share steps of `rows` rows, or None."""
    for key, names in (("targets", {name for place in targets for name in place}), ("drafters", set(drafters))):
        if "cpu" in names and any(name.startswith("cuda") for name in names):
            return f"layout.{key} mixes CPU and GPUs, whose results differ by rounding: name either"
    if len(drafters) > rows:
        return (
            f"layout.drafters names {len(drafters)} drafters, but a step has {rows} rows (train.rows_per_step), and "
            f"each drafter learns from one at least"
        )
    shared = [name for name, count in Counter(drafters).items() if count > 1]
    if reduce == "nccl":
        if "cpu" in drafters:
            return 'layout.reduce "nccl" is for GPUs, and a drafter is on the CPU: take "copies"'
        if shared:
            return f'layout.reduce "nccl" needs a GPU for each drafter, and {shared[0]} has more: take "copies"'
        if len(drafters) < 2:
            return 'layout.reduce "nccl" joins two drafters or more, and layout.drafters names one: take "copies"'
    if shared and not allow_shared:
        return (
            f"layout.drafters puts {drafters.count(shared[0])} drafters on {shared[0]}, where one alone is faster and "
            f"takes less memory: name it once, or set layout.allow_shared_device = true"
        )
    return None


# --- as a person reads them ------------------------------------------------------------------------------------------


def plus(devices: Sequence[str]) -> str:
    """One worker's devices as a word: "cuda:0+1"."""
    return "+".join((devices[0], *(name.removeprefix("cuda:") for name in devices[1:])))


def listed(names: Iterable[str]) -> str:
    """Devices in short, in their order: "cuda:0-4, cuda:7, cpu"."""
    said: list[str] = []
    run: list[int] = []

    def close() -> None:
        if run:
            said.append(f"cuda:{run[0]}" if len(run) == 1 else f"cuda:{run[0]}-{run[-1]}")
            run.clear()

    for name in names:
        place = int(name.removeprefix("cuda:")) if re.fullmatch(r"cuda:\d+", name) else None
        if run and place != run[-1] + 1:
            close()
        if place is None:
            said.append(name)
        else:
            run.append(place)
    close()
    return ", ".join(said)
