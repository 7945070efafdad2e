"""Out of memory, in words that a user can act on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_toml

from trainer import shortage
from trainer.config import TrainConfig, load
from trainer.memory import Part
from trainer.shortage import is_shortage, shortage_in

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


def told(config: TrainConfig, worker: str | None, message: str = GPU) -> str:
    """What an error ends as, once it was seen in that worker's thread; None: in no worker's."""
    error = torch.OutOfMemoryError(message)
    if worker is not None:
        error.worker = worker  # type: ignore[attr-defined]
    return str(shortage_in(error, config))


def on_gpu(index: int) -> str:
    return GPU.replace("GPU 1 has", f"GPU {index} has")


WIDE = ['layout.targets=["cuda:0-4"]', 'layout.drafters=["cuda:5-7"]', "train.micro_rows=2"]


@pytest.mark.parametrize(
    ("worker", "gpu", "sets", "start"),
    [
        (
            "target",
            0,
            [],
            f"target ran out of memory on cuda:0 with 4 rows of 128 tokens, 8 anchors each: {SAID}; lower "
            'train.micro_rows or data.row_tokens, or spread the target over more GPUs (layout.targets = ["cuda:0+1"]) '
            "(by estimate the largest part of 1 MiB there is target's forward: 1 MiB)",
        ),
        (
            "drafter",
            1,
            ["train.anchors=4096"],
            "drafter ran out of memory on cuda:1 with 4 rows of 128 tokens, 4,096 anchors each: "
            f"{SAID}; lower train.micro_rows, train.chunk_blocks, train.anchors or layout.depth (by estimate the",
        ),
        # One GPU for both, and what is as low as it can be is not named.
        (
            "drafter",
            0,
            ["train.micro_rows=1", 'layout.drafters=["cuda:0"]', "layout.depth=1"],
            "drafter ran out of memory on cuda:0 with 1 row of 128 tokens, 8 anchors each: "
            f"{SAID}; lower train.chunk_blocks, train.anchors or layout.queue_mib, or spread the target",
        ),
        # Its features arrive on a drafter's GPU.
        (
            "target-3",
            6,
            WIDE,
            f"target-3 ran out of memory on cuda:6 with 2 rows of 128 tokens, 8 anchors each: {SAID}; lower "
            "layout.depth, layout.queue_mib, train.micro_rows or ",
        ),
        # Either GPU of a target that is spread.
        (
            "target-1",
            2,
            ['layout.targets=["cuda:0+1", "cuda:2+3"]', 'layout.drafters=["cuda:4"]'],
            f"target-1 ran out of memory on cuda:2 with 4 rows of 128 tokens, 8 anchors each: {SAID}; lower "
            "train.micro_rows or data.row_tokens",
        ),
        # The main thread, on any of them: by what is there.
        (
            None,
            7,
            WIDE,
            "the main thread ran out of memory on cuda:7 with forwards of 2 rows of 128 tokens, 8 anchors each: "
            f"{SAID}; lower layout.depth, layout.queue_mib, train.micro_rows or train.chunk_blocks (by estimate",
        ),
        (
            None,
            4,
            WIDE,
            "the main thread ran out of memory on cuda:4 with forwards of 2 rows of 128 tokens, 8 anchors each: "
            f"{SAID}; lower train.micro_rows or data.row_tokens, or spread the target",
        ),
    ],
)
def test_it_names_who_where_with_what_and_what_to_lower_there(
    worker: str | None, gpu: int, sets: list[str], start: str, tiny_folder: Path
) -> None:
    said = told(config_of(tiny_folder, *sets), worker, on_gpu(gpu))
    assert said[: len(start)] == start
    assert "\n" not in said


def test_what_the_main_thread_lacked_is_lowered_by_the_largest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("a forward", 1, ("lower train.micro_rows",)), Part("moments", 2, ("lower draft.layers",))]
    monkeypatch.setattr(shortage, "_parts_on", lambda *_: parts)
    config = config_of(tmp_path, "draft.layers=5")
    assert "; lower draft.layers or train.micro_rows (by" in told(config, None)
    first = "; lower train.micro_rows, train.chunk_blocks, train.anchors or draft.layers (by"
    assert first in told(config, "drafter")


def test_where_torch_names_no_device_it_is_the_workers(tiny_folder: Path) -> None:
    config = config_of(tiny_folder, *WIDE)
    for worker, place in (("target-3", " on cuda:3"), ("drafter-2", " on cuda:7"), (None, ""), ("source", "")):
        begins = f"{worker or 'the main thread'} ran out of memory{place} with "
        assert told(config, worker, "CUDA error: out of memory").startswith(begins)


def test_without_a_target_it_still_tells(tmp_path: Path) -> None:
    config = config_of(tmp_path, *WIDE)
    for worker, gpu, less in (
        ("target-1", 1, "lower train.micro_rows or data.row_tokens"),
        ("target-1", 5, "lower layout.depth, layout.queue_mib or train.micro_rows"),
        ("drafter-1", 6, "lower train.micro_rows, train.chunk_blocks or train.anchors"),
        (None, 6, "lower train.micro_rows, train.chunk_blocks or train.anchors"),
        (None, 1, "lower train.micro_rows or data.row_tokens"),
    ):
        said = told(config, worker, f"GPU {gpu} has a total capacity: odd")
        assert said.endswith(f"each: GPU {gpu} has a total capacity: odd; {less}")


def test_the_real_error_of_a_cpu_is_one(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_shortage(caught.value)
    caught.value.worker = "drafter"  # type: ignore[attr-defined]
    said = str(shortage_in(caught.value, config_of(tmp_path)))  # whose drafter is on a GPU
    assert "drafter ran out of memory on cpu with 4 rows" in said
    assert f": {2**60} bytes more were asked for; lower train.micro_rows" in said


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
