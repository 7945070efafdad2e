"""Out of memory: which worker, where, with what, and what to lower."""

import contextlib
import re
import threading

import torch

from trainer.config import TrainConfig, micro_rows
from trainer.layout import parse
from trainer.memory import MIB, Part, memory, remedies, said
from trainer.start import TrainingError

# What a worker's own work takes, the most effective first; what else is on its device comes behind that.
FIRST = {
    "target": ("lower train.micro_rows", "lower data.row_tokens"),
    "drafter": ("lower train.micro_rows", "lower train.chunk_blocks", "lower train.anchors"),
}
SHORT = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_shortage(error: BaseException) -> bool:
    """Whether memory was too little, of a GPU or the CPU: torch has an error of its own only where it asks for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT)
    )


def explain_shortage(
    error: BaseException, worker: str, device: torch.device | str, shapes: str, config: TrainConfig
) -> TrainingError:
    """What to raise instead of an error that is_shortage, from it.

    worker: the thread's name, which begins with "target" or "drafter". shapes: of what it had in its hands, in words.
    """
    place = str(torch.device(device))
    place = "cuda:0" if place == "cuda" else place
    parts = _parts_on(place, config)
    less = said(remedies(parts, config, FIRST.get(re.split(r"\W|\d", worker)[0], ())))
    biggest = ""
    if parts:
        largest, total = max(parts, key=lambda part: part.bytes), sum(part.bytes for part in parts)
        biggest = f" (by estimate the largest part of {total / MIB:,.0f} MiB there is {largest.what}: "
        biggest += f"{largest.bytes / MIB:,.0f} MiB)"
    return TrainingError(f"{worker} ran out of memory on {place} with {shapes}: {_told(str(error))}; {less}{biggest}")


def note_worker(error: BaseException) -> None:
    """Called in the thread in which an error was raised: whose it is can be told later, in another thread."""
    with contextlib.suppress(AttributeError):  # an error that takes no attributes
        error.worker = threading.current_thread().name  # type: ignore[attr-defined]


def shortage_in(error: BaseException, config: TrainConfig) -> TrainingError | None:
    """What to raise instead of an error that ended a training, if memory was too little; None for any other.

    What the main thread queued (updates, measuring) counts as the first drafter's.
    """
    if not is_shortage(error):
        return None
    layout = parse(config.layout)
    places = {f"target-{n}": devices[-1] for n, devices in enumerate(layout.targets)}
    places |= {f"drafter-{n}": device for n, device in enumerate(layout.drafters)}
    places |= {"target": layout.targets[0][-1], "drafter": layout.drafters[0]}
    worker = getattr(error, "worker", "drafter")
    if worker not in places:
        worker = "drafter"
    rows, settings = micro_rows(config), config.train
    shapes = (
        f"{rows} row{'s' if rows > 1 else ''} of {config.data.row_tokens:,} tokens, {settings.anchors:,} anchors each"
    )
    return explain_shortage(error, worker, places[worker], shapes, config)


def _parts_on(device: str, config: TrainConfig) -> list[Part]:
    """What is on a device by the estimate; nothing where that fails: an error is being told already."""
    from trainer.estimate import planned

    with contextlib.suppress(Exception):
        target, draft, batch, layout = planned(config)
        return memory(target, draft, batch, config, layout).get(device, [])
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
