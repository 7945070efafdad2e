# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""How many sequences are decoded at a time: as many as the device's memory holds, and half as many after it did not.

Prompts are sorted by length, the longest first, and decoded in groups of similar length, since each slot of a group has
room for the longest.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import torch

from trainer import sizes
from trainer.generate import PREFILL, Generated, generate
from trainer.sampling import Choose
from trainer.target import TargetError, TargetModel

MOST = {"cuda": 2048, "cpu": 32}
"""Slots beyond which a device gives no more tokens a second."""
SHARE = {"cuda": 0.85, "cpu": 0.5}
"""Of the free memory, how much is taken."""
SIMILAR = 0.67
"""A group's shortest prompt with its answer, against its longest: but a group is not smaller than its slots."""


class Room:
    """Slots for sequences of a length; fewer after each `halve`."""

    def __init__(self, target: TargetModel, batch: int | None, *, sampled: bool, say: Callable[[str], None]) -> None:
        """batch: slots for every length; None: as many as fit. sampled: draws need more memory than the best token."""
        self._target, self._batch, self._say = target, batch, say
        self._sampled = sampled
        self._share = 1.0

    def slots(self, length: int) -> int:
        """How many sequences of at most `length` tokens at a time."""
        kind = self._target.device.type
        if self._batch is not None:
            return max(1, int(self._batch * self._share))
        free = (free_memory(self._target.device) * SHARE.get(kind, 0.5) - self._prefill_bytes()) * self._share
        return int(min(MOST.get(kind, 32) * self._share, max(1, free // self.bytes_of(length)))) or 1

    def bytes_of(self, length: int) -> int:
        """What a slot takes: keys and values, and a row of logits with what a draw makes of it."""
        target, width = self._target, self._target.head_weight.element_size()
        keys = 2 * target.num_layers * sizes.num_kv_heads(target.config) * target.head_dim * length * width
        return keys + int(target.config.vocab_size) * (width + (56 if self._sampled else width))

    def halve(self, slots: int) -> None:
        """After `slots` were too many. Raises TargetError when it was a single one."""
        if slots == 1:
            raise TargetError("the device's memory does not hold one sequence: a smaller --max-new-tokens may help")
        self._share /= 2
        self._say(f"out of memory with {slots} sequences at a time: going on with {slots // 2}")

    def _prefill_bytes(self) -> int:
        config = self._target.config
        widths = 8 * config.hidden_size + 4 * sizes.intermediate_size(config)
        widths += 6 * config.num_attention_heads * self._target.head_dim
        return (PREFILL if self._target.device.type == "cuda" else 0) * widths * self._target.head_weight.element_size()


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still get."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def generate_fitting(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    limit: int,
    ends: frozenset[int],
    room: Room,
    *,
    choose: Choose,
    stop: Callable[[], bool],
) -> Iterator[Generated]:
    """As `generate`, with as many slots as there is room for. Raises TargetError when there is none."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    while order:
        slots = room.slots(len(prompts[order[0]]) + limit)
        shortest = SIMILAR * (len(prompts[order[0]]) + limit)
        size = next((n for n in range(slots, len(order)) if len(prompts[order[n]]) + limit < shortest), len(order))
        group, order = order[:size], order[size:]
        finished: set[int] = set()
        lacking = False
        try:
            for one in generate(
                target, [prompts[n] for n in group], limit, ends,
                slots=slots, choose=choose, keys=[keys[n] for n in group], stop=stop,
            ):  # fmt: skip
                finished.add(one.index)
                yield Generated(group[one.index], one.tokens, one.end)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            lacking = True
        # Behind the block, where the error, and with it the batch, is gone.
        if lacking:
            room.halve(min(slots, len(group)))
            if target.device.type == "cuda":
                torch.cuda.empty_cache()
            order = [n for place, n in enumerate(group) if place not in finished] + order
        elif len(finished) < len(group):
            return  # stopped


def is_lack_of_memory(error: Exception) -> bool:
    """Also the CPU's, which has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
