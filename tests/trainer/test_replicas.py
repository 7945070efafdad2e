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
from test_checkpoint import at
from test_learner import ROWS, document
from torch import Tensor

from trainer.checkpoint import restore, write_checkpoint
from trainer.checksums import checksums
from trainer.data import Row, make_row
from trainer.draft import DraftModel
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Figures, Learner, Measured, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.pipeline import Worker
from trainer.reduction import Reduction, shards
from trainer.replicas import Replicas
from trainer.snapshot import HostCopy, Trained
from trainer.start import TrainingError
from trainer.target import TargetModel, load_target

CPU = torch.device("cpu")
PADDING = make_row(0, [], 24)


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
        for owner in range(3):  # only one has anything
            alone.learn(batch_of(exact_target, alone, ROWS[:2]))
            replicas.learn(batch_of(exact_target, alone, ROWS[:2], owner))
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


def test_held_out_batches_are_measured_by_their_replica_and_all_alike(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners, asked, measure = learners_of(target, 2), list[Learner](), Learner.measure_all

    def watched(self: Learner, batch: FeatureBatch) -> Measured:
        asked.append(self)
        return measure(self, batch)

    with Replicas(learners) as replicas:
        learn(replicas, target, ROWS, 2)
        expected = learners[0].measure_all(batch_of(target, learners[0], ROWS[:2])).terms
        monkeypatch.setattr(Learner, "measure_all", watched)
        for replica in range(2):
            measured = replicas.measure_all(batch_of(target, learners[0], ROWS[:2], replica))
            assert all(torch.equal(vars(measured.terms)[name], value) for name, value in vars(expected).items())
            assert measured.batch.rows.replica == replica
        assert asked == learners


def test_nccl_wants_a_gpu_for_each(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"nccl adds up .* on a GPU each, and they are on cpu, cpu: use copies"):
        Replicas(learners_of(target, 2), reduce="nccl")


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_nccl_gets_all_gradients_in_one_call_a_step(
    target: TargetModel, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sum on the CPU in NCCL's place; test_cuda_replicas.py has the real one."""
    steps, calls = steps_of(3, steps=2), list[int]()

    def summed(self: Reduction, tensors: list[Tensor]) -> None:
        calls.append(len(tensors))
        total = sum(tensors[1:], tensors[0].clone())
        for tensor in tensors:
            tensor.copy_(total)

    monkeypatch.setattr(Reduction, "_nccl_sum", summed)
    expected, _, state = run(target, 2, steps, optimizer=optimizer)
    learners = learners_of(target, 2)
    replicas = Replicas(learners, optimizer=optimizer, check_every=1)
    replicas._reduction._how = "nccl"
    with replicas:
        assert calls.pop() == 2  # its communicators are made before the threads start
        assert [learn(replicas, target, rows, 2) for rows in steps] == expected
        replicas.check()
        assert calls == [2, 2]
        assert_same_bits(bits(replicas.state), bits(state))
        replicas.learn(batch_of(target, learners[0], ROWS[:1], 1))  # and the other has nothing
        assert replicas.update(1e-2).read().finite
        replicas.check()


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), count=st.integers(1, 8))
def test_shards_are_even_and_hold_everything_once(sizes: list[int], count: int) -> None:
    found = shards(sizes, count)
    assert sorted(index for own in found for index in own) == list(range(len(sizes)))
    assert all(own == sorted(own) for own in found)
    loads = [sum(sizes[index] for index in own) for own in found]
    assert max(loads) - min(loads) <= max(sizes)
    assert shards(sizes, count) == found
    assert shards([1, 1, 1, 1, 4], 2) == [[4], [0, 1, 2, 3]]  # the largest first, or it would come on top


# --- the proof that they are equal ---


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_replicas_that_differ_by_a_bit_are_found_and_named(target: TargetModel, optimizer: Any) -> None:
    learners = learners_of(target, 3)
    weights = dict(learners[2].model.named_parameters())
    message = r"after step 12 drafter-0 \(cpu\) and drafter-2 \(cpu\) are not equal any more: they differ in "
    with Replicas(learners, optimizer=optimizer, check_every=4, steps_done=10) as replicas:
        learn(replicas, target, ROWS, 3)
        learn(replicas, target, ROWS, 3)  # it is proved that they were equal
        bit = weights["layers.0.mlp.up_proj.weight"].detach().view(torch.int32)
        bit[3, 5] ^= 1
        later = weights["layers.0.mlp.down_proj.weight"].detach()
        later[1], later[0] = later[0].clone(), later[1].clone()  # the same values in other places
        with pytest.raises(TrainingError, match=message + r"layers.0.mlp.up_proj.weight and 1 more\."):
            replicas.check()


def test_a_difference_is_told_one_step_after_the_check_at_the_latest(target: TargetModel) -> None:
    learners = learners_of(target, 2)
    with Replicas(learners, check_every=2, steps_done=1) as replicas:
        for step in (2, 3):
            learn(replicas, target, ROWS, 2)
            if step == 2:
                learners[1].model.fc.weight.detach()[0, 0] += 1  # just after that check
        learn(replicas, target, ROWS, 2)
        with pytest.raises(TrainingError, match=r"after step 4 .* they differ in "):
            learn(replicas, target, ROWS, 2)
    # From the start, too: weights that were loaded in one and not in the other.
    with Replicas(learners, check_every=2) as replicas, pytest.raises(TrainingError, match="after step 0"):
        learn(replicas, target, ROWS, 2)
    with Replicas(learners) as replicas:  # not asked for
        learn(replicas, target, ROWS, 2)
        replicas.check()


@given(
    size=st.integers(1, 50), chunk=st.integers(1, 20), place=st.integers(0, 49), other=st.integers(0, 49),
    bit=st.integers(0, 31), seed=st.integers(0, 100),
)  # fmt: skip
def test_a_checksum_is_of_each_bit_in_its_place(
    size: int, chunk: int, place: int, other: int, bit: int, seed: int
) -> None:
    place, other = place % size, other % size
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    flipped, swapped = values.clone(), values.clone()
    flipped.view(torch.int32)[place] ^= (1 << bit) - (1 << 32) * (bit == 31)
    swapped[place], swapped[other] = values[other], values[place]
    found = checksums([values, flipped, swapped, values.clone()], chunk)
    assert found.dtype == torch.int64 and found[0] != found[1] and found[0] == found[3]
    assert (found[0] == found[2]) == (place == other)
    assert checksums([values.double(), values.bfloat16()], chunk).shape == (2,)


# --- checkpoints ---


def test_a_checkpoint_of_any_replicas_is_the_same_and_any_go_on_from_it(
    target: TargetModel, tmp_path: Path, soak: bool
) -> None:
    before, after = steps_of(3, steps=2), steps_of(3, steps=3)[2:]
    kinds: list[tuple[int, Any]] = [(2, "replicated"), (2, "sharded"), (3, "sharded"), (1, "replicated")]
    whole: dict[int, dict[str, Tensor]] = {}
    for count, optimizer in kinds:
        learners = learners_of(target, count)
        with Replicas(learners, optimizer=optimizer) as replicas:
            for rows in before:
                learn(replicas, target, rows, count)
            write_checkpoint(tmp_path / f"{count}-{optimizer}", HostCopy().take(replicas.state), at(2), keep=1)
            for rows in after:
                learn(replicas, target, rows, count)
        whole[count] = bits(replicas.state)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (tmp_path / name / "step-00000002" / file for name in ("2-replicated", "2-sharded"))
        assert one.read_bytes() == other.read_bytes()
    every = [(saved, count, optimizer) for saved in (2, 3) for count, optimizer in kinds]
    for saved, count, optimizer in every if soak else [every[0], every[1], every[2], every[7]]:
        learners = learners_of(target, count, seed=5)
        with Replicas(learners, optimizer=optimizer, check_every=1, steps_done=2) as replicas:
            assert restore(tmp_path / f"{saved}-sharded" / "step-00000002", replicas.state) == at(2)
            for rows in after:
                learn(replicas, target, rows, count)
            replicas.check()
            ended = bits(replicas.state)
        kept = sum(len(learner.optimizer.state) for learner in learners)
        assert kept == len(list(learners[0].model.parameters())) * (1 if optimizer == "sharded" else count)
        if saved == count:
            assert_same_bits(ended, whole[count])
        for name, tensor in whole[saved].items():  # else the gradients are added up in another order
            torch.testing.assert_close(ended[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_fresh_state_has_no_moments_and_the_optimisers_share_no_tensor(target: TargetModel, tmp_path: Path) -> None:
    learners = learners_of(target, 2)
    with Replicas(learners) as replicas:
        write_checkpoint(tmp_path, HostCopy().take(replicas.state), at(0), keep=2)
        learn(replicas, target, ROWS, 2)
        write_checkpoint(tmp_path, HostCopy().take(replicas.state), at(1), keep=2)
        assert restore(tmp_path / "step-00000000", replicas.state) == at(0)
        assert not any(learner.optimizer.state for learner in learners)
        restore(tmp_path / "step-00000001", replicas.state)
    held = [
        tensor.data_ptr()
        for learner in learners
        for kept in learner.optimizer.state.values()
        for tensor in kept.values()
    ]
    assert len(set(held)) == len(held) > 0
