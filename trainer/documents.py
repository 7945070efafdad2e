# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""A conversation as tokens, with the assistant's own marked.

    documents = documents_from(b'{"messages": [...]}', tokenizer, ends, last_turn_only=False)

Mostly that is one document. Where the chat template writes earlier turns otherwise once more follow (Qwen3's takes the
thought out of them), each answer makes a document of its own: the prompt as the template writes it at that turn, and
that answer alone is learned.
"""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.chat import ChatError, render, tokens_of
from trainer.conversations import LineError, talk_from

MOST_ANSWERS = 256
"""Of a conversation. Each is rendered behind all that came before it: the cost goes by the square of their number."""
MOST_WORK = 400_000_000
"""Characters that are rendered for one conversation: some seconds."""

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Messages = Sequence[Mapping[str, str]]
Piece = tuple[str, str | None]
"""Text as the chat template writes it, and the answer in it, if there is one."""


@dataclass(frozen=True)
class Document:
    """A conversation as tokens."""

    ids: Integers
    loss_mask: Bools  # the assistant's tokens, end of turn included

    def __len__(self) -> int:
        return len(self.ids)


def special_texts(tokenizer: Any) -> re.Pattern[str]:
    """Finds what the tokenizer would read as one of its special tokens. Takes a millisecond: make it once."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or r"(?!)")


def documents_from(
    record: bytes | Mapping[str, Any],
    tokenizer: Any,
    ends: Collection[int],
    *,
    last_turn_only: bool,
    special: re.Pattern[str] | None = None,
) -> list[Document]:
    """A record's documents: one, or one for each answer.

    ends: the tokens that end an answer; special: of `special_texts`. Raises LineError with the reason.
    """
    talk = talk_from(record)
    turns = talk.turns[-1:] if last_turn_only else talk.turns
    if not turns:
        raise LineError("no message of the assistant")
    check_size(talk.messages, turns)
    check_texts(talk.messages, special or special_texts(tokenizer))
    try:
        pieces = segments(talk.messages, turns, tokenizer)
        if pieces is not None:
            return [document_of(pieces, tokenizer, ends)]
        return [document_of(answer_pieces(talk.messages, turn, tokenizer), tokenizer, ends) for turn in turns]
    except ChatError as error:
        raise LineError(str(error)) from error


def check_size(messages: Messages, turns: Sequence[int]) -> None:
    """Raises LineError when a conversation would take minutes or hours."""
    if len(turns) > MOST_ANSWERS:
        raise LineError(f"{len(turns)} answers in one conversation, more than {MOST_ANSWERS}")
    work = len(turns) * sum(len(message["content"]) for message in messages)
    if work > MOST_WORK:
        raise LineError(f"too long for {len(turns)} answers, each rendered behind all before it: {work} characters")


def check_texts(messages: Messages, special: re.Pattern[str]) -> None:
    """Raises LineError when something that is said would be read as a special token, which nobody said."""
    for number, message in enumerate(messages):
        for text in (message["content"], message.get("name", "")):
            if found := special.search(text):
                raise LineError(f"message {number}: it holds the text of the special token {found[0]!r}")


# --- text ---


def segments(messages: Messages, turns: Sequence[int], tokenizer: Any) -> list[Piece] | None:
    """The conversation's text by the chat template, cut where answers begin and end.

    Each piece is tokenised alone, as it is while decoding: the prompt up to the answer's first token, then the answer.
    So mask and tokens are aligned by construction. None when the template writes the same messages otherwise once more
    follow. Raises ChatError, and LineError when it writes an answer otherwise than it begins one.
    """
    done, pieces = "", list[Piece]()
    for turn in turns:
        prompt, answer = answer_pieces(messages, turn, tokenizer)
        if not prompt[0].startswith(done):
            return None
        pieces += [(prompt[0][len(done) :], None), answer]
        done = prompt[0] + answer[0]
    return pieces


def answer_pieces(messages: Messages, turn: int, tokenizer: Any) -> list[Piece]:
    """The prompt of one answer, and the answer, as the template writes them when nothing follows.

    Raises ChatError or LineError.
    """
    before = render(tokenizer, messages[:turn], answer_follows=True)
    after = render(tokenizer, messages[: turn + 1], answer_follows=False)
    said = messages[turn]["content"]
    kept = after.startswith(before)
    if ("<think>" in said or "</think>" in said) and not (kept and said.strip() in after[len(before) :]):
        raise LineError(
            f"message {turn}: it holds a thought (<think>), which the chat template takes out of an answer without "
            f"thinking"
        )
    if not kept:
        raise LineError(
            f"message {turn}: the chat template writes the answer otherwise than it begins one: its prompt is not how "
            f"this answer's text starts"
        )
    return [(before, None), (after[len(before) :], said)]


# --- tokens ---


def document_of(pieces: Sequence[Piece], tokenizer: Any, ends: Collection[int]) -> Document:
    """Pieces as one document. Raises LineError when its tokens would not say what was said."""
    tokens = tokens_of_pieces(pieces, tokenizer)
    loss_mask: list[bool] = []
    for new, (_, answer) in zip(tokens, pieces, strict=True):
        supervised = 0 if answer is None else supervised_tokens(new, answer, tokenizer, ends)
        loss_mask += [i < supervised for i in range(len(new))]
    return Document(np.array([id for new in tokens for id in new], dtype=np.int64), np.array(loss_mask, dtype=np.bool_))


def tokens_of_pieces(pieces: Sequence[Piece], tokenizer: Any) -> list[list[int]]:
    """Each piece's tokens, which together are the whole text's, one way or the other. Raises LineError."""
    alone = [tokens_of(tokenizer, piece) for piece, _ in pieces]
    text = "".join(piece for piece, _ in pieces)
    if same_text(decoded(tokenizer, [id for new in alone for id in new]), text):
        return alone
    together = tokens_in_context(pieces, tokenizer)
    if together is None:
        raise LineError(
            "the tokenizer can't be cut where an answer begins: the pieces' tokens alone don't decode to the chat "
            "template's text, and behind each other they change"
        )
    return together


def tokens_in_context(pieces: Sequence[Piece], tokenizer: Any) -> list[list[int]] | None:
    """Each piece's tokens behind those before it, for tokenizers that put a space before the first word of any text.

    None when what comes after changes the tokens before: a prompt must have the tokens that it has alone.
    """
    text, ids, found = "", list[int](), list[list[int]]()
    for piece, _ in pieces:
        text += piece
        whole = tokens_of(tokenizer, text)
        if whole[: len(ids)] != ids:
            return None
        found.append(whole[len(ids) :])
        ids = whole
    return found


def supervised_tokens(ids: Sequence[int], answer: str, tokenizer: Any, ends: Collection[int]) -> int:
    """How many tokens of an answer's piece the model makes itself: the answer and the end token behind it.

    What the template adds after that, and all it adds where there is no end token, is not learned. Raises LineError
    when the tokens don't decode to the answer, or to more, or when the answer has an end in its middle.
    """
    wanted = composed(answer).strip()

    def begin(count: int) -> str:
        return composed(decoded(tokenizer, ids[:count])).strip()

    if not begin(len(ids)).startswith(wanted):
        raise LineError("its supervised tokens don't decode to the answer")
    said = bisect_left(range(len(ids)), True, key=lambda count: begin(count).startswith(wanted))
    if begin(said) != wanted:
        raise LineError("the answer's last token holds what the chat template writes behind it, too")
    end = next((id for id in ids[:said] if id in ends), None)
    if end is not None:
        raise LineError(f"the answer goes on behind its end token {decoded(tokenizer, [end])!r}")
    count = next((index + 1 for index in range(said, len(ids)) if ids[index] in ends), said)
    if not wanted and begin(max(count - 1, 0)):  # white space that the tokenizer hasn't: nothing of it was looked for
        raise LineError("its supervised tokens don't decode to the answer")
    return count


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def composed(text: str) -> str:
    """Accents joined to their letters, as Qwen's tokenizers do before anything else."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def same_text(one: str, other: str) -> bool:
    return composed(one) == composed(other)
