# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""Conversations answered by a target that runs here, many at a time, and only what is fit to learn from.

Dropped are answers without an end (the target ran away), empty or too short ones, and answers that training would read
as other tokens, since it reads the text: with special tokens in the text, with a text that does not give back their
tokens, and those that ended otherwise than the chat template ends a turn. A conversation ends before the first of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainer.asked import Asked, Outcome
from trainer.chat import ChatError, render, tokens_of
from trainer.generate import Generated
from trainer.room import Room, generate_fitting
from trainer.sampling import Choose, key_of
from trainer.target import TargetModel

TOGETHER = 1024
"""Prompts that are tokenised together."""
WINDOW = 32_768
"""Conversations that are read ahead, to be sorted by length: some 100 MB of text."""
USUAL = 256
"""Tokens of a usual prompt."""


@dataclass(frozen=True)
class Manner:
    """How answers are made."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    limit: int = 256
    """Tokens of the longest answer."""
    least: int = 8
    """Tokens of the shortest one that is kept."""
    seed: int = 0


class Local:
    """Answers by the target's own decoding."""

    def __init__(
        self,
        target: TargetModel,
        manner: Manner,
        choose: Choose,
        room: Room,
        *,
        refused: Callable[[int, str], None] | None = None,
        timed: bool = False,
    ) -> None:
        """refused: is told of each conversation, by its number, that can't be asked, and why; it may raise.

        None: such a conversation has an outcome without a row. timed: the clock may end it, so that little is sorted by
        length at a time: what the time does not suffice for is then the last of them, not the short ones.
        """
        self._refused = refused
        self._target, self._manner, self._choose, self._room = target, manner, choose, room
        self._text, self._reads_back = text_reader(target.tokenizer)
        self._ends = target.end_tokens()
        self._window = min(WINDOW, 8 * room.slots(manner.limit + USUAL)) if timed else WINDOW

    def answers(self, conversations: Iterable[Asked], stop: Callable[[], bool]) -> Iterator[Outcome]:
        """Each conversation's outcome, in the order of finishing; turns after turns, a window at a time.

        Stopped, those with answers end as they are, and the others have no outcome.
        """
        waiting = iter(conversations)
        while not stop() and (window := list(islice(waiting, self._window))):
            while window:
                again: list[Asked] = []
                yield from self._turn(window, again, stop)
                window = again
                if stop():
                    yield from (found for asked in window if (found := asked.cut()))
                    return

    def _turn(self, window: Sequence[Asked], again: list[Asked], stop: Callable[[], bool]) -> Iterator[Outcome]:
        """The next answer to each; those that go on come to `again`."""
        prompts: list[list[int]] = []
        open_ones: list[Asked] = []
        for begin in range(0, len(window), TOGETHER):
            stop()
            for asked, prompt in self._prompts(window[begin : begin + TOGETHER]):
                if not isinstance(prompt, str):
                    open_ones.append(asked)
                    prompts.append(prompt)
                elif self._refused is not None and not asked.answers:
                    self._refused(asked.number, prompt)
                else:
                    yield asked.outcome("too_long")
        manner = self._manner
        answered: set[int] = set()
        keys = [key_of("answer", manner.seed, asked.number, asked.answers) for asked in open_ones]
        for one in generate_fitting(
            self._target, prompts, keys, manner.limit, self._ends, self._room, choose=self._choose, stop=stop
        ):
            asked = open_ones[one.index]
            answered.add(one.index)
            asked.tokens += len(one.tokens)
            dropped, text = self._judged(asked, one)
            if dropped:
                yield asked.outcome(dropped)
            elif asked.keep(text):
                again.append(asked)
            else:
                yield asked.outcome()
        for index, asked in enumerate(open_ones):
            if index not in answered and (found := asked.cut()):
                yield found

    def _prompts(self, some: Sequence[Asked]) -> list[tuple[Asked, list[int] | str]]:
        """Each one's tokens, or why it can't be asked: the template refuses it, or it is too long."""
        texts: list[str] = []
        found: list[str | None] = []
        for asked in some:
            try:
                texts.append(render(self._target.tokenizer, asked.said, answer_follows=True))
                found.append(None)
            except ChatError as error:
                found.append(str(error))
        # Together, since the tokenizer then uses all processors.
        rows = iter(self._target.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        return [
            (asked, self._fitting(next(rows)) if why is None else why) for asked, why in zip(some, found, strict=True)
        ]

    def _fitting(self, prompt: list[int]) -> list[int] | str:
        limit, longest = self._manner.limit, self._target.longest
        if len(prompt) + limit > longest:
            return f"{len(prompt)} tokens, with {limit} new ones more than the {longest} that the target has"
        return prompt or "the chat template makes nothing of it"

    def _judged(self, asked: Asked, one: Generated) -> tuple[str | None, str]:
        """Why an answer is dropped, if it is, and its text."""
        if one.end is None:
            return "unfinished", ""
        text = self._text(one.tokens)
        if text is not None and text.strip() and len(one.tokens) >= self._manner.least:
            chat = [*asked.said, {"role": "assistant", "content": text}]
            if writes_so(self._target.tokenizer, chat, [*one.tokens, one.end]):
                return None, text
            return "other_end" if self._reads_back(text, one.tokens) else "altered", ""
        return "short" if text is not None and self._reads_back(text, one.tokens) else "altered", ""


def text_reader(
    tokenizer: Any,
) -> tuple[Callable[[Sequence[int]], str | None], Callable[[str, Sequence[int]], bool]]:
    """Tokens to their text, None when special tokens are among them; and whether a text reads back as its tokens."""
    added = frozenset(tokenizer.added_tokens_decoder)  # the tokenizer makes a new one at each look, in a millisecond

    def text_of(tokens: Sequence[int]) -> str | None:
        if not added.isdisjoint(tokens):
            return None
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def reads_back(text: str, tokens: Sequence[int]) -> bool:
        return tokenizer.encode(text, add_special_tokens=False) == list(tokens)

    return text_of, reads_back


def writes_so(tokenizer: Any, chat: Sequence[dict[str, str]], answer: Sequence[int]) -> bool:
    """Whether the chat template writes the last message with these tokens, its end token included."""
    try:
        before = render(tokenizer, chat[:-1], answer_follows=True)
        written = tokens_of(tokenizer, render(tokenizer, chat, answer_follows=False).removeprefix(before))
    except ChatError:
        return False
    return written[: len(answer)] == list(answer)
