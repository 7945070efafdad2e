"""Drafters and checkpoints on disk: safetensors only, whole or not there at all.

A folder is written under a temporary name, every file synced, then renamed: a reader sees all of it or nothing.
"""

# safetensors' torch functions are typed loosely.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.draft import DraftConfig, DraftModel

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


class CheckpointError(ValueError):
    """A drafter or checkpoint that can't be used: names the folder and why."""


def save_drafter(folder: Path, model: DraftModel, config: DraftConfig, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in the z-lab format; `dtype` converts the weights, None keeps theirs.

    An older drafter in `folder` is replaced as a whole.
    """
    folder = Path(folder)
    building = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write_drafter_files(building, model, config, dtype)
    replace_folder(building, folder)


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


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, synced to the disk."""
    save_file(dict(tensors), path)
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


def replace_folder(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; an older `folder` steps aside first and goes away after."""
    sync(new)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
