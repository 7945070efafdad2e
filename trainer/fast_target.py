# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The layers of a target that is run by hand, as few compiled functions: the way of a training's rows on a GPU.

Shapes: B rows, S tokens of a row, A query heads, G key and value heads, D head size, I of the MLP.

Between two attentions lies one function (`between`): the end of a layer and the beginning of the next. Weights are its
arguments, so that it is compiled once for all layers of a device. Attention itself is no part of it: it takes the
documents' lengths, which differ from row to row. tests/trainer/test_fast_target.py holds it equal to byhand.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer.byhand import ByHand, device_of
from trainer.fp8 import Matrix, narrowed, product
from trainer.masks import document_starts
from trainer.streams import moved


class LayerWeights(NamedTuple):
    """What one layer computes with."""

    norm: Tensor
    qkv: tuple[Matrix, Matrix, Matrix]
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


class Sizes(NamedTuple):
    """What is the same in all layers."""

    head_dim: int
    eps: float


Rotation = tuple[Tensor, Tensor]  # cos and sin, each [B, S, D]
CUDNN_HEAD_DIM = 128  # the largest for which its kernel is there on every GPU that has one
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not compiled."""
    return function


def why_not(runner: ByHand) -> str | None:
    """Why a target's layers can't be run here; None when they can."""
    for layer in runner.model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if any(getattr(one, "bias", None) is not None for one in (*linear, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            return "its projections have biases"
    if runner.head_VH.is_cuda:  # what attention's kernels take, which are called by their own names
        if runner.head_VH.dtype not in (torch.bfloat16, torch.float16):
            return f"its weights are {runner.head_VH.dtype}"
        if runner.head_dim % 8 or runner.head_dim > 256:
            return f"its heads have {runner.head_dim} numbers"
        if torch.cuda.get_device_capability(runner.head_VH.device) < (8, 0):
            return "the GPU is older than Ampere"
    if runner.model.config.hidden_act != "silu":
        return f"its activation is {runner.model.config.hidden_act}"
    return None


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's RMSNorm, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def turned(x_BShD: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding over the whole head, halves rotated."""
    left, right = x_BShD.chunk(2, dim=-1)
    cos_BSD, sin_BSD = rotation
    return x_BShD * cos_BSD[:, :, None] + torch.cat([-right, left], dim=-1) * sin_BSD[:, :, None]


def enter(x_BSH: Tensor, weights: LayerWeights, rotation: Rotation, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """A layer until its attention: queries [B, S, A, D], keys and values [B, S, G, D]."""
    x_BSH = normed(x_BSH, weights.norm, sizes.eps)
    q, k, v = (product(x_BSH, weight).unflatten(-1, (-1, sizes.head_dim)) for weight in weights.qkv)
    if weights.q_norm is not None and weights.k_norm is not None:  # Qwen3
        q, k = normed(q, weights.q_norm, sizes.eps), normed(k, weights.k_norm, sizes.eps)
    return turned(q, rotation).contiguous(), turned(k, rotation).contiguous(), v.contiguous()


def leave(x_BSH: Tensor, seen_BSX: Tensor, weights: LayerWeights, sizes: Sizes) -> Tensor:
    """A layer from its attention on. seen_BSX: all heads' results side by side."""
    x_BSH = x_BSH + product(seen_BSX, weights.out)
    gate, up = product(normed(x_BSH, weights.mlp_norm, sizes.eps), weights.gate_up).chunk(2, dim=-1)
    return x_BSH + product(functional.silu(gate) * up, weights.down)


def between(
    x_BSH: Tensor, seen_BSX: Tensor, weights: LayerWeights, following: LayerWeights, rotation: Rotation, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rest of a layer, and the next one until its attention."""
    x_BSH = leave(x_BSH, seen_BSX, weights, sizes)
    return x_BSH, *enter(x_BSH, following, rotation, sizes)


class Documents(NamedTuple):
    """Where the documents of packed rows end, for attention that takes lengths."""

    ends: Tensor  # int32 [documents + 1], the first is 0: over all rows, padding counts as a document
    longest: int
    single: bool  # each row is one document

    @classmethod
    def of(cls, document_ids_BS: Tensor, device: torch.device) -> "Documents":
        """document_ids_BS: on the CPU, where a GPU should not be waited for."""
        rows, size = document_ids_BS.shape
        starts = document_starts(document_ids_BS)
        begins_BS = starts == torch.arange(size, device=starts.device)
        firsts = begins_BS.flatten().nonzero().flatten().cpu()
        ends = torch.cat((firsts, torch.tensor([rows * size]))).to(torch.int32)
        longest = int(ends.diff().max())
        if device.type == "cuda":
            ends = ends.pin_memory()
        return cls(moved(ends, device), longest, len(firsts) == rows)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside each document; q [B, S, A, D], k and v [B, S, G, D]; returns [B, S, A * D].

    By cuDNN where each row is one document, which it does in half the time; it takes no lengths.
    """
    scale = q.shape[-1] ** -0.5
    ops: Any = torch.ops.aten
    if not q.is_cuda:
        return _one_by_one(q, k, v, documents, scale)
    if documents.single and q.shape[-1] <= CUDNN_HEAD_DIM:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        seen = ops._scaled_dot_product_cudnn_attention(*heads, None, False, 0.0, True, False, scale=scale)[0]
        return seen.transpose(1, 2).flatten(2)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    ends, longest = documents.ends, documents.longest
    seen = ops._flash_attention_forward(*flat, ends, ends, longest, longest, 0.0, True, False, scale=scale)[0]
    return seen.view(*q.shape[:2], -1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """The same where there is no such kernel: for tests."""
    shape = q.shape[:2]
    q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q, k, v))
    seen: list[Tensor] = []
    for start, end in pairwise(cast("list[int]", documents.ends.tolist())):
        own = (x[:, start:end] for x in (q, k, v))
        seen.append(functional.scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=True))  # pyright: ignore[reportArgumentType]
    return torch.cat(seen, dim=1).transpose(0, 1).unflatten(0, shape).flatten(2)


class FastLayers:
    """The layers of a target for rows of one shape."""

    def __init__(
        self, runner: ByHand, *, rows: int, row_tokens: int, fp8: bool = False, compiled: Compile = as_it_is
    ) -> None:
        """compiled: how a function is compiled; as a default not at all. fp8: see fp8.py."""
        self._runner = runner
        self.shape = (rows, row_tokens)
        first = runner.model.model.layers[0]
        self._sizes = Sizes(runner.head_dim, first.input_layernorm.variance_epsilon)
        self._weights = [weights_of(layer, fp8=fp8) for layer in runner.model.model.layers]
        self._enter, self._between, self._leave = map(compiled, (enter, between, leave))

    def run(
        self, hidden_BSH: Tensor, positions_BS: Tensor, document_ids_BS: Tensor, layer_ids: Sequence[int], *, stop: int
    ) -> tuple[Tensor, Tensor]:
        """As ByHand.run without a cache. document_ids_BS: on the CPU, else the GPU is waited for."""
        rotation: Rotation = self._runner.model.model.rotary_emb(hidden_BSH, positions_BS)
        captured: dict[int, Tensor] = {}
        for index, state in enumerate(self._states(hidden_BSH, rotation, document_ids_BS, stop)):
            hidden_BSH = state
            if index in layer_ids:
                captured[index] = state
        home = self._runner.head_VH.device
        features = [moved(captured[index], home) for index in layer_ids]
        return hidden_BSH, torch.cat(features, dim=-1) if features else hidden_BSH[..., :0]

    def _states(self, x: Tensor, rotation: Rotation, document_ids_BS: Tensor, stop: int) -> Iterator[Tensor]:
        documents = Documents.of(document_ids_BS, x.device)
        weights, sizes = self._weights, self._sizes
        q, k, v = self._enter(x, weights[0], rotation, sizes)
        for index in range(stop + 1):
            seen = attend(q, k, v, documents)
            follows = index < stop and self._device(index + 1) == x.device
            if follows:
                x, q, k, v = self._between(x, seen, weights[index], weights[index + 1], rotation, sizes)
            else:
                x = self._leave(x, seen, weights[index], sizes)
            yield x
            if index < stop and not follows:  # spread over several devices: spread.py
                device = self._device(index + 1)
                x, rotation = moved(x, device), cast(Rotation, tuple(moved(r, device) for r in rotation))
                documents = documents._replace(ends=moved(documents.ends, device))
                q, k, v = self._enter(x, weights[index + 1], rotation, sizes)

    def _device(self, index: int) -> torch.device:
        return device_of(self._runner.model.model.layers[index])


def weights_of(layer: Any, *, fp8: bool) -> LayerWeights:
    """A layer's weights as plain tensors. Those of gate and up lie behind each other, for one product; the modules' own
    become views of that: they go on as before, and nothing is held twice.

    (Queries, keys and values as one product took longer: norms and rotation then read columns of a wider matrix.)
    """
    attention, mlp = layer.self_attn, layer.mlp
    make: Callable[[Tensor], Matrix] = narrowed if fp8 else (lambda weight: weight)
    return LayerWeights(
        norm=layer.input_layernorm.weight.detach(),
        qkv=(
            make(attention.q_proj.weight.detach()),
            make(attention.k_proj.weight.detach()),
            make(attention.v_proj.weight.detach()),
        ),
        q_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=make(attention.o_proj.weight.detach()),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=make(_joined([mlp.gate_proj, mlp.up_proj])),
        down=make(mlp.down_proj.weight.detach()),
    )


def _joined(modules: Sequence[Any]) -> Tensor:
    """Their weights as one matrix."""
    together = torch.cat([module.weight.detach() for module in modules])
    for module, part in zip(modules, together.split([len(module.weight) for module in modules]), strict=True):
        module.weight.data = part
    return together
