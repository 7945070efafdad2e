"""Anchors, blocks, and the mask: written out, and in tiles."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.blocks import TILE, Blocks, dense_mask, make_blocks, sample_anchors, share, tile_mask, whole_tiles
from trainer.data import Document, Row, make_row
from trainer.features import RowBatch
from trainer.feed import row_batch

MASK = 99


def row_of(lengths: Sequence[int], row_tokens: int, prompt: int = 0, seed: int = 0) -> Row:
    """A row of documents whose first `prompt` tokens are not supervised."""
    random = np.random.default_rng(seed)
    documents = [Document(random.integers(0, 90, n), np.arange(n) >= prompt) for n in lengths]
    return make_row(0, documents, row_tokens)


def blocks_of(batch: RowBatch, block_size: int) -> Blocks:
    return make_blocks(
        batch.ids_BS,
        batch.loss_mask_BS,
        batch.document_ids_BS,
        batch.positions_BS,
        batch.anchors_BN,
        batch.keep_BN,
        block_size=block_size,
        mask_token_id=MASK,
    )


def expanded(mask: BlockMask, dense_BQK: Tensor) -> Tensor:
    """What flex attention would show: full tiles whole, partial tiles by the predicate, other tiles not at all."""
    batch, queries, keys = dense_BQK.shape

    def tiles(counts: Tensor | None, indices: Tensor | None, lines: int, columns: int) -> Tensor:
        assert counts is not None and indices is not None
        listed = torch.zeros(batch, lines, columns, dtype=torch.bool)
        for b in range(batch):
            for line in range(lines):
                listed[b, line, indices[b, 0, line, : int(counts[b, 0, line])].long()] = True
        return listed

    rows, columns = -(-queries // TILE), -(-keys // TILE)
    partial = tiles(mask.kv_num_blocks, mask.kv_indices, rows, columns)
    full = tiles(mask.full_kv_num_blocks, mask.full_kv_indices, rows, columns)
    assert not (partial & full).any()
    # The backward pass walks the same tiles from the keys' side.
    assert (tiles(mask.q_num_blocks, mask.q_indices, columns, rows) == partial.transpose(1, 2)).all()
    assert (tiles(mask.full_q_num_blocks, mask.full_q_indices, columns, rows) == full.transpose(1, 2)).all()

    def each(tiled: Tensor) -> Tensor:
        return tiled.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, :queries, :keys]

    return each(full) | (each(partial) & dense_BQK)


def spelled_out(batch: RowBatch, blocks: Blocks, block_size: int) -> Tensor:
    """The specification's predicate, one pair at a time, in plain Python."""
    size, row_tokens = batch.ids_BS.shape
    queries = blocks.ids_BQ.shape[1]
    seen = torch.zeros(size, queries, row_tokens + queries, dtype=torch.bool)
    documents = batch.document_ids_BS.tolist()
    for b in range(size):
        for q in range(queries):
            anchor, keep = int(batch.anchors_BN[b, q // block_size]), bool(batch.keep_BN[b, q // block_size])
            for key in range(row_tokens + queries):
                if key < row_tokens:
                    seen[b, q, key] = keep and key < anchor and documents[b][key] == documents[b][anchor] != -1
                else:
                    seen[b, q, key] = (key - row_tokens) // block_size == q // block_size
    return seen


def test_anchors_are_supervised_pairs_of_one_document_ascending_and_the_seeds() -> None:
    row = row_of([10, 1, 2, 7], 24)
    anchors, keep = sample_anchors(row.loss_mask, row.document_ids, 20, [1, 2])
    found = anchors[keep]
    assert list(found) == [*range(9), 11, *range(13, 19)]  # each candidate: there are fewer than 20
    assert list(anchors[~keep]) == [0] * 4
    prompts = row_of([10, 2, 7], 24, prompt=2)
    anchors, keep = sample_anchors(prompts.loss_mask, prompts.document_ids, 20, [1, 2])
    assert list(anchors[keep]) == [*range(2, 9), *range(14, 18)]
    few, all_kept = sample_anchors(row.loss_mask, row.document_ids, 6, [1, 2])
    assert all_kept.all() and (np.diff(few) > 0).all() and set(few) <= set(found)
    assert (few == sample_anchors(row.loss_mask, row.document_ids, 6, [1, 2])[0]).all()
    others = [sample_anchors(row.loss_mask, row.document_ids, 6, [1, n])[0].tolist() for n in range(3, 9)]
    assert any(other != few.tolist() for other in others)


def test_a_short_document_gets_its_share_of_anchors() -> None:
    row = row_of([400, 12], 512)
    anchors, _ = sample_anchors(row.loss_mask, row.document_ids, 22, [0])
    assert (anchors >= 400).sum() == 11  # all its candidates; drawn from the row at large it would be about one


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 100))
def test_share_gives_out_everything_and_evenly(counts: list[int], total: int) -> None:
    shares = share(counts, total)
    assert sum(shares) == min(total, sum(counts))
    assert all(0 <= s <= c for s, c in zip(shares, counts, strict=True))
    wanting = [s for s, c in zip(shares, counts, strict=True) if s < c]
    assert not wanting or max(shares) <= min(wanting) + 1


def test_blocks_hold_the_anchor_then_masks_and_labels_of_their_own_document() -> None:
    row = row_of([6, 5], 12)
    batch = row_batch([row], 8, seed=0)  # candidates: 0..4 and 6..9, four to each document
    blocks = blocks_of(batch, block_size=4)
    for n, anchor in enumerate(batch.anchors_BN[0].tolist()):
        end = 6 if anchor < 6 else 11
        assert blocks.ids_BQ[0, n * 4 : n * 4 + 4].tolist() == [row.ids[anchor], MASK, MASK, MASK]
        position = row.positions[anchor]
        assert blocks.positions_BQ[0, n * 4 : n * 4 + 4].tolist() == [position + k for k in range(4)]
        mask = blocks.label_mask_BNP[0, n].tolist()
        assert mask == [anchor + k < end for k in (1, 2, 3)]
        labels = blocks.labels_BNP[0, n].tolist()
        assert labels == [row.ids[anchor + k] if inside else 0 for k, inside in zip((1, 2, 3), mask, strict=True)]


def test_labels_stop_where_an_answer_does_and_go_on_in_the_next() -> None:
    document = Document(np.arange(10), np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool))
    blocks = blocks_of(row_batch([make_row(0, [document], 12)], 8, seed=0), block_size=6)
    assert blocks.anchors_BN[0, :3].tolist() == [2, 6, 7] and blocks.keep_BN.sum() == 3
    assert blocks.label_mask_BNP[0, 0].tolist() == [True, False, False, True, True]
    assert not blocks.label_mask_BNP[0, 3:].any()


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_the_dense_mask_is_the_specification(block_size: int) -> None:
    rows = [row_of([9, 1, 6], 20), row_of([20], 20, prompt=15), row_of([], 20)]
    batch = row_batch(rows, 5, seed=3)
    blocks = blocks_of(batch, block_size)
    dense = dense_mask(blocks, 20)
    assert (dense[:, 0] == spelled_out(batch, blocks, block_size)).all()
    assert dense.any(-1).all()  # nobody is left with nothing to see


@given(
    lengths=st.lists(st.lists(st.integers(1, 250), max_size=6), min_size=1, max_size=2),
    row_tokens=st.integers(40, 640),
    prompt=st.integers(0, 5),
    anchors=st.integers(1, 64),
    block_size=st.sampled_from([2, 3, 4, 7, 8, 10, 16, 32]),
)
def test_the_tiles_are_the_dense_mask(
    lengths: list[list[int]], row_tokens: int, prompt: int, anchors: int, block_size: int
) -> None:
    fitting = [[n for i, n in enumerate(own) if sum(own[: i + 1]) <= row_tokens] for own in lengths]
    rows = [row_of(own, row_tokens, prompt) for own in fitting]
    blocks = blocks_of(row_batch(rows, anchors, seed=1), block_size)
    dense = dense_mask(blocks, row_tokens)[:, 0]
    assert (expanded(tile_mask(blocks, row_tokens), dense) == dense).all()


def test_a_full_tile_never_shows_another_document() -> None:
    # Anchors far apart in one tile of queries, the second document beginning in the middle of a tile of keys.
    rows = [row_of([200, 440], 640)]
    batch = row_batch(rows, 8, seed=0)
    batch = RowBatch(**{**vars(batch), "anchors_BN": torch.arange(600, 632, 4)[None], "keep_BN": torch.ones(1, 8) > 0})
    blocks = blocks_of(batch, block_size=16)
    mask = tile_mask(blocks, 640)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_num_blocks.tolist() == [[[2]]]  # keys 256..511
    dense = dense_mask(blocks, 640)[:, 0]
    assert (expanded(mask, dense) == dense).all()


@given(anchors=st.integers(1, 70), block_size=st.sampled_from([2, 3, 8, 10, 16, 128]))
def test_empty_slots_fill_the_queries_to_whole_tiles(anchors: int, block_size: int) -> None:
    filled, keep = whole_tiles(torch.arange(anchors)[None], torch.ones(1, anchors, dtype=torch.bool), block_size)
    assert filled.shape == keep.shape
    assert filled.shape[1] * block_size % TILE == 0
    assert filled[0, :anchors].tolist() == list(range(anchors)) and keep[0, :anchors].all()
    assert not filled[0, anchors:].any() and not keep[0, anchors:].any()
    assert (filled.shape[1] - anchors) * block_size < TILE * block_size
