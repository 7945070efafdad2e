"""Head and loss in chunks: any chunking and any split into parts gives the same sums and gradients."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.loss import LossTerms, Weighting, blocks_loss

KINDS: list[Literal["exp-decay", "d-pace"]] = ["exp-decay", "d-pace"]
B, N, T, H, V = 2, 3, 5, 8, 31


class Given:
    """Random hidden states, head, labels and masks, float64."""

    def __init__(self, supervised: float = 0.7, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(B, N, T, H, generator=draw, dtype=torch.float64).requires_grad_()
        self.head = torch.randn(V, H, generator=draw, dtype=torch.float64)
        self.keep = torch.rand(B, N, generator=draw) < 0.9
        self.mask = (torch.rand(B, N, T - 1, generator=draw) < supervised) & self.keep[..., None]
        self.labels = torch.randint(0, V, (B, N, T - 1), generator=draw) * self.mask

    def terms(self, weighting: Weighting, chunk_blocks: int = 100, rows: slice = slice(None)) -> LossTerms:
        own = self.hidden[rows], self.head, self.labels[rows], self.mask[rows], self.keep[rows]
        return blocks_loss(*own, weighting, chunk_blocks)

    def gradient(self, terms: LossTerms) -> Tensor:
        (grad,) = torch.autograd.grad(terms.loss_sum, self.hidden)
        return grad


def plain(given: Given, kind: str, gamma: float, alpha: float) -> tuple[Tensor, float]:
    """Loss sum (with its graph) and normaliser, slot by slot, from the specification."""
    total, normaliser = torch.zeros((), dtype=torch.float64), 0.0
    for b in range(B):
        for n in range(N):
            entropies = [
                torch.nn.functional.cross_entropy(given.head @ given.hidden[b, n, k], given.labels[b, n, k - 1])
                for k in range(1, T)
            ]
            mask = given.mask[b, n].tolist()
            reached, lifted = [], 1.0
            for k in range(T - 1):
                lifted *= (1 - alpha) * math.exp(-entropies[k].item()) + alpha if mask[k] else 1.0
                reached.append(lifted * mask[k])
            for k in range(T - 1):
                weight = math.exp(-k / gamma) if kind == "exp-decay" else sum(reached[k:])
                total = total + weight * mask[k] * entropies[k]
                normaliser += (weight if kind == "exp-decay" else 1.0) * mask[k]
    return total, normaliser


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_the_specifications(kind: Literal["exp-decay", "d-pace"]) -> None:
    given = Given()
    terms = given.terms(Weighting(kind, gamma=4.0, alpha=0.3))
    expected, normaliser = plain(given, kind, 4.0, 0.3)
    assert terms.loss_sum.item() == pytest.approx(expected.item(), abs=1e-10)
    assert terms.normaliser.item() == pytest.approx(normaliser, abs=1e-10)
    (wanted,) = torch.autograd.grad(expected, given.hidden)
    torch.testing.assert_close(given.gradient(terms), wanted, rtol=0, atol=1e-10)
    assert (wanted[:, :, 0] == 0).all()  # the anchor's slot predicts nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4, 6])
def test_chunks_change_nothing(kind: Literal["exp-decay", "d-pace"], chunk_blocks: int) -> None:
    given = Given()
    whole, cut = given.terms(Weighting(kind)), given.terms(Weighting(kind), chunk_blocks)
    for name in vars(whole):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), rtol=0, atol=1e-10)
    torch.testing.assert_close(given.gradient(cut), given.gradient(whole), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up(kind: Literal["exp-decay", "d-pace"]) -> None:
    given = Given()
    whole = given.terms(Weighting(kind))
    parts = given.terms(Weighting(kind), rows=slice(0, 1)) + given.terms(Weighting(kind), rows=slice(1, 2))
    for name in vars(whole):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-10)
    torch.testing.assert_close(given.gradient(parts), given.gradient(whole), rtol=0, atol=1e-10)


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
    # A slot that isn't supervised ends the accepted run; a block without an anchor doesn't count.
    given.mask.view(6, 4)[5, 1] = False
    given.keep.view(6)[0] = False
    given.mask.view(6, 4)[0] = False
    _, _, accept = given.terms(Weighting("d-pace")).figures().tolist()
    assert accept == pytest.approx((2 + 3 + 4 + 5 + 2) / 5)
    assert loss > 0


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from(KINDS))
def test_any_mask_gives_finite_sums_and_gradients(
    seed: int, supervised: float, kind: Literal["exp-decay", "d-pace"]
) -> None:
    given = Given(supervised, seed)
    terms = given.terms(Weighting(kind), chunk_blocks=2)
    gradient = given.gradient(terms)
    assert torch.isfinite(terms.loss_sum) and torch.isfinite(gradient).all()
    assert (gradient[:, :, 1:][~given.mask] == 0).all()
    if not given.mask.any():
        assert terms.normaliser == 0 and terms.loss_sum == 0 and (gradient == 0).all()


def test_a_bfloat16_head_gives_the_gradient_up_to_rounding() -> None:
    given = Given()
    exact = given.gradient(given.terms(Weighting("d-pace")))
    hidden = given.hidden.detach().bfloat16().requires_grad_()
    args = given.labels, given.mask, given.keep, Weighting("d-pace"), 2
    terms = blocks_loss(hidden, given.head.bfloat16(), *args)
    assert terms.loss_sum.dtype == torch.float32
    terms.loss_sum.backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("lead", [9.0, 10.0, 14.0])
def test_a_bfloat16_head_keeps_the_gradient_of_a_sure_slot(lead: float) -> None:
    """p of the label is 0.996 and more: its gradient is the small rest, not the rounding of p."""
    head = torch.eye(V)  # so the logits are the hidden states, exact in bfloat16
    hidden = torch.zeros(1, 1, 2, V)
    hidden[0, 0, 1, 3] = lead
    labels, mask, keep = torch.full((1, 1, 1), 3), torch.ones(1, 1, 1, dtype=torch.bool), torch.ones(1, 1).bool()
    grads: list[Tensor] = []
    for dtype in (torch.float64, torch.bfloat16):
        own = hidden.to(dtype).requires_grad_()
        blocks_loss(own, head.to(dtype), labels, mask, keep, Weighting("exp-decay"), 4).loss_sum.backward()
        assert own.grad is not None
        grads.append(own.grad.double())
    assert 0 < -grads[0][0, 0, 1, 3] < 0.004
    torch.testing.assert_close(grads[1], grads[0], rtol=0.01, atol=0)
