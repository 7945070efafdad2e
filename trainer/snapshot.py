"""A drafter, its optimiser and the random generators as they are at one moment, copied to the host.

From a GPU the copies go into page-locked buffers, in the order of the device's queue: the next update waits for them
there, and the host waits for nothing. Whoever wants to read them waits for `arrived`.
"""

# torch's optimisers are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.optim import parameter_names
from trainer.randomness import random_states

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps for each weight


@dataclass(frozen=True)
class Trained:
    """A drafter with its optimiser, as a checkpoint keeps it; or several equal replicas, of which it keeps one.

    So a checkpoint doesn't say how many there were, nor who had which moments: any others can go on from it.
    """

    models: Sequence[DraftModel]
    optimizers: Sequence[torch.optim.Optimizer]
    keeps: Sequence[frozenset[str]]  # the weights that each optimiser has moments of; all, or a share

    @classmethod
    def alone(cls, model: DraftModel, optimizer: torch.optim.Optimizer) -> "Trained":
        return cls((model,), (optimizer,), (frozenset(parameter_names(model)),))

    @property
    def config(self) -> DraftConfig:
        return self.models[0].config

    def weights(self) -> dict[str, Tensor]:
        return self.models[0].state_dict()

    def moments(self) -> dict[str, Tensor]:
        """AdamW's, by the names of their weights, each where it is; nothing before the first step."""
        found: dict[str, Tensor] = {}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            names = parameter_names(model)
            for index, held in optimizer.state_dict()["state"].items():
                for key in MOMENTS:
                    found.setdefault(f"{names[index]}.{key}", held[key])
        return found

    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Puts them back into every replica; the moments to those who keep them. Raises KeyError for one that lacks."""
        for model, optimizer, keeps in zip(self.models, self.optimizers, self.keeps, strict=True):
            model.load_state_dict(weights)
            names = parameter_names(model)
            state: dict[int, dict[str, Tensor]] = {}
            if moments:
                # Copies: the optimiser would take the very tensors, and so would the next replica's.
                state = {
                    index: {key: moments[f"{name}.{key}"].clone() for key in MOMENTS}
                    for index, name in enumerate(names)
                    if name in keeps
                }
            # The groups' settings come from the config: a resumed run may have another learning rate.
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


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

    def take(self, state: Trained) -> Snapshot:
        """On a GPU the current streams must be those that the replicas' updates are queued on."""
        weights = {name: self._copy(name, tensor) for name, tensor in state.weights().items()}
        moments = {name: self._copy(name, tensor) for name, tensor in state.moments().items()}
        events: list[torch.cuda.Event] = []
        devices = {parameter.device for model in state.models for parameter in model.parameters()}
        for device in devices:
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                events.append(event)
        return Snapshot(state.config, weights, moments, json.dumps(random_states()).encode(), tuple(events))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
