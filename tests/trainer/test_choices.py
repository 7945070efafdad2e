"""What a config can choose: each trains, learns, and leaves a drafter that says what it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import conversations, tiny_toml, write_jsonl
from tiny_runs import assert_same_weights, figures, metrics_of, status_of

from trainer.checkpoint import load_drafter
from trainer.config import load
from trainer.records import RunDir, checkpoint_name
from trainer.train import train

STEPS = 20


def trained(folder: Path, run: Path, **changes: Any) -> list[str]:
    """A short training on eight sequences; the lines of its log."""
    data = write_jsonl(run.with_suffix(".jsonl"), conversations(8, words=4))
    given = {"train__steps": STEPS, "train__rows_per_step": 8, "train__anchors": 16, "train__lr": 1e-2}
    given |= {"data__row_tokens": 64, "train__checkpoint_every": 1000, "draft__layers": 2, **changes}
    lines: list[str] = []
    assert train(load(tiny_toml(folder / "target", data, data, **given).encode()), run, say=lines.append) == "finished"
    return lines


@pytest.mark.parametrize("objective", ["kl", "tv"])
def test_the_targets_distribution_can_be_learned(objective: str, tiny_folder: Path, tmp_path: Path) -> None:
    """A random target's distribution is sharp and not in the data: the drafter comes near it, and not the data."""
    lines = trained(tiny_folder, tmp_path / "run", train__objective=objective)
    records = metrics_of(tmp_path / "run")
    assert len(records) == STEPS
    trained(tiny_folder, tmp_path / "plain", train__steps=1)
    (plain,) = metrics_of(tmp_path / "plain")
    # The same forward on the same weights, and another loss of it.
    assert records[0].accuracy == plain.accuracy and records[0].loss != pytest.approx(plain.loss, rel=0.01)
    assert objective == "kl" or all(record.loss is not None and 0 < record.loss < 1 for record in records)
    first, last = records[0].loss, records[-1].loss
    assert first is not None and last is not None and last < (0.5 if objective == "kl" else 0.75) * first
    assert records[-1].heldout_loss == pytest.approx(last, rel=0.2)  # the same data, at other anchors
    (told,) = [line for line in lines if "objective" in line]
    assert told.startswith(f"train.objective {objective} runs the whole target and its head: about 1.")


def test_layers_that_slide_and_blocks_that_are_causal_can_be_trained(tiny_folder: Path, tmp_path: Path) -> None:
    choices = {"draft__sliding_window": 8, "draft__sliding_layers": [1], "draft__causal": True}
    trained(tiny_folder, tmp_path / "run", **choices)
    status = status_of(tmp_path / "run")
    assert status.first_loss and status.loss and status.loss < status.first_loss / 2
    _, draft = load_drafter(RunDir(tmp_path / "run").checkpoints / checkpoint_name(STEPS), "cpu", torch.float32)
    assert (draft.layer_types, draft.sliding_window, draft.causal) == (("full_attention", "sliding_attention"), 8, True)
    trained(tiny_folder, tmp_path / "plain", train__steps=1)
    one, other = metrics_of(tmp_path / "run")[0], metrics_of(tmp_path / "plain")[0]
    assert one.loss != other.loss  # the first forward, on the same weights, sees other keys


def test_data_that_is_prepared_already_gives_the_same_training(tiny_folder: Path, tmp_path: Path) -> None:
    trained(tiny_folder, tmp_path / "one", train__steps=4)
    prepared = str(tmp_path / "one/prepared/train")
    trained(tiny_folder, tmp_path / "other", train__steps=4, data__train=prepared, data__heldout=prepared)
    assert figures(metrics_of(tmp_path / "one")) == figures(metrics_of(tmp_path / "other"))
    assert_same_weights(tmp_path / "one", tmp_path / "other", 4)
    assert not (tmp_path / "other/prepared").exists()
