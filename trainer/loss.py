"""Head and loss of a batch of blocks, in chunks: the logits of all blocks never exist at one time. Shapes: features.py.

Sums and their normaliser are returned apart, so that several forwards, devices and hosts can add up before dividing.
"""

# torch leaves `split` and `Function.apply` partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weighting:
    """How much each predicted slot counts.

    exp-decay: exp(-(k-1)/gamma) for slot k; normaliser: the sum of the weights.
    d-pace: how much slot k adds to the expected accepted length, from the drafter's own probabilities (2605.18810);
    normaliser: the number of supervised slots.
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

    loss_sum: Tensor  # weighted cross entropy; its gradient reaches `hidden`
    normaliser: Tensor
    correct_P: Tensor  # supervised slots whose best token is the label
    supervised_P: Tensor
    accepted: Tensor  # over blocks: 1 (the bonus token) + leading correct slots
    blocks: Tensor

    def __add__(self, other: "LossTerms") -> "LossTerms":
        return LossTerms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detached(self) -> "LossTerms":
        return LossTerms(*(cast(Tensor, getattr(self, f.name)).detach() for f in fields(self)))

    def figures(self) -> Tensor:
        """[3] loss, accuracy, acceptance length, still on the device, so that reading can wait. nan without a block."""
        accuracy = self.correct_P.sum() / self.supervised_P.sum()
        return torch.stack((self.loss_sum / self.normaliser, accuracy, self.accepted / self.blocks)).float()


# hidden [M, P, H], head [V, H], labels [M, P], mask [M, P], weighting, gradient wanted
#   -> loss sum, normaliser, correct [M, P], gradient of the loss sum to hidden (or empty)
ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Weighting, bool], tuple[Tensor, Tensor, Tensor, Tensor]]


def chunk_loss(
    hidden_MPH: Tensor, head_VH: Tensor, labels_MP: Tensor, mask_MP: Tensor, weighting: Weighting, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of some whole blocks, and at once its gradient: the logits needn't be kept or made again for it."""
    # Products of two axes, not three: else they become one for each block, which reads the whole head each time.
    logits = hidden_MPH.to(head_VH.dtype).flatten(0, 1) @ head_VH.T
    logits_MPV = (logits if logits.dtype == torch.float64 else logits.float()).view(*labels_MP.shape, -1)
    total_MP = logits_MPV.logsumexp(dim=-1)
    label_logit_MP = logits_MPV.gather(-1, labels_MP[..., None]).squeeze(-1)
    cross_entropy_MP = (total_MP - label_logit_MP) * mask_MP
    weights_MP = weighting.weights(cross_entropy_MP, mask_MP)
    correct_MP = (logits_MPV.argmax(dim=-1) == labels_MP) & mask_MP
    loss_sum, normaliser = (weights_MP * cross_entropy_MP).sum(), weighting.normaliser(weights_MP, mask_MP)
    if not wants_grad:
        return loss_sum, normaliser, correct_MP, hidden_MPH.new_empty(0)
    # d cross entropy / d logits = softmax - one-hot of the label. Subtracted before it is rounded to the head's type:
    # where the drafter is sure (p near 1) little is left, and rounding p first would leave nothing but its error.
    # Comparing with the label instead of scattering: compiled, all of it becomes one kernel.
    is_label_MPV = torch.arange(head_VH.shape[0], device=labels_MP.device) == labels_MP[..., None]
    grad_MPV = (torch.exp(logits_MPV - total_MP[..., None]) - is_label_MPV.to(total_MP.dtype)) * weights_MP[..., None]
    grad_MPH = grad_MPV.to(head_VH.dtype).flatten(0, 1) @ head_VH
    return loss_sum, normaliser, correct_MP, grad_MPH.view_as(hidden_MPH).to(hidden_MPH.dtype)


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


def blocks_loss(
    hidden_BNTH: Tensor,
    head_VH: Tensor,
    labels_BNP: Tensor,
    label_mask_BNP: Tensor,
    keep_BN: Tensor,
    weighting: Weighting,
    chunk_blocks: int,
    chunk: ChunkLoss = chunk_loss,
) -> LossTerms:
    """The loss of all blocks, slot 0 left out. `chunk` may be a compiled chunk_loss.

    hidden_BNTH: the drafter's output, [B, N, T, H]; head_VH: the target's head, frozen.
    """
    wants_grad = torch.is_grad_enabled() and hidden_BNTH.requires_grad
    hidden_MPH = hidden_BNTH[:, :, 1:].flatten(0, 1)
    labels_MP, mask_MP = labels_BNP.flatten(0, 1), label_mask_BNP.flatten(0, 1)
    with torch.no_grad():
        parts = [
            chunk(hidden, head_VH, labels, mask, weighting, wants_grad)
            for hidden, labels, mask in zip(
                hidden_MPH.detach().split(chunk_blocks),
                labels_MP.split(chunk_blocks),
                mask_MP.split(chunk_blocks),
                strict=True,
            )
        ]
        loss_sums, normalisers, corrects, grads = zip(*parts, strict=True)
        loss_sum = torch.stack(loss_sums).sum()
        correct_MP = torch.cat(corrects)
    if wants_grad:
        loss_sum = cast(Tensor, _WithGradient.apply(hidden_MPH, loss_sum, torch.cat(grads)))
    keep_M = keep_BN.flatten()
    return LossTerms(
        loss_sum=loss_sum,
        normaliser=torch.stack(normalisers).sum(),
        correct_P=correct_MP.sum(0),
        supervised_P=mask_MP.sum(0),
        accepted=((1 + correct_MP.int().cumprod(dim=1).sum(1)) * keep_M).sum(),
        blocks=keep_M.sum(),
    )
