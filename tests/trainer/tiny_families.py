"""Tiny random models of many families of transformers: hidden 32, four layers, a vocabulary of 100 tokens.

Windows are 4 tokens, so that a document of a dozen is far longer.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

WINDOW = 4
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
MIXED = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip

SUPPORTED: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "biogpt": {}, "bitnet": {},
    "cohere": {"logit_scale": 0.25}, "cohere2": {**MIXED, "logit_scale": 0.25},
    "deepseek_v3": {
        **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 2, "moe_intermediate_size": 16,
    },
    "ernie4_5": {}, "exaone4": MIXED, "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {"head_dim": 8}, "gemma2": {**MIXED, "final_logit_softcapping": None}, "gemma3_text": MIXED,
    "glm": {"head_dim": 8}, "glm4": {"head_dim": 8},
    "gpt2": {}, "gpt_bigcode": {}, "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_neox": {}, "gpt_oss": {**MIXED, "num_local_experts": 4},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.125},
    "granitemoe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
    },
    "helium": {"head_dim": 8}, "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW}, "mixtral": {"num_local_experts": 4, "sliding_window": None}, "nemotron": {},
    "olmo": {}, "olmo2": {}, "olmo3": MIXED, "olmoe": EXPERTS, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {}, "phi3": {"sliding_window": WINDOW}, "phimoe": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 8}, "seed_oss": {"head_dim": 8}, "smollm3": {}, "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW}, "vaultgemma": {**MIXED, "final_logit_softcapping": None}, "xglm": {},
}  # fmt: skip
"""What each needs besides SIZES. None of them is run by hand."""

POSITIONS_ADDED = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm")
"""To the embeddings, before layer 0."""


def tiny_config(family: str, **changes: Any) -> Any:
    given = {**SIZES, **SUPPORTED.get(family, {}), **changes}
    if family == "xglm":
        given |= {"d_model": 32, "attention_heads": 4, "num_layers": 4}
    return CONFIG_MAPPING[family](**given)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Random weights, wide enough that a token in the wrong place shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.std() < 0.05:  # families that have their own idea of a beginning
                weight.normal_(0, 0.2)
    return model
