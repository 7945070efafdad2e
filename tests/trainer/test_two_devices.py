"""Target and drafter on two devices. The CPU has only one: there, what is asked to move, and in which type, is seen."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import config_of, metrics_of, silent
from torch import Tensor

from trainer import train as module
from trainer import workers
from trainer.data import Document, make_row
from trainer.estimate import planned
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.layout import Layout
from trainer.learner import features_of
from trainer.memory import memory
from trainer.records import RunDir, checkpoint_name
from trainer.target import load_target
from trainer.train import train


def tensors_of(batch: FeatureBatch) -> dict[str, Tensor]:
    """Everything that the drafter's device needs."""
    parts = {**vars(batch), **vars(batch.blocks)}
    return {name: value for name, value in parts.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_goes_to_the_drafter_s_device_as_a_whole(dtype: torch.dtype, tiny_folder: Path) -> None:
    """The device "meta" stands for a GPU: a device that is neither the target's nor a CPU."""
    target = load_target(tiny_folder / "target", "cpu", dtype)
    draft = target.draft_config(1, 4, (1, 2, 3))
    rows = row_batch([make_row(0, [Document(np.arange(50), np.ones(50, dtype=bool))], 64)], 8, 0)
    for device, wide in ((torch.device("meta"), dtype), (torch.device("cpu"), torch.float32)):
        batch = features_of(target, rows, draft, device, teacher=True)
        held = tensors_of(batch)
        assert len(held) == 12 and {tensor.device.type for tensor in held.values()} == {device.type}
        kinds = {name: tensor.dtype for name, tensor in held.items() if tensor.is_floating_point()}
        # A drafter on a CPU has no autocast: it is given float32. The teacher meets the head, in the target's own type.
        names = ("features_BSF", "anchor_embeds_BNH", "mask_embed_H")
        assert kinds == {**dict.fromkeys(names, wide), "final_BSH": dtype}
        assert batch.rows is rows and rows.ids_BS.device.type == "cpu"


def test_each_part_is_put_on_its_own_device(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names "cpu:0" and "cpu" are one device, and tell who was given which."""
    asked: dict[str, object] = {}
    load, of, tally = workers.load_target, workers.features_of, module.Tally

    def loaded(path: str, devices: list[torch.device], dtype: torch.dtype) -> object:
        asked["target"] = devices
        return load(path, devices, dtype)

    def features(target: object, rows: object, draft: object, device: torch.device, **more: object) -> object:
        asked["features"] = device
        return of(target, rows, draft, device, **more)  # pyright: ignore[reportArgumentType]

    def watched(journal: object, *, devices: object, **more: object) -> object:
        asked["memory"] = devices
        return tally(journal, devices=devices, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "parse", lambda section: Layout((("cpu:0",),), ("cpu",)))
    monkeypatch.setattr(module, "check_layout", lambda config, layout: [])
    monkeypatch.setattr(module, "Tally", watched)
    monkeypatch.setattr(workers, "load_target", loaded)
    monkeypatch.setattr(workers, "features_of", features)
    train(config_of(tiny_folder, train__steps=1), tmp_path, say=silent)
    here, there = torch.device("cpu"), torch.device("cpu", 0)
    assert asked == {"target": [there], "features": here, "memory": [here, there]}


# --- on GPUs ---


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("targets", "drafters", "more"),
    [
        (["cuda:1"], ["cuda:0"], {}),
        (["cuda:0+1"], ["cuda:0"], {}),
        (["cuda:0"], ["cuda:0-1"], {}),
        (["cuda:0-1"], ["cuda:0-1"], {"layout__optimizer": "sharded"}),
        (["cuda:0-1"], ["cuda:0-1"], {"layout__reduce": "nccl"}),
    ],
)
def test_two_gpus_give_what_one_gives(
    targets: list[str], drafters: list[str], more: dict[str, str], tiny_folder: Path, tmp_path: Path
) -> None:
    changes = {"data__row_tokens": 128, "train__steps": 6, "train__eval_every": 3, "layout__check_every": 2}
    for name, layout in (
        ("one", {"layout__targets": ["cuda:0"], "layout__drafters": ["cuda:0"]}),
        ("two", {"layout__targets": targets, "layout__drafters": drafters, **more}),
    ):
        torch.compiler.reset()
        assert train(config_of(tiny_folder, **changes, **layout), tmp_path / name, say=silent) == "finished"
    for one, other in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.heldout_loss is other.heldout_loss is None or one.heldout_loss == pytest.approx(
            other.heldout_loss, rel=1e-3
        )
    assert (RunDir(tmp_path / "two").checkpoints / checkpoint_name(6)).is_dir()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
def test_the_dry_run_s_memory_is_what_a_training_takes(
    dtype: str, objective: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Within the 15% that the issue allows. Made so large that the drafter's weights and logits count."""
    from tiny import tiny_target as saved_target

    changes = {"draft__layers": 4, "draft__block": 16, "data__row_tokens": 512, "train__anchors": 256}
    changes |= {"layout__targets": ["cuda:0"], "layout__drafters": ["cuda:0"]}
    changes |= {"train__steps": 3, "train__objective": objective, "target__dtype": dtype}
    folder = tmp_path / "large"
    saved_target(folder / "target", hidden=1024)
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    config = config_of(folder, train__rows_per_step=8, **changes)
    target, draft, batch, layout = planned(config)
    parts = memory(target, draft, batch, config, layout)["cuda:0"]
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(config, tmp_path / "run", say=silent)
    used = torch.cuda.max_memory_allocated() - before
    assert sum(part.bytes for part in parts) == pytest.approx(used, rel=0.15)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["moved", "moved-default", "moved-short", "sum", "nccl"])
def test_memory_goes_back_to_the_driver_once_another_gpu_has_written_it(case: str) -> None:
    """In a process of its own, which would lose its GPUs. That torch's own copy does so is told by the program."""
    program = Path(__file__).parents[2] / "benchmarks" / "peer_release.py"
    done = subprocess.run([sys.executable, program, "--case", case], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)[case]["came to"] == "right"
