# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""Prompts to decode, from conversations in any form: one for the last answer, or one for each turn.

    {"messages": ...}, {"conversations": ...}, {"prompt": ..., "response": ...}     as for training
    {"prompt": ...}                                                                 without an answer
    {"turns": ["...", "..."]}                                                       what the user says, as in MT-Bench

Each turn of a conversation is an answer of its own, as z-lab counts MT-Bench's two, and what was answered before is
what the model said itself just now, not what the file says: that is what a decoder meets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.chat import prompt_tokens
from trainer.conversations import LineError, check_order, parsed, prompt_messages, talk_from, text_of
from trainer.speculate import Decoded
from trainer.target import TargetModel

Turns = Literal["all", "last"]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Dialogue:
    """What is said to the target: the messages before each of its answers."""

    id: str
    place: str  # file and line, for an error
    said: tuple[Messages, ...]


@dataclass(frozen=True)
class AskedTurn:
    """A turn's prompt, and how it was answered; None: there was no room left for an answer."""

    turn: int  # from 1 on
    prompt: list[int]
    answer: Decoded | None


def read_dialogues(file: Path, count: int | None, turns: Turns = "all") -> list[Dialogue]:
    """The first `count` conversations of a JSONL file.

    turns "last": only the last answer is asked for, behind those that the file has. Raises ValueError naming the line
    that is no conversation; also when there is none at all.
    """
    found: list[Dialogue] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if len(found) == count:
                break
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                record = parsed(line)
                name = str(record.get("id", record.get("question_id", f"line {number}")))
                found.append(Dialogue(name, place, said_before_answers(record, turns)))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    if not found:
        raise ValueError(f"{file}: no conversation to measure with")
    return found


def said_before_answers(record: Mapping[str, Any], turns: Turns) -> tuple[Messages, ...]:
    """A record's messages, cut where answers belong. Raises LineError."""
    if record.get("turns") is not None:
        texts = record["turns"]
        if not isinstance(texts, list) or not texts:
            raise LineError("turns: not a list of what the user says")
        said = [[{"role": "user", "content": text_of(text, f"turns.{n}")}] for n, text in enumerate(texts)]
        if turns == "last" and len(said) > 1:
            raise LineError("it has turns without answers: only --turns all can ask them")
        return tuple(said)
    if record.get("prompt") is not None and record.get("response") is None:
        messages = prompt_messages(record["prompt"])
        check_order(messages)
    else:
        messages = talk_from(record).messages
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise LineError("no prompt")
    if turns == "last":
        return (messages,)
    runs: list[Messages] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            runs.append([])
        else:
            runs[-1].append(message)
    return tuple(runs)


def first_prompt(dialogue: Dialogue, target: TargetModel) -> list[int]:
    """The tokens before its first answer. Raises ValueError naming the line when the chat template refuses it."""
    return _prompt(dialogue, target, dialogue.said[0])


def ask(
    dialogue: Dialogue,
    target: TargetModel,
    answer: Callable[[list[int]], Decoded],
    fits: Callable[[list[int]], bool],
) -> Iterator[AskedTurn]:
    """Asks turn by turn. Where one no longer fits, neither it nor those after it are answered."""
    history: Messages = []
    room = True
    for turn, said in enumerate(dialogue.said, start=1):
        history += said
        prompt = _prompt(dialogue, target, history)
        room = room and fits(prompt)
        if not room:
            yield AskedTurn(turn, prompt, None)
            continue
        decoded = answer(prompt)
        yield AskedTurn(turn, prompt, decoded)
        history.append({"role": "assistant", "content": answer_text(target, decoded.tokens)})


def answer_text(target: TargetModel, tokens: Sequence[int]) -> str:
    """What an answer says, for the conversation to go on with."""
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True))


def _prompt(dialogue: Dialogue, target: TargetModel, messages: Messages) -> list[int]:
    try:
        return prompt_tokens(target.tokenizer, messages)
    except ValueError as error:
        raise ValueError(f"{dialogue.place}: {error}") from error
