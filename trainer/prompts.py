# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""Where the prompts come from: a file of conversations, or the target itself, which continues its own user turn.

Self-prompts are as in Magpie (arXiv 2406.08464), at temperature 1 with top-p 0.95. Dropped are those without an end,
empty ones, those with special tokens or whose text does not give back their tokens, and near-duplicates.
"""

from collections.abc import Callable, Iterator
from typing import Any

from trainer.answering import text_reader
from trainer.asked import Asked, asked_from, users_words
from trainer.chat import render, tokens_of
from trainer.conversations import LineError
from trainer.finished import Finished
from trainer.near_duplicates import NearDuplicates
from trainer.prepare import MOST_BAD, SHOWN, Reasons
from trainer.prepared import DataError
from trainer.room import Room, generate_fitting
from trainer.sampling import key_of, sampling
from trainer.sources import Source
from trainer.target import TargetError, TargetModel

PROMPT_TOKENS = 96
"""A prompt longer than this ran away."""
TOP_P = 0.95
HOPELESS = 100
"""So many records that can't be answered, if they are the half of all so far, end the command early."""


def user_header(tokenizer: Any) -> list[int]:
    """The tokens before a user's first words, system prompt included, as the chat template writes them."""
    mark = "\u241a"
    text = render(tokenizer, [{"role": "user", "content": mark}], answer_follows=False)
    head, found, _ = text.partition(mark)
    if not found:
        raise TargetError("the target's chat template does not write the user's words as they are")
    return tokens_of(tokenizer, head)


def sample_prompts(
    target: TargetModel, count: int, into: Finished, room: Room, *, seed: int, stop: Callable[[], bool]
) -> None:
    """Sample the target's user turn, as often as `count` says less what is in the file; each sample is a line there."""
    numbers = [number for number in range(count) if number not in into.numbers]
    header, (text_of, reads_back) = user_header(target.tokenizer), text_reader(target.tokenizer)
    keys = [key_of("prompt", seed, number) for number in numbers]
    choose = sampling(1.0, TOP_P)
    for sample in generate_fitting(
        target, [header] * len(numbers), keys, PROMPT_TOKENS, target.end_tokens(), room, choose=choose, stop=stop
    ):
        text = text_of(sample.tokens) if sample.end is not None else None
        good = text is not None and text.strip() and reads_back(text, sample.tokens)
        into.add({"number": numbers[sample.index], "prompt": text if good else None})


def sampled_prompts(found: Finished, seed: int, near: NearDuplicates) -> Iterator[Asked]:
    """The samples that are good prompts, by their numbers; an id's number counts the good ones."""
    good = 0
    for piece in found.pieces():
        if piece["prompt"] is not None and near.add(piece["prompt"]):
            yield Asked(piece["number"], f"self-{seed}-{good:06d}", [[{"role": "user", "content": piece["prompt"]}]])
            good += 1


class Reader:
    """The conversations of a source that are still to be answered, and what became of its other records."""

    def __init__(
        self,
        source: Source,
        finished: Finished,
        check_stop: Callable[[], None],
        *,
        last_turn_only: bool,
        near: NearDuplicates | None,
    ) -> None:
        """finished: answered records are passed over, and half answered ones gone on with.

        check_stop: asked before each record; it may raise.
        """
        self._source, self._finished, self._check_stop = source, finished, check_stop
        self._last_turn_only, self._near = last_turn_only, near
        self.records = 0
        self.given = 0
        """Conversations that were handed out, less those that turned out to be unanswerable."""
        self.unread = 0
        """Records without an answer that `rest` came by."""
        self._iterator = self._conversations()
        self._ended = self._late = False
        self.near_duplicates = 0
        self.reasons = Reasons()
        """Why records can't be answered."""

    def __iter__(self) -> Iterator[Asked]:
        """In the source's order. Raises DataError: it can't be read, or more than a tenth can't be answered."""
        return self._iterator

    def rest(self) -> None:
        """When the time is over: count the records that were not come to. Bad ones are among them."""
        self._late = True
        for _ in self._iterator:
            pass

    def _conversations(self) -> Iterator[Asked]:
        for number, record in self._source.records():
            self._check_stop()
            known = number in self._finished.numbers
            partial = None if known else self._finished.partial(number)
            if self._late:
                begun = known or partial is not None
                self.records += begun
                self.unread += not begun
                continue
            self.records += 1
            if known and self._near is None:
                continue
            try:
                if isinstance(record, LineError):
                    raise record
                asked = asked_from(record, number, self._source.name, last_turn_only=self._last_turn_only)
            except LineError as error:
                self._refuse(number, str(error))
                continue
            if self._near is not None and not self._near.add(users_words(asked.turns)):
                self.near_duplicates += 1
            elif not known:
                self.given += 1
                if partial:
                    asked.go_on(partial)
                yield asked
        self._ended = True
        self.verdict()

    def refuse(self, number: int, reason: str) -> None:
        """Count a record that was handed out and can't be answered. Raises DataError: most can't, or a tenth of all."""
        self.given -= 1
        self._refuse(number, reason)

    def _refuse(self, number: int, reason: str) -> None:
        self.reasons.add(number, reason)
        if self._ended:
            self.verdict()
        if self.reasons.count >= HOPELESS and 2 * self.reasons.count > self.records:
            raise DataError(self._told())

    def verdict(self) -> None:
        """Raises DataError when more than a tenth of the records so far can't be answered."""
        if self.reasons.count > MOST_BAD * self.records:
            raise DataError(self._told())

    def _told(self) -> str:
        shown = "; ".join(
            f"{one.count:,} times: {one.reason} (record {', '.join(map(str, one.lines))}"
            f"{', ...' * (one.count > len(one.lines))})"
            for one in self.reasons.all()[:SHOWN]
        )
        return (
            f"data {self._source.path}: {self.reasons.count:,} of {self.records:,} records can't be answered; {shown}"
        )
