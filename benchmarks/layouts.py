"""How a training spreads over the GPUs of one host: the links between them, and the speed of each layout.

    python benchmarks/layouts.py [links] [speed] [--only 5+3 --only "both on each"] [--out FILE]

links   copies between each two GPUs, GB/s; the sum of a drafter's gradients over all GPUs, by copies and by NCCL
speed   `trainer bench` of every split of all GPUs (T targets + D drafters), of both on each, and of one GPU; and what
        the advice made of each one's figures would choose
Targets have random weights of --size; rows are of one document. Prints one JSON object, which --out has after each
layout. That trainings learn the same over several GPUs: courses.py. --quick: tiny shapes on a CPU, which proves this
script only.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pipeline import write_data
from shapes import SIZES, Size, save, why

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "trainer"))

from tiny_targets import tiny_tokenizer

from trainer import bench
from trainer.busy import Busy, advice
from trainer.compile_cache import use_compile_cache
from trainer.config import load
from trainer.devices import all_workers
from trainer.draft import DraftModel
from trainer.layout import Layout
from trainer.reduction import Reduction
from trainer.speed import where
from trainer.target import TargetModel
from trainer.warm import FORMS

COPY_BYTES = 1 << 28


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def words(first: int, count: int) -> list[str]:
    return [f"cuda:{first}" if count == 1 else f"cuda:{first}-{first + count - 1}"]


def layouts(gpus: int, rows: int) -> dict[str, tuple[list[str], list[str], int]]:
    """Name -> targets, drafters and rows of a step, which all drafters have as many of."""

    def at_least(drafters: int) -> int:
        return -(-rows // drafters) * drafters

    if not gpus:
        return {"one": (["cpu"], ["cpu"], rows)}
    found: dict[str, tuple[list[str], list[str], int]] = {}
    for targets in range(gpus - 1, 0, -1):
        drafters = gpus - targets
        found[f"{targets}+{drafters}"] = (words(0, targets), words(targets, drafters), at_least(drafters))
    if gpus > 1:
        found["both on each"] = (words(0, gpus), words(0, gpus), at_least(gpus))
    found["one"] = (["cuda:0"], ["cuda:0"], rows)
    return found


# --- one process at a time: what is measured here ---


def all_done() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def milliseconds(work: Callable[[], None], rounds: int, before: Callable[[], None] | None = None) -> list[float]:
    """Of each round, sorted, from all GPUs at rest to all at rest again; `before` is not timed."""
    times: list[float] = []
    for _ in range(rounds + 2):
        if before:
            before()
        all_done()
        begun = time.perf_counter()
        work()
        all_done()
        times.append(1e3 * (time.perf_counter() - begun))
    return sorted(times[2:])


def links(size: Size, gpus: int, options: Any) -> None:
    """GB/s of a copy alone from GPU to GPU, and of all GPUs' to their next at a time; milliseconds of a sum."""
    found: dict[str, Any] = options.found["links"]
    if gpus < 2:
        found["gpus"] = gpus
        return
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    have = [torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for index in range(gpus)]
    into = [torch.empty_like(one) for one in have]

    def rate(these: list[tuple[int, int]]) -> float:
        # Streams of its own for each pair, on both devices: torch orders a copy behind the current ones of both, so
        # that those of a ring would go one after the other.
        streams = [(torch.cuda.Stream(f"cuda:{a}"), torch.cuda.Stream(f"cuda:{b}")) for a, b in these]

        def copies() -> None:
            for _ in range(8):
                for (a, b), (sends, receives) in zip(these, streams, strict=True):
                    with torch.cuda.stream(sends), torch.cuda.stream(receives):
                        into[b].copy_(have[a], non_blocking=True)

        return round(8 * COPY_BYTES / statistics.median(milliseconds(copies, options.rounds)) / 1e6, 1)

    found["peer_access"] = {f"{a}>{b}": torch.cuda.can_device_access_peer(a, b) for a, b in pairs}
    found["gb_per_s"] = {f"{a}>{b}": rate([(a, b)]) for a, b in pairs}
    found["gb_per_s_each_of_a_ring"] = rate([(a, (a + 1) % gpus) for a in range(gpus)])
    first = DraftModel(size.draft()).to("cuda:0")
    models = [first, *(copy.deepcopy(first).to(f"cuda:{index}") for index in range(1, gpus))]
    found["reduction"] = {"weights": sum(parameter.numel() for parameter in first.parameters())}

    def gradients() -> None:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)

    for how in ("copies", "nccl"):
        try:
            reduction = Reduction(models, how)
            reduction.prepare()
            times = milliseconds(lambda one=reduction: one.sum_gradients(everywhere=True), options.rounds, gradients)
            median = round(statistics.median(times), 2)
            found["reduction"][how] = {"ms": median, "low": round(times[0], 2), "high": round(times[-1], 2)}
        except Exception as error:
            found["reduction"][how] = {"failed": why(error)}


def targets_of(size: Size, layout: Layout, made: dict[str, TargetModel]) -> list[TargetModel]:
    """One of random weights for each place, all the same. made: those that there are, by device; gets the others."""
    for name in dict.fromkeys(place[-1] for place in layout.targets):
        if name in made:
            continue
        model = copy.deepcopy(next(iter(made.values())).model).to(name) if made else size.model(torch.device(name))
        made[name] = TargetModel(model, tiny_tokenizer())
    return [made[place[-1]] for place in layout.targets]


def speed(size: Size, gpus: int, folder: Path, options: Any) -> None:
    found: dict[str, Any] = options.found["speed"]
    made: dict[str, TargetModel] = {}
    for name, (targets, drafters, rows) in layouts(gpus, options.rows).items():
        if options.only and name not in options.only:
            continue
        try:
            wanted = {place[-1] for place in all_workers(targets)}
            for other in set(made) - wanted:  # or it would count as what that layout takes of a drafter's GPU
                del made[other]
            gc.collect()
            if gpus:
                for index in range(gpus):
                    torch.cuda.synchronize(index)  # a layout that failed may have left copies on their way
                torch.cuda.empty_cache()
                for index in range(gpus):
                    torch.cuda.reset_peak_memory_stats(index)
            config = load(config_text(size, folder, targets, drafters, 1, rows_per_step=rows, micro_rows=1).encode())
            layout = bench.parse(config.layout)
            told = bench.measure(
                config, steps=options.steps, packed=False, say=say, targets=targets_of(size, layout, made)
            )
            told["advice"] = advised(told, layout, gpus, rows)
        except Exception as error:  # the other layouts needn't be lost
            told = {"failed": why(error)}
        found[name] = told
        say(f"{name}: {told.get('tokens_per_s', told.get('failed'))}, {told.get('held_back_by')}")
        save(options.found, options.out)
    alone = found.get("one", {}).get("tokens_per_s")
    for told in found.values():
        if alone and "tokens_per_s" in told:
            told["times_one_gpu"] = round(told["tokens_per_s"] / alone, 2)


def advised(told: dict[str, Any], layout: Layout, gpus: int, rows: int) -> str | None:
    """The advice that a training would give, from how long each worker worked."""
    targets = [share for name, share in told["working"].items() if not name.startswith("drafter")]
    drafters = [share for name, share in told["working"].items() if name.startswith("drafter")]
    return advice(
        [Busy(share, 0.0, 1 - share) for share in targets],
        [Busy(share, 1 - share, 0.0) for share in drafters],
        target_devices=layout.targets,
        draft_devices=layout.drafters,
        gpus=gpus,
        most_drafters=rows,
    )


def config_text(
    size: Size, folder: Path, targets: list[str], drafters: list[str], steps: int, shared: bool = False, **more: Any
) -> str:
    settings = {
        "steps": steps, "micro_rows": 1, "anchors": size.anchors, "loss": "exp-decay", "log_every": 1,
        "checkpoint_every": 100, "keep": 1, **more,
    }  # fmt: skip
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    return (
        f'[target]\npath = "{folder}/target"\n[draft]\nlayers = {size.draft_layers}\nblock = {size.block}\n'
        f'[data]\ntrain = "{folder}/train.jsonl"\nheldout = "{folder}/heldout.jsonl"\nrow_tokens = {size.row_tokens}\n'
        f"[train]\n{lines}\n[layout]\ncheck_memory = false\ncheck_every = 50\nstall_seconds = 120\n"
        f"allow_shared_device = {json.dumps(shared)}\ntargets = {json.dumps(targets)}\n"
        f"drafters = {json.dumps(drafters)}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("links", "speed", []), default=[])
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--steps", type=int, default=12, help="of each layout")
    parser.add_argument("--rows", type=int, default=8, help="of a step, at least")
    parser.add_argument("--only", action="append", help="of the layouts, by name")
    parser.add_argument("--rounds", type=int, default=10, help="of the links")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.quick:
        options.size, options.steps, options.rounds = "tiny", 2, 2
        torch.set_num_threads(1)
    gpus, size = torch.cuda.device_count(), SIZES[options.size]
    if not gpus and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    if unknown := [name for name in options.only or () if name not in layouts(gpus, options.rows)]:
        parser.error(f"--only: no layout {unknown[0]!r}; there are {', '.join(layouts(gpus, options.rows))}")
    if gpus:
        use_compile_cache(say)
        import torch._dynamo.config as dynamo

        # Forms of all layouts stay; the warm-up of one allows for its own alone.
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = FORMS * gpus * 4
    where_to = where(torch.device("cuda:0" if gpus else "cpu"))
    options.found = found = {"what": "layouts", "size": options.size, "gpus": gpus, "where": where_to}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(size, folder)
        for part in options.parts or ("links", "speed"):
            found[part] = {}
            try:
                if part == "links":
                    links(size, gpus, options)
                else:
                    speed(size, gpus, folder, options)
            except Exception as error:  # the other part, and what there is of this one, needn't be lost
                found[part]["failed"] = why(error)
                say(f"{part}: {why(error)}")
            save(found, options.out)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
