"""Who runs where: the workers of a training and their devices."""

from dataclasses import dataclass

import torch

from trainer import devices
from trainer.config import LayoutSection
from trainer.devices import Devices


@dataclass(frozen=True)
class Layout:
    """The devices of all workers, by the names that torch has for them: "cpu", "cuda:0", ..."""

    targets: tuple[Devices, ...]
    """Of each target worker. More than one: its target's layers are spread over them, in this order."""
    drafters: Devices
    """Of each drafter."""


def parse(section: LayoutSection) -> Layout:
    """The layout that a config means on this machine: "auto" is its first GPU, or the CPU where there is none.

    The devices needn't be there: see check_layout. (The section's words are right: it has looked at them itself.)
    """

    def named(name: str) -> str:
        return name if name != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"

    return Layout(
        targets=tuple(tuple(map(named, worker)) for worker in devices.all_workers(section.targets)),
        drafters=tuple(map(named, devices.drafters(section.drafters))),
    )
