# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""A drafter's sizes from a target's config, whatever the family calls them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from trainer.draft_config import DraftConfig
from trainer.refused import KINDS

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
POSITIONS = ("max_position_embeddings", "max_seq_len", "seq_length")
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""The RoPE scalings that a drafter shares with its target, and their parameters."""


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: Any) -> int:
    """Those of the target; all heads where it does not share them, or shares them otherwise than evenly."""
    heads = int(config.num_attention_heads)
    found = _first(config, ("num_key_value_heads", "num_kv_heads"))
    return found if isinstance(found, int) and found > 0 and heads % found == 0 else heads


def has_experts(config: Any) -> bool:
    return _first(config, EXPERTS) is not None


def intermediate_size(config: Any) -> int:
    """The target's own; 3 hidden sizes where that is only one small expert's, 4 where the config says nothing."""
    hidden = int(config.hidden_size)
    found = _first(config, ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"))
    if isinstance(found, list):
        found = max(cast("list[int]", found))
    if has_experts(config) and (found is None or found < 2 * hidden):
        return 3 * hidden
    return int(found) if found else 4 * hidden


def norm_eps(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon", "norm_epsilon")
    return float(_first(config, names) or 1e-6)


def max_positions(config: Any) -> int:
    """The longest text that the target was made for; 2,048 where its config does not say."""
    return int(_first(config, POSITIONS) or 2048)


def rope(config: Any) -> tuple[float, dict[str, Any] | None]:
    """RoPE's theta and its scaling: the target's, over the drafter's whole head; plain where it has none of these.

    Where kinds of layers differ, it is that of full attention. Rules whose angles depend on the length of the text are
    left out (see `fixed_positions`).
    """
    found = cast("Mapping[str, Any]", getattr(config, "rope_parameters", None) or {})
    if isinstance(nested := found.get(KINDS[0]), Mapping):
        found = cast("Mapping[str, Any]", nested)
    theta = float(found.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)
    kind = str(found.get("rope_type", "default"))
    if kind not in SCALINGS:
        return theta, None
    return theta, {"rope_type": kind, **{name: found[name] for name in SCALINGS[kind] if found.get(name) is not None}}


def fixed_positions(config: Any) -> int | None:
    """How many positions a row may have before RoPE's angles change with its length; None: any number.

    "dynamic" and "longrope" choose them by the longest document at hand: one document would change the others.
    """
    found = cast("Mapping[str, Any]", getattr(config, "rope_parameters", None) or {})
    rules = [cast("Mapping[str, Any]", rule) for rule in found.values() if isinstance(rule, Mapping)] or [found]
    if not any(rule.get("rope_type") in ("dynamic", "longrope") for rule in rules):
        return None
    originals = [rule.get("original_max_position_embeddings") for rule in rules]
    named = [size for size in (*originals, getattr(config, "original_max_position_embeddings", None)) if size]
    return min(int(size) for size in (*named, max_positions(config)))


def too_long(config: Any, row_tokens: int) -> str | None:
    """Why rows of so many tokens are too long for a target, or None. A document may fill its row."""
    if (fixed := fixed_positions(config)) is not None and row_tokens > fixed:
        return (
            f"rows of {row_tokens} tokens: beyond {fixed} this {config.model_type} model chooses its position angles "
            "by the longest document of a row, so that packed documents change each other; make rows (data.row_tokens) "
            f"of at most {fixed}"
        )
    longest = _first(config, POSITIONS)
    if longest is not None and row_tokens > longest:
        return (
            f"rows of {row_tokens} tokens: this {config.model_type} model was made for texts of at most {longest}; "
            "make rows (data.row_tokens) no longer"
        )
    return None


def draft_config(
    config: Any,
    *,
    num_layers: int,
    block_size: int,
    layer_ids: Sequence[int],
    mask_token_id: int,
    sliding_window: int | None = None,
    sliding_layers: Sequence[int] | None = None,
    causal: bool = False,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> DraftConfig:
    """A drafter of a target's own width, fed with its layers `layer_ids`; config: the target's, of its text.

    sliding_layers: which of the drafter's layers see only the last `sliding_window` tokens; None: all of them, where
    there is a window. Raises ValueError when the numbers don't fit each other.
    """
    if sliding_window is None and sliding_layers:
        raise ValueError(f"sliding_layers {list(sliding_layers)}: a sliding_window is needed for them")
    if wrong := [layer for layer in sliding_layers or () if not 0 <= layer < num_layers]:
        raise ValueError(f"sliding_layers {wrong}: the drafter has layers 0..{num_layers - 1}")
    sliding = range(num_layers) if sliding_layers is None and sliding_window is not None else sliding_layers or ()
    kinds = cast(
        "tuple[Literal['full_attention', 'sliding_attention'], ...]",
        tuple(KINDS[layer in sliding] for layer in range(num_layers)),
    )
    theta, scaling = rope(config)
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size(config),
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        vocab_size=config.vocab_size,
        rms_norm_eps=norm_eps(config),
        rope_theta=theta,
        rope_scaling=scaling,
        block_size=block_size,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=config.num_hidden_layers,
        mask_token_id=mask_token_id,
        max_position_embeddings=max_positions(config),
        layer_types=kinds,
        sliding_window=sliding_window,
        causal=causal,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
    )
