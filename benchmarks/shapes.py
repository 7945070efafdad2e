"""Models of random weights that the speed benchmarks run on, and who else is there to be measured."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.draft_config import DraftConfig, default_target_layer_ids


@dataclass(frozen=True)
class Size:
    """A Qwen3 target, the drafter of its shape, and the rows."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    row_tokens: int
    anchors: int
    draft_layers: int = 5
    block: int = 16

    def target_config(self, layers: int | None = None) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(
            hidden_size=self.hidden, num_hidden_layers=layers or self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
            vocab_size=self.vocabulary, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip

    def draft(self) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.draft_layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            rms_norm_eps=1e-6,
            block_size=self.block,
            target_layer_ids=default_target_layer_ids(self.layers, 5),
            num_target_layers=self.layers,
            mask_token_id=self.vocabulary - 1,
            max_position_embeddings=40960,
            rope_theta=1e6,
        )

    def model(self, device: torch.device) -> Any:
        """The target with random weights, bfloat16 on a GPU. The same in every process."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            return AutoModelForCausalLM.from_config(self.target_config(), dtype=dtype)


def save(found: dict[str, Any], file: Path | None) -> None:
    """What has been measured so far: a benchmark that is ended early, or fails, keeps that."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def why(error: Exception) -> str:
    """A failure in short, to stand in a figure's place."""
    return f"{type(error).__name__}: {error}"[:400]


SIZES = {
    "tiny": Size(64, 8, 4, 2, 16, 128, 512, row_tokens=256, anchors=16, draft_layers=2),
    "qwen3-4b": Size(2560, 36, 32, 8, 128, 9728, 151936, row_tokens=4096, anchors=512),
    "qwen3-8b": Size(4096, 36, 32, 8, 128, 12288, 151936, row_tokens=4096, anchors=512),
}


def specforge_step(size: Size, device: torch.device) -> Any:
    """SpecForge's own draft step, forward, backward and AdamW, over one row; None where it is not installed.

    It has no documents: of a packed row it takes the whole as one.
    """
    try:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
    except ImportError:
        return None
    on_gpu = device.type == "cuda"
    attention, dtype = "flex_attention" if on_gpu else "sdpa", torch.bfloat16 if on_gpu else torch.float32
    draft = size.draft()
    config = size.target_config(size.draft_layers)
    config.num_target_layers, config.block_size = size.layers, size.block
    config.dflash_config = {"target_layer_ids": list(draft.target_layer_ids), "mask_token_id": draft.mask_token_id}
    config._attn_implementation = attention
    with torch.device(device):
        drafter = DFlashDraftModel(config).to(dtype)
        head = torch.nn.Linear(size.hidden, size.vocabulary, bias=False, dtype=dtype).requires_grad_(False)
        embedding = torch.nn.Embedding(size.vocabulary, size.hidden, dtype=dtype).requires_grad_(False)
    model = OnlineDFlashModel(drafter, head, embedding, draft.mask_token_id, size.block, attention, size.anchors, 7.0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=on_gpu)

    def step(ids_BS: torch.Tensor, features_BSF: torch.Tensor) -> None:
        loss, *_ = model(ids_BS, features_BSF, torch.ones_like(ids_BS, dtype=torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
