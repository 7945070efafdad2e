"""Drafters and checkpoints on disk: safetensors only, whole or not there at all.

A folder is written under a temporary name, every file synced, then renamed: a reader sees all of it or nothing.

checkpoints/step-00000100/
    config.json, model.safetensors   the drafter, loadable as it is
    optimizer.safetensors            AdamW's moments, named after their weights
    state.json                       Progress, and the sha256 of the other files and of its own content

There is no random generator to save: weights, order of the data and anchors are drawn from the seed, the epoch and the
row's number alone.
"""

# safetensors' and the optimiser's functions are typed loosely.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.data import Cursor
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.optim import parameter_names
from trainer.records import checkpoint_name

SCHEMA_VERSION = 1
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for each weight


class Progress(BaseModel):
    """Where a training stands: what a resumed one needs beside weights and moments."""

    model_config = ConfigDict(frozen=True)
    step: int  # steps done
    row: int  # number of the next row to learn from
    cursor: Cursor | None = None  # and its place in the data; checkpoints from before there were cursors have none
    data_digest: str  # sha256 of the documents that are learned from
    first_loss: float | None = None
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: tuple[str, ...] = ()  # the last ones of them, each named with its data: none was learned since


class StateFile(BaseModel):
    """state.json."""

    schema_version: int = SCHEMA_VERSION
    progress: Progress
    files: dict[str, str]  # name -> sha256
    own: str = ""  # sha256 of this content with `own` empty

    def sealed(self) -> "StateFile":
        whole = StateFile.model_validate_json(self.model_dump_json())  # every field is set, as when it is read again
        return whole.model_copy(update={"own": whole.seal()})

    def seal(self) -> str:
        """What `own` has to be: of the fields that the file has, so that one from before a new field keeps its own."""
        content = self.model_copy(update={"own": ""}).model_dump_json(exclude_unset=True).encode()
        return hashlib.sha256(content).hexdigest()


class CheckpointError(ValueError):
    """A drafter or checkpoint that can't be used: names the folder and why."""


def save_drafter(folder: Path, model: DraftModel, config: DraftConfig, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in the z-lab format; `dtype` converts the weights, None keeps theirs.

    An older drafter in `folder` is replaced as a whole. Raises CheckpointError when anything else is there, OSError
    when the disk refuses.
    """
    folder = Path(folder).resolve()  # also for "." and "..", which have no name
    if folder.exists() and not (folder.is_dir() and names_in(folder) in (set[str](), {CONFIG_FILE, MODEL_FILE})):
        raise CheckpointError(f"{folder} is not a drafter: it will not be replaced")
    with built_beside(folder) as building:
        write_drafter_files(building, model, config, dtype)


def write_drafter_files(folder: Path, model: DraftModel, config: DraftConfig, dtype: torch.dtype | None) -> None:
    """The two files of a drafter, synced, into an existing folder."""
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    data = config.to_json()
    data["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    save_tensors(folder / MODEL_FILE, weights)
    write_synced(folder / CONFIG_FILE, json.dumps(data, indent=2).encode())


def load_drafter(folder: Path | str, device: torch.device | str, dtype: torch.dtype) -> tuple[DraftModel, DraftConfig]:
    """Reads a drafter in the z-lab format, ours or another trainer's; also a checkpoint's folder.

    Raises CheckpointError naming the folder and what is wrong: a missing file, a tensor missing, unknown or misshapen.
    """
    folder = Path(folder)
    try:
        config = DraftConfig.from_json(json.loads((folder / CONFIG_FILE).read_bytes()))
        weights = load_file(folder / MODEL_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"no drafter in {folder}: {error}") from error
    with torch.device("meta"):
        model = DraftModel(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            raise CheckpointError(f"drafter {folder}: tensor {name} is {'missing' if name in expected else 'unknown'}")
        got, wanted = list(weights[name].shape), list(expected[name])
        if got != wanted:
            raise CheckpointError(f"drafter {folder}: tensor {name} has shape {got}, expected {wanted}")
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return model.to(device), config


# --- checkpoints ---


def save_checkpoint(
    folder: Path, model: DraftModel, optimizer: torch.optim.Optimizer, progress: Progress, keep: int
) -> Path:
    """Writes step-N below `folder`, then deletes all but the newest `keep`. An OSError leaves the older ones intact.

    Later ones go too: they were damaged and passed over, else the training would have gone on from there. A step that
    is there already, whole, stays as it is: replacing it would leave a moment with none.
    """
    new = folder / checkpoint_name(progress.step)
    if new.exists() and damage(new) is None:
        return new
    for leftover in folder.glob(".*"):  # of a save that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with built_beside(new) as building:
        write_drafter_files(building, model, model.config, None)
        save_tensors(building / OPTIMIZER_FILE, optimizer_tensors(model, optimizer))
        files = {path.name: file_digest(path) for path in sorted(building.iterdir())}
        state = StateFile(progress=progress, files=files).sealed()
        write_synced(building / STATE_FILE, state.model_dump_json(indent=2).encode())
    found = checkpoint_folders(folder)
    here = found.index(new)
    for unwanted in found[:here] + found[here + keep :]:
        shutil.rmtree(unwanted)
    return new


def newest_good_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint below `folder` whose files are what was written; damaged ones are named and passed over.

    None when there are none at all. Raises CheckpointError when there are only damaged ones: starting anew would
    overwrite what may still be repaired.
    """
    found = checkpoint_folders(folder)
    for checkpoint in found:
        fault = damage(checkpoint)
        if fault is None:
            return checkpoint
        say(f"checkpoint {checkpoint.name} is damaged ({fault}): trying an older one")
    if found:
        raise CheckpointError(f"all checkpoints in {folder} ({len(found)}) are damaged: delete them to begin anew")
    return None


def load_checkpoint(checkpoint: Path, model: DraftModel, optimizer: torch.optim.Optimizer) -> Progress:
    """Puts weights and moments back, exactly. Raises CheckpointError when it holds another shape of drafter."""
    loaded, config = load_drafter(checkpoint, "cpu", torch.float32)
    if config != model.config:
        raise CheckpointError(f"checkpoint {checkpoint}: {difference(config, model.config)}")
    model.load_state_dict(loaded.state_dict())
    moments = load_file(checkpoint / OPTIMIZER_FILE)
    names = parameter_names(model)
    state = {i: {key: moments[f"{name}.{key}"] for key in MOMENTS} for i, name in enumerate(names)} if moments else {}
    # The groups' settings come from the config, not from the file: a resumed run may have another learning rate.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return read_state(checkpoint).progress


def difference(found: DraftConfig, wanted: DraftConfig) -> str:
    """Which sizes of two drafters differ, for an error."""
    pairs = [(f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(found)]
    return ", ".join(f"its {name} is {one}, wanted {other}" for name, one, other in pairs if one != other)


def optimizer_tensors(model: DraftModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by the names of their weights; nothing before the first step."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    names = parameter_names(model)
    return {f"{names[i]}.{key}": held[key].detach().cpu().contiguous() for i, held in state.items() for key in MOMENTS}


def checkpoint_folders(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def read_state(checkpoint: Path) -> StateFile:
    return StateFile.model_validate_json((checkpoint / STATE_FILE).read_bytes())


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        state = read_state(checkpoint)
        wrong = [name for name, digest in state.files.items() if file_digest(checkpoint / name) != digest]
    except (OSError, ValueError) as error:
        return str(error).split("\n")[0]
    if state.schema_version > SCHEMA_VERSION:
        return f"schema_version {state.schema_version} is newer than this trainer"
    if state.own != state.seal():
        wrong.append(STATE_FILE)
    return f"{wrong[0]} is not what was written" if wrong else None


# --- files ---


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, synced to the disk. Raises OSError."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # what it makes of a full disk, too
        raise OSError(f"can't write {path}: {error}") from error
    sync(path)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def built_beside(folder: Path) -> Generator[Path]:
    """A temporary folder beside `folder`, which takes its place at the end of the block; an error leaves no trace.

    An older `folder` steps aside first and goes away after.
    """
    make_synced(folder.parent)
    building, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    for leftover in (building, old):
        shutil.rmtree(leftover, ignore_errors=True)
    building.mkdir()
    try:
        yield building
        sync(building)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    building.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def make_synced(folder: Path) -> None:
    """Makes a folder and those above it that are missing; each one's entry is on the disk after."""
    if folder.exists():
        return
    make_synced(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)
