# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Llama and Qwen3 (dense), run by hand: the fast way.

Shapes: B rows, S tokens of a row, Q new tokens, H hidden size, V vocabulary, K captured layers, F = K*H.

The decoder layers are run here on the modules that transformers loaded, for four reasons: the pass can stop after the
last captured layer; attention is confined by our own mask (transformers would build its own in each forward, by torch's
process-wide tracing machinery, which breaks beside other threads); keys and values may lie in a buffer of any form; and
the names of the layers' arguments change between the versions of transformers we allow. The proofs at loading
(proofs.py) and tests/trainer/test_target.py hold it equal to the model's own forward. All other families: hooked.py.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainer.caches import Extends, KeyValueCache
from trainer.masks import document_mask, step_mask
from trainer.refused import KINDS
from trainer.streams import moved

FAMILIES = ("llama", "qwen3")


def runs_by_hand(config: Any) -> bool:
    """Whether a model's forward pass is the one written here."""
    kinds = getattr(config, "layer_types", None) or ()
    return str(config.model_type) in FAMILIES and all(kind == KINDS[0] for kind in kinds)


def _rotate(x_BhSD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotary position embedding over the whole head, halves rotated."""
    left, right = x_BhSD.chunk(2, dim=-1)
    return x_BhSD * cos_BSD[:, None] + torch.cat([-right, left], dim=-1) * sin_BSD[:, None]


def device_of(layer: Any) -> torch.device:
    """Where a decoder layer is."""
    return layer.input_layernorm.weight.device


class Fast(Protocol):
    """The same layers for rows of one shape: fast_target.py."""

    shape: tuple[int, int]  # rows and their tokens

    def run(
        self, hidden_BSH: Tensor, positions_BS: Tensor, document_ids_BS: Tensor, layer_ids: Sequence[int], *, stop: int
    ) -> tuple[Tensor, Tensor]: ...


class ByHand:
    """The decoder layers of a Llama or a Qwen3."""

    embedding_scale = logit_scale = 1.0

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.fast: Fast | None = None
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def embedding_VH(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    @property
    def head_VH(self) -> Tensor:
        return self.model.lm_head.weight

    def norm(self, hidden_H: Tensor) -> Tensor:
        """The final norm: what the head reads, from hidden states of the last layer."""
        return self.model.model.norm(hidden_H)

    def documents(
        self, ids_BS: Tensor, document_ids_BS: Tensor, positions_BS: Tensor, layer_ids: Sequence[int], *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The captured layers of packed rows, [B, S, F], and the last norm's output if `final`, [B, S, H]."""
        stop = self.num_layers - 1 if final else max(layer_ids)
        embedded_BSH = self._embedded(ids_BS)
        if self.fast is not None and self.fast.shape == tuple(ids_BS.shape):
            hidden_BSH, features_BSF = self.fast.run(embedded_BSH, positions_BS, document_ids_BS, layer_ids, stop=stop)
        else:
            mask = document_mask(moved(document_ids_BS, ids_BS.device))
            hidden_BSH, features_BSF = self.run(embedded_BSH, positions_BS, mask, layer_ids, stop=stop)
        return features_BSF, self.norm(hidden_BSH) if final else None

    def new_cache(self, capacity: int) -> KeyValueCache:
        devices = [device_of(layer) for layer in self.model.model.layers]
        return KeyValueCache(devices, self.num_kv_heads, capacity, self.head_dim, self.head_VH)

    def step(self, ids_Q: Tensor, cache: KeyValueCache, layer_ids: Sequence[int], last: int) -> tuple[Tensor, Tensor]:
        """The next tokens of one sequence: the last norm's output at the `last` of them, and the captured layers."""
        past, new = cache.length, ids_Q.shape[0]
        cache.make_room(new)
        positions = torch.arange(past, past + new, device=ids_Q.device)[None]
        hidden_BQH, features_BQF = self.run(
            self._embedded(ids_Q[None]),
            positions,
            step_mask(past, new, ids_Q.device),
            layer_ids,
            stop=self.num_layers - 1,
            cache=cache,
        )
        cache.commit(new)
        return self.norm(hidden_BQH[0, -last:]), features_BQF

    def _embedded(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.embedding_VH)

    def run(
        self,
        hidden_BSH: Tensor,
        positions_BS: Tensor,
        mask: Tensor | None,
        layer_ids: Sequence[int] = (),
        *,
        stop: int,
        cache: Extends | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Layers 0 to `stop`: the hidden states after the last of them, and the captured ones side by side.

        mask: True where a query sees a key, [B, 1, S, keys]; None: plain causal attention, without a cache's past.
        """
        trunk = self.model.model
        cos_BSD, sin_BSD = trunk.rotary_emb(hidden_BSH, positions_BS)
        captured: dict[int, Tensor] = {}
        for index in range(stop + 1):
            layer = trunk.layers[index]
            if (device := device_of(layer)) != hidden_BSH.device:  # spread over several: spread.py
                hidden_BSH, cos_BSD, sin_BSD = (moved(x, device) for x in (hidden_BSH, cos_BSD, sin_BSD))
                mask = None if mask is None else moved(mask, device)
            attended = self._attend(
                layer.self_attn, index, layer.input_layernorm(hidden_BSH), cos_BSD, sin_BSD, mask, cache
            )
            hidden_BSH = hidden_BSH + attended
            hidden_BSH = hidden_BSH + layer.mlp(layer.post_attention_layernorm(hidden_BSH))
            if index in layer_ids:
                captured[index] = hidden_BSH
        home = self.head_VH.device
        features = [moved(captured[index], home) for index in layer_ids]
        return hidden_BSH, torch.cat(features, dim=-1) if features else hidden_BSH[..., :0]

    def _attend(
        self,
        attention: Any,
        index: int,
        x_BSH: Tensor,
        cos_BSD: Tensor,
        sin_BSD: Tensor,
        mask: Tensor | None,
        cache: Extends | None,
    ) -> Tensor:
        """Self-attention of layer `index`, [B, S, H]; plain causal where there is no mask."""
        shape = (*x_BSH.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x_BSH).view(shape) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):  # Qwen3
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = _rotate(q, cos_BSD, sin_BSD), _rotate(k, cos_BSD, sin_BSD)
        if cache is not None:
            k, v = cache.extend(index, k, v)
        # Key and value heads are shared by groups of query heads. torch's own grouping falls back to its slow kernel
        # on CUDA when there is a mask, so: with one query, the group's heads pass as queries of the shared head
        # (nothing is copied, and the mask is the same for all); else the shared heads are repeated.
        heads = q.shape[1]
        if q.shape[2] == 1:
            q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        else:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        out_BhSD = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[1] == heads, scale=self.head_dim**-0.5
        )
        if out_BhSD.shape[1] != heads:
            out_BhSD = out_BhSD.flatten(1, 2)[:, :, None]
        return attention.o_proj(out_BhSD.transpose(1, 2).reshape(*x_BSH.shape[:2], -1))
