"""Drafters and checkpoints on disk, of one drafter that learns alone, written and read as a training does it."""

from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.checkpoint import Progress, Score, drafter_files, restore, write_checkpoint
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.snapshot import HostCopy, Trained


def save_drafter(folder: Path, model: DraftModel, config: DraftConfig | None = None) -> Path:
    """A drafter without a checkpoint's other files. config: what it says it is, if not the truth."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: Mapping[str, torch.Tensor] = {name: it.detach().contiguous() for name, it in model.state_dict().items()}
    drafter_files(folder, weights, config or model.config)
    return folder


def save_checkpoint(
    folder: Path,
    model: DraftModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    keep: int,
    *,
    score: Score | None = None,
) -> Path:
    snapshot = HostCopy().take(Trained.alone(model, optimizer))
    return write_checkpoint(folder, snapshot, progress, keep, score=score).path


def load_checkpoint(checkpoint: Path, model: DraftModel, optimizer: torch.optim.Optimizer) -> Progress:
    return restore(checkpoint, Trained.alone(model, optimizer))
