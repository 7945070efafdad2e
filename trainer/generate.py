# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (Tensor.tolist is untyped)
"""Many sequences decoded at once by the target alone: a batch of slots, each refilled when its sequence has ended.

Unlike transformers' `generate`, no slot waits for the slowest sequence of its batch, keys and values lie in one buffer
that is never copied, and tokens and positions stay on the device. On CUDA the host reads each step's tokens while the
next step runs, so a sequence that has ended runs one step for nothing. When nothing waits any more and half of the
slots are idle, the others move together and the batch gets smaller.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.masks import additive
from trainer.sampling import Choose, greedy
from trainer.target import TargetModel

STRIDE = 64
"""Attention looks at a multiple of this many positions: few shapes, and aligned ones."""
PREFILL = 65_536
"""Tokens of one prefill, padding included: what bounds the memory of a pass over long prompts."""
SMALLEST = 4
"""A batch of so few slots is not made smaller."""


@dataclass(frozen=True)
class Generated:
    """One finished sequence: which prompt it answers, its new tokens, and the end token it came to, if it did."""

    index: int
    tokens: list[int]
    end: int | None


@dataclass(eq=False)
class _Slot:
    """A sequence under way in the batch."""

    index: int
    place: int
    begin: int
    """The position of its first new token."""
    asked: int = 0
    """New tokens that the device was asked for; `tokens` are those that the host has read."""
    tokens: list[int] = field(default_factory=list[int])
    done: bool = False


class _Launch:
    """New tokens on their way from the device, and whose they are."""

    def __init__(self, slots: Sequence[_Slot | None], tokens_B: Tensor) -> None:
        self.slots = slots
        self._event: torch.Event | None = None
        self._tokens = tokens_B  # a later prefill writes into it, but only where nothing is read any more
        if tokens_B.is_cuda:
            self._tokens = torch.empty(tokens_B.shape, dtype=tokens_B.dtype, pin_memory=True)
            self._tokens.copy_(tokens_B, non_blocking=True)
            self._event = torch.cuda.current_stream(tokens_B.device).record_event()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


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
        self._slots = torch.arange(len(positions_B), device=positions_B.device)

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._buffer[layer, :, : len(self._slots)]
        keys[self._slots, :, self._positions] = keys_BhQD[:, :, 0]
        values[self._slots, :, self._positions] = values_BhQD[:, :, 0]
        return keys[:, :, : self._size], values[:, :, : self._size]


class _Batch:
    """The slots' keys and values, their newest tokens and where these stand, and the two passes over them."""

    def __init__(self, target: TargetModel, slots: int, capacity: int, choose: Choose) -> None:
        self._target, self._choose = target, choose
        self._layers = layers = target.by_hand
        self._capacity = -(-capacity // STRIDE) * STRIDE
        shape = (target.num_layers, 2, slots, layers.num_kv_heads, self._capacity, layers.head_dim)
        # Zeros, not empty: what a mask hides is still multiplied by zero, and a NaN would survive that.
        self._buffer = torch.zeros(shape, device=target.device, dtype=target.dtype)
        # A newest token's keys are not in the buffer yet.
        self._ids, self._positions, self._keys = torch.zeros(3, slots, dtype=torch.long, device=target.device)
        self.places: list[_Slot | None] = [None] * slots

    def fill(self, slots: Sequence[_Slot], prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> _Launch:
        """Put prompts into idle slots and choose each one's first new token."""
        device, tokens = self._target.device, list[Tensor]()
        begin = 0
        while begin < len(prompts):
            end, longest = begin, 0
            while end < len(prompts):
                longest = max(longest, len(prompts[end]))
                if end > begin and longest * (end + 1 - begin) > PREFILL:
                    break
                end += 1
            places = torch.tensor([slot.place for slot in slots[begin:end]]).to(device)
            tokens.append(self._fill(places, prompts[begin:end], torch.tensor(keys[begin:end]).to(device)))
            begin = end
        for slot in slots:
            self.places[slot.place] = slot
            slot.asked = 1
        return _Launch(slots, torch.cat(tokens))

    def _fill(self, places: Tensor, prompts: Sequence[Sequence[int]], keys: Tensor) -> Tensor:
        """Padding on the right is never looked at."""
        device, lengths = self._target.device, torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ids, lengths = ids.to(device), lengths.to(device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        hidden_BSH = self._pass(ids, positions, None, _Filling(self._buffer, places))
        rows = torch.arange(len(prompts), device=device)
        first = self._next(hidden_BSH[rows, lengths - 1], keys, lengths)
        self._ids[places], self._positions[places], self._keys[places] = first, lengths, keys
        return first

    def step(self) -> _Launch:
        """Every slot's next token; that of an idle slot means nothing."""
        furthest = 0
        for slot in self.places:
            if slot is not None:
                furthest = max(furthest, slot.begin + slot.asked)
                slot.asked += 1
        size = min(-(-furthest // STRIDE) * STRIDE, self._capacity)
        positions = self._positions
        seen = torch.arange(size, device=positions.device) <= positions[:, None]
        mask = additive(seen[:, None, None], self._target.dtype)
        cache = _Stepping(self._buffer, positions, size)
        hidden_BH = self._pass(self._ids[:, None], positions[:, None], mask, cache)[:, 0]
        new = self._next(hidden_BH, self._keys, positions + 1)
        self._ids = new
        self._positions = (positions + 1).clamp(max=self._capacity - 1)  # an idle slot's would go on and on
        return _Launch(tuple(self.places), new)

    def shrink(self) -> None:
        """Make do with the slots that are busy."""
        busy = [slot for slot in self.places if slot is not None]
        places = torch.tensor([slot.place for slot in busy]).to(self._target.device)
        for layer in self._buffer:
            layer[:, : len(busy)] = layer[:, places]
        self._ids, self._positions, self._keys = self._ids[places], self._positions[places], self._keys[places]
        for place, slot in enumerate(busy):
            slot.place = place
        self.places = [*busy]

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: _Filling | _Stepping) -> Tensor:
        target = self._target
        return self._layers.run(target.embedding(ids), positions, mask, stop=target.num_layers - 1, cache=cache)[0]

    def _next(self, hidden_BH: Tensor, keys_B: Tensor, positions_B: Tensor) -> Tensor:
        return self._choose(self._target.logits(self._layers.norm(hidden_BH)), keys_B, positions_B)


@torch.inference_mode()
def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    ends: frozenset[int],
    *,
    slots: int,
    choose: Choose = greedy,
    keys: Sequence[int] | None = None,
    stop: Callable[[], bool] = lambda: False,
    ahead: int | None = None,
) -> Iterator[Generated]:
    """Continue every prompt by at most `limit` tokens; sequences come as they end, not in the prompts' order.

    slots: sequences at a time. keys: what each one's draws depend on (sampling.key_of). stop: asked between steps; once
    True, no new prompt is begun. ahead: steps that the device may be ahead of the host; None: 1 on CUDA, 0 elsewhere.
    Raises torch.OutOfMemoryError.
    """
    if not prompts:
        return
    ahead = int(target.device.type == "cuda") if ahead is None else ahead
    begun, left = 0, len(prompts)
    batch = _Batch(target, min(slots, left), max(map(len, prompts)) + limit, choose)
    launched: deque[_Launch] = deque()
    while True:
        if stop():
            left = 0
        idle = [place for place, slot in enumerate(batch.places) if slot is None]
        # A prefill costs about a step: it waits until an eighth of the slots is free.
        if left and len(idle) * 8 >= len(batch.places):
            numbers = range(begun, begun + min(len(idle), left))
            begun, left = numbers.stop, left - len(numbers)
            new = [_Slot(number, place, len(prompts[number])) for number, place in zip(numbers, idle, strict=False)]
            launched.append(batch.fill(new, [prompts[n] for n in numbers], [keys[n] if keys else 0 for n in numbers]))
        elif any(slot is not None and slot.asked < limit for slot in batch.places):
            if not left and len(idle) * 2 >= len(batch.places) > SMALLEST:
                batch.shrink()
            launched.append(batch.step())
        elif launched:
            yield from _settled(launched, 0, batch, ends, limit)
        else:
            return
        yield from _settled(launched, ahead, batch, ends, limit)


def _settled(
    launched: deque[_Launch], ahead: int, batch: _Batch, ends: frozenset[int], limit: int
) -> Iterator[Generated]:
    """What has ended by the launches, all but the last `ahead`, whose tokens are read now."""
    while len(launched) > ahead:
        launch = launched.popleft()
        for slot, token in zip(launch.slots, launch.read(), strict=True):
            if slot is None or slot.done:
                continue
            slot.tokens.append(token)
            if token in ends:
                found = Generated(slot.index, slot.tokens[:-1], token)
            elif len(slot.tokens) >= limit:
                found = Generated(slot.index, slot.tokens, None)
            else:
                continue
            slot.done = True
            batch.places[slot.place] = None
            yield found
