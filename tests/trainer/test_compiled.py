"""How functions are compiled for a GPU. What comes of it there: test_cuda_fast.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.compiled import compiled


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_no_kernel_is_chosen_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch knows both rules, or it would refuse them here."""
    made, seen = torch.compile, list[dict[str, Any]]()

    def told(function: Any, **named: Any) -> Any:
        seen.append(named)
        return made(function, **named)

    monkeypatch.setattr(torch, "compile", told)
    compiled(plus_one)
    rules = {"deterministic": True, "triton.autotune_pointwise": False}
    assert seen == [{"dynamic": False, "fullgraph": True, "options": rules}]
