# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""Which models can't be targets, as far as their config tells: asked before any weights are read."""

from collections.abc import Iterable
from typing import Any

KINDS = ("full_attention", "sliding_attention")
"""The layers that a drafter's target may have: what they see can be masked, and what they keep cropped."""

OWN_RULES = (
    "index_topk", "index_topk_blocks", "keep_window_size", "attention_chunk_size", "attention_window_size",
    "sliding_window_size", "local_attention_window_len", "local_attn_chunk_length",
)  # fmt: skip
"""How configs say that a query looks at some keys only, by another rule than a sliding window."""


class TargetError(ValueError):
    """The named model can't be a target; the text says why."""


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model: itself, unless the model has other senses too."""
    return config.get_text_config(decoder=True)


def check_config(config: Any) -> None:
    """Refuse a model by what its config says of it. Raises TargetError."""
    text = text_config(config)
    family = str(config.model_type)
    if config.is_encoder_decoder:
        raise TargetError(f"{family} models have an encoder; a target reads and writes one row of tokens")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            raise TargetError(f"this {family} model's {name} differs from layer to layer, which is not supported")
        if not isinstance(value, int):
            raise TargetError(f"{family} models are not supported: their config has no {name}")
    if strange := _strange(getattr(text, "layer_types", None) or ()):
        raise TargetError(
            f"this {family} model has layers of kind {', '.join(strange)}; only full and sliding attention can be kept "
            "inside each document of a row"
        )
    if rule := next((name for name in OWN_RULES if getattr(text, name, None) is not None), None):
        raise TargetError(
            f"this {family} model looks only at keys that a rule of its own picks ({rule}); that it picks none of "
            "another document can't be proved on a few tokens"
        )
    if getattr(text, "final_logit_softcapping", None) is not None:
        raise TargetError(
            f"this {family} model bounds its logits (final_logit_softcapping), which the drafter does not do"
        )


def _strange(kinds: Iterable[str]) -> list[str]:
    return sorted(set(kinds) - set(KINDS))
