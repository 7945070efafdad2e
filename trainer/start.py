"""What a training starts with: devices, data, the drafter's shape and first weights, the checkpoint to go on from."""

# torch's random functions are partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoint import CheckpointError, difference, load_drafter, newest_good_checkpoint
from trainer.config import TrainConfig
from trainer.data import Prepared
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.prepare import prepared_data
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


def data_of(config: TrainConfig, target: TargetModel, run: RunDir, say: Say) -> tuple[Prepared, Prepared | None]:
    """The data to learn from and to measure on; prepared in the run's folder, what isn't yet. Raises DataError."""

    def prepared(path: str, name: str) -> Prepared:
        return prepared_data(
            path,
            target.tokenizer,
            into=run.prepared / name,
            last_turn_only=config.data.last_turn_only,
            end_tokens=target.end_tokens(),
            vocab_size=target.config.vocab_size,
            say=say,
            progress=say,
        )

    train = prepared(config.data.train, "train")
    return train, prepared(config.data.heldout, "heldout") if config.data.heldout else None


def draft_config(config: TrainConfig, target: TargetModel, data: Sequence[Prepared] = ()) -> DraftConfig:
    """The drafter's shape: the config's choices, the target's sizes, and a mask token that `data` doesn't hold.

    Raises TrainingError when they don't fit.
    """
    wanted, mask = config.draft, config.draft.mask_token_id
    counts = np.zeros(max([target.config.vocab_size, *(len(prepared.counts) for prepared in data)]), dtype=np.int64)
    for prepared in data:
        counts[: len(prepared.counts)] += prepared.counts
        if mask is not None and mask < len(prepared.counts) and prepared.counts[mask]:
            raise TrainingError(
                f"draft.mask_token_id {mask} ({target.tokenizer.decode([mask])!r}) occurs "
                f"{int(prepared.counts[mask]):,} times in the data, first in {prepared.first_place_of(mask)}: choose "
                f"another, or leave it out"
            )
    try:
        return target.draft_config(
            wanted.layers,
            wanted.block,
            wanted.target_layer_ids or default_target_layer_ids(target.num_layers, wanted.captured),
            mask,
            sliding_window=wanted.sliding_window,
            sliding_layers=wanted.sliding_layers,
            causal=wanted.causal,
            counts=counts,
        )
    except ValueError as error:
        raise TrainingError(f"[draft] does not fit the target {config.target.path}: {error}") from error


def fresh_drafter(draft: DraftConfig, seed: int) -> DraftModel:
    """Weights drawn from the seed, the same for each device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DraftModel(draft)


def start_weights(model: DraftModel, folder: Path | str | None, say: Say, target: TargetModel | None = None) -> None:
    """Takes over a drafter's weights, if one is named, in z-lab's or speculators' format.

    Raises CheckpointError when it has another shape, or was made for another target.
    """
    if folder is None:
        return
    drafter, found = load_drafter(folder, "cpu", torch.float32, target=target)
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
