"""Replicas: one step of them all is one of a single learner; errors, checkpoints and the proof that they are equal."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_learner import ROWS, document
from torch import Tensor

from trainer.data import Row, make_row
from trainer.draft import DraftModel
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Figures, Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.pipeline import Worker
from trainer.reduction import shards
from trainer.replicas import Replicas
from trainer.snapshot import Trained
from trainer.target import TargetModel, load_target

CPU = torch.device("cpu")
PADDING = make_row(0, [], 24)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact_target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float64)


def learners_of(target: TargetModel, count: int, seed: int = 0) -> list[Learner]:
    """Equal ones, in the target's precision. Their steps are clipped."""

    def made() -> Learner:
        torch.manual_seed(seed)
        model = DraftModel(target.draft_config(1, 4, (1, 2, 3))).to(target.head_weight.dtype)
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
        return Learner(model, target.head_weight, optimizer, Weighting("d-pace"), chunk_blocks=16, clip=0.05)

    return [made() for _ in range(count)]


def batch_of(target: TargetModel, learner: Learner, rows: Sequence[Row], replica: int = 0) -> FeatureBatch:
    made = replace(row_batch(rows, 20, 0), replica=replica)
    return features_of(target, made, learner.model.config, CPU)


def steps_of(count: int, steps: int = 3) -> list[list[Row]]:
    """The rows of some steps, `count` in each, unlike each other."""
    return [
        [
            make_row(step * count + n, [document(6 + 5 * (n % 3), seed=7 * step + n, supervised=0.8)], 24)
            for n in range(count)
        ]
        for step in range(steps)
    ]


def learn(replicas: Replicas, target: TargetModel, rows: Sequence[Row], count: int) -> Figures:
    """A step: replica r takes rows r, r + R, ..., one at a time."""
    for number, row in enumerate(rows):
        replicas.learn(batch_of(target, replicas.learners[number % count], [row], number % count))
    return replicas.update(1e-2).read()


def run(
    target: TargetModel, count: int, steps: Sequence[Sequence[Row]], **named: Any
) -> tuple[list[Figures], list[Learner], Trained]:
    learners = learners_of(target, count)
    with Replicas(learners, check_every=1, **named) as replicas:
        figures = [learn(replicas, target, rows, count) for rows in steps]
        replicas.check()
    return figures, learners, replicas.state


def bits(state: Trained) -> dict[str, Tensor]:
    """Weights and moments, as a checkpoint has them."""
    return {name: tensor.clone() for name, tensor in (state.weights() | state.moments()).items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def workers_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if isinstance(thread, Worker)]


# --- a step ---


def test_a_single_replica_is_a_learner_to_the_bit(target: TargetModel) -> None:
    steps = steps_of(3)
    (alone,), expected = learners_of(target, 1), list[Figures]()
    for rows in steps:
        for row in rows:
            alone.learn(batch_of(target, alone, [row]))
        # As torch does it.
        assert alone.step_terms is not None
        gradients = [p.grad / alone.step_terms.normaliser for p in alone.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        expected.append(alone.update(1e-2).read())
        assert expected[-1].grad_norm == pytest.approx(float(norm), rel=1e-6) and norm > 0.05
    for named in ({}, {"optimizer": "sharded"}):
        figures, _, state = run(target, 1, steps, **named)
        assert figures == expected
        assert_same_bits(bits(state), bits(Trained.alone(alone.model, alone.optimizer)))


@pytest.mark.parametrize("rows", [3, 5])
def test_any_number_of_replicas_takes_the_steps_of_one(exact_target: TargetModel, rows: int) -> None:
    """Also where some have more rows than others. In float64, so that nothing but the order of sums can differ."""
    steps = steps_of(rows)
    expected, (whole,), _ = run(exact_target, 1, steps)
    for count in (2, 3):
        figures, learners, _ = run(exact_target, count, steps)
        for one, other in zip(figures, expected, strict=True):
            assert one[:4] == pytest.approx(other[:4], rel=0, abs=1e-12) and one[4:] == other[4:]
        for learner in learners:
            for (name, weight), other in zip(whole.model.named_parameters(), learner.model.parameters(), strict=True):
                torch.testing.assert_close(other, weight, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("count", [2, 3])
def test_sharded_replicated_and_a_second_run_are_the_same_bits(target: TargetModel, count: int) -> None:
    steps = steps_of(5)
    figures, learners, state = run(target, count, steps)
    sharded_figures, sharded, shared = run(target, count, steps, optimizer="sharded")
    again, _, second = run(target, count, steps)
    single, _, _ = run(target, 1, steps)
    assert figures == sharded_figures == again
    assert [read.loss for read in figures] == pytest.approx([read.loss for read in single], abs=1e-6)
    for other in (shared, second):
        assert_same_bits(bits(state), bits(other))
    for learner in (*learners, *sharded):
        assert_same_bits(learner.model.state_dict(), state.weights())
    # All moments are somewhere, and each but once.
    kept = [sum(len(held) > 0 for held in learner.optimizer.state.values()) for learner in sharded]
    names = len(list(learners[0].model.parameters()))
    assert sum(kept) == names and all(0 < own < names for own in kept)
    assert [len(learner.optimizer.state) for learner in learners] == [names] * count


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_padding_and_replicas_without_a_batch_add_nothing(exact_target: TargetModel, optimizer: Any) -> None:
    (alone,) = learners_of(exact_target, 1)
    replicas = Replicas(learners_of(exact_target, 3), optimizer=optimizer)
    with replicas:
        for rows, order in ((ROWS[:1], (1, 0)), (ROWS[1:2], (2, 0)), (ROWS[3:], (0, 1))):
            alone.learn(batch_of(exact_target, alone, rows))
            replicas.learn(batch_of(exact_target, alone, rows, order[0]))
            replicas.learn(batch_of(exact_target, alone, [PADDING], order[1]))  # and one has nothing at all
            assert alone.update(1e-2).read()[:4] == pytest.approx(replicas.update(1e-2).read()[:4], abs=1e-12)
        replicas.learn(batch_of(exact_target, alone, [PADDING]))
        before = bits(replicas.state)
        read = replicas.update(1e-2).read()
        assert read.finite and read.accuracy_by_slot == [None] * 3
        assert_same_bits(bits(replicas.state), before)
    for learner in replicas.learners:
        for one, other in zip(alone.model.parameters(), learner.model.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_is_not_finite_for_one_is_skipped_by_all(target: TargetModel, optimizer: Any, first: bool) -> None:
    good, later = steps_of(3, steps=2)
    learners, spared = learners_of(target, 2), learners_of(target, 2)
    with Replicas(learners, optimizer=optimizer) as replicas, Replicas(spared, optimizer=optimizer) as others:
        if not first:
            assert learn(replicas, target, good, 2) == learn(others, target, good, 2)
        before = bits(replicas.state)
        for number, row in enumerate(good):
            batch = batch_of(target, learners[0], [row], number % 2)
            if number == 1:
                batch = replace(batch, features_BSF=batch.features_BSF * float("nan"))
            replicas.learn(batch)
        read = replicas.update(1e-2).read()
        assert not read.finite
        assert_same_bits(bits(replicas.state), before)
        assert learn(replicas, target, later, 2) == learn(others, target, later, 2)
        replicas.check()
        assert_same_bits(bits(replicas.state), bits(others.state))


def test_held_out_batches_are_measured_by_any_replica_alike(target: TargetModel) -> None:
    learners = learners_of(target, 2)
    with Replicas(learners) as replicas:
        learn(replicas, target, ROWS, 2)
        expected = learners[0].measure_all(batch_of(target, learners[0], ROWS[:2])).terms
        for replica in range(2):
            measured = replicas.measure_all(batch_of(target, learners[0], ROWS[:2], replica))
            assert all(torch.equal(vars(measured.terms)[name], value) for name, value in vars(expected).items())
            assert measured.batch.rows.replica == replica


def test_nccl_wants_a_gpu_for_each(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"nccl adds up .* on a GPU each, and they are on cpu, cpu: use copies"):
        Replicas(learners_of(target, 2), reduce="nccl")


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), count=st.integers(1, 8))
def test_shards_are_even_and_hold_everything_once(sizes: list[int], count: int) -> None:
    found = shards(sizes, count)
    assert sorted(index for own in found for index in own) == list(range(len(sizes)))
    assert all(own == sorted(own) for own in found)
    loads = [sum(sizes[index] for index in own) for own in found]
    assert max(loads) - min(loads) <= max(sizes)
    assert shards(sizes, count) == found
