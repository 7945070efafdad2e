"""Near-duplicates: found as their shingles say, in the order of the texts, and hardly any missed."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.near_duplicates import KEPT, WALK, NearDuplicates, jaccard, shingles

WORDS = [f"word{number}" for number in range(5000)]


def of(text: str) -> set[tuple[str, ...]]:
    """Shingles of plain words, written down once more."""
    words = text.split()
    return {tuple(words[n : n + 3]) for n in range(max(1, len(words) - 2))}


def shared(one: str, other: str) -> float:
    return len(of(one) & of(other)) / len(of(one) | of(other))


@given(st.lists(st.sampled_from("abcd"), max_size=20), st.lists(st.sampled_from("abcd"), max_size=20))
def test_jaccard_is_that_of_the_shingles(one: list[str], other: list[str]) -> None:
    left, right = " ".join(one), " ".join(other)
    assert jaccard(shingles(left), shingles(right)) == pytest.approx(shared(left, right))


def test_texts_that_were_not_cut_are_compared_exactly() -> None:
    words = WORDS[:420]
    left, right = " ".join(words[:242]), " ".join(words[120:362])
    assert len(shingles(left)) == 240 < KEPT < len(of(left) | of(right)) == 360
    assert jaccard(shingles(left), shingles(right)) == pytest.approx(shared(left, right))


def test_long_texts_are_compared_by_a_part() -> None:
    draw = random.Random(0)
    long = draw.choices(WORDS, k=4000)
    changed = [draw.choice(WORDS) if draw.random() < 0.03 else word for word in long]
    left, right = " ".join(long), " ".join(changed)
    found = jaccard(shingles(left)[:KEPT], shingles(right)[:KEPT])
    assert found == pytest.approx(shared(left, right), abs=0.08) and 0.7 < found < 0.95


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is the capital of France?", "what is   the capital\nof FRANCE ?", True),
        ("What is 3 + 4 in the ring?", "What is 3 * 4 in the ring?", False),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ("", "", True),
        ("Ja", "Nein", False),
        ("東京の天気はどうですか", "東京の天気はどうですか。", True),
        ("東京の天気はどうですか", "大阪の食べ物は何がありますか", False),
        ("half \ud800 a character", "half \ud800 a character", True),
    ],
)
def test_what_counts_as_the_same(one: str, other: str, same: bool) -> None:
    near = NearDuplicates(0.8)
    assert near.add(one)
    assert near.add(other) is not same
    assert len(near) == 2 - same


def test_the_first_of_two_is_kept_and_a_dropped_one_drops_nothing() -> None:
    words = WORDS[:40]
    chain = [" ".join(words[n : n + 20]) for n in range(0, 9, 3)]
    assert shared(chain[0], chain[1]) == shared(chain[1], chain[2]) > 0.7 > shared(chain[0], chain[2])
    near = NearDuplicates(0.7)
    assert [near.add(text) for text in chain] == [True, False, True]


def test_only_equal_ones_at_1() -> None:
    near = NearDuplicates(1.0)
    assert [near.add(text) for text in ("a b c d e", "a b c d f", "a b c d e", "A  b c d e")] == [
        True,
        True,
        False,
        False,
    ]


def test_hardly_a_pair_is_missed_and_none_is_made_up(soak: bool) -> None:
    """Where all texts share the half, as those of one kind do, so that many have a band in common."""
    draw = random.Random(1)
    stem = draw.choices(WORDS, k=40)
    texts = [[*stem, *draw.choices(WORDS, k=20)] for _ in range(1000 if soak else 100)]
    near = NearDuplicates(0.8)
    assert all(near.add(" ".join(text)) for text in texts)
    missed = 0
    for text in texts:
        for place in (0, 50, 59):  # one word changed: at most three shingles of 58
            missed += near.add(" ".join([*text[:place], "other", *text[place + 1 :]]))
    assert missed <= 3 * len(texts) // 500


def test_texts_that_differ_in_two_words_do_not_hide_each_other() -> None:
    """Some have all bands in common: each is then found behind those that came after it."""
    draw = random.Random(4)
    stem = draw.choices(WORDS, k=58)
    texts = [[*stem, *draw.choices(WORDS, k=2)] for _ in range(60)]
    near = NearDuplicates(0.95)
    assert all(near.add(" ".join(text)) for text in texts)
    assert not any(near.add(" ".join(["other", *text[1:]])) for text in texts)


def test_the_same_text_is_found_however_many_are_like_it(soak: bool) -> None:
    """Texts of one template, more than are looked at in a band: each is then hid from MinHash by the newer ones."""
    draw = random.Random(5)
    stem = draw.choices(WORDS, k=80)
    texts = [" ".join([word, *stem]) for word in draw.sample(WORDS, (3 if soak else 2) * WALK)]
    near = NearDuplicates(0.98)
    assert all(near.add(text) for text in texts)
    assert not any(near.add(text) for text in texts)


def test_memory_grows_with_what_is_kept() -> None:
    draw = random.Random(2)
    near = NearDuplicates(0.8)
    texts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(200)]
    tracemalloc.start()
    for text in texts:
        near.add(text)
    kept = tracemalloc.get_traced_memory()[0]
    for _ in range(3):
        for text in texts:
            near.add(text)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(near) == 200 and kept / 200 < 3000
    assert after - kept < 20_000
