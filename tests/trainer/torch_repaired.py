"""torch with the repair of threads.py and without it, and what the tests of both share."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch import Tensor, nn

from trainer import fx_patches
from trainer.threads import installed

one_flag = pytest.mark.skipif(
    not hasattr(symbolic_trace, "_is_fx_tracing_flag"), reason="this torch has a flag for each thread: 2.14 and later"
)


@contextlib.contextmanager
def as_it_came(repaired: bool) -> Iterator[None]:
    """A test begins with torch as it came, or repaired if it asks for that, and leaves nothing of a trace."""
    if not repaired:
        undo()
    torch._dynamo.reset()
    yield
    assert symbolic_trace.is_fx_symbolic_tracing() is False
    assert not fx_patches._places  # pyright: ignore[reportPrivateUsage]


def undo() -> None:
    if safety := installed():
        safety.undo()


def raised(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def add_one(x: Tensor) -> Tensor:
    return x + 1


class Two(nn.Module):
    """A module with parts, a parameter and a wrapped function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale
