"""`train --dry-run`: shapes, weights and memory, told before anything is loaded."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_toml

from trainer.__main__ import main
from trainer.config import load
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.estimate import MIB, Batch, batch_bytes, drafter_parts, dry_run
from trainer.start import TrainingError
from trainer.target import TargetError, load_target

SIZES = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
}
VOCABULARY = {"qwen3-4b": 151936, "qwen3-8b": 151936, "smollm2": 49152}

# The draft step's peak (torch.cuda.max_memory_allocated, MiB) on an H200 with torch 2.11.0+cu130, 2026-11-29:
# shape, layers, captured, rows, row tokens, blocks, block, chunk -> MiB.
MEASURED = [
    ("qwen3-4b", 5, 5, 1, 4096, 512, 16, 256, 14058),
    ("qwen3-4b", 5, 5, 1, 4096, 256, 16, 64, 10872),
    ("qwen3-4b", 2, 3, 2, 2048, 256, 16, 128, 6401),
    ("smollm2", 1, 5, 32, 512, 128, 16, 512, 2495),
    ("smollm2", 5, 5, 8, 1024, 128, 8, 256, 1453),
    ("qwen3-8b", 5, 5, 1, 4096, 512, 16, 128, 21874),
]


def weights_of(draft: DraftConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in DraftModel(draft).parameters())


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[0]}-{case[1]}-{case[5]}")
def test_the_draft_step_s_memory_is_what_a_gpu_used(case: tuple[str, int, int, int, int, int, int, int, int]) -> None:
    name, layers, captured, rows, row_tokens, blocks, block, chunk, measured = case
    draft = DraftConfig(
        num_layers=layers,
        vocab_size=VOCABULARY[name],
        rms_norm_eps=1e-6,
        block_size=block,
        target_layer_ids=tuple(range(1, captured + 1)),
        num_target_layers=30,
        mask_token_id=5,
        max_position_embeddings=8192,
        **SIZES[name],  # pyright: ignore
    )
    batch = Batch(rows, row_tokens, blocks, block)
    weights = weights_of(draft)
    parts = drafter_parts(draft, weights, batch, bytes_each=2, chunk_blocks=chunk, accumulates=False, soft=False)
    head = 2 * draft.vocab_size * draft.hidden_size
    estimate = sum(part.bytes for part in parts) + head + batch_bytes(draft, batch, bytes_each=2, soft=False)
    assert estimate / MIB == pytest.approx(measured, rel=0.1)


def test_the_page_tells_shapes_weights_and_tokens(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_folder / "config.toml"
    assert (
        main(["train", str(config), "--dry-run", "--set", "train.rows_per_step=4", "--set", "train.micro_rows=2"]) == 0
    )
    page = capsys.readouterr().out
    target = load_target(tiny_folder / "target")
    drafter = DraftModel(target.draft_config(1, 4, (1, 2, 3)))
    assert f"{sum(p.numel() for p in target.model.parameters()):,} weights, float32 on cpu" in page
    assert f"{sum(p.numel() for p in drafter.parameters()):,} weights on cpu" in page
    assert "4 rows of 96 tokens: 384 tokens, in 2 forwards of 2; 8 blocks a row: 96 predicted slots" in page
    assert "20 steps: 7,680 tokens" in page
    assert "gradients of the forwards before" in page
    assert "rough" in page


def test_a_gpu_is_planned_for_where_there_is_none(tiny_folder: Path) -> None:
    text = tiny_toml(tiny_folder / "target", "no-data-yet.jsonl", data__row_tokens=128, train__device="cuda:7")
    page = dry_run(load(text.encode(), ["train.target_device=cuda:6"]))
    assert "bfloat16 on cuda:6" in page
    assert "memory    cuda:6:" in page
    assert "memory    cuda:7:" in page
    assert "target's head" in page.partition("memory    cuda:7:")[2]
    assert "nvidia-smi will show about" in page


def test_windows_and_objectives_are_in_the_page(tiny_folder: Path) -> None:
    text = tiny_toml(tiny_folder / "target", "none.jsonl", draft__layers=2, draft__sliding_window=16)
    page = dry_run(load(text.encode(), ["draft.sliding_layers=[0]", "draft.causal=true", "train.objective=kl"]))
    assert "1 sliding, 1 full (16 tokens), causal inside the block" in page
    assert "kl with d-pace weights" in page


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        (["target.path=/nowhere"], TargetError, r"/nowhere is not a folder with a model"),
        (["draft.target_layer_ids=[1, 9]"], TrainingError, r"\[9\]: the target has layers 0..5"),
        (["draft.captured=5"], TrainingError, "no 5 layers"),
        (["train.device=cuda:0"], TrainingError, "multiple of 128"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    sets: list[str], error: type[Exception], message: str, tiny_folder: Path
) -> None:
    text = tiny_toml(tiny_folder / "target", tiny_folder / "train.jsonl")
    with pytest.raises(error, match=message):
        dry_run(load(text.encode(), sets))


def test_a_config_that_is_no_model_s_is_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    config = tmp_path / "config.toml"
    config.write_text(tiny_toml(tmp_path, tiny_folder / "train.jsonl"))
    assert main(["train", str(config), "--dry-run"]) == 1
    assert len(capsys.readouterr().err.strip().split("\n")) == 1
