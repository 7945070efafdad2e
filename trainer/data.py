"""Conversations from a JSONL file, as numbered rows of packed tokens.

    documents = read_documents(Path("train.jsonl"), tokenizer, row_tokens=1024)
    rows = Rows(documents, row_tokens=1024, seed=0, shuffle=True)
    rows.row(17)

Row i is always the same, whatever was asked for before: a training's place in the data is the next row's number.
"""

# transformers leaves its tokenizers' methods partly untyped.
# pyright: reportUnknownMemberType=false

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.blocks import anchor_candidates
from trainer.chat import ChatError, render, tokens_of

MOST_BAD = 0.1  # share of malformed lines above which a file is refused
SHOWN = 5  # malformed lines that are named one by one
OPEN_ROWS = 64  # rows that are filled side by side while packing

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class DataError(ValueError):
    """A data file that can't be learned from."""


class LineError(ValueError):
    """One line of it that can't."""


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Conversation(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    messages: list[Message]


@dataclass(frozen=True)
class Document:
    """A conversation as tokens."""

    ids: Integers
    loss_mask: Bools  # the assistant's tokens, end of turn included

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Documents:
    """A data file: what can be learned from, and what was left out and why."""

    documents: Sequence[Document]
    digest: str  # sha256 of the file: tells whether a resumed run reads the same data
    report: Sequence[str] = field(default=())  # one line each: what was dropped or cut


@dataclass(frozen=True)
class Row:
    """Documents side by side, padded to the row's length."""

    number: int
    ids: Integers  # 0 where padding
    loss_mask: Bools
    document_ids: Integers  # 0, 1, ... in the row; -1 where padding
    positions: Integers  # from 0 in each document; 0 where padding

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids >= 0).sum())


# --- reading ---


def read_documents(
    path: Path,
    tokenizer: Any,
    *,
    row_tokens: int,
    last_turn_only: bool = False,
    mask_token_id: int | None = None,
    end_tokens: Collection[int] = (),
) -> Documents:
    """Reads a JSONL file. Malformed lines are reported and left out.

    end_tokens: those that end the target's answers, beside the tokenizer's own.

    Raises DataError: the file can't be read, has more than 10% malformed lines, or nothing to learn from; the tokenizer
    has no chat template; the mask token occurs in a conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the target's tokenizer has no chat template, so its conversations can't be written as it saw them"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"data {path} can't be read: {error.strerror}") from error
    ends = frozenset([tokenizer.eos_token_id, *end_tokens])
    documents: list[Document] = []
    bad: list[str] = []
    cut = unusable = lines = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        lines += 1
        try:
            whole = document_from_line(line, tokenizer, ends, last_turn_only=last_turn_only)
        except LineError as error:
            bad.append(f"{path}:{number}: {error}")
            continue
        if mask_token_id is not None and (whole.ids == mask_token_id).any():
            token = tokenizer.decode([mask_token_id])
            raise DataError(f"{path}:{number}: holds the mask token {mask_token_id} ({token!r}): choose another")
        document = Document(whole.ids[:row_tokens], whole.loss_mask[:row_tokens])
        cut += len(whole) > row_tokens
        if learnable(document):
            documents.append(document)
        else:
            unusable += 1
    if len(bad) > MOST_BAD * lines:
        raise DataError(f"data {path}: {len(bad)} of {lines} lines can't be used; the first: {bad[0]}")
    if not documents:
        raise DataError(f"data {path}: no conversation to learn from in {lines} lines")
    report = [f"left out {line}" for line in bad[:SHOWN]]
    if len(bad) > SHOWN:
        report.append(f"left out {len(bad) - SHOWN} more lines of {path}")
    if unusable:
        report.append(f"left out {unusable} conversations of {path}: no answer of two tokens within {row_tokens}")
    if cut:
        report.append(f"cut {cut} conversations of {path} to {row_tokens} tokens")
    return Documents(documents, hashlib.sha256(content).hexdigest(), report)


def learnable(document: Document) -> bool:
    """Has a place for an anchor: two supervised tokens side by side."""
    return bool(anchor_candidates(document.loss_mask, np.zeros(len(document), dtype=np.int64)).any())


def document_from_line(line: bytes, tokenizer: Any, ends: Collection[int], *, last_turn_only: bool) -> Document:
    """One conversation as tokens; `ends` are the tokens that end an answer. Raises LineError with the reason."""
    try:
        messages = [m.model_dump() for m in Conversation.model_validate_json(line).messages]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise LineError(f"{place}: {first['msg']}" if place else first["msg"]) from error
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise LineError("no message of the assistant")
    ids: list[int] = []
    loss_mask: list[bool] = []
    for text, answer in segments(messages, turns[-1:] if last_turn_only else turns, tokenizer):
        new = tokens_of(tokenizer, text)
        supervised = 0 if answer is None else supervised_tokens(new, answer, tokenizer, ends)
        ids += new
        loss_mask += [i < supervised for i in range(len(new))]
    return Document(np.array(ids, dtype=np.int64), np.array(loss_mask, dtype=np.bool_))


def segments(
    messages: Sequence[dict[str, str]], turns: Sequence[int], tokenizer: Any
) -> Iterable[tuple[str, str | None]]:
    """The conversation's text by the chat template, cut where answers begin and end: (text, the answer in it or None).

    Each piece is tokenised alone, as it is while decoding: the prompt up to the answer's first token, then the answer.
    So mask and tokens are aligned by construction. Raises LineError when the template writes the same messages
    otherwise once more follow, as some do with the thinking of earlier turns.
    """

    done = ""
    for turn in turns:
        try:
            before = render(tokenizer, messages[:turn], answer_follows=True)
            after = render(tokenizer, messages[: turn + 1], answer_follows=False)
        except ChatError as error:
            raise LineError(str(error)) from error
        if not (before.startswith(done) and after.startswith(before)):
            raise LineError("the chat template rewrites earlier turns or its own prompt; data.last_turn_only may help")
        yield before[len(done) :], None
        yield after[len(before) :], messages[turn]["content"]
        done = after


def supervised_tokens(ids: Sequence[int], answer: str, tokenizer: Any, ends: Collection[int]) -> int:
    """How many tokens of an answer's piece the model makes itself: the answer and the end token behind it.

    What the template adds after that, and all it adds where there is no end token, is not learned. Raises LineError
    when the tokens don't decode to the answer.
    """

    def covers(count: int) -> bool:
        text = str(tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False))
        return text.strip().startswith(answer.strip())

    if not covers(len(ids)):
        raise LineError("its supervised tokens don't decode to the answer")
    said = bisect_left(range(len(ids)), True, key=covers)
    return next((index + 1 for index in range(said, len(ids)) if ids[index] in ends), said)


# --- packing ---


def pack(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Fills rows with documents in the given order, each into the first open row with room; returns their indices."""
    full: list[list[int]] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for document in order:
        length = lengths[document]
        fitting = next((i for i, left in enumerate(room) if left >= length), None)
        if fitting is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                full.append(rows.pop(fullest))
                room.pop(fullest)
            rows.append([])
            room.append(row_tokens)
            fitting = len(rows) - 1
        rows[fitting].append(document)
        room[fitting] -= length
    return full + rows


def make_row(number: int, documents: Sequence[Document], row_tokens: int) -> Row:
    """Documents side by side in one row. None at all makes a row of padding."""
    ids = np.zeros(row_tokens, dtype=np.int64)
    loss_mask = np.zeros(row_tokens, dtype=np.bool_)
    document_ids = np.full(row_tokens, -1, dtype=np.int64)
    positions = np.zeros(row_tokens, dtype=np.int64)
    start = 0
    for index, document in enumerate(documents):
        here = slice(start, start + len(document))
        ids[here], loss_mask[here], document_ids[here] = document.ids, document.loss_mask, index
        positions[here] = np.arange(len(document))
        start += len(document)
    return Row(number, ids, loss_mask, document_ids, positions)


class Rows:
    """Numbered rows without end: epoch after epoch, each in a new order when shuffled. For one thread."""

    def __init__(self, documents: Documents, *, row_tokens: int, seed: int, shuffle: bool) -> None:
        self._documents = documents.documents
        self._lengths = [len(d) for d in documents.documents]
        self._row_tokens, self._seed, self._shuffle = row_tokens, seed, shuffle
        self._ends: list[int] = []  # number of the first row after each epoch packed so far
        self._packed: tuple[int, list[list[int]]] = (-1, [])  # the epoch asked for last

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._packed[0] != epoch:
            count = len(self._lengths)
            order = np.random.default_rng([self._seed, epoch]).permutation(count) if self._shuffle else range(count)
            self._packed = epoch, pack(self._lengths, [int(i) for i in order], self._row_tokens)
        return self._packed[1]

    def row(self, number: int) -> Row:
        """The row of that number, from 0."""
        while not self._ends or number >= self._ends[-1]:
            begin = self._ends[-1] if self._ends else 0
            self._ends.append(begin + len(self._epoch(len(self._ends))))
        epoch = bisect_right(self._ends, number)
        begin = self._ends[epoch - 1] if epoch else 0
        chosen = self._epoch(epoch)[number - begin]
        return make_row(number, [self._documents[i] for i in chosen], self._row_tokens)

    def epoch_rows(self, epoch: int = 0) -> int:
        """How many rows an epoch has."""
        return len(self._epoch(epoch))
