"""What a block's logits depend on, to the bit: its document before its anchor as far as it sees, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tiny_drafters import KINDS, Given, drafter
from torch import Tensor

from trainer.draft_config import DraftConfig

ROW = 24
BLOCK = 4
each_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def changed_blocks(after: Tensor, before: Tensor) -> list[bool]:
    """Which blocks' logits differ in any bit."""
    return (after != before).flatten(1).any(1).tolist()


def reach(config: DraftConfig) -> int:
    """How many tokens before its anchor the widest layer of a drafter shows to a block's first slot."""
    windows = [sight.window for sight in config.sights]
    return ROW if None in windows else max(window for window in windows if window is not None) - 1


# --- features ---


@each_kind
@pytest.mark.parametrize("anchor", [0, 1, 7, 18])
def test_features_before_the_anchor_are_seen_and_none_from_it_on(config: DraftConfig, anchor: int) -> None:
    model = drafter(config)
    for position in range(ROW):
        given = Given([20], [anchor], config=config)
        before = given.logits(model)
        given.features[0, position] += 1.0
        seen = anchor - reach(config) <= position < anchor
        assert changed_blocks(given.logits(model), before) == [seen], position


@each_kind
def test_all_features_from_the_anchor_on_may_change_and_no_bit_does(config: DraftConfig) -> None:
    model, anchors = drafter(config), [3, 7, 11]
    given = Given([20], anchors, config=config)
    before = given.logits(model)
    for n, anchor in enumerate(anchors):
        other = Given([20], anchors, config=config)
        other.features[0, anchor:] = 1000.0
        expected = [later > anchor for later in anchors]
        assert changed_blocks(other.logits(model), before) == expected, n
        other = Given([20], anchors, config=config)
        other.features[0, anchor - 1] *= 1.001
        assert changed_blocks(other.logits(model), before)[n]


@pytest.mark.parametrize("name", ["full", "causal", "sliding", "sliding causal"])
def test_each_slot_of_one_layer_sees_its_own_window(name: str) -> None:
    """Through a single layer nothing travels from slot to slot, so that each one's own sight shows."""
    config = replace(KINDS[name], num_layers=1, layer_types=KINDS[name].layer_types[:1])
    model, anchor, start = drafter(config), 17, 8
    window = config.sliding_window
    for position in range(ROW):
        given = Given([start, 14], [anchor], config=config)
        before = given.logits(model)
        given.features[0, position] += 1.0
        after = given.logits(model)
        for slot in range(BLOCK):
            seen = start <= position < anchor and (window is None or position > anchor + slot - window)
            assert bool((after[0, slot] != before[0, slot]).any()) == seen, (position, slot)


@each_kind
def test_a_block_sees_no_other_document(config: DraftConfig) -> None:
    model = drafter(config)
    anchors = [3, 8, 12, 14, 18]  # documents: 0..7, 8..17, 18..22, padding
    starts = [0, 8, 8, 8, 18]
    for position in range(ROW):
        given = Given([8, 10, 5], anchors, config=config)
        before = given.logits(model)
        given.features[0, position] += 1.0
        expected = [
            max(start, anchor - reach(config)) <= position < anchor
            for start, anchor in zip(starts, anchors, strict=True)
        ]
        assert changed_blocks(given.logits(model), before) == expected, position


# --- tokens and labels ---


@each_kind
def test_of_the_tokens_a_block_gets_its_anchors_alone_and_the_others_are_its_labels(config: DraftConfig) -> None:
    model = drafter(config)
    anchors = [3, 6, 12, 14]  # documents: 0..7, 8..17
    for position in range(18):
        given = Given([8, 10], anchors, config=config)
        blocks, before = given.blocks(), given.logits(model)
        given.ids[0, position] = (given.ids[0, position] + 1) % 120
        assert changed_blocks(given.logits(model), before) == [position == a for a in anchors], position
        labels = (given.blocks().labels_BNP != blocks.labels_BNP)[0].tolist()
        same = [(position < 8) == (a < 8) for a in anchors]
        expected = [[same[n] and position == a + k for k in (1, 2, 3)] for n, a in enumerate(anchors)]
        assert labels == expected, position


@each_kind
def test_the_loss_mask_changes_labels_and_no_logit(config: DraftConfig) -> None:
    model, anchors = drafter(config), [3, 6, 12]
    for position in range(ROW):
        given = Given([8, 10], anchors, config=config)
        blocks, before = given.blocks(), given.logits(model)
        given.loss_mask[0, position] = not given.loss_mask[0, position]
        assert not (given.logits(model) != before).any(), position
        changed = (given.blocks().label_mask_BNP != blocks.label_mask_BNP)[0].tolist()
        inside = position < 18
        same = [inside and (position < 8) == (a < 8) for a in anchors]
        assert changed == [[same[n] and position == a + k for k in (1, 2, 3)] for n, a in enumerate(anchors)]


# --- positions and borders ---


@each_kind
def test_positions_of_what_a_block_does_not_see_are_nothing_to_it(config: DraftConfig) -> None:
    model, anchors = drafter(config), [3, 8, 14]
    for position in range(ROW):
        given = Given([8, 10], anchors, config=config)
        blocks, before = given.blocks(), given.logits(model)
        given.positions[0, position] += 3
        expected = [
            max(start, anchor - reach(config)) <= position < anchor
            for start, anchor in zip((0, 8, 8), anchors, strict=True)
        ]
        assert changed_blocks(given.logits(model, blocks), before) == expected, position


@each_kind
def test_positions_of_the_tokens_from_the_anchor_on_come_from_the_anchors_alone(config: DraftConfig) -> None:
    model, anchor = drafter(config), 9
    given = Given([20], [anchor], config=config)
    before = given.logits(model)
    given.positions[0, anchor + 1 :] = 77
    assert not (given.logits(model) != before).any()


@each_kind
def test_a_border_behind_the_anchor_takes_labels_and_one_before_it_takes_context(config: DraftConfig) -> None:
    model, anchor = drafter(config), 12
    whole = Given([20], [anchor], config=config)
    before, labelled = whole.logits(model), whole.blocks().label_mask_BNP[0, 0].tolist()
    assert labelled == [True] * 3
    for border in range(1, 20):
        cut = Given([border, 20 - border], [anchor], config=config)
        cut.features, cut.ids = whole.features, whole.ids
        cut_logits = cut.logits(model)
        if border > anchor:
            assert not (cut_logits != before).any(), border
            assert cut.blocks().label_mask_BNP[0, 0].tolist() == [anchor + k < border for k in (1, 2, 3)]
            continue
        assert cut.blocks().label_mask_BNP[0, 0].all()
        # What lies before the border is gone; what lies behind it stands as far from the anchor as it did.
        cut.features = whole.features.clone()
        cut.features[0, :border] = 1000.0
        assert not (cut.logits(model) != cut_logits).any(), border
        seen = anchor - reach(config) < border
        close = torch.allclose(cut_logits, before, rtol=0, atol=1e-4)  # the rotation is float32
        assert close == (not seen), border


@each_kind
def test_a_packed_document_is_the_document_alone(config: DraftConfig) -> None:
    model = drafter(config)
    alone, packed = Given([10], [6], config=config), Given([8, 10], [14], config=config)
    packed.features[0, 8:18], packed.ids[0, 8:18] = alone.features[0, :10], alone.ids[0, :10]
    torch.testing.assert_close(packed.logits(model), alone.logits(model), rtol=0, atol=1e-11)


# --- other blocks, other slots ---


def slots_changed_by(
    change: Callable[[Tensor, int], None], config: DraftConfig, anchors: Sequence[int]
) -> list[Tensor]:
    """For each of the Q block tokens: which slots' logits, [N, T], change when its embedding does."""
    model, given = drafter(config), Given([20], anchors, config=config)
    blocks = given.blocks()
    embeds = given.embeds(blocks)
    before = given.logits(model, blocks, embeds)
    found: list[Tensor] = []
    for token in range(embeds.shape[1]):
        other = embeds.clone()
        change(other, token)
        found.append((given.logits(model, blocks, other) != before).any(-1))
    return found


@each_kind
def test_slots_see_those_of_their_own_block_and_causal_ones_no_later_ones(config: DraftConfig) -> None:
    def change(embeds: Tensor, token: int) -> None:
        embeds[0, token] += 1.0

    for token, changed in enumerate(slots_changed_by(change, config, [2, 7, 7, 8])):
        expected = torch.zeros(4, BLOCK, dtype=torch.bool)
        expected[token // BLOCK, token % BLOCK if config.causal else 0 :] = True
        assert (changed == expected).all(), token


@each_kind
def test_a_slot_that_found_no_anchor_sees_itself_alone(config: DraftConfig) -> None:
    model = drafter(config)
    given = Given([20], [5, 9], config=config, keep=[True, False])  # its anchor is not to be used
    before = given.logits(model)
    assert given.blocks().anchors_BN.tolist() == [[5, 0]] and not given.blocks().label_mask_BNP[0, 1].any()
    given.features += 1.0
    assert changed_blocks(given.logits(model), before) == [True, False]
    assert torch.isfinite(before).all()
