"""Parts of a step by themselves: what a choice gives where it is made, and what the products alone would take.

    python benchmarks/parts.py attention head update products [--quick]
    python benchmarks/parts.py attention --compile-only 0/4    # fills the compile cache, with others beside it

attention  the drafter's attention, forward and backward, by merged heads and the kernels' options
head       head and loss with the gradient of the hidden states, by the blocks of a chunk
update     norm, clipping, AdamW and the copies that compute: one kernel a weight, and torch's own passes
products   the matrix products of drafter and target at their shapes, each alone: the floor of what they can take
Prints one JSON object. What fails is told in its place.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, Size, save, why

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.blocks import EVERYTHING, dense_mask, tile_lists, tile_mask
from trainer.compile_cache import use_compile_cache
from trainer.compiled import compiled
from trainer.draft import DraftModel
from trainer.fast_draft import HOPPER, HOPPER_FORWARD, WorkingCopy, attend, by_token, heads, merge
from trainer.features import FeatureBatch
from trainer.loss import Weighting, chunk_loss, loss_and_accepted
from trainer.optim import clip_scale, make_optimizer, norms_of, step_if, total_norm
from trainer.speed import alternating, packed_lengths, where
from trainer.update import adamw, update_weights
from trainer.warm import BatchShape, made_up_batch, made_up_rows

Options = dict[str, int | bool]


def backward(m1: int, n1: int, m2: int, n2: int, warps: int, stages: int) -> Options:
    return {
        "bwd_BLOCK_M1": m1, "bwd_BLOCK_N1": n1, "bwd_BLOCK_M2": m2, "bwd_BLOCK_N2": n2,
        "bwd_num_warps": warps, "bwd_num_stages": stages,
    }  # fmt: skip


def forward(m: int, n: int, warps: int, stages: int) -> Options:
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}


# name -> merged heads, options
ATTENTION: dict[str, tuple[bool, Options]] = {
    "flex's own": (False, {}),
    "merged": (True, {}),
    "as on a Hopper": (True, HOPPER),
    "prescaled": (False, {"PRESCALE_QK": True}),
    "tma": (False, {"USE_TMA": True}),
    "as on a Hopper, not merged": (False, HOPPER),
    "as on a Hopper, in long rows": (False, HOPPER_FORWARD),
    "fwd 128x64 w8 s3": (True, HOPPER | forward(128, 64, 8, 3)),
    "fwd 128x128 w8 s2": (True, HOPPER | forward(128, 128, 8, 2)),
    "fwd 128x32 w4 s3": (True, HOPPER | forward(128, 32, 4, 3)),
    "fwd 64x32 w4 s4": (True, HOPPER | forward(64, 32, 4, 4)),
    "fwd 128x128 w8 s3": (True, forward(128, 128, 8, 3)),
    "fwd 128x64 w4 s3": (True, forward(128, 64, 4, 3)),
    "fwd 64x128 w4 s3": (True, forward(64, 128, 4, 3)),
    "bwd 64,128 w8 s3": (True, backward(64, 128, 128, 64, 8, 3)),
    "bwd 64,128 w8 s2": (True, backward(64, 128, 128, 64, 8, 2)),
    "bwd 64,64 w4 s2": (True, backward(64, 64, 64, 64, 4, 2)),
    "bwd 64,64 w8 s2": (True, backward(64, 64, 64, 64, 8, 2)),
    "bwd 32,128 w8 s3": (True, backward(32, 128, 128, 32, 8, 3)),
    "bwd 64,64,64,32 w4 s2": (True, backward(64, 64, 64, 32, 4, 2)),
    "bwd 32,64,64,64 w4 s3": (True, backward(32, 64, 64, 64, 4, 3)),
    "bwd 32,128,64,32 w8 s2": (True, backward(32, 128, 64, 32, 8, 2)),
    "bwd 32,128,64,32 w4 s3": (True, backward(32, 128, 64, 32, 4, 3)),
    "bwd 32,32,32,32 w4 s3": (True, backward(32, 32, 32, 32, 4, 3)),
    "bwd 32,64,128,32 w4 s3": (True, backward(32, 64, 128, 32, 4, 3)),
    "bwd 32,64,128,32 w8 s3": (True, backward(32, 64, 128, 32, 8, 3)),
    "bwd 32,64 w4 s4": (True, backward(32, 64, 64, 32, 4, 4)),
    "bwd 32,64 w4 s2": (True, backward(32, 64, 64, 32, 4, 2)),
}


def batch_of(size: Size, device: torch.device, kind: str) -> FeatureBatch:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = BatchShape(1, size.row_tokens, size.anchors, dtype, teacher=False)
    lengths = packed_lengths(size.row_tokens, 0) if kind == "packed" else None
    return made_up_batch(size.draft(), shape, device, made_up_rows(shape, lengths, size.vocabulary - 1))


def attention(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """Milliseconds of one layer's attention."""
    on_gpu = device.type == "cuda"
    queries = size.anchors * size.block
    keys = size.row_tokens + queries
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q, k, v, grad = (
        torch.randn(1, tokens, count * size.head_dim, device=device, dtype=dtype)
        for tokens, count in (
            (queries, size.heads),
            (keys, size.kv_heads),
            (keys, size.kv_heads),
            (queries, size.heads),
        )
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found: dict[str, Any] = {}
    for name, (merged, kernel) in mine(list(ATTENTION.items()), options):
        try:
            chosen = tuple(sorted(kernel.items()))

            def work(
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                mask: Any,
                chosen: Any = chosen,
                merged: bool = merged and on_gpu,
            ) -> torch.Tensor:
                q, k, v = (heads(x, size.head_dim) for x in (q, k, v))
                q, k, v = merge(q, k, v) if merged else (q, k, v)
                return by_token(attend(q, k, v, mask, chosen), size.kv_heads if merged else 1)

            torch.compiler.reset()
            run: Callable[..., torch.Tensor] = compiled(work) if on_gpu else work
            here: dict[str, Any] = {}
            for kind in ("one", "packed"):
                blocks = batch_of(size, device, kind).blocks
                many, row = size.kv_heads if merged and on_gpu else 1, size.row_tokens
                mask = tile_mask(blocks, row, merged_heads=many) if on_gpu else dense_mask(blocks, row)

                def both(run: Any = run, mask: Any = mask) -> None:
                    run(q, k, v, mask).backward(grad)
                    for leaf in leaves:
                        leaf.grad = None

                both()
                if options.compile_only:
                    break
                times = alternating(
                    {"forward": lambda run=run, mask=mask: run(q, k, v, mask), "both": both},
                    device,
                    rounds=options.rounds,
                )
                one, two = times["forward"].median, times["both"].median
                here[kind] = {"forward": round(one, 3), "backward": round(two - one, 3)}
            found[name] = here
        except Exception as error:  # a choice that the kernels refuse
            found[name] = {"failed": why(error)}
        print(name, found[name], file=sys.stderr, flush=True)
        save(options.found | {"attention": found}, options.out)
    return found


def head(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """Milliseconds of head and loss of a row, with the gradient."""
    on_gpu = device.type == "cuda"
    batch = batch_of(size, device, "one")
    blocks, dtype = batch.blocks, torch.bfloat16 if on_gpu else torch.float32
    head_VH = torch.randn(size.vocabulary, size.hidden, device=device, dtype=dtype) * 0.02
    hidden = torch.randn(1, size.anchors, size.block, size.hidden, device=device, dtype=dtype).requires_grad_()
    sizes = [64, 86, 103, 128, 171, 256, 512] if not options.quick else [4, 16]
    found: dict[str, Any] = {}
    for kind in ("exp-decay", "d-pace"):
        for blocks_at_once in mine(sizes, options) if kind == "exp-decay" else [256]:
            torch.compiler.reset()
            chunk: Any = compiled(chunk_loss) if on_gpu else chunk_loss

            def work(chunk: Any = chunk, count: int = blocks_at_once, kind: Any = kind) -> None:
                terms, _ = loss_and_accepted(
                    hidden, head_VH, blocks.labels_BNP, blocks.label_mask_BNP, blocks.keep_BN,
                    Weighting(kind), count, chunk,
                )  # fmt: skip
                terms.loss_sum.backward()
                hidden.grad = None

            work()
            if not options.compile_only:
                times = alternating({"": work}, device, rounds=options.rounds)[""]
                found[f"{kind}, {blocks_at_once} blocks"] = times.rounded()
                print(kind, blocks_at_once, times, file=sys.stderr, flush=True)
    return found


def update(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """Milliseconds from gradients that are there to weights that the next forward can use."""
    torch.manual_seed(0)
    with torch.device(device):
        model = DraftModel(size.draft()).to(device)
    on_gpu = device.type == "cuda"
    parameters = list(model.parameters())
    working = WorkingCopy(model, torch.bfloat16 if on_gpu else torch.float32)
    for copy in working.copies:
        copy.grad = torch.full_like(copy, 1e-3)
    for parameter in parameters:
        if not working.is_matrix(parameter):
            parameter.grad = torch.full_like(parameter, 1e-3)
    ours, good = make_optimizer(model, lr=1e-4, weight_decay=0.0), torch.ones((), dtype=torch.bool, device=device)
    step = compiled(adamw) if on_gpu else adamw

    @torch.no_grad()
    def new() -> None:
        weights = working.weights_of(parameters)
        norm = total_norm(norms_of([weight.gradient for weight in weights]))
        update_weights(ours, weights, lr=1e-4, scale=clip_scale(norm, 1.0), good=good, step=step)

    new()
    if options.compile_only:
        return {}
    found = {"one kernel a weight": alternating({"": new}, device, rounds=options.rounds)[""].rounded()}
    for copy in working.copies:
        copy.grad = None
    theirs = make_optimizer(model, lr=1e-4, weight_decay=0.0)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)

    @torch.no_grad()
    def old() -> None:
        torch._foreach_mul_([p.grad for p in parameters], torch.ones((), device=device))
        norm = total_norm(norms_of([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        step_if(good, theirs)
        working.refresh()  # the casts of autocast

    found["torch's passes"] = alternating({"": old}, device, rounds=options.rounds)[""].rounded()
    return found


def products(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """TFLOP/s and milliseconds of each product of a step, [rows, in] x [in, out]."""
    if options.compile_only:
        return {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    slots, tokens = size.anchors * size.block, size.row_tokens
    shapes = {
        "draft q": (slots, size.hidden, wide),
        "draft kv": (slots, size.hidden, 2 * narrow),
        "draft qkv": (slots, size.hidden, wide + 2 * narrow),
        "draft context k": (tokens, size.hidden, narrow),
        "draft context kv of all layers": (tokens, size.hidden, 2 * narrow * size.draft_layers),
        "draft out": (slots, wide, size.hidden),
        "draft gate": (slots, size.hidden, size.intermediate),
        "draft gate and up": (slots, size.hidden, 2 * size.intermediate),
        "draft down": (slots, size.intermediate, size.hidden),
        "draft fc": (tokens, 5 * size.hidden, size.hidden),
        **{
            f"head, {blocks} blocks": (blocks * (size.block - 1), size.hidden, size.vocabulary)
            for blocks in (64, 128, 256, 512)
            if blocks <= size.anchors
        },
        "target q": (tokens, size.hidden, wide),
        "target qkv": (tokens, size.hidden, wide + 2 * narrow),
        "target out": (tokens, wide, size.hidden),
        "target gate": (tokens, size.hidden, size.intermediate),
        "target gate and up": (tokens, size.hidden, 2 * size.intermediate),
        "target down": (tokens, size.intermediate, size.hidden),
    }
    found: dict[str, Any] = {"workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
    for name, (rows, inner, outer) in shapes.items():
        x, weight = (
            torch.randn(rows, inner, device=device, dtype=dtype),
            torch.randn(outer, inner, device=device, dtype=dtype),
        )
        out = torch.randn(rows, outer, device=device, dtype=dtype)
        kinds = {"forward": lambda x=x, w=weight: x @ w.T, "input": lambda o=out, w=weight: o @ w}
        if not name.startswith(("head", "target")):
            kinds["weight"] = lambda o=out, x=x: o.T @ x
        times = alternating(kinds, device, rounds=options.rounds)
        operations = 2.0 * rows * inner * outer
        found[name] = {k: [round(t.median, 3), round(operations / t.median / 1e9, 1)] for k, t in times.items()}
    return found


def mask(size: Size, device: torch.device, options: Any) -> dict[str, Any]:
    """Milliseconds of a mask's lists, as they come and compiled."""
    blocks, found = batch_of(size, device, "packed").blocks, dict[str, Any]()
    for name, many in (("single", 1), ("merged", size.kv_heads)):
        for how, lists in (("as it is", tile_lists), ("compiled", compiled(tile_lists))):
            if how == "compiled" and device.type == "cpu":
                continue

            def work(lists: Any = lists, many: int = many) -> None:
                lists(
                    blocks.anchors_BN, blocks.starts_BN, blocks.keep_BN, size.block, size.row_tokens, EVERYTHING, many
                )

            work()
            if not options.compile_only:
                found[f"{name}, {how}"] = alternating({"": work}, device, rounds=options.rounds)[""].rounded()
    return found


def mine(every: list[Any], options: Any) -> Iterator[Any]:
    """Of several processes that compile side by side, each has some."""
    index, count = options.compile_only or (0, 1)
    yield from every[index::count]


def share(word: str) -> tuple[int, int]:
    index, _, count = word.partition("/")
    return int(index), int(count)


PARTS = {"attention": attention, "head": head, "update": update, "products": products, "mask": mask}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--row-tokens", type=int, help="instead of the size's")
    parser.add_argument("--anchors", type=int, help="instead of the size's")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--compile-only", type=share, metavar="I/N", help="the I-th of N processes that fill the cache")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.quick:
        options.size, options.rounds = "tiny", 2
        torch.set_num_threads(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    if device.type == "cuda":
        use_compile_cache(lambda line: print(line, file=sys.stderr))
    size = SIZES[options.size]
    size = replace(size, row_tokens=options.row_tokens or size.row_tokens, anchors=options.anchors or size.anchors)
    found: dict[str, Any] = {"what": "parts", "size": options.size, "where": where(device)}
    found |= {"row_tokens": size.row_tokens, "anchors": size.anchors}
    options.found = found
    for name in options.parts:
        try:
            found[name] = PARTS[name](size, device, options)
        except Exception as error:  # the other parts needn't be lost
            found[name] = {"failed": {"failed": why(error)}}
        save(found, options.out)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
