"""What flows from the rows to the loss, and the shape legend of the trainer.

Shapes are written in names and comments by these letters:

    B  rows in a batch                  H  hidden size of target and drafter
    S  tokens in a row                  F  feature size: captured layers * H
    N  blocks (anchors) in a row        V  vocabulary
    T  slots of a block, anchor included
    P  predicted slots of a block: T - 1
    Q  block tokens in a row: N * T

A document is one conversation; a row holds several. `document_ids` count them from 0, -1 is padding; `positions`
restart at 0 with each document.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.blocks import Blocks, moved


@dataclass(frozen=True)
class RowBatch:
    """Packed rows and the anchors drawn in them."""

    ids_BS: Tensor  # int64; 0 where padding
    loss_mask_BS: Tensor  # bool: the assistant's tokens
    document_ids_BS: Tensor  # int64
    positions_BS: Tensor  # int64
    anchors_BN: Tensor  # int64
    keep_BN: Tensor  # bool: False for a slot that found no anchor

    def to(self, device: torch.device) -> "RowBatch":
        """The same on another device; copies from pinned memory overlap with the work there."""
        return RowBatch(*(moved(getattr(self, f.name), device) for f in fields(self)))

    def pinned(self) -> "RowBatch":
        """The same in page-locked memory, from where a GPU copies on its own."""
        return RowBatch(*(getattr(self, f.name).pin_memory() for f in fields(self)))


@dataclass(frozen=True)
class FeatureBatch:
    """What the drafter learns from: the target's view of the rows, and the blocks to predict."""

    features_BSF: Tensor
    embeds_BQH: Tensor  # the target's embedding of the blocks' tokens
    positions_BS: Tensor
    blocks: Blocks
    tokens: int  # of conversations, prompts included and padding not

    def to(self, device: torch.device) -> "FeatureBatch":
        """The same on the drafter's device. On the CPU in float32, as the drafter: there is no autocast there."""
        dtype = torch.float32 if device.type == "cpu" else None
        return FeatureBatch(
            moved(self.features_BSF, device, dtype),
            moved(self.embeds_BQH, device, dtype),
            moved(self.positions_BS, device),
            self.blocks.to(device),
            self.tokens,
        )
