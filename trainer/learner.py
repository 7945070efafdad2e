"""The drafter at work: forward, loss, gradients, update. One per drafter thread; knows no files and no config file.

On CUDA everything runs in bfloat16 under autocast, with flex attention, compiled once; on the CPU in float32 with
scaled_dot_product_attention and the mask written out (flex attention has no backward there).
"""

# torch.compile and tolist are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from trainer.blocks import dense_mask, make_blocks, tile_mask, whole_tiles
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch, RowBatch
from trainer.loss import ChunkLoss, LossTerms, Weighting, blocks_loss, chunk_loss
from trainer.target import TargetModel


@dataclass(frozen=True)
class StepFigures:
    """What a step was like; on the device until read, so that steps needn't wait for it."""

    figures: Tensor  # [3]: loss, accuracy, acceptance length
    grad_norm: Tensor  # before clipping

    def read(self) -> tuple[float, float, float, float]:
        """Waits for the device: loss, accuracy, acceptance length, gradient norm."""
        values = cast(list[float], torch.cat((self.figures, self.grad_norm[None].float())).tolist())
        loss, accuracy, accept, grad_norm = values
        return loss, accuracy, accept, grad_norm


@torch.no_grad()
def features_of(target: TargetModel, rows: RowBatch, draft: DraftConfig, device: torch.device) -> FeatureBatch:
    """The target's part: features of the rows, the blocks and their embeddings, brought to the drafter's device."""
    tokens = int((rows.document_ids_BS >= 0).sum())  # before it moves: rows are still on the CPU
    here = rows.to(target.device)
    anchors_BN, keep_BN = here.anchors_BN, here.keep_BN
    if device.type == "cuda":
        anchors_BN, keep_BN = whole_tiles(anchors_BN, keep_BN, draft.block_size)
    features_BSF = target.features(here.ids_BS, here.document_ids_BS, here.positions_BS, draft.target_layer_ids)
    blocks = make_blocks(
        here.ids_BS,
        here.loss_mask_BS,
        here.document_ids_BS,
        here.positions_BS,
        anchors_BN,
        keep_BN,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
    )
    embeds_BQH = target.embedding(blocks.ids_BQ)
    return FeatureBatch(features_BSF, embeds_BQH, here.positions_BS, blocks, tokens).to(device)


class Learner:
    """A drafter with its optimiser."""

    def __init__(
        self,
        model: DraftModel,
        head_VH: Tensor,
        optimizer: torch.optim.Optimizer,
        weighting: Weighting,
        *,
        chunk_blocks: int,
        clip: float,
    ) -> None:
        """head_VH: the target's head, on the drafter's device. clip: highest gradient norm."""
        self.model, self.optimizer = model, optimizer
        self._head_VH, self._weighting, self._chunk_blocks, self._clip = head_VH, weighting, chunk_blocks, clip
        self.device = head_VH.device
        self._forward: Callable[..., Tensor] = model
        self._chunk: ChunkLoss = chunk_loss
        if self.device.type == "cuda":
            self._forward = cast(Callable[..., Tensor], torch.compile(model, dynamic=False, fullgraph=True))
            self._chunk = cast(ChunkLoss, torch.compile(chunk_loss, dynamic=False, fullgraph=True))
        self._terms: LossTerms | None = None  # of the step under way

    def terms(self, batch: FeatureBatch) -> LossTerms:
        """Forward and loss of a batch."""
        blocks = batch.blocks
        row_tokens = batch.positions_BS.shape[1]
        on_gpu = self.device.type == "cuda"
        mask = tile_mask if on_gpu else dense_mask
        attention = tuple(mask(blocks, row_tokens, sight) for sight in self.model.config.sights)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            hidden_BQH = self._forward(
                batch.features_BSF, batch.embeds_BQH, batch.positions_BS, blocks.positions_BQ, attention
            )
        return blocks_loss(
            hidden_BQH.unflatten(1, (blocks.anchors_BN.shape[1], -1)),
            self._head_VH,
            blocks.labels_BNP,
            blocks.label_mask_BNP,
            blocks.keep_BN,
            self._weighting,
            self._chunk_blocks,
            self._chunk,
        )

    def learn(self, batch: FeatureBatch) -> None:
        """Adds a batch's gradients to the step under way."""
        terms = self.terms(batch)
        terms.loss_sum.backward()
        done = terms.detached()
        self._terms = done if self._terms is None else self._terms + done

    def update(self, lr: float) -> StepFigures:
        """Ends the step: gradients divided by the normaliser of all its batches, clipped, applied."""
        assert self._terms is not None, "update without learn"
        terms, self._terms = self._terms, None
        scale = 1 / terms.normaliser.clamp(min=1e-12)  # 0 when no row had anything to learn from
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepFigures(terms.figures(), grad_norm)

    @torch.no_grad()
    def measure(self, batch: FeatureBatch) -> LossTerms:
        """The loss of a batch that is not learned from."""
        return self.terms(batch)

    def warm_up(self, batch: FeatureBatch) -> None:
        """Compiles everything that `learn` and `measure` will run, and leaves no trace in the drafter."""
        self.terms(batch).loss_sum.backward()
        self.measure(batch)
        self.optimizer.zero_grad(set_to_none=True)
