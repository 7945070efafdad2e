"""Tokens as text, as they come: whole characters, the same text as at once, drafted ones in green."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import real_target, tiny_target

from trainer.stream import GREEN, RESET, TORN, Pieces, coloured, pieces_of, printable


def test_drafted_pieces_are_green_line_by_line() -> None:
    tokenizer = tiny_target().tokenizer
    pieces = pieces_of(tokenizer, tokenizer.encode("ab\ncd"), [False, True, True, True, False])
    assert pieces == [("a", False), ("b\nc", True), ("d", False)]
    assert coloured(pieces) == f"a{GREEN}b{RESET}\n{GREEN}c{RESET}d"


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    tokenizer = real_target().tokenizer
    tokens = tokenizer.encode("a🦔b")
    assert len(tokens) > 4  # the hedgehog alone is several
    stream = Pieces(tokenizer)
    shown = [stream.add(token, index % 2 == 1) for index, token in enumerate(tokens)]
    assert [text for pieces in shown for text, _ in pieces] == ["a", "🦔", "b"]
    # It belongs to the token that completes it.
    assert shown[-2] == [("🦔", (len(tokens) - 2) % 2 == 1)]
    assert stream.rest() == ""


@given(st.lists(st.sampled_from(["a", " b", "\n", "🦔", "é", "漢字", "<|im_end|>", "  ", "\ufb01"]), max_size=12))
def test_what_is_streamed_is_the_whole_text(parts: list[str]) -> None:
    tokenizer = real_target().tokenizer
    tokens = tokenizer.encode("".join(parts))
    found = pieces_of(tokenizer, tokens, [True] * len(tokens))
    assert "".join(text for text, _ in found) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_bytes_that_never_became_a_character_come_at_the_end() -> None:
    tokenizer = real_target().tokenizer
    torn = tokenizer.encode("a🦔")[:-1]
    stream = Pieces(tokenizer)
    assert [text for token in torn for text, _ in stream.add(token, False)] == ["a"]
    assert stream.rest() == TORN and stream.rest() == ""
    assert "".join(text for text, _ in pieces_of(tokenizer, torn, [False] * len(torn))) == "a" + TORN


def test_a_tokenizer_that_drops_a_text_s_first_space_keeps_those_between_words() -> None:
    class Words:
        """As SentencePiece: each word has its space before it, and a text's first is dropped."""

        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(" w" + str(token) for token in tokens if token).removeprefix(" ")

    words = Words()
    assert pieces_of(words, [1, 0, 2, 3], [False] * 4) == [("w1 w2 w3", False)]


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "\x07", "\x9b31m", "\r", "\x7f"])
def test_nothing_steers_the_terminal(text: str) -> None:
    assert all(each in "\n\t" or each.isprintable() for each in printable(text)) and len(printable(text)) == len(text)
    assert printable("é漢🦔\n\t x") == "é漢🦔\n\t x"
