"""Runs of a tiny training, and what is left of them: records, weights, lines of the log."""

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import tiny_toml

from trainer.config import TrainConfig, load
from trainer.records import RunDir, Status, StepRecord, checkpoint_name, read_metrics, read_status


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    text = tiny_toml(folder / "target", folder / "train.jsonl", folder / "heldout.jsonl", **changes)
    return load(text.encode())


def status_of(run: Path) -> Status:
    status = read_status(RunDir(run).status.read_bytes())
    assert status is not None
    return status


def metrics_of(run: Path) -> list[StepRecord]:
    return read_metrics(RunDir(run).metrics.read_bytes())


def figures(records: list[StepRecord]) -> list[dict[str, object]]:
    """What must repeat: everything but times, queues and memory."""
    return [
        r.model_dump(exclude={"tokens_per_s", "seconds", "time", "queues", "workers", "memory_mib"}) for r in records
    ]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = RunDir(run).checkpoints / checkpoint_name(step)
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    first, second = weights_of(one, step), weights_of(other, step)
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)


class StopAfter:
    """A `say` that sets an event when a step's line comes by."""

    def __init__(self, step: int) -> None:
        self.event, self.lines = threading.Event(), list[str]()
        self._start = f"step {step}/"

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith(self._start):
            self.event.set()


def silent(line: str) -> None:
    pass
