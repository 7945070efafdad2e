"""Steps whose loss or gradient is not finite: they change nothing, are counted, and five in a row end a training."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import conversations, tiny_toml, write_jsonl
from tiny_checkpoints import save_drafter
from tiny_runs import StopAfter, assert_same_weights, config_of, figures, metrics_of, silent, status_of

import trainer.workers as module
from trainer.checkpoint import load_drafter, newest_good_checkpoint, read_state
from trainer.config import load
from trainer.features import FeatureBatch
from trainer.learner import Learner
from trainer.records import RunDir, checkpoint_name
from trainer.train import TrainingError, train


class Poison:
    """Makes the loss or the gradient of some steps nan, by spoiling what the target says of their rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: Collection[int] = ()
        self.rows_per_step = 2
        self._features_of = module.features_of
        monkeypatch.setattr(module, "features_of", self._poisoned)

    def _poisoned(self, *args: Any, **named: Any) -> Any:
        batch = self._features_of(*args, **named)
        if batch.rows.numbers[0] // self.rows_per_step + 1 in self.steps:
            batch.features_BSF.fill_(float("nan"))
        return batch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


def test_a_skipped_step_changes_nothing_and_is_told(tiny_folder: Path, tmp_path: Path, poison: Poison) -> None:
    poison.steps = {3, 4}
    lines: list[str] = []
    config = config_of(tiny_folder, train__steps=4, train__checkpoint_every=2, train__log_every=100)
    assert train(config, tmp_path, say=lines.append) == "finished"
    records = metrics_of(tmp_path)
    assert [(r.step, r.loss is None, r.grad_norm is None, r.skipped) for r in records] == [
        (1, False, False, 0),
        (3, True, True, 1),  # told though it is not its turn
        (4, True, True, 2),
    ]
    assert records[1].accuracy is records[1].accept is records[1].accuracy_by_slot is None
    assert records[2].heldout_loss is not None
    for name in ("model.safetensors", "optimizer.safetensors"):
        before, after = (load_file(tmp_path / "checkpoints" / checkpoint_name(step) / name) for step in (2, 4))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    status = status_of(tmp_path)
    assert (status.state, status.step, status.skipped, status.checkpoint) == ("finished", 4, 2, "step-00000004")
    assert status.loss == records[0].loss
    told = [line.partition(" at ")[0] for line in lines if line.startswith("loss")]
    assert told == ["loss nan, gradient norm nan"] * 2
    assert [line for line in lines if line.startswith("step 3/4 skipped (1 so far)")]
    train(config, tmp_path, say=silent)  # finished already
    assert (status_of(tmp_path).skipped, status_of(tmp_path).loss) == (2, records[0].loss)


def test_four_in_a_row_are_borne(tiny_folder: Path, tmp_path: Path, poison: Poison) -> None:
    poison.steps = {2, 3, 4, 5, 7, 8, 9, 10}
    assert train(config_of(tiny_folder, train__steps=11), tmp_path, say=silent) == "finished"
    assert [r.step for r in metrics_of(tmp_path) if r.loss is not None] == [1, 6, 11]
    assert status_of(tmp_path).skipped == 8


def test_five_in_a_row_name_their_rows_and_leave_the_last_good_checkpoint(
    tiny_folder: Path, tmp_path: Path, poison: Poison
) -> None:
    # One conversation fills a row, in the file's order: row n is line n + 1.
    changes = {"train__checkpoint_every": 1, "train__keep": 1, "data__shuffle": False, "data__row_tokens": 72}
    config = config_of(tiny_folder, train__steps=12, **changes)
    train(config, tmp_path / "whole", say=silent)

    poison.steps = range(3, 99)
    with pytest.raises(TrainingError) as caught:
        train(config, tmp_path / "run", say=silent)
    text = str(caught.value)
    assert text.startswith("5 steps in a row had a loss or gradient that is not finite: step 3: ")
    named = re.findall(r"step (\d+): rows (\d+)-(\d+) \(train\.jsonl:(\d+), (?:train\.jsonl:)?(\d+)\)", text)
    expected = [(n, 2 * n - 2, 2 * n - 1, (2 * n - 2) % 12 + 1, (2 * n - 1) % 12 + 1) for n in range(3, 8)]
    assert [tuple(map(int, found)) for found in named] == expected
    assert "\n" not in text and "lower train.lr" in text
    status = status_of(tmp_path / "run")
    assert (status.state, status.step, status.skipped, status.checkpoint) == ("failed", 7, 5, "step-00000002")
    assert status.error == f"TrainingError: {text}"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]

    # Mended, it goes on as if nothing had been.
    poison.steps = ()
    assert train(config, tmp_path / "run", say=silent) == "finished"
    assert figures(metrics_of(tmp_path / "run")) == figures(metrics_of(tmp_path / "whole"))
    assert_same_weights(tmp_path / "run", tmp_path / "whole", 12)
    assert status_of(tmp_path / "run").skipped == 0


@pytest.mark.parametrize("into", ["the same run", "a new run"])
def test_what_was_skipped_is_counted_on_by_a_resumed_run(
    into: str, tiny_folder: Path, tmp_path: Path, poison: Poison
) -> None:
    poison.steps = {1, 4, 5, 6, 7, 8}
    config = config_of(tiny_folder)
    part = StopAfter(5)
    assert train(config, tmp_path / "part", stop=part.event, say=part) == "stopped"
    progress = read_state(tmp_path / "part/checkpoints/step-00000005").progress
    assert progress.skipped == 3
    assert [text.partition(":")[0] for text in progress.skipped_in_a_row] == ["step 4", "step 5"]
    rest = tmp_path / "part" if into == "the same run" else tmp_path / "rest"
    with pytest.raises(TrainingError) as caught:
        train(config, rest, resume=tmp_path / "part", say=silent)
    assert re.findall(r"step (\d+):", str(caught.value)) == ["4", "5", "6", "7", "8"]
    assert (status_of(rest).skipped, status_of(rest).checkpoint) == (6, "step-00000005")


def test_weights_that_are_nan_are_never_saved(tiny_folder: Path, tmp_path: Path) -> None:
    train(config_of(tiny_folder, train__steps=1), tmp_path / "first", say=silent)
    model, _ = load_drafter(RunDir(tmp_path / "first").checkpoints / checkpoint_name(1), "cpu", torch.float32)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    save_drafter(tmp_path / "nan", model)
    config = config_of(tiny_folder, train__checkpoint_every=1)
    with pytest.raises(TrainingError, match="5 steps in a row"):
        train(config, tmp_path / "run", init_from=tmp_path / "nan", say=silent)
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_training_that_has_blown_up_takes_no_good_checkpoint_away(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an overflow leaves: gradients that are not finite while the loss still is."""
    learn, count = Learner.learn, iter(range(1, 99))

    def blowing_up(learner: Learner, batch: FeatureBatch) -> None:
        learn(learner, batch)
        if next(count) >= 5:
            next(learner.model.parameters()).grad.fill_(float("inf"))  # pyright: ignore[reportOptionalMemberAccess]

    monkeypatch.setattr(Learner, "learn", blowing_up)
    config = config_of(tiny_folder, train__steps=30, train__checkpoint_every=2, train__keep=1)
    lines: list[str] = []
    with pytest.raises(TrainingError):
        train(config, tmp_path, say=lines.append)
    assert newest_good_checkpoint(tmp_path / "checkpoints", silent) == tmp_path / "checkpoints" / checkpoint_name(4)
    told = [line for line in lines if "gradient norm" in line]
    assert len(told) == 5
    assert all(re.match(r"loss \d+\.\d+, gradient norm (inf|nan) at step \d+: rows ", line) for line in told)


def test_no_drafter_with_nan_is_saved_however_high_the_learning_rate(tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"train__steps": 30, "train__log_every": 30, "train__checkpoint_every": 2, "train__clip": 1e9}
    config = config_of(tiny_folder, train__lr=1e20, train__keep=1, train__warmup_ratio=0.9, **changes)
    with pytest.raises(TrainingError, match="5 steps in a row"):
        train(config, tmp_path, say=silent)
    for file in (tmp_path / "checkpoints").glob("*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_a_soft_objective_is_skipped_alike(tiny_folder: Path, tmp_path: Path, poison: Poison) -> None:
    poison.steps = {2}
    data = write_jsonl(tmp_path / "train.jsonl", conversations(4))
    text = tiny_toml(tiny_folder / "target", data, train__steps=3, train__objective="kl")
    assert train(load(text.encode()), tmp_path / "run", say=silent) == "finished"
    assert [r.loss is None for r in metrics_of(tmp_path / "run")] == [False, True, False]
