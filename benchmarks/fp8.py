"""What features in fp8 do to a drafter: the same held-out answers measured with the target's own features and with fp8.

    python benchmarks/fp8.py --target MODEL --drafter dflash_ops/demo/drafter --data dflash_ops/demo/heldout.jsonl

Loss, teacher-forced acceptance over all anchors, acceptance in a decoder's cycles, and how far each captured layer's
features moved (the norm of the difference over the norm). On a GPU fp8's own products; on the CPU the same roundings of
weights and activations, multiplied in float32 (--target's dtype). The drafter was trained on exact features: what
training on fp8's would make up for is not in it. Prints one JSON object.
"""

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trainer.target
from trainer.checkpoint import load_drafter
from trainer.compiled import compiled
from trainer.config import load
from trainer.feed import Feed
from trainer.heldout import heldout_figures
from trainer.learner import Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.records import RunDir
from trainer.speed import where
from trainer.start import data_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", required=True, help="conversations, the answers by the target")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64, help="of one forward")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        trainer.target.fp8_why_not = lambda device: None  # rounded alike, multiplied in float32
    target = trainer.target.load_target(options.target, device, torch.bfloat16 if on_gpu else torch.float32)
    drafter, draft = load_drafter(options.drafter, device, torch.float32, target=target)
    learner = Learner(
        drafter, target.head_weight, make_optimizer(drafter, lr=1e-4, weight_decay=0.0), Weighting("d-pace"),
        chunk_blocks=64, clip=1.0,
    )  # fmt: skip
    config = load(
        f'[target]\npath = "{options.target}"\n[data]\ntrain = "{options.data}"\nheldout = "{options.data}"\n'
        f"row_tokens = {options.row_tokens}\n[train]\nsteps = 1\nrows_per_step = 1\n"
        f"anchors = {options.anchors}\n".encode()
    )
    found: dict[str, Any] = {"what": "fp8", "where": where(device), "target": Path(options.target).name}
    with tempfile.TemporaryDirectory() as folder:
        data, heldout = data_of(config, target, RunDir(Path(folder)), threading.Event(), lambda line: None)
        feed = Feed(config, data, heldout)
        found["rows"], exact = feed.heldout_batches, []
        for name in ("exact", "fp8"):
            if name == "fp8":
                target.prepare(
                    1, options.row_tokens, draft.target_layer_ids, fp8=True,
                    compiled=compiled if on_gpu else (lambda function: function),
                )  # fmt: skip
            batches = [features_of(target, rows, draft, device, anchors=options.anchors) for rows in feed._heldout()]
            figures = heldout_figures(learner, batches, threading.Event())
            assert figures is not None
            found[name] = {k: round(v, 5) for k, v in vars(figures).items()}
            if name == "exact":
                exact = [batch.features_BSF for batch in batches]
                continue
            moved: list[float] = []
            for layer in range(len(draft.target_layer_ids)):
                here = slice(layer * draft.hidden_size, (layer + 1) * draft.hidden_size)
                pairs = [
                    (b.features_BSF[..., here].float(), e[..., here].float())
                    for b, e in zip(batches, exact, strict=True)
                ]
                off = sum(float((b - e).pow(2).sum()) for b, e in pairs)
                moved.append(round((off / sum(float(e.pow(2).sum()) for _, e in pairs)) ** 0.5, 5))
            found["features_moved"] = dict(zip(map(str, draft.target_layer_ids), moved, strict=True))
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
