"""The drafter's training step: ours and SpecForge's in one run, by turns.

    python benchmarks/draft_step.py            # Qwen3-4B's shape on a GPU; --quick: tiny shapes, on the CPU too
    python benchmarks/draft_step.py --growth   # 2k to 16k tokens a row, 256 to 1,024 anchors

"plain" is draft.py's forward under autocast and torch's own AdamW, compiled: what ours was before docs/speed.md.
A step is forward, backward and update from features that are there, float32 master weights (the peer: bfloat16 ones).
Rows hold one document, and again several of 200 to 1,500 tokens. Each kind of step is waited for and timed alone, all
of them once a round. Peaks are what a step needs while only it is there: weights, moments, head, batch and step.
Prints one JSON object.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, Size, save, specforge_step, why

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.blocks import tile_mask
from trainer.draft import DraftModel
from trainer.features import FeatureBatch, RowBatch
from trainer.learner import Learner
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.speed import (
    alternating,
    counted,
    matrix_limit,
    packed_lengths,
    peak_gib,
    rates,
    wait_for,
    where,
)
from trainer.threads import nothing_compiles
from trainer.warm import BatchShape, made_up_batch, made_up_rows, warm_up

GIB = 2**30
GROWTH = [(row_tokens, anchors) for row_tokens in (2048, 4096, 8192, 16384) for anchors in (256, 512, 1024)]
WAYS = {"ours": None, "plain": False}  # whether the learner computes on copies; None: as it is trained
SMALL = [(row_tokens, anchors) for row_tokens in (128, 256) for anchors in (8, 16)]


class Ours:
    """A learner of this trainer, warmed up."""

    def __init__(self, size: Size, head_VH: torch.Tensor, way: str, chunk_blocks: int) -> None:
        torch.manual_seed(0)
        device = head_VH.device
        with torch.device(device):
            model = DraftModel(size.draft()).to(device)
        self.learner = Learner(
            model, head_VH, make_optimizer(model, lr=1e-4, weight_decay=0.0), Weighting("exp-decay"),
            chunk_blocks=chunk_blocks, clip=1.0, copies=WAYS[way],
        )  # fmt: skip

    def warm(self, shape: BatchShape) -> dict[str, Any]:
        warmed = warm_up([self.learner], shape, say=lambda line: print(line, file=sys.stderr))
        return {
            "warm_up_s": round(sum(w.seconds for w in warmed), 1),
            "graphs_compiled": sum(w.compiled for w in warmed),
        }

    def step(self, batch: FeatureBatch) -> None:
        self.learner.learn(batch)
        self.learner.update(1e-4)


def shape_of(size: Size, device: torch.device) -> BatchShape:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return BatchShape(1, size.row_tokens, size.anchors, dtype, teacher=False)


def rows_of(size: Size, kind: str, device: torch.device) -> RowBatch:
    lengths = packed_lengths(size.row_tokens, 0) if kind == "packed" else None
    return made_up_rows(shape_of(size, device), lengths, size.vocabulary - 1)


def mask_alone(size: Size, batch: FeatureBatch, ours: Ours) -> dict[str, Any]:
    """The tiles of a batch's mask, and that other anchors need no compilation."""
    learner, device = ours.learner, batch.features_BSF.device
    merged, lists = learner.attention(size.row_tokens)[0], learner._lists
    many = learner.model.config.num_kv_heads if merged else 1
    blocks = batch.part(0).blocks

    def build() -> None:
        tile_mask(blocks, size.row_tokens, merged_heads=many, lists=lists)

    times = alternating({"": build}, device, rounds=30, warm=5)[""]
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = peak_gib(device, build)
    with nothing_compiles(device):
        moved = replace(blocks, anchors_BN=blocks.anchors_BN.flip(1).contiguous())
        tile_mask(moved, size.row_tokens, merged_heads=many, lists=lists)
    return {"ms": times.rounded(), "peak_mib": None if peak is None else round(peak * 1024 - before / 2**20, 1)}


def measured(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """All ways and the peer over rows of each kind."""
    draft, shape = size.draft(), shape_of(size, device)
    head_VH = torch.randn(size.vocabulary, size.hidden, device=device, dtype=shape.dtype) * 0.02
    batches = {kind: made_up_batch(draft, shape, device, rows_of(size, kind, device)) for kind in ("one", "packed")}
    held = batches["one"].device_bytes() + head_VH.nbytes
    steps: dict[str, Any] = {}
    told: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"ways": told, "rows": {}}

    def keep() -> None:
        save(options.found | found, options.out)

    ours: dict[str, Ours] = {}
    for name in options.ways:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            mine = Ours(size, head_VH, name, options.chunk_blocks)
            told[name] = mine.warm(shape)
            for _ in range(2):
                mine.step(batches["one"])
            peak = peak_gib(device, lambda mine=mine: mine.step(batches["one"]))
        except Exception as error:  # one way that does not work must not cost the others
            told[name] = {"failed": why(error)}
            keep()
            continue
        if peak is not None:
            told[name]["peak_gib"] = round(peak - (before - held) / GIB, 2)
        ours[name] = mine
        steps[name] = mine.step
        keep()
    if options.compile_only:
        return {"ways": told}
    try:
        if options.peer:
            add_peer(size, device, batches["one"], steps, told)
    except Exception as error:
        steps.pop("specforge", None)
        told["specforge"] = {"failed": why(error)}
    keep()
    for kind, batch in batches.items():
        operations = counted(draft, batch.rows).drafter
        times = alternating({n: lambda s=s, b=batch: s(b) for n, s in steps.items()}, device, rounds=options.steps)
        found["rows"][kind] = {name: rates(size.row_tokens, operations, one) for name, one in times.items()}
        found["rows"][kind]["documents"] = int(batch.rows.document_ids_BS.max()) + 1
        keep()
    found["mask"] = {}
    for name, mine in ours.items():
        try:
            found["mask"][name] = mask_alone(size, batches["packed"], mine)
        except Exception as error:
            found["mask"][name] = {"failed": why(error)}
    keep()
    if options.profile and ours:
        try:
            profile(ours[next(iter(ours))], batches["one"], options.profile)
        except Exception as error:
            found["profile"] = {"failed": why(error)}
    return found


def add_peer(
    size: Size, device: torch.device, batch: FeatureBatch, steps: dict[str, Any], told: dict[str, Any]
) -> None:
    """SpecForge's step and its peak, where it is installed."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peer = specforge_step(size, device)
    if peer is None:
        return
    ids = batch.rows.ids_BS.to(device)

    def theirs(batch: FeatureBatch) -> None:
        peer(ids, batch.features_BSF)

    for _ in range(2):
        theirs(batch)
    steps["specforge"], told["specforge"] = theirs, {}
    peak = peak_gib(device, lambda: theirs(batch))
    if peak is not None:
        told["specforge"]["peak_gib"] = round(peak - (before - batch.device_bytes()) / GIB, 2)


def profile(mine: Ours, batch: FeatureBatch, file: Path) -> None:
    """A table of the kernels of three steps of ours."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if batch.features_BSF.is_cuda else [])
    wait_for(batch.features_BSF.device)
    with profile(activities=kinds) as found:
        for _ in range(3):
            mine.step(batch)
        wait_for(batch.features_BSF.device)
    key = "self_device_time_total" if batch.features_BSF.is_cuda else "self_cpu_time_total"
    file.write_text(found.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=110))


def grown(size: Size, device: torch.device, options: Any) -> list[dict[str, Any]]:
    """How the step's time grows with rows and anchors beside the counted operations."""
    found: list[dict[str, Any]] = []
    for row_tokens, count in options.at or (SMALL if options.quick else GROWTH):
        here = replace(size, row_tokens=row_tokens, anchors=count)
        shape = shape_of(here, device)
        head_VH = torch.randn(size.vocabulary, size.hidden, device=device, dtype=shape.dtype) * 0.02
        try:
            one = grown_at(here, shape, head_VH, device, options)
        except Exception as error:  # too large for this GPU, say: the smaller ones stay
            one = {"row_tokens": row_tokens, "anchors": count, "failed": why(error)}
        if one:
            found.append(one)
            print(json.dumps(one), file=sys.stderr, flush=True)
            save(options.found | {"growth": found}, options.out)
        del head_VH
        if device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()
    timed = [one for one in found if "tflops" in one]
    return [
        one | {"tflops_over_the_first": round(one["tflops"] / timed[0]["tflops"], 3)} if "tflops" in one else one
        for one in found
    ]


def grown_at(
    here: Size, shape: BatchShape, head_VH: torch.Tensor, device: torch.device, options: Any
) -> dict[str, Any]:
    """One of them; empty where it is only compiled."""
    mine = Ours(here, head_VH, "ours", options.chunk_blocks)
    mine.warm(shape)
    if options.compile_only:
        return {}
    batch = made_up_batch(here.draft(), shape, device, rows_of(here, "one", device))
    times = alternating({"": lambda: mine.step(batch)}, device, rounds=max(3, options.steps // 2))
    operations = counted(here.draft(), batch.rows).drafter
    one = {"row_tokens": here.row_tokens, "anchors": here.anchors, **rates(here.row_tokens, operations, times[""])}
    return one | {"peak_gib": peak_gib(device, lambda: mine.step(batch))}


def place(word: str) -> tuple[int, int]:
    row_tokens, _, anchors = word.partition("x")
    return int(row_tokens), int(anchors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ours; default: all")
    parser.add_argument("--steps", type=int, default=12, help="rounds that are timed")
    parser.add_argument("--chunk-blocks", type=int, default=256)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--at", action="append", type=place, metavar="TOKENSxANCHORS", help="--growth at these only")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a table of the kernels of ours")
    parser.add_argument("--compile-only", action="store_true", help="fill the compile cache, time nothing")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds, to see that it works")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.quick:
        options.size, options.steps = "tiny", min(options.steps, 3)
        torch.set_num_threads(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    size = SIZES[options.size]
    found: dict[str, Any] = {"what": "draft step", "size": options.size, "where": where(device)}
    found["limit_tflops"] = float(f"{matrix_limit(device):.4g}")
    options.found = found
    found |= {"growth": grown(size, device, options)} if options.growth else measured(size, device, options)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
