# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (Tensor.tolist is untyped)
"""The real decoding loop: a drafter proposes a block, the target checks it in one pass.

One sequence at a time, at any temperature (above 0: rejection.py). `decode_plain` is the same loop without a drafter,
on the same kernels, so that the two times compare, and at temperature 0 their tokens must be equal. They are, up to
rounding: a pass over 16 tokens and a pass over one do not sum in the same order, so where the two best logits all but
tie, either may win. `compare` allows exactly that, counts it, and goes on comparing after it. Run it in float32: in
bfloat16 near-ties are everywhere.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.draft import DraftCache
from trainer.draft_config import DraftConfig
from trainer.rejection import Sampling
from trainer.target import TargetModel

NEAR_TIE = 1e-3
"""Two best logits nearer than this may swap between two ways of summing."""


@dataclass(frozen=True)
class Decoded:
    """One decoded answer.

    tokens: the new tokens, with the end token where it came. The first is the prefill's, the rest the cycles'.
    gaps: for each token, by how much its logit beat the second best; nan for tokens that were drawn.
    runners_up: for each token, the second best; -1 for tokens that were drawn.
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
    """The target's token at a position. If it is its best one: by how much its logit beat the second, and which that
    is; a token that was drawn has no such distance."""

    token: int
    gap: float = float("nan")
    runner_up: int = -1


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


def matches(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts the target would have chosen itself."""
    for count, (proposed, own) in enumerate(zip(draft, chosen, strict=False)):
        if proposed != own:
            return count
    return min(len(draft), len(chosen))


def _best(logits_QV: Tensor) -> list[_Choice]:
    """The target's best token at each position."""
    values, ids = logits_QV.float().topk(2, dim=-1)
    gaps = (values[:, 0] - values[:, 1]).tolist()
    return [_Choice(best, gap, second) for (best, second), gap in zip(ids.tolist(), gaps, strict=True)]


def capacity(target: TargetModel, prompt: Sequence[int], limit: int, block_size: int) -> int:
    """Positions that decoding takes. Raises ValueError when the target has not as many."""
    needed = len(prompt) + limit + block_size
    if len(prompt) == 0 or limit < 1:
        raise ValueError("decoding needs a prompt and room for at least one token")
    if needed > target.longest:
        raise ValueError(f"prompt, answer and a block need {needed} positions, the target has {target.longest}")
    return needed


def _clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Drafter(Protocol):
    """A DraftModel, or what stands for one."""

    config: DraftConfig

    def forward_cached(self, features_new: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor: ...


class Decoding(ABC):
    """An answer under way: each cycle adds what one pass of the target gives, until it is `full`."""

    @torch.inference_mode()
    def __init__(
        self,
        target: TargetModel,
        prompt: Sequence[int],
        limit: int,
        *,
        ends: frozenset[int] | None,
        sampling: Sampling | None,
        block_size: int,
        layer_ids: Sequence[int] = (),
    ) -> None:
        """Runs the prompt, which gives the first token. ends: None for the target's own. sampling: None for its best
        token at each position."""
        self._target, self._sampling = target, sampling
        self._cache = target.new_cache(capacity(target, prompt, limit, block_size))
        self._answer = _Answer(limit, target.end_tokens() if ends is None else ends)
        self._accepted: list[int] = []
        self._seconds = 0.0
        step = target.step(torch.tensor(prompt, device=target.device), self._cache, layer_ids, last=1)
        self._answer.commit(self._choose(step.logits_QV))
        self._features = step.features_BQF  # of the positions that the drafter has not seen yet

    @property
    def full(self) -> bool:
        return self._answer.full

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return self._answer.tokens

    @property
    def drafted(self) -> list[bool]:
        """For each token, True where the drafter proposed it and the target agreed."""
        return self._answer.drafted

    @torch.inference_mode()
    def cycle(self) -> None:
        begin = _clock(self._target.device)
        self._accepted.append(self._answer.commit(self._next()))
        self._seconds += _clock(self._target.device) - begin

    def decoded(self) -> Decoded:
        """What there is by now."""
        answer = self._answer
        return Decoded(
            answer.tokens, answer.gaps, answer.runners_up, answer.drafted, list(self._accepted), self._seconds
        )

    def to_its_end(self) -> Decoded:
        while not self.full:
            self.cycle()
        return self.decoded()

    @abstractmethod
    def _next(self) -> list[_Choice]:
        """The tokens of a cycle, the last one the target's own."""

    def _choose(self, logits_QV: Tensor) -> list[_Choice]:
        """The target's own token at each position, independent of each other."""
        if self._sampling is None:
            return _best(logits_QV)
        return [_Choice(token) for token in self._sampling.draw(self._sampling.probabilities(logits_QV)).tolist()]


class PlainDecoding(Decoding):
    """By the target alone, token by token."""

    def __init__(
        self,
        target: TargetModel,
        prompt: Sequence[int],
        limit: int,
        ends: frozenset[int] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(target, prompt, limit, ends=ends, sampling=sampling, block_size=1)

    def _next(self) -> list[_Choice]:
        ids = torch.tensor(self.tokens[-1:], device=self._target.device)
        return self._choose(self._target.step(ids, self._cache, last=1).logits_QV)


class SpeculativeDecoding(Decoding):
    """With the drafter: at temperature 0 the same tokens as by the target alone, above it the same distribution.

    Before each cycle, `start` is the position of the last committed token: the target has neither its keys nor its
    features yet. The target's cache covers [0, start); the drafter's covers the context up to the last cycle, and
    `features` are those of the positions since.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        prompt: Sequence[int],
        limit: int,
        ends: frozenset[int] | None = None,
        drafts: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """drafts: how many of a block's drafts the target checks, from the first; None: all. The drafter fills whole
        blocks in any case, as it was trained to; fewer to check cost less, where each token of a pass costs time.
        """
        config = drafter.config
        self._drafter, self._layer_ids, size = drafter, config.target_layer_ids, config.block_size
        self._checked = 1 + (size - 1 if drafts is None else min(drafts, size - 1))
        if self._checked < 2:
            raise ValueError(f"drafts {drafts}: the target has to check at least one")
        super().__init__(
            target, prompt, limit, ends=ends, sampling=sampling, block_size=size, layer_ids=self._layer_ids
        )
        self._draft_cache = DraftCache()
        self._start = len(prompt)
        self._block = torch.full((size,), config.mask_token_id, device=target.device)

    def _next(self) -> list[_Choice]:
        target, sampling, block = self._target, self._sampling, self._block
        block[0], block[1:] = self.tokens[-1], self._drafter.config.mask_token_id
        begin, end = self._start - self._features.shape[1], self._start + len(block)
        positions = torch.arange(begin, end, device=target.device)[None]
        embeds = target.embedding(block[None])
        hidden_BTH = self._drafter.forward_cached(self._features, embeds, positions, self._draft_cache)
        logits_PV = target.logits(hidden_BTH[0, 1 : self._checked])
        if sampling is None:
            block[1 : self._checked] = logits_PV.argmax(dim=-1)
            step = target.step(block[: self._checked], self._cache, self._layer_ids)
            own = _best(step.logits_QV)
            kept = matches(block[1 : self._checked].tolist(), [choice.token for choice in own])
            choices = own[: kept + 1]
        else:
            drafted_PV = sampling.probabilities(logits_PV)
            block[1 : self._checked] = sampling.draw(drafted_PV)
            step = target.step(block[: self._checked], self._cache, self._layer_ids)
            own_CV = sampling.probabilities(step.logits_QV)
            count, token = sampling.verify(block[1 : self._checked], drafted_PV, own_CV)
            kept, last, *drafts = torch.cat((torch.stack((count, token)), block[1 : self._checked])).tolist()
            choices = [_Choice(token) for token in (*drafts[:kept], last)]
        self._start += kept + 1
        self._cache.crop(self._start)
        self._features = step.features_BQF[:, : kept + 1]
        return choices


def decode_plain(
    target: TargetModel,
    prompt: Sequence[int],
    limit: int,
    ends: frozenset[int] | None = None,
    sampling: Sampling | None = None,
) -> Decoded:
    """Decoding by the target alone, at most `limit` new tokens."""
    return PlainDecoding(target, prompt, limit, ends, sampling).to_its_end()


def decode_speculative(
    target: TargetModel,
    drafter: Drafter,
    prompt: Sequence[int],
    limit: int,
    ends: frozenset[int] | None = None,
    drafts: int | None = None,
    sampling: Sampling | None = None,
) -> Decoded:
    """Decoding with the drafter, at most `limit` new tokens: see SpeculativeDecoding."""
    return SpeculativeDecoding(target, drafter, prompt, limit, ends, drafts, sampling).to_its_end()


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
