"""Anchors, blocks and the attention mask. Shapes: see features.py.

A block starts at an anchor `a`, a token of an answer. Its slot 0 holds that token, the others the mask token; slot k
predicts token a + k. The block sees the features of its document before the anchor, strictly: while decoding, the
anchor's own feature doesn't exist yet, and training with it leaks the next token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from trainer.streams import moved

TILE = 128  # side of a flex attention tile; a multiple of what its kernels work on

# (row, head, query, key) -> seen; all four are indices that broadcast.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sight:
    """What the blocks of a layer see; as a default everything that training may show.

    window: slot k of a block at anchor a sees only the context tokens after a + k - window (the slot's own place in the
        document, as SGLang and SpecForge count; others count from the anchor). None: the whole document before a.
    causal: a slot sees only itself and the slots before it in its block, instead of the whole block.
    """

    window: int | None = None
    causal: bool = False


EVERYTHING = Sight()


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch of rows."""

    anchors_BN: Tensor  # int64, index in the row
    starts_BN: Tensor  # int64: where the anchor's document begins
    keep_BN: Tensor  # bool
    ids_BQ: Tensor  # int64: each block's anchor token, then masks
    positions_BQ: Tensor  # int64, in the document
    labels_BNP: Tensor  # int64; 0 where label_mask is False
    label_mask_BNP: Tensor  # bool: supervised, and in the anchor's document

    def to(self, device: torch.device) -> "Blocks":
        return Blocks(*(moved(getattr(self, f.name), device) for f in fields(self)))


def anchor_candidates(
    loss_mask_S: npt.NDArray[np.bool_], document_ids_S: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Where a block may start: a supervised token that a supervised token of the same document follows. [S]"""
    candidates = np.zeros(len(loss_mask_S), dtype=np.bool_)
    together = (document_ids_S[:-1] == document_ids_S[1:]) & (document_ids_S[:-1] >= 0)
    candidates[:-1] = loss_mask_S[:-1] & loss_mask_S[1:] & together
    return candidates


def share(counts: Sequence[int], total: int) -> list[int]:
    """Divides `total` among takers of at most `counts` each: equally, and what one can't use goes to the others."""
    shares = [0] * len(counts)
    left = min(total, sum(counts))
    for rank, taker in enumerate(sorted(range(len(counts)), key=lambda i: counts[i])):
        shares[taker] = min(counts[taker], left // (len(counts) - rank))
        left -= shares[taker]
    return shares


def sample_anchors(
    loss_mask_S: npt.NDArray[np.bool_],
    document_ids_S: npt.NDArray[np.int64],
    count: int,
    seed: Sequence[int],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draws `count` anchors of a row, ascending, each document its share, so that a short one is not starved.

    Where there are more documents than anchors, it is drawn which of them get one.
    Returns anchors [N] and keep [N]; slots for which the row has no candidate left come last, anchor 0, keep False.
    The same seed draws the same anchors.
    """
    random = np.random.default_rng(seed)
    candidates = np.flatnonzero(anchor_candidates(loss_mask_S, document_ids_S))
    by_document = [candidates[document_ids_S[candidates] == d] for d in np.unique(document_ids_S[candidates])]
    if len(by_document) > count:
        by_document = [by_document[int(i)] for i in random.permutation(len(by_document))[:count]]
    shares = share([len(own) for own in by_document], count)
    drawn = [random.choice(own, size, replace=False) for own, size in zip(by_document, shares, strict=True)]
    chosen = np.sort(np.concatenate(drawn)) if drawn else candidates
    anchors = np.zeros(count, dtype=np.int64)
    anchors[: len(chosen)] = chosen
    return anchors, np.arange(count) < len(chosen)


def whole_tiles(anchors_BN: Tensor, keep_BN: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Anchors and keep with as many empty slots added as make the queries whole tiles.

    With fewer than 128 queries flex attention compiles to its decoding kernel, which has no choice that fits our tiles
    (torch 2.11: NoValidChoicesError).
    """
    step = TILE // math.gcd(TILE, block_size)
    extra = -anchors_BN.shape[1] % step
    return F.pad(anchors_BN, (0, extra)), F.pad(keep_BN, (0, extra))


def make_blocks(
    ids_BS: Tensor,
    loss_mask_BS: Tensor,
    document_ids_BS: Tensor,
    positions_BS: Tensor,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks at given anchors: their tokens, positions, and labels confined to the anchor's document.

    What is not to be kept is put at anchor 0, where there is no context to see.
    """
    anchors_BN = torch.where(keep_BN, anchors_BN, 0)
    row_tokens = ids_BS.shape[1]
    slots_T = torch.arange(block_size, device=ids_BS.device)
    index_BNT = anchors_BN[..., None] + slots_T
    inside_BNT = index_BNT < row_tokens
    index_BNT = index_BNT.clamp(max=row_tokens - 1)

    def at(values_BS: Tensor) -> Tensor:
        return values_BS.gather(1, index_BNT.flatten(1)).view_as(index_BNT)

    document_BNT = at(document_ids_BS)
    same_BNT = inside_BNT & (document_BNT == document_BNT[..., :1]) & (document_BNT >= 0)
    mask_BNP = (same_BNT & at(loss_mask_BS) & keep_BN[..., None])[..., 1:]
    tokens_BNT = at(ids_BS)
    ids_BNT = torch.where(slots_T == 0, tokens_BNT, mask_token_id)
    anchor_position_BN = positions_BS.gather(1, anchors_BN)
    return Blocks(
        anchors_BN=anchors_BN,
        starts_BN=anchors_BN - anchor_position_BN,
        keep_BN=keep_BN,
        ids_BQ=ids_BNT.flatten(1),
        positions_BQ=(anchor_position_BN[..., None] + slots_T).flatten(1),
        labels_BNP=torch.where(mask_BNP, tokens_BNT[..., 1:], 0),
        label_mask_BNP=mask_BNP,
    )


def visibility(blocks: Blocks, row_tokens: int, sight: Sight = EVERYTHING, *, merged: bool = False) -> Predicate:
    """The mask as a predicate over queries [0, Q) and keys: first the S context tokens, then the Q block tokens.

    A block sees its document before its anchor, and itself, both as far as `sight` goes. A slot without an anchor
    (anchor 0) sees only itself: no query is left with nothing to see.

    merged: queries and keys of several heads lie behind each other; none sees another head's.
    """
    anchors_BN, starts_BN = blocks.anchors_BN, blocks.starts_BN
    count = anchors_BN.shape[1]
    block_size = blocks.ids_BQ.shape[1] // count

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        one_head: Tensor | bool = True
        if merged:
            queries, keys = count * block_size, row_tokens + count * block_size
            one_head, query, key = query // queries == key // keys, query % queries, key % keys
        # flex rounds the queries up to whole tiles: without the clamp the last ones index out of bounds.
        block = (query // block_size).clamp(max=count - 1)
        anchor = anchors_BN[row, block]
        context = (key >= starts_BN[row, block]) & (key < anchor)
        own = (key >= row_tokens) & ((key - row_tokens) // block_size == query // block_size)
        if sight.window is not None:
            context = context & (key > anchor + query % block_size - sight.window)
        if sight.causal:
            own = own & (key - row_tokens <= query)
        return (context | own) & one_head if merged else context | own

    return seen


def dense_mask(blocks: Blocks, row_tokens: int, sight: Sight = EVERYTHING) -> Tensor:
    """The mask written out, [B, 1, Q, S+Q], True = seen: for scaled_dot_product_attention and small shapes."""
    batch, queries = blocks.ids_BQ.shape
    device = blocks.ids_BQ.device
    row = torch.arange(batch, device=device)[:, None, None, None]
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(row_tokens + queries, device=device)
    return visibility(blocks, row_tokens, sight)(row, torch.zeros_like(row), query, key)


def cached_mask(context: int, block_size: int, sight: Sight, device: torch.device) -> Tensor | None:
    """The mask of one block after `context` cached tokens of its document, [T, context + T]; None: everything is seen.

    The anchor stands at position `context`: decoding begins its document at 0.
    """
    if not sight.causal and (sight.window is None or context + block_size - 1 < sight.window):
        return None
    slot = torch.arange(block_size, device=device)[:, None]
    key = torch.arange(context + block_size, device=device)
    seen = torch.ones(block_size, context + block_size, dtype=torch.bool, device=device)
    if sight.window is not None:
        seen &= (key >= context) | (key > context + slot - sight.window)
    if sight.causal:
        seen &= key <= context + slot
    return seen


def listed_tiles(tiles_BIK: Tensor) -> tuple[Tensor, Tensor]:
    """Per line how many tiles, [B, 1, I], and which, [B, 1, I, K]: those first, in order. The axis is for the heads.

    The j-th is behind all places up to which j or fewer are counted: so that nothing is sorted, which on a GPU takes
    longer than all the rest.
    """
    reached_BIK = tiles_BIK.cumsum(-1, dtype=torch.int32)
    last = tiles_BIK.shape[-1] - 1
    rank_K = torch.arange(last + 1, device=tiles_BIK.device)
    place_BIK = (reached_BIK[..., None, :] <= rank_K[:, None]).sum(-1, dtype=torch.int32).clamp(max=last)
    return reached_BIK[..., -1][:, None].contiguous(), place_BIK[:, None].contiguous()


Lists = tuple[Tensor, ...]  # of a BlockMask: counts and places of partly and of fully seen tiles, then transposed


def tile_lists(
    anchors_BN: Tensor,
    starts_BN: Tensor,
    keep_BN: Tensor,
    block_size: int,
    row_tokens: int,
    sight: Sight = EVERYTHING,
    merged_heads: int = 1,
) -> Lists:
    """The tiles of `tile_mask`. The same shapes for the same N, T and S."""
    count = anchors_BN.shape[1]
    queries = count * block_size
    device = anchors_BN.device
    query_tiles, key_tiles = -(-queries // TILE), -(-(row_tokens + queries) // TILE)
    first_query_I = torch.arange(query_tiles, device=device) * TILE
    last_query_I = (first_query_I + TILE - 1).clamp(max=queries - 1)
    first_block_I, last_block_I = first_query_I // block_size, last_query_I // block_size

    # Which blocks have queries in which tile; [query tile, N].
    block_N = torch.arange(count, device=device)
    touches_IN = (block_N >= first_block_I[:, None]) & (block_N <= last_block_I[:, None])

    def lowest(values_BN: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values_BN[:, None], row_tokens).amin(-1, keepdim=True)

    def highest(values_BN: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values_BN[:, None], 0).amax(-1, keepdim=True)

    # The first context token that a block's first slot sees, and its last slot, whose window begins latest.
    first_BN = latest_BN = starts_BN
    if sight.window is not None:
        first_BN = first_BN.maximum(anchors_BN - sight.window + 1)
        latest_BN = latest_BN.maximum(anchors_BN + block_size - sight.window)

    kept_BIN = touches_IN & keep_BN[:, None]
    tile_K = torch.arange(key_tiles, device=device)
    needed_BIK = (tile_K >= lowest(first_BN, kept_BIN) // TILE) & (tile_K * TILE < highest(anchors_BN, kept_BIN))
    full_BIK = (tile_K * TILE >= highest(latest_BN, touches_IN)) & (
        (tile_K + 1) * TILE <= lowest(anchors_BN, touches_IN)
    )
    own_first_I = (row_tokens + first_block_I * block_size) // TILE
    own_last_I = (row_tokens + (last_block_I + 1) * block_size - 1) // TILE
    own_IK = (tile_K >= own_first_I[:, None]) & (tile_K <= own_last_I[:, None])
    partial_BIK = (needed_BIK | own_IK) & ~full_BIK
    lists = [
        *listed_tiles(partial_BIK),
        *listed_tiles(full_BIK),
        *listed_tiles(partial_BIK.transpose(1, 2)),
        *listed_tiles(full_BIK.transpose(1, 2)),
    ]
    if merged_heads == 1:
        return tuple(lists)
    # The tiles of head h lie behind those of the heads before it.
    head_G = torch.arange(merged_heads, device=device, dtype=torch.int32)[:, None, None]
    merged: list[Tensor] = []
    for counts, places in zip(lists[::2], lists[1::2], strict=True):
        step = places.shape[-1]
        merged += [counts.repeat(1, 1, merged_heads), (places[:, :, None] + head_G * step).flatten(2, 3)]
    return tuple(merged)


def tile_mask(
    blocks: Blocks,
    row_tokens: int,
    sight: Sight = EVERYTHING,
    merged_heads: int = 1,
    lists: Callable[..., Lists] = tile_lists,
) -> BlockMask:
    """The mask for flex attention, in closed form: no tracing, no dense grid, the same shapes for the same N, T and S.

    A tile of 128 queries needs the key tiles from the first context token that any of its blocks sees to its highest
    anchor, and those of its own blocks. The key tiles between the last of its blocks' first tokens and its lowest
    anchor are seen by every one of its queries: flex skips the predicate there, so forgetting the documents' starts, or
    how far a block's last slot sees, would show more than there is to see.

    merged_heads: key heads that lie behind each other as one (fast_draft.merge); 1: each by itself. lists: tile_lists,
    or compiled.
    """
    queries = blocks.ids_BQ.shape[1]
    keys, many = row_tokens + queries, merged_heads
    if many > 1 and (queries % TILE or keys % TILE):
        raise ValueError(f"{queries} queries on {keys} keys are no whole tiles of {TILE}: heads can't be merged")
    block_size = queries // blocks.anchors_BN.shape[1]
    return BlockMask(
        (many * queries, many * keys),
        *lists(blocks.anchors_BN, blocks.starts_BN, blocks.keep_BN, block_size, row_tokens, sight, many),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visibility(blocks, row_tokens, sight, merged=many > 1),
    )
