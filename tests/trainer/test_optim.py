"""The optimiser's groups and the learning rate's course."""

from itertools import pairwise, zip_longest

import pytest
import torch
from test_draft import CONFIG

from trainer.draft import DraftModel
from trainer.optim import (
    divide_gradients,
    gradient_norms,
    learning_rate,
    make_optimizer,
    parameter_names,
    step_if,
    total_norm,
)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(step, steps=100, highest=1.0, warmup_ratio=0.04) for step in range(1, 101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and all(a >= b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 1e-3
    assert rates[4 + 48] == pytest.approx(0.5)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_rate_of_a_single_step_is_the_highest(ratio: float) -> None:
    assert learning_rate(1, steps=1, highest=2.0, warmup_ratio=ratio) == 2.0


def test_norms_are_not_decayed_and_every_weight_is_trained_once() -> None:
    model = DraftModel(CONFIG)
    optimizer = make_optimizer(model, lr=1.0, weight_decay=0.1)
    matrices, norms = optimizer.param_groups
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in norms["params"]} == {1}
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    parameters = dict(model.named_parameters())
    in_order = matrices["params"] + norms["params"]
    assert [id(p) for p in in_order] == [id(parameters[name]) for name in parameter_names(model)]
    assert len(in_order) == len(parameters)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_taken_only_if_it_is_good(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, fused=fused)
    weight.grad = torch.ones(3)
    step_if(torch.tensor(True), optimizer)
    before = [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]
    assert before[0][0] < 1
    weight.grad = torch.full((3,), float("nan"))
    step_if(torch.tensor(False), optimizer)
    after = [weight.detach(), *optimizer.state[weight].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not hasattr(optimizer, "found_inf")  # a plain step() afterwards is a step


def test_a_norm_made_of_parts_is_torch_s_own_to_the_bit_and_so_are_means() -> None:
    parameters = list(DraftModel(CONFIG).parameters())
    for number, parameter in enumerate(parameters[1:]):  # the first has no gradient
        parameter.grad = torch.randn(parameter.shape) * 10.0 ** (number % 5 - 2)
    means = [parameter.grad * (1 / torch.tensor(7.0)) for parameter in parameters if parameter.grad is not None]
    divide_gradients(parameters, torch.tensor(7.0))
    assert all(torch.equal(p.grad, mean) for p, mean in zip(parameters[1:], means, strict=True) if p.grad is not None)
    every_other = gradient_norms(parameters[::2]), gradient_norms(parameters[1::2])
    in_order = [norm for pair in zip_longest(every_other[1], every_other[0]) for norm in pair if norm is not None]
    assert torch.equal(total_norm(in_order), torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    divide_gradients(parameters[:1], torch.tensor(0.0))
    assert parameters[0].grad is None and gradient_norms(parameters[:1]) == []
