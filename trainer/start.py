"""What a training starts with: its devices, the drafter's shape and first weights, the checkpoint to go on from."""

# torch's random functions are partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from pathlib import Path

import torch

from trainer.checkpoint import CheckpointError, difference, load_drafter, newest_good_checkpoint
from trainer.config import TrainConfig
from trainer.data import Documents, read_documents
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.records import RunDir
from trainer.target import TargetModel

Say = Callable[[str], None]


class TrainingError(RuntimeError):
    """The training can't go on: one line says why."""


def pick_device(name: str) -> torch.device:
    """A device of the config. Raises TrainingError when this machine doesn't have it."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TrainingError(f"device {name} is not here: torch sees {torch.cuda.device_count()} GPUs")
    return device


def target_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return chosen.get(config.target.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)


def draft_config(config: TrainConfig, target: TargetModel) -> DraftConfig:
    """The drafter's shape: the config's choices, the target's sizes. Raises TrainingError when they don't fit."""
    wanted = config.draft
    try:
        layer_ids = wanted.target_layer_ids or default_target_layer_ids(target.num_layers, wanted.captured)
        return target.draft_config(wanted.layers, wanted.block, layer_ids, wanted.mask_token_id)
    except ValueError as error:
        raise TrainingError(f"[draft] does not fit the target {config.target.path}: {error}") from error


def read(path: str, config: TrainConfig, target: TargetModel, draft: DraftConfig, say: Say) -> Documents:
    """A data file of the config; says what was left out of it. Raises DataError."""
    documents = read_documents(
        Path(path),
        target.tokenizer,
        row_tokens=config.data.row_tokens,
        last_turn_only=config.data.last_turn_only,
        mask_token_id=draft.mask_token_id,
        end_tokens=target.end_tokens(),
    )
    for line in documents.report:
        say(line)
    return documents


def fresh_drafter(draft: DraftConfig, seed: int) -> DraftModel:
    """Weights drawn from the seed, the same for each device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DraftModel(draft)


def start_weights(model: DraftModel, folder: Path | str | None, say: Say) -> None:
    """Takes over a drafter's weights, if one is named. Raises CheckpointError when it has another shape."""
    if folder is None:
        return
    drafter, found = load_drafter(folder, "cpu", torch.float32)
    if found != model.config:
        raise CheckpointError(f"drafter {folder}: {difference(found, model.config)}")
    model.load_state_dict(drafter.state_dict())
    say(f"starting with the weights of {folder}")


def find_checkpoint(run: RunDir, resume: Path | None, say: Say) -> Path | None:
    """The checkpoint to go on from: the run's own before the earlier run's. Raises CheckpointError: that has none."""
    if own := newest_good_checkpoint(run.checkpoints, say):
        return own
    if resume is None:
        return None
    if earlier := newest_good_checkpoint(RunDir(resume).checkpoints, say):
        return earlier
    raise CheckpointError(f"nothing to resume: no good checkpoint in {RunDir(resume).checkpoints}")
