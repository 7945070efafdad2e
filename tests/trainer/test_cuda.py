"""On a GPU: flex attention, bfloat16 and compilation give what the CPU's plain path gives. Skipped without one."""

from pathlib import Path

import pytest
import torch
from test_learner import document
from tiny import tiny_toml

from trainer.config import load
from trainer.data import make_row
from trainer.draft import DraftModel
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.records import RunDir, checkpoint_name, read_metrics, read_status
from trainer.target import TargetModel, load_target
from trainer.threads import nothing_compiles
from trainer.train import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]


def learner_on(device: str, folder: Path, dtype: torch.dtype, block: int) -> tuple[Learner, TargetModel]:
    target = load_target(folder / "target", device, dtype)
    torch.manual_seed(0)
    model = DraftModel(target.draft_config(1, block, (1, 2, 3))).to(device)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
    weighting = Weighting("exp-decay", gamma=7.0)
    return Learner(model, target.head_weight, optimizer, weighting, chunk_blocks=20, clip=1e9), target


@pytest.mark.parametrize("block", [4, 16])
def test_the_gpu_agrees_with_the_cpu(block: int, tiny_folder: Path) -> None:
    rows = [make_row(0, [document(100), document(200, seed=1)], 384), make_row(1, [document(380, seed=2)], 384)]
    read: list[tuple[float, ...]] = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        learner, target = learner_on(device, tiny_folder, dtype, block)
        batch = features_of(target, row_batch(rows, 24, 0), learner.model.config, torch.device(device))
        learner.learn(batch)
        read.append(learner.update(1e-3).read())
    (loss, _, _, norm), (gpu_loss, _, _, gpu_norm) = read
    assert gpu_loss == pytest.approx(loss, rel=0.02)
    assert gpu_norm == pytest.approx(norm, rel=0.1)


def test_nothing_compiles_after_the_warm_up(tiny_folder: Path) -> None:
    learner, target = learner_on("cuda", tiny_folder, torch.bfloat16, 16)
    device = torch.device("cuda")

    def batch(seed: int) -> FeatureBatch:
        rows = [make_row(seed, [document(50 + 30 * seed, seed), document(100, seed)], 384)]
        return features_of(target, row_batch(rows, 24, seed), learner.model.config, device)

    learner.warm_up(batch(0))
    with nothing_compiles(device):
        for seed in range(1, 4):
            learner.learn(batch(seed))
            learner.update(1e-3)
            learner.measure(batch(seed))


def test_a_training_learns_and_resumes_on_the_gpu(tiny_folder: Path, tmp_path: Path) -> None:
    text = tiny_toml(
        tiny_folder / "target",
        tiny_folder / "train.jsonl",
        tiny_folder / "heldout.jsonl",
        data__row_tokens=128,
        train__steps=60,
        train__lr=5e-3,
        train__device="cuda:0",
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
