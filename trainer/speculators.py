"""Drafters in the format of vllm-project/speculators: its config.json, and what is in its model.safetensors.

It differs from z-lab's in three ways: the sizes stand in a nested config of their own; layers are counted from the
embedding, so that each id is one higher; the target's embedding and head may lie in the file, frozen.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainer.draft_config import (
    SLIDING,
    DraftConfig,
    from_speculators_layer_ids,
    speculators_layer_ids,
)

ARCHITECTURE = "DFlashSpeculator"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
REDUCED = ("t2d", "d2t")  # a vocabulary of the drafter's own

# Keys of z-lab's config that are not the transformer's.
_OUTER = (
    "architectures", "block_size", "num_target_layers", "dflash_config", "is_causal", "rope_theta", "rope_scaling",
    "dtype",
)  # fmt: skip
# Keys that change the model, each with the value that says what this drafter does in any case.
_OFF: Mapping[str, object] = {
    "projector_type": "dflash", "sample_from_anchor": False, "shift_label": False, "norm_before_fc": False,
    "fc_norm": False, "norm_output": False, "output_multiplier": 1.0, "input_embedding_scale": 1.0,
    "final_logit_softcapping": None, "conv_kernel_size": None, "conv_group_size": None, "selector_rank": None,
    "selector_top_k": None, "attention_sink_bias": False,
}  # fmt: skip


def is_speculators(data: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return "speculators_model_type" in data or data.get("architectures") == [ARCHITECTURE]


def to_speculators(config: DraftConfig, *, target: str, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json of a drafter. Raises ValueError for what the format can't say.

    target: name or folder of the target, which speculators calls the verifier.
    """
    for name in ("embedding_scale", "logit_scale"):
        if getattr(config, name) != 1:
            raise ValueError(f"the speculators format has no {name}, and this drafter's is {getattr(config, name)}")
    slides = [kind == SLIDING for kind in config.layer_types]
    if (config.causal is None) or (config.causal and not all(slides)):
        raise ValueError(
            "the speculators format can't say that blocks are causal in some layers and not in others, or in layers "
            "that see everything: vLLM and speculators would read it differently"
        )
    whole = config.to_json()
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": {key: value for key, value in whole.items() if key not in _OUTER},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(speculators_layer_ids(config.target_layer_ids)),
        "mask_token_id": config.mask_token_id,
        # vLLM takes its opposite for all layers, speculators for the sliding ones: so it is said in any case.
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": False,
        "target_hidden_size": None,
        "num_target_layers": config.num_target_layers,  # ours: the format itself leaves it to the target
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def from_speculators(data: Mapping[str, Any], num_target_layers: int | None = None) -> DraftConfig:
    """Reads a config.json, ours or speculators' own. Raises ValueError naming what is missing or not supported.

    num_target_layers: the target's, which speculators' own files don't have.
    """
    if data.get("speculators_model_type", "dflash") != "dflash":
        raise ValueError(
            f"drafter config: speculators_model_type {data['speculators_model_type']!r}, expected 'dflash'"
        )
    layer = data.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError("drafter config: transformer_layer_config is missing")
    layer = cast("Mapping[str, Any]", layer)
    if (vocab := data.get("draft_vocab_size")) is not None and vocab != layer.get("vocab_size"):
        raise ValueError(
            f"drafter config: draft_vocab_size {vocab}, fewer than the target's {layer.get('vocab_size')} tokens: a "
            f"reduced vocabulary is not supported"
        )
    for key, off in _OFF.items():
        if data.get(key) is not None and data[key] != off:
            raise ValueError(f"drafter config: {key} {data[key]!r} is not supported")
    layers = num_target_layers if num_target_layers is not None else data.get("num_target_layers")
    if not isinstance(layers, int):
        raise ValueError("drafter config: it doesn't say how many layers the target has: name the target")
    if data.get("num_target_layers") not in (None, layers):
        raise ValueError(f"drafter config: num_target_layers is {data['num_target_layers']}, the target has {layers}")
    ids = data.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(id) is int for id in cast("list[object]", ids)):
        raise ValueError(f"drafter config: aux_hidden_state_layer_ids {ids!r} is no list of layers")
    return DraftConfig.from_json(
        {
            **{
                key: value for key, value in layer.items() if key not in _OUTER or key in ("rope_theta", "rope_scaling")
            },
            "target_hidden_size": data.get("target_hidden_size"),
            "block_size": data.get("block_size"),
            "num_target_layers": layers,
            "dflash_config": {
                "mask_token_id": data.get("mask_token_id"),
                "target_layer_ids": list(from_speculators_layer_ids(cast("list[int]", ids), layers)),
            },
            # None: the sliding layers are, the others are not.
            "is_causal": False if data.get("sliding_window_non_causal") else None,
        }
    )
