"""How fast answers are made: `trainer regenerate`'s decoding against transformers' `generate`, in one run.

    python benchmarks/regenerate.py --target models/smollm2-135m-instruct --device cuda --dtype bfloat16

Both answer prompts that the target sampled itself, greedily, until the target's end token or --max-new-tokens. Ours
answers all prompts, with everything that the command does to an answer but write it: text, checks, draws off. Theirs
answers as many as its batch holds, sorted by length and padded on the left, another part of the prompts each round.
Rounds alternate, ours first in every other one; a first short round of both, which is not measured, warms up. Counted
are answer tokens before the end token, for both alike. Prints one JSON object: each round, medians, spread, ratios, and
how many of the answers that both gave are equal (in bfloat16 not all are: the batches differ).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.answering import Local, Manner
from trainer.asked import Asked
from trainer.chat import prompt_tokens
from trainer.generate import generate
from trainer.prompts import PROMPT_TOKENS, TOP_P, user_header
from trainer.room import Room
from trainer.sampling import greedy, key_of, sampling
from trainer.target import TargetModel, load_target


def sampled(target: TargetModel, count: int, slots: int) -> list[list[dict[str, str]]]:
    """Questions of the target's own."""
    header, ends = user_header(target.tokenizer), target.end_tokens()
    keys = [key_of("benchmark", number) for number in range(count)]
    found = generate(target, [header] * count, PROMPT_TOKENS, ends, slots=slots, choose=sampling(1.0, TOP_P), keys=keys)
    texts = {one.index: target.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in found}
    return [[{"role": "user", "content": texts[index] or "Hello"}] for index in sorted(texts)]


class Ours:
    """The command's own decoding and checks."""

    def __init__(self, target: TargetModel, chats: list[list[dict[str, str]]], batch: int | None) -> None:
        self.target, self.chats, self.batch = target, chats, batch
        self.checks = 0.0
        self.slots: set[int] = set()
        self.answers: dict[int, list[int]] = {}

    def run(self, limit: int, count: int) -> int:
        room = Room(self.target, self.batch, sampled=False, say=lambda line: print(line, file=sys.stderr))
        local = Local(self.target, Manner(limit=limit, least=1), greedy, room)
        judged, slots = local._judged, room.slots

        def timed(asked: Asked, one: Any) -> Any:
            begin = time.perf_counter()
            self.answers[asked.number] = one.tokens
            found = judged(asked, one)
            self.checks += time.perf_counter() - begin
            return found

        def noted(length: int) -> int:
            self.slots.add(min(slots(length), count))
            return slots(length)

        local._judged, room.slots = timed, noted
        asked = [Asked(number, "", [chat]) for number, chat in enumerate(self.chats[:count])]
        return sum(one.tokens for one in local.answers(asked, lambda: False))


class Theirs:
    """transformers' `generate`, with a padded batch."""

    def __init__(self, target: TargetModel, chats: list[list[dict[str, str]]], batch: int) -> None:
        prompts = [prompt_tokens(target.tokenizer, chat) for chat in chats]
        self.order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        self.target, self.prompts, self.batch = target, prompts, batch
        self.ends = sorted(target.end_tokens())
        self.part = 0
        self.answers: dict[int, list[int]] = {}

    def run(self, limit: int) -> int:
        # Every n-th of all, so that each round has prompts of all lengths.
        parts = max(1, len(self.order) // self.batch)
        numbers = self.order[self.part % parts :: parts][: self.batch]
        self.part += 1
        prompts = [self.prompts[number] for number in numbers]
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.ends[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self.target.device
        with torch.inference_mode():
            rows = self.target.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
            )[:, longest:].tolist()
        count = 0
        for number, row in zip(numbers, rows, strict=True):
            end = next((place for place, token in enumerate(row) if token in self.ends), len(row))
            self.answers[number] = row[:end]
            count += end
        return count


def timed(target: TargetModel, work: Any) -> tuple[int, float]:
    """Tokens and seconds."""
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(target.device)
    begin = time.perf_counter()
    tokens = work()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return tokens, time.perf_counter() - begin


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(words: list[str]) -> int:
    from trainer.models import MODEL, models_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(models_folder() / MODEL))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4096, help="that ours answers each round (%(default)s)")
    parser.add_argument("--batch", type=int, help="ours, sequences at a time (auto)")
    parser.add_argument(
        "--theirs", type=int, default=768, help="theirs, prompts at a time and each round (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="begin no round that would end later (%(default)g)"
    )
    options = parser.parse_args(words)
    begin = time.perf_counter()
    target = load_target(options.target, options.device, getattr(torch, options.dtype), by_hand=True)
    # Prompts of the GPU's own making take seconds; on a CPU a few are enough.
    slots = Room(target, options.batch, sampled=True, say=print).slots(PROMPT_TOKENS + 64)
    chats = sampled(target, options.prompts, slots)
    ours, theirs = Ours(target, chats, options.batch), Theirs(target, chats, min(options.theirs, len(chats)))
    ours.run(4, len(chats))
    theirs.run(4)
    ours.checks, ours.slots, ours.answers, theirs.answers, theirs.part = 0.0, set(), {}, {}, 0
    setup = time.perf_counter() - begin

    rounds: list[dict[str, float]] = []
    longest = 0.0
    while len(rounds) < options.rounds and (not rounds or time.perf_counter() - begin + longest < options.seconds):
        started = time.perf_counter()
        works = {
            "ours": lambda: ours.run(options.max_new_tokens, len(chats)),
            "theirs": lambda: theirs.run(options.max_new_tokens),
        }
        one: dict[str, float] = {}
        for name in sorted(works, reverse=len(rounds) % 2 == 1):
            tokens, seconds = timed(target, works[name])
            one |= {f"{name}_tokens": tokens, f"{name}_s": round(seconds, 2), name: round(tokens / seconds, 1)}
        one["ratio"] = round(one["ours"] / one["theirs"], 3)
        rounds.append(one)
        longest = max(longest, time.perf_counter() - started)
    equal = sum(ours.answers[number] == answer for number, answer in theirs.answers.items())
    cuda = target.device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(target.device) if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": options.dtype,
        "target": Path(options.target).name,
        "prompts": len(chats),
        "max_new_tokens": options.max_new_tokens,
        "batch_ours": sorted(ours.slots),
        "batch_theirs": theirs.batch,
        "rounds": rounds,
        **{name: spread([one[name] for one in rounds]) for name in ("ours", "theirs", "ratio")},
        "share_of_time_in_checks": round(ours.checks / sum(one["ours_s"] for one in rounds), 3),
        "equal_answers": equal,
        "compared_answers": len(theirs.answers),
        "setup_s": round(setup, 1),
        "peak_memory_mib": round(torch.cuda.max_memory_allocated(target.device) / 2**20) if cuda else None,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
