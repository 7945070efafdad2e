"""How the trainer compiles a function for a GPU."""

# torch.compile is partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any, cast

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for one shape, by rules alone: left to itself Inductor times some kernels and takes the quickest, so
    that the order of sums, and with it the last bits, would differ from GPU to GPU and from cache to cache.

    That holds where nothing is summed, too: which product of a * b + c * d is rounded before the sum depends on the
    size of a program. Two replicas whose updates were compiled in two sizes were apart after some steps.
    """
    import torch._inductor.config as inductor

    rules: dict[str, Any] = {}
    if hasattr(inductor, "deterministic"):  # torch 2.10 and later: sums
        rules["deterministic"] = True
    if hasattr(inductor.triton, "autotune_pointwise"):  # the rest
        rules["triton.autotune_pointwise"] = False
    return torch.compile(function, dynamic=False, fullgraph=True, options=cast(Any, rules))
