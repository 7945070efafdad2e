"""One record of a data file, as a conversation.

    talk = talk_from(b'{"messages": [...]}')

Three forms are read: {"messages": [{"role", "content"}]}, ShareGPT's {"conversations": [{"from", "value"}]}, and
{"prompt", "response"}, where the prompt is a text or a list of messages and the response alone is learned. A text may
also be a list of text parts. What would be learned otherwise than it was said (calls of tools, images, a thought kept
beside the answer, roles out of order) is refused with the reason, and the rest of the file goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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

MOST_SHOWN = 200  # characters of a reason


class LineError(ValueError):
    """A record that can't be learned from. Its text says why: printable, in one line, whatever the record holds."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """A text for logs and files: what can't be printed or written is escaped, and it ends somewhere."""
    begin = text[: MOST_SHOWN + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in begin)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN - 3]}..."


@dataclass(frozen=True)
class Talk:
    """A conversation, and which of its messages may be learned."""

    messages: list[dict[str, str]]
    turns: list[int]


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
        keys = ", ".join(sorted(str(key) for key, value in found.items() if value is not None)[:8]) or "none"
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
        raise LineError(f"{kind(found)}, not an object")
    return cast("dict[str, Any]", found)


def prompt_messages(prompt: object) -> list[dict[str, str]]:
    """A prompt as messages: a text, or its text parts, is the user's."""
    if isinstance(prompt, list | tuple):
        parts = cast("Sequence[object]", prompt)
        if any(isinstance(part, Mapping) and is_message(cast("Mapping[str, Any]", part)) for part in parts):
            return messages_from(parts, "prompt")
        return [{"role": "user", "content": text_of(parts, "prompt")}]
    return [{"role": "user", "content": text_of(prompt, "prompt")}]


def is_message(part: Mapping[str, Any]) -> bool:
    return part.get("role") is not None or part.get("from") is not None


def messages_from(found: object, place: str) -> list[dict[str, str]]:
    """The messages of a list, with roles and texts in our words. Raises LineError naming the message."""
    if not isinstance(found, list | tuple):
        raise LineError(f"{place}: {kind(found)}, not a list")
    messages: list[dict[str, str]] = []
    for number, message in enumerate(cast("Sequence[object]", found)):
        here = f"{place}.{number}"
        if not isinstance(message, Mapping):
            raise LineError(f"{here}: {kind(message)}, not an object")
        fields = cast("Mapping[str, Any]", message)
        for key in (*NOT_WRITTEN, *NOT_TEXT):
            if not empty(fields.get(key)):
                raise LineError(f"{here}: it has {key}, which can't be learned")
        if fields.get("weight") not in (None, 1):
            raise LineError(f"{here}: weight {shortened(fields['weight'])}: single turns can't be weighed")
        role = one_of(fields, ("role", "from"), here)
        known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
        if known is None:
            raise LineError(f"{here}: unknown role {shortened(role)}")
        text = text_of(one_of(fields, ("content", "value"), here), f"{here}.content")
        name = text_of(fields["name"], f"{here}.name") if isinstance(fields.get("name"), str) else ""
        messages.append({"role": known, "content": text} | ({"name": name} if name else {}))
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
        raise LineError(f"{place}: {kind(content)}, not a text")
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
        raise LineError(f"{place}: {kind(part)}, not a text")
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
        (Mapping, "an object"),
        (list, "a list"),
        (tuple, "a list"),
        (str, "a text"),
        (bool, "a truth value"),
        (int, "a number"),
        (float, "a number"),
    ]
    if value is None:
        return "null"
    return next((name for of, name in names if isinstance(value, of)), f"a {type(value).__name__}")


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
