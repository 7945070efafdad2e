"""AdamW in one pass over each weight: gradient divided and clipped, moments, weight, and the copy that computes.

torch's own fused AdamW wants gradients of the weights' type and leaves dividing, clipping and the copy to passes of
their own. Moments are kept where torch's optimiser keeps them, so checkpoints are the same.
"""

# torch's optimisers are partly untyped, and its functions for many tensors at once are not named as public.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

NUMBERS = 8  # of a weight: 5 used, and some that each row begins at a multiple of 16 bytes


def adamw(
    weight: Tensor,
    moment: Tensor,
    square: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    copy: Tensor | None,
    beta_1: float,
    beta_2: float,
    eps: float,
) -> None:
    """One step of one weight, in place. numbers: as `numbers_of` makes them. copy: gets the weight, in its own type.

    A step that is not taken writes what was there; the gradient may then be anything.
    """
    scale, rate, root, keep, good = numbers[:5].unbind()
    taken = good > 0
    gradient = gradient.to(weight.dtype) * scale
    new_moment = moment + (gradient - moment) * (1 - beta_1)
    new_square = square * beta_2 + gradient * gradient * (1 - beta_2)
    new = weight * keep - rate * new_moment / (new_square.sqrt() * root + eps)
    new = torch.where(taken, new, weight)
    weight.copy_(new)
    moment.copy_(torch.where(taken, new_moment, moment))
    square.copy_(torch.where(taken, new_square, square))
    if copy is not None:
        copy.copy_(new)


@dataclass(frozen=True)
class Weight:
    """A trained weight, with its gradient and the copy that computes, where there is one."""

    master: nn.Parameter
    gradient: Tensor
    copy: Tensor | None


def update_weights(
    optimizer: torch.optim.Optimizer,
    weights: Sequence[Weight],
    *,
    lr: float,
    scale: Tensor,
    good: Tensor,
    step: Callable[..., None] = adamw,
) -> None:
    """AdamW's step of these weights. scale: what gradients are multiplied by. good: bool, whether the step is taken.

    optimizer: keeps betas, decay and moments, which its first step makes. step: `adamw`, or compiled.
    """
    decays = {id(p): float(g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    (beta_1, beta_2), eps = optimizer.param_groups[0]["betas"], float(optimizer.param_groups[0]["eps"])
    states = [_state(optimizer, weight.master) for weight in weights]
    steps = [cast(Tensor, state["step"]) for state in states]
    rates = numbers_of(
        steps,
        torch.tensor([decays[id(w.master)] for w in weights], dtype=torch.float64),
        lr=lr,
        scale=scale,
        good=good,
        betas=(beta_1, beta_2),
        dtype=weights[0].master.dtype,
    )
    for weight, state, numbers in zip(weights, states, rates.unbind(), strict=True):
        copy = weight.copy
        step(
            weight.master.detach().view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            weight.gradient.reshape(-1),
            numbers,
            None if copy is None else copy.detach().view(-1),
            beta_1,
            beta_2,
            eps,
        )
    torch._foreach_add_(steps, [good.to(steps[0].dtype)] * len(steps))


def numbers_of(
    steps: Sequence[Tensor],
    decays_P: Tensor,
    *,
    lr: float,
    scale: Tensor,
    good: Tensor,
    betas: tuple[float, float],
    dtype: torch.dtype,
) -> Tensor:
    """For each weight, [P, NUMBERS]: scale, lr / (1 - beta_1^t), 1 / sqrt(1 - beta_2^t), 1 - lr * decay, good.

    Worked out in float64: 1 - 0.999 in float32 is off by 1e-5.
    """
    t_P = torch.stack(list(steps)).double() + 1
    numbers_PX = torch.zeros(len(steps), NUMBERS, dtype=torch.float64, device=scale.device)
    numbers_PX[:, 0] = scale
    numbers_PX[:, 1] = lr / (1 - betas[0] ** t_P)
    numbers_PX[:, 2] = (1 - betas[1] ** t_P).rsqrt()
    numbers_PX[:, 3] = 1 - lr * decays_P.to(scale.device, non_blocking=True)
    numbers_PX[:, 4] = good
    return numbers_PX.to(dtype)


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """A weight's moments and count of steps, as torch's fused AdamW keeps them; fresh ones before the first step."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state
