# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (Tensor.tolist is untyped)
"""Many sequences decoded at once by the target alone: a batch of slots, each refilled when its sequence has ended.

Unlike transformers' `generate`, no slot waits for the slowest sequence of its batch, keys and values lie in one buffer
that is never copied, and the only work for the host is to see which tokens end a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.target import TargetModel

Choose = Callable[[Tensor], Tensor]
"""Next tokens [B] from logits [B, V]."""

STRIDE = 64
"""Attention looks at a multiple of this many positions: few shapes, and aligned ones."""


@dataclass(frozen=True)
class Generated:
    """One finished sequence: which prompt it answers, its new tokens, and the end token it came to, if it did."""

    index: int
    tokens: list[int]
    end: int | None


def greedy(logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(dim=-1)


def top_p(p: float, generator: torch.Generator) -> Choose:
    """Sampling at temperature 1 from the smallest set of best tokens whose probability reaches p."""

    def choose(logits_BV: Tensor) -> Tensor:
        probabilities, ids = logits_BV.float().softmax(dim=-1).sort(dim=-1, descending=True)
        before = probabilities.cumsum(dim=-1) - probabilities
        picked = torch.multinomial(probabilities.masked_fill(before >= p, 0.0), 1, generator=generator)
        return ids.gather(1, picked)[:, 0]

    return choose


@dataclass
class _Slot:
    """A place in the batch. `index` is the prompt it is busy with, -1 when idle."""

    index: int = -1
    tokens: list[int] = field(default_factory=list[int])
    position: int = 0
    """Where its newest token stands; that token's keys are not in the buffer yet."""


class _Filling:
    """The buffer as the prefill of some slots sees it: new keys are kept for later, and only they are looked at."""

    def __init__(self, buffer: Tensor, slots: Tensor) -> None:
        self._buffer, self._slots = buffer, slots

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        size = keys_BhQD.shape[2]
        for kept, new in zip(self._buffer[layer], (keys_BhQD, values_BhQD), strict=True):
            kept[self._slots, :, :size] = new
        return keys_BhQD, values_BhQD


class _Stepping:
    """The buffer as a step of all slots sees it: one new key each, at the slot's own position."""

    def __init__(self, buffer: Tensor, positions_B: Tensor, size: int) -> None:
        self._buffer, self._positions, self._size = buffer, positions_B, size
        self._slots = torch.arange(positions_B.shape[0], device=positions_B.device)

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._buffer[layer]
        keys[self._slots, :, self._positions] = keys_BhQD[:, :, 0]
        values[self._slots, :, self._positions] = values_BhQD[:, :, 0]
        return keys[:, :, : self._size], values[:, :, : self._size]


class _Batch:
    """The slots, their keys and values, and the two passes over them."""

    def __init__(self, target: TargetModel, slots: int, capacity: int, choose: Choose) -> None:
        self._target, self._choose = target, choose
        self._layers = layers = target.by_hand
        self.capacity = -(-capacity // STRIDE) * STRIDE
        shape = (target.num_layers, 2, slots, layers.num_kv_heads, self.capacity, layers.head_dim)
        # Zeros, not empty: what a mask hides is still multiplied by zero, and a NaN would survive that.
        self._buffer = torch.zeros(shape, device=target.device, dtype=target.dtype)
        self.slots = [_Slot() for _ in range(slots)]

    def fill(self, numbers: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        """Put prompts into idle slots; returns each one's first new token. Padding on the right is never looked at."""
        device, lengths = self._target.device, torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ids = ids.to(device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        cache = _Filling(self._buffer, torch.tensor(numbers, device=device))
        hidden_BSH = self._pass(ids, positions, None, cache)
        rows = torch.arange(len(prompts), device=device)
        return self._next(hidden_BSH[rows, lengths.to(device) - 1])

    def step(self) -> list[int]:
        """Every slot's next token; that of an idle slot means nothing."""
        device = self._target.device
        ids = torch.tensor([slot.tokens[-1] if slot.tokens else 0 for slot in self.slots], device=device)
        places = [slot.position for slot in self.slots]
        positions = torch.tensor(places, device=device)
        size = -(-(max(places) + 1) // STRIDE) * STRIDE
        mask = torch.arange(size, device=device)[None, :] <= positions[:, None]
        cache = _Stepping(self._buffer, positions, size)
        return self._next(self._pass(ids[:, None], positions[:, None], mask[:, None, None], cache)[:, 0])

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: _Filling | _Stepping) -> Tensor:
        target = self._target
        return self._layers.run(target.embedding(ids), positions, mask, stop=target.num_layers - 1, cache=cache)[0]

    def _next(self, hidden_BH: Tensor) -> list[int]:
        return self._choose(self._target.logits(self._layers.norm(hidden_BH))).tolist()


@torch.inference_mode()
def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    ends: frozenset[int],
    *,
    slots: int,
    choose: Choose = greedy,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Generated]:
    """Continue every prompt by at most `limit` tokens; sequences come as they end, not in the prompts' order.

    slots: sequences at a time. stop: asked between steps; once True, no new prompt is begun.
    """
    if not prompts:
        return
    waiting = iter(enumerate(prompts))
    left = len(prompts)
    batch = _Batch(target, min(slots, left), max(map(len, prompts)) + limit, choose)
    while True:
        if left and stop():
            left = 0
        idle = [number for number, slot in enumerate(batch.slots) if slot.index < 0]
        # A prefill costs about a step: it waits until an eighth of the slots is free.
        if left and len(idle) * 8 >= len(batch.slots):
            begun = [next(waiting) for _ in range(min(len(idle), left))]
            left -= len(begun)
            numbers = idle[: len(begun)]
            first = batch.fill(numbers, [prompt for _, prompt in begun])
            for number, (index, prompt), token in zip(numbers, begun, first, strict=True):
                batch.slots[number] = _Slot(index, [token], len(prompt))
        elif len(idle) == len(batch.slots):
            return
        else:
            for slot, token in zip(batch.slots, batch.step(), strict=True):
                if slot.index >= 0:
                    slot.tokens.append(token)
                    slot.position += 1
        for slot in batch.slots:
            if slot.index < 0:
                continue
            if (last := slot.tokens[-1]) in ends:
                yield Generated(slot.index, slot.tokens[:-1], last)
            elif len(slot.tokens) >= limit:
                yield Generated(slot.index, slot.tokens, None)
            else:
                continue
            slot.index, slot.position = -1, 0
