"""The speed benchmarks run, with tiny shapes; what they measure only a GPU tells."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import target, train

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *words: str) -> Any:
        out = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [name, "--quick", *words, "--out", str(out)])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return json.loads(out.read_text())

    # A benchmark is a program of its own; here it shares what it changes with the tests that follow.
    monkeypatch.setattr(train, "load_targets", train.load_targets)
    monkeypatch.setattr(target, "fp8_why_not", target.fp8_why_not)
    return run


def test_the_draft_step(run: Any) -> None:
    found = run("draft_step", "--steps", "1")
    for kind, documents in (("one", 1), ("packed", 4)):
        rows = found["rows"][kind]
        assert rows["documents"] == documents and {"ours", "plain"} <= set(rows)
        assert rows["ours"]["tokens_per_s"] == pytest.approx(256_000 / rows["ours"]["ms"]["median"], rel=0.01)
    assert set(found["mask"]) == {"ours", "plain"} and {"gpu", "cpu"} & set(found["where"])


def test_the_growth(run: Any) -> None:
    found = run("draft_step", "--growth", "--steps", "1")["growth"]
    assert [(one["row_tokens"], one["anchors"]) for one in found] == [(128, 8), (128, 16), (256, 8), (256, 16)]
    assert found[0]["tflops_over_the_first"] == 1


def test_the_parts(run: Any) -> None:
    found = run("parts", "attention", "head", "update", "mask")
    tried = [one for name, one in found["attention"].items()]
    assert len(tried) > 10 and not [one for one in tried if "failed" in one]
    assert len(found["head"]) == 3 and len(found["update"]) == 2 and len(found["mask"]) >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the CPU")
def test_the_features_and_the_trainer(run: Any) -> None:
    found = run("pipeline", "features", "trainer")
    for kind in ("one", "packed"):
        assert set(found["features"][kind]) == {"transformers", "by hand", "ours"}
        assert max(found["features"][kind]["ours"]["moved_from_the_first"]) < 1e-3
        assert found["trainer"]["exact"][kind]["held_back_by"]


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the CPU")
def test_what_records_and_checkpoints_cost(run: Any, soak: bool) -> None:
    if not soak:
        pytest.skip("four trainings: with --soak")
    overhead = run("pipeline", "overhead")["overhead"]
    assert overhead["saved and measured"]["of_a_run"] and "logging_costs" in overhead


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the CPU")
def test_the_layouts(run: Any) -> None:
    found = run("layouts")
    assert found["links"] == {"gpus": 0} and set(found["speed"]) == {"one"}
    one = found["speed"]["one"]
    assert one["tokens_per_s"] > 0 and one["times_one_gpu"] == 1 and one["advice"] is None


def test_the_layouts_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All splits, the drafters' devices one more at a time; every drafter has as many rows of a step."""
    monkeypatch.syspath_prepend(str(FOLDER))
    layouts = runpy.run_path(str(FOLDER / "layouts.py"))["layouts"]
    assert layouts(2, 8) == {
        "1+1": (["cuda:0"], ["cuda:1"], 8),
        "both on each": (["cuda:0-1"], ["cuda:0-1"], 8),
        "one": (["cuda:0"], ["cuda:0"], 8),
    }
    of_eight = layouts(8, 8)
    assert list(of_eight) == ["7+1", "6+2", "5+3", "4+4", "3+5", "2+6", "1+7", "both on each", "one"]
    assert of_eight["5+3"] == (["cuda:0-4"], ["cuda:5-7"], 9) and of_eight["1+7"] == (["cuda:0"], ["cuda:1-7"], 14)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the CPU")
def test_a_training_that_is_ended_and_goes_on_is_compared(run: Any, soak: bool) -> None:
    if not soak:
        pytest.skip("six trainings, each a process: with --soak")
    found = run("courses", "whole", "broken", "large")
    broken = found["broken"]
    assert [end["code"] for end in broken["ends"]] == [0, -9, 1, 0] and found["wrong"] == []
    assert broken["same_checkpoint_to_the_bit"] and len(broken["digests"][0]) == 2 and broken["same_figures"]["same"]
    assert found["large"]["ends"][0]["code"] == 0
