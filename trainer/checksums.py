"""A number for the bits of a tensor and their places, made where the tensor is.

Two replicas with the same numbers have the same weights: a single value that differs, anywhere and by any bit, gives
another number for sure, several ones but for a chance of about 1 in 2^63.
"""

# torch's views are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 2**22  # values at a time: as int64 they take 32 MiB

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: Iterable[Tensor], chunk: int = CHUNK) -> Tensor:
    """[tensors], int64, on their device; the host waits for nothing.

    A sum of each value's bits times an odd number of its place, modulo 2^64: in whatever order the device adds, it is
    the same.
    """
    sums: list[Tensor] = []
    places: Tensor | None = None
    for tensor in tensors:
        bits = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()])
        if places is None or len(places) < min(chunk, len(bits)):
            places = _odd(torch.arange(min(chunk, len(bits)), device=tensor.device))
        parts = [(part.long() * places[: len(part)]).sum() for part in bits.split(chunk)]
        sums.append((torch.stack(parts) * _odd(torch.arange(len(parts), device=tensor.device) + chunk)).sum())
    return torch.stack(sums)


def _odd(places: Tensor) -> Tensor:
    """An odd number for each place, which no simple pattern of changes can cancel."""
    mixed = places * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 29)) | 1
