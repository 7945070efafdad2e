"""What an export has to be, and whether one is: run in a process of its own, which knows nothing of the writer's.

    python -m trainer.readback FOLDER PROBE hf|speculators

PROBE is a file of `write_probe`: the drafter's config, inputs of some cycles of decoding, and what the trainer's own
model makes of them. Ends with 0, or with 1 and one line for each fault on stdout. What transformers makes of
an export: loaded_alone.py.
"""

# safetensors' functions are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.checkpoint import CONFIG_FILE, MODEL_FILE, CheckpointError, load_drafter
from trainer.draft import DraftCache, DraftModel
from trainer.draft_config import DraftConfig
from trainer.loaded_alone import CYCLES, logit_faults
from trainer.speculators import EMBEDDING, HEAD

Format = Literal["hf", "speculators"]

MISSING = "missing"  # of a key that shall not be, or is not, in a config.json


def tensor_shapes(config: DraftConfig, to: Format) -> dict[str, list[int]]:
    """The tensors of the format: 11 a layer and 3 more; speculators' has the target's embedding and head as well."""
    wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"fc": [hidden, len(config.target_layer_ids) * hidden], "hidden_norm": [hidden], "norm": [hidden]}
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": [hidden],
                "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [wide, hidden],
                "self_attn.k_proj": [narrow, hidden],
                "self_attn.v_proj": [narrow, hidden],
                "self_attn.o_proj": [hidden, wide],
                "self_attn.q_norm": [config.head_dim],
                "self_attn.k_norm": [config.head_dim],
                "mlp.gate_proj": [inner, hidden],
                "mlp.up_proj": [inner, hidden],
                "mlp.down_proj": [hidden, inner],
            }.items()
        }
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    return named if to == "hf" else {**named, EMBEDDING: [config.vocab_size, hidden], HEAD: [config.vocab_size, hidden]}


def config_values(config: DraftConfig, to: Format, dtype: str) -> dict[str, Any]:
    """What loaders look for in the config.json, by dotted key."""
    transformer = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters.rope_theta": config.rope_theta,
        "rope_parameters.rope_type": (config.rope_scaling or {}).get("rope_type", "default"),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.num_layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if to == "hf":
        told_again = config.causal is True or (config.causal is False and config.sliding_window is not None)
        return {
            **transformer,
            "architectures": ["DFlashDraftModel"],
            "auto_map.AutoModel": "dflash.DFlashDraftModel",
            "dtype": dtype,
            "torch_dtype": dtype,
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            "is_causal": MISSING if config.causal is None else config.causal,
            "dflash_config.causal": config.causal if told_again else MISSING,
            "dflash_config.input_embedding_scale": MISSING if config.embedding_scale == 1 else config.embedding_scale,
            "dflash_config.output_multiplier": MISSING if config.logit_scale == 1 else config.logit_scale,
            "dflash_config.block_size": config.block_size,
            "dflash_config.mask_token_id": config.mask_token_id,
            "dflash_config.target_layer_ids": list(config.target_layer_ids),
        }
    return {
        **{f"transformer_layer_config.{key}": value for key, value in transformer.items()},
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config.algorithm": "dflash",
        "speculators_config.default_proposal_method": "greedy",
        "dtype": dtype,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [id + 1 for id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": False,
    }


# --- the writer's side ---


def write_probe(file: Path, model: DraftModel, head_VH: Tensor | None, dtype: torch.dtype) -> None:
    """Inputs drawn from a fixed seed, and the logits of the trainer's own model, its weights rounded to `dtype`.

    head_VH: the target's; None: a random one, where the format holds none.
    """
    config = model.config
    own = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=own)

    rounded = DraftModel(config)
    rounded.load_state_dict({name: tensor.to(dtype).float() for name, tensor in model.state_dict().items()})
    head_VH = drawn(min(config.vocab_size, 256), config.hidden_size) if head_VH is None else head_VH.to(dtype).float()
    cache = DraftCache()
    tensors, at = {"head": head_VH}, 0
    for cycle, new in enumerate([(config.sliding_window or 0) + config.block_size, 3, 1][:CYCLES]):
        features, embeds = drawn(1, new, config.feature_size), drawn(1, config.block_size, config.hidden_size)
        positions = torch.arange(at, at + new + config.block_size)[None]
        with torch.no_grad():
            hidden = config.logit_scale * rounded.forward_cached(features, embeds, positions, cache)
        logits = hidden @ head_VH.T
        named = {"features": features, "embeds": embeds, "positions": positions, "logits": logits}
        tensors |= {f"{cycle}.{name}": tensor.contiguous() for name, tensor in named.items()}
        at += new
    fields = {**asdict(config), "rope_scaling": config.rope_scaling and dict(config.rope_scaling)}
    save_file(tensors, file, {"config": json.dumps(fields), "dtype": str(dtype).removeprefix("torch.")})


# --- the reader's side ---


def faults(folder: Path, probe: Path, to: Format) -> list[str]:
    """What is not as it should be, a line each; none: the export is good."""
    with safe_open(probe, framework="pt") as opened:
        about = cast("dict[str, str]", opened.metadata())
    fields: dict[str, Any] = json.loads(about["config"])
    for name in ("target_layer_ids", "layer_types"):
        fields[name] = tuple(fields[name])
    config, dtype, expected = DraftConfig(**fields), about["dtype"], load_file(probe)

    found = _config_faults(json.loads((folder / CONFIG_FILE).read_bytes()), config_values(config, to, dtype))
    weights = load_file(folder / MODEL_FILE)
    found += _tensor_faults(weights, tensor_shapes(config, to), dtype)
    try:
        model, read = load_drafter(folder, "cpu", torch.float32)
    except CheckpointError as error:
        return [*found, f"the trainer can't load it: {error}"]
    if read != config:
        found.append(f"the trainer reads another config: {read}, wanted {config}")
    cache = DraftCache()

    def ours(features: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
        return config.logit_scale * model.forward_cached(features, embeds, positions, cache)

    head = weights[HEAD].float() if HEAD in weights else expected["head"]
    return found + logit_faults("the trainer", ours, head, expected)


def _config_faults(data: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in wanted.items():
        place: Any = data
        for part in key.split("."):
            place = place.get(part, MISSING) if isinstance(place, Mapping) else MISSING
        if place != value:
            found.append(f"config.json: {key} is {place!r}, wanted {value!r}")
    return found


def _tensor_faults(weights: Mapping[str, Tensor], shapes: Mapping[str, list[int]], dtype: str) -> list[str]:
    found = [f"tensor {name} is missing" for name in sorted(shapes.keys() - weights.keys())]
    found += [f"tensor {name} is unknown" for name in sorted(weights.keys() - shapes.keys())]
    for name in sorted(shapes.keys() & weights.keys()):
        is_now = list(weights[name].shape), str(weights[name].dtype).removeprefix("torch.")
        if is_now != (shapes[name], dtype):
            found.append(f"tensor {name} is {is_now[1]} {is_now[0]}, wanted {dtype} {shapes[name]}")
    return found


def main(words: Sequence[str]) -> int:
    folder, probe, to = words
    lines = faults(Path(folder), Path(probe), cast(Format, to))
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
