"""A drafter, its optimiser and the random generators as they are at one moment, copied to the host.

From a GPU the copies go into page-locked buffers, in the order of the device's queue: the next update waits for them
there, and the host waits for nothing. Whoever wants to read them waits for `arrived`.
"""

# torch's optimisers are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.optim import parameter_names
from trainer.randomness import random_states

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for each weight


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is written from. The next copy into the same buffers overwrites it."""

    config: DraftConfig
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]  # none before the first step
    random: bytes  # JSON
    _events: tuple[torch.cuda.Event, ...]

    def arrived(self) -> "Snapshot":
        """Waits for the copies, and for nothing that was queued behind them."""
        for event in self._events:
            event.synchronize()
        return self


class HostCopy:
    """Buffers on the host that take one snapshot after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, model: DraftModel, optimizer: torch.optim.Optimizer) -> Snapshot:
        weights = {name: self._copy(name, tensor) for name, tensor in model.state_dict().items()}
        moments = {name: self._copy(name, tensor) for name, tensor in optimizer_tensors(model, optimizer).items()}
        events: list[torch.cuda.Event] = []
        for device in {parameter.device for parameter in model.parameters() if parameter.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return Snapshot(model.config, weights, moments, json.dumps(random_states()).encode(), tuple(events))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def optimizer_tensors(model: DraftModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by the names of their weights; nothing before the first step."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    names = parameter_names(model)
    return {f"{names[i]}.{key}": held[key] for i, held in state.items() for key in MOMENTS}
