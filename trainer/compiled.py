"""How the trainer compiles a function for a GPU."""

# torch.compile is partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any, cast

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for one shape, by rules alone: left to itself Inductor times some kernels and takes the quickest, so
    that the order of sums, and with it the last bits, would differ from GPU to GPU and from cache to cache.
    """
    import torch._inductor.config as inductor

    rules = {"deterministic": True} if hasattr(inductor, "deterministic") else {}  # torch 2.10 and later
    return torch.compile(function, dynamic=False, fullgraph=True, options=cast(Any, rules))
