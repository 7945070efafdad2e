# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (Tensor.tolist is untyped)
"""The real decoding loop: a drafter proposes a block, the target checks it in one pass, at temperature 0.

One sequence at a time. `decode_plain` is the same loop without a drafter, on the same kernels, so that the two times
compare and their tokens must be equal. They are, up to rounding: a pass over 16 tokens and a pass over one do not sum
in the same order, so where the two best logits all but tie, either may win. `compare` allows exactly that, counts it,
and goes on comparing after it. Run it in float32: in bfloat16 near-ties are everywhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainer.draft import DraftCache, DraftModel
from trainer.target import TargetModel

NEAR_TIE = 1e-3
"""Two best logits nearer than this may swap between two ways of summing."""


@dataclass(frozen=True)
class Decoded:
    """One decoded answer.

    tokens: the new tokens, with the end token where it came. The first is the prefill's, the rest the cycles'.
    gaps: for each token, by how much its logit beat the second best.
    runners_up: for each token, the second best.
    drafted: for each token, True where the drafter proposed it and the target agreed.
    accepted: tokens each cycle gave, the target's own bonus token included (tau). Tokens behind an end token do not
        count; those that only `max_new_tokens` cut off do, so the sum can exceed what `tokens` holds.
    seconds: of the cycles alone, prefill and first token excluded.
    """

    tokens: list[int]
    gaps: list[float]
    runners_up: list[int]
    drafted: list[bool]
    accepted: list[int]
    seconds: float

    @property
    def acceptance(self) -> float:
        """Mean tokens a cycle; nan without a cycle."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else float("nan")


@dataclass(frozen=True)
class Comparison:
    """Speculative decoding held against plain decoding, token by token."""

    equal: int
    near_ties: int
    wrong: list[int]
    """Positions where they differ and it was no near-tie: a bug."""


class _Choice(NamedTuple):
    """The target's best token at a position, by how much its logit beat the second best, and which that is."""

    token: int
    gap: float
    runner_up: int


@dataclass
class _Answer:
    """Tokens as they are committed, until an end token or enough of them."""

    limit: int
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list[int])
    gaps: list[float] = field(default_factory=list[float])
    runners_up: list[int] = field(default_factory=list[int])
    drafted: list[bool] = field(default_factory=list[bool])
    ended: bool = False

    @property
    def full(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit

    def commit(self, choices: Sequence[_Choice]) -> int:
        """Add what a cycle gave, its last token the target's own; returns how many count towards acceptance."""
        for count, choice in enumerate(choices, start=1):
            if len(self.tokens) < self.limit:
                self.tokens.append(choice.token)
                self.gaps.append(choice.gap)
                self.runners_up.append(choice.runner_up)
                self.drafted.append(count < len(choices))
            if choice.token in self.ends:
                self.ended = True
                return count
        return len(choices)

    def decoded(self, accepted: list[int], seconds: float) -> Decoded:
        return Decoded(self.tokens, self.gaps, self.runners_up, self.drafted, accepted, seconds)


def matches(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts the target would have chosen itself."""
    for count, (proposed, own) in enumerate(zip(draft, chosen, strict=False)):
        if proposed != own:
            return count
    return min(len(draft), len(chosen))


def _choose(logits_QV: Tensor) -> list[_Choice]:
    """What the target chooses at each position."""
    values, ids = logits_QV.float().topk(2, dim=-1)
    gaps = (values[:, 0] - values[:, 1]).tolist()
    return [_Choice(best, gap, second) for (best, second), gap in zip(ids.tolist(), gaps, strict=True)]


def _capacity(target: TargetModel, prompt: Sequence[int], limit: int, block_size: int) -> int:
    capacity = len(prompt) + limit + block_size
    if len(prompt) == 0 or limit < 1:
        raise ValueError("decoding needs a prompt and room for at least one token")
    if capacity > target.longest:
        raise ValueError(f"prompt, answer and a block need {capacity} positions, the target has {target.longest}")
    return capacity


def _clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def decode_plain(target: TargetModel, prompt: Sequence[int], limit: int, ends: frozenset[int] | None = None) -> Decoded:
    """Greedy decoding by the target alone, at most `limit` new tokens."""
    cache = target.new_cache(_capacity(target, prompt, limit, 1))
    answer = _Answer(limit, target.end_tokens() if ends is None else ends)
    answer.commit(_choose(target.step(torch.tensor(prompt, device=target.device), cache, last=1).logits_QV))
    accepted: list[int] = []
    begin = _clock(target.device)
    while not answer.full:
        ids = torch.tensor(answer.tokens[-1:], device=target.device)
        accepted.append(answer.commit(_choose(target.step(ids, cache, last=1).logits_QV)))
    return answer.decoded(accepted, _clock(target.device) - begin)


@torch.inference_mode()
def decode_speculative(
    target: TargetModel,
    drafter: DraftModel,
    prompt: Sequence[int],
    limit: int,
    ends: frozenset[int] | None = None,
    drafts: int | None = None,
) -> Decoded:
    """Greedy decoding with the drafter, at most `limit` new tokens; the same tokens as `decode_plain` gives.

    drafts: how many of a block's drafts the target checks, from the first; None: all. The drafter fills whole blocks in
    any case, as it was trained to; fewer to check cost less, where each token of a pass costs time.

    Before each cycle, `start` is the position of the last committed token: the target has neither its keys nor its
    features yet. The target's cache covers [0, start); the drafter's covers the context up to the last cycle, and
    `features` are those of the positions since.
    """
    config = drafter.config
    layer_ids, size = config.target_layer_ids, config.block_size
    checked = 1 + (size - 1 if drafts is None else min(drafts, size - 1))
    if checked < 2:
        raise ValueError(f"drafts {drafts}: the target has to check at least one")
    target_cache = target.new_cache(_capacity(target, prompt, limit, size))
    draft_cache = DraftCache()
    answer = _Answer(limit, target.end_tokens() if ends is None else ends)
    step = target.step(torch.tensor(prompt, device=target.device), target_cache, layer_ids, last=1)
    answer.commit(_choose(step.logits_QV))
    features = step.features_BQF
    start = len(prompt)
    block = torch.full((size,), config.mask_token_id, device=target.device)
    accepted: list[int] = []
    begin = _clock(target.device)
    while not answer.full:
        block[0], block[1:] = answer.tokens[-1], config.mask_token_id
        positions = torch.arange(start - features.shape[1], start + size, device=target.device)
        hidden_BTH = drafter.forward_cached(features, target.embedding(block[None]), positions[None], draft_cache)
        block[1:checked] = functional.linear(hidden_BTH[0, 1:checked], target.head_weight).argmax(dim=-1)
        step = target.step(block[:checked], target_cache, layer_ids)
        choices = _choose(step.logits_QV)
        kept = matches(block[1:checked].tolist(), [choice.token for choice in choices])
        accepted.append(answer.commit(choices[: kept + 1]))
        start += kept + 1
        target_cache.crop(start)
        features = step.features_BQF[:, : kept + 1]
    return answer.decoded(accepted, _clock(target.device) - begin)


def compare(
    speculative: Decoded, plain: Decoded, redo: Callable[[list[int]], Decoded], tolerance: float = NEAR_TIE
) -> Comparison:
    """Hold the two against each other; `redo(tokens)` decodes plainly on from those new tokens.

    A difference is a near-tie only by what plain decoding says, not by the pass that is under test: its two best logits
    lie within `tolerance`, and speculation took the second of them. Plain decoding is then done again behind the token
    that speculation took, so that what follows is compared too and not excused.
    """
    equal, near_ties, offset = 0, 0, 0
    wrong: list[int] = []
    reference = plain
    while True:
        rest, theirs = speculative.tokens[offset:], reference.tokens
        same = matches(rest, theirs)
        equal, offset = equal + same, offset + same
        if same == len(rest) == len(theirs):
            break
        if same == len(rest) or same == len(theirs):  # one of them stopped where the other went on
            wrong.append(offset)
            break
        if reference.gaps[same] <= tolerance and rest[same] == reference.runners_up[same]:
            near_ties += 1
        else:
            wrong.append(offset)
        offset += 1
        if offset == len(speculative.tokens):
            break
        reference = redo(speculative.tokens[:offset])
    return Comparison(equal, near_ties, wrong)
