"""The end of a step: one division for all batches and replicas; nothing at all when it is not finite; its figures."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_learner import ROWS, document, exact_learner, features, learner_of
from torch import Tensor

from trainer.data import Row, make_row
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Learner, features_of
from trainer.loss import Objective, Weighting
from trainer.replicas import Replicas
from trainer.target import TargetModel, load_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact_target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float64)


# --- one division for the whole step ---


@given(
    kind=st.sampled_from(["exp-decay", "d-pace"]),
    objective=st.sampled_from(["cross-entropy", "kl", "tv"]),
    cuts=st.sets(st.integers(1, 3)),
    owners=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    chunks=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    optimizer=st.sampled_from(["replicated", "sharded"]),
)
def test_any_split_over_batches_and_replicas_is_the_same_step(
    exact_target: TargetModel,
    kind: str,
    objective: Objective,
    cuts: set[int],
    owners: list[int],
    chunks: list[int],
    optimizer: Any,
) -> None:
    """Loss, gradient norm before clipping and weights after the step, in float64, to 1e-10."""
    teacher = objective != "cross-entropy"

    def batch_of(rows: Sequence[Row]) -> FeatureBatch:
        return features_of(exact_target, row_batch(rows, 20, 0), whole.model.config, CPU, teacher=teacher)

    whole = exact_learner(exact_target, kind, objective)
    whole.learn(batch_of(ROWS))
    expected = whole.update(100.0).read()

    learners = [exact_learner(exact_target, kind, objective, chunk) for chunk in chunks]
    borders = [0, *sorted(cuts), len(ROWS)]
    batches = [ROWS[first:end] for first, end in pairwise(borders)]
    with Replicas(learners, optimizer=optimizer) as replicas:
        for owner, rows in zip(owners, batches, strict=False):
            batch = batch_of(rows)
            replicas.learn(replace(batch, rows=replace(batch.rows, replica=owner)))
        read = replicas.update(100.0).read()
    assert read[:4] == pytest.approx(expected[:4], rel=0, abs=1e-10) and read[4:] == expected[4:]
    for learner in learners:
        for (name, one), other in zip(whole.model.named_parameters(), learner.model.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-10, msg=name)
    assert expected.grad_norm > 0.001  # so it was clipped, after the division


# --- steps that are not finite ---


def state_of(learner: Learner) -> dict[str, Tensor]:
    """Weights, moments and step counts."""
    found = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    for number, state in learner.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in state.items()}
    return found


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def adam_learner(target: TargetModel, fused: bool) -> Learner:
    learner = learner_of(target)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    return Learner(learner.model, target.head_weight, optimizer, Weighting("d-pace"), chunk_blocks=16, clip=0.5)


FAULTS = ["a feature is nan", "a feature is inf", "the loss is inf", "a gradient is inf", "the norm overflows"]


def learn_badly(learner: Learner, batch: FeatureBatch, fault: str) -> None:
    features_BSF = batch.features_BSF.clone()
    if "feature" in fault:
        features_BSF[0, 3, 5] = float(fault.split()[-1])
    learner.learn(replace(batch, features_BSF=features_BSF))
    terms, weight = learner.step_terms, learner.model.fc.weight
    assert terms is not None and weight.grad is not None
    if fault == "the loss is inf":
        learner.step_terms = replace(terms, loss_sum=terms.loss_sum + float("inf"))
    elif fault == "a gradient is inf":
        weight.grad[2, 3] = float("-inf")
    elif fault == "the norm overflows":
        weight.grad.fill_(3e37)  # each of them is finite still


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_changes_nothing_to_the_bit(target: TargetModel, fault: str, fused: bool) -> None:
    """Neither weights nor moments nor step counts; and what comes after is what would have come without it."""
    harmed, spared = adam_learner(target, fused), adam_learner(target, fused)
    good = [features(target, harmed, [make_row(seed, [document(40, seed)], 64)]) for seed in range(3)]
    for batch in good[:2]:
        for learner in (harmed, spared):
            learner.learn(batch)
            assert learner.update(1e-3).read().finite
        before = state_of(harmed)
        for _ in range(2):
            learn_badly(harmed, good[2], fault)
            read = harmed.update(1e-3).read()
            assert not read.finite and not (np.isfinite(read.loss) and np.isfinite(read.grad_norm))
        assert_same_bits(state_of(harmed), before)
        assert all(p.grad is None for p in harmed.model.parameters()) and harmed.step_terms is None
    for learner in (harmed, spared):
        learner.learn(good[2])
    assert harmed.update(1e-3).read() == spared.update(1e-3).read()
    assert_same_bits(state_of(harmed), state_of(spared))
    assert int(harmed.optimizer.state_dict()["state"][0]["step"]) == 3
    assert any((tensor != before[name]).any() for name, tensor in state_of(harmed).items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_not_finite_is_as_none(target: TargetModel, fused: bool) -> None:
    harmed, spared = adam_learner(target, fused), adam_learner(target, fused)
    batch = features(target, harmed, [make_row(0, [document(40)], 64)])
    learn_badly(harmed, batch, "a feature is nan")
    assert not harmed.update(1e-3).read().finite
    for learner in (harmed, spared):
        learner.learn(batch)
        learner.update(1e-3)
    assert_same_bits(state_of(harmed), state_of(spared))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_nothing_supervised_moves_nothing_though_the_optimiser_has_momentum(
    target: TargetModel, fused: bool
) -> None:
    learner = adam_learner(target, fused)
    learner.learn(features(target, learner, [make_row(0, [document(40)], 64)]))
    learner.update(1e-3)
    before = state_of(learner)
    learner.learn(features(target, learner, [make_row(1, [document(40, supervised=0.0)], 64)]))
    read = learner.update(1e-3).read()
    assert read.finite and np.isnan(read.loss) and read.accuracy_by_slot == [None] * 3
    assert_same_bits(state_of(learner), before)


# --- figures ---


def test_the_figures_of_a_step_are_those_of_its_terms(target: TargetModel) -> None:
    learner = learner_of(target)
    batches = [features(target, learner, [make_row(i, [document(4 + 20 * i, i)], 32)]) for i in range(2)]
    terms = learner.measure_all(batches[0]).terms + learner.measure_all(batches[1]).terms
    for batch in batches:
        learner.learn(batch)
    figures = learner.update(1e-3)
    read = figures.read()
    assert read[:3] == pytest.approx(terms.figures().tolist(), rel=1e-5)
    assert read.accuracy_by_slot == pytest.approx((terms.correct_P / terms.supervised_P).tolist())
    assert read.finite is True
    one = features(target, learner, [make_row(0, [document(2)], 32)])  # a single block of which one slot is supervised
    learner.learn(one)
    by_slot = learner.update(1e-3).read().accuracy_by_slot
    assert by_slot[0] in (0.0, 1.0) and by_slot[1:] == [None, None]
