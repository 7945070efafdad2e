"""Kernels of the drafter's layers on a GPU, where what torch makes of the same formulas moves memory several times.

`arrange` makes queries, keys and values of a layer's product: RMSNorm of each head, rotation by positions, and the
layout that attention takes, in one pass; compiled, that was four kernels, of which one worked out sine and cosine again
for each number. `mlp` is SwiGLU and the product after it; its backward makes the gradients of gate and up side by side
in one pass, and what the product's weight wants besides, which so needn't be kept. docs/speed.md has the figures.

tests/trainer/test_cuda_fast.py holds them equal to the formulas in float64. Shapes: see fast_draft.py.
"""

# Triton has no types, and is only there where torch has a GPU to compile for.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeStubs=false

import contextlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
TOKENS = 16  # of one program of `arrange`

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def arrange_kernel(
        x, q, k, v, q_norm, k_norm, cos, sin, x_stride, row_tokens, first_key, keys, q_sub, q_group, eps,
        SUBS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    ):  # fmt: skip
        """Some tokens' heads. x: [tokens, (SUBS * GROUPS + 2 GROUPS) D], or without queries, SUBS = 0.

        q: head (group g, sub r) of a row begins at r * q_sub + g * q_group; k, v: [rows, GROUPS, keys, D], the tokens
        of a row from `first_key` on. cos, sin: [tokens, D / 2].
        """
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        row = (token // row_tokens).to(tl.int64)
        place = token % row_tokens
        half = tl.arange(0, HALF)
        size: tl.constexpr = 2 * HALF
        source = x + token.to(tl.int64)[:, None] * x_stride + half[None, :]
        cos_TH = tl.load(cos + token[:, None] * HALF + half[None, :])
        sin_TH = tl.load(sin + token[:, None] * HALF + half[None, :])
        kind = k.dtype.element_ty
        if SUBS > 0:
            left_norm, right_norm = tl.load(q_norm + half), tl.load(q_norm + HALF + half)
            to = q + (row * (SUBS * GROUPS * row_tokens) + place)[:, None] * size + half[None, :]
            for head in range(SUBS * GROUPS):
                left = tl.load(source + head * size).to(tl.float32)
                right = tl.load(source + head * size + HALF).to(tl.float32)
                scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)[:, None]
                left, right = left * scale * left_norm[None, :], right * scale * right_norm[None, :]
                at = to + (head % SUBS) * q_sub + (head // SUBS) * q_group
                tl.store(at, (left * cos_TH - right * sin_TH).to(kind))
                tl.store(at + HALF, (right * cos_TH + left * sin_TH).to(kind))
        left_norm, right_norm = tl.load(k_norm + half), tl.load(k_norm + HALF + half)
        to = (row * (GROUPS * keys) + first_key + place)[:, None] * size + half[None, :]
        for head in range(GROUPS):
            column = (SUBS * GROUPS + head) * size
            left = tl.load(source + column).to(tl.float32)
            right = tl.load(source + column + HALF).to(tl.float32)
            scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)[:, None]
            left, right = left * scale * left_norm[None, :], right * scale * right_norm[None, :]
            at = to + head * keys * size
            tl.store(k + at, (left * cos_TH - right * sin_TH).to(kind))
            tl.store(k + at + HALF, (right * cos_TH + left * sin_TH).to(kind))
            column = (SUBS * GROUPS + GROUPS + head) * size
            tl.store(v + at, tl.load(source + column))
            tl.store(v + at + HALF, tl.load(source + column + HALF))

    @triton.jit
    def arrange_backward_kernel(
        x, dx, dq, dk, dv, d_norms, q_norm, k_norm, cos, sin, x_stride, dx_stride, row_tokens, first_key, keys, q_sub,
        q_group, eps, SUBS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    ):  # fmt: skip
        """The gradient to x, and this program's part of those to the norms, d_norms [programs, 2, D], queries first.

        With y = x s w, s = 1 / sqrt(mean(x x) + eps), and g the gradient to y: dx = s (g w - x s s mean(g w x)), and
        dw sums g x s.
        """
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        row = (token // row_tokens).to(tl.int64)
        place = token % row_tokens
        half = tl.arange(0, HALF)
        size: tl.constexpr = 2 * HALF
        source = x + token.to(tl.int64)[:, None] * x_stride + half[None, :]
        target = dx + token.to(tl.int64)[:, None] * dx_stride + half[None, :]
        cos_TH = tl.load(cos + token[:, None] * HALF + half[None, :])
        sin_TH = tl.load(sin + token[:, None] * HALF + half[None, :])
        kind = dx.dtype.element_ty
        part = d_norms + tl.program_id(0) * (2 * size) + half
        if SUBS > 0:
            left_norm, right_norm = tl.load(q_norm + half)[None, :], tl.load(q_norm + HALF + half)[None, :]
            left_sum, right_sum = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
            base = dq + (row * (SUBS * GROUPS * row_tokens) + place)[:, None] * size + half[None, :]
            for head in range(SUBS * GROUPS):
                left = tl.load(source + head * size).to(tl.float32)
                right = tl.load(source + head * size + HALF).to(tl.float32)
                at = base + (head % SUBS) * q_sub + (head // SUBS) * q_group
                first, second = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
                left_grad, right_grad = first * cos_TH + second * sin_TH, second * cos_TH - first * sin_TH
                scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)[:, None]
                left_sum += tl.sum(left_grad * left * scale, 0)
                right_sum += tl.sum(right_grad * right * scale, 0)
                left_grad, right_grad = left_grad * left_norm, right_grad * right_norm
                mean = ((tl.sum(left_grad * left, 1) + tl.sum(right_grad * right, 1)) / size)[:, None]
                mean = mean * scale * scale
                tl.store(target + head * size, (scale * (left_grad - left * mean)).to(kind))
                tl.store(target + head * size + HALF, (scale * (right_grad - right * mean)).to(kind))
            tl.store(part, left_sum)
            tl.store(part + HALF, right_sum)
        else:
            tl.store(part, tl.zeros([HALF], tl.float32))
            tl.store(part + HALF, tl.zeros([HALF], tl.float32))
        left_norm, right_norm = tl.load(k_norm + half)[None, :], tl.load(k_norm + HALF + half)[None, :]
        left_sum, right_sum = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
        base = (row * (GROUPS * keys) + first_key + place)[:, None] * size + half[None, :]
        for head in range(GROUPS):
            column = (SUBS * GROUPS + head) * size
            left = tl.load(source + column).to(tl.float32)
            right = tl.load(source + column + HALF).to(tl.float32)
            at = base + head * keys * size
            first, second = tl.load(dk + at).to(tl.float32), tl.load(dk + at + HALF).to(tl.float32)
            left_grad, right_grad = first * cos_TH + second * sin_TH, second * cos_TH - first * sin_TH
            scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)[:, None]
            left_sum += tl.sum(left_grad * left * scale, 0)
            right_sum += tl.sum(right_grad * right * scale, 0)
            left_grad, right_grad = left_grad * left_norm, right_grad * right_norm
            mean = ((tl.sum(left_grad * left, 1) + tl.sum(right_grad * right, 1)) / size)[:, None]
            mean = mean * scale * scale
            tl.store(target + column, (scale * (left_grad - left * mean)).to(kind))
            tl.store(target + column + HALF, (scale * (right_grad - right * mean)).to(kind))
            column = (SUBS * GROUPS + GROUPS + head) * size
            tl.store(target + column, tl.load(dv + at))
            tl.store(target + column + HALF, tl.load(dv + at + HALF))
        tl.store(part + size, left_sum)
        tl.store(part + size + HALF, right_sum)

    @triton.jit
    def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
        """silu(gate) * up of a piece of a row; gate_up: [rows, 2 width]."""
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        start = gate_up + row * 2 * width + column
        gate = tl.load(start, mask=inside).to(tl.float32)
        up = tl.load(start + width, mask=inside).to(tl.float32)
        tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def swiglu_backward_kernel(gate_up, grad, d_gate_up, out, width, BLOCK: tl.constexpr):
        """The gradients to gate and up, and the forward's result again."""
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        start = row * 2 * width + column
        gate = tl.load(gate_up + start, mask=inside).to(tl.float32)
        up = tl.load(gate_up + start + width, mask=inside).to(tl.float32)
        given = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
        chance = tl.sigmoid(gate)
        silu = gate * chance
        kind = out.dtype.element_ty
        tl.store(d_gate_up + start, (given * up * chance * (1 + gate * (1 - chance))).to(kind), mask=inside)
        tl.store(d_gate_up + start + width, (given * silu).to(kind), mask=inside)
        tl.store(out + row * width + column, (silu * up).to(kind), mask=inside)


class Kernels(NamedTuple):
    """Which of these can be had."""

    heads: bool  # arrange
    mlp: bool


NONE = Kernels(heads=False, mlp=False)


def kernels_for(x: Tensor, head_dim: int, *, tokens: tuple[int, ...]) -> Kernels:
    """For layers of x, and rows of so many tokens."""
    here = AVAILABLE and x.is_cuda
    power = head_dim >= 32 and head_dim & (head_dim - 1) == 0
    return Kernels(heads=here and power and all(count % TOKENS == 0 for count in tokens), mlp=here)


# --- queries, keys and values ------------------------------------------------------------------------------------


@torch.library.custom_op("dflash::arrange", mutates_args=())
def _arrange(
    qkv: Tensor, kv: Tensor, q_norm: Tensor, k_norm: Tensor, cos_Q: Tensor, sin_Q: Tensor, cos_S: Tensor,
    sin_S: Tensor, eps: float, groups: int, merged: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _arranged_like(qkv, kv, q_norm.numel(), groups)
    given = qkv, kv, q_norm, k_norm, (cos_Q, cos_S), (sin_Q, sin_S)
    with _there(qkv):
        for words, (tokens, constants) in _launches(*given, eps=eps, groups=groups, merged=merged):
            x, *rest = words
            _launch(arrange_kernel, tokens)(x, q, k, v, *rest, **constants)
    return _as_asked(q, k, v, merged)


def _there(x: Tensor) -> Any:
    """Triton launches on the current device, which needn't be that of x. (Its interpreter runs on a CPU.)"""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _arranged_like(qkv: Tensor, kv: Tensor, size: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, width = qkv.shape
    q = qkv.new_empty(rows, width // size - 2 * groups, queries, size)
    k, v = (qkv.new_empty(rows, groups, queries + kv.shape[1], size) for _ in range(2))
    return q, k, v


def _as_asked(q: Tensor, k: Tensor, v: Tensor, merged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Merged, heads lie in q as [A / G, G]: `q_sub` and `q_group` of the launches say so."""
    if not merged:
        return q, k, v
    (rows, heads, queries, size), groups, keys = q.shape, k.shape[1], k.shape[1] * k.shape[2]
    q = q.view(rows, heads // groups, groups * queries, size)
    return q, k.view(rows, 1, keys, size), v.view(rows, 1, keys, size)


def _launches(
    qkv: Tensor,
    kv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: tuple[Tensor, Tensor],
    sin: tuple[Tensor, Tensor],
    *,
    eps: float,
    groups: int,
    merged: bool,
) -> list[tuple[list[Any], tuple[int, dict[str, int]]]]:
    """What both kernels are given, for the blocks' tokens and for the context's."""
    (_, queries, width), size, context = qkv.shape, q_norm.numel(), kv.shape[1]
    subs, keys = width // size // groups - 2, queries + context
    q_sub, q_group = (groups * queries * size, queries * size) if merged else (queries * size, subs * queries * size)
    for x in (qkv, kv):
        assert x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1), "a token's numbers lie side by side"
    found: list[tuple[list[Any], tuple[int, dict[str, int]]]] = []
    for x, here, tokens, first, own in ((qkv, 0, queries, context, subs), (kv, 1, context, 0, 0)):
        words = [x, q_norm, k_norm, cos[here], sin[here], x.stride(1), tokens, first, keys, q_sub, q_group, eps]
        constants = {"SUBS": own, "GROUPS": groups, "HALF": size // 2, "TOKENS": TOKENS}
        found.append((words, (x.shape[0] * tokens, constants)))
    return found


def _launch(kernel: Any, tokens: int) -> Any:
    return kernel[(tokens // TOKENS,)]


@_arrange.register_fake
def _(qkv, kv, q_norm, k_norm, cos_Q, sin_Q, cos_S, sin_S, eps, groups, merged):  # type: ignore[no-untyped-def]
    return _as_asked(*_arranged_like(qkv, kv, q_norm.numel(), groups), merged)


@torch.library.custom_op("dflash::arrange_backward", mutates_args=())
def _arrange_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, kv: Tensor, q_norm: Tensor, k_norm: Tensor, cos_Q: Tensor,
    sin_Q: Tensor, cos_S: Tensor, sin_S: Tensor, eps: float, groups: int, merged: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    d_qkv, d_kv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), kv.new_empty(kv.shape)
    given = qkv, kv, q_norm, k_norm, (cos_Q, cos_S), (sin_Q, sin_S)
    parts: list[Tensor] = []
    launches = _launches(*given, eps=eps, groups=groups, merged=merged)
    for dx, (words, (tokens, constants)) in zip((d_qkv, d_kv), launches, strict=True):
        x, q_norm, k_norm, cos, sin, stride, *rest = words
        part = q_norm.new_empty(tokens // TOKENS, 2, q_norm.numel(), dtype=torch.float32)
        norms = q_norm, k_norm, cos, sin, stride, dx.stride(1)
        with _there(x):
            _launch(arrange_backward_kernel, tokens)(x, dx, dq, dk, dv, part, *norms, *rest, **constants)
        parts.append(part)
    d_norms = torch.cat(parts).sum(0)
    return d_qkv, d_kv, d_norms[0].clone(), d_norms[1].clone()


@_arrange_backward.register_fake
def _(dq, dk, dv, qkv, kv, q_norm, k_norm, cos_Q, sin_Q, cos_S, sin_S, eps, groups, merged):  # type: ignore[no-untyped-def]
    return (
        torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device),
        kv.new_empty(kv.shape),
        q_norm.new_empty(q_norm.shape, dtype=torch.float32),
        k_norm.new_empty(k_norm.shape, dtype=torch.float32),
    )


def _keep_arranged(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    *tensors, eps, groups, merged = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = eps, groups, merged


def _arranged_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    ops: Any = torch.ops
    d_qkv, d_kv, d_q, d_k = ops.dflash.arrange_backward(dq, dk, dv, *ctx.saved_tensors, *ctx.rest)
    q_norm, k_norm = ctx.saved_tensors[2:4]
    return d_qkv, d_kv, d_q.to(q_norm.dtype), d_k.to(k_norm.dtype), *[None] * 7


_arrange.register_autograd(_arranged_backward, setup_context=_keep_arranged)


def arrange(
    qkv: Tensor,
    kv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rotation: tuple[Tensor, Tensor],
    context_rotation: tuple[Tensor, Tensor],
    *,
    eps: float,
    groups: int,
    merged: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer, keys and values of the context first.

    qkv: [B, Q, (A + 2 G) D] of the blocks' tokens; kv: [B, S, 2 G D] of the context, each token's numbers side by
    side. rotation: cos and sin, float32 [B, Q, D / 2], and of the context's tokens. Q and S: multiples of TOKENS.
    Returns q [B, A, Q, D], k and v [B, G, S + Q, D]; merged: q [B, A / G, G Q, D], k and v [B, 1, G (S + Q), D].
    """
    ops: Any = torch.ops
    return ops.dflash.arrange(qkv, kv, q_norm, k_norm, *rotation, *context_rotation, eps, groups, merged)


# --- the MLP's end -----------------------------------------------------------------------------------------------


def _swiglu(kernel: Any, gate_up: Tensor, *more: Tensor) -> None:
    wide = gate_up.shape[-1]
    width, rows = wide // 2, gate_up.numel() // wide
    with _there(gate_up):
        kernel[(rows, -(-width // 1024))](gate_up, *more, width, 1024)  # the second may be 65,535 at most


@torch.library.custom_op("dflash::mlp", mutates_args=())
def _mlp(gate_up: Tensor, down: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _swiglu(swiglu_kernel, gate_up.contiguous(), out)
    return out @ down.T


@_mlp.register_fake
def _(gate_up, down):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(*gate_up.shape[:-1], down.shape[0])


@torch.library.custom_op("dflash::swiglu_backward", mutates_args=())
def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    d_gate_up, out = gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape)
    _swiglu(swiglu_backward_kernel, gate_up.contiguous(), grad.contiguous(), d_gate_up, out)
    return d_gate_up, out


@_swiglu_backward.register_fake
def _(gate_up, grad):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape)


def _keep_mlp(ctx: Any, inputs: tuple[Tensor, Tensor], output: object) -> None:
    ctx.save_for_backward(*inputs)


def _mlp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate_up, down = ctx.saved_tensors
    ops: Any = torch.ops
    d_gate_up, out = ops.dflash.swiglu_backward(gate_up, grad @ down)
    return d_gate_up, grad.flatten(0, -2).T @ out.flatten(0, -2)


_mlp.register_autograd(_mlp_backward, setup_context=_keep_mlp)


def mlp(gate_up: Tensor, down: Tensor) -> Tensor:
    """silu(gate) * up times `down` transposed; gate_up [..., 2 I], down [H, I], one type. Only gate_up is kept."""
    ops: Any = torch.ops
    return ops.dflash.mlp(gate_up, down)
