# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its models no types)
"""A target that is too large for one GPU: its layers in even shares on several, one after the other.

A hidden state goes from GPU to GPU where the layers' device changes. For a model that is run by hand that is done where
its layers are run (byhand.py). For a model's own forward, hooks bring what a layer is given to the layer's device; they
hold nothing, so threads don't meet in them, and copies of the trunk with fewer layers (hooked.py) have them too.

accelerate is not used for it: it puts its own forward into each module object, so a copy of a module runs the module
that it was copied from; it keeps what a call needs on the hook, for whichever thread comes next; and a head that is
tied to the embedding has to be on the embedding's device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.hooked import Parts
from trainer.refused import TargetError
from trainer.streams import moved


def shares(layers: int, devices: int) -> list[int]:
    """Which of the devices each layer is on: blocks of neighbours, whose sizes differ by one at most.

    Raises TargetError when there are fewer layers than devices.
    """
    if devices > layers:
        raise TargetError(f"it has {layers} layers, which can't be spread over {devices} devices")
    return [layer * devices // layers for layer in range(layers)]


def plan(parts: Parts, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of each module that has one of its own, by name; "" is all the rest.

    The embedding and what has no weights (positions) are on the first, what comes behind the layers on the last.
    """
    names = {module: name for name, module in parts.model.named_modules()}
    placed = {"": devices[0]}
    found_layers = False
    for name, child in parts.trunk.named_children():
        found_layers |= name == parts.list_name
        if found_layers and name != parts.list_name and any(True for _ in child.parameters()):
            placed[f"{parts.path}.{name}"] = devices[-1]
    for layer, share in zip(parts.layers, shares(len(parts.layers), len(devices)), strict=True):
        placed[names[layer]] = devices[share]
    placed[names[parts.head]] = devices[-1]
    return placed


def spread(model: Any, devices: Sequence[torch.device]) -> None:
    """Moves a model's parts to their devices, for good. A head that is tied to the embedding gets weights of its own.

    Raises TargetError when the model can't be spread.
    """
    parts = Parts(model)
    placed = plan(parts, devices)
    if parts.head.weight is parts.embedding.weight:
        parts.head.weight = nn.Parameter(parts.head.weight.detach(), requires_grad=False)
    between = set(parts.trunk.children())  # a norm, a position embedding: given all on their own device, too
    where: dict[int, torch.device] = {}
    for name, module in model.named_modules():
        device = _device_of(name, placed)
        for weight in module.parameters(recurse=False):
            if where.setdefault(id(weight), device) != device:
                raise TargetError("its layers share weights, so they can't be spread over several devices")
        module._apply(_mover(device), recurse=False)
        if (name in placed or module in between) and not isinstance(module, nn.ModuleList):
            module.register_forward_pre_hook(_Bring(device), with_kwargs=True)


def _device_of(name: str, placed: dict[str, torch.device]) -> torch.device:
    """That of the module, or of the nearest one around it that has one."""
    while name not in placed:
        name = name.rpartition(".")[0]
    return placed[name]


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device)


class _Bring:
    """A hook: all tensors that a module is given, brought to its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, _module: Any, arguments: Any, named: Any) -> tuple[Any, Any]:
        return self._brought(arguments), self._brought(named)

    def _brought(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return moved(value, self._device)
        if type(value) is dict:
            return {key: self._brought(inner) for key, inner in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._brought(inner) for inner in value)
        return value  # a cache among them: each of its layers is on the device of the keys that it is given
