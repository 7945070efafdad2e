"""What speed is measured with: repeated timing, the limit of a device's matrix products, and counted operations."""

# torch's cuda functions are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer.draft_config import DraftConfig
from trainer.features import RowBatch

SHORTEST, LONGEST = 200, 1500  # tokens of a packed row's documents


class Times(NamedTuple):
    """Of one thing done many times, in milliseconds."""

    median: float
    low: float  # the 10th percentile
    high: float  # the 90th

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        ordered = sorted(1000 * value for value in seconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self._asdict().items()}


def alternating(
    what: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warm: int = 3
) -> dict[str, Times]:
    """Each of them once a round, in turn, the device waited for before and after: they meet the same moods of it."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for number in range(warm + rounds):
        for name, work in what.items():
            wait_for(device)
            start = time.perf_counter()
            work()
            wait_for(device)
            if number >= warm:
                seconds[name].append(time.perf_counter() - start)
    return {name: Times.of(found) for name, found in seconds.items()}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device, work: Callable[[], object]) -> float | None:
    """The most that torch has allocated on a GPU while something runs, what was there before included."""
    if device.type != "cuda":
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait_for(device)
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)


def matrix_limit(device: torch.device, size: int | None = None) -> float:
    """TFLOP/s of a large matrix product there: bfloat16 on a GPU, float32 on the CPU."""
    on_gpu = device.type == "cuda"
    size = size or (8192 if on_gpu else 256)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = alternating({"": lambda: torch.mm(a, b, out=out)}, device, rounds=12, warm=4)
    return 2 * size**3 / times[""].median / 1e9


def where(device: torch.device) -> dict[str, str]:
    """Hardware and versions that a figure belongs to."""
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device), **found}
    return {"cpu": platform.machine(), "threads": str(torch.get_num_threads()), **found}


def packed_lengths(row_tokens: int, seed: int) -> list[int]:
    """Lengths of documents that fill a row; shorter ones where the row itself is short."""
    draw = random.Random(seed)
    scale = min(1.0, row_tokens / (2 * LONGEST))
    lengths: list[int] = []
    while (left := row_tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(2, round(scale * draw.randint(SHORTEST, LONGEST)))))
    return lengths


@dataclass(frozen=True)
class Counted:
    """Floating point operations of a batch, 2 for each multiplication; only what has to be done."""

    target: float
    drafter: float

    @property
    def total(self) -> float:
        return self.target + self.drafter


def counted(draft: DraftConfig, rows: RowBatch) -> Counted:
    """Of a step's batch with cross-entropy. The target's layers are taken to be of the drafter's sizes.

    As flops.step_flops, but attention by what these documents and anchors really see; the target's is causal, and its
    layers end with the last captured one. Recomputing counts nothing.
    """
    hidden, wide = draft.hidden_size, draft.num_heads * draft.head_dim
    key_value = 2 * hidden * draft.num_kv_heads * draft.head_dim
    layer = 2 * hidden * wide + key_value + 3 * hidden * draft.intermediate_size
    target_layers, tokens = max(draft.target_layer_ids) + 1, rows.ids_BS.numel()
    pairs = context = 0
    for ids, positions, anchors, keep in zip(
        rows.document_ids_BS, rows.positions_BS, rows.anchors_BN, rows.keep_BN, strict=True
    ):
        lengths = torch.unique_consecutive(ids, return_counts=True)[1]
        pairs += int((lengths * (lengths + 1) // 2).sum())
        context += int(positions[anchors[keep]].sum())
    blocks = rows.anchors_BN.numel()
    block_tokens = blocks * draft.block_size
    seen = draft.block_size * (context + block_tokens)  # pairs of a slot and a key
    return Counted(
        target=2.0 * tokens * layer * target_layers + 4.0 * wide * pairs * target_layers,
        drafter=4.0 * tokens * draft.feature_size * hidden
        + 6.0 * draft.num_layers * (tokens * key_value + block_tokens * layer)
        + 12.0 * wide * seen * draft.num_layers
        + 4.0 * blocks * (draft.block_size - 1) * hidden * draft.vocab_size,
    )


def tflops(operations: float, milliseconds: float) -> float:
    """TFLOP/s, to four digits."""
    return float(f"{operations / milliseconds / 1e9:.4g}")


def rates(row_tokens: float, operations: float, times: Times) -> dict[str, Any]:
    """What a time of a row means."""
    return {
        "ms": times.rounded(),
        "tokens_per_s": round(1000 * row_tokens / times.median),
        "tflops": tflops(operations, times.median),
    }
