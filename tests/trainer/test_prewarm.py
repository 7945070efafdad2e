"""`python -m trainer warm`; what it compiles is shown on a GPU, in test_cuda_threads.py."""

import json
from pathlib import Path

import pytest
import torch

from trainer import prewarm
from trainer.__main__ import main
from trainer.compile_cache import Pruned
from trainer.config import load
from trainer.learner import Learner
from trainer.warm import BatchShape, Warmed


def test_on_the_cpu_there_is_nothing_to_warm_up(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(tiny_folder / "config.toml")
    assert main(["warm", config]) == 0
    assert capsys.readouterr().out == "on the CPU nothing is compiled: there is nothing to warm up\n"
    assert main(["warm", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cache": None, "devices": [], "pruned": {}}


def test_each_device_once_with_learners_as_a_training_has_them(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given to warm_up; data is not looked at."""
    given: list[tuple[list[Learner], BatchShape]] = []
    monkeypatch.setattr(
        prewarm, "warm_up", lambda learners, shape, say: given.append((learners, shape)) or [Warmed("cpu", 1, 2, 3)]
    )
    sets = ["train.objective=kl", "train.rows_per_step=5", "data.train=nothing.jsonl", "target.dtype=bfloat16"]
    sets += ['layout.drafters=["cpu", "cpu"]', "layout.allow_shared_device=true"]
    assert prewarm.prewarm(load(tiny_folder / "config.toml", sets), print) == [Warmed("cpu", 1, 2, 3)]
    (((learner,), shape),) = given
    assert shape == BatchShape(rows=3, row_tokens=96, anchors=8, dtype=torch.bfloat16, teacher=True)
    assert learner.model.config.block_size == 4 and learner.device == torch.device("cpu")
    assert learner._head_VH.shape == (512, 64) and learner._head_VH.dtype == torch.bfloat16


def test_it_tells_of_each_device_and_of_what_was_deleted(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed = [Warmed("cuda:5", 41.5, 7, 0), Warmed("cuda:6", 3.25, 0, 7)]
    monkeypatch.setattr(prewarm, "prewarm", lambda config, say: warmed)
    monkeypatch.setattr(prewarm, "use_compile_cache", lambda say: Path("/cache/key"))
    monkeypatch.setattr(prewarm, "prune", lambda say: [Pruned(Path("/cache/old"), 3 * 2**20)])
    config = str(tiny_folder / "config.toml")
    assert main(["warm", config, "--prune", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == "deleted /cache/old: 3 MiB\n"
    assert json.loads(told.out) == {
        "cache": "/cache/key",
        "devices": [
            {"device": "cuda:5", "seconds": 41.5, "compiled": 7, "found": 0, "state": "cold"},
            {"device": "cuda:6", "seconds": 3.25, "compiled": 0, "found": 7, "state": "warm"},
        ],
        "pruned": {"/cache/old": 3 * 2**20},
    }


def test_what_is_wrong_is_one_line(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(tiny_folder / "config.toml")
    assert main(["warm", config, "--set", "train.lr=0"]) == 3
    assert "train.lr" in capsys.readouterr().err
    assert main(["warm", config, "--set", "target.path=/nowhere"]) == 1
    assert "/nowhere is not a folder with a model" in capsys.readouterr().err
    assert main(["warm", config, "--set", 'layout.drafters=["cuda:77"]']) == 1
    assert capsys.readouterr().err.startswith("ValueError: layout.drafters names cuda:77: torch sees ")


def test_too_little_memory_is_one_line(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(prewarm, "warm_up", short)
    assert main(["warm", str(tiny_folder / "config.toml")]) == 1
    assert "the main thread ran out of memory on cpu with forwards of 2 rows of 96 tokens" in capsys.readouterr().err
