# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its caches no types)
"""The target's keys and values of one sequence, croppable: what a drafter proposed in vain is forgotten again."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Extends(Protocol):
    """What keeps keys and values for layers that are run by hand, whatever its form."""

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all that its queries may look at."""
        ...


class TargetCache:
    """How many tokens are kept, and how many may be. Steps write behind `length` tokens, then commit theirs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0

    def make_room(self, count: int) -> None:
        """Raises ValueError when `count` more tokens are too many."""
        if self.length + count > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {self.length + count} were asked for")

    def commit(self, count: int) -> None:
        self.length += count

    def crop(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't crop a cache of {self.length} tokens to {length}")
        self.forget(self.length - length)
        self.length = length

    def forget(self, count: int) -> None:
        """Take the last `count` tokens away, where that takes more than a smaller `length`."""


class KeyValueCache(TargetCache):
    """For layers that are run by hand: a buffer of fixed size."""

    def __init__(self, devices: Sequence[torch.device], heads: int, capacity: int, head_dim: int, like: Tensor) -> None:
        """devices: of each layer. like: a tensor of the dtype that the keys have."""
        super().__init__(capacity)
        shape = (2, 1, heads, capacity, head_dim)
        self._buffer = [torch.empty(shape, device=device, dtype=like.dtype) for device in devices]

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind the committed ones; return all of them, [1, heads, length + Q, D]."""
        end = self.length + keys_BhQD.shape[2]
        keys, values = self._buffer[layer]
        keys[:, :, self.length : end] = keys_BhQD
        values[:, :, self.length : end] = values_BhQD
        return keys[:, :, :end], values[:, :, :end]


class DynamicTargetCache(TargetCache):
    """For a model's own forward: transformers' cache, which grows by copying.

    It is made without the model's config, so that layers with a window keep all tokens too: what has left the window
    could not be brought back by `crop`. Our masks hold the windows.
    """

    def __init__(self, capacity: int) -> None:
        from transformers import DynamicCache

        super().__init__(capacity)
        self.inner: Any = DynamicCache()

    def forget(self, count: int) -> None:
        if count:  # transformers 5.8 takes 0 for "keep nothing", and later versions no positive number
            self.inner.crop(-count)


def cache_argument(forward: Any) -> str | None:
    """The name under which a forward method takes a cache: it has changed. None: it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)
