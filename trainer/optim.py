"""AdamW for the drafter, and the learning rate of each step.

Weights stay float32; on CUDA the forward runs on copies in bfloat16. (Weights in bfloat16 without float32 masters
went to NaN elsewhere after a few hundred steps at this learning rate.)
"""

# torch's optimisers are partly untyped, and its functions for many tensors at once are not named as public.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false, reportPrivateUsage=false

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


def decayed(name: str) -> bool:
    """Matrices are decayed, norms are not."""
    return not name.endswith("norm.weight")


def parameter_names(model: nn.Module) -> list[str]:
    """Trained parameters in the optimiser's order: matrices, then norms."""
    names = [name for name, _ in model.named_parameters()]
    return [n for n in names if decayed(n)] + [n for n in names if not decayed(n)]


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over all parameters, betas 0.9 and 0.999; fused into one kernel on CUDA."""
    parameters = dict(model.named_parameters())
    names = parameter_names(model)
    groups = [
        {"params": [parameters[n] for n in names if decayed(n)], "weight_decay": weight_decay},
        {"params": [parameters[n] for n in names if not decayed(n)], "weight_decay": 0.0},
    ]
    fused = all(p.is_cuda for p in parameters.values())
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=fused)


def divide_gradients(parameters: Sequence[nn.Parameter], normaliser: Tensor) -> None:
    """Makes means of gradients that are sums. normaliser: on their device; with 0 all gradients are 0 anyway."""
    scale = 1 / normaliser.clamp(min=1e-12)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)


def gradient_norms(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The norm of each gradient, on its device; those without a gradient have none.

    `total_norm` of them, in the model's order, is to the bit what torch's clip_grad_norm_ returns, wherever each was
    made.
    """
    return norms_of([parameter.grad for parameter in parameters if parameter.grad is not None])


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each, in float32 or wider."""
    by_type: dict[torch.dtype, list[int]] = {}  # one call for many wants one type
    for index, gradient in enumerate(gradients):
        by_type.setdefault(gradient.dtype, []).append(index)
    found: dict[int, Tensor] = {}
    for dtype, places in by_type.items():
        wide = torch.promote_types(dtype, torch.float32)
        found |= zip(places, torch._foreach_norm([gradients[i] for i in places], dtype=wide), strict=True)
    return [found[index] for index in range(len(gradients))]


def clip_scale(grad_norm: Tensor, highest: float) -> Tensor:
    """What torch's clipping multiplies gradients by."""
    return (highest / (grad_norm + 1e-6)).clamp(max=1.0)


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a whole gradient, made of its tensors' norms, all on one device."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def step_if(good: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's step, or, where `good` (a bool) is False, none at all: weights, moments and step counts stay.

    A fused optimiser reads the answer on its own device, so that the host needn't wait for it: its kernel writes
    nothing when `found_inf` is 1, and takes its own increment of the step counts back. (That is how torch's GradScaler
    skips a step.) Any other one is asked here. The gradients of a skipped step may be anything.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        if good.item():
            optimizer.step()
        return
    fused = cast(Any, optimizer)
    fused.found_inf = 1.0 - good.float()
    try:
        optimizer.step()
    finally:
        del fused.found_inf


def learning_rate(step: int, *, steps: int, highest: float, warmup_ratio: float) -> float:
    """The rate of a step counted from 1: a linear rise to `highest`, then a cosine that would be 0 one step after."""
    warmup = round(steps * warmup_ratio)
    if step <= warmup:
        return highest * step / warmup
    share = (step - 1 - warmup) / max(1, steps - warmup)
    return highest * 0.5 * (1 + math.cos(math.pi * share))
