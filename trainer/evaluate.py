# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""`python -m trainer eval`: what a drafter is worth, measured by the real decoding loop on held-out prompts.

Acceptance length counts the target's own bonus token. Macro: the mean of the answers' means, as z-lab reports it;
micro: all tokens over all cycles, as servers report it. Speed is decoding alone, prefill left out, against plain
decoding with the same kernels on the same prompts. Both must give the same tokens (speculate.compare).
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

import torch

from trainer.arguments import at_least_one
from trainer.chat import prompt_tokens
from trainer.checkpoint import load_drafter
from trainer.conversations import LineError, parsed, talk_from
from trainer.draft import DraftModel
from trainer.speculate import Comparison, Decoded, compare, decode_plain, decode_speculative
from trainer.target import TargetModel, load_target

GREEN, RESET = "\033[32m", "\033[0m"


@dataclass(frozen=True)
class Measured:
    """One prompt, decoded with the drafter and, unless left out, plainly."""

    id: str
    prompt: list[int]
    speculative: Decoded
    plain: Decoded | None
    comparison: Comparison | None


def read_prompts(file: Path, target: TargetModel, count: int | None) -> list[tuple[str, list[int]]]:
    """The id and the prompt's tokens of the first `count` conversations: all that comes before the last answer.

    Raises ValueError naming the line that is no conversation; also when there is none at all.
    """
    prompts: list[tuple[str, list[int]]] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if len(prompts) == count:
                break
            if not line.strip():
                continue
            try:
                record = parsed(line)
                messages = talk_from(record).messages
                if messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                if not messages:
                    raise LineError("no prompt")
                prompts.append((str(record.get("id", f"line {number}")), prompt_tokens(target.tokenizer, messages)))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
    if not prompts:
        raise ValueError(f"{file}: no conversation to measure with")
    return prompts


def measure(
    target: TargetModel,
    drafter: DraftModel,
    prompts: Sequence[tuple[str, list[int]]],
    limit: int,
    *,
    drafts: int | None = None,
    plainly: bool = True,
) -> Iterator[Measured]:
    """Decode every prompt, at most `limit` tokens each; `plainly` also without the drafter, and compares."""
    if prompts:  # what only the first call pays (threads, kernels, the allocator) shall not count
        warm = min(limit, 4)
        decode_speculative(target, drafter, prompts[0][1], warm, drafts=drafts)
        if plainly:
            decode_plain(target, prompts[0][1], warm)
    for id, prompt in prompts:
        speculative = decode_speculative(target, drafter, prompt, limit, drafts=drafts)
        if not plainly:
            yield Measured(id, prompt, speculative, None, None)
            continue
        plain = decode_plain(target, prompt, limit)

        def redo(tokens: list[int], prompt: list[int] = prompt) -> Decoded:
            return decode_plain(target, prompt + tokens, limit - len(tokens))

        yield Measured(id, prompt, speculative, plain, compare(speculative, plain, redo))


def summary(rows: Sequence[Measured]) -> dict[str, Any]:
    """The figures of all prompts together, as JSON values; a figure that nothing was measured for is None."""
    cycles = [tau for row in rows for tau in row.speculative.accepted]
    means = [row.speculative.acceptance for row in rows if row.speculative.accepted]
    speed = _tokens_per_s([row.speculative for row in rows])
    plain_speed = _tokens_per_s([row.plain for row in rows if row.plain])
    comparisons = [row.comparison for row in rows if row.comparison]
    return {
        "prompts": len(rows),
        "tokens": sum(len(row.speculative.tokens) for row in rows),
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
        "wrong_tokens": sum(len(comparison.wrong) for comparison in comparisons),
    }


def _tokens_per_s(answers: Sequence[Decoded]) -> float | None:
    """Tokens of the cycles (the first token is the prefill's) over their seconds."""
    seconds = sum(answer.seconds for answer in answers)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 3)


def spans(target: TargetModel, answer: Decoded) -> list[tuple[str, bool]]:
    """The answer's text in pieces, each with whether the drafter proposed it. A character of several tokens goes with
    the token that completes it."""
    pieces: list[tuple[str, bool]] = []
    done = ""
    for end, drafted in enumerate(answer.drafted, start=1):
        text = str(target.tokenizer.decode(answer.tokens[:end], skip_special_tokens=True))
        last = end == len(answer.drafted)
        if text.endswith("�") and not last:
            continue
        piece, done = text[len(done) :], text
        if piece and pieces and pieces[-1][1] == drafted:
            pieces[-1] = (pieces[-1][0] + piece, drafted)
        elif piece:
            pieces.append((piece, drafted))
    return pieces


def coloured(pieces: Sequence[tuple[str, bool]]) -> str:
    """Accepted drafts in green, line by line, so that a pager keeps the colour."""

    def paint(text: str) -> str:
        return "\n".join(f"{GREEN}{line}{RESET}" if line else line for line in text.split("\n"))

    return "".join(paint(text) if drafted else text for text, drafted in pieces)


def _report(figures: dict[str, Any]) -> str:
    """The summary for people, a few lines."""

    def number(key: str, unit: str = "") -> str:
        return "-" if figures[key] is None else f"{figures[key]:g}{unit}"

    bars = "  ".join(f"{tau}:{count}" for tau, count in figures["histogram"].items())
    lines = [
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
    return "\n".join(lines)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m trainer eval", description="Measure a drafter by real decoding.")
    parser.add_argument("--target", required=True, help="folder or hub name of the target model")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of the drafter, or a checkpoint")
    parser.add_argument("--data", required=True, type=Path, help="held-out conversations (JSONL)")
    parser.add_argument("--prompts", type=at_least_one, help="only the first N of them")
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=128, help="tokens of an answer at most (%(default)s)"
    )
    parser.add_argument(
        "--drafts", type=at_least_one, help="check only the first N drafts of each block (default: all)"
    )
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="only float32 is lossless (%(default)s)"
    )
    parser.add_argument("--no-compare", action="store_true", help="leave plain decoding out")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    parser.add_argument(
        "--color", nargs="?", const="always", default="auto", choices=("auto", "always", "never"),
        help="accepted drafts in green (auto: on a terminal)",
    )  # fmt: skip
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """0; 9 when a token differs from plain decoding and was no near-tie. Raises ValueError or OSError on bad input."""
    options = _arguments(words)
    dtype: torch.dtype = getattr(torch, options.dtype)
    target = load_target(options.target, options.device, dtype)
    drafter, config = load_drafter(options.drafter, target.device, dtype)
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
                f"the drafter {options.drafter} was made for another target than {options.target}: "
                f"{what} {made_for}, not {found}"
            )
    prompts = read_prompts(options.data, target, options.prompts)
    colour = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    rows: list[Measured] = []
    for row in measure(
        target, drafter, prompts, options.max_new_tokens, drafts=options.drafts, plainly=not options.no_compare
    ):
        rows.append(row)
        if not options.json:
            pieces = spans(target, row.speculative)
            text = coloured(pieces) if colour else "".join(piece for piece, _ in pieces)
            print(f"--- {row.id}: {row.speculative.acceptance:.2f} tokens a cycle\n{text}\n", flush=True)
    figures: dict[str, Any] = {
        "schema_version": 1,
        "target": options.target,
        "drafter": str(options.drafter),
        "data": str(options.data),
        "device": str(target.device),
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "block_size": config.block_size,
        "drafts": options.drafts,
        **summary(rows),
    }
    print(json.dumps(figures) if options.json else _report(figures), flush=True)
    if options.out:  # after the print: a full disk shall not cost what was measured
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 9 if figures["wrong_tokens"] and options.dtype == "float32" else 0
