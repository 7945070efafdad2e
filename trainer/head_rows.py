"""Cross-entropy of rows of logits and its gradient on a GPU, in place: one program takes a row, so that what it reads
a second time still lies in the cache of the GPU.

Compiled by torch, the same takes several passes over logits that no cache holds (docs/speed.md).
"""

# Triton has no types, and is only there where torch has a GPU to compile for.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeStubs=false

import importlib.util
from typing import Any

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
WARPS, LANES, GROUP = 32, 1024, 8  # each lane takes as many columns at a time as 16 bytes hold

if AVAILABLE:
    import triton
    import triton.language as tl

    # Numbers are written out where they are used: Inductor takes over the text of a kernel and little else.

    @triton.jit
    def row_kernel(
        logits, labels, losses, right, columns, stride, WRITE: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr
    ):
        """One row: its loss, whether its label is its first best column, and with WRITE softmax less the label.

        Powers are of 2 (1.4427 is 1 / ln 2), and whole pieces of the row go without a mask: what limits this kernel is
        what it computes, not what it reads.
        """
        width: tl.constexpr = LANES * GROUP
        whole = columns // width * width
        lane = tl.arange(0, LANES) * GROUP
        offsets = lane[:, None] + tl.arange(0, GROUP)[None, :]
        row = tl.program_id(0)
        start = logits + row.to(tl.int64) * stride
        label = tl.load(labels + row).to(tl.int32)
        told = tl.load(start + label).to(tl.float32)
        own = label // GROUP * GROUP  # where the label's group begins
        group = own + tl.arange(0, GROUP)
        near = tl.load(start + group, mask=group < label, other=-1.7014118e38).to(tl.float32)
        # Not infinity: less itself that is nothing. Minus 2**127: what multiplies a power of two does not round it, or
        # less its rounded self it would be a large number, where product and difference are one operation.
        highest = tl.full([LANES], -1.7014118e38, tl.float32)
        before = tl.full([LANES], -1.7014118e38, tl.float32)  # the highest in groups before the label's
        summed = tl.zeros([LANES], tl.float32)
        for first in range(0, whole, width):
            x = tl.load(start + first + offsets).to(tl.float32)
            here = tl.max(x, axis=1)
            before = tl.maximum(before, tl.where(first + lane < own, here, -1.7014118e38))
            higher = tl.maximum(highest, here)
            shift = higher * 1.4426950408889634
            powers = tl.exp2(x * 1.4426950408889634 - shift[:, None])
            summed = summed * tl.exp2(highest * 1.4426950408889634 - shift) + tl.sum(powers, axis=1)
            highest = higher
        x = tl.load(start + whole + offsets, mask=whole + offsets < columns, other=-1.7014118e38).to(tl.float32)
        here = tl.max(x, axis=1)
        before = tl.maximum(before, tl.where(whole + lane < own, here, -1.7014118e38))
        higher = tl.maximum(highest, here)
        shift = higher * 1.4426950408889634
        powers = tl.exp2(x * 1.4426950408889634 - shift[:, None])
        summed = summed * tl.exp2(highest * 1.4426950408889634 - shift) + tl.sum(powers, axis=1)
        top = tl.max(higher, axis=0)
        total = tl.sum(summed * tl.exp2((higher - top) * 1.4426950408889634), axis=0)
        total = top * 1.4426950408889634 + tl.log2(total)  # of all powers, as a power of 2
        tl.store(losses + row, total * 0.6931471805599453 - told)
        earlier = tl.maximum(tl.max(before, axis=0), tl.max(near, axis=0))
        tl.store(right + row, (top <= told) & (earlier < told))
        if WRITE:
            tl.debug_barrier()  # all have read what some now write
            kind = logits.dtype.element_ty
            for first in range(0, whole, width):
                x = tl.load(start + first + offsets).to(tl.float32)
                tl.store(start + first + offsets, tl.exp2(x * 1.4426950408889634 - total).to(kind))
            x = tl.load(start + whole + offsets, mask=whole + offsets < columns, other=-1.7014118e38).to(tl.float32)
            powers = tl.exp2(x * 1.4426950408889634 - total)
            tl.store(start + whole + offsets, powers.to(kind), mask=whole + offsets < columns)
            tl.debug_barrier()  # the label's own is written twice
            tl.store(start + label, (tl.exp2(told * 1.4426950408889634 - total) - 1.0).to(kind))


def takes(logits_RV: Tensor) -> bool:
    """Whether `rows_in_place` can be had for them. (float16 has no number as low as the one for nothing.)"""
    return AVAILABLE and logits_RV.is_cuda and logits_RV.dtype == torch.bfloat16


def rows_in_place(logits_RV: Tensor, labels_R: Tensor, *, gradient: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropy [R], float32, and whether the label is the first of the best columns [R].

    gradient: the logits become the gradient of each row's own loss, rounded once, to their type.
    """
    rows, columns = logits_RV.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    right_R = torch.empty(rows, dtype=torch.bool, device=logits_RV.device)
    kernel: Any = row_kernel
    given = logits_RV, labels_R, losses_R, right_R, columns, logits_RV.stride(0), gradient, LANES, GROUP
    kernel[(rows,)](*given, num_warps=WARPS)
    return losses_R, right_R
