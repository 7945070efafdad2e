"""A DFlash drafter for transformers: `AutoModel.from_pretrained(folder, trust_remote_code=True)`.

This file travels with a drafter and needs torch and transformers only. Each call of `forward` is one cycle of decoding:
a block of T tokens (the last committed token, then masks) is denoised after the context that came before. The context
is what the target model computed of the committed tokens: its hidden states after the layers that
`config.dflash_config["target_layer_ids"]` names, side by side. Embedding and head are the target's and not in here:

    hidden = drafter(noise_embedding=target.get_input_embeddings()(block_ids), target_hidden=new_features,
                     position_ids=positions, past_key_values=cache)
    logits = target.lm_head(hidden)[:, 1:]     # slot k proposes the token k places after the last committed one
"""

# pyright: basic
# (transformers and torch leave much of what is used here untyped)

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


class DFlashNorm(nn.Module):
    """Root-mean-square norm, in float32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotation(config, positions):
    """cos and sin [B, 1, tokens, head_dim] for positions [B, tokens], in float32 whatever the model's dtype."""
    rope = dict(config.rope_parameters)
    scaling, kind = 1.0, rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / rope["rope_theta"] ** exponents
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = positions[:, None, :, None].float() * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x, cos_and_sin):
    """Turns the two halves of each head against each other."""
    cos, sin = cos_and_sin
    first, second = x.float().chunk(2, dim=-1)
    return (torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def block_mask(context, block, window, causal, device):
    """What the slots of a block see of [context, block]: True = seen; None = everything."""
    if window is None and not causal:
        return None
    slot = torch.arange(block, device=device)[:, None]
    key = torch.arange(context + block, device=device)
    seen = torch.ones(block, context + block, dtype=torch.bool, device=device)
    if window is not None:  # counted from the slot's own place
        seen &= (key >= context) | (key > context + slot - window)
    if causal:
        seen &= key <= context + slot
    return seen


class DFlashAttention(nn.Module):
    """From the block to the context and to itself; both go through the same key and value weights."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.grouped = wide != narrow
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.q_norm = DFlashNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashNorm(self.head_dim, config.rms_norm_eps)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, context, context_rotation, block_rotation, mask, cache):
        query = rotate(self.q_norm(self.heads(self.q_proj(x))), block_rotation)
        key = rotate(self.k_norm(self.heads(self.k_proj(context))), context_rotation)
        value = self.heads(self.v_proj(context))
        if cache is not None:  # keeps the context only: a block's own keys are never seen again
            key, value = cache.update(key, value, self.layer)
        key = torch.cat((key, rotate(self.k_norm(self.heads(self.k_proj(x))), block_rotation)), dim=2)
        value = torch.cat((value, self.heads(self.v_proj(x))), dim=2)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, *attention):
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(PreTrainedModel):
    """The drafter. `cache = model.new_cache()` holds the context between the cycles of one text."""

    config_class = Qwen3Config
    base_model_prefix = ""
    _no_split_modules = ["DFlashLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        captured = len(config.dflash_config["target_layer_ids"])
        self.fc = nn.Linear(captured * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = DFlashNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, DFlashNorm):
            nn.init.ones_(module.weight)

    @staticmethod
    def new_cache():
        return DynamicCache()

    def sight(self, layer):
        """The layer's window, None without one, and whether its blocks are causal."""
        slides = self.config.layer_types[layer] == "sliding_attention"
        causal = getattr(self.config, "is_causal", None)
        if causal is None:
            causal = self.config.dflash_config.get("causal")
        return self.config.sliding_window if slides else None, slides if causal is None else causal

    def forward(self, noise_embedding, target_hidden, position_ids, past_key_values=None, **unused):
        """Hidden states [B, T, H] of one block, for the target's head.

        noise_embedding: [B, T, H], the target's embeddings of the block's tokens. target_hidden: [B, new, K*H], the
        features of the context tokens that are not in the cache yet; they join it. position_ids: [B, new + T], first
        those of the new context tokens, then the block's; a text begins at 0.
        """
        new, block = target_hidden.shape[1], noise_embedding.shape[1]
        scale = self.config.dflash_config.get("output_multiplier") or 1.0
        held = past_key_values.get_seq_length() if past_key_values is not None else 0
        context = self.hidden_norm(self.fc(target_hidden))
        context_rotation = rotation(self.config, position_ids[:, :new])
        block_rotation = rotation(self.config, position_ids[:, new:])
        x = noise_embedding
        for index, layer in enumerate(self.layers):
            mask = block_mask(held + new, block, *self.sight(index), x.device)
            x = layer(x, context, context_rotation, block_rotation, mask, past_key_values)
        return self.norm(x) * scale if scale != 1 else self.norm(x)
