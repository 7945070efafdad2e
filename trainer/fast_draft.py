"""The drafter's training forward on matrices of its own: bfloat16 copies, laid out for few large products.

`draft.py` is what a drafter is, and keeps the weights that are trained, float32. Here lie the copies that compute: of a
layer's queries, keys and values one matrix, of its gate and up one. Keys and values of the context are one product for
all layers. What the copies' gradients are is told per trained weight, so an optimiser sees none of this.
tests/trainer/test_fast_draft.py holds forward and gradients equal to draft.py's.
"""

# torch leaves `unflatten` and flex attention partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.draft import Attention, DraftLayer, DraftModel, Rotation, rotate, rotation_of
from trainer.draft_kernels import Kernels, arrange, mlp
from trainer.features import block_embeds
from trainer.update import Weight

Options = tuple[tuple[str, int | bool], ...]
HOPPER_FORWARD: dict[str, int | bool] = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
}  # fmt: skip
HOPPER: dict[str, int | bool] = {
    **HOPPER_FORWARD, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
LONG = 8192  # tokens of a row: in longer ones the pieces of one head fill a GPU by themselves


class LayerWeights(NamedTuple):
    """What one layer computes with; norms are the trained weights themselves."""

    norm: Tensor
    qkv: Tensor  # [(A + 2G) D, H]
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 I, H]
    down: Tensor


class DraftWeights(NamedTuple):
    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """draft.RMSNorm."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, tokens, heads * D] -> [B, heads, tokens, D]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class Shape(NamedTuple):
    """What is the same in all layers."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float  # of RoPE
    sights: tuple[int, ...]  # of each layer, its place in `attention`

    @classmethod
    def of(cls, model: DraftModel) -> "Shape":
        config, scaling = model.config, float(model.rotary.scaling)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        return cls(*sizes, scaling, tuple(model.layer_sights))


def forward(
    weights: DraftWeights,
    shape: Shape,
    frequencies: Tensor,
    features_BSF: Tensor,
    anchor_embeds_BNH: Tensor,
    mask_embed_H: Tensor,
    context_positions_BS: Tensor,
    block_positions_BQ: Tensor,
    attention: tuple[Attention, ...],
    merged: bool,
    options: Options,
    kernels: Kernels,
) -> Tensor:
    """As DraftModel.forward, from the embeddings that differ.

    merged: the masks are of merged heads (`merge`). options: of flex attention. kernels: which of draft_kernels.py.
    """
    queries = block_positions_BQ.shape[1]
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    turns = Turns(
        rotation_of(block_positions_BQ, frequencies, shape.scaling),
        rotation_of(context_positions_BS, frequencies, shape.scaling),
    )
    halves = turns.halves() if kernels.heads else turns
    context = normed(linear(features_BSF, weights.fc), weights.hidden_norm, shape.eps)
    all_kv = linear(context, torch.cat([layer.qkv[wide:] for layer in weights.layers]))
    x = block_embeds(anchor_embeds_BNH, mask_embed_H, queries // anchor_embeds_BNH.shape[1])
    for layer, kv, sight in zip(weights.layers, all_kv.split(2 * narrow, dim=-1), shape.sights, strict=True):
        qkv = linear(normed(x, layer.norm, shape.eps), layer.qkv)
        if kernels.heads:
            norms = layer.q_norm, layer.k_norm
            q, k, v = arrange(qkv, kv, *norms, *halves, eps=shape.eps, groups=shape.kv_heads, merged=merged)
        else:
            q, k, v = arranged(qkv, kv, layer, shape, turns, merged=merged)
        seen = attend(q, k, v, attention[sight], options)
        x = x + linear(by_token(seen, shape.kv_heads if merged else 1), layer.out)
        gate_up = linear(normed(x, layer.mlp_norm, shape.eps), layer.gate_up)
        if kernels.mlp:
            x = x + mlp(gate_up, layer.down)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * up, layer.down)
    return normed(x, weights.norm, shape.eps)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """In the weight's type, as autocast would."""
    return F.linear(x.to(weight.dtype), weight)


class Turns(NamedTuple):
    """What rotates the blocks' tokens, and the context's."""

    blocks: Rotation
    context: Rotation

    def halves(self) -> "Turns":
        """Each [B, tokens, D / 2], as draft_kernels takes them: both halves of a head turn alike."""
        blocks, context = (
            (cos[:, 0, :, : cos.shape[-1] // 2].contiguous(), sin[:, 0, :, : sin.shape[-1] // 2].contiguous())
            for cos, sin in self
        )
        return Turns(blocks, context)


def arranged(
    qkv: Tensor, kv: Tensor, layer: LayerWeights, shape: Shape, turns: Turns, *, merged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """draft_kernels.arrange in torch's words."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    old_k, old_v = (heads(part, shape.head_dim) for part in kv.split(narrow, dim=-1))
    q, k, v = (heads(part, shape.head_dim) for part in qkv.split([wide, narrow, narrow], dim=-1))
    q = rotate(normed(q, layer.q_norm, shape.eps), turns.blocks)
    k = rotate(normed(k, layer.k_norm, shape.eps), turns.blocks)
    old_k = rotate(normed(old_k, layer.k_norm, shape.eps), turns.context)
    k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
    return merge(q, k, v) if merged else (q, k, v)


def merge(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The G heads' keys behind each other as one head's, and likewise the queries of each head's group.

    In flex attention's backward the pieces of a head are dispatched together, long and short ones, so that long ones of
    the last head would run alone at the end. From q [B, A, Q, D] to [B, A / G, G Q, D], k and v to [B, 1, G keys, D].
    """
    q = q.unflatten(1, (k.shape[1], -1)).transpose(1, 2).flatten(2, 3)
    return q, k.flatten(1, 2)[:, None], v.flatten(1, 2)[:, None]


def by_token(seen: Tensor, merged: int) -> Tensor:
    """What attention returns, of `merged` heads behind each other, as [B, Q, A D]."""
    return seen.unflatten(2, (merged, -1)).permute(0, 3, 2, 1, 4).flatten(2)


def attention_of(device: torch.device, head_dim: int, row_tokens: int) -> tuple[bool, Options]:
    """Whether heads are merged for rows of so many tokens, and flex attention's kernels: as they are fastest where that
    was measured (docs/speed.md); else its own choice.
    """
    if device.type != "cuda":
        return False, ()
    if torch.cuda.get_device_capability(device) != (9, 0) or head_dim > 128:
        return True, ()
    if row_tokens > LONG:
        return False, tuple(sorted(HOPPER_FORWARD.items()))
    return True, tuple(sorted(HOPPER.items()))


def attend(q: Tensor, k: Tensor, v: Tensor, attention: Attention, options: Options) -> Tensor:
    """q [B, heads, queries, D] on k and v [B, fewer heads, keys, D]; returns as q."""
    grouped = q.shape[1] != k.shape[1]
    if not isinstance(attention, BlockMask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention, enable_gqa=grouped)
    kernel = dict(options) or None
    return cast(
        Tensor,
        flex_attention(q, k, v, block_mask=attention, enable_gqa=grouped, kernel_options=kernel),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class _Place:
    """Where a trained matrix lies in the copies."""

    master: Tensor
    copy: Tensor
    first: int
    rows: int

    def part(self, whole: Tensor) -> Tensor:
        return whole[self.first : self.first + self.rows]


class WorkingCopy:
    """The copies of one drafter. They follow its weights whoever changes these, in place, between steps."""

    def __init__(self, model: DraftModel, dtype: torch.dtype) -> None:
        self._dtype, self.shape = dtype, Shape.of(model)
        self._places: dict[int, _Place] = {}
        layers = [self._layer(layer) for layer in cast("list[DraftLayer]", list(model.layers))]
        self.weights = DraftWeights(
            fc=self._joined([model.fc]),
            hidden_norm=model.hidden_norm.weight,
            layers=tuple(layers),
            norm=model.norm.weight,
        )
        self._seen: dict[int, int] = {}
        self.refresh()

    def _layer(self, layer: DraftLayer) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            norm=layer.input_layernorm.weight,
            qkv=self._joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            q_norm=attention.q_norm.weight,
            k_norm=attention.k_norm.weight,
            out=self._joined([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=self._joined([mlp.gate_proj, mlp.up_proj]),
            down=self._joined([mlp.down_proj]),
        )

    def _joined(self, modules: Sequence[nn.Linear]) -> Tensor:
        first, rows = modules[0].weight, [len(module.weight) for module in modules]
        copy = torch.empty(sum(rows), first.shape[1], dtype=self._dtype, device=first.device, requires_grad=True)
        start = 0
        for module, count in zip(modules, rows, strict=True):
            self._places[id(module.weight)] = _Place(module.weight, copy, start, count)
            start += count
        return copy

    @property
    def copies(self) -> list[Tensor]:
        """Each once."""
        return list({id(place.copy): place.copy for place in self._places.values()}.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over what has changed since: weights that were read from a checkpoint, or given by another replica."""
        for key, place in self._places.items():
            if self._seen.get(key) != place.master._version:
                place.part(place.copy).copy_(place.master)
                self._seen[key] = place.master._version

    def note(self, weights: Sequence[Weight]) -> None:
        """The copies of these are what the weights are now."""
        for weight in weights:
            self._seen[id(weight.master)] = weight.master._version

    def is_matrix(self, parameter: nn.Parameter) -> bool:
        """Whether it has a copy."""
        return id(parameter) in self._places

    def weights_of(self, parameters: Sequence[nn.Parameter]) -> list[Weight]:
        """These trained weights with the gradients that their copies have; those without a gradient are left out.

        A gradient of the trained weight itself comes first: that is what sums of several batches are.
        """
        found: list[Weight] = []
        for parameter in parameters:
            place = self._places.get(id(parameter))
            copy = None if place is None else place.part(place.copy.detach())
            gradient = parameter.grad
            if gradient is None and place is not None and place.copy.grad is not None:
                gradient = place.part(place.copy.grad)
            if gradient is not None:
                found.append(Weight(parameter, gradient, copy))
        return found

    def summed(self, parameters: Sequence[nn.Parameter]) -> list[Weight]:
        """As weights_of, once the gradients were added up; for who only wants to know their kinds."""
        return [
            Weight(weight.master, weight.master.detach(), weight.copy)
            for weight in self.weights_of(parameters)
            if self.is_matrix(weight.master)
        ]

    def add_up(self) -> None:
        """Adds the copies' gradients to those of the trained weights, in float32, and forgets the copies'."""
        for copy in self.copies:  # one after the other, so that both kinds are never there in full
            if copy.grad is None:
                continue
            for place in self._places.values():
                if place.copy is not copy:
                    continue
                gradient = place.part(copy.grad)
                if place.master.grad is None:
                    place.master.grad = gradient.to(place.master.dtype)
                else:
                    place.master.grad += gradient
            copy.grad = None

    def forget(self) -> None:
        for copy in self.copies:
            copy.grad = None
