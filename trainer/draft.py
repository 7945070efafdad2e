"""The DFlash drafter, its tensors named as in the z-lab format that transformers, SGLang and vLLM load.

A block of T tokens (the clean anchor token, then T-1 masks) is denoised in one forward. Each layer attends from the
block's tokens to the context's keys and values, projected from the target's features, and to the block itself: to all
of both, unless the config gives it a sliding window or causal blocks (blocks.Sight). The context is never updated:
every layer projects the same `context` anew. Embedding and head are the target's, frozen, and not in the model.

Shape legend: see features.py. `head_dim` is written D, attention heads A, key/value heads G.
"""

# torch's own signatures leave `nn.functional` and flex attention partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.blocks import cached_mask
from trainer.draft_config import INITIALIZER_RANGE, DraftConfig

# What may be seen: a boolean tensor [B, 1, Q, S+Q] (True = seen), a flex BlockMask of that shape, or None = everything.
Attention = Tensor | BlockMask | None
# cos and sin, each [B, 1, positions, D].
Rotation = tuple[Tensor, Tensor]
# Keys and values, each [B, G, tokens, D]; keys are normed and rotated.
KeyValue = tuple[Tensor, Tensor]


class Matrix(nn.Linear):
    """Without a bias, and without numbers: whoever makes a drafter draws them or reads them, and torch's own, which
    come first otherwise, take seconds for a large one.
    """

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32 (or wider), result in the input's dtype.

    Not torch's: that one leaves its fused path, with a warning, when float32 weights meet bfloat16 inputs (autocast).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding of the target: positions [B, tokens] to cos and sin. Holds nothing that is saved.

    float32 whatever the model's dtype: position 3000 in bfloat16 is not an integer any more.
    """

    frequencies: Tensor  # [D/2]

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.scaling = 1.0  # YaRN's attention factor, on cos and sin
        if config.rope_scaling is None:
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
            frequencies = 1.0 / config.rope_theta**exponents
        else:
            frequencies, self.scaling = scaled_frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Moves with the model, but keeps its dtype when the model changes its own."""
        exact = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> Rotation:
        return rotation_of(positions, self.frequencies, self.scaling)


def rotation_of(positions: Tensor, frequencies: Tensor, scaling: float) -> Rotation:
    """cos and sin of positions [B, tokens]; frequencies [D/2], float32."""
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def scaled_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """Frequencies [D/2] and the attention factor of a scaled RoPE, by transformers' own rules (yarn, llama3, linear).

    Raises ValueError when a rule's parameter is missing.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(config.rope_scaling or {})
    kind = scaling["rope_type"]
    parameters = {"original_max_position_embeddings": config.max_position_embeddings} | scaling
    parameters["rope_theta"] = config.rope_theta
    as_transformers = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    try:
        with torch.device("cpu"):  # also where a model is made on "meta": transformers' arange names no device
            return ROPE_INIT_FUNCTIONS[kind](as_transformers, torch.device("cpu"))
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} needs {error.args[0]!r}, which is missing") from error


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the two halves of each head (the "neox" layout) by the positions' angles; x [B, heads, tokens, D]."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1) if x.dtype != torch.float64 else x.chunk(2, dim=-1)
    wide = torch.cat((first, second), dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention from the block to the context and to itself, with normed queries and keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.grouped = config.num_heads != config.num_kv_heads
        self.q_proj = Matrix(config.hidden_size, wide)
        self.k_proj = Matrix(config.hidden_size, narrow)
        self.v_proj = Matrix(config.hidden_size, narrow)
        self.o_proj = Matrix(wide, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, tokens, heads*D] -> [B, heads, tokens, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """Keys (normed, rotated) and values of tokens x [B, tokens, H]: the same weights for context and block."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotation), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotation: Rotation, context: KeyValue, attention: Attention) -> Tensor:
        """x [B, Q, H] sees `context` and itself as far as `attention` lets it; returns [B, Q, H]."""
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        key, value = self.key_value(x, rotation)
        key, value = torch.cat((context[0], key), dim=2), torch.cat((context[1], value), dim=2)
        if isinstance(attention, BlockMask):
            seen = flex_attention(query, key, value, block_mask=attention, enable_gqa=self.grouped)
        else:
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=attention, enable_gqa=self.grouped)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Matrix(config.hidden_size, config.intermediate_size)
        self.up_proj = Matrix(config.hidden_size, config.intermediate_size)
        self.down_proj = Matrix(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP on the block's stream; the context has its norm (hidden_norm) and gets no other."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, context: KeyValue, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftCache:
    """Keys and values of the context in every layer, for decoding. A block's own are never kept."""

    def __init__(self) -> None:
        self._layers: list[KeyValue] = []

    @property
    def length(self) -> int:
        """Context tokens held, from position 0 on."""
        return self._layers[0][0].shape[2] if self._layers else 0

    def extend(self, layer: int, new: KeyValue) -> KeyValue:
        """Appends a layer's new context keys and values; returns all of them."""
        if layer == len(self._layers):
            self._layers.append(new)
        else:
            old = self._layers[layer]
            self._layers[layer] = (torch.cat((old[0], new[0]), dim=2), torch.cat((old[1], new[1]), dim=2))
        return self._layers[layer]


class DraftModel(nn.Module):
    """The drafter: 11n + 3 tensors, named as the z-lab format names them."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Matrix(config.feature_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_sights = config.layer_sights  # worked out here: the compiled forward reads plain numbers
        self.rotary = Rotary(config)
        for module in self.modules():
            if isinstance(module, Matrix):
                nn.init.normal_(module.weight, std=INITIALIZER_RANGE)

    def forward(
        self,
        features_BSF: Tensor,
        embeds_BQH: Tensor,
        context_positions_BS: Tensor,
        block_positions_BQ: Tensor,
        attention: tuple[Attention, ...],
    ) -> Tensor:
        """Training: all blocks of a row side by side.

        attention: one for each of `config.sights`, over the S context keys, then the Q block keys.
        features_BSF: the target's features; embeds_BQH: the target's embedding of the blocks' tokens.
        Returns the hidden states [B, Q, H] that the target's head turns into logits.
        """
        context = self.hidden_norm(self.fc(features_BSF))
        context_rotation, rotation = self.rotary(context_positions_BS), self.rotary(block_positions_BQ)
        x = embeds_BQH
        for layer, sight in zip(cast("list[DraftLayer]", self.layers), self.layer_sights, strict=True):
            x = layer(x, rotation, layer.self_attn.key_value(context, context_rotation), attention[sight])
        return self.norm(x)

    def forward_cached(self, features_new: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """Decoding: one block, after the context in `cache` and the new context tokens, which join the cache.

        features_new: [B, new, F] (new may be 0 once the cache holds something); embeds: [B, T, H];
        positions: [B, new + T], first those of the new context tokens, then the block's. Returns [B, T, H].
        """
        new, block_size = features_new.shape[1], embeds.shape[1]
        sights = self.config.sights
        attention = [cached_mask(cache.length + new, block_size, sight, embeds.device) for sight in sights]
        context = self.hidden_norm(self.fc(features_new))
        context_rotation, rotation = self.rotary(positions[:, :new]), self.rotary(positions[:, new:])
        x = embeds
        for index, layer in enumerate(cast("list[DraftLayer]", self.layers)):
            held = cache.extend(index, layer.self_attn.key_value(context, context_rotation))
            x = layer(x, rotation, held, attention[self.layer_sights[index]])
        return self.norm(x)
