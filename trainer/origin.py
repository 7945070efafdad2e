"""What made a checkpoint: config, code and machine; and how another start differs from it."""

# pyright: reportUnknownMemberType=false

import functools
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_jsonable_python

from trainer.config import TrainConfig, as_mapping

HERE = Path(__file__).parent
MISSING = object()


class Machine(BaseModel):
    """What a training's rounding depends on, beside its config and code."""

    model_config = ConfigDict(frozen=True)
    python: str
    torch: str
    device: str  # "cpu", or the GPU's name
    threads: int  # torch's, on the CPU
    cublas_workspace: str | None  # CUBLAS_WORKSPACE_CONFIG


class Origin(BaseModel):
    """Of a checkpoint, in its state.json."""

    model_config = ConfigDict(frozen=True)
    config: dict[str, Any]
    code: str  # sha256 over the trainer's files
    release: str | None  # DFLASH_RELEASE, for people
    machine: Machine


def origin_of(config: TrainConfig, device: torch.device) -> Origin:
    """This process's. device: the drafter's."""
    machine = Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        cublas_workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    release = os.environ.get("DFLASH_RELEASE") or None
    return Origin(config=dict(as_mapping(config)), code=code_digest(), release=release, machine=machine)


@functools.cache
def code_digest() -> str:
    """Of the files that this process was started from; a deploy of the same code elsewhere has the same."""
    digest = hashlib.sha256()
    for path in sorted(HERE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(HERE).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def changes_since(before: Origin, now: Origin) -> list[str]:
    """Lines for the log that say what is not as it was: why the rest of a training may differ."""
    lines: list[str] = []
    values = dict(_flat(_completed(before.config))), dict(_flat(now.config))
    # Of a config that can't be completed any more: keys it didn't know yet, and that nobody has set since.
    new = {key for key, value in _defaults() if key not in values[0] and values[1].get(key, MISSING) == value}
    changed = [
        f"{key} is {_shown(values[1].get(key, MISSING))}, was {_shown(values[0].get(key, MISSING))}"
        for key in sorted((values[0].keys() | values[1].keys()) - new)
        if values[0].get(key, MISSING) != values[1].get(key, MISSING)
    ]
    if changed:
        lines.append(f"the config has changed since this checkpoint: {', '.join(changed)}")
    if before.code != now.code:
        lines.append(
            f"the trainer's code is not the checkpoint's: {_release(now)} here, {_release(before)} there; the rest of "
            f"the training may differ from what that code would have done"
        )
    one, other = before.machine.model_dump(), now.machine.model_dump()
    if differing := [f"{key} {other[key]}, was {one[key]}" for key in other if one[key] != other[key]]:
        lines.append(
            f"this machine or its settings are not the checkpoint's ({'; '.join(differing)}): the rest of the training "
            f"will not repeat bit for bit what would have come there"
        )
    return lines


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """An older config with the defaults of the keys that it didn't know yet, where it is still a config at all."""
    try:
        return as_mapping(TrainConfig.model_validate(config))
    except ValidationError:
        return config


def _defaults(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Of every key that has one, dotted, as as_mapping writes it."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _defaults(info.annotation, f"{prefix}{name}.")
        elif not info.is_required():
            yield prefix + name, to_jsonable_python(info.get_default())


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(value: object) -> str:
    return "unknown" if value is MISSING else "unset" if value is None else str(value)


def _release(origin: Origin) -> str:
    return f"{origin.release} ({origin.code[:12]})" if origin.release else origin.code[:12]
