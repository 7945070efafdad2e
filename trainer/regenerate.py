# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its models no types)
"""`python -m trainer regenerate`: conversations whose answers the target makes itself, to train its drafter on.

Prompts: the conversations of a file in any form that training reads (--data), all their answers made anew in order; or
the target's own (--self-prompts). Answers: by the target here, greedy unless a temperature is given; or by a server
that has it (--endpoint). All follows from the seed: what is said to one prompt depends on no other prompt, on no batch
and on no interruption, as far as float32 goes (sampling.py says how far). With --time-limit the clock decides how many
there are.

What is finished goes to FILE.part, a line for each conversation, in the order of finishing (self-prompts before that to
FILE.prompts.part). However the command ends, the same command goes on with what is missing; with other settings it
refuses. Ctrl-C and SIGTERM end it with the codes 130 and 143, at once. When all is done, or the time is over, the rows
go to FILE in the order of their prompts, and FILE.origin.json says how they were made.

Memory, beside the model: 32,768 conversations that are read ahead, about 100 bytes for each finished one, the texts of
self-prompts, and 2 KiB for each prompt where near-duplicates are dropped.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from trainer.answering import Local, Manner
from trainer.asked import Outcome
from trainer.endpoint import Remote, endpoint_from, only_model
from trainer.finished import Finished
from trainer.interrupts import Interrupted, interrupts
from trainer.near_duplicates import NearDuplicates
from trainer.prepare import fingerprint
from trainer.prompts import Reader, sample_prompts, sampled_prompts
from trainer.regenerate_arguments import arguments
from trainer.regenerate_files import Places, part_of
from trainer.room import Room
from trainer.sampling import sampling
from trainer.sources import Source, open_source
from trainer.target import TargetModel, load_target

TICK_S = 10.0
"""Between two lines of progress."""


@dataclass
class Counts:
    """What became of the prompts asked for."""

    sampled: int = 0
    prompts: int = 0
    """Good ones: self-prompts that ended, of text, unlike those before; of a file, those that can be asked."""
    near_duplicates: int = 0
    unanswerable: int = 0
    """Records of a file that can't be asked, and conversations that the server refuses."""
    answered: int = 0
    """Answers: of a conversation with several turns there are several."""
    answer_tokens: int = 0
    unfinished: int = 0
    """Answers without an end in max_new_tokens."""
    short: int = 0
    altered: int = 0
    """Answers with special tokens, or whose text reads as other tokens."""
    other_end: int = 0
    """Answers that ended with another of the target's end tokens than the chat template writes."""
    too_long: int = 0
    """Conversations whose next question would not fit, by the answers so far."""
    refused: int = 0
    """Conversations that a server refused after some turns."""
    unasked_turns: int = 0
    """Questions that the time did not suffice for, in conversations with some answers."""
    rows: int = 0

    def add(self, piece: Mapping[str, Any]) -> None:
        """Count a finished conversation."""
        self.answered += piece["answers"]
        self.answer_tokens += piece["tokens"]
        self.rows += "messages" in piece
        self.unasked_turns += piece.get("unasked_turns", 0)
        if dropped := piece.get("dropped"):
            setattr(self, dropped, getattr(self, dropped) + 1)


class NoRows(ValueError):
    """Nothing to learn from came of it. complete: nor would more time make a difference."""

    def __init__(self, told: str, *, complete: bool) -> None:
        super().__init__(told)
        self.complete = complete


class Work:
    """One run of the command: what it was asked, its files and clock."""

    def __init__(self, options: argparse.Namespace, words: list[str]) -> None:
        self.options, self.words = options, words
        self.manner = Manner(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            limit=options.max_new_tokens,
            least=options.min_new_tokens,
            seed=options.seed,
        )
        self.places = Places(options.out, options.heldout, options.excerpt, options.excerpt_bytes)
        self.counts = Counts()
        self.asked = self.unasked = 0
        """Conversations that were wanted, and those of them that the time did not suffice for."""
        self._settings: dict[str, Any] = {}
        self.seconds = {"prompts": 0.0, "answers": 0.0}
        self.source: Source | None = None
        self.device = ""
        self.check_stop: Callable[[], None] = lambda: None
        """Raises Interrupted after Ctrl-C or SIGTERM."""
        self._begin = time.perf_counter()

    def settings(self, **more: Any) -> dict[str, Any]:
        """All that the answers follow from."""
        options = self.options
        found: dict[str, Any] = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "max_new_tokens": options.max_new_tokens,
            "min_new_tokens": options.min_new_tokens,
            "seed": options.seed,
            "last_turn_only": options.last_turn_only,
            "drop_near_duplicates": options.drop_near_duplicates,
        }
        if self.source is None:
            found["self_prompts"] = options.self_prompts
        else:
            found |= {"data": self.source.name, "data_digest": self.source.digest()}
        return found | more

    @property
    def _timed(self) -> bool:
        return self.options.time_limit is not None

    def start_clock(self) -> None:
        self._begin = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def late(self, share: float) -> bool:
        """Whether a share of the time is over; or Interrupted."""
        self.check_stop()
        return self.options.time_limit is not None and self.elapsed() > share * self.options.time_limit

    # --- by the target here ---

    def by_target(self) -> None:
        options = self.options
        import torch

        target = load_target(options.target, options.device, getattr(torch, options.dtype), by_hand=True)
        self.device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
        with interrupts() as self.check_stop, self._files(target=mark(target), dtype=options.dtype) as finished:
            if finished is None:
                return
            choose = sampling(self.manner.temperature, self.manner.top_p, self.manner.top_k)
            room = Room(target, options.batch, sampled=self.manner.temperature > 0 or self.source is None, say=tell)
            self.start_clock()
            if self.source is None:
                self._answer_own(target, Local(target, self.manner, choose, room, timed=self._timed), room, finished)
            else:
                reader = self._reader(finished)
                local = Local(target, self.manner, choose, room, refused=reader.refuse, timed=self._timed)
                self._answer_data(reader, local.answers(reader, lambda: self.late(1)), finished)

    def _answer_own(self, target: TargetModel, local: Local, room: Room, finished: Finished) -> None:
        options, path = self.options, part_of(self.options.out, "prompts.part")
        sampled = Finished(path, finished.settings, tell)
        try:
            sample_prompts(
                target, options.self_prompts, sampled, room, seed=options.seed, stop=lambda: self.late(1 / 3)
            )
            near = NearDuplicates(options.drop_near_duplicates)
            prompts = list(sampled_prompts(sampled, options.seed, near))
            good = sum(piece["prompt"] is not None for piece in sampled.pieces())
        except Interrupted:
            tell(f"{len(sampled.numbers):,} samples of prompts are in {path}")
            raise
        finally:
            sampled.close()
            if not sampled.numbers:
                path.unlink()
        self.counts.sampled = len(sampled.numbers)
        self.counts.prompts, self.counts.near_duplicates = len(prompts), good - len(prompts)
        self.seconds["prompts"] = self.elapsed()
        print(
            f"{len(prompts)} prompts of {self.counts.sampled} samples in {self.seconds['prompts']:.1f} s, "
            f"{self.counts.near_duplicates} near-duplicates dropped",
            flush=True,
        )
        left = (asked for asked in prompts if asked.number not in finished.numbers)
        self._write(local.answers(left, lambda: self.late(1)), finished)
        missing = sum(asked.number not in finished.numbers for asked in prompts)
        self.asked, self.unasked = options.self_prompts, missing + options.self_prompts - self.counts.sampled
        self._finish(finished, {asked.number: asked.id for asked in prompts})
        if not self.unasked:
            path.unlink(missing_ok=True)

    # --- by a server ---

    def by_server(self) -> None:
        options = self.options
        endpoint = endpoint_from(options.endpoint, options.request_timeout)
        model = options.model or only_model(endpoint)
        self.device = f"{model} at {endpoint.name}"
        with interrupts() as self.check_stop, self._files(model=model) as finished:
            if finished is None:
                return
            self.start_clock()
            reader = self._reader(finished)
            remote = Remote(endpoint, model, self.manner, concurrency=options.concurrency, refused=reader.refuse)
            self._answer_data(reader, remote.answers(reader, lambda: self.late(1)), finished)

    # --- by either ---

    def _reader(self, finished: Finished) -> Reader:
        assert self.source is not None
        share = self.options.drop_near_duplicates
        return Reader(
            self.source,
            finished,
            self.check_stop,
            last_turn_only=self.options.last_turn_only,
            near=None if share is None else NearDuplicates(share),
        )

    def _answer_data(self, reader: Reader, outcomes: Iterator[Outcome], finished: Finished) -> None:
        pieces = self._write(outcomes, finished)
        reader.verdict()
        if self._timed:
            reader.rest()
        self.counts.near_duplicates = reader.near_duplicates
        self.counts.unanswerable = reader.reasons.count
        self.counts.prompts = reader.records - reader.near_duplicates - reader.reasons.count
        self.unasked = reader.given - pieces + reader.unread
        self.asked = self.counts.prompts + reader.unread
        for one in reader.reasons.all():
            tell(f"{one.count:,} not answered: {one.reason} (record {', '.join(map(str, one.lines))})")
        self._finish(finished)

    def _write(self, outcomes: Iterator[Outcome], finished: Finished) -> int:
        """Returns how many there were."""
        begin = said = self.elapsed()
        pieces = tokens = 0
        for outcome in outcomes:
            finished.add(outcome.piece())
            pieces += 1
            tokens += outcome.tokens
            if self.elapsed() - said >= TICK_S:
                said = self.elapsed()
                tell(f"{len(finished.numbers):,} conversations, {tokens / (said - begin):,.0f} answer tokens/s")
        self.seconds["answers"] = seconds = self.elapsed() - begin
        print(f"{tokens} answer tokens of {pieces} conversations in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")
        return pieces

    @contextmanager
    def _files(self, **generator: str) -> Generator[Finished | None]:
        """The file of what is finished; None when nothing is left to do. After Ctrl-C it says how to go on."""
        out = self.options.out
        settings = self.settings(**generator)
        path = part_of(out, "part")
        self._settings = settings
        if self.places.are_whole(settings | self.places.settings(), path):
            print(f"{out} is whole already: nothing to do")
            yield None
            return
        # Numbers of self-prompts were once those of the good ones, which change with later samples.
        numbered = {} if self.source is not None else {"numbers": "samples"}
        finished = Finished(path, settings | numbered, tell)
        before = len(finished)
        if before:
            tell(f"going on behind {before:,} conversations in {path}")
        try:
            yield finished
        except BaseException as error:
            finished.close()
            if len(finished) and isinstance(error, NoRows) and error.complete:
                tell(f"all {len(finished):,} conversations are in {path}, and the same command would end as this one")
            elif len(finished):
                tell(f"{len(finished):,} conversations are in {path}; the same command goes on")
            elif path.exists():
                path.unlink()
            raise
        finished.close()

    def _finish(self, finished: Finished, ids: Mapping[int, str] | None = None) -> None:
        """Write the rows where they belong, and how they came to be. Raises NoRows.

        ids: of the prompts that are rows, where samples of prompts that came later may have made them other ones.
        """
        options = self.options
        with self.places.written() as (sorter, origin):
            for piece in finished.pieces():
                if ids is not None and piece["number"] not in ids:
                    continue
                self.counts.add(piece)
                if "messages" in piece:
                    sorter.write({"id": ids[piece["number"]] if ids else piece["id"], "messages": piece["messages"]})
            complete = not self.unasked and not self.counts.unasked_turns
            if not sorter.written:
                came = ", ".join(f"{name} {count}" for name, count in asdict(self.counts).items() if count)
                late = f"the time was over with {self.unasked:,} not asked" if self.unasked else ""
                told = "; ".join(filter(None, (late, came))) or "nothing was asked"
                raise NoRows(f"no row for {options.out}: {told}", complete=complete)
            origin |= self._origin(complete=complete)
        print(f"{self.counts.rows} rows of {self.counts.answered} answers, {self.counts.answer_tokens} answer tokens")
        if complete:
            finished.remove()
            return
        turns = f", and {self.counts.unasked_turns:,} turns of others" * bool(self.counts.unasked_turns)
        print(
            f"the time was over: {self.unasked:,} of {self.asked:,} conversations were not begun{turns}; what is there "
            f"is in {finished.path}: the same command goes on, with another --time-limit or none"
        )

    def _origin(self, *, complete: bool) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "command": ["python", "-m", "trainer", "regenerate", *self.words],
            "seed": self.options.seed,
            "python": sys.version.split()[0],
            "torch": metadata.version("torch"),
            "device": self.device,
            "complete": complete,
            "unasked": self.unasked,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "counts": asdict(self.counts),
            "settings": {**self._settings, **self.places.settings()},
        }


def mark(target: TargetModel) -> str:
    """Tells a target from others, wherever it lies: of its tokenizer, and some weights of each of its parts."""
    import torch

    digest = hashlib.sha256(fingerprint(target.tokenizer).digest.encode())
    for name, weight in target.model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:32].to(torch.float32).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def tell(line: str) -> None:
    print(f"regenerate: {line}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    """0; 130 or 143 after Ctrl-C or SIGTERM. Raises ValueError or OSError on bad input, and when no row came of it."""
    options = arguments(words)
    # All is asked first: a folder that can't be written is told before the work, not after it.
    for path in filter(None, (options.out, *(given and given[1] for given in (options.heldout, options.excerpt)))):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file, and can't take the place of one")
    work = Work(options, words)
    if options.data is not None:
        work.source = open_source(options.data)
    try:
        work.by_server() if options.endpoint else work.by_target()
    except Interrupted as error:
        tell(f"stopped by {error}")
        return 128 + error.number
    return 0
