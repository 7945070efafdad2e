"""Anchors, blocks, and the mask: as a predicate, written out, in tiles, and for decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.blocks import (
    TILE,
    Blocks,
    Sight,
    cached_mask,
    dense_mask,
    make_blocks,
    sample_anchors,
    share,
    tile_mask,
    visibility,
    whole_tiles,
)

MASK = 99
SIGHTS = [Sight(), Sight(causal=True), Sight(window=1), Sight(window=4), Sight(window=6, causal=True), Sight(window=99)]


@dataclass(frozen=True)
class PackedRow:
    """What there is to know of a row, [S] each."""

    ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    document_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows with anchors, as make_blocks takes them."""

    rows: Sequence[PackedRow]
    anchors: npt.NDArray[np.int64]  # [B, N]
    keep: npt.NDArray[np.bool_]

    def blocks(self, block_size: int) -> Blocks:
        names = ("ids", "loss_mask", "document_ids", "positions")
        packed = [torch.from_numpy(np.stack([getattr(row, name) for row in self.rows])) for name in names]
        anchors, keep = torch.from_numpy(self.anchors), torch.from_numpy(self.keep)
        return make_blocks(*packed, anchors, keep, block_size=block_size, mask_token_id=MASK)


def row_of(lengths: Sequence[int], row_tokens: int, prompt: int = 0, seed: int = 0) -> PackedRow:
    """A row of documents whose first `prompt` tokens are not supervised."""
    random, padding = np.random.default_rng(seed), row_tokens - sum(lengths)
    places = np.array([place for length in lengths for place in range(length)] + [0] * padding, dtype=np.int64)
    documents = np.array(
        [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding, dtype=np.int64
    )
    ids = np.where(documents >= 0, random.integers(0, 90, row_tokens), 0)
    return PackedRow(ids, (places >= prompt) & (documents >= 0), documents, places)


def sampled(rows: Sequence[PackedRow], anchors: int, seed: int = 0) -> Batch:
    """The rows with anchors as a training draws them."""
    drawn = [sample_anchors(row.loss_mask, row.document_ids, anchors, [seed, n]) for n, row in enumerate(rows)]
    return Batch(rows, np.stack([chosen for chosen, _ in drawn]), np.stack([keep for _, keep in drawn]))


def expanded(mask: BlockMask, batch: int, queries: int, keys: int) -> Tensor:
    """What flex attention would show: full tiles whole, partial tiles by the predicate, other tiles not at all.

    The predicate is asked as flex attention asks it: queries and keys rounded up to whole tiles.
    """

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
    row, head = torch.arange(batch)[:, None, None], torch.zeros(1, 1, 1, dtype=torch.int64)
    query, key = torch.arange(rows * TILE)[:, None], torch.arange(columns * TILE)
    predicate = mask.mask_mod(row, head, query, key).expand(batch, rows * TILE, columns * TILE)

    def each(tiled: Tensor) -> Tensor:
        return tiled.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)

    return (each(full) | (each(partial) & predicate))[:, :queries, :keys]


def spelled_out(batch: Batch, block_size: int, sight: Sight) -> Tensor:
    """The specification's predicate, written with the documents' numbers instead of their starts. [B, Q, S+Q]"""
    seen: list[npt.NDArray[np.bool_]] = []
    for row, anchors, keep in zip(batch.rows, batch.anchors, batch.keep, strict=True):
        documents = row.document_ids
        token, block = np.arange(len(documents)), np.repeat(np.arange(len(anchors)), block_size)
        slot, anchor = np.tile(np.arange(block_size), len(anchors))[:, None], anchors[block][:, None]
        context = keep[block][:, None] & (token < anchor) & (documents == documents[anchor]) & (documents[anchor] != -1)
        if sight.window is not None:
            context &= anchor + slot - token <= sight.window - 1
        own = block[:, None] == block
        if sight.causal:
            own &= slot >= slot.T
        seen.append(np.concatenate((context, own), axis=1))
    return torch.from_numpy(np.stack(seen))


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


def test_with_fewer_anchors_than_documents_each_document_has_its_turn() -> None:
    row = row_of([2, 3, 4, 50, 100], 160)
    hits = np.zeros(5, dtype=int)
    for seed in range(100):
        anchors, keep = sample_anchors(row.loss_mask, row.document_ids, 2, [seed])
        assert keep.all() and anchors[0] < anchors[1]
        hits[row.document_ids[anchors]] += 1
    assert hits.sum() == 200 and hits.min() > 20, hits  # 40 each, if length does not matter


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 100))
def test_share_gives_out_everything_and_evenly(counts: list[int], total: int) -> None:
    shares = share(counts, total)
    assert sum(shares) == min(total, sum(counts))
    assert all(0 <= s <= c for s, c in zip(shares, counts, strict=True))
    wanting = [s for s, c in zip(shares, counts, strict=True) if s < c]
    assert not wanting or max(shares) <= min(wanting) + 1


def test_blocks_hold_the_anchor_then_masks_and_labels_of_their_own_document() -> None:
    row = row_of([6, 5], 12)
    batch = sampled([row], 8)  # candidates: 0..4 and 6..9, four to each document
    blocks = batch.blocks(4)
    for n, anchor in enumerate(batch.anchors[0].tolist()):
        end = 6 if anchor < 6 else 11
        assert blocks.ids_BQ[0, n * 4 : n * 4 + 4].tolist() == [row.ids[anchor], MASK, MASK, MASK]
        position = row.positions[anchor]
        assert blocks.positions_BQ[0, n * 4 : n * 4 + 4].tolist() == [position + k for k in range(4)]
        mask = blocks.label_mask_BNP[0, n].tolist()
        assert mask == [anchor + k < end for k in (1, 2, 3)]
        labels = blocks.labels_BNP[0, n].tolist()
        assert labels == [row.ids[anchor + k] if inside else 0 for k, inside in zip((1, 2, 3), mask, strict=True)]


def test_labels_stop_where_an_answer_does_and_go_on_in_the_next() -> None:
    row = row_of([10], 12)
    row = replace(row, loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=bool))
    blocks = sampled([row], 8).blocks(6)
    assert blocks.anchors_BN[0, :3].tolist() == [2, 6, 7] and blocks.keep_BN.sum() == 3
    assert blocks.label_mask_BNP[0, 0].tolist() == [True, False, False, True, True]
    assert not blocks.label_mask_BNP[0, 3:].any()


def test_a_block_may_run_past_its_document_and_past_the_row() -> None:
    row = row_of([3, 5], 8)
    blocks = Batch([row], np.array([[0, 1, 7, 6, 2]]), np.array([[True, True, True, True, False]])).blocks(16)
    assert blocks.label_mask_BNP.sum(-1).tolist() == [[2, 1, 0, 1, 0]]
    assert blocks.labels_BNP[0, 3].tolist() == [row.ids[7]] + [0] * 14
    assert blocks.starts_BN.tolist() == [[0, 0, 3, 3, 0]]
    # Positions run on; the slot without an anchor stands where there is nothing to see.
    expected = [[0, 1, 4, 3, 0][n] + k for n in range(5) for k in range(16)]
    assert blocks.positions_BQ[0].tolist() == expected and blocks.anchors_BN.tolist() == [[0, 1, 7, 6, 0]]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_the_dense_mask_is_the_specification(block_size: int, sight: Sight) -> None:
    batch = sampled([row_of([9, 1, 6], 20), row_of([20], 20, prompt=15), row_of([], 20)], 5, seed=3)
    dense = dense_mask(batch.blocks(block_size), 20, sight)
    assert (dense[:, 0] == spelled_out(batch, block_size, sight)).all()
    assert dense.diagonal(20, 2, 3).all()  # each slot sees itself: nobody is left with nothing to see


@settings(max_examples=5 * settings.default.max_examples)
@given(
    lengths=st.lists(st.lists(st.integers(1, 250), max_size=6), min_size=1, max_size=2),
    row_tokens=st.integers(1, 640),
    anchors=st.integers(1, 64),
    block_size=st.integers(2, 32),
    window=st.one_of(st.none(), st.integers(1, 40), st.integers(1, 700), st.just(10_000)),
    causal=st.booleans(),
    drawn=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_tiles_the_predicate_and_the_dense_mask_are_the_specification(
    lengths: list[list[int]],
    row_tokens: int,
    anchors: int,
    block_size: int,
    window: int | None,
    causal: bool,
    drawn: bool,
    seed: int,
) -> None:
    """Anchors as a training draws them, or anywhere in the documents: unsorted, repeated, some not kept."""
    fitting = [[n for i, n in enumerate(own) if sum(own[: i + 1]) <= row_tokens] for own in lengths]
    random, sight = np.random.default_rng(seed), Sight(window, causal)
    batch = sampled([row_of(own, row_tokens, prompt=seed % 5) for own in fitting], anchors, seed)
    if not drawn:
        places = np.stack([random.integers(0, max(1, sum(own)), anchors) for own in fitting])
        keep = (random.random(places.shape) < 0.8) & np.array([[bool(own)] for own in fitting])
        batch = Batch(batch.rows, places, keep)
    blocks = batch.blocks(block_size)
    expected = spelled_out(batch, block_size, sight)
    assert (dense_mask(blocks, row_tokens, sight)[:, 0] == expected).all()
    assert (expanded(tile_mask(blocks, row_tokens, sight), *expected.shape) == expected).all()


def full_tiles(batch: Batch, block_size: int, sight: Sight) -> list[int]:
    """The key tiles that the only tile of queries sees whole."""
    row_tokens = len(batch.rows[0].ids)
    mask, expected = tile_mask(batch.blocks(block_size), row_tokens, sight), spelled_out(batch, block_size, sight)
    assert expected.shape[1] <= TILE and (expanded(mask, *expected.shape) == expected).all()
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    listed = mask.full_kv_indices[0, 0, 0, : int(mask.full_kv_num_blocks)].tolist()
    for tile in listed:
        assert expected[0, :, tile * TILE : (tile + 1) * TILE].all()
    return listed


@pytest.mark.parametrize(
    ("sight", "tiles"),
    [
        (Sight(), [2, 3]),  # the document begins in tile 1, the first anchor stands in tile 4
        (Sight(causal=True), [2, 3]),
        (Sight(window=10_000), [2, 3]),
        # The last slot of the last block stands at 643: a window of 388 reaches to 256, where tile 2 begins.
        (Sight(window=388), [2, 3]),
        (Sight(window=387), [3]),
        (Sight(window=260), [3]),
        (Sight(window=259), []),
    ],
    ids=str,
)
def test_a_tile_is_full_only_where_every_query_sees_all_of_it(sight: Sight, tiles: list[int]) -> None:
    anchors = np.arange(600, 632, 4)[None]
    batch = Batch([row_of([200, 440], 640)], anchors, np.ones((1, 8), dtype=bool))
    assert full_tiles(batch, 16, sight) == tiles


@pytest.mark.parametrize(
    ("lengths", "anchor", "window", "tiles"),
    [
        ([640], 300, 174, [0, 1, 2, 5]),  # the window begins at 127, the last token of tile 0
        ([640], 300, 173, [1, 2, 5]),
        ([127, 513], 300, None, [0, 1, 2, 5]),  # the document does
        ([128, 512], 300, None, [1, 2, 5]),
        ([640], 385, 129, [2, 3, 5]),  # the anchor's last token before it is the first of tile 3
        ([640], 384, 129, [2, 5]),
        ([640], 0, None, [5]),
        ([640], 300, 1, [2, 5]),  # nothing to see in tile 2, but it holds the window's empty place
    ],
)
def test_a_tile_is_visited_for_a_single_token_and_passed_over_for_none(
    lengths: list[int], anchor: int, window: int | None, tiles: list[int]
) -> None:
    batch = Batch([row_of(lengths, 640)], np.array([[anchor]]), np.ones((1, 1), dtype=bool))
    mask, expected = tile_mask(batch.blocks(16), 640, Sight(window)), spelled_out(batch, 16, Sight(window))
    assert (expanded(mask, *expected.shape) == expected).all()
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    visited = mask.kv_indices[0, 0, 0, : int(mask.kv_num_blocks)].tolist()
    visited += mask.full_kv_indices[0, 0, 0, : int(mask.full_kv_num_blocks)].tolist()
    assert sorted(visited) == tiles


@pytest.mark.parametrize("anchors", [[10, 600], [600, 10], [600, 600]], ids=str)
def test_a_block_that_begins_with_the_last_query_of_a_tile_counts_there(anchors: list[int]) -> None:
    batch = Batch([row_of([640], 640)], np.array([anchors]), np.ones((1, 2), dtype=bool))
    expected = spelled_out(batch, 127, Sight())  # query 127 is the second block's first
    assert (expanded(tile_mask(batch.blocks(127), 640), *expected.shape) == expected).all()


def test_a_full_tile_is_lost_to_one_early_anchor_or_one_slot_without() -> None:
    row = row_of([640], 640)
    assert full_tiles(Batch([row], np.array([[600, 255]]), np.array([[True, True]])), 16, Sight()) == [0]
    assert full_tiles(Batch([row], np.array([[600, 300]]), np.array([[True, False]])), 16, Sight()) == []


@settings(max_examples=5 * settings.default.max_examples)
@given(
    context=st.integers(0, 40),
    block_size=st.integers(2, 16),
    window=st.one_of(st.none(), st.integers(1, 60)),
    causal=st.booleans(),
)
def test_the_mask_of_decoding_is_that_of_the_same_block_in_training(
    context: int, block_size: int, window: int | None, causal: bool
) -> None:
    sight, row_tokens = Sight(window, causal), context + 3
    batch = Batch([row_of([row_tokens], row_tokens)], np.array([[context]]), np.array([[True]]))
    trained = dense_mask(batch.blocks(block_size), row_tokens, sight)[0, 0]
    assert not trained[:, context:row_tokens].any()
    trained = torch.cat((trained[:, :context], trained[:, row_tokens:]), dim=1)
    decoding = cached_mask(context, block_size, sight, torch.device("cpu"))
    assert (trained if decoding is None else trained == decoding).all()
    assert context == 0 or (decoding is None) == bool(trained.all())  # none is built where none is needed


def test_a_predicate_asked_beyond_the_queries_stays_within_bounds() -> None:
    blocks = sampled([row_of([30], 40)], 3).blocks(4)
    seen = visibility(blocks, 40, Sight(window=5, causal=True))
    query, key = torch.arange(TILE)[:, None], torch.arange(TILE)
    assert seen(torch.tensor(0), torch.tensor(0), query, key).shape == (TILE, TILE)


@given(anchors=st.integers(1, 70), block_size=st.sampled_from([2, 3, 8, 10, 16, 128]))
def test_empty_slots_fill_the_queries_to_whole_tiles(anchors: int, block_size: int) -> None:
    filled, keep = whole_tiles(torch.arange(anchors)[None], torch.ones(1, anchors, dtype=torch.bool), block_size)
    assert filled.shape == keep.shape
    assert filled.shape[1] * block_size % TILE == 0
    assert filled[0, :anchors].tolist() == list(range(anchors)) and keep[0, :anchors].all()
    assert not filled[0, anchors:].any() and not keep[0, anchors:].any()
    assert (filled.shape[1] - anchors) * block_size < TILE * block_size
