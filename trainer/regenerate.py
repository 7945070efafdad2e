# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""`python -m trainer regenerate`: conversations that the target makes by itself, to train its drafter on.

Prompts: the target continues its own user-turn header (as in Magpie, arXiv 2406.08464), temperature 1, top-p 0.95. Each
is then answered greedily, since the drafter is to predict what the target says. All follows from the seed, on the same
device with the same batch size; with --time-limit the clock decides how many rows there are, the seed only which.
Dropped: prompts and answers without an end (the target ran away), empty or too short ones, prompts seen before, special
tokens in the text, and answers that training would read as other tokens, since it reads the text: those whose text does
not give back their tokens, and those that ended otherwise than the chat template ends a turn.

Rows are written in the order of their prompts, each as soon as those before it are done, into FILE.jsonl.part; that
takes FILE.jsonl's place at the end, and stays when the command is stopped before. Beside FILE.jsonl lies
FILE.origin.json: the command, the seed and what came of it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from trainer.arguments import at_least_one, at_least_zero
from trainer.chat import prompt_tokens, render, tokens_of
from trainer.generate import Generated, generate, top_p
from trainer.target import TargetError, TargetModel, load_target

PROMPT_TOKENS = 96
"""A prompt longer than this ran away."""
TOP_P = 0.95


@dataclass
class Counts:
    """What became of the prompts asked for."""

    sampled: int = 0
    prompts: int = 0
    """Good ones: ended, of text, not seen before."""
    answered: int = 0
    """Fewer than `prompts` when the time ran out."""
    answer_tokens: int = 0
    unfinished: int = 0
    """Answers without an end in max_new_tokens."""
    short: int = 0
    altered: int = 0
    """Answers with special tokens, or whose text reads as other tokens."""
    other_end: int = 0
    """Answers that ended with another of the target's end tokens than the chat template writes."""
    rows: int = 0


def user_header(tokenizer: Any) -> list[int]:
    """The tokens before a user's first words, system prompt included, as the chat template writes them."""
    mark = "\u241a"
    text = render(tokenizer, [{"role": "user", "content": mark}], answer_follows=False)
    head, found, _ = text.partition(mark)
    if not found:
        raise TargetError("the target's chat template does not write the user's words as they are")
    return tokens_of(tokenizer, head)


def text_reader(tokenizer: Any) -> Callable[[Sequence[int]], str | None]:
    """A function from tokens to their text: None when special tokens are among them or it reads back as others."""
    added = frozenset(tokenizer.added_tokens_decoder)  # the tokenizer makes a new one at each look, in a millisecond

    def read(tokens: Sequence[int]) -> str | None:
        if not added.isdisjoint(tokens):
            return None
        text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        return text if tokenizer.encode(text, add_special_tokens=False) == list(tokens) else None

    return read


def sample_prompts(
    target: TargetModel,
    count: int,
    counts: Counts,
    *,
    seed: int,
    slots: int,
    stop: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Up to `count` different prompts, sampled from the target's user turn."""
    header = user_header(target.tokenizer)
    choose = top_p(TOP_P, torch.Generator(target.device).manual_seed(seed))
    ends = target.end_tokens()
    found = generate(target, [header] * count, PROMPT_TOKENS, ends, slots=slots, choose=choose, stop=stop)
    read = text_reader(target.tokenizer)
    texts: dict[str, None] = {}  # a set that keeps its order
    for sample in in_order(found):
        counts.sampled += 1
        text = read(sample.tokens) if sample.end is not None else None
        if text and text.strip():
            texts.setdefault(text)
    counts.prompts = len(texts)
    return list(texts)


def in_order(found: Iterator[Generated]) -> Iterator[Generated]:
    """The same, by index; each as soon as all before it have come."""
    held: dict[int, Generated] = {}
    due = 0
    for one in found:
        held[one.index] = one
        while due in held:
            yield held.pop(due)
            due += 1


def answer(
    target: TargetModel,
    prompts: Sequence[str],
    counts: Counts,
    *,
    seed: int,
    limit: int,
    least: int,
    slots: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:
    """Rows {"id", "messages"}: each prompt with its greedy answer, those that are fit to learn from."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = [prompt_tokens(target.tokenizer, chat) for chat in chats]
    found = generate(target, inputs, limit, target.end_tokens(), slots=slots, stop=stop)
    read = text_reader(target.tokenizer)
    for one in in_order(found):
        counts.answered += 1
        counts.answer_tokens += len(one.tokens)
        text = read(one.tokens)
        if one.end is None:
            counts.unfinished += 1
        elif len(one.tokens) < least or not text or not text.strip():
            counts.short += text is not None
            counts.altered += text is None
        else:
            chat = [*chats[one.index], {"role": "assistant", "content": text}]
            if not writes_so(target.tokenizer, chat, [*one.tokens, one.end]):
                counts.other_end += 1
                continue
            counts.rows += 1
            yield {"id": f"self-{seed}-{one.index:06d}", "messages": chat}


def writes_so(tokenizer: Any, chat: Sequence[dict[str, str]], answer: Sequence[int]) -> bool:
    """Whether the chat template writes the last message with these tokens, its end token included."""
    before = render(tokenizer, chat[:-1], answer_follows=True)
    written = tokens_of(tokenizer, render(tokenizer, chat, answer_follows=False).removeprefix(before))
    return written[: len(answer)] == list(answer)


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
            self._put(self._heldout[1], line)
            return
        self._put(self._out, line)
        self.written += 1
        if self._excerpt and self._copied < self._excerpt[0] and len(line.encode()) <= self._largest:
            self._copied += 1
            self._put(self._excerpt[1], line)

    @staticmethod
    def _put(file: TextIO, line: str) -> None:
        file.write(line)
        file.flush()


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m trainer regenerate", description="Conversations made by the target itself."
    )
    parser.add_argument("--target", required=True, help="folder or hub name of the target model")
    parser.add_argument("--self-prompts", type=at_least_one, required=True, metavar="N", help="prompts to sample")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=256, help="longer answers are dropped (%(default)s)"
    )
    parser.add_argument(
        "--min-new-tokens", type=at_least_zero, default=8, help="shorter answers are dropped (%(default)s)"
    )
    parser.add_argument("--heldout", nargs=2, metavar=("K", "FILE"), help="the first K rows go there instead")
    parser.add_argument("--excerpt", nargs=2, metavar=("K", "FILE"), help="K short rows of --out are copied there")
    parser.add_argument("--excerpt-bytes", type=at_least_one, default=1500, help="the longest of them (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="begin no prompt after S/3 seconds, no answer after S"
    )
    parser.add_argument("--batch", type=at_least_one, default=768, help="sequences at a time (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    options = parser.parse_args(words)
    for name in ("heldout", "excerpt"):
        if given := getattr(options, name):
            try:
                setattr(options, name, (at_least_one(given[0]), Path(given[1])))
            except argparse.ArgumentTypeError as error:
                parser.error(f"argument --{name}: {error}")
    files = [options.out, *(path for _, path in filter(None, (options.heldout, options.excerpt)))]
    if len({file.resolve() for file in files}) < len(files):
        parser.error("--out, --heldout and --excerpt need a file each")
    return options


@contextmanager
def in_place_of(path: Path) -> Generator[TextIO]:
    """A file that takes the place of `path` when the block ends well.

    After an error what was written stays in PATH.part, where a line on stderr says so, and `path` is as it was.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a device is written as it is
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
    except BaseException:
        if part.stat().st_size:
            print(f"what was finished is in {part}", file=sys.stderr)
        else:
            part.unlink()
        raise
    part.replace(path)


def main(words: list[str]) -> int:
    """0. Raises ValueError or OSError on bad input, and when no row came of it."""
    options = _arguments(words)
    counts = Counts()
    with ExitStack() as files:
        # All files are opened first: a folder that can't be written is told before the work, not after it.
        out = files.enter_context(in_place_of(options.out))
        heldout, excerpt = (
            (share[0], files.enter_context(in_place_of(share[1]))) if share else None
            for share in (options.heldout, options.excerpt)
        )
        target = load_target(options.target, options.device, getattr(torch, options.dtype), by_hand=True)
        begin = time.perf_counter()

        def late(share: float) -> bool:
            return options.time_limit is not None and time.perf_counter() - begin > share * options.time_limit

        prompts = sample_prompts(
            target, options.self_prompts, counts, seed=options.seed, slots=options.batch, stop=lambda: late(1 / 3)
        )
        sampled = time.perf_counter()
        print(f"{counts.prompts} prompts of {counts.sampled} samples in {sampled - begin:.1f} s", flush=True)
        sorter = Sorter(out, heldout, excerpt, options.excerpt_bytes)
        for row in answer(
            target, prompts, counts, seed=options.seed, limit=options.max_new_tokens, least=options.min_new_tokens,
            slots=options.batch, stop=lambda: late(1),
        ):  # fmt: skip
            sorter.write(row)
        if not sorter.written:
            came = ", ".join(f"{name} {count}" for name, count in asdict(counts).items())
            raise ValueError(f"no row for {options.out}: {came}")
    seconds = time.perf_counter() - sampled
    print(
        f"{counts.rows} rows of {counts.answered} answers, {counts.answer_tokens} answer tokens in {seconds:.1f} s "
        f"({counts.answer_tokens / seconds:.0f} tokens/s)"
    )
    origin = {
        "schema_version": 1,
        "command": ["python", "-m", "trainer", "regenerate", *words],
        "seed": options.seed,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "seconds": {"prompts": round(sampled - begin, 1), "answers": round(seconds, 1)},
        "counts": asdict(counts),
    }
    options.out.with_suffix(".origin.json").write_text(json.dumps(origin, indent=2) + "\n")
    return 0
