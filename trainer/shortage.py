"""Out of memory: which worker, where, with what, and what to lower."""

import contextlib
import re
import threading
from collections.abc import Sequence

import torch

from trainer.config import TrainConfig, micro_rows
from trainer.devices import Devices
from trainer.layout import Layout, parse
from trainer.memory import MIB, Part, memory, remedies, said
from trainer.start import TrainingError

# What lowers a worker's own part, the most effective first; what else is on the device comes behind that.
FIRST = {
    "target": ("lower train.micro_rows", "lower data.row_tokens"),
    "drafter": ("lower train.micro_rows", "lower train.chunk_blocks", "lower train.anchors"),
}
ARRIVING = ("lower layout.depth", "lower layout.queue_mib", "lower train.micro_rows")  # features on a drafter's GPU
SHORT = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_shortage(error: BaseException) -> bool:
    """Whether memory was too little, of a GPU or the CPU: torch has an error of its own only where it asks for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT)
    )


def note_worker(error: BaseException) -> None:
    """Called in the thread in which an error was raised: whose it is can be told later, in another thread."""
    with contextlib.suppress(AttributeError):  # an error that takes no attributes
        error.worker = threading.current_thread().name  # type: ignore[attr-defined]


def shortage_in(error: BaseException, config: TrainConfig) -> TrainingError | None:
    """What to raise instead of an error that ended a training, if memory was too little; None for any other.

    Whose it is note_worker has kept; what it has not seen was done by the main thread: loading, updates, measuring.
    """
    if not is_shortage(error):
        return None
    layout, rows, message = parse(config.layout), micro_rows(config), str(error)
    worker: str | None = getattr(error, "worker", None)
    own = _own_devices(worker, layout)
    candidates = own[-1:] or layout.names
    place = _named(message) or (candidates[0] if len(candidates) == 1 else None)
    parts = _parts_on(place, config)
    less = said(remedies(parts, config, _first(worker, own, place, parts, layout)))
    biggest = ""
    if parts:
        largest, total = max(parts, key=lambda part: part.bytes), sum(part.bytes for part in parts)
        biggest = f" (by estimate the largest part of {total / MIB:,.0f} MiB there is {largest.what}: "
        biggest += f"{largest.bytes / MIB:,.0f} MiB)"
    forward = f"{rows} row{'s' if rows > 1 else ''} of {config.data.row_tokens:,} tokens, "
    forward += f"{config.train.anchors:,} anchors each"
    return TrainingError(
        f"{worker or 'the main thread'} ran out of memory{f' on {place}' if place else ''} with "
        f"{'' if worker else 'forwards of '}{forward}: {_told(message)}; {less}{biggest}"
    )


def _named(message: str) -> str | None:
    """The device that torch names: a worker allocates on others' devices, too."""
    if gpu := re.search(r"GPU (\d+) has a total capacity", message):
        return f"cuda:{gpu[1]}"
    return "cpu" if "DefaultCPUAllocator" in message else None


def _own_devices(worker: str | None, layout: Layout) -> Devices:
    """A worker's own, as the pipeline and the replicas name them; none of a thread that is no worker's."""
    role, _, number = (worker or "").partition("-")
    places = {"target": layout.targets, "drafter": tuple((name,) for name in layout.drafters)}.get(role, ())
    index = int(number) if number.isdecimal() else 0
    return places[index] if index < len(places) else ()


def _first(
    worker: str | None, own: Devices, place: str | None, parts: Sequence[Part], layout: Layout
) -> tuple[str, ...]:
    """What to name before what makes the device's largest parts smaller."""
    role = (worker or "").partition("-")[0]
    if role == "target" and place not in own and place in layout.drafters:
        return ARRIVING
    if role in FIRST:
        return FIRST[role]
    if parts:
        return ()
    return FIRST["target" if any(place in devices for devices in layout.targets) else "drafter"]


def _parts_on(device: str | None, config: TrainConfig) -> list[Part]:
    """What is on a device by the estimate; nothing where that fails: an error is being told already."""
    from trainer.estimate import planned

    with contextlib.suppress(Exception):
        target, draft, batch, layout = planned(config)
        return memory(target, draft, batch, config, layout).get(device or "", [])
    return []


def _told(message: str) -> str:
    """What torch says that a user can do something with, in its own figures."""
    size = r"(\d[\d.]* ?[A-Za-z]+)"
    asked = re.search(rf"[Tt]ried to allocate {size}", message)
    if asked is None:
        return message.strip().split("\n")[0]
    words = [f"{asked[1]} more were asked for"]
    if free := re.search(rf"total capacity of {size} of which {size} is free", message):
        words.append(f"{free[2]} of {free[1]} are free")
    if own := re.search(rf"{size} is allocated by PyTorch, and {size} is reserved", message):
        words.append(f"torch has given out {own[1]} and keeps {own[2]} unused")
    others = re.findall(rf"Process \d+ has {size} memory in use", message)
    if others:
        words.append(f"other processes have {' and '.join(others)}")
    return ", ".join(words)
