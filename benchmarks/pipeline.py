"""The target's features and the whole trainer: ours and the peers' in one run.

    python benchmarks/pipeline.py [--quick] [features] [trainer] [overhead]

features  the target's forward with its captured layers, by turns: transformers' with all hidden states, and ours
          (also by hand, as rows of another shape go, and in fp8 where the GPU can)
trainer   target and drafter together on one GPU, all workers at work, as `python -m trainer bench` measures it
overhead  real trainings (trainer.train) of made-up conversations: what logging each step costs, what a checkpoint and
          a measurement on held-out data cost, the first step's wait, and what the log says of the speed
Rows hold one document, and again several of 200 to 1,500 tokens. The target is Qwen3-4B's shape with random weights.
fp8 also tells how far features move. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, Size, save, why

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_targets import tiny_tokenizer

import trainer.train as training
from trainer import bench
from trainer.compile_cache import use_compile_cache
from trainer.compiled import compiled
from trainer.config import TrainConfig, load
from trainer.features import RowBatch
from trainer.forms import keep_forms_in_place
from trainer.speed import alternating, counted, matrix_limit, packed_lengths, peak_gib, rates, where
from trainer.target import TargetModel
from trainer.warm import BatchShape, made_up_rows

KINDS = ("one", "packed")
PLANS = ("each step logged", "none logged", "each step logged, again", "saved and measured")


def shape_of(size: Size, device: torch.device) -> BatchShape:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return BatchShape(1, size.row_tokens, size.anchors, dtype, teacher=False)


def rows_of(size: Size, kind: str, device: torch.device) -> RowBatch:
    lengths = packed_lengths(size.row_tokens, 0) if kind == "packed" else None
    return made_up_rows(shape_of(size, device), lengths, size.vocabulary - 1)


def features(size: Size, target: TargetModel, device: torch.device, options: Any) -> dict[str, Any]:
    """Milliseconds of a row's features. The ways prepare one target, one after the other."""
    draft, rows = size.draft(), {kind: rows_of(size, kind, device) for kind in KINDS}
    layers = draft.target_layer_ids
    on_gpu = device.type == "cuda"
    runner: Any = target._runner
    ways: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, fast, narrow in (("by hand", False, False), ("ours", True, False), ("fp8", True, True)):
        if narrow and not on_gpu:
            continue
        runner.fast = None
        try:
            if fast:
                target.prepare(1, size.row_tokens, layers, fp8=narrow, compiled=compiled if on_gpu else (lambda f: f))
            made = runner.fast
        except Exception as error:  # one way that does not work must not cost the others
            failed[name] = why(error)
            continue

        def way(row: RowBatch, ids: torch.Tensor, places: torch.Tensor, made: Any = made) -> torch.Tensor:
            runner.fast = made
            return target.features(ids, row.document_ids_BS, places, layers)

        ways[name] = way
    if options.compile_only:
        return {"failed": failed}
    found: dict[str, Any] = {"failed": failed}
    for kind, row in rows.items():
        ids, places = row.ids_BS.to(device), row.positions_BS.to(device)
        operations = counted(draft, row).target
        for name in list(ways):
            try:
                ways[name](row, ids, places)
            except Exception as error:
                failed[name] = f"{kind}: {why(error)}"
                del ways[name]
        work = {name: lambda way=way, row=row, i=ids, p=places: way(row, i, p) for name, way in ways.items()}

        @torch.no_grad()
        def theirs(ids: torch.Tensor = ids) -> None:
            target.model.model(ids, output_hidden_states=True, use_cache=False)

        times = alternating({"transformers": theirs, **work}, device, rounds=options.rounds)
        here = {name: rates(size.row_tokens, operations, one) for name, one in times.items()}
        for name, one in {"transformers": theirs, **work}.items():
            here[name]["peak_gib"] = peak_gib(device, one)
        if not ways:
            found[kind] = here
            continue
        exact = ways[next(iter(ways))](row, ids, places).float()
        for name in list(ways)[1:]:
            moved = ways[name](row, ids, places).float() - exact
            each = zip(moved.chunk(len(layers), -1), exact.chunk(len(layers), -1), strict=True)
            here[name]["moved_from_the_first"] = [float(f"{(m.norm() / e.norm()).item():.3g}") for m, e in each]
        found[kind] = here
    runner.fast = None
    return found


def config_of(size: Size, folder: Path, steps: int, **more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "steps": steps, "rows_per_step": 1, "anchors": size.anchors, "loss": "exp-decay", "checkpoint_every": 10**6,
        "chunk_blocks": more.pop("chunk_blocks", 256), **more,
    }  # fmt: skip
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    heldout = folder / "heldout.jsonl"
    return load(
        f'[target]\npath = "{folder}/target"\n[draft]\nlayers = {size.draft_layers}\nblock = {size.block}\n'
        f'[data]\ntrain = "{folder}/train.jsonl"\nheldout = "{heldout}"\nrow_tokens = {size.row_tokens}\n'
        f"[train]\n{lines}\n[layout]\ncheck_memory = false\n".encode()
    )


def whole(size: Size, target: TargetModel, folder: Path, options: Any) -> dict[str, Any]:
    """`trainer bench` of this target and layout, for each kind of row; on a GPU again with target.fp8."""
    config, found = config_of(size, folder, 1, chunk_blocks=options.chunk_blocks), dict[str, Any]()
    runner: Any = target._runner
    for name in ("exact", "fp8") if torch.cuda.is_available() else ("exact",):
        settings = config.model_copy(update={"target": config.target.model_copy(update={"fp8": name == "fp8"})})
        for kind in KINDS:
            runner.fast = None
            torch.compiler.reset()
            if torch.cuda.is_available():
                keep_forms_in_place()  # which a reset takes back
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                told = bench.measure(settings, steps=options.steps, packed=kind == "packed", say=say, targets=[target])
            except Exception as error:
                told = {"failed": why(error)}
            found.setdefault(name, {})[kind] = told
            save(options.found | {"trainer": found}, options.out)
            print(name, kind, told.get("tokens_per_s", told.get("failed")), file=sys.stderr, flush=True)
    return found


def process_age() -> float:
    """Seconds since this process was started: before it imported anything."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_data(size: Size, folder: Path) -> None:
    """A target's config, and conversations that fill a row each."""
    size.target_config().save_pretrained(folder / "target")
    words = "abcdefghij klmnop %d! "

    def rows(count: int) -> str:
        lines: list[str] = []
        for number in range(count):
            text = (words % (number % 7)) * (size.row_tokens // 15)
            messages = [
                {"role": "user", "content": f"say it {number}"},
                {"role": "assistant", "content": text[: size.row_tokens - 80]},
            ]
            lines.append(json.dumps({"id": str(number), "messages": messages}))
        return "\n".join(lines) + "\n"

    (folder / "train.jsonl").write_text(rows(200))
    (folder / "heldout.jsonl").write_text(rows(4))


def overhead(size: Size, target: TargetModel, folder: Path, options: Any) -> dict[str, Any]:
    """Real trainings: each step logged, none logged; then with checkpoints and measurements."""
    training.load_targets = lambda config, layout: [target] * len(layout.targets)
    steps, saved_steps, often = (90, 360, 90) if not options.quick else (13, 13, 4)  # a checkpoint is there by the next
    if options.compile_only:
        config = config_of(size, folder, 3, chunk_blocks=options.chunk_blocks)
        training.train(config, folder / "run", say=say)
        return {}
    found: dict[str, Any] = options.found.setdefault("overhead", {})
    saved = {"log_every": 1, "checkpoint_every": often, "eval_every": often, "steps": saved_steps}
    plans: dict[str, dict[str, int]] = dict(
        zip(PLANS, ({"log_every": 1}, {"log_every": 10**6}, {"log_every": 1}, saved), strict=True)
    )
    for number, (name, plan) in enumerate(plans.items()):
        if options.plan and name not in options.plan:
            continue
        config = config_of(size, folder, plan.pop("steps", steps), chunk_blocks=options.chunk_blocks, **plan)
        run = folder / f"run-{number}"
        save(options.found, options.out)
        lines: list[tuple[float, str]] = []
        begun = time.perf_counter()

        def told(line: str, lines: Any = lines, begun: float = begun) -> None:
            lines.append((round(time.perf_counter() - begun, 2), line))

        training.train(config, run, say=told)
        age = process_age()
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
        found[name] = {
            "wall_s": round(time.perf_counter() - begun, 2),
            "warm_up": [x for x in lines if "warmed" in x[1]],
        }
        found[name]["first_step_s"] = next((t for t, line in lines if "step 1" in line or "step      1" in line), None)
        if number == 0:  # what a start with a warm cache waits for, imports and a target of random weights included
            found[name]["first_step_after_start_s"] = round(
                age - found[name]["wall_s"] + found[name]["first_step_s"], 1
            )
        if len(records) < config.train.steps:
            found[name]["tokens_per_s"] = records[-1]["tokens_per_s"]  # of all steps since the first record
            continue
        seconds = [record["seconds"] for record in records]
        gaps = [after - before for before, after in pairwise(seconds)][3:]
        usual = statistics.median(gaps)
        speeds = sorted(record["tokens_per_s"] for record in records[4:])
        found[name] |= {
            "tokens_per_s": statistics.median(speeds),
            "from_to": [speeds[len(speeds) // 10], speeds[-1 - len(speeds) // 10]],
            "tokens_per_s_over_all": round(statistics.harmonic_mean(record["tokens_per_s"] for record in records[1:])),
            "memory_mib": max(record["memory_mib"] or 0 for record in records),
        }
        if "checkpoint_every" in plan:
            # In the middle: not the first, in which memory is pinned, nor the last, which is waited for.
            events = [
                sum(gaps[start : start + often]) - often * usual for start in range(often, len(gaps) - often, often)
            ]
            cost = statistics.median(events)
            found[name] |= {
                "seconds_each": round(cost, 3),
                "share_when_each_1000_steps": round(cost / (1000 * usual), 5),
                "of_a_run": [round(event, 3) for event in events],
            }
    if options.plan:
        return found
    logged = [found[name]["tokens_per_s_over_all"] for name in ("each step logged", "each step logged, again")]
    found["logging_costs"] = round(1 - statistics.mean(logged) / found["none logged"]["tokens_per_s"], 4)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("features", "trainer", "overhead", []), default=[])
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--rounds", type=int, default=12, help="of the features, timed")
    parser.add_argument("--steps", type=int, default=40, help="of the trainer")
    parser.add_argument("--plan", action="append", choices=PLANS, help="of overhead, these only")
    parser.add_argument("--chunk-blocks", type=int, default=256)
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the compile cache for the features, or for overhead"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds, to see that it works")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.quick:
        options.size, options.rounds, options.steps = "tiny", 2, 3
        torch.set_num_threads(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    size, parts = SIZES[options.size], options.parts or ["features", "trainer", "overhead"]
    if device.type == "cuda":
        use_compile_cache(say)
    found: dict[str, Any] = {
        "what": "pipeline",
        "size": options.size,
        "where": where(device),
    }
    options.found = found
    found["limit_tflops"] = float(f"{matrix_limit(device):.4g}")
    target = TargetModel(size.model(device), tiny_tokenizer())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(size, folder)
        for part, work in (
            ("features", lambda: features(size, target, device, options)),
            ("trainer", lambda: whole(size, target, folder, options)),
            ("overhead", lambda: overhead(size, target, folder, options)),
        ):
            if part not in parts:
                continue
            try:
                found[part] = work()
            except Exception as error:  # the other parts needn't be lost
                found.setdefault(part, {})["failed"] = why(error)
                say(f"{part}: {why(error)}")
            save(found, options.out)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
