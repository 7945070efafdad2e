# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false
# (transformers gives its Auto classes, configs and tokenizers no types)
"""The frozen target model: its features for the drafter, and its own decoding steps.

Shapes: B rows, S tokens of a row, Q new tokens, H hidden size, V vocabulary, K captured layers, F = K*H.

The decoder layers are run here, by hand, on the modules that transformers loaded, for four reasons: the pass can stop
after the last captured layer; attention is confined by our own mask (transformers would build its own in each forward,
by torch's process-wide tracing machinery, which breaks beside other threads); no hook is hung on modules that another
thread may be running; and the names of the layers' arguments change between the versions of transformers we allow.
tests/trainer/test_target.py holds it equal to the model's own forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer.draft_config import DraftConfig

FAMILIES = ("llama", "qwen3")
SCALED_FAMILIES = ("gemma", "granite", "cohere")


class TargetError(ValueError):
    """The named model can't be a target; the text says why."""


# --- pure: documents and masks --------------------------------------------------------------------------------------


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Causal attention inside each document, [B, 1, S, S], True where a query sees a key.

    Padding (id -1) is a document of its own, so that no row of the mask is empty.
    """
    size = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    causal_SS = torch.ones(size, size, dtype=torch.bool, device=document_ids_BS.device).tril()
    return (same_BSS & causal_SS)[:, None]


def step_mask(past: int, new: int, device: torch.device) -> Tensor:
    """Causal attention of `new` tokens after `past` cached ones, [1, 1, new, past + new]."""
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)[None, None]


def _rotate(x_BhSD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotary position embedding over the whole head, halves rotated."""
    left, right = x_BhSD.chunk(2, dim=-1)
    return x_BhSD * cos_BSD[:, None] + torch.cat([-right, left], dim=-1) * sin_BSD[:, None]


# --- the key-value cache -----------------------------------------------------------------------------------------


class Extends(Protocol):
    """What keeps keys and values for the layers, whatever its form."""

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all that its queries may look at."""
        ...


class KeyValueCache:
    """Keys and values of one row for each layer of the target, in a buffer of fixed capacity, croppable."""

    def __init__(self, target: "TargetModel", capacity: int) -> None:
        config = target.config
        shape = (target.num_layers, 2, 1, config.num_key_value_heads, capacity, target.head_dim)
        self._buffer = torch.empty(shape, device=target.device, dtype=target.dtype)
        self.capacity = capacity
        self.length = 0
        """Tokens committed. Steps write behind them; `crop` and `advance` move it."""

    def extend(self, layer: int, keys_BhQD: Tensor, values_BhQD: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind the committed ones; return all of them, [1, heads, length + Q, D]."""
        end = self.length + keys_BhQD.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were asked for")
        keys, values = self._buffer[layer]
        keys[:, :, self.length : end] = keys_BhQD
        values[:, :, self.length : end] = values_BhQD
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, count: int) -> None:
        self.length += count

    def crop(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't crop a cache of {self.length} tokens to {length}")
        self.length = length


# --- the target --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one pass through the whole target gives: logits [Q, V] and the captured features [1, Q, F]."""

    logits_QV: Tensor
    features_BQF: Tensor


class TargetModel:
    """A frozen causal language model with its tokenizer. `tokenizer` may be None where no text is read or made."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        check_family(model.config)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config
        self.num_layers: int = model.config.num_hidden_layers
        self.head_dim: int = (
            getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
        )

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The output head, [V, H]; the input embedding itself where the model ties them."""
        return self.model.lm_head.weight

    def embedding(self, ids: Tensor) -> Tensor:
        """The input embeddings of token ids, [..., H]."""
        return self.model.model.embed_tokens(ids)

    @torch.no_grad()
    def features(
        self,
        input_ids_BS: Tensor,
        document_ids_BS: Tensor,
        positions_BS: Tensor,
        layer_ids: Sequence[int],
    ) -> Tensor:
        """The residual stream after each of `layer_ids`, side by side in their order, [B, S, K*H].

        document_ids_BS: one id for each token, a document's tokens side by side, -1 for padding. positions_BS: each
        token's position in its own document.
        """
        mask = document_mask(document_ids_BS)
        _, captured = self.run(self.embedding(input_ids_BS), positions_BS, mask, layer_ids, stop=max(layer_ids))
        return captured

    @torch.no_grad()
    def step(self, ids_Q: Tensor, cache: KeyValueCache, layer_ids: Sequence[int] = (), last: int = 0) -> Step:
        """Run the next tokens of one sequence through the whole model, behind what the cache holds, and commit them.

        last: how many of the last positions to give logits for (0: all).
        """
        past, new = cache.length, ids_Q.shape[0]
        positions = torch.arange(past, past + new, device=ids_Q.device)[None]
        mask = step_mask(past, new, ids_Q.device)
        hidden_BQH, features_BQF = self.run(
            self.embedding(ids_Q[None]), positions, mask, layer_ids, stop=self.num_layers - 1, cache=cache
        )
        cache.advance(new)
        return Step(self.logits(hidden_BQH[0, -last:]), features_BQF)

    def logits(self, hidden_QH: Tensor) -> Tensor:
        """The final norm and the head over hidden states of the last layer, [Q, V]."""
        return functional.linear(self.model.model.norm(hidden_QH), self.head_weight)

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
            attended = self._attend(
                layer.self_attn, index, layer.input_layernorm(hidden_BSH), cos_BSD, sin_BSD, mask, cache
            )
            hidden_BSH = hidden_BSH + attended
            hidden_BSH = hidden_BSH + layer.mlp(layer.post_attention_layernorm(hidden_BSH))
            if index in layer_ids:
                captured[index] = hidden_BSH
        features = [captured[index] for index in layer_ids]
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

    # --- what a drafter for this target looks like ---------------------------------------------------------------

    def mask_token(self, wanted: int | None = None) -> int:
        """The token id that stands for "not yet known" in a block.

        In this order: the one asked for; the tokenizer's mask token; the first row of the embedding that no token
        uses; the last reserved token (a special token that is neither bos, eos, pad nor unk, and that the chat template
        does not write). Never pad or eos: those occur in the data, and the drafter would take them for unknown.
        """
        size = int(self.config.vocab_size)
        if wanted is not None:
            if not 0 <= wanted < size:
                raise TargetError(f"mask_token_id {wanted} is outside the vocabulary of {size} tokens")
            return wanted
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise TargetError("the target has no tokenizer to choose a mask token from: give mask_token_id")
        if tokenizer.mask_token_id is not None:
            return int(tokenizer.mask_token_id)
        if len(tokenizer) < size:
            return len(tokenizer)
        template = tokenizer.chat_template or ""
        reserved = [
            int(id)
            for id, token in tokenizer.added_tokens_decoder.items()
            if token.special and id not in tokenizer.all_special_ids and token.content not in template
        ]
        if not reserved:
            raise TargetError("the target's tokenizer has no unused token for the mask: give mask_token_id")
        return max(reserved)

    def end_tokens(self) -> frozenset[int]:
        """The ids that end an answer: the generation config's, else the tokenizer's."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        if found is None and self.tokenizer is not None:
            found = self.tokenizer.eos_token_id
        if found is None:
            return frozenset()
        return frozenset(cast("list[int]", found)) if isinstance(found, list) else frozenset([int(found)])

    def draft_config(
        self,
        num_layers: int,
        block_size: int,
        layer_ids: Sequence[int],
        mask_token_id: int | None = None,
    ) -> DraftConfig:
        """A drafter of the target's own width for it, fed with `layer_ids`; mask_token_id: see `mask_token`."""
        rope = dict(self.config.rope_parameters)
        theta = float(rope.pop("rope_theta"))
        scaling = rope if rope.get("rope_type", "default") != "default" else None
        return DraftConfig(
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            num_layers=num_layers,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.config.vocab_size,
            rms_norm_eps=self.config.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            block_size=block_size,
            target_layer_ids=tuple(layer_ids),
            num_target_layers=self.num_layers,
            mask_token_id=self.mask_token(mask_token_id),
            max_position_embeddings=self.config.max_position_embeddings,
        )


# --- loading -----------------------------------------------------------------------------------------------------


def check_family(config: Any) -> None:
    """Refuse a model whose forward pass is not the one written here."""
    family = str(config.model_type)
    for scaled in SCALED_FAMILIES:
        if family.startswith(scaled):
            raise TargetError(
                f"{family} models scale their embeddings or logits, which the drafter does not do yet; "
                f"use one of: {', '.join(FAMILIES)}"
            )
    if family not in FAMILIES:
        raise TargetError(f"{family} models are not supported as targets; use one of: {', '.join(FAMILIES)}")
    if any("sliding" in kind for kind in getattr(config, "layer_types", None) or ()):
        raise TargetError(f"this {family} model has sliding-window layers, which are not supported")
    if config.hidden_act != "silu":
        raise TargetError(f"this {family} model uses {config.hidden_act}; the drafter's layers are SiLU")


def load_target(
    path_or_name: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> TargetModel:
    """Load a target from a local folder or by its hub name, frozen and in eval mode. Raises TargetError.

    device: "auto" is the first GPU, or the CPU where there is none.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # a load takes a moment, and a log file is no place for bars
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = str(path_or_name)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    if (name.startswith(("/", ".")) or Path(name).exists()) and not Path(name, "config.json").is_file():
        raise TargetError(f"{name} is not a folder with a model (no config.json in it)")
    try:
        return _load(name, device, dtype)
    except TargetError as error:
        raise TargetError(f"the target {name} can't be used: {error}") from error
    except Exception as error:  # transformers, safetensors and torch raise what they like: ValueError, KeyError, ...
        raise TargetError(f"the target {name} can't be loaded on {device}: {first_line(error)}") from error


def _load(name: str, device: str | torch.device, dtype: torch.dtype) -> TargetModel:
    """The model and its tokenizer. Raises TargetError when the files lack weights, and whatever the libraries raise."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    check_family(AutoConfig.from_pretrained(name))
    model, report = cast(
        "tuple[Any, dict[str, Any]]",
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True),
    )
    # transformers fills both with random weights and only warns. A head tied to the embedding is not among them.
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise TargetError(f"its files have no weights, or none of the right shape, for {absent[0]}{more}")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model.to(device)
    return TargetModel(model, tokenizer)


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line: its kind where it says nothing, or only a key."""
    said = str(error).strip().splitlines()
    if isinstance(error, KeyError) or not said:
        return f"{type(error).__name__} {' '.join(said)}".rstrip()
    return said[0]
