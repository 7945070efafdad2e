"""Prepared data and its rows: each document once an epoch, the same rows from any cursor, in constant memory."""

import json
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import counted, write_prepared

from trainer.blocks import anchor_candidates
from trainer.data import Cursor, Row, Rows, make_row, pack
from trainer.documents import Document
from trainer.prepared import FILES, DataError, Meta, Prepared, open_prepared
from trainer.shuffle import Permutation

# --- the order ---


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 99))
def test_an_order_has_every_index_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, (seed, epoch))(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    some = np.arange(0, size, 7)
    assert (Permutation(size, (seed, epoch))(some) == order[some]).all()


@given(st.integers(1, 2**40), st.integers(0, 99))
def test_an_order_of_very_many_stays_in_its_bounds_and_never_meets_itself(size: int, seed: int) -> None:
    asked = np.unique(np.linspace(0, size - 1, 2000).astype(np.int64))
    order = Permutation(size, (seed,))(asked)
    assert order.min() >= 0 and order.max() < size and len(np.unique(order)) == len(asked)


def test_an_order_is_the_same_everywhere_and_looks_drawn() -> None:
    assert Permutation(10, (0, 0))(np.arange(10)).tolist() == [5, 4, 1, 2, 0, 9, 3, 7, 8, 6]
    size = 5000
    orders = [Permutation(size, (seed,))(np.arange(size)) for seed in range(40)]
    assert len({order.tobytes() for order in orders}) == 40
    # A drawn order has about one index in its own place, and neighbours are as far apart as any two: a third of all.
    assert sum((order == np.arange(size)).sum() for order in orders) < 100
    assert abs(np.mean([np.abs(np.diff(order)).mean() for order in orders]) / size - 1 / 3) < 0.01
    # The first ten go to each tenth of the places about as often: chi-square of 9 degrees of freedom.
    tenths = np.array([np.bincount(order[:10] * 10 // size, minlength=10) for order in orders]).sum(0)
    assert ((tenths - 40) ** 2 / 40).sum() < 28  # 1 in 1,000 drawn orders would be above


# --- packing ---


@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 50))
def test_packing_puts_every_document_in_one_row_that_holds_it(seed: int, count: int, longest: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, size=count).tolist()
    rows = pack(lengths, 50)
    assert Counter(d for row in rows for d in row) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[d] for d in row) <= 50 for row in rows)
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)
    # No two rows fit into one.
    held = sorted(sum(lengths[d] for d in row) for row in rows)
    assert len(held) < 2 or held[0] + held[1] > 50


def test_rows_are_nearly_full() -> None:
    assert pack([49, 1, 1, 30, 20], 50) == [[0, 1], [2], [3, 4]]
    lengths = np.random.default_rng(0).lognormal(5.2, 0.8, 4096).astype(int).clip(8, 1024).tolist()
    assert sum(lengths) / (1024 * len(pack(lengths, 1024))) > 0.99


def test_a_row_holds_its_documents_side_by_side() -> None:
    first = Document(np.array([5, 6, 7]), np.array([False, True, True]))
    second = Document(np.array([8]), np.array([True]))
    row = make_row(3, [first, second], 6, [11, 12])
    assert row.ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert row.loss_mask.tolist() == [False, True, True, True, False, False]
    assert row.document_ids.tolist() == [0, 0, 0, 1, -1, -1]
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert row.tokens == 4 and row.lines == (11, 12)


# --- rows ---


def rows_of(prepared: Prepared, *, row_tokens: int = 16, seed: int = 3, shuffle: bool = True) -> Rows:
    return Rows(prepared, row_tokens=row_tokens, seed=seed, shuffle=shuffle)


def walk(rows: Rows, count: int, cursor: Cursor | None = None) -> list[tuple[Row, Cursor]]:
    """So many rows, each with the cursor behind it."""
    walked: list[tuple[Row, Cursor]] = []
    cursor = cursor or Cursor()
    for _ in range(count):
        row, cursor = rows.row(cursor)
        walked.append((row, cursor))
    return walked


def same(one: Row, other: Row) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


def documents_in(row: Row) -> list[tuple[int, int]]:
    """The documents of a row: (token, length)."""
    kept = row.ids[row.document_ids >= 0], row.document_ids[row.document_ids >= 0]
    return [(int(kept[0][kept[1] == d][0]), int((kept[1] == d).sum())) for d in np.unique(kept[1])]


@dataclass(frozen=True)
class Case:
    """Data and settings, drawn from a number: lists that hypothesis draws itself are mostly short."""

    lengths: list[int]
    prompt: int
    row_tokens: int
    group: int
    shuffle: bool
    seed: int


def drawn(number: int) -> Case:
    draw = np.random.default_rng(number)

    def below(most: int) -> int:
        return int(draw.integers(most))

    lengths = draw.integers(1, 31, size=1 + below(50)).tolist()
    return Case(lengths, below(5), 2 + below(23), 1 + below(12), bool(below(2)), below(100))


@given(st.integers(0, 2**32).map(drawn))
def test_an_epoch_has_each_learnable_document_once_and_any_cursor_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    lengths, prompt, row_tokens = case.lengths, case.prompt, case.row_tokens
    folder = tmp_path_factory.mktemp("epoch") / "prepared"
    useful = [n for n, length in enumerate(lengths) if min(length, row_tokens) >= prompt + 2]
    if not any(length >= prompt + 2 for length in lengths):
        with pytest.raises(DataError, match="has no documents"):
            counted(folder, lengths, prompt)
        return
    prepared = counted(folder, lengths, prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.GROUP", case.group)
        if not useful:
            with pytest.raises(DataError, match=f"answer of two tokens within {row_tokens}: raise data.row_tokens"):
                rows_of(prepared, row_tokens=row_tokens)
            return
        rows = rows_of(prepared, row_tokens=row_tokens, seed=case.seed, shuffle=case.shuffle)
        epochs = [rows.epoch_rows(epoch) for epoch in range(3)]
        walked = walk(rows, sum(epochs) + 1)
        expected = Counter((n, min(lengths[n], row_tokens)) for n in useful)
        for epoch, count in enumerate(epochs):
            begin = sum(epochs[:epoch])
            met = Counter(found for row, _ in walked[begin : begin + count] for found in documents_in(row))
            assert met == expected
            assert {cursor.epoch for _, cursor in walked[begin : begin + count - 1]} <= {epoch}
        assert [row.number for row, _ in walked] == list(range(len(walked)))
        assert len(vars(rows)["_packed"]) <= 2  # of all the groups walked through
        for row, _ in walked:
            assert row.lines == tuple(int(n) + 1 for n, _ in documents_in(row))
            starts = np.flatnonzero(np.diff(row.document_ids, prepend=-2) * (row.document_ids >= 0))
            assert (row.positions[starts] == 0).all() and row.positions.max() < row_tokens
        # From any cursor, and by the number alone, in a fresh place.
        for number in {0, 1, len(walked) // 3, len(walked) // 2, len(walked) - 2, len(walked) - 1} - {-1}:
            before = walked[number - 1][1] if number else Cursor()
            fresh = rows_of(prepared, row_tokens=row_tokens, seed=case.seed, shuffle=case.shuffle)
            reread = Cursor.model_validate_json(before.model_dump_json())
            for row, cursor in (fresh.row(reread), fresh.row(fresh.cursor(number))):
                assert same(row, walked[number][0]) and cursor == walked[number][1]
            if number:
                assert fresh.cursor(number) == before


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    prepared = counted(tmp_path / "p", [2 + n for n in range(120)])

    def told(rows: Rows, epoch: int) -> list[list[tuple[int, int]]]:
        begin = sum(rows.epoch_rows(e) for e in range(epoch))
        return [documents_in(row) for row, _ in walk(rows, rows.epoch_rows(epoch), rows.cursor(begin))]

    def together(rows: list[list[tuple[int, int]]]) -> set[frozenset[tuple[int, int]]]:
        return {frozenset(row) for row in rows if len(row) > 1}

    rows, other = rows_of(prepared, row_tokens=160), rows_of(prepared, row_tokens=160, seed=4)
    first, second, others = told(rows, 0), told(rows, 1), told(other, 0)
    # Not the rows' order alone: other documents lie together.
    assert len(together(first) & together(second)) < len(first) / 2 > len(together(first) & together(others))
    unshuffled = rows_of(prepared, row_tokens=160, shuffle=False)
    assert told(unshuffled, 0) == told(unshuffled, 1) and told(unshuffled, 0)[0][0][0] == 0
    # Rows of long documents and rows of short ones come mixed.
    sizes = [len(row) for row in first]
    assert sizes not in (sorted(sizes), sorted(sizes, reverse=True))


def test_a_cursor_beyond_what_is_there_goes_on_behind_it(tmp_path: Path) -> None:
    rows = rows_of(counted(tmp_path / "p", [9] * 5))
    for cursor, epoch in ((Cursor(row=7, index=99), 1), (Cursor(row=7, epoch=2, group=9, index=1), 3)):
        row, after = rows.row(cursor)
        assert row.number == 7 and same(row, rows.row(Cursor(row=7, epoch=epoch))[0]) and after.row == 8


def test_what_is_cut_and_what_is_skipped_is_said(tmp_path: Path) -> None:
    documents = [([1] * 50, [0] * 10 + [1] * 40), ([2] * 50, [0] * 31 + [1] * 19), ([3] * 20, [1] * 20)]
    rows = rows_of(write_prepared(tmp_path / "p", documents), row_tokens=32)
    assert (rows.cut, rows.skipped) == (1, 1)
    assert rows.report == (
        "cut 1 of 3 conversations of made.jsonl to 32 tokens",
        "left out 1 of 3 conversations of made.jsonl: no answer of two tokens within 32",
        "made.jsonl: about 2 rows an epoch, 81.2% full",
    )
    assert sorted(documents_in(row) for row, _ in walk(rows, 2)) == [[(1, 32)], [(3, 20)]]
    # One token more, and the second has an anchor.
    assert rows_of(rows.prepared, row_tokens=33).skipped == 0


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 14))
def test_a_document_is_useful_exactly_when_it_has_an_anchor(
    tmp_path_factory: pytest.TempPathFactory, mask: list[bool], row_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("useful") / "p"
    prepared = write_prepared(folder, [([1, 1], [1, 1]), ([2] * len(mask), [int(m) for m in mask])])
    here = np.array(mask)[:row_tokens]
    useful = anchor_candidates(here, np.zeros(len(here), dtype=np.int64)).any()
    if row_tokens < 2:
        with pytest.raises(DataError):
            rows_of(prepared, row_tokens=row_tokens)
        return
    rows = rows_of(prepared, row_tokens=row_tokens, shuffle=False)
    found = {token for row in rows.once() for token, _ in documents_in(row)}
    assert found == ({1, 2} if useful else {1})


def test_once_is_the_first_epoch_in_the_documents_order(tmp_path: Path) -> None:
    prepared = counted(tmp_path / "p", [5] * 10)
    rows = rows_of(prepared, row_tokens=10, shuffle=False)
    assert [documents_in(row) for row in rows.once()] == [[(n, 5), (n + 1, 5)] for n in range(0, 10, 2)]


# --- the folder ---


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "p", [([7, 8, 9], [0, 1, 1]), ([5], [1]), ([8, 8], [1, 1])])
    assert len(prepared) == 2 and prepared.tokens == 5 and prepared.meta.learned == 4 and prepared.meta.wordless == 1
    assert prepared.document(0, 9).ids.tolist() == [7, 8, 9] and prepared.document(0, 2).ids.tolist() == [7, 8]
    assert prepared.document(1, 9).loss_mask.tolist() == [True, True]
    assert [prepared.line(0), prepared.line(1)] == [1, 3]
    assert prepared.counts[[5, 7, 8]].tolist() == [0, 1, 3]
    assert prepared.first_place_of(8) == "made.jsonl:1" and prepared.first_place_of(5) == "nowhere"
    assert prepared.report == ("left out 1 of 3 records of made.jsonl: no answer of two tokens (made.jsonl:2)",)


def test_a_token_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.prepared.SLICE", 4)
    prepared = counted(tmp_path / "p", [3, 5, 2, 7])
    assert [prepared.first_place_of(n) for n in range(4)] == [f"made.jsonl:{n}" for n in range(1, 5)]


def test_documents_are_told_apart_by_their_digest(tmp_path: Path) -> None:
    made = [([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1])]
    others = [
        [made[1], made[0]], [([1, 2, 3], [1, 1, 1]), made[1]], [([1, 2], [1, 1]), ([3, 4, 5], [1, 1, 1])], made[:1],
    ]  # fmt: skip
    digests = {write_prepared(tmp_path / str(n), documents).digest for n, documents in enumerate([made, made, *others])}
    assert len(digests) == 5


def damage_size(folder: Path) -> None:
    path = folder / "ids.bin"
    path.write_bytes(path.read_bytes()[:-1])


def damage_value(folder: Path, file: str, index: int, value: int) -> None:
    path = folder / f"{file}.bin"
    values = np.fromfile(path, dtype=FILES[file])
    assert values[index] != value
    values[index] = value
    values.tofile(path)


def damage_meta(folder: Path, **changes: Any) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (damage_size, r"is damaged: ids\.bin has 19 bytes, not 20; prepare it again: delete"),
        (lambda folder: (folder / "lines.bin").unlink(), r"is damaged: lines\.bin is missing"),
        (
            lambda folder: (folder / "meta.json").unlink(),
            r"is no prepared data: meta\.json can't be read: No such file",
        ),
        (lambda folder: (folder / "meta.json").write_text("{"), r"meta\.json is damaged"),
        (lambda folder: (folder / "meta.json").write_text("{}"), r"meta\.json is damaged \(schema_version Field"),
        (lambda folder: damage_meta(folder, learned=1), r"meta\.json is not what was written"),
        (lambda folder: damage_meta(folder, tokens="x"), r"meta\.json is damaged \(tokens Input should be"),
        (lambda folder: damage_meta(folder, schema_version=3, new=3), "schema_version 3 is newer than this trainer"),
        (
            lambda folder: damage_meta(folder, schema_version=1),
            "schema_version 1 is of an older trainer, this one writes",
        ),
        (lambda folder: damage_value(folder, "ids", 1, 9), r"is damaged: ids\.bin is not what was written"),
        (lambda folder: damage_value(folder, "mask", 0, 1), r"is damaged: mask\.bin is not what was written"),
        (lambda folder: damage_value(folder, "offsets", 1, 2), r"is damaged: offsets\.bin is not what was written"),
        (lambda folder: damage_value(folder, "first", 1, 1), r"is damaged: first\.bin is not what was written"),
        (lambda folder: damage_value(folder, "lines", 0, 7), r"is damaged: lines\.bin is not what was written"),
        (lambda folder: damage_value(folder, "counts", 7, 0), "is damaged: its files don't fit each other"),
        (lambda folder: damage_value(folder, "offsets", 0, 1), "is damaged: its files don't fit each other"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(harm: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    write_prepared(tmp_path / "p", [([7, 8, 9], [0, 1, 1]), ([8, 8], [1, 1])])
    harm(tmp_path / "p")
    with pytest.raises(DataError, match=why) as caught:
        open_prepared(tmp_path / "p")
    assert str(tmp_path / "p") in str(caught.value)


@pytest.mark.parametrize(("file", "value"), [("ids", 300), ("ids", -1), ("offsets", 99), ("offsets", -1)])
def test_a_damaged_document_is_refused_when_it_is_read(file: str, value: int, tmp_path: Path) -> None:
    write_prepared(tmp_path / "p", [([7, 8, 9], [0, 1, 1]), ([8, 8], [1, 1])])
    prepared = open_prepared(tmp_path / "p")
    damage_value(tmp_path / "p", file, 1, value)  # as a disk may do it later
    with pytest.raises(DataError, match="document 0 is damaged"):
        prepared.document(0, 99)


# --- memory ---


def big_prepared(folder: Path, documents: int, length: int) -> None:
    """Many documents, written at once; their tokens are a hole in the file that takes no place on the disk."""
    write_prepared(folder, [([0] * length, [1] * length)])
    tokens = documents * length
    with (folder / "ids.bin").open("wb") as file:
        file.truncate(4 * tokens)
    with (folder / "mask.bin").open("wb") as file:
        file.truncate(tokens)
    with (folder / "offsets.bin").open("wb") as offsets, (folder / "lines.bin").open("wb") as lines:
        for start in range(0, documents, 1 << 16):
            here = np.arange(start, min(start + (1 << 16), documents), dtype="<i8")
            offsets.write((here * length).tobytes())
            lines.write((here + 1).tobytes())
        offsets.write(np.array(tokens, dtype="<i8").tobytes())
    with (folder / "first.bin").open("wb") as file:
        file.truncate(4 * documents)
    meta = Meta.model_validate_json((folder / "meta.json").read_bytes())
    sizes = {name: (folder / name).stat().st_size for name in meta.bytes}
    np.array([tokens, *[0] * 299], dtype="<i8").tofile(folder / "counts.bin")
    meta = meta.model_copy(update={"documents": documents, "tokens": tokens, "bytes": sizes})
    (folder / "meta.json").write_text(meta.sealed().model_dump_json())


def peak_of(folder: Path, documents: int, length: int) -> int:
    """Bytes that opening the data, going on far inside of it and reading rows of two groups takes at most."""
    big_prepared(folder, documents, length)
    tracemalloc.start()
    try:
        prepared = open_prepared(folder, verify=False)
        if prepared.tokens < 2**27:
            with pytest.raises(DataError, match="not what was written"):  # a hole is not
                prepared.verify()
        rows = rows_of(prepared, row_tokens=2 * length)
        before = cursor = Cursor(row=12345, epoch=3, group=rows.groups // 2, index=2000)  # a group has 2048 rows
        for _ in range(100):
            row, cursor = rows.row(cursor)
        assert cursor.group == before.group + 1 and cursor.index == 52
        assert row.tokens == 2 * length and len({*row.lines}) == 2
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        shutil.rmtree(folder)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    small = peak_of(tmp_path / "small", 10_000, 32)
    large = peak_of(tmp_path / "large", 2_000_000, 32)
    # One value a document would be 16 MB, their tokens 320 MB.
    assert large < small + 2_000_000, f"{small:,} bytes for 10,000 documents, {large:,} for 2,000,000"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_data_larger_than_it(tmp_path: Path, soak: bool) -> None:
    if not soak:
        pytest.skip("with --soak")
    small = peak_of(tmp_path / "small", 10_000, 4096)
    large = peak_of(tmp_path / "large", 20_000_000, 4096)  # 328 GB of tokens in a hole of the file
    assert large < small + 2_000_000, f"{small:,} bytes for 10,000 documents, {large:,} for 20,000,000"
