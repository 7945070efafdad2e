"""Ways to do the same work whose speed only a GPU can tell: what is measured against what, in one place.

The results are the same but for rounding, whichever is chosen. benchmarks/draft_step.py and benchmarks/pipeline.py
compare them; a training uses what `chosen` says. docs/speed.md tells what each gave.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

TargetAttention = Literal["flash", "cudnn", "flex"]


@dataclass(frozen=True)
class Switches:
    """On a GPU only; on the CPU nothing is compiled, and the rest is done in the same order."""

    target_compiled: bool = False
    """The target's layers compiled, for rows of the training's shape; only targets that are run by hand."""
    target_attention: TargetAttention = "flash"
    """Compiled layers only. flash: by documents' lengths; cudnn: the same, rows of one document by cuDNN."""
    target_fused: bool = False
    """Compiled layers only: queries, keys and values as one product, gate and up as one."""
    draft_working: bool = False
    """The drafter computes with bfloat16 copies of its matrices, which the update writes, instead of by autocast."""
    merged_heads: bool = False
    """The heads' keys behind each other as one head's: the backward of attention gets its long pieces of work first."""
    blocks_compiled: bool = False
    """Tiles and embeddings of a step made in one compiled function."""
    key_tile: int = 128
    """Keys in a tile of the drafter's mask: 64 skips more of what nobody sees."""
    flex: tuple[tuple[str, int | bool], ...] = ()
    """Options of the drafter's attention kernels, by flex attention's names."""
    memory_budget: float = 1.0
    """What a forward may keep for its backward, over what the compiler would: below 1 cheap things are made again."""


_chosen = Switches()


def chosen() -> Switches:
    """What a training on a GPU uses."""
    return _chosen


def choose(switches: Switches) -> None:
    """From now on, in this process. For benchmarks and tests."""
    global _chosen
    _chosen = switches


def parse(words: str, base: Switches | None = None) -> Switches:
    """Switches from words like "target_compiled,target_attention=flex,flex.bwd_num_stages=2". For benchmarks.

    Raises ValueError naming the word that is none.
    """
    found: dict[str, Any] = {}
    base = base or Switches()
    options = dict(base.flex)
    kinds: dict[str, type[Any]] = {f.name: type(getattr(base, f.name)) for f in fields(Switches)}
    for word in filter(None, (w.strip() for w in words.split(","))):
        name, _, value = word.partition("=")
        if name.startswith("flex."):
            options[name.removeprefix("flex.")] = value == "True" if value in ("True", "False") else int(value)
        elif name not in kinds or name == "flex":
            raise ValueError(
                f"no switch {name!r}; there are {', '.join(n for n in kinds if n != 'flex')} and flex.OPTION"
            )
        elif kinds[name] is bool:
            found[name] = value in ("", "1", "True", "true")
        else:
            found[name] = kinds[name](value)
    return replace(base, **found, flex=tuple(sorted(options.items())))
