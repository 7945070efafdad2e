"""Decoding many at a time: as one by one, in any batch and order; draws as the probabilities say; memory that lacks."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import talkative
from torch import Tensor

from trainer import generate as engine
from trainer import room as rooms
from trainer.generate import Generated, generate
from trainer.room import Room, generate_fitting
from trainer.sampling import BITS, Choose, drawn, greedy, key_of, sampling, uniform
from trainer.speculate import decode_plain
from trainer.target import TargetError, TargetModel


def some_prompts(target: TargetModel, count: int, longest: int = 90) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, target.config.vocab_size, (size,), generator=generator).tolist() for size in sizes]


def by_index(found: Iterator[Generated]) -> list[Generated]:
    return sorted(found, key=lambda one: one.index)


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (5, 0), (5, 1), (40, 3)])
def test_many_at_a_time_as_one_by_one(slots: int, ahead: int) -> None:
    target = talkative()
    found = by_index(generate(target, some_prompts(target, 16), 14, target.end_tokens(), slots=slots, ahead=ahead))
    assert found == alone()
    assert {one.end is None for one in found} == {True, False}


@cache
def alone() -> list[Generated]:
    """The same prompts, one after the other, by another way of decoding."""
    target = talkative()
    ends = target.end_tokens()
    found: list[Generated] = []
    for index, prompt in enumerate(some_prompts(target, 16)):
        *tokens, last = decode_plain(target, prompt, 14, ends).tokens
        found.append(Generated(index, tokens, last) if last in ends else Generated(index, [*tokens, last], None))
    return found


def test_a_batch_shrinks_when_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = talkative()
    sizes: list[int] = []
    step = engine._Batch.step

    def seen(batch: Any) -> Any:
        sizes.append(len(batch.places))
        return step(batch)

    monkeypatch.setattr(engine._Batch, "step", seen)
    list(generate(target, some_prompts(target, 40, 20), 40, target.end_tokens(), slots=40))
    assert sizes[0] == 40 and sizes[-1] < 10 and sizes == sorted(sizes, reverse=True)


def test_long_prompts_are_filled_in_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = talkative()
    prompts = some_prompts(target, 12)
    whole = by_index(generate(target, prompts, 9, target.end_tokens(), slots=12))
    sizes: list[int] = []
    fill = engine._Batch._fill

    def seen(batch: Any, places: Tensor, prompts: list[list[int]], keys: Tensor) -> Tensor:
        sizes.append(len(prompts) * max(map(len, prompts)))
        return fill(batch, places, prompts, keys)

    monkeypatch.setattr(engine._Batch, "_fill", seen)
    monkeypatch.setattr(engine, "PREFILL", 150)
    assert by_index(generate(target, prompts, 9, target.end_tokens(), slots=12)) == whole
    assert len(sizes) > 3 and max(sizes) <= 150


def test_a_slot_that_idles_for_long_stays_in_its_buffer() -> None:
    target = talkative()
    found = by_index(generate(target, [[5] * 60] * 3, 70, frozenset(), slots=2))
    assert [len(one.tokens) for one in found] == [70] * 3 and found[0].tokens == found[2].tokens


def test_stopping_ends_what_is_under_way_and_begins_nothing() -> None:
    target = talkative()
    asked: list[None] = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) > 1

    found = by_index(generate(target, [[5]] * 20, 9, frozenset(), slots=4, stop=stop))
    assert [one.index for one in found] == [0, 1, 2, 3]
    assert all(len(one.tokens) == 9 for one in found)


@pytest.mark.parametrize("choose", [greedy, sampling(1.3, 0.9), sampling(0.8, 0.95, 20)])
def test_an_answer_depends_on_its_key_and_no_neighbour(choose: Choose) -> None:
    target = talkative()
    prompts = some_prompts(target, 8)
    keys = [key_of("answer", 7, number) for number in range(8)]
    ends = target.end_tokens()

    def made(order: list[int], slots: int, ahead: int) -> dict[int, Generated]:
        found = generate(
            target, [prompts[n] for n in order], 20, ends,
            slots=slots, choose=choose, keys=[keys[n] for n in order], ahead=ahead,
        )  # fmt: skip
        return {order[one.index]: Generated(0, one.tokens, one.end) for one in found}

    whole = made(list(range(8)), 8, 0)
    assert made(list(range(8)), 1, 0) == whole
    assert made(list(range(8))[::-1], 3, 1) == whole
    assert made([3, 5], 2, 0) == {3: whole[3], 5: whole[5]}
    if choose is not greedy:
        keys = [key_of("answer", 8, number) for number in range(8)]
        assert made(list(range(8)), 8, 0) != whole


# --- draws ---

SHARES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
TWENTIETH = {1: 3.841, 2: 5.991, 3: 7.815, 4: 9.488, 5: 11.07}  # chi-square's upper 5%, by degrees of freedom


def softened(shares: list[float], temperature: float) -> list[float]:
    powers = [value ** (1 / temperature) for value in shares]
    return [value / sum(powers) for value in powers]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "kept"),
    [
        (1.0, 1.0, None, 6),
        (0.7, 1.0, None, 6),
        (1.6, 1.0, None, 6),
        (1.0, 0.7, None, 3),
        (1.0, 1.0, 4, 4),
        (1.0, 0.8, 4, 3),
    ],
)
def test_draws_are_as_frequent_as_the_probabilities_say(
    temperature: float, top_p: float, top_k: int | None, kept: int, soak: bool
) -> None:
    count = 200_000 if soak else 20_000
    shuffled = [3, 0, 5, 1, 4, 2]  # the token of each share
    logits = torch.empty(6)
    logits[shuffled] = torch.tensor(SHARES).log()
    keys = torch.tensor([key_of("answer", 0, number) for number in range(200)]).repeat_interleave(count // 200)
    positions = torch.arange(count // 200).repeat(200)
    tokens = sampling(temperature, top_p, top_k)(logits.expand(count, 6), keys, positions)
    found = tokens.bincount(minlength=6)[shuffled].tolist()
    expected = [share * count for share in softened(SHARES[:kept], temperature)]
    assert found[kept:] == [0] * (6 - kept)
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=False))
    assert statistic < TWENTIETH[kept - 1]  # the draws are always the same ones, so this can't fail by chance


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.5, 1), (0.50001, 2), (0.74999, 2), (0.75, 2), (0.75001, 3), (0.875, 3), (0.99, 4), (1e-9, 1)],
)
def test_the_cut_of_top_p_is_exact(top_p: float, kept: int) -> None:
    chances = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(4096, 4)
    tokens = drawn(chances, (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096, top_p)
    assert tokens.unique().tolist() == list(range(kept))
    shares = tokens.bincount() / 4096
    torch.testing.assert_close(shares, chances[0, :kept] / chances[0, :kept].sum(), rtol=0, atol=2 / 4096)


def test_of_equals_at_the_cut_the_first_stays() -> None:
    logits = torch.zeros(500, 5)
    keys, positions = torch.zeros(500, dtype=torch.long), torch.arange(500)
    assert sampling(1.0, 0.6)(logits, keys, positions).unique().tolist() == [0, 1, 2]


def test_what_can_not_be_is_never_drawn() -> None:
    chances = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for number, expected in ((0.0, 1), (0.49999, 1), (0.5, 3), (1 - 2.0**-BITS, 3)):
        assert drawn(chances, torch.tensor([number], dtype=torch.float64), 1.0).item() == expected
    # A sum that rounding left below 1, and one above.
    for total in (0.9999999, 1.0000001):
        largest = torch.tensor([1 - 2.0**-BITS], dtype=torch.float64)
        assert drawn(torch.tensor([[total, 0.0]]), largest, 1.0).item() == 0


def test_every_token_of_a_large_vocabulary_can_be_drawn() -> None:
    logits = 3 * torch.randn(151_936, generator=torch.Generator().manual_seed(0))
    chances = logits.softmax(-1)
    sums = np.cumsum(chances.numpy().astype(np.float64))
    order = chances.argsort()
    tokens = torch.cat((order[:20], order[1000:151_000:15_000], torch.tensor([151_935])))
    assert chances.min() > 0
    before = np.where(tokens.numpy() > 0, sums[tokens.numpy() - 1], 0)
    middles = (before + sums[tokens.numpy()]) / 2 / sums[-1]
    grid = np.floor(middles * 2.0**BITS) / 2.0**BITS  # what `uniform` can give
    assert torch.equal(drawn(chances.expand(len(tokens), -1), torch.from_numpy(grid), 1.0), tokens)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-39, 1e-20])
def test_the_coldest_draws_take_the_best(temperature: float) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 30
    keys, positions = torch.arange(20), torch.arange(20)
    for choose in (sampling(temperature), sampling(temperature, 0.9), sampling(temperature, 0.9, 7)):
        assert torch.equal(choose(logits, keys, positions), logits.argmax(-1))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6))
def test_uniform_numbers_are_splitmix64_s(key: int, counter: int) -> None:
    mask = 2**64 - 1
    value = (key + counter * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    value ^= value >> 31
    found = uniform(torch.tensor([key]), torch.tensor([counter])).item()
    assert found == (value >> (64 - BITS)) / 2**BITS < 1


def test_keys_differ_and_stay() -> None:
    assert key_of("answer", 0, 1) == 4418814103996354211
    assert len({key_of(kind, seed, n) for kind in ("answer", "prompt") for seed in (0, 1) for n in range(50)}) == 200


# --- room ---


def fitting(target: TargetModel, prompts: list[list[int]], room: Room, limit: int = 12) -> list[Generated]:
    keys = [key_of(number) for number in range(len(prompts))]
    ends = target.end_tokens()
    return list(generate_fitting(target, prompts, keys, limit, ends, room, choose=sampling(1.0), stop=lambda: False))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] can't allocate memory: x")]
)
def test_out_of_memory_halves_the_batch_and_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    target = talkative()
    prompts = some_prompts(target, 30)
    whole = by_index(iter(fitting(target, prompts, Room(target, 30, sampled=True, say=print))))
    said: list[str] = []
    steps: list[int] = []
    step = engine._Batch.step

    def lacking(batch: Any) -> Any:
        steps.append(len(batch.places))
        if len(steps) > 4 and len(batch.places) > 6:
            raise error
        return step(batch)

    monkeypatch.setattr(engine._Batch, "step", lacking)
    found = fitting(target, prompts, Room(target, 24, sampled=True, say=said.append))
    assert by_index(iter(found)) == whole
    assert said == [f"out of memory with {slots} sequences at a time: going on with {slots // 2}" for slots in (24, 12)]


def test_no_room_for_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(batch: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine._Batch, "step", lacking)
    target = talkative()
    with pytest.raises(TargetError, match="does not hold one sequence"):
        fitting(target, [[5]] * 3, Room(target, 2, sampled=True, say=lambda _: None))


def test_another_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(batch: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(engine._Batch, "step", failing)
    target = talkative()
    with pytest.raises(RuntimeError, match="something else"):
        fitting(target, [[5]] * 3, Room(target, 2, sampled=True, say=lambda _: None))


def test_auto_takes_what_memory_and_lengths_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    target = talkative()
    room = Room(target, None, sampled=False, say=lambda _: None)
    monkeypatch.setattr(rooms, "MOST", {"cpu": 10_000})
    monkeypatch.setattr(rooms, "free_memory", lambda device: 2 * 10**6)
    # Of each token two vectors for each of 6 layers and 2 heads of 8, in float32; and logits twice.
    assert room.bytes_of(100) == 100 * 2 * 6 * 2 * 8 * 4 + target.config.vocab_size * 8
    assert room.slots(100) == 10**6 // room.bytes_of(100)
    assert room.slots(1000) == 10**6 // room.bytes_of(1000) < room.slots(100) / 8
    assert room.slots(10**9) == 1
    sampled = Room(target, None, sampled=True, say=lambda _: None)
    assert sampled.bytes_of(100) > room.bytes_of(100)
    room.halve(9)
    assert room.slots(100) == 10**6 // 2 // room.bytes_of(100)
    monkeypatch.setattr(rooms, "MOST", {"cpu": 7})
    assert sampled.slots(100) == 7


def test_prompts_of_similar_length_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target = talkative()
    shapes: list[tuple[int, int]] = []

    class Seen(engine._Batch):
        def __init__(self, target: TargetModel, slots: int, capacity: int, choose: Choose) -> None:
            shapes.append((slots, capacity))
            super().__init__(target, slots, capacity, choose)

    monkeypatch.setattr(engine, "_Batch", Seen)
    prompts = [[5] * size for size in (10, 300, 12, 290, 11, 310, 9, 250, 13)]
    found = fitting(target, prompts, Room(target, 2, sampled=True, say=print), limit=10)
    assert sorted(one.index for one in found) == list(range(9))
    assert shapes == [(2, 320), (2, 23)]
