"""Small drafters with every kind of attention, and rows for them without a target: its part is drawn at random."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.blocks import Blocks, dense_mask, make_blocks
from trainer.draft import DraftModel
from trainer.draft_config import FULL, SLIDING, DraftConfig

CONFIG = DraftConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=128,
    rms_norm_eps=1e-6,
    block_size=4,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    mask_token_id=127,
    max_position_embeddings=256,
)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: Mapping[str, DraftConfig] = {
    "full": CONFIG,
    "causal": replace(CONFIG, causal=True),
    "sliding": replace(CONFIG, layer_types=(SLIDING, SLIDING), sliding_window=6),
    "sliding causal": replace(CONFIG, layer_types=(SLIDING, SLIDING), sliding_window=5, causal=True),
    "mixed": replace(CONFIG, layer_types=(SLIDING, FULL), sliding_window=5, causal=None),
}
"""By what their layers see; the last one's sliding layer is causal, its full one is not."""


def drafter(config: DraftConfig = CONFIG, dtype: torch.dtype = torch.float64) -> DraftModel:
    """Random weights, norms included, large enough that everything matters."""
    torch.manual_seed(0)
    model = DraftModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return model.to(dtype).requires_grad_(False)


class Given:
    """A row of random documents with blocks at chosen anchors, random features and embeddings."""

    def __init__(
        self,
        lengths: Sequence[int],
        anchors: Sequence[int],
        row_tokens: int = 24,
        config: DraftConfig = CONFIG,
        dtype: torch.dtype = torch.float64,
        keep: Sequence[bool] | None = None,
    ) -> None:
        self.config, self.anchors, self.row_tokens = config, list(anchors), row_tokens
        draw = torch.Generator().manual_seed(1)
        tokens = sum(lengths)
        padding = (0, row_tokens - tokens)
        self.ids = F.pad(torch.randint(0, 120, (1, tokens), generator=draw), padding)
        self.loss_mask = F.pad(torch.ones(1, tokens, dtype=torch.bool), padding)
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        self.document_ids = F.pad(torch.tensor([numbers], dtype=torch.int64), padding, value=-1)
        places = [place for length in lengths for place in range(length)]
        self.positions = F.pad(torch.tensor([places], dtype=torch.int64), padding)
        self.keep = torch.tensor([list(keep) if keep is not None else [True] * len(anchors)])

        def drawn(seed: int, *shape: int) -> Tensor:
            own = torch.Generator().manual_seed(seed)
            return torch.randn(*shape, generator=own, dtype=torch.float64).to(dtype)

        self.features = drawn(2, 1, row_tokens, config.feature_size)
        self.table = drawn(3, config.vocab_size, config.hidden_size)
        self.head = drawn(4, config.vocab_size, config.hidden_size)

    def blocks(self) -> Blocks:
        return make_blocks(
            self.ids,
            self.loss_mask,
            self.document_ids,
            self.positions,
            torch.tensor([self.anchors]),
            self.keep,
            block_size=self.config.block_size,
            mask_token_id=self.config.mask_token_id,
        )

    def embeds(self, blocks: Blocks) -> Tensor:
        return F.embedding(blocks.ids_BQ, self.table)

    def hidden(self, model: DraftModel, blocks: Blocks | None = None, embeds: Tensor | None = None) -> Tensor:
        """The training forward, [N, T, H]."""
        blocks = blocks or self.blocks()
        masks = tuple(dense_mask(blocks, self.row_tokens, sight) for sight in self.config.sights)
        embeds = self.embeds(blocks) if embeds is None else embeds
        hidden = model(self.features, embeds, self.positions, blocks.positions_BQ, masks)
        return hidden[0].unflatten(0, (len(self.anchors), -1))

    def logits(self, model: DraftModel, blocks: Blocks | None = None, embeds: Tensor | None = None) -> Tensor:
        """[N, T, V]"""
        return self.hidden(model, blocks, embeds) @ self.head.T
