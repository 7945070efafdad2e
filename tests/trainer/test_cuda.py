"""On a GPU: flex attention, bfloat16 and compilation give what the CPU's plain path gives. Skipped without one."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import document
from test_update import assert_same_bits, state_of
from tiny import tiny_toml
from tiny_families import tiny_model

from trainer.config import load
from trainer.data import Document, make_row
from trainer.draft import DraftModel
from trainer.features import FeatureBatch
from trainer.feed import all_anchors_batch, row_batch
from trainer.learner import Figures, Learner, StepFigures, features_of
from trainer.loss import Objective, Weighting
from trainer.optim import make_optimizer
from trainer.records import RunDir, checkpoint_name, read_metrics, read_status
from trainer.target import TargetModel, load_target
from trainer.threads import nothing_compiles
from trainer.train import train
from trainer.warm import _forms_for  # pyright: ignore[reportPrivateUsage]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]


GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """torch keeps at most 8 compiled forms of a function in a process; a training needs 4, all tests together more."""
    torch.compiler.reset()


def learner_on(
    device: str, folder: Path, dtype: torch.dtype, block: int, objective: Objective = "cross-entropy"
) -> tuple[Learner, TargetModel]:
    target = load_target(folder / "target", device, dtype)
    torch.manual_seed(0)
    model = DraftModel(target.draft_config(1, block, (1, 2, 3))).to(device)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
    weighting = Weighting("exp-decay", gamma=7.0)
    learner = Learner(model, target.head_weight, optimizer, weighting, chunk_blocks=20, clip=1e9, objective=objective)
    return learner, target


def warmed_up(learner: Learner, batch: FeatureBatch) -> None:
    """By this very batch, as `warm_up` does by one that it makes up."""
    with _forms_for(1):
        learner.warm_up(batch)


def gpu_batch(learner: Learner, target: TargetModel, seed: int, teacher: bool = False) -> FeatureBatch:
    rows = [make_row(seed, [document(50 + 30 * seed, seed), document(100, seed)], 384)]
    return features_of(target, row_batch(rows, 24, seed), learner.model.config, GPU, anchors=24, teacher=teacher)


@pytest.mark.parametrize(("block", "objective"), [(4, "cross-entropy"), (16, "cross-entropy"), (16, "kl"), (16, "tv")])
def test_the_gpu_agrees_with_the_cpu(block: int, objective: Objective, tiny_folder: Path) -> None:
    rows = [make_row(0, [document(100), document(200, seed=1)], 384), make_row(1, [document(380, seed=2)], 384)]
    read: list[Figures] = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        learner, target = learner_on(device, tiny_folder, dtype, block, objective)
        where, teacher = torch.device(device), objective != "cross-entropy"
        batch = features_of(target, row_batch(rows, 24, 0), learner.model.config, where, teacher=teacher)
        learner.learn(batch)
        read.append(learner.update(1e-3).read())
    cpu, gpu = read
    assert gpu.finite and gpu.loss == pytest.approx(cpu.loss, rel=0.02)
    assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=0.1)
    assert gpu.accuracy_by_slot == pytest.approx(cpu.accuracy_by_slot, abs=0.1)


@pytest.mark.parametrize("objective", ["cross-entropy", "kl", "tv"])
def test_nothing_compiles_after_the_warm_up(objective: Objective, tiny_folder: Path) -> None:
    """Nor for rows with many more anchors, measured in parts."""
    learner, target = learner_on("cuda", tiny_folder, torch.bfloat16, 16, objective)
    teacher = objective != "cross-entropy"
    warmed_up(learner, gpu_batch(learner, target, 0, teacher))
    with nothing_compiles(GPU):
        for seed in range(1, 4):
            learner.learn(gpu_batch(learner, target, seed, teacher))
            learner.update(1e-3)
            rows = all_anchors_batch([make_row(0, [document(60 * seed, seed), document(100, seed)], 384)], 24)
            config = learner.model.config
            measured = learner.measure_all(features_of(target, rows, config, GPU, anchors=24, teacher=teacher))
            assert measured.batch.forwards() == rows.anchors_BN.shape[1] // 24 > 3
            # Every anchor once, and a walk through both answers.
            assert int(measured.terms.blocks) == int(rows.keep_BN.sum()) == 60 * seed - 1 + 99
            assert [sum(cycles) for cycles in measured.answers()] == [60 * seed - 1, 99]


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_a_target_by_its_own_forward_gives_on_the_gpu_what_it_gives_on_the_cpu(family: str) -> None:
    """With a whole batch's way there: rows from the host, documents packed."""
    there = copy.deepcopy(tiny_model(family)).to(GPU)
    documents = [Document(np.arange(size) % 90 + 4, np.ones(size, dtype=bool)) for size in (40, 70)]
    rows = row_batch([make_row(0, documents, 128)], 8, 0)
    made: list[FeatureBatch] = []
    for target in (TargetModel(tiny_model(family)), TargetModel(there)):
        draft = target.draft_config(1, 4, (1, 2), 3)
        made.append(features_of(target, rows, draft, target.device, teacher=True))
    here, on_gpu = made
    inside = rows.document_ids_BS >= 0
    assert on_gpu.features_BSF.is_cuda and here.final_BSH is not None and on_gpu.final_BSH is not None
    for one, other in ((here.features_BSF, on_gpu.features_BSF), (here.final_BSH, on_gpu.final_BSH)):
        torch.testing.assert_close(other.cpu()[inside], one[inside], rtol=1e-3, atol=1e-3)


def test_all_anchors_in_parts_give_what_the_cpu_gives(tiny_folder: Path) -> None:
    rows = all_anchors_batch([make_row(0, [document(100), document(200, seed=1)], 384)], 24)
    losses: list[float] = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        learner, target = learner_on(device, tiny_folder, dtype, 16)
        batch = features_of(target, rows, learner.model.config, torch.device(device), anchors=24)
        terms = learner.measure_all(batch).terms
        assert int(terms.blocks) == 99 + 199
        losses.append(float(terms.figures()[0]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("fault", ["nan", "inf"])
def test_a_step_that_is_not_finite_is_skipped_to_the_bit_without_waiting(fault: str, tiny_folder: Path) -> None:
    """And the next good one is what it would have been without it."""
    learners = [learner_on("cuda", tiny_folder, torch.bfloat16, 16) for _ in range(2)]
    harmed, spared = (learner for learner, _ in learners)
    batches = [gpu_batch(*learners[0], seed) for seed in range(3)]
    spoiled = batches[2].features_BSF.clone()
    spoiled[0, 3, 5] = float(fault)
    bad = replace(batches[2], features_BSF=spoiled)
    for learner in (harmed, spared):
        warmed_up(learner, batches[0])
    figures: list[StepFigures] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # whatever would make the host wait is an error
    try:
        for batch in batches[:2]:
            for learner in (harmed, spared):
                learner.learn(batch)
                figures.append(learner.update(1e-3))
        before = state_of(harmed)
        skipped: list[StepFigures] = []
        for step in ([bad], [batches[0], bad, batches[1]]):
            for batch in step:
                harmed.learn(batch)
            skipped.append(harmed.update(1e-3))
        after = state_of(harmed)
        for learner in (harmed, spared):
            learner.learn(batches[2])
        last = [harmed.update(1e-3), spared.update(1e-3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.read().finite for one in figures) and not any(one.read().finite for one in skipped)
    assert_same_bits(after, before)
    assert last[0].read() == last[1].read() and last[0].read().finite
    assert_same_bits(state_of(harmed), state_of(spared))
    steps = {float(state["step"]) for state in harmed.optimizer.state_dict()["state"].values()}
    assert steps == {3.0}


def test_figures_are_read_without_waiting_for_what_comes_after(tiny_folder: Path) -> None:
    learner, target = learner_on("cuda", tiny_folder, torch.bfloat16, 16)
    batch = gpu_batch(learner, target, 0)
    warmed_up(learner, batch)
    learner.learn(batch)
    learner.update(1e-3).read()  # the pinned memory is there from now on
    learner.learn(batch)
    first = learner.update(1e-3)
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's time
    learner.learn(batch)
    second = learner.update(1e-3)
    assert second._arrived is not None
    assert first.read().finite and not second._arrived.query()
    assert second.read().finite


def test_a_training_learns_and_resumes_on_the_gpu(tiny_folder: Path, tmp_path: Path) -> None:
    text = tiny_toml(
        tiny_folder / "target",
        tiny_folder / "train.jsonl",
        tiny_folder / "heldout.jsonl",
        data__row_tokens=128,
        train__steps=60,
        train__lr=5e-3,
        layout__targets=["cuda:0"],
        layout__drafters=["cuda:0"],
        train__eval_every=20,
        train__checkpoint_every=30,
    )
    assert train(load(text.encode()), tmp_path) == "finished"
    status = read_status(RunDir(tmp_path).status.read_bytes())
    assert status is not None and status.loss is not None and status.first_loss is not None
    assert status.loss < status.first_loss / 2
    newest = RunDir(tmp_path).checkpoints / checkpoint_name(60) / "model.safetensors"
    newest.write_bytes(b"")
    assert train(load(text.encode()), tmp_path) == "finished"
    assert [r.step for r in read_metrics(RunDir(tmp_path).metrics.read_bytes())] == list(range(1, 61))
