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

# torch leaves `unflatten` untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trainer.blocks import Blocks
from trainer.streams import moved


def block_embeds(anchor_embeds_BNH: Tensor, mask_embed_H: Tensor, block_size: int) -> Tensor:
    """The embeddings of the blocks' tokens, [B, Q, H]: the anchor's, then masks."""
    batch, count, _ = anchor_embeds_BNH.shape
    mask_BNPH = mask_embed_H.expand(batch, count, block_size - 1, -1)
    return torch.cat((anchor_embeds_BNH[:, :, None], mask_BNPH), dim=2).flatten(1, 2)


@dataclass(frozen=True)
class RowBatch:
    """Packed rows and the anchors drawn in them."""

    ids_BS: Tensor  # int64; 0 where padding
    loss_mask_BS: Tensor  # bool: the assistant's tokens
    document_ids_BS: Tensor  # int64
    positions_BS: Tensor  # int64
    anchors_BN: Tensor  # int64
    keep_BN: Tensor  # bool: False for a slot that found no anchor
    numbers: tuple[
        int, ...
    ] = ()  # of the rows; as `lines`, for who looks at a batch: a bad step is named by feed.StepSource
    lines: tuple[tuple[int, ...], ...] = ()  # for each row the source lines of its documents
    replica: int = 0  # the drafter that gets it

    def to(self, device: torch.device) -> "RowBatch":
        """The same on another device; copies from pinned memory overlap with the work there."""
        return replace(self, **{name: moved(tensor, device) for name, tensor in self._tensors().items()})

    def pinned(self) -> "RowBatch":
        """The same in page-locked memory, from where a GPU copies on its own."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class FeatureBatch:
    """What the drafter learns from: the target's view of the rows, and the blocks to predict.

    Of the blocks' embeddings only what differs travels: the anchors' and the mask's, T times less than all. The
    teacher's states travel by token, not by slot, for slots of neighbouring blocks predict the same tokens.
    """

    features_BSF: Tensor
    anchor_embeds_BNH: Tensor  # the target's embedding of the anchors' tokens
    mask_embed_H: Tensor  # and of the mask token
    positions_BS: Tensor
    blocks: Blocks
    forward_blocks: int  # blocks of a row that one forward takes: all in training, a part when all anchors are measured
    tokens: int  # of conversations, prompts included and padding not
    rows: RowBatch  # what it was made of; stays on the host
    final_BSH: Tensor | None = None  # what the target's head reads; only when the objective asks for its distribution
    ready: torch.cuda.Event | None = None  # when it is all there, on the drafter's GPU

    def sent(self) -> "FeatureBatch":
        """Called last by who makes it: what the current stream of its device holds now is what makes it ready."""
        if not self.features_BSF.is_cuda:
            return self
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.features_BSF.device))
        return replace(self, ready=ready)

    def received(self) -> "FeatureBatch":
        """Called first by who uses it: the current stream of its device waits until it is ready, the host does not.

        The memory goes back to the maker's stream: the allocator has to know that this one reads it, too.
        """
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.features_BSF.device)
            stream.wait_event(self.ready)
            for tensor in self._on_device():
                tensor.record_stream(stream)
        return self

    def device_bytes(self) -> int:
        """What it takes on the drafter's device."""
        return sum(tensor.nbytes for tensor in self._on_device())

    def _on_device(self) -> list[Tensor]:
        values = [getattr(holder, f.name) for holder in (self, self.blocks) for f in fields(holder)]
        return [value for value in values if isinstance(value, Tensor)]

    def to(self, device: torch.device) -> "FeatureBatch":
        """The same on the drafter's device. On the CPU in float32, as the drafter: there is no autocast there."""

        def wide(tensor: Tensor) -> Tensor:
            return moved(tensor, device, torch.promote_types(tensor.dtype, torch.float32) if on_cpu else None)

        on_cpu = device.type == "cpu"
        return replace(
            self,
            features_BSF=wide(self.features_BSF),
            anchor_embeds_BNH=wide(self.anchor_embeds_BNH),
            mask_embed_H=wide(self.mask_embed_H),
            positions_BS=moved(self.positions_BS, device),
            blocks=self.blocks.to(device),
            final_BSH=None if self.final_BSH is None else moved(self.final_BSH, device),
        )

    def forwards(self) -> int:
        """How many forwards take all its blocks."""
        return self.blocks.anchors_BN.shape[1] // self.forward_blocks

    def part(self, index: int) -> "FeatureBatch":
        """The blocks of one forward. Whole copies, so that each forward's tensors are laid out alike: compiled code is
        for one layout, and a view into a longer batch would be compiled anew.
        """
        size = self.forward_blocks
        here = slice(index * size, (index + 1) * size)
        count = self.blocks.anchors_BN.shape[1]

        def cut(values_BN: Tensor) -> Tensor:
            return values_BN[:, here].clone(memory_format=torch.contiguous_format)

        def cut_queries(values_BQ: Tensor) -> Tensor:
            return cut(values_BQ.unflatten(1, (count, -1))).flatten(1)

        blocks = self.blocks
        queries = {"ids_BQ", "positions_BQ"}
        parts = {f.name: (cut_queries if f.name in queries else cut)(getattr(blocks, f.name)) for f in fields(blocks)}
        return replace(self, anchor_embeds_BNH=cut(self.anchor_embeds_BNH), blocks=Blocks(**parts))

    def embeds_BQH(self) -> Tensor:
        """The embeddings of the blocks' tokens: the anchor, then masks."""
        return block_embeds(self.anchor_embeds_BNH, self.mask_embed_H, self.blocks.labels_BNP.shape[2] + 1)

    def teacher_BNPH(self) -> Tensor | None:
        """What the target's head reads to predict slot k = 1..P of the block at a: its state at token a + k - 1."""
        if self.final_BSH is None:
            return None
        anchors_BN, slots = self.blocks.anchors_BN, self.blocks.labels_BNP.shape[2]
        # Slots beyond the row are not supervised: what they find here does not matter.
        index_BNP = anchors_BN[..., None] + torch.arange(slots, device=anchors_BN.device)
        index_BM = index_BNP.clamp(max=self.final_BSH.shape[1] - 1).flatten(1)
        index_BMH = index_BM[..., None].expand(-1, -1, self.final_BSH.shape[2])
        return self.final_BSH.gather(1, index_BMH).view(*index_BNP.shape, -1)
