"""What a training starts with: devices, data, the drafter's shape and first weights, the checkpoint to go on from."""

# torch's random functions are partly untyped.
# pyright: reportUnknownMemberType=false

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoint import (
    CONFIG_FILE,
    CheckpointError,
    Progress,
    difference,
    load_drafter,
    newest_good_checkpoint,
    read_state,
    restore,
)
from trainer.config import TrainConfig
from trainer.data import Cursor, Prepared, Rows
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.flops import soft_target_cost
from trainer.origin import Origin, changes_since
from trainer.overlap import overlap
from trainer.prepare import check_path, prepared_data
from trainer.records import RunDir
from trainer.snapshot import Trained
from trainer.state import StateFile
from trainer.target import TargetModel

Say = Callable[[str], None]


class TrainingError(RuntimeError):
    """The training can't go on: one line says why."""


class Stopped(Exception):
    """The training was stopped before its first step."""


def target_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return chosen.get(config.target.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)


def check_paths(config: TrainConfig) -> None:
    """That the data is there, as far as a look tells: before a target is loaded for it. Raises DataError."""
    for path in (config.data.train, config.data.heldout):
        if path is not None:
            check_path(path)


def data_of(
    config: TrainConfig, target: TargetModel, run: RunDir, stop: threading.Event, say: Say
) -> tuple[Prepared, Prepared | None]:
    """The data to learn from and to measure on; prepared in the run's folder, what isn't yet.

    Raises DataError; Stopped soon after `stop` is set.
    """

    def check() -> None:
        if stop.is_set():
            raise Stopped

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
            check=check,
        )

    # The held-out data is the smaller one: what is wrong with it is told before hours.
    heldout = prepared(config.data.heldout, "heldout") if config.data.heldout else None
    train = prepared(config.data.train, "train")
    for line in overlap(train, heldout) if heldout else ():
        say(line)
    return train, heldout


def draft_config(
    config: TrainConfig, target: TargetModel, data: Sequence[Prepared] = (), earlier: Path | None = None
) -> DraftConfig:
    """The drafter's shape: the config's choices, the target's sizes, and a mask token that `data` doesn't hold.

    earlier: the checkpoint to go on from, whose mask token stays. Raises TrainingError when they don't fit.
    """
    wanted, mask = config.draft, config.draft.mask_token_id
    if mask is None and earlier is not None:
        mask = shape_of(earlier).mask_token_id
    counts = np.zeros(max([target.config.vocab_size, *(len(prepared.counts) for prepared in data)]), dtype=np.int64)
    for prepared in data:
        counts[: len(prepared.counts)] += prepared.counts
        if mask is not None and mask < len(prepared.counts) and prepared.counts[mask]:
            raise TrainingError(
                f"draft.mask_token_id {mask} ({target.tokenizer.decode([mask])!r}) occurs "
                f"{int(prepared.counts[mask]):,} times in the data, first in {prepared.first_place_of(mask)}: "
                + (
                    f"it is the token that {earlier} has learned with; leave those records out, or begin another run"
                    if wanted.mask_token_id is None
                    else "choose another, or leave it out"
                )
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


def soft_cost_line(config: TrainConfig, draft: DraftConfig) -> str:
    """What the objectives kl and tv cost."""
    cost = soft_target_cost(draft, row_tokens=config.data.row_tokens, anchors=config.train.anchors)
    return (
        f"train.objective {config.train.objective} runs the whole target and its head: about {cost:.2f} times the "
        f"operations of cross-entropy"
    )


def shape_of(checkpoint: Path) -> DraftConfig:
    """A checkpoint's drafter, by its config.json."""
    return DraftConfig.from_json(json.loads((checkpoint / CONFIG_FILE).read_bytes()))


def check_fits(config: TrainConfig, target: TargetModel, earlier: Path | None) -> None:
    """Whether target, drafter and the checkpoint to go on from fit, as far as it can be told without the data.

    Raises TrainingError or CheckpointError.
    """
    draft = draft_config(config, target, earlier=earlier)
    if earlier is None:
        return
    found = shape_of(earlier)
    if dataclasses.replace(found, mask_token_id=draft.mask_token_id) != draft:
        raise CheckpointError(f"checkpoint {earlier}: {difference(found, draft)}")
    done = read_state(earlier).progress.step
    if done > config.train.steps:
        raise TrainingError(f"train.steps is {config.train.steps}, but step {done} is done already: raise it")


def place_after(progress: Progress, rows: Rows, say: Say) -> Cursor:
    """Where the data goes on. A cursor is a place in one packing of one data: in another, the next epoch begins."""
    cursor = progress.cursor or rows.cursor(progress.row)
    if progress.data_digest != rows.prepared.digest:
        why = "the data has changed since then"
    elif progress.packing not in (None, rows.packing):
        why = f"the data is in {rows.packing} now, then it was in {progress.packing}"
    else:
        return cursor
    say(f"{why}: going on with row {progress.row}, at the begin of epoch {cursor.epoch + 2} of what is there now")
    return Cursor(row=progress.row, epoch=cursor.epoch + 1)


def resumed(earlier: Path, before: StateFile, state: Trained, origin: Origin, say: Say) -> Progress:
    """Puts a checkpoint's weights, moments and random generators back, and says what has changed since then.

    before: what its state.json says; state: those who learn; origin: of this training. Raises CheckpointError.
    """
    progress = restore(earlier, state)
    say(f"resuming from {earlier} at step {progress.step}")
    if before.origin:
        for line in changes_since(before.origin, origin):
            say(line)
    return progress


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
        if resume is not None and resume.resolve() != run.path.resolve():
            say(f"--resume {resume} is not needed: {run.path} has checkpoints of its own, and goes on from them")
        return own
    if resume is None:
        return None
    if earlier := newest_good_checkpoint(RunDir(resume).checkpoints, say):
        return earlier
    raise CheckpointError(f"nothing to resume: no good checkpoint in {RunDir(resume).checkpoints}")
