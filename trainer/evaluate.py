# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""`python -m trainer eval`: what a drafter is worth, measured by the real decoding loop on held-out prompts.

Acceptance length counts the target's own bonus token. Macro: the mean of the answers' means, as z-lab reports it;
micro: all tokens over all cycles, as servers report it. Speed is decoding alone, prefill left out, against plain
decoding with the same kernels on the same prompts. At temperature 0 both must give the same tokens
(speculate.compare); above it both draw from the same distribution (rejection.py), so that tokens are not compared.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.arguments import at_least_one, at_least_zero, share, temperature
from trainer.checkpoint import load_drafter
from trainer.chosen import chosen_drafter
from trainer.draft import DraftModel
from trainer.rejection import Sampling, seeded_sampling
from trainer.speculate import Comparison, Decoded, capacity, compare, decode_plain, decode_speculative
from trainer.stream import coloured, pieces_of, printable
from trainer.target import TargetModel, load_target
from trainer.turns import Dialogue, Turns, ask, first_prompt, read_dialogues

WARM = 4  # tokens of an answer that is not counted


@dataclass(frozen=True)
class Way:
    """How prompts are decoded."""

    limit: int  # tokens of an answer, at most
    drafts: int | None = None  # that the target checks of each block; None: all
    plainly: bool = True  # also without the drafter
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1  # of each conversation


@dataclass(frozen=True)
class MeasuredAnswer:
    """One prompt, decoded with the drafter and, unless left out, plainly; compared at temperature 0."""

    id: str
    prompt: list[int]
    speculative: Decoded
    plain: Decoded | None
    comparison: Comparison | None


@dataclass(frozen=True)
class LeftOut:
    """A turn for whose answer the target has no positions left."""

    id: str
    prompt: list[int]


def measure(
    target: TargetModel, drafter: DraftModel, dialogues: Sequence[Dialogue], way: Way
) -> Iterator[MeasuredAnswer | LeftOut]:
    """Decodes every turn of every conversation."""
    firsts = (first_prompt(dialogue, target) for dialogue in dialogues)
    prompt = next((first for first in firsts if fits(target, first, way.limit, drafter.config.block_size)), None)
    if prompt is not None:  # what only the first call pays (threads, kernels, the allocator) shall not count
        warm = min(way.limit, WARM)
        decode_speculative(target, drafter, prompt, warm, drafts=way.drafts, sampling=drawn(target, way, 0, 0))
        if way.plainly:
            decode_plain(target, prompt, warm, sampling=drawn(target, way, 0, 0))
    for number, dialogue in enumerate(dialogues):
        for sample in range(way.samples):
            name = f"{dialogue.id} sample {sample + 1}" if way.samples > 1 else dialogue.id
            yield from _dialogue(target, drafter, dialogue, way, name, (number, sample))


def fits(target: TargetModel, prompt: Sequence[int], limit: int, block_size: int) -> bool:
    """Whether there is room for an answer."""
    return len(prompt) + limit + block_size <= target.longest


def too_long(target: TargetModel, block_size: int, dialogues: Sequence[Dialogue], limit: int) -> list[str]:
    """Of each conversation whose first prompt leaves no room for an answer, where it is and why.

    Raises ValueError naming the first one that can't be written.
    """
    found: list[str] = []
    for dialogue in dialogues:
        prompt = first_prompt(dialogue, target)
        try:
            capacity(target, prompt, limit, block_size)
        except ValueError as error:
            found.append(f"{dialogue.place}: {error}")
    return found


def _dialogue(
    target: TargetModel, drafter: DraftModel, dialogue: Dialogue, way: Way, name: str, numbers: tuple[int, int]
) -> Iterator[MeasuredAnswer | LeftOut]:
    """One pass through a conversation; plain decoding gets the prompts that the answers with the drafter led to."""
    with_drafter, alone = drawn(target, way, *numbers), drawn(target, way, *numbers, 1)

    def answer(prompt: list[int]) -> Decoded:
        return decode_speculative(target, drafter, prompt, way.limit, drafts=way.drafts, sampling=with_drafter)

    def has_room(prompt: list[int]) -> bool:
        return fits(target, prompt, way.limit, drafter.config.block_size)

    for asked in ask(dialogue, target, answer, has_room):
        turn = f"{name} turn {asked.turn}" if len(dialogue.said) > 1 else name
        prompt = asked.prompt
        if asked.answer is None:
            yield LeftOut(turn, prompt)
            continue
        plain = decode_plain(target, prompt, way.limit, sampling=alone) if way.plainly else None
        comparison = None
        if plain and way.temperature == 0:

            def redo(tokens: list[int], prompt: list[int] = prompt) -> Decoded:
                return decode_plain(target, prompt + tokens, way.limit - len(tokens))

            comparison = compare(asked.answer, plain, redo)
        yield MeasuredAnswer(turn, prompt, asked.answer, plain, comparison)


def drawn(target: TargetModel, way: Way, *numbers: int) -> Sampling | None:
    """Where a conversation's tokens come from: by its own numbers, so that it doesn't matter what else is measured."""
    seed = np.random.SeedSequence([way.seed, *numbers]).generate_state(1, np.uint64)
    return seeded_sampling(way.temperature, way.top_p, int(seed[0] >> np.uint64(1)), target.device)


def summary(rows: Sequence[MeasuredAnswer | LeftOut]) -> dict[str, Any]:
    """The figures of all answers together, as JSON values; a figure that nothing was measured for is None."""
    answers = [row for row in rows if isinstance(row, MeasuredAnswer)]
    cycles = [tau for row in answers for tau in row.speculative.accepted]
    means = [row.speculative.acceptance for row in answers if row.speculative.accepted]
    speed = _tokens_per_s([row.speculative for row in answers])
    plain_speed = _tokens_per_s([row.plain for row in answers if row.plain])
    comparisons = [row.comparison for row in answers if row.comparison]
    wrong = sum(len(comparison.wrong) for comparison in comparisons)
    return {
        "prompts": len(answers),
        "left_out": len(rows) - len(answers),
        "tokens": sum(len(row.speculative.tokens) for row in answers),
        "cycles": len(cycles),
        "acceptance_macro": _rounded(sum(means) / len(means)) if means else None,
        "acceptance_micro": _rounded(sum(cycles) / len(cycles)) if cycles else None,
        "histogram": {str(tau): count for tau, count in sorted(Counter(cycles).items())},
        "tokens_per_s": _rounded(speed),
        "plain_tokens_per_s": _rounded(plain_speed),
        "speedup": _rounded(speed / plain_speed) if speed and plain_speed else None,
        "compared": len(comparisons),
        "equal_tokens": sum(comparison.equal for comparison in comparisons),
        "near_ties": sum(comparison.near_ties for comparison in comparisons),
        "wrong_tokens": wrong,
        "lossless": wrong == 0 if comparisons else None,  # in any dtype: the target's own tokens, but for near-ties
    }


def _tokens_per_s(answers: Sequence[Decoded]) -> float | None:
    """Tokens of the cycles (the first token is the prefill's) over their seconds."""
    seconds = sum(answer.seconds for answer in answers)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 3)


# --- what is printed ---


COLUMNS = (
    ("ANSWERS", "prompts"), ("TOKENS", "tokens"), ("MACRO", "acceptance_macro"), ("MICRO", "acceptance_micro"),
    ("TOKENS/S", "tokens_per_s"), ("PLAIN", "plain_tokens_per_s"), ("RATIO", "speedup"), ("NEAR-TIES", "near_ties"),
    ("WRONG", "wrong_tokens"),
)  # fmt: skip


def report(figures: dict[str, Any]) -> str:
    """The summary for people: a table where there are several data sets, then all of it together."""

    def number(key: str) -> str:
        return "-" if figures[key] is None else f"{figures[key]:g}"

    bars = "  ".join(f"{tau}:{count}" for tau, count in figures["histogram"].items())
    lines = _table(figures) if len(figures["data_sets"]) > 1 else []
    lines += [
        f"acceptance length  {number('acceptance_macro')} macro, {number('acceptance_micro')} micro (bonus included)",
        f"tokens per cycle   {bars}",
        f"speed              {number('tokens_per_s')} tokens/s, plain {number('plain_tokens_per_s')}, "
        f"ratio {number('speedup')}",
    ]
    if figures["compared"]:
        lines.append(
            f"same tokens        {figures['equal_tokens']} equal, {figures['near_ties']} near-ties, "
            f"{figures['wrong_tokens']} wrong"
        )
    if figures["left_out"]:
        turns = f"{figures['left_out']} turn{'s' * (figures['left_out'] != 1)}"
        lines.append(f"left out           {turns}: no positions left for an answer")
    return "\n".join(lines)


def _table(figures: dict[str, Any]) -> list[str]:
    """A line for each data set and one for all, and the histograms below."""
    rows = [*figures["data_sets"], {**figures, "data": "together"}]
    cells = [["DATA", *(title for title, _ in COLUMNS)]]
    for row in rows:
        cells.append([row["data"], *("-" if row[key] is None else f"{row[key]:g}" for _, key in COLUMNS)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]
    for row in figures["data_sets"]:
        bars = "  ".join(f"{tau}:{count}" for tau, count in row["histogram"].items())
        lines.append(f"{row['data'].ljust(widths[0])}  tokens per cycle  {bars}")
    return lines


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m trainer eval", description="Measure a drafter by real decoding.")
    add_models(parser)
    parser.add_argument(
        "--data", required=True, type=Path, nargs="+", action="extend", metavar="FILE",
        help="held-out conversations or prompts (JSONL); several are measured one by one and together",
    )  # fmt: skip
    parser.add_argument("--prompts", type=at_least_one, help="only the first N conversations of each file")
    parser.add_argument(
        "--turns", choices=("all", "last"), default="all",
        help="answer every turn, each behind the model's own answers, or the last one only, behind the file's "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=128, help="tokens of an answer at most (%(default)s)"
    )
    parser.add_argument(
        "--drafts", type=at_least_one, help="check only the first N drafts of each block (default: all)"
    )
    add_sampling(parser)
    parser.add_argument("--samples", type=at_least_one, default=1, help="of each conversation, at a temperature")
    parser.add_argument("--no-compare", action="store_true", help="leave plain decoding out")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args(words)
    if options.samples > 1 and options.temperature == 0:
        parser.error("--samples: at temperature 0 all are the same")
    return options


def add_models(parser: argparse.ArgumentParser) -> None:
    """The options that say what decodes, where, and how it is shown."""
    parser.add_argument("--target", required=True, help="folder or hub name of the target model")
    parser.add_argument(
        "--drafter", required=True, type=Path,
        help="folder of a drafter, of a checkpoint, or of a run: its best checkpoint, or the newest",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="only float32 is lossless (%(default)s)"
    )
    parser.add_argument(
        "--color", nargs="?", const="always", default="auto", choices=("auto", "always", "never"),
        help="accepted drafts in green (auto: on a terminal)",
    )  # fmt: skip
    parser.add_argument("--no-color", dest="color", action="store_const", const="never", help="the same as never")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options that say how tokens are drawn."""
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, help="0 takes the best token, above it is drawn (%(default)s)"
    )
    parser.add_argument("--top-p", type=share, default=1.0, help="draw among the best tokens of this share (all)")
    parser.add_argument("--seed", type=at_least_zero, default=0, help="the same one draws the same (%(default)s)")


def load_models(options: argparse.Namespace) -> tuple[TargetModel, DraftModel, Path]:
    """Target and drafter, and the drafter's folder: of a run the one that was chosen, which is told on stderr.

    What is wrong with the drafter's folder is found before the target, which takes a while, is loaded. Raises
    ValueError, also when the two were not made for each other.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    folder = chosen_drafter(options.drafter, lambda line: print(line, file=sys.stderr, flush=True))
    target = load_target(options.target, options.device, dtype)
    drafter, config = load_drafter(folder, target.device, dtype, target=target)
    for what, made_for, found in (
        ("hidden size", config.hidden_size, target.config.hidden_size),
        ("number of layers", config.num_target_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.config.vocab_size),
        ("scale of embeddings", config.embedding_scale, target.embedding_scale),
        ("scale of logits", config.logit_scale, target.logit_scale),
    ):
        # A scale may have been measured in bfloat16, to two digits.
        if made_for != found and not (isinstance(found, float) and math.isclose(made_for, found, rel_tol=0.02)):
            raise ValueError(
                f"the drafter {folder} was made for another target than {options.target}: "
                f"{what} {made_for}, not {found}"
            )
    return target, drafter, folder


def in_colour(options: argparse.Namespace) -> bool:
    return options.color == "always" or (options.color == "auto" and sys.stdout.isatty())


def main(words: list[str]) -> int:
    """0; 9 when a token differs from plain decoding and was no near-tie. Raises ValueError or OSError on bad input."""
    options = _arguments(words)
    turns: Turns = options.turns
    sets = [(str(file), read_dialogues(file, options.prompts, turns)) for file in options.data]
    target, drafter, folder = load_models(options)
    way = Way(
        limit=options.max_new_tokens,
        drafts=options.drafts,
        plainly=not options.no_compare,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        samples=options.samples,
    )
    cut = [line for _, some in sets for line in too_long(target, drafter.config.block_size, some, way.limit)]
    if len(cut) == sum(len(dialogues) for _, dialogues in sets):
        raise ValueError(f"nothing to measure with: no prompt leaves room for an answer; {cut[0]}")
    for line in cut:
        print(f"left out: {line}", file=sys.stderr, flush=True)
    measured: list[tuple[str, list[MeasuredAnswer | LeftOut]]] = []
    for file, dialogues in sets:
        rows: list[MeasuredAnswer | LeftOut] = []
        measured.append((file, rows))
        for row in measure(target, drafter, dialogues, way):
            rows.append(row)
            if isinstance(row, MeasuredAnswer) and not options.json:
                print(_shown(row, target, colour=in_colour(options)), flush=True)
    everything = [row for _, rows in measured for row in rows]
    figures: dict[str, Any] = {
        "schema_version": 2,
        "target": options.target,
        "drafter": str(folder),
        "device": str(target.device),
        "dtype": options.dtype,
        "turns": turns,
        "max_new_tokens": options.max_new_tokens,
        "block_size": drafter.config.block_size,
        "drafts": options.drafts,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "samples": options.samples,
        **summary(everything),
        "data_sets": [{"data": file, **summary(rows)} for file, rows in measured],
    }
    print(json.dumps(figures) if options.json else report(figures), flush=True)
    if options.out:  # after the print: a full disk shall not cost what was measured
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 9 if figures["wrong_tokens"] and options.dtype == "float32" else 0


def _shown(row: MeasuredAnswer, target: TargetModel, *, colour: bool) -> str:
    """An answer for people."""
    pieces = pieces_of(target.tokenizer, row.speculative.tokens, row.speculative.drafted)
    pieces = [(printable(text), drafted) for text, drafted in pieces]
    text = coloured(pieces) if colour else "".join(piece for piece, _ in pieces)
    return f"--- {row.id}: {row.speculative.acceptance:.2f} tokens a cycle\n{text}\n"
