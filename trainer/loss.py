"""Head and loss of a batch of blocks, in chunks: the logits of all blocks never exist at one time. Shapes: features.py.

Slot k of a block at anchor a predicts token a + k. A step's loss is

    sum over supervised slots of weight * slot loss / normaliser

with the weights and normaliser of a Weighting and the slot loss of an Objective. Sums and normaliser are returned
apart, so that several forwards, devices and hosts can add up before dividing: a D-PACE step whose parts were divided
each by its own count would depend on how it was cut.

The objectives, with q the drafter's distribution over the whole vocabulary and p the target's at the same place:

    cross-entropy  -log q(data token): the hard label
    kl             KL(p || q) = sum p (log p - log q)
    tv             total variation, 1 - sum min(p, q): the chance that a token drafted from q is rejected

The soft ones need the target's final hidden states (the teacher); p is made of them chunk by chunk with the same head.
tv's gradient vanishes with q where the drafter is surely wrong, so that it learns little from fresh weights.
"""

# torch leaves `split` and `Function.apply` partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor

from trainer import head_rows

Objective = Literal["cross-entropy", "kl", "tv"]


@dataclass(frozen=True)
class Weighting:
    """How much each predicted slot counts, whatever its objective.

    exp-decay (arXiv 2602.06036, DFlash): slot k counts exp(-(k-1)/gamma), gamma 7, 5, 4 for blocks of 16, 10, 8.
    Normaliser: the sum of the weights (as SpecForge).

    d-pace (arXiv 2605.18810): slot k counts what it adds to the expected accepted length. With q_i the drafter's chance
    of the data token in slot i, s_i = (1 - alpha) q_i + alpha (1 where not supervised) and P_j = s_1 ... s_j, it counts
    the sum of P_j over the supervised slots j >= k; alpha 0.5. Normaliser: the number of supervised slots (as
    speculators; SpecForge's is the number of sequences, with which the loss grows with the anchors drawn).
    """

    kind: Literal["exp-decay", "d-pace"]
    gamma: float = 7.0  # slots
    alpha: float = 0.5

    def weights(self, cross_entropy_MP: Tensor, mask_MP: Tensor) -> Tensor:
        """Weights [M, P], 0 where not supervised; no gradient flows through them."""
        if self.kind == "exp-decay":
            slots_P = torch.arange(mask_MP.shape[1], device=mask_MP.device, dtype=cross_entropy_MP.dtype)
            return torch.exp(-slots_P / self.gamma) * mask_MP
        chance_MP = torch.exp(-cross_entropy_MP.detach())
        lifted_MP = torch.where(mask_MP, (1 - self.alpha) * chance_MP + self.alpha, 1.0)
        reached_MP = lifted_MP.cumprod(dim=1) * mask_MP
        return reached_MP.flip(1).cumsum(dim=1).flip(1) * mask_MP

    def normaliser(self, weights_MP: Tensor, mask_MP: Tensor) -> Tensor:
        return weights_MP.sum() if self.kind == "exp-decay" else mask_MP.sum().to(weights_MP.dtype)


@dataclass(frozen=True)
class LossTerms:
    """Sums over blocks; add the terms of parts, then read the ratios."""

    loss_sum: Tensor  # weighted slot losses; its gradient reaches `hidden`
    normaliser: Tensor
    correct_P: Tensor  # supervised slots whose best token is the data's, in slot 1, 2, ... of all blocks
    supervised_P: Tensor
    accepted: Tensor  # over blocks: 1 (the bonus token) + leading correct slots
    blocks: Tensor  # how many; those without an anchor don't count

    def __add__(self, other: "LossTerms") -> "LossTerms":
        return LossTerms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detached(self) -> "LossTerms":
        return LossTerms(*(cast(Tensor, getattr(self, f.name)).detach() for f in fields(self)))

    def figures(self) -> Tensor:
        """[3] loss, accuracy, acceptance length, still on the device, so that reading can wait. nan without a block.

        loss: nats (tv: a chance), comparable only under one weighting and objective. accuracy: share of supervised
        slots whose best token is the data's. acceptance length: mean over blocks of 1 + leading correct slots: what a
        decoding cycle from that anchor would give, if the target chose the data's tokens; 1 to T. It is the mean over
        the anchors that were drawn, where a decoder visits a token behind each cycle only (acceptance.py).
        """
        accuracy = self.correct_P.sum() / self.supervised_P.sum()
        return torch.stack((self.loss_sum / self.normaliser, accuracy, self.accepted / self.blocks)).float()


# hidden [M, P, H], head [V, H], labels [M, P], mask [M, P], teacher [M, P, H] or None, weighting, objective, gradient
# wanted -> loss sum, normaliser, correct [M, P], gradient of the loss sum to hidden (or empty)
ChunkLoss = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Weighting, Objective, bool], tuple[Tensor, Tensor, Tensor, Tensor]
]


def logits_of(hidden_MPH: Tensor, head_VH: Tensor) -> Tensor:
    """[M * P, V], in the head's type."""
    # Products of two axes, not three: else they become one for each block, which reads the whole head each time.
    return hidden_MPH.to(head_VH.dtype).flatten(0, 1) @ head_VH.T


def widened(logits: Tensor) -> Tensor:
    """float32 or wider."""
    return logits if logits.dtype == torch.float64 else logits.float()


def chunk_loss(
    hidden_MPH: Tensor,
    head_VH: Tensor,
    labels_MP: Tensor,
    mask_MP: Tensor,
    teacher_MPH: Tensor | None,
    weighting: Weighting,
    objective: Objective,
    wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of some whole blocks, and at once its gradient: the logits needn't be kept or made again for it.

    Gradients to the logits are sums of nearly equal numbers where the drafter is sure. They are subtracted before they
    are rounded to the head's type: rounding p or q first would leave nothing but its error. The weight of a slot is the
    same for all of its logits, so it comes after the product.
    """
    logits_RV, labels_R = logits_of(hidden_MPH, head_VH), labels_MP.flatten()
    if teacher_MPH is not None:
        teacher_RV = widened(logits_of(teacher_MPH, head_VH))
        slot_R, grad_RV = soft_loss(widened(logits_RV), teacher_RV, objective)
        cross_entropy_R, right_R, _ = row_losses(logits_RV, labels_R, wants_grad=False)
    else:
        cross_entropy_R, right_R, grad_RV = row_losses(logits_RV, labels_R, wants_grad=wants_grad)
        slot_R = cross_entropy_R
    weights_MP = weighting.weights(cross_entropy_R.view_as(mask_MP) * mask_MP, mask_MP)
    correct_MP = right_R.view_as(mask_MP) & mask_MP
    loss_sum = (weights_MP * slot_R.view_as(mask_MP) * mask_MP).sum()
    normaliser = weighting.normaliser(weights_MP, mask_MP)
    if not wants_grad:
        return loss_sum, normaliser, correct_MP, hidden_MPH.new_empty(0)
    grad_RH = (grad_RV.to(head_VH.dtype) @ head_VH) * weights_MP.view(-1, 1)
    return loss_sum, normaliser, correct_MP, grad_RH.view_as(hidden_MPH).to(hidden_MPH.dtype)


def row_losses(logits_RV: Tensor, labels_R: Tensor, *, wants_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its cross-entropy [R], whether its label is its best column [R], and the gradient to its logits
    [R, V] (without wants_grad nothing of use). With wants_grad the logits may be overwritten.
    """
    if head_rows.takes(logits_RV):
        return *head_rows.rows_in_place(logits_RV, labels_R, gradient=wants_grad), logits_RV
    wide_RV = widened(logits_RV)
    total_R = wide_RV.logsumexp(dim=-1)
    cross_entropy_R = total_R - wide_RV.gather(-1, labels_R[:, None]).squeeze(-1)
    right_R = wide_RV.argmax(dim=-1) == labels_R
    if not wants_grad:
        return cross_entropy_R, right_R, wide_RV
    # Comparing with the label instead of scattering: compiled, all of it becomes one kernel.
    is_label_RV = torch.arange(wide_RV.shape[1], device=labels_R.device) == labels_R[:, None]
    return cross_entropy_R, right_R, torch.exp(wide_RV - total_R[:, None]) - is_label_RV.to(total_R.dtype)


def soft_loss(logits_RV: Tensor, teacher_RV: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """The distance of the drafter's distribution q from the target's p in each slot, and its gradient to the logits.

    kl: d/dz_j sum_v p_v (log p_v - log q_v) = q_j - p_j.
    tv: 1 - sum min(p, q) is the sum of p - q over where q < p. With dq_v/dz_j = q_v ([v = j] - q_j) its gradient is
    -q_j ([q_j < p_j] - below), where `below` is the sum of q over where q < p. 1 - below is summed by itself, from the
    other places: as a difference it would be lost where `below` is near 1.
    """
    log_q_RV = logits_RV - logits_RV.logsumexp(dim=-1, keepdim=True)
    log_p_RV = teacher_RV - teacher_RV.logsumexp(dim=-1, keepdim=True)
    q_RV, p_RV = log_q_RV.exp(), log_p_RV.exp()
    if objective == "kl":
        return (p_RV * (log_p_RV - log_q_RV)).sum(dim=-1), q_RV - p_RV
    is_below_RV = q_RV < p_RV
    below_R = torch.where(is_below_RV, q_RV, 0.0).sum(dim=-1)
    above_R = torch.where(is_below_RV, 0.0, q_RV).sum(dim=-1)
    distance_R = (p_RV - q_RV).clamp(min=0.0).sum(dim=-1)
    return distance_R, q_RV * torch.where(is_below_RV, -above_R[..., None], below_R[..., None])


class _WithGradient(torch.autograd.Function):
    """Gives a value whose gradient to `hidden` is known already to autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None


def loss_and_accepted(
    hidden_BNTH: Tensor,
    head_VH: Tensor,
    labels_BNP: Tensor,
    label_mask_BNP: Tensor,
    keep_BN: Tensor,
    weighting: Weighting,
    chunk_blocks: int,
    chunk: ChunkLoss = chunk_loss,
    *,
    teacher_BNPH: Tensor | None = None,
    objective: Objective = "cross-entropy",
) -> tuple[LossTerms, Tensor]:
    """The loss of all blocks, slot 0 left out, and each block's accepted slots, [B, N]: leading supervised ones whose
    best token is the label. LossTerms.accepted is their sum over the kept blocks, and 1 more for each.

    hidden_BNTH: the drafter's output, [B, N, T, H]; head_VH: the target's head, frozen; `chunk` may be a compiled
    chunk_loss. teacher_BNPH: what the target's head reads at token a + k - 1 for slot k = 1..P, its final norm done;
    only the soft objectives need it.
    """
    soft = objective != "cross-entropy"
    if soft and teacher_BNPH is None:
        raise ValueError(f"objective {objective!r} needs the target's final hidden states, and none were given")
    wants_grad = torch.is_grad_enabled() and hidden_BNTH.requires_grad
    hidden_MPH = hidden_BNTH[:, :, 1:].flatten(0, 1)
    labels_MP, mask_MP = labels_BNP.flatten(0, 1), label_mask_BNP.flatten(0, 1)
    with torch.no_grad():
        hiddens = hidden_MPH.detach().split(chunk_blocks)
        teachers = teacher_BNPH.flatten(0, 1).split(chunk_blocks) if soft and teacher_BNPH is not None else None
        parts = [
            chunk(hidden, head_VH, labels, mask, teacher, weighting, objective, wants_grad)
            for hidden, labels, mask, teacher in zip(
                hiddens,
                labels_MP.split(chunk_blocks),
                mask_MP.split(chunk_blocks),
                teachers or [None] * len(hiddens),
                strict=True,
            )
        ]
        loss_sums, normalisers, corrects, grads = zip(*parts, strict=True)
        loss_sum = torch.stack(loss_sums).sum()
        correct_MP = torch.cat(corrects)
        accepted_M = correct_MP.int().cumprod(dim=1).sum(1)
    if wants_grad:
        loss_sum = cast(Tensor, _WithGradient.apply(hidden_MPH, loss_sum, torch.cat(grads)))
    keep_M = keep_BN.flatten()
    terms = LossTerms(
        loss_sum=loss_sum,
        normaliser=torch.stack(normalisers).sum(),
        correct_P=correct_MP.sum(0),
        supervised_P=mask_MP.sum(0),
        accepted=((1 + accepted_M) * keep_M).sum(),
        blocks=keep_M.sum(),
    )
    return terms, accepted_M.view_as(keep_BN)
