"""`python -m trainer bench` on the CPU, what it counts, and what it says holds a training back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import CONFIG

from trainer.__main__ import main
from trainer.bench import Bench, page
from trainer.blocks import dense_mask
from trainer.busy import Busy
from trainer.config import load
from trainer.layout import Layout
from trainer.masks import document_mask
from trainer.speed import LONGEST, SHORTEST, Times, alternating, counted, packed_lengths
from trainer.warm import BatchShape, made_up_batch, made_up_rows


@pytest.mark.parametrize("layout", ["shared", "two drafters"])
def test_it_tells_speed_share_and_reason(tiny_folder: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    words = ["bench", str(tiny_folder / "config.toml"), "--steps", "3"]
    if layout == "two drafters":
        words += ["--set", 'layout.drafters=["cpu", "cpu"]', "--set", "layout.allow_shared_device=true"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3 and found["documents_a_row"] > 1
    assert found["step"] == {"rows": 2, "row_tokens": 96, "anchors": 8}
    assert found["tokens_per_s"] == pytest.approx(192_000 / found["ms"]["median"], rel=0.01)
    assert found["share_of_limit"] == pytest.approx(found["tflops"] / found["limit_tflops"]["cpu"], abs=1e-3)
    assert set(found["alone"]) == {"target", "drafter"}
    names = {"target", "drafter"} if layout == "shared" else {"target", "drafter-0", "drafter-1"}
    assert set(found["working"]) == names and all(0 < share <= 1 for share in found["working"].values())
    assert "alone" in found["held_back_by"]
    lines = page(found).split("\n")
    assert [line.split()[0] for line in lines] == ["speed", "limit", "target", "drafter", "working", "held"]


def test_without_a_config_a_target_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--steps", "1", "--rows", "one", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"].startswith("random weights") and found["documents_a_row"] == 1 and found["steps"] == 1
    assert main(["bench", "--set", "train.step=3"]) == 3


def test_a_wrong_config_is_told_as_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[target]\npath = "none"\n[data]\ntrain = "none"\n[train]\nstep = 3\n')
    assert main(["bench", str(config)]) == 3
    assert "train.step: unknown key; did you mean train.steps?" in capsys.readouterr().err
    config.write_text('[target]\npath = "/none"\n[data]\ntrain = "none"\n[train]\nsteps = 3\n')
    assert main(["bench", str(config), "--set", "layout.targets=cpu", "--set", "layout.drafters=cpu"]) == 1
    assert "/none is not a folder with a model" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [None, [30, 50, 16]])
def test_what_attention_costs_is_counted_by_what_is_seen(lengths: list[int] | None) -> None:
    shape = BatchShape(rows=2, row_tokens=96, anchors=8, dtype=torch.float32, teacher=False)
    rows = made_up_rows(shape, lengths, 100)
    assert int(rows.keep_BN.sum()) == 16
    batch = made_up_batch(CONFIG, shape, torch.device("cpu"), rows)
    none = counted(replace(CONFIG, num_heads=4, head_dim=8), rows)
    # With twice the width of all heads attention costs twice as much, and the projections of queries and output too.
    seen, pairs = int(dense_mask(batch.blocks, 96).sum()), int(document_mask(rows.document_ids_BS).sum())
    hidden, wide, narrow, layers = 32, 32, 16, 2
    layer = 2 * hidden * wide + 2 * hidden * narrow + 3 * hidden * 48
    tokens, slots = 2 * 96, 2 * 8 * 4
    assert none.target == 4 * (2 * tokens * layer + 4 * wide * pairs)
    forward = layers * (2 * slots * layer + 2 * tokens * 2 * hidden * narrow + 4 * wide * seen)
    head = 2 * 2 * (2 * 8 * 3) * hidden * 128
    assert none.drafter == 3 * forward + 2 * 2 * tokens * 64 * hidden + head


def test_packed_rows_are_full_and_of_documents_as_said() -> None:
    for seed in range(20):
        lengths = packed_lengths(4096, seed)
        assert sum(lengths) == 4096 and all(SHORTEST <= length <= LONGEST for length in lengths[:-1])
        assert sum(packed_lengths(100, seed)) == 100 and len(packed_lengths(100, seed)) > 2


def test_things_are_timed_by_turns() -> None:
    done: list[str] = []
    times = alternating(
        {"a": lambda: done.append("a"), "b": lambda: done.append("b")}, torch.device("cpu"), rounds=4, warm=1
    )
    assert done == ["a", "b"] * 5 and set(times) == {"a", "b"}
    assert Times.of([0.003, 0.001, 0.002]) == pytest.approx((2.0, 1.0, 3.0))


CASES = [
    (("cuda:0",), "cuda:0", 12.0, "the arithmetic of both (5.0 + 6.0 ms a step alone, 12.0 together on cuda:0)"),
    (("cuda:0",), "cuda:0", 14.0, "what lies between the kernels (5.0 + 6.0 ms a step alone, 14.0 together on cuda:0)"),
    (("cuda:0",), "cuda:1", 6.1, "the drafter's arithmetic (a step is 5.0 ms of target and 6.0 ms of drafter, 6.1"),
    (("cuda:0",), "cuda:1", 9.0, "what lies between the workers (a step is 5.0 ms of target and 6.0 ms of drafter"),
    (("cuda:0", "cuda:2"), "cuda:1", 6.1, "the drafter's arithmetic (a step is 2.5 ms of target"),
]


@pytest.mark.parametrize(("targets", "drafter", "step_ms", "told"), CASES)
def test_what_holds_it_back(
    tiny_folder: Path, targets: tuple[str, ...], drafter: str, step_ms: float, told: str
) -> None:
    it = object.__new__(Bench)
    it.config, it.layout = load(tiny_folder / "config.toml"), Layout(tuple((t,) for t in targets), (drafter,))
    it.shape = BatchShape(2, 96, 8, torch.float32, teacher=False)
    found: dict[str, Any] = {
        "limit_tflops": {"cuda:0": 700.0, "cuda:1": 700.0, "cuda:2": 700.0},
        "alone": {
            "target": {"ms": {"median": 5.0}, "tflops": 350.0},
            "drafter": {"ms": {"median": 6.0}, "tflops": 490},
        },
        "ms": {"median": step_ms},
        "step": {"rows": 2},
    }
    spent = {f"target-{n}": Busy(1.0, 0.0, 0.02) for n in range(len(targets))} | {"drafter": Busy(1.0, 0.01, 0.0)}
    line = it.verdict(found, spent)
    assert line.startswith(told) and "the target reaches 50% and the drafter 70%" in line
