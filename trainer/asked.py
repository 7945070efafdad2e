"""Conversations that are to be answered anew: what is asked, turn by turn, and what came of it.

A record is anything that training can read (conversations.py), and two forms that it can't: a prompt without a
response, and messages that end with the user's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.conversations import LineError, parsed, talk_from

Message = dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a conversation."""

    number: int
    row: dict[str, Any] | None
    """{"id", "messages"} to learn from, or None."""
    dropped: str | None
    """Why there is no row, or why it ends early: the name of one of Counts' fields."""
    answers: int
    tokens: int
    """Of all answers, also of those that were not kept."""
    unasked: int = 0
    """Turns that the time did not suffice for: their turn comes when the command goes on."""

    def piece(self) -> dict[str, Any]:
        """As a line of JSON."""
        found: dict[str, Any] = {"number": self.number, "answers": self.answers, "tokens": self.tokens}
        if self.dropped:
            found["dropped"] = self.dropped
        if self.unasked:
            found["unasked_turns"] = self.unasked
        return found | (self.row or {})


@dataclass
class Asked:
    """A conversation under way."""

    number: int
    """Of its record, or of its prompt."""
    id: str
    turns: list[list[Message]]
    """What comes before each answer: system and user messages, and with a single turn all that was said before."""
    said: list[Message] = field(default_factory=list[Message])
    answers: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.said += self.turns[0]

    def keep(self, answer: str) -> bool:
        """Take an answer; whether the conversation goes on."""
        self.said.append({"role": "assistant", "content": answer})
        self.answers += 1
        if self.answers == len(self.turns):
            return False
        self.said += self.turns[self.answers]
        return True

    def go_on(self, piece: Mapping[str, Any]) -> None:
        """Take the answers of a piece that ended with turns unasked."""
        while len(self.said) < len(piece["messages"]):
            self.keep(piece["messages"][len(self.said)]["content"])
        self.tokens = piece["tokens"]

    def cut(self) -> Outcome | None:
        """As it is when the time is over: with its answers so far; None without any, as if it was never begun."""
        return self.outcome(unasked=len(self.turns) - self.answers) if self.answers else None

    def outcome(self, dropped: str | None = None, *, unasked: int = 0) -> Outcome:
        """As it is now: with the answers so far, ending with the last of them."""
        tried = self.answers + (dropped not in (None, "too_long"))
        if not self.answers:
            return Outcome(self.number, None, dropped, tried, self.tokens)
        messages = list(self.said)
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return Outcome(self.number, {"id": self.id, "messages": messages}, dropped, tried, self.tokens, unasked)


def asked_from(record: bytes | Mapping[str, Any], number: int, name: str, *, last_turn_only: bool) -> Asked:
    """A record's conversation. Raises LineError with the reason when it asks nothing.

    number, name: of the record and its file; they make the id where the record has none.
    """
    found = parsed(record) if isinstance(record, bytes) else record
    forms = ("messages", "conversations", "response")
    if found.get("prompt") is not None and all(found.get(form) is None for form in forms):
        found = {**found, "response": ""}
    talk = talk_from(found)
    messages, turns = talk.messages, list(talk.turns)
    if not messages:
        raise LineError("no messages")
    if messages[-1]["role"] != "assistant":
        turns.append(len(messages))
    if not turns or messages[turns[0] - 1]["role"] == "system":
        raise LineError("nothing is asked in it")
    if last_turn_only:
        turns = turns[-1:]
    begins = [0, *(turn + 1 for turn in turns)]
    cut = [messages[begin:turn] for begin, turn in zip(begins, turns, strict=False)]
    if any(part[0]["role"] == "tool" for part in cut[1:]):
        raise LineError("a tool answers a message that would be made anew; --last-turn-only may help")
    return Asked(number, id_of(found) or f"{name}-{number:06d}", cut)


def id_of(record: Mapping[str, Any]) -> str | None:
    """The id that a record has, if it is a text or a number."""
    found = record.get("id")
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return found if isinstance(found, str) and found and found.isprintable() else None


def users_words(turns: Sequence[Sequence[Message]]) -> str:
    """All that the user says in a conversation."""
    return "\n".join(message["content"] for turn in turns for message in turn if message["role"] == "user")
