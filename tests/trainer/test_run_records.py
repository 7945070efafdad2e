"""What a run tells of itself, and that a start that is refused takes none of it away."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_events import read_back
from tiny import tiny_target, write_jsonl
from tiny_runs import StopAfter, config_of, metrics_of, silent, status_of

from trainer.config import TrainConfig
from trainer.data import DataError
from trainer.records import StepRecord
from trainer.target import TargetError
from trainer.train import TrainingError, train


def test_a_record_tells_slots_queues_and_memory(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=3, train__eval_every=2, draft__block=6, train__checkpoint_every=1)
    train(config, tmp_path, say=silent)
    for record in metrics_of(tmp_path):
        assert record.accuracy_by_slot is not None and len(record.accuracy_by_slot) == 5
        shares = [share for share in record.accuracy_by_slot if share is not None]
        assert record.accuracy is not None and min(shares) <= record.accuracy <= max(shares)
        assert record.queues is not None and set(record.queues) == {"source", "target"}
        assert all(0 <= waiting <= 2 for waiting in record.queues.values())
        assert record.memory_mib is not None and record.memory_mib > 50
        assert record.skipped == 0
        assert (record.heldout_cycle_accept is None) == (record.step == 1)
    assert status_of(tmp_path).heldout_cycle_accept == metrics_of(tmp_path)[-1].heldout_cycle_accept


def drawn(records: list[StepRecord], name: str) -> list[tuple[int, Any]]:
    values = [(record.step, getattr(record, name)) for record in records]
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in values if value is not None]


def test_tensorboard_draws_each_step_once_though_a_run_was_killed_and_resumed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_folder, train__steps=9, train__eval_every=4, train__checkpoint_every=3)

    class Killed(Exception):
        pass

    def killing(line: str) -> None:
        if line.startswith("step 5/"):
            raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path, say=killing)
    assert [step for step, _ in read_back(tmp_path / "events")["train/loss"]] == [1, 2, 3, 4, 5]
    part = StopAfter(7)
    train(config, tmp_path, stop=part.event, say=part)  # from step 3 on
    assert any(line.endswith("at step 3") for line in part.lines)
    train(config, tmp_path, say=silent)
    shown, records = read_back(tmp_path / "events"), metrics_of(tmp_path)
    assert [record.step for record in records] == list(range(1, 10))
    for tag, name in {
        "train/loss": "loss",
        "train/acceptance": "accept",
        "train/lr": "lr",
        "train/grad_norm": "grad_norm",
        "train/skipped_steps": "skipped",
        "speed/tokens_per_s": "tokens_per_s",
        "speed/memory_mib": "memory_mib",
        "heldout/loss": "heldout_loss",
        "heldout/acceptance": "heldout_accept",
        "heldout/acceptance_by_cycle": "heldout_cycle_accept",
    }.items():
        assert shown[tag] == drawn(records, name), tag
    assert {"accuracy_by_slot/01", "accuracy_by_slot/03", "queue/source", "queue/target"} < shown.keys()


def test_a_folder_for_events_that_can_not_be_ends_no_training(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    lines: list[str] = []
    assert train(config_of(tiny_folder, train__steps=3), tmp_path, say=lines.append) == "finished"
    assert [line for line in lines if "TensorBoard" in line] == [
        f"no more TensorBoard events are written to {tmp_path / 'events'}: File exists"
    ]
    assert len(metrics_of(tmp_path)) == 3


# --- refused ---


def no_template(folder: Path, config: Callable[..., TrainConfig]) -> TrainConfig:
    shutil.copytree(folder / "target", folder / "mute")
    (folder / "mute/chat_template.jinja").unlink()
    return config(target__path=str(folder / "mute"))


def shallow_target(folder: Path, config: Callable[..., TrainConfig]) -> TrainConfig:
    tiny_target(folder / "shallow", layers=3)
    return config(target__path=str(folder / "shallow"))


def other_vocabulary(folder: Path, config: Callable[..., TrainConfig]) -> TrainConfig:
    """Data that was prepared for a tokenizer with one token more."""
    from transformers import AutoTokenizer

    from trainer.prepare import prepared_data

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "target")  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(["amber"])
    prepared_data(folder / "train.jsonl", tokenizer, into=folder / "theirs", end_tokens=(257,))
    return config(data__train=str(folder / "theirs"))


def empty_data(folder: Path, config: Callable[..., TrainConfig]) -> TrainConfig:
    return config(data__train=str(write_jsonl(folder / "none.jsonl", [])))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (no_template, DataError, r"tokenizer has no chat template"),
        (shallow_target, TrainingError, r"\[draft\] does not fit the target .*/shallow: .*3 layers"),
        (other_vocabulary, DataError, r"another tokenizer than the target's: 259 tokens, .* 258"),
        (empty_data, DataError, r"none\.jsonl"),
        (lambda _, config: config(target__path="/nowhere"), TargetError, r"/nowhere is not a folder with a model"),
    ],
    ids=["no template", "no such layers", "other vocabulary", "no data", "no target"],
)
def test_a_start_that_is_refused_is_told_in_a_line_and_costs_a_run_nothing(
    change: Callable[..., TrainConfig], error: type[Exception], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    folder, run = tmp_path / "tiny", tmp_path / "run"
    train(config_of(folder, train__steps=2), run, say=silent)
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "status.json"}
    before = status_of(run)

    with pytest.raises(error, match=message) as caught:
        train(change(folder, lambda **changes: config_of(folder, train__steps=4, **changes)), run, say=silent)
    assert "\n" not in str(caught.value)
    after = status_of(run)
    assert after.state == "failed" and after.error == f"{error.__name__}: {caught.value}"
    assert (after.step, after.loss, after.checkpoint) == (before.step, before.loss, before.checkpoint)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "status.json"} == kept
    assert train(config_of(folder, train__steps=4), run, say=silent) == "finished"
    assert [record.step for record in metrics_of(run)] == [1, 2, 3, 4]
