"""Head and loss in chunks: any chunking and any split into parts gives the same sums and gradients."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.loss import LossTerms, Objective, Weighting, chunk_loss, loss_and_accepted

Kind = Literal["exp-decay", "d-pace"]
KINDS: list[Kind] = ["exp-decay", "d-pace"]
OBJECTIVES: list[Objective] = ["cross-entropy", "kl", "tv"]
B, N, T, H, V = 2, 3, 5, 8, 31


class Given:
    """Random hidden states, head, labels and masks, float64."""

    def __init__(self, supervised: float = 0.7, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(B, N, T, H, generator=draw, dtype=torch.float64).requires_grad_()
        self.head = torch.randn(V, H, generator=draw, dtype=torch.float64)
        self.teacher = torch.randn(B, N, T - 1, H, generator=draw, dtype=torch.float64)
        self.keep = torch.rand(B, N, generator=draw) < 0.9
        self.mask = (torch.rand(B, N, T - 1, generator=draw) < supervised) & self.keep[..., None]
        self.labels = torch.randint(0, V, (B, N, T - 1), generator=draw) * self.mask

    def terms(
        self,
        weighting: Weighting,
        chunk_blocks: int = 100,
        rows: slice = slice(None),
        blocks: slice = slice(None),
        objective: Objective = "cross-entropy",
    ) -> LossTerms:
        here = rows, blocks
        own = self.hidden[here], self.head, self.labels[here], self.mask[here], self.keep[here]
        return loss_and_accepted(*own, weighting, chunk_blocks, teacher_BNPH=self.teacher[here], objective=objective)[0]

    def gradient(self, terms: LossTerms) -> Tensor:
        (grad,) = torch.autograd.grad(terms.loss_sum, self.hidden)
        return grad


def plain(given: Given, kind: str, gamma: float, alpha: float, objective: str) -> tuple[Tensor, float]:
    """Loss sum (with its graph) and normaliser, slot by slot, from the specification."""
    total, normaliser = torch.zeros((), dtype=torch.float64), 0.0
    for b in range(B):
        for n in range(N):
            losses: list[Tensor] = []
            chances: list[float] = []
            for k in range(1, T):
                q = torch.softmax(given.head @ given.hidden[b, n, k], dim=0)
                p = torch.softmax(given.head @ given.teacher[b, n, k - 1], dim=0)
                data_token = given.labels[b, n, k - 1]
                chances.append(q[data_token].item())
                if objective == "cross-entropy":
                    losses.append(-torch.log(q[data_token]))
                elif objective == "kl":
                    losses.append(torch.nn.functional.kl_div(torch.log(q), p, reduction="sum"))
                else:
                    losses.append(1 - torch.minimum(p, q).sum())
            mask = given.mask[b, n].tolist()
            reached, lifted = [], 1.0
            for k in range(T - 1):
                lifted *= (1 - alpha) * chances[k] + alpha if mask[k] else 1.0
                reached.append(lifted * mask[k])
            for k in range(T - 1):
                weight = math.exp(-k / gamma) if kind == "exp-decay" else sum(reached[k:])
                total = total + weight * mask[k] * losses[k]
                normaliser += (weight if kind == "exp-decay" else 1.0) * mask[k]
    return total, normaliser


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_the_specifications(kind: Kind, objective: Objective) -> None:
    given = Given()
    terms = given.terms(Weighting(kind, gamma=4.0, alpha=0.3), 4, objective=objective)
    expected, normaliser = plain(given, kind, 4.0, 0.3, objective)
    assert terms.loss_sum.item() == pytest.approx(expected.item(), abs=1e-10)
    assert terms.normaliser.item() == pytest.approx(normaliser, abs=1e-10)
    (wanted,) = torch.autograd.grad(expected, given.hidden)
    torch.testing.assert_close(given.gradient(terms), wanted, rtol=0, atol=1e-10)
    assert (wanted[:, :, 0] == 0).all()  # the anchor's slot predicts nothing
    assert wanted.abs().max() > 1e-3


@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    objective=st.sampled_from(OBJECTIVES),
    chunks=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    cuts=st.tuples(st.integers(0, B), st.integers(0, N)),
)
def test_any_chunks_and_any_parts_add_up_to_the_whole(
    seed: int, kind: Kind, objective: Objective, chunks: list[int], cuts: tuple[int, int]
) -> None:
    given = Given(seed=seed)
    whole = given.terms(Weighting(kind), objective=objective)
    row, block = cuts
    parts = [
        given.terms(Weighting(kind), chunk, rows, blocks, objective)
        for chunk, (rows, blocks) in zip(
            chunks,
            [(r, b) for r in (slice(row), slice(row, None)) for b in (slice(block), slice(block, None))],
            strict=True,
        )
        if given.keep[rows, blocks].numel()
    ]
    total = sum(parts[1:], parts[0])
    for name in vars(whole):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name), rtol=0, atol=1e-10)
    torch.testing.assert_close(given.gradient(total), given.gradient(whole), rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", ["kl", "tv"])
def test_the_target_s_own_distribution_has_no_loss(objective: Objective) -> None:
    given = Given()
    given.teacher = given.hidden.detach()[:, :, 1:].clone()
    terms = given.terms(Weighting("d-pace"), objective=objective)
    assert terms.loss_sum.item() == pytest.approx(0, abs=1e-12)
    assert given.gradient(terms).abs().max() < 1e-12


def test_the_target_s_distribution_is_asked_for_when_it_is_missing() -> None:
    given = Given()
    own = given.hidden, given.head, given.labels, given.mask, given.keep
    with pytest.raises(ValueError, match="objective 'kl' needs the target's final hidden states"):
        loss_and_accepted(*own, Weighting("d-pace"), 4, objective="kl")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_chunk_compiles_whole(objective: Objective) -> None:
    """As on a GPU, but by a backend that makes no kernels."""
    torch.compiler.reset()  # at most 8 compiled forms are kept
    compiled = torch.compile(chunk_loss, backend="aot_eager", fullgraph=True, dynamic=False)
    given = Given()
    for kind in KINDS:
        teacher = None if objective == "cross-entropy" else given.teacher.flatten(0, 1)
        args = (
            given.hidden.detach()[:, :, 1:].flatten(0, 1),
            given.head,
            given.labels.flatten(0, 1),
            given.mask.flatten(0, 1),
            teacher,
            Weighting(kind),
            objective,
            True,
        )
        with torch.no_grad():
            for one, other in zip(compiled(*args), chunk_loss(*args), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_accuracy_and_acceptance_count_leading_right_slots_and_the_bonus() -> None:
    given = Given(supervised=1.0)
    given.keep[:] = True
    given.mask[:] = True
    given.head = torch.eye(V, dtype=torch.float64)
    # Blocks with 0, 1, ... right slots before the first wrong one, and right ones after it.
    leading = [0, 1, 2, 3, 4, 4]
    hidden = torch.zeros(6, T, V, dtype=torch.float64)
    labels = torch.arange(1, 5).expand(6, 4).clone()
    for block, right in enumerate(leading):
        for k in range(1, T):
            hidden[block, k, k if k != right + 1 else 30] = 1.0
    given.hidden, given.labels = hidden.view(2, 3, T, V), labels.view(2, 3, 4)
    terms = given.terms(Weighting("d-pace"))
    loss, accuracy, accept = terms.figures().tolist()
    assert accept == pytest.approx(sum(1 + n for n in leading) / 6)
    assert accuracy == pytest.approx(20 / 24)
    assert terms.correct_P.tolist() == [5, 5, 5, 5] and terms.supervised_P.tolist() == [6] * 4
    own = given.hidden, given.head, given.labels, given.mask, given.keep
    again, accepted = loss_and_accepted(*own, Weighting("d-pace"), 4)
    assert accepted.flatten().tolist() == leading and again.accepted == terms.accepted
    # A slot that isn't supervised ends the accepted run; a block without an anchor doesn't count.
    given.mask.view(6, 4)[5, 1] = False
    given.keep.view(6)[0] = False
    given.mask.view(6, 4)[0] = False
    _, _, accept = given.terms(Weighting("d-pace")).figures().tolist()
    assert accept == pytest.approx((2 + 3 + 4 + 5 + 2) / 5)
    assert loss > 0


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from(KINDS), st.sampled_from(OBJECTIVES))
def test_any_mask_gives_finite_sums_and_gradients(
    seed: int, supervised: float, kind: Kind, objective: Objective
) -> None:
    given = Given(supervised, seed)
    terms = given.terms(Weighting(kind), chunk_blocks=2, objective=objective)
    gradient = given.gradient(terms)
    assert torch.isfinite(terms.loss_sum) and torch.isfinite(gradient).all()
    assert (gradient[:, :, 1:][~given.mask] == 0).all()
    if not given.mask.any():
        assert terms.normaliser == 0 and terms.loss_sum == 0 and (gradient == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_bfloat16_head_gives_the_gradient_up_to_rounding(objective: Objective) -> None:
    given = Given()
    exact = given.gradient(given.terms(Weighting("d-pace"), objective=objective))
    hidden = given.hidden.detach().bfloat16().requires_grad_()
    args = given.labels, given.mask, given.keep, Weighting("d-pace"), 2
    teacher = given.teacher.bfloat16()
    terms = loss_and_accepted(hidden, given.head.bfloat16(), *args, teacher_BNPH=teacher, objective=objective)[0]
    assert terms.loss_sum.dtype == torch.float32
    terms.loss_sum.backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("lead", [9.0, 10.0, 14.0])
def test_a_bfloat16_head_keeps_the_gradient_of_a_sure_slot(lead: float, objective: Objective) -> None:
    """p of the label is 0.996 and more: its gradient is the small rest, not the rounding of p."""
    head = torch.eye(V)  # so the logits are the hidden states, exact in bfloat16
    hidden, teacher = torch.zeros(1, 1, 2, V), torch.zeros(1, 1, 1, V)
    hidden[0, 0, 1, 3], teacher[0, 0, 0, 3] = lead, lead + 4
    labels, mask, keep = torch.full((1, 1, 1), 3), torch.ones(1, 1, 1, dtype=torch.bool), torch.ones(1, 1).bool()
    grads: list[Tensor] = []
    for dtype in (torch.float64, torch.bfloat16):
        own = hidden.to(dtype).requires_grad_()
        args = own, head.to(dtype), labels, mask, keep, Weighting("exp-decay"), 4
        loss_and_accepted(*args, teacher_BNPH=teacher.to(dtype), objective=objective)[0].loss_sum.backward()
        assert own.grad is not None
        grads.append(own.grad.double())
    assert 0 < -grads[0][0, 0, 1, 3] < 0.004
    torch.testing.assert_close(grads[1], grads[0], rtol=0.01, atol=1e-6)  # float32 beside 1 has no more digits
