"""The replicas' gradients brought together, and what one of them made spread over the others.

Each parameter has an owner among the replicas, so that every one has about as many weights to add up. The sum is made
in the replicas' order, 0 + 1 + 2 + ..., whoever owns it: the same bits in every run. (NCCL has an order of its own.)

Everything is queued by the caller's thread on its current streams, which must be those that the replicas use on their
devices: torch orders a copy between two GPUs behind both of these, and what follows behind the copy. The host waits
for nothing.

What a copy brings to a GPU lands in a room that stays as long as the Reduction, and is put from there to where it
belongs by that GPU itself: memory that another GPU writes must not be freed with the write under way (streams.py), and
gradients go with every step. Kept until they are written, they would be there twice, as NCCL's are.
"""

# torch's nccl functions and `split` are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from typing import Literal

import torch
import torch.cuda.nccl as nccl
from torch import Tensor, nn

from trainer.streams import keep_until

Reduce = Literal["copies", "nccl"]


def shards(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Which parameters each of `count` replicas owns, by their numbers, in order: whole ones, of even sizes together.

    The largest goes first, each to who has the least so far: nobody has more than the mean and one parameter.
    """
    owned: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # equal ones stay in order
        least = loads.index(min(loads))
        owned[least].append(index)
        loads[least] += sizes[index]
    return [sorted(own) for own in owned]


class Reduction:
    """Sums and copies between the replicas of one model. All have its parameters in the same order."""

    def __init__(self, models: Sequence[nn.Module], how: Reduce = "copies") -> None:
        """Raises ValueError when NCCL can't do it: it wants a GPU for each replica."""
        self.parameters = [list(model.parameters()) for model in models]
        self.shards = shards([parameter.numel() for parameter in self.parameters[0]], len(models))
        self.devices = [parameters[0].device for parameters in self.parameters]
        self._how: Reduce = how
        self._rooms: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        if how == "nccl" and (len(set(self.devices)) < len(models) or any(d.type != "cuda" for d in self.devices)):
            named = ", ".join(map(str, self.devices))
            raise ValueError(f"nccl adds up gradients of drafters on a GPU each, and they are on {named}: use copies")

    def prepare(self) -> None:
        """Makes NCCL's communicators, which takes a while and memory: before other threads use the GPUs."""
        if self._how == "nccl" and len(self.devices) > 1:
            self._nccl_sum([torch.zeros(1, device=device) for device in self.devices])

    def sum_gradients(self, everywhere: bool) -> None:
        """Each owner's gradients become the sums over the replicas.

        everywhere: the others get them too; else theirs are gone. A replica that learned nothing adds nothing. A
        parameter that none has a gradient of keeps none.
        """
        if len(self.parameters) == 1:
            return
        if self._how == "nccl":
            self._all_reduce()
        else:
            for index, owner in self._in_turn():
                self._sum(index, owner)
        for index, owner in self._in_turn():
            for replica, parameters in enumerate(self.parameters):
                if replica == owner:
                    continue
                if not everywhere:
                    parameters[index].grad = None
                elif self._how == "copies":
                    self._give(parameters[index], self.parameters[owner][index].grad)

    @torch.no_grad()
    def spread_weights(self) -> None:
        """Every replica gets each weight as its owner has it."""
        for index, owner in self._in_turn():
            for replica, parameters in enumerate(self.parameters):
                if replica != owner:
                    parameters[index].copy_(self.parameters[owner][index], non_blocking=True)

    def _in_turn(self) -> list[tuple[int, int]]:
        """All parameters with their owners, in turn for each owner, so that all devices have something to do."""
        placed = [(place, owner, index) for owner, own in enumerate(self.shards) for place, index in enumerate(own)]
        return [(index, owner) for _, owner, index in sorted(placed)]

    def _sum(self, index: int, owner: int) -> None:
        gradients = [g for parameters in self.parameters if (g := parameters[index].grad) is not None]
        if not gradients:
            return
        device = self.devices[owner]
        # The sum is a new tensor: a gradient on this very device may be another replica's, and the room has the next.
        total = self._brought(gradients[0], device)
        if len(gradients) == 1 or total is not gradients[0]:
            total = total.clone()
        for gradient in gradients[1:]:
            here = self._brought(gradient, device)
            total = total + here if total is gradients[0] else total.add_(here)
        self.parameters[owner][index].grad = total

    @torch.no_grad()
    def _give(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None:
            parameter.grad = None
            return
        here = self._brought(gradient, parameter.device)
        if parameter.grad is None:
            parameter.grad = here.clone()
        else:
            parameter.grad.copy_(here)

    def _brought(self, gradient: Tensor, device: torch.device) -> Tensor:
        """On that device: itself if it is there, else in the room for what comes, where the next one takes its place.

        What is queued to read it must be queued before the next one is brought.
        """
        if gradient.device == device:
            return gradient
        key = device, gradient.dtype
        if key not in self._rooms:
            largest = max(parameter.numel() for parameter in self.parameters[0])
            self._rooms[key] = torch.empty(largest, dtype=gradient.dtype, device=device)
        return self._rooms[key][: gradient.numel()].view(gradient.shape).copy_(gradient, non_blocking=True)

    def _all_reduce(self) -> None:
        """One call from one thread for all gradients of all replicas, which NCCL makes one group of: were it called
        for each device by itself, the first would wait in a kernel for a second that other threads can keep away.
        """
        flat = [torch.cat([_gradient(p).flatten() for p in parameters]) for parameters in self.parameters]
        self._nccl_sum(flat)
        sizes = [parameter.numel() for parameter in self.parameters[0]]
        for parameters, summed in zip(self.parameters, flat, strict=True):
            for parameter, part in zip(parameters, summed.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)

    def _nccl_sum(self, tensors: list[Tensor]) -> None:
        """In place, on the current streams. In one process a GPU may write into another's tensor."""
        nccl.all_reduce(tensors, streams=[torch.cuda.current_stream(device) for device in self.devices])
        for tensor in tensors:
            for device in self.devices:
                if device != tensor.device:
                    keep_until(tensor, device)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
