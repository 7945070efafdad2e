"""Products of the frozen target in fp8 (e4m3), one scale a token and one a row of the matrix: half the bytes, and on a
GPU of Hopper or later up to twice the speed. What it costs in accuracy is measured, not promised: see docs/speed.md.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HIGHEST = 448.0  # of e4m3


class Narrow(NamedTuple):
    """A matrix [N, K] in fp8 with one scale a row."""

    values: Tensor
    scale_N1: Tensor  # float32


Matrix = Tensor | Narrow


def narrowed(weight_NK: Tensor) -> Narrow:
    """The nearest fp8 values to each row, its largest one being 448 times its scale."""
    return Narrow(*_scaled(weight_NK))


def _scaled(x_XK: Tensor) -> tuple[Tensor, Tensor]:
    wide = x_XK.float()
    scale_X1 = (wide.abs().amax(dim=-1, keepdim=True) / HIGHEST).clamp(min=1e-12)
    return (wide / scale_X1).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn), scale_X1


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x [..., K] times the matrix [N, K] transposed, in x's dtype."""
    if isinstance(matrix, Tensor):
        return functional.linear(x, matrix)
    values_MK, scale_M1 = _scaled(x.flatten(0, -2))
    if x.is_cuda:
        out_MN = torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            values_MK,
            matrix.values.t(),
            scale_a=scale_M1,
            scale_b=matrix.scale_N1.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(x.dtype)
    else:  # the same numbers without such a kernel: for tests
        out_MN = (values_MK.float() @ matrix.values.float().t() * scale_M1 * matrix.scale_N1.t()).to(x.dtype)
    return out_MN.view(*x.shape[:-1], -1)


def why_not(device: torch.device) -> str | None:
    """Why a device can't multiply in fp8; None when it can."""
    if device.type != "cuda":
        return "only a GPU multiplies in fp8"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"{name} has no fp8 (compute capability {major}.{minor}, 8.9 needed)"
    return None
