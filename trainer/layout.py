"""Who runs where: the workers of a training and their devices, and whether these can hold them."""

from dataclasses import dataclass

import torch

from trainer import devices
from trainer.blocks import TILE
from trainer.config import LayoutSection, TrainConfig
from trainer.devices import Devices, listed
from trainer.start import TrainingError


@dataclass(frozen=True)
class Layout:
    """The devices of all workers, by the names that torch has for them: "cpu", "cuda:0", ..."""

    targets: tuple[Devices, ...]
    """Of each target worker. More than one: its target's layers are spread over them, in this order."""
    drafters: Devices
    """Of each drafter."""

    @property
    def names(self) -> list[str]:
        """All devices, each once: the targets' first."""
        return list(dict.fromkeys([name for place in self.targets for name in place] + list(self.drafters)))


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


def check_layout(config: TrainConfig, layout: Layout) -> list[str]:
    """Whether this machine can train so, before anything is loaded; lines to be said where it can.

    Reads the target's config where GPUs are used and layout.check_memory is set. Raises TrainingError, with the
    arithmetic; TargetError when that config can't be read.
    """
    count = torch.cuda.device_count()
    there = {f"cuda:{index}" for index in range(count)} | {"cpu"}
    for key, names in (
        ("targets", [name for place in layout.targets for name in place]),
        ("drafters", layout.drafters),
    ):
        for name in names:
            if name not in there:
                sees = (
                    f"{count} GPUs, cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0 alone" if count else "no GPU"
                )
                raise TrainingError(f"layout.{key} names {name}: torch sees {sees}")
    if why := config.unfit(layout.targets, layout.drafters):
        raise TrainingError(why)
    check_tiles(config, layout)
    used = [name for name in layout.names if name != "cpu"]
    if not used:
        return []
    idle = [name for index in range(count) if (name := f"cuda:{index}") not in used]
    where = "layout.targets and layout.drafters say who runs where"
    lines = [f"{len(idle)} of {count} GPUs do nothing ({listed(idle)}): {where}"] if idle else []
    return lines + (_check_memory(config, layout) if config.layout.check_memory else [])


def check_tiles(config: TrainConfig, layout: Layout) -> None:
    """Raises TrainingError for rows whose length the drafter's kernels don't take."""
    if any(name != "cpu" for name in layout.drafters) and config.data.row_tokens % TILE:
        raise TrainingError(f"data.row_tokens {config.data.row_tokens}: on a GPU it must be a multiple of {TILE}")


def _check_memory(config: TrainConfig, layout: Layout) -> list[str]:
    """Each GPU's parts by the estimate against what is free there; a line for each that will be tight."""
    from trainer.estimate import planned
    from trainer.memory import FRAGMENTS, MIB, memory, remedies, said

    target, draft, batch, _ = planned(config)
    tight: list[str] = []
    for name, parts in memory(target, draft, batch, config, layout).items():
        if name == "cpu":
            continue
        free = _free_bytes(torch.device(name)) / MIB
        needs = sum(part.bytes for part in parts) / MIB
        named = ", ".join(f"{part.what} {part.bytes / MIB:,.0f}" for part in parts)
        less = said(remedies(parts, config))
        if needs > free:
            raise TrainingError(
                f"{name} has {free:,.0f} MiB free and by estimate {needs:,.0f} are needed there ({named}): {less}; "
                f"layout.check_memory = false tries all the same"
            )
        if needs * FRAGMENTS > free:
            tight.append(
                f"{name} will be almost full: {needs:,.0f} MiB of {free:,.0f} by estimate; if not enough: {less}"
            )
    return tight


def _free_bytes(device: torch.device) -> int:
    """What torch can still give out on a GPU: what nobody has, CUDA itself being there, and what torch keeps unused."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
