# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""One record of a data file: its conversation, and that as tokens with the assistant's own marked.

    document = document_from(b'{"messages": [...]}', tokenizer, ends, last_turn_only=False)

Three forms are read: {"messages": [{"role", "content"}]}, ShareGPT's {"conversations": [{"from", "value"}]}, and
{"prompt", "response"}, where the prompt is a text or a list of messages and the response alone is learned. A text may
also be a list of text parts. What would be learned otherwise than it was said (calls of tools, images, a thought kept
beside the answer, roles out of order) is refused with the reason, and the rest of the file goes on.
"""

import json
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trainer.chat import ChatError, render, tokens_of

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
}
FOLLOWS = {"": "system user", "system": "user", "user": "assistant", "assistant": "user tool", "tool": "tool assistant"}
"""Which roles may come after one; "" is the begin."""
NOT_TEXT = ("tools", "functions", "image", "images", "video", "videos", "audio", "audios")
"""Keys of a record and of a message for what belongs to the conversation and can't be learned."""
NOT_WRITTEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message for what the assistant said beside its text."""

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class LineError(ValueError):
    """A record that can't be learned from: the text says why."""


@dataclass(frozen=True)
class Talk:
    """A conversation, and which of its messages may be learned."""

    messages: list[dict[str, str]]
    turns: list[int]


@dataclass(frozen=True)
class Document:
    """A conversation as tokens."""

    ids: Integers
    loss_mask: Bools  # the assistant's tokens, end of turn included

    def __len__(self) -> int:
        return len(self.ids)


def document_from(
    record: bytes | Mapping[str, Any], tokenizer: Any, ends: Collection[int], *, last_turn_only: bool
) -> Document:
    """One conversation as tokens; `ends` are the tokens that end an answer. Raises LineError with the reason."""
    talk = talk_from(record)
    turns = talk.turns[-1:] if last_turn_only else talk.turns
    if not turns:
        raise LineError("no message of the assistant")
    pieces = list(segments(talk.messages, turns, tokenizer))
    tokens = tokens_alone(pieces, tokenizer)
    text = "".join(piece for piece, _ in pieces)
    if not same_text(decoded(tokenizer, [id for new in tokens for id in new]), text):
        tokens = tokens_in_context(pieces, tokenizer) or tokens
    loss_mask: list[bool] = []
    for new, (_, answer) in zip(tokens, pieces, strict=True):
        supervised = 0 if answer is None else supervised_tokens(new, answer, tokenizer, ends)
        loss_mask += [i < supervised for i in range(len(new))]
    return Document(np.array([id for new in tokens for id in new], dtype=np.int64), np.array(loss_mask, dtype=np.bool_))


# --- from a record to messages ---


def talk_from(record: bytes | Mapping[str, Any]) -> Talk:
    """The conversation of a line of JSON, or of a record that is read already. Raises LineError with the reason."""
    found = parsed(record) if isinstance(record, bytes) else record
    for key in NOT_TEXT:
        if not empty(found.get(key)):
            raise LineError(f"it has {key}, which can't be learned")
    forms = [key for key in ("messages", "conversations") if found.get(key) is not None]
    if len(forms) > 1:
        raise LineError("it has both messages and conversations: which is meant?")
    if forms:
        messages = messages_from(found[forms[0]], forms[0])
        learned = range(len(messages))
    elif found.get("prompt") is not None and found.get("response") is not None:
        messages = prompt_messages(found["prompt"])
        messages.append({"role": "assistant", "content": text_of(found["response"], "response")})
        learned = range(len(messages) - 1, len(messages))
    else:
        keys = ", ".join(sorted(map(str, found))[:8]) or "none"
        raise LineError(f"no messages, no conversations, no prompt with response; its keys: {keys}")
    turns = [i for i in learned if messages[i]["role"] == "assistant"]
    system = found.get("system")
    if not empty(system):
        if messages and messages[0]["role"] == "system":
            raise LineError("it has a system text beside the system message: which is meant?")
        messages.insert(0, {"role": "system", "content": text_of(system, "system")})
        turns = [i + 1 for i in turns]
    check_order(messages)
    return Talk(messages, turns)


def parsed(line: bytes) -> Mapping[str, Any]:
    """A line's JSON object. A key that is there twice is refused: readers differ in which one they take."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            raise LineError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
        return made

    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from error
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at character {error.pos}") from error
    except LineError:
        raise
    except RecursionError as error:
        raise LineError("not readable: its JSON is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise LineError(f"not readable: {error}") from error
    if not isinstance(found, dict):
        raise LineError(f"a JSON {kind(found)}, not an object")
    return cast("dict[str, Any]", found)


def prompt_messages(prompt: object) -> list[dict[str, str]]:
    """A prompt as messages: a text, or its text parts, is the user's."""
    if isinstance(prompt, list | tuple) and any(isinstance(part, Mapping) and is_message(part) for part in prompt):
        return messages_from(prompt, "prompt")
    return [{"role": "user", "content": text_of(prompt, "prompt")}]


def is_message(part: Mapping[str, Any]) -> bool:
    return part.get("role") is not None or part.get("from") is not None


def messages_from(found: object, place: str) -> list[dict[str, str]]:
    """The messages of a list, with roles and texts in our words. Raises LineError naming the message."""
    if not isinstance(found, list | tuple):
        raise LineError(f"{place}: a {kind(found)}, not a list")
    messages: list[dict[str, str]] = []
    for number, message in enumerate(cast("Sequence[object]", found)):
        here = f"{place}.{number}"
        if not isinstance(message, Mapping):
            raise LineError(f"{here}: a {kind(message)}, not an object")
        fields = cast("Mapping[str, Any]", message)
        for key in (*NOT_WRITTEN, *NOT_TEXT):
            if not empty(fields.get(key)):
                raise LineError(f"{here}: it has {key}, which can't be learned")
        if fields.get("weight") not in (None, 1):
            raise LineError(f"{here}: weight {fields['weight']!r}: single turns can't be weighed")
        role = one_of(fields, ("role", "from"), here)
        known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
        if known is None:
            raise LineError(f"{here}: unknown role {shortened(role)}")
        text = text_of(one_of(fields, ("content", "value"), here), f"{here}.content")
        name = fields.get("name")
        messages.append({"role": known, "content": text} | ({"name": name} if isinstance(name, str) and name else {}))
    return messages


def one_of(fields: Mapping[str, Any], keys: tuple[str, str], place: str) -> Any:
    """The value that a message has under one of two names."""
    values = [fields[key] for key in keys if fields.get(key) is not None]
    if len(values) != 1:
        raise LineError(f"{place}: {'neither' if not values else 'both'} {keys[0]} {'nor' if not values else 'and'} "
                        f"{keys[1]}")  # fmt: skip
    return values[0]


def text_of(content: object, place: str) -> str:
    """A content's text. Raises LineError when it is anything else, or has parts that are."""
    if isinstance(content, list | tuple):
        parts = cast("Sequence[object]", content)
        return "".join(part_text(part, f"{place}.{number}") for number, part in enumerate(parts))
    if not isinstance(content, str):
        raise LineError(f"{place}: a {kind(content)}, not a text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LineError(f"{place}: half a character (\\u{ord(content[error.start]):x}): no text") from error
    return content


def part_text(part: object, place: str) -> str:
    """One part of a content: a text, or {"type": "text", "text": ...}; keys without a value don't count."""
    if isinstance(part, Mapping):
        fields = {key: value for key, value in cast("Mapping[str, Any]", part).items() if value is not None}
        if fields.pop("type", "text") != "text":
            raise LineError(
                f"{place}: a part of the type {shortened(cast('Mapping[str, Any]', part)['type'])}, not text"
            )
        if fields.keys() != {"text"}:
            raise LineError(f"{place}: a part with {', '.join(sorted(map(str, fields))) or 'nothing'}, not text alone")
        part = fields["text"]
    if not isinstance(part, str):
        raise LineError(f"{place}: a {kind(part)}, not a text")
    return text_of(part, place)


def check_order(messages: Sequence[Mapping[str, str]]) -> None:
    """A conversation begins with system or user, and users and assistants take turns. Raises LineError."""
    before = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in FOLLOWS[before].split():
            raise LineError(f"message {number}: {role} {f'after {before}' if before else 'comes first'}")
        before = role


def empty(value: object) -> bool:
    """Nothing is there: also what datasets write for that."""
    return value is None or value is False or (isinstance(value, str) and value.strip() in ("", "[]", "{}")) or (
        isinstance(value, list | tuple | dict) and not value
    )  # fmt: skip


def kind(value: object) -> str:
    """What a value is, in words."""
    names: list[tuple[type, str]] = [
        (Mapping, "object"),
        (list, "list"),
        (tuple, "list"),
        (str, "text"),
        (bool, "truth value"),
        (int, "number"),
        (float, "number"),
    ]
    return (
        "null" if value is None else next((name for of, name in names if isinstance(value, of)), type(value).__name__)
    )


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# --- from messages to tokens ---


def segments(
    messages: Sequence[Mapping[str, str]], turns: Sequence[int], tokenizer: Any
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


def tokens_alone(pieces: Sequence[tuple[str, str | None]], tokenizer: Any) -> list[list[int]]:
    """Each piece's tokens, as if nothing came before it."""
    return [tokens_of(tokenizer, piece) for piece, _ in pieces]


def tokens_in_context(pieces: Sequence[tuple[str, str | None]], tokenizer: Any) -> list[list[int]] | None:
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
    return next((index + 1 for index in range(said, len(ids)) if ids[index] in ends), said)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def composed(text: str) -> str:
    """Accents joined to their letters, as Qwen's tokenizers do before anything else."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def same_text(one: str, other: str) -> bool:
    return composed(one) == composed(other)
