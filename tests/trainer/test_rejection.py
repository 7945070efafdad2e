"""Decoding at a temperature leaves the target's distribution as it is: the rule on its own, and the loop's tokens held
against the exact distribution by chi-square, single and joint. Broken rules fail the same tests."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from tiny_families import tiny_model
from tiny_targets import drafter_for, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.draft import DraftModel
from trainer.rejection import Sampling, seeded_sampling
from trainer.speculate import SpeculativeDecoding, decode_plain, decode_speculative
from trainer.target import TargetModel

NEVER: frozenset[int] = frozenset()
VOCABULARY, PROMPT = 4, [1, 3, 2]


def drawing(seed: int = 0, temperature: float = 1.0, top_p: float = 1.0) -> Sampling:
    found = seeded_sampling(temperature, top_p, seed, "cpu")
    assert found is not None
    return found


def chance(counts: Sequence[float], expected: Sequence[float]) -> float:
    """The chance of a chi-square at least as large, were `expected` true. Cells that expect under 5 are put together;
    a count where none can be has no chance."""
    if any(count and wanted <= 0 for count, wanted in zip(counts, expected, strict=True)):
        return 0.0
    cells = [(count, wanted) for count, wanted in zip(counts, expected, strict=True) if wanted >= 5]
    small = [(count, wanted) for count, wanted in zip(counts, expected, strict=True) if 0 < wanted < 5]
    if small:
        cells.append((sum(count for count, _ in small), sum(wanted for _, wanted in small)))
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


# --- the rule on its own ---


def random_distributions(seed: int, count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


@pytest.mark.parametrize("seed", range(2))
def test_every_token_of_a_cycle_has_the_target_s_distribution(seed: int, soak: bool) -> None:
    """Fixed distributions at each place: the i-th token, where a cycle comes so far, is p_i's."""
    rounds = 40_000 if soak else 2_000
    own, drafted, sampled = random_distributions(seed, 3, 5), random_distributions(seed + 50, 2, 5), drawing(seed)
    counts = torch.zeros(3, 5)
    accepted = [0, 0, 0]
    for _ in range(rounds):
        drafts = sampled.draw(drafted)
        count, token = sampled.verify(drafts, drafted, own)
        tokens = [*drafts[: int(count)].tolist(), int(token)]
        accepted[int(count)] += 1
        for place, each in enumerate(tokens):
            counts[place, each] += 1
    for place in range(3):
        assert chance(counts[place].tolist(), (own[place] * counts[place].sum()).tolist()) > 1e-3
    # A draft is accepted as often as the two distributions overlap, and the second only behind the first.
    first, second = torch.minimum(own[:2], drafted).sum(-1).tolist()
    wanted = [1 - first, first * (1 - second), first * second]
    assert chance(accepted, [rounds * share for share in wanted]) > 1e-3


def test_equal_distributions_accept_everything_and_distant_ones_nothing() -> None:
    own = random_distributions(0, 4, 6)
    sampled = drawing()
    for _ in range(50):
        count, _ = sampled.verify(sampled.draw(own[:3]), own[:3], own)
        assert int(count) == 3
    drafted, own = torch.eye(4)[[0, 0]], torch.eye(4)[[1, 2, 3]]
    assert [int(x) for x in sampled.verify(sampled.draw(drafted), drafted, own)] == [0, 1]


def test_what_is_left_of_equal_distributions_by_rounding_is_the_target_s_own() -> None:
    """A draft that rounding rejects where p = q: nothing is left above q, and p is what is drawn from."""
    own, drafted = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[2.0, 2.0]])  # above p everywhere
    sampled, counts = drawing(), Counter[int]()
    for _ in range(2000):
        count, token = sampled.verify(torch.tensor([0]), drafted, own)
        if int(count) == 0:
            counts[int(token)] += 1
    assert chance([counts[0], counts[1]], [0.25 * counts.total(), 0.75 * counts.total()]) > 1e-3


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 0.7, 1.0, 5.0])
def test_probabilities_are_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)) * 20
    found = drawing(temperature=temperature).probabilities(logits)
    wanted = ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature).softmax(-1).float()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_top_p_keeps_the_fewest_best_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.2]]).log()
    for top_p, wanted in {
        0.4: [0, 1, 0, 0], 0.6: [0, 5 / 7, 2 / 7, 0], 0.85: [0, 5 / 9, 2 / 9, 2 / 9], 1.0: [0.1, 0.5, 0.2, 0.2]
    }.items():  # fmt: skip
        torch.testing.assert_close(drawing(top_p=top_p).probabilities(logits), torch.tensor([wanted]).float())


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(-1.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0), (1, 0), (1, 2)]
)
def test_what_is_no_temperature_is_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        seeded_sampling(temperature, top_p, 0, "cpu")


# --- the loop ---


@cache
def small() -> tuple[TargetModel, DraftModel]:
    """A vocabulary of four tokens, and a random drafter of blocks of three: two drafts and the target's own token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.35, eos_token_id=None, bos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    target = TargetModel(LlamaForCausalLM(config))
    drafter = DraftModel(target.draft_config(1, 3, (0,), 0))
    with torch.no_grad():
        drafter.fc.weight.normal_(0, 0.5)
    return target, drafter


@torch.no_grad()
def exact(length: int, temperature: float, top_p: float = 1.0) -> dict[tuple[int, ...], float]:
    """The chance of each answer of `length` tokens, by the model's own forward."""
    target, _ = small()
    answers = list(itertools.product(range(VOCABULARY), repeat=length))
    ids = torch.tensor([PROMPT + list(answer) for answer in answers])
    logits = target.model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    own = drawing(temperature=temperature, top_p=top_p).probabilities(logits.flatten(0, 1)).view(logits.shape).double()
    chances = own.gather(2, ids[:, len(PROMPT) :, None])[..., 0].prod(-1)
    return dict(zip(answers, chances.tolist(), strict=True))


def answers_of(
    decode: Callable[[Sampling], list[int]], count: int, temperature: float, top_p: float = 1.0
) -> list[tuple[int, ...]]:
    sampled = drawing(seed=11, temperature=temperature, top_p=top_p)
    return [tuple(decode(sampled)) for _ in range(count)]


def speculative(sampled: Sampling) -> list[int]:
    target, drafter = small()
    return decode_speculative(target, drafter, PROMPT, 4, NEVER, sampling=sampled).tokens


def plain(sampled: Sampling) -> list[int]:
    return decode_plain(small()[0], PROMPT, 4, NEVER, sampling=sampled).tokens


def chances(answers: Sequence[tuple[int, ...]], temperature: float, top_p: float = 1.0) -> dict[str, float]:
    """Of what was drawn: of each of the four tokens, of the first three together, of the last three together."""
    wanted = exact(4, temperature, top_p)
    found: dict[str, float] = {}
    for name, (begin, end) in {
        "1": (0, 1),
        "2": (1, 2),
        "3": (2, 3),
        "4": (3, 4),
        "1-3": (0, 3),
        "2-4": (1, 4),
    }.items():
        counts = Counter(answer[begin:end] for answer in answers)
        shares: dict[tuple[int, ...], float] = {}
        for answer, share in wanted.items():
            shares[answer[begin:end]] = shares.get(answer[begin:end], 0.0) + share
        cells = list(shares)
        found[name] = chance([counts[cell] for cell in cells], [shares[cell] * len(answers) for cell in cells])
    return found


@pytest.mark.timeout(600)  # with --soak, on a busy machine
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.8, 0.9)])
def test_decoding_with_a_drafter_draws_from_the_target_s_distribution(
    temperature: float, top_p: float, soak: bool
) -> None:
    count = 8_000 if soak else 400 if top_p == 1 else 200
    found = chances(answers_of(speculative, count, temperature, top_p), temperature, top_p)
    assert min(found.values()) > 1e-3, found


@pytest.mark.timeout(600)
def test_plain_decoding_draws_from_it_too(soak: bool) -> None:
    found = chances(answers_of(plain, 8_000 if soak else 200, 1.0), 1.0)
    assert min(found.values()) > 1e-3, found


class AlwaysAccepts(Sampling):
    def verify(self, drafts_P: Tensor, drafted_PV: Tensor, own_CV: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(len(drafts_P)), self.draw(own_CV[-1:])[0]


class AddsADraft(Sampling):
    """Where all are accepted, the token behind them comes from the drafter's distribution."""

    def verify(self, drafts_P: Tensor, drafted_PV: Tensor, own_CV: Tensor) -> tuple[Tensor, Tensor]:
        return super().verify(drafts_P, drafted_PV, torch.cat((own_CV[:-1], drafted_PV[-1:])))


class ReplacesByItsOwn(Sampling):
    """A rejected draft is replaced by a draw from p instead of what p has above q."""

    def verify(self, drafts_P: Tensor, drafted_PV: Tensor, own_CV: Tensor) -> tuple[Tensor, Tensor]:
        count, _ = super().verify(drafts_P, drafted_PV, own_CV)
        return count, self.draw(own_CV.index_select(0, count[None]))[0]


@pytest.mark.parametrize(("broken", "count"), [(AlwaysAccepts, 150), (AddsADraft, 400), (ReplacesByItsOwn, 200)])
def test_a_broken_rule_fails_the_same_test(broken: type[Sampling], count: int) -> None:
    sampled = broken(1.0, 1.0, torch.Generator().manual_seed(11))
    found = chances([tuple(speculative(sampled)) for _ in range(count)], 1.0)
    assert min(found.values()) < 1e-6, found


def test_the_same_seed_draws_the_same_answer() -> None:
    first, second = (answers_of(speculative, 20, 1.0) for _ in range(2))
    assert first == second and len(set(first)) > 5


def test_a_temperature_near_0_gives_the_best_tokens_of_many_families() -> None:
    targets = [tiny_target("llama"), tiny_target("qwen3"), *map(TargetModel, map(tiny_model, ("granite", "mistral")))]
    for target in targets:
        torch.manual_seed(1)
        drafter = drafter_for(target, block=5, mask_token_id=3)
        best = decode_plain(target, [5, 9, 8], 12, NEVER)
        found = decode_speculative(target, drafter, [5, 9, 8], 12, NEVER, sampling=drawing(temperature=1e-6))
        assert found.tokens == best.tokens
        assert all(gap != gap for gap in found.gaps) and set(found.runners_up) == {-1}


def test_drawn_answers_end_and_count_as_others_do() -> None:
    """What an end token cuts off does not count, drafted or not."""
    target = tiny_target()
    torch.manual_seed(1)
    drafter = drafter_for(target, block=5)
    ends = frozenset(range(40, 100))
    for seed in range(10):
        answer = decode_speculative(target, drafter, [5, 9, 8], 12, ends, sampling=drawing(seed))
        assert not ends & set(answer.tokens[:-1])
        assert answer.tokens[-1] in ends or len(answer.tokens) == 12
        assert sum(answer.accepted) >= len(answer.tokens) - 1
        assert len(answer.drafted) == len(answer.tokens) and not answer.drafted[0]


def test_an_answer_can_be_followed_cycle_by_cycle() -> None:
    target, drafter = small()
    decoding = SpeculativeDecoding(target, drafter, PROMPT, 9, NEVER, sampling=drawing(3))
    lengths = [len(decoding.tokens)]
    while not decoding.full:
        decoding.cycle()
        lengths.append(len(decoding.tokens))
    whole = decode_speculative(target, drafter, PROMPT, 9, NEVER, sampling=drawing(3))
    assert decoding.tokens == whole.tokens and decoding.decoded().accepted == whole.accepted
    assert lengths[0] == 1 and lengths[-1] == 9 and lengths == sorted(set(lengths))
