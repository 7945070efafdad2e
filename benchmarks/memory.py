"""What a draft step and a whole training take of a GPU's memory, beside what the estimate says.

    python benchmarks/memory.py [CASE ...]

Each case runs in a process of its own, one after the other. Prints a JSON object a line: torch's peak in MiB
(max_memory_allocated), what the estimate adds up, and for whole trainings what nvidia-smi charges the process with.
tests/trainer/test_estimate.py keeps such figures of an H200: when what computes has changed, they are made anew here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, Size

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline import write_data
from tiny_targets import tiny_tokenizer

import trainer.train as training
from trainer.config import load
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.estimate import planned
from trainer.learner import Learner
from trainer.loss import Weighting
from trainer.memory import MIB, Batch, batch_bytes, drafter_parts, memory
from trainer.optim import make_optimizer
from trainer.target import TargetModel
from trainer.warm import BatchShape, made_up_batch, warm_up

SMOLLM2 = Size(576, 30, 9, 3, 64, 1536, 49152, row_tokens=512, anchors=128)
DRAFT_STEPS: dict[str, tuple[Size, int, int, int, int, int, int, int]] = {
    # shape, layers, captured, rows, row tokens, blocks, block, chunk
    "4b": (SIZES["qwen3-4b"], 5, 5, 1, 4096, 512, 16, 256),
    "4b, fewer blocks": (SIZES["qwen3-4b"], 5, 5, 1, 4096, 256, 16, 64),
    "4b, two layers": (SIZES["qwen3-4b"], 2, 3, 2, 2048, 256, 16, 128),
    "smollm2, 32 rows": (SMOLLM2, 1, 5, 32, 512, 128, 16, 512),
    "smollm2": (SMOLLM2, 5, 5, 8, 1024, 128, 8, 256),
    "8b": (SIZES["qwen3-8b"], 5, 5, 1, 4096, 512, 16, 128),
}
TRAININGS = {
    "training": ["train.rows_per_step=1"],
    "training, two forwards": ["train.rows_per_step=2"],
    "training, kl": ["train.rows_per_step=1", "train.objective=kl", "train.chunk_blocks=64"],
}


def draft_step(name: str) -> dict[str, Any]:
    size, layers, captured, rows, row_tokens, blocks, block, chunk = DRAFT_STEPS[name]
    draft = DraftConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_layers=layers, num_heads=size.heads,
        num_kv_heads=size.kv_heads, head_dim=size.head_dim, vocab_size=size.vocabulary, rms_norm_eps=1e-6,
        block_size=block, target_layer_ids=tuple(range(1, captured + 1)), num_target_layers=30, mask_token_id=5,
        max_position_embeddings=8192,
    )  # fmt: skip
    device = torch.device("cuda:0")
    with torch.device(device):
        model = DraftModel(draft).to(device)
    head_VH = torch.randn(size.vocabulary, size.hidden, device=device, dtype=torch.bfloat16) * 0.02
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.0)
    learner = Learner(model, head_VH, optimizer, Weighting("d-pace"), chunk_blocks=chunk, clip=1.0)
    shape = BatchShape(rows, row_tokens, blocks, torch.bfloat16, teacher=False)
    warm_up([learner], shape, say=say)
    batch = made_up_batch(draft, shape, device)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        learner.learn(batch)
        learner.update(1e-4)
    own = Batch(rows, row_tokens, blocks, block)
    parts = drafter_parts(
        draft, sum(p.numel() for p in model.parameters()), own, bytes_each=2, given_bytes=2, chunk_blocks=chunk,
        accumulates=False, soft=False,
    )  # fmt: skip
    estimate = sum(part.bytes for part in parts) + head_VH.nbytes + batch_bytes(draft, own, bytes_each=2, soft=False)
    return {"peak_mib": round(torch.cuda.max_memory_allocated() / MIB), "estimate_mib": round(estimate / MIB)}


def whole(name: str) -> dict[str, Any]:
    """Three steps of the preset of Qwen3-4B, target and drafter on one GPU, random weights."""
    size = SIZES["qwen3-4b"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(size, folder)
        text = f'preset = "qwen3-4b"\n[target]\npath = "{folder}/target"\n[data]\ntrain = "{folder}/train.jsonl"\n'
        sets = ['layout.targets=["cuda:0"]', 'layout.drafters=["cuda:0"]', *TRAININGS[name]]
        config = load((text + "[train]\nsteps = 3\n").encode(), sets)
        target = TargetModel(size.model(torch.device("cuda:0")), tiny_tokenizer())
        training.load_targets = lambda config, layout: [target] * len(layout.targets)
        torch.cuda.reset_peak_memory_stats()
        training.train(config, folder / "run", say=say)
        shape, draft, batch, layout = planned(config)
        estimate = sum(part.bytes for part in memory(shape, draft, batch, config, layout)["cuda:0"])
    asked = ("nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    charged = [int(line.split(",")[1]) for line in lines if line.split(",")[0] == str(os.getpid())]
    return {
        "peak_mib": round(torch.cuda.max_memory_allocated() / MIB),
        "estimate_mib": round(estimate / MIB),
        "nvidia_smi_mib": charged[0] if charged else None,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join([*DRAFT_STEPS, *TRAININGS]))
    options = parser.parse_args()
    names = options.cases or [*DRAFT_STEPS, *TRAININGS]
    if unknown := [name for name in names if name not in DRAFT_STEPS and name not in TRAININGS]:
        parser.error(f"no case {unknown[0]!r}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if len(names) == 1:
        found = draft_step(names[0]) if names[0] in DRAFT_STEPS else whole(names[0])
        print(json.dumps({"case": names[0], **found}), flush=True)
        return 0
    return max(subprocess.run([sys.executable, __file__, name]).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
