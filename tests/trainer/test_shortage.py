"""Out of memory, in words that a user can act on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_toml

from trainer.config import TrainConfig, load
from trainer.shortage import explain_shortage, is_shortage

# As torch 2.11 says it on a GPU.
GPU = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 1 has a total capacity of 139.81 GiB of which 1.10 GiB is "
    "free. Process 4711 has 90.50 GiB memory in use. Including non-PyTorch memory, this process has 48.20 GiB memory "
    "in use. Of the allocated memory 46.71 GiB is allocated by PyTorch, and 812.50 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation."
)
SAID = (
    "2.32 GiB more were asked for, 1.10 GiB of 139.81 GiB are free, torch has given out 46.71 GiB and keeps 812.50 "
    "MiB unused, other processes have 90.50 GiB"
)


def config_of(folder: Path, *sets: str) -> TrainConfig:
    changes: dict[str, Any] = {"layout__targets": ["cuda:0"], "layout__drafters": ["cuda:1"]}
    text = tiny_toml(folder / "target", "none.jsonl", data__row_tokens=128, **changes)
    return load(text.encode(), ["train.rows_per_step=8", "train.micro_rows=4", *sets])


@pytest.mark.parametrize(
    ("worker", "device", "sets", "advice"),
    [
        (
            "target-0",
            "cuda:0",
            [],
            "lower train.micro_rows or data.row_tokens, or spread the target over more GPUs "
            '(layout.targets = ["cuda:0+1"]) (by estimate the largest part of 2 MiB there is target\'s forward: 1 MiB)',
        ),
        ("target", "cuda:0", ["train.micro_rows=1"], "lower data.row_tokens, or spread the target over"),
        (
            "drafter-2",
            "cuda:1",
            ["train.anchors=4096"],
            "lower train.micro_rows, train.chunk_blocks, train.anchors or layout.depth (by estimate the largest part",
        ),
        (
            "drafter",
            "cuda",
            ["train.micro_rows=1", 'layout.drafters=["cuda:0"]', "layout.depth=1"],
            "lower train.chunk_blocks, train.anchors or data.row_tokens, or spread the target",
        ),
    ],
)
def test_it_names_worker_device_shapes_and_what_to_lower(
    worker: str, device: str, sets: list[str], advice: str, tiny_folder: Path
) -> None:
    config = config_of(tiny_folder, *sets)
    told = explain_shortage(torch.OutOfMemoryError(GPU), worker, torch.device(device), "4 rows of 128 tokens", config)
    place = "cuda:0" if device == "cuda" else device
    start = f"{worker} ran out of memory on {place} with 4 rows of 128 tokens: {SAID}; {advice}"
    assert str(told)[: len(start)] == start
    assert "\n" not in str(told)


def test_without_a_target_it_still_tells(tmp_path: Path) -> None:
    told = explain_shortage(torch.OutOfMemoryError("odd"), "target-1", "cuda:0", "a row", config_of(tmp_path))
    assert str(told) == (
        "target-1 ran out of memory on cuda:0 with a row: odd; lower train.micro_rows or data.row_tokens"
    )


def test_the_real_error_of_a_cpu_is_one(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_shortage(caught.value)
    told = str(explain_shortage(caught.value, "drafter", "cpu", "a row", config_of(tmp_path)))
    assert f"cpu with a row: {2**60} bytes more were asked for; lower train.micro_rows" in told


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError(""), True),
        (RuntimeError("CUDA error: out of memory\nCompile with"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_none(error: Exception, short: bool) -> None:
    assert is_shortage(error) == short
