"""The feed: the same batches from any step on, held-out rows with all their anchors, and where each step came from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data import counted, write_prepared

from trainer.blocks import anchor_candidates
from trainer.config import TrainConfig, load
from trainer.data import Cursor, make_row
from trainer.features import RowBatch
from trainer.feed import Feed, all_anchors_batch, row_batch
from trainer.prepared import DataError, Prepared


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return counted(tmp_path_factory.mktemp("forty") / "p", [2 + n % 9 for n in range(40)])


def config(**changes: int) -> TrainConfig:
    settings = {"steps": 7, "rows_per_step": 4, "micro_rows": 2, "anchors": 3, "eval_every": 3, **changes}
    text = '[target]\npath = "t"\n[data]\ntrain = "d"\nrow_tokens = 16\n[train]\n'
    return load((text + "".join(f"{key} = {value}\n" for key, value in settings.items())).encode())


def same(one: RowBatch, other: RowBatch) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return all(equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def test_the_feed_is_the_same_from_any_step_on_and_measures_when_due(forty: Prepared) -> None:
    feed = Feed(config(), forty, forty)
    assert [feed.measures_after(step) for step in range(1, 8)] == [False, False, True, False, False, True, True]
    whole = list(feed.batches(0, Cursor()))
    assert len(whole) == 7 * 2 + 3 * feed.heldout_batches
    assert {batch.ids_BS.shape for batch in whole} == {(2, 16)}
    afters, last = [(done, feed.source(done).after) for done in (4, 6)], feed.source(7)
    for done, after in afters:
        assert after.row == 4 * done and after == feed.rows.cursor(4 * done)
        fresh = Feed(config(), forty, forty)
        rest = list(fresh.batches(done, after))
        assert all(same(got, expected) for got, expected in zip(rest, whole[-len(rest) :], strict=True))
        assert fresh.source(7) == last
    learned = [batch for batch in whole if batch.anchors_BN.shape[1] == 3 and batch.numbers[1] == batch.numbers[0] + 1]
    assert [batch.numbers[0] for batch in learned][:3] == [0, 2, 4]


@pytest.mark.parametrize(("rows", "micro_rows"), [(7, 2), (7, None), (3, 1), (6, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_step_s_rows_are_shared_out_to_the_drafters(
    forty: Prepared, rows: int, micro_rows: int | None, replicas: int
) -> None:
    plain = config(steps=2, rows_per_step=rows, micro_rows=1, eval_every=0)
    single = {batch.numbers[0]: batch for batch in Feed(plain, forty, None).batches(0, Cursor())}
    made = plain.model_copy(update={"train": plain.train.model_copy(update={"micro_rows": micro_rows})})
    feed = Feed(made, forty, None, replicas)
    batches = list(feed.batches(0, Cursor()))
    assert len(batches) == 2 * feed.batches_per_step
    height = micro_rows or -(-rows // replicas)
    for step in range(2):
        own = batches[step * feed.batches_per_step :][: feed.batches_per_step]
        assert [batch.replica for batch in own][:replicas] == list(range(replicas))  # all have something to do at once
        for replica in range(replicas):
            taken: list[int] = []
            for batch in (batch for batch in own if batch.replica == replica):
                assert batch.ids_BS.shape[0] == height
                for row in range(height):
                    if (batch.document_ids_BS[row] < 0).all():
                        assert not batch.keep_BN[row].any() and not batch.loss_mask_BS[row].any()
                        continue
                    number = batch.numbers[row]
                    taken.append(number)
                    for name in ("ids_BS", "loss_mask_BS", "positions_BS", "anchors_BN", "keep_BN"):
                        assert torch.equal(getattr(batch, name)[row], getattr(single[number], name)[0])
            assert taken == list(range(step * rows, (step + 1) * rows))[replica::replicas]


def test_held_out_rows_are_shared_out_too(forty: Prepared) -> None:
    feeds = [Feed(config(steps=1), forty, forty, replicas) for replicas in (1, 3)]
    one, three = (list(feed.batches(0, Cursor()))[feed.batches_per_step :] for feed in feeds)
    assert [batch.replica for batch in three] == [k % 3 for k in range(len(one))]
    assert all(same(replace(batch, replica=0), expected) for batch, expected in zip(three, one, strict=True))


def test_a_step_s_source_names_its_rows_and_lines(forty: Prepared) -> None:
    feed = Feed(config(steps=2, eval_every=0), forty, None)
    batches = feed.batches(0, Cursor())
    first = next(batches)
    source = feed.source(1)  # known as soon as the step's first batch is
    assert source.rows == (0, 1, 2, 3) and source.lines[:2] == first.lines and first.numbers == (0, 1)
    drawn = [int(token) for token in first.ids_BS[0][first.document_ids_BS[0] >= 0].unique()]
    assert sorted(source.lines[0]) == [token + 1 for token in drawn]
    lines = [line for row in source.lines for line in row]
    named = ", ".join(f"made.jsonl:{line}" for line in lines[:6])
    assert str(source) == f"step 1: rows 0-3 ({named} and {len(lines) - 6} more lines)"
    assert not feed.measures_after(2) and feed.heldout_batches == 0


def test_sources_are_kept_until_a_later_one_is_asked_for(forty: Prepared) -> None:
    """However far the threads work ahead."""
    feed = Feed(config(steps=100, rows_per_step=1, micro_rows=1, eval_every=0), forty, None)
    for _ in feed.batches(0, Cursor()):
        pass
    assert [feed.source(step).after.row for step in range(1, 101)] == list(range(1, 101))
    with pytest.raises(KeyError):
        feed.source(99)


def test_held_out_batches_hold_every_anchor_of_every_document_once(tmp_path: Path) -> None:
    masks = [[0, 0, 1, 1, 1, 0, 1, 1], [0, 1, 1], [0, 1, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1], [0] * 12 + [1] * 4]
    held = write_prepared(tmp_path / "p", [([n] * len(mask), mask) for n, mask in enumerate(masks)])
    feed = Feed(config(steps=1, rows_per_step=2), held, held)
    batches = list(feed.batches(0, Cursor()))[1:]
    assert len(batches) == feed.heldout_batches == 2
    met: list[tuple[int, int]] = []
    for batch in batches:
        assert batch.anchors_BN.shape == batch.keep_BN.shape and batch.anchors_BN.shape[1] % 3 == 0
        assert not batch.anchors_BN[~batch.keep_BN].any()
        assert int(batch.keep_BN.sum(1).max()) > batch.anchors_BN.shape[1] - 3
        for row in range(2):
            chosen = batch.anchors_BN[row][batch.keep_BN[row]]
            met += list(zip(batch.ids_BS[row][chosen].tolist(), batch.positions_BS[row][chosen].tolist(), strict=True))
    expected = [
        (n, int(place))
        for n, mask in enumerate(masks)
        for place in np.flatnonzero(anchor_candidates(np.array(mask) > 0, np.zeros(len(mask), dtype=np.int64)))
    ]
    assert sorted(met) == sorted(expected)


def test_a_row_of_padding_has_no_anchor() -> None:
    batch = all_anchors_batch([make_row(0, [], 8)] * 2, 3)
    assert batch.anchors_BN.shape == (2, 3) and not batch.keep_BN.any()


def test_the_anchors_of_a_row_follow_from_seed_and_number(forty: Prepared) -> None:
    rows = Feed(config(), forty, None).rows
    row, _ = rows.row(rows.cursor(5))
    one, again, other = row_batch([row], 3, 0), row_batch([row], 3, 0), row_batch([row], 3, 1)
    assert same(one, again) and not same(one, other)


def test_nothing_to_learn_within_a_row_is_refused_for_both_files(forty: Prepared, tmp_path: Path) -> None:
    late = write_prepared(tmp_path / "p", [([1] * 40, [0] * 30 + [1] * 10)])
    for train, heldout in ((late, forty), (forty, late)):
        with pytest.raises(DataError, match="none of its 1 conversations has an answer of two tokens within 16"):
            Feed(config(), train, heldout)


def test_what_is_cut_is_said_for_both_files(forty: Prepared, tmp_path: Path) -> None:
    long = write_prepared(tmp_path / "p", [([1] * 40, [1] * 40)])
    report = Feed(config(), forty, long).report
    assert [line.split(":")[0] for line in report] == [
        "made.jsonl", "cut 1 of 1 conversations of made.jsonl to 16 tokens", "made.jsonl",
    ]  # fmt: skip
