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
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from trainer.answering import Local, Manner
from trainer.asked import Outcome
from trainer.endpoint import Remote, endpoint_from, only_model
from trainer.finished import Finished, FinishedError, differences
from trainer.interrupts import Interrupted, interrupts
from trainer.near_duplicates import NearDuplicates
from trainer.prepare import fingerprint
from trainer.prompts import Reader, sample_prompts, sampled_prompts
from trainer.regenerate_arguments import arguments
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
    rows: int = 0

    def add(self, piece: Mapping[str, Any]) -> None:
        """Count a finished conversation."""
        self.answered += piece["answers"]
        self.answer_tokens += piece["tokens"]
        self.rows += "messages" in piece
        if dropped := piece.get("dropped"):
            setattr(self, dropped, getattr(self, dropped) + 1)


class Sorter:
    """Sends each row where it belongs: the first rows held out, then a copy of the first short ones, all to `out`."""

    def __init__(
        self, out: TextIO, heldout: tuple[int, TextIO] | None, excerpt: tuple[int, TextIO] | None, largest: int
    ) -> None:
        self._out, self._largest = out, largest
        self._heldout, self._excerpt = heldout, excerpt
        self._held = self._copied = 0
        self.written = 0
        """Rows in `out`."""

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False) + "\n"
        if self._heldout and self._held < self._heldout[0]:
            self._held += 1
            self._heldout[1].write(line)
            return
        self._out.write(line)
        self.written += 1
        if self._excerpt and self._copied < self._excerpt[0] and len(line.encode()) <= self._largest:
            self._copied += 1
            self._excerpt[1].write(line)


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
        self.counts = Counts()
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
                self._answer_own(target, Local(target, self.manner, choose, room), room, finished)
            else:
                reader = self._reader(finished)
                local = Local(target, self.manner, choose, room, refused=reader.refuse)
                self._answer_data(reader, local.answers(reader, lambda: self.late(1)), finished)

    def _answer_own(self, target: TargetModel, local: Local, room: Room, finished: Finished) -> None:
        options, path = self.options, part_of(self.options.out, "prompts.part")
        sampled = Finished(path, finished.settings, tell)
        try:
            if not sampled.closed:
                sample_prompts(
                    target, options.self_prompts, sampled, room, seed=options.seed, stop=lambda: self.late(1 / 3)
                )
                if sampled.numbers:
                    sampled.finish()
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
        self._finish(finished)
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
            finished.numbers,
            self.check_stop,
            last_turn_only=self.options.last_turn_only,
            near=None if share is None else NearDuplicates(share),
        )

    def _answer_data(self, reader: Reader, outcomes: Iterator[Outcome], finished: Finished) -> None:
        self._write(outcomes, finished)
        reader.verdict()
        self.counts.near_duplicates = reader.near_duplicates
        self.counts.unanswerable = reader.reasons.count
        self.counts.prompts = reader.records - reader.near_duplicates - reader.reasons.count
        for one in reader.reasons.all():
            tell(f"{one.count:,} not answered: {one.reason} (record {', '.join(map(str, one.lines))})")
        self._finish(finished)

    def _write(self, outcomes: Iterator[Outcome], finished: Finished) -> None:
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

    @contextmanager
    def _files(self, **generator: str) -> Generator[Finished | None]:
        """The file of what is finished; None when nothing is left to do. After Ctrl-C it says how to go on."""
        out = self.options.out
        settings = self.settings(**generator)
        path = part_of(out, "part")
        if is_whole(out, settings | self._places(), path):
            print(f"{out} is whole already: nothing to do")
            yield None
            return
        finished = Finished(path, settings, tell)
        before = len(finished.numbers)
        if before:
            tell(f"going on behind {before:,} conversations in {path}")
        try:
            yield finished
        except BaseException:
            finished.close()
            if finished.numbers:
                tell(f"{len(finished.numbers):,} conversations are in {path}; the same command goes on")
            elif path.exists():
                path.unlink()
            raise
        finished.close()

    def _places(self) -> dict[str, Any]:
        """Where rows go: what makes other files, not other answers."""
        options = self.options
        return {
            name: None if given is None else [given[0], str(given[1])]
            for name, given in (("heldout", options.heldout), ("excerpt", options.excerpt))
        } | {"excerpt_bytes": options.excerpt_bytes}

    def _finish(self, finished: Finished) -> None:
        """Write the rows where they belong, and last how they came to be. Raises ValueError when there are none."""
        options = self.options
        with ExitStack() as files:
            out = files.enter_context(in_place_of(options.out))
            heldout, excerpt = (
                (share[0], files.enter_context(in_place_of(share[1]))) if share else None
                for share in (options.heldout, options.excerpt)
            )
            sorter = Sorter(out, heldout, excerpt, options.excerpt_bytes)
            for piece in finished.pieces():
                self.counts.add(piece)
                if "messages" in piece:
                    sorter.write({"id": piece["id"], "messages": piece["messages"]})
            if not sorter.written:
                came = ", ".join(f"{name} {count}" for name, count in asdict(self.counts).items())
                raise ValueError(f"no row for {options.out}: {came}")
            with in_place_of(options.out.with_suffix(".origin.json")) as file:
                file.write(json.dumps(self._origin(finished.settings), indent=2) + "\n")
        finished.remove()
        print(f"{self.counts.rows} rows of {self.counts.answered} answers, {self.counts.answer_tokens} answer tokens")

    def _origin(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "command": ["python", "-m", "trainer", "regenerate", *self.words],
            "seed": self.options.seed,
            "python": sys.version.split()[0],
            "torch": metadata.version("torch"),
            "device": self.device,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "counts": asdict(self.counts),
            "settings": {**settings, **self._places()},
        }


def mark(target: TargetModel) -> str:
    """Tells a target from others, wherever it lies: of its tokenizer, and some weights of each of its parts."""
    import torch

    digest = hashlib.sha256(fingerprint(target.tokenizer).digest.encode())
    for name, weight in target.model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:32].to(torch.float32).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def part_of(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


def is_whole(out: Path, settings: Mapping[str, Any], part: Path) -> bool:
    """Whether the file was made with these settings, to its end. Raises FinishedError: it is another's."""
    if not out.exists():
        return False
    try:
        origin = json.loads(out.with_suffix(".origin.json").read_text())
        found: Any = origin["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise FinishedError(
            f"{out} is there already, and not this command's: name another --out, or remove it"
        ) from None
    if told := differences(found, json.loads(json.dumps(settings))):
        raise FinishedError(f"{out} was made with other settings: {told}. Name another --out, or remove it")
    return not part.exists()


@contextmanager
def in_place_of(path: Path) -> Generator[TextIO]:
    """A file that takes the place of `path` when the block ends well; after an error `path` is as it was."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


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
