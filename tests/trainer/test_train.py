"""Whole trainings of a tiny target: they learn, repeat, resume bit for bit, and end well however they end."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Child, Nursery, retry_until
from tiny import conversations, tiny_toml, write_jsonl
from tiny_checkpoints import save_drafter
from tiny_runs import StopAfter, assert_same_weights, config_of, figures, metrics_of, silent, status_of

from trainer.checkpoint import CheckpointError, load_drafter
from trainer.config import load
from trainer.data import DataError
from trainer.features import FeatureBatch
from trainer.learner import Learner, Measured
from trainer.live import HeldoutDecoder
from trainer.records import RunDir, checkpoint_name, read_metrics
from trainer.replicas import Replicas
from trainer.saving import Saver
from trainer.tally import Tally
from trainer.train import TrainingError, train

# --- learning ---


@pytest.mark.parametrize("loss", ["d-pace", "exp-decay"])
def test_a_tiny_target_memorises_eight_sequences(loss: str, tiny_folder: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "eight.jsonl", conversations(8, words=2))
    changes = {"train__steps": 80, "train__rows_per_step": 8, "train__anchors": 12, "train__lr": 2e-2}
    changes |= {"draft__layers": 2, "data__row_tokens": 48, "train__checkpoint_every": 1000, "train__log_every": 50}
    text = tiny_toml(tiny_folder / "target", data, train__loss=loss, **changes)
    assert train(load(text.encode()), tmp_path / "run", say=silent) == "finished"
    status = status_of(tmp_path / "run")
    assert status.first_loss is not None and status.loss is not None and status.loss < status.first_loss / 10
    assert status.accept is not None and status.accept > 0.9 * 4
    assert metrics_of(tmp_path / "run")[-1].accuracy > 0.98


def test_what_comes_out_is_the_format_with_the_target_sizes(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=2, draft__layers=2)
    train(config, tmp_path, say=silent)
    model, draft = load_drafter(tmp_path / "checkpoints/step-00000002", "cpu", torch.float32)
    assert len(model.state_dict()) == 11 * 2 + 3
    assert (draft.hidden_size, draft.num_heads, draft.num_kv_heads, draft.vocab_size) == (64, 4, 2, 512)
    assert draft.target_layer_ids == (1, 2, 3) and model.fc.weight.shape == (64, 3 * 64)
    assert draft.mask_token_id == 258  # the first row of the embedding that no token uses


def test_micro_batches_and_chunks_change_nothing_but_rounding(tiny_folder: Path, tmp_path: Path) -> None:
    runs = {"whole": {}, "cut": {"train__micro_rows": 1, "train__chunk_blocks": 3}}
    for name, changes in runs.items():
        config = config_of(tiny_folder, train__steps=4, train__rows_per_step=4, train__eval_every=2, **changes)
        train(config, tmp_path / name, say=silent)
    for one, other in zip(metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "cut"), strict=True):
        assert (one.step, one.tokens) == (other.step, other.tokens)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
        assert one.heldout_loss == (None if other.heldout_loss is None else pytest.approx(other.heldout_loss, rel=1e-4))


def test_speed_is_that_of_training_alone(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, decoded and saved happens while the clock is stopped, and no learning does."""
    paused, seen = list[bool](), dict[str, set[bool]]()

    @contextlib.contextmanager
    def pausing(_: Tally) -> Generator[None]:
        paused.append(True)
        yield
        paused.pop()

    def watch(kind: Any, name: str) -> None:
        plain = getattr(kind, name)

        def watched(*given: Any, **named: Any) -> Any:
            seen.setdefault(name, set()).add(bool(paused))
            return plain(*given, **named)

        monkeypatch.setattr(kind, name, watched)

    monkeypatch.setattr(Tally, "paused", pausing)
    watched = [(Learner, "learn"), (Replicas, "update"), (Learner, "measure_all"), (HeldoutDecoder, "measure")]
    for kind, name in [*watched, (Saver, "save")]:
        watch(kind, name)
    changes = {"train__eval_every": 1, "train__decode_every": 1, "train__decode_prompts": 1, "train__decode_tokens": 2}
    train(config_of(tiny_folder, train__steps=2, train__checkpoint_every=1, **changes), tmp_path, say=silent)
    learning, other = {"learn": {False}, "update": {False}}, {"measure_all": {True}, "measure": {True}, "save": {True}}
    assert seen == learning | other


def test_the_records_say_what_was_done(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=6, train__log_every=4, train__eval_every=3, train__checkpoint_every=4)
    lines: list[str] = []
    train(config, tmp_path, say=lines.append)
    records = metrics_of(tmp_path)
    assert [r.step for r in records] == [1, 3, 4, 6]
    assert [r.heldout_loss is not None for r in records] == [False, True, False, True]
    status = status_of(tmp_path)
    assert (status.state, status.step, status.total_steps) == ("finished", 6, 6)
    assert (status.checkpoint, status.loss, status.error) == ("step-00000006", records[-1].loss, None)
    assert [line for line in lines if line.startswith("step 4/6 loss ")]
    assert lines[-1] == "finished at step 6/6"
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.json", "step-00000004", "step-00000006"]


# --- repeating and resuming ---


def test_the_same_config_gives_the_same_weights_whatever_the_threads_do(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_threads: None
) -> None:
    config = config_of(tiny_folder, train__steps=12, train__eval_every=5)
    train(config, tmp_path / "one", say=silent)

    import trainer.workers as module

    features_of = module.features_of

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return features_of(*args, **named)

    monkeypatch.setattr(module, "features_of", slowly)
    train(config, tmp_path / "other", say=lambda line: time.sleep(0.03))
    assert figures(metrics_of(tmp_path / "one")) == figures(metrics_of(tmp_path / "other"))
    assert_same_weights(tmp_path / "one", tmp_path / "other", 12)


def test_another_seed_gives_other_losses(tiny_folder: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(config_of(tiny_folder, train__steps=1, train__seed=seed), tmp_path / str(seed), say=silent)
    assert metrics_of(tmp_path / "0")[0].loss != metrics_of(tmp_path / "1")[0].loss


@pytest.mark.parametrize("into", ["the same run", "a new run"])
def test_a_stopped_training_resumes_bit_for_bit(
    into: str, tiny_folder: Path, tmp_path: Path, all_threads: None
) -> None:
    config = config_of(tiny_folder, train__steps=14, train__eval_every=4, train__micro_rows=1)
    train(config, tmp_path / "whole", say=silent)

    part = StopAfter(6)
    assert train(config, tmp_path / "part", stop=part.event, say=part) == "stopped"
    stopped = status_of(tmp_path / "part")
    assert (stopped.state, stopped.step, stopped.checkpoint) == ("stopped", 6, "step-00000006")
    assert part.lines[-2:] == ["saved step-00000006", "stopped at step 6/14"]

    rest = tmp_path / "part" if into == "the same run" else tmp_path / "rest"
    assert train(config, rest, resume=tmp_path / "part", say=silent) == "finished"
    expected = figures(metrics_of(tmp_path / "whole"))
    assert figures(metrics_of(rest)) == (expected if into == "the same run" else expected[6:])
    assert_same_weights(tmp_path / "whole", rest, 14)
    assert status_of(rest).first_loss == status_of(tmp_path / "whole").first_loss


def test_a_finished_run_started_again_does_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=3)
    train(config, tmp_path, say=silent)
    before, metrics = status_of(tmp_path), metrics_of(tmp_path)
    assert train(config, tmp_path, say=silent) == "finished"
    assert status_of(tmp_path).model_copy(update={"updated_at": before.updated_at}) == before
    assert metrics_of(tmp_path) == metrics


def test_a_run_that_goes_on_from_another_has_a_checkpoint_of_its_own_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=3)
    train(config, tmp_path / "first", say=silent)
    assert train(config, tmp_path / "second", resume=tmp_path / "first", say=silent) == "finished"
    assert status_of(tmp_path / "second").checkpoint == "step-00000003"
    assert_same_weights(tmp_path / "first", tmp_path / "second", 3)


def test_fewer_steps_than_done_are_refused_and_the_status_stays_true(tiny_folder: Path, tmp_path: Path) -> None:
    train(config_of(tiny_folder, train__steps=3), tmp_path, say=silent)
    with pytest.raises(TrainingError, match=r"train\.steps is 2, but step 3 is done already"):
        train(config_of(tiny_folder, train__steps=2), tmp_path, say=silent)
    status = status_of(tmp_path)
    assert (status.state, status.step, status.checkpoint) == ("failed", 3, "step-00000003")


def test_a_stop_waits_for_no_measurement_and_saves_a_step_once(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, measured = threading.Event(), list[int]()
    measure = Learner.measure_all

    def stopping(learner: Learner, batch: FeatureBatch) -> Measured:
        measured.append(1)
        stop.set()
        return measure(learner, batch)

    monkeypatch.setattr(Learner, "measure_all", stopping)
    lines: list[str] = []
    changes = {"train__rows_per_step": 1, "train__eval_every": 2, "train__checkpoint_every": 2}
    assert train(config_of(tiny_folder, **changes), tmp_path, stop=stop, say=lines.append) == "stopped"
    assert len(measured) == 1 and metrics_of(tmp_path)[-1].heldout_loss is None
    assert [line for line in lines if "saved" in line] == ["saved step-00000002"]


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=8, train__checkpoint_every=4)
    train(config, tmp_path / "whole", say=silent)
    train(config, tmp_path / "harmed", say=silent)
    model = RunDir(tmp_path / "harmed").checkpoints / checkpoint_name(8) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    lines: list[str] = []
    train(config, tmp_path / "harmed", say=lines.append)
    assert any(line.startswith("checkpoint step-00000008 is damaged (model.safetensors is not what") for line in lines)
    assert any("resuming from" in line and line.endswith("at step 4") for line in lines)
    assert figures(metrics_of(tmp_path / "harmed")) == figures(metrics_of(tmp_path / "whole"))
    assert_same_weights(tmp_path / "whole", tmp_path / "harmed", 8)


def test_changed_data_is_said_when_resuming(tiny_folder: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl", conversations(12))
    text = tiny_toml(tiny_folder / "target", data, train__steps=8).encode()
    part = StopAfter(2)
    train(load(text), tmp_path / "run", stop=part.event, say=part)
    write_jsonl(data, conversations(14))
    lines: list[str] = []
    train(load(text), tmp_path / "run", say=lines.append)
    assert "the data has changed since then: going on with row 4, at the begin of epoch 2 of what is there now" in lines


def test_init_from_starts_with_a_drafters_weights(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=30, train__lr=5e-3)
    train(config, tmp_path / "first", say=silent)
    model, _ = load_drafter(RunDir(tmp_path / "first").checkpoints / checkpoint_name(30), "cpu", torch.float32)
    save_drafter(tmp_path / "drafter", model)
    config = config_of(tiny_folder, train__steps=1, train__lr=5e-3)
    train(config, tmp_path / "second", init_from=tmp_path / "drafter", say=silent)
    first, second = metrics_of(tmp_path / "first"), metrics_of(tmp_path / "second")
    assert second[0].step == 1 and second[0].loss < first[0].loss - 1
    with pytest.raises(CheckpointError, match="its num_layers is 1, wanted 2"):
        train(config_of(tiny_folder, draft__layers=2), tmp_path / "x", init_from=tmp_path / "drafter", say=silent)


# --- failing ---


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"draft__captured": 5}, TrainingError, "6 layers has no 5 layers between"),
        ({"draft__target_layer_ids": [1, 9]}, TrainingError, "the target has layers 0..5"),
        ({"draft__mask_token_id": 64}, TrainingError, r"occurs 86 times in the data, first in train\.jsonl:1"),
        ({"data__train": "/nowhere.jsonl"}, DataError, "can't be read"),
        ({"layout__drafters": ["cuda:77"]}, TrainingError, "layout.drafters names cuda:77: torch sees "),
    ],
)
def test_what_does_not_fit_fails_and_says_so_in_the_status(
    changes: dict[str, Any], error: type[Exception], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        train(config_of(tiny_folder, **changes), tmp_path, say=silent)
    status = status_of(tmp_path)
    assert status.state == "failed" and status.error is not None and re.search(message, status.error)


def test_nothing_to_resume_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume: no good checkpoint in"):
        train(config_of(tiny_folder), tmp_path / "new", resume=tmp_path / "empty", say=silent)


def test_an_error_in_the_target_thread_reaches_the_caller(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.workers as module

    features_of, calls = module.features_of, list[int]()

    def failing(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("out of memory on the target's device")
        return features_of(*args, **named)

    monkeypatch.setattr(module, "features_of", failing)
    with pytest.raises(MemoryError):
        train(config_of(tiny_folder), tmp_path, say=silent)
    assert status_of(tmp_path).error == "MemoryError: out of memory on the target's device"
    assert not [thread for thread in threading.enumerate() if thread.name in ("source", "target")]


def test_a_target_that_hangs_does_not_take_a_stops_checkpoint_away(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.workers as module

    features_of, calls, release = module.features_of, list[int](), threading.Event()

    def hanging(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            release.wait()
        return features_of(*args, **named)

    monkeypatch.setattr(module, "features_of", hanging)
    monkeypatch.setattr("trainer.pipeline.JOIN_SECONDS", 0.1)
    part = StopAfter(3)
    assert train(config_of(tiny_folder), tmp_path, stop=part.event, say=part) == "stopped"
    release.set()
    assert (status_of(tmp_path).state, status_of(tmp_path).checkpoint) == ("stopped", "step-00000003")
    assert "the thread 'target' is still busy and was left behind" in part.lines


# --- as a process ---


def wait_for_step(trainer: Child, run: Path, step: int) -> None:
    def there() -> bool:
        assert not trainer.ended(), trainer.said()
        metrics = RunDir(run).metrics
        return metrics.exists() and any(r.step >= step for r in read_metrics(metrics.read_bytes()))

    retry_until(there)


@pytest.fixture
def long_config(tiny_folder: Path, tmp_path: Path) -> Path:
    """Checkpoints now and then, and an end far enough away that a signal comes before it."""
    data = tiny_folder / "train.jsonl"
    text = tiny_toml(tiny_folder / "target", data, train__steps=5000, train__checkpoint_every=7, train__keep=1)
    (tmp_path / "config.toml").write_text(text)
    return tmp_path / "config.toml"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_on_a_checkpoint_with_code_0(
    number: signal.Signals, long_config: Path, tmp_path: Path, nursery: Nursery
) -> None:
    trainer = nursery.start("train", long_config, tmp_path / "run")
    wait_for_step(trainer, tmp_path / "run", 9)
    trainer.signal(signal.SIGUSR1)  # asks for the stacks, and ends nothing
    wait_for_step(trainer, tmp_path / "run", 10)
    trainer.signal(number)
    code, output = trainer.wait(), trainer.said()
    status = status_of(tmp_path / "run")
    assert code == 0, output
    assert (status.state, status.checkpoint) == ("stopped", f"step-{status.step:08d}")
    assert 10 <= status.step < 5000
    assert f"{number.name}: stopping after this step" in output
    assert "thread 'MainThread':\n" in output and "thread 'target':\n" in output
    assert metrics_of(tmp_path / "run")[-1].step == status.step


def test_a_log_that_nobody_reads_any_more_loses_no_step(long_config: Path, tmp_path: Path, nursery: Nursery) -> None:
    """What a supervisor's death looks like from inside: first the pipe breaks, then SIGTERM comes."""
    os.mkfifo(tmp_path / "log")
    never = ("--set", "train.log_every=5000", "--set", "train.checkpoint_every=5000")
    trainer = nursery.start("train", long_config, tmp_path / "run", *never, log=tmp_path / "log")
    with (tmp_path / "log").open() as log:
        while not (line := log.readline()).startswith("step 1/"):
            assert line  # else it has ended
    trainer.signal(signal.SIGTERM)
    assert trainer.wait() == 0
    status = status_of(tmp_path / "run")
    assert status.state == "stopped" and status.step >= 1 and status.checkpoint == f"step-{status.step:08d}"


HANGING = """
import os, signal, sys, torch, trainer.pipeline, trainer.workers
from trainer.__main__ import leave, main

features_of, calls = trainer.workers.features_of, []
trainer.pipeline.JOIN_SECONDS = 0.1

def hanging(*args, **named):
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
        product = torch.ones(600, 600)
        while True:
            product = (product @ product).tanh()
    return features_of(*args, **named)

trainer.workers.features_of = hanging
leave(main())
"""


def test_a_thread_that_is_left_behind_spoils_no_good_end(long_config: Path, tmp_path: Path, nursery: Nursery) -> None:
    """Python aborts when it takes itself down under a thread that computes."""
    ended = nursery.start("train", long_config, tmp_path / "run", code=HANGING)
    assert ended.wait() == 0, ended.said()
    assert "is still busy and was left behind\nstopped at step " in ended.said()
    assert status_of(tmp_path / "run").state == "stopped"


def test_a_signal_before_the_first_step_ends_a_run_that_can_be_started_again(
    long_config: Path, tmp_path: Path, nursery: Nursery
) -> None:
    trainer = nursery.start("train", long_config, tmp_path / "run")
    retry_until(RunDir(tmp_path / "run").status.exists)  # which is written before the target is loaded
    trainer.signal(signal.SIGTERM)
    code, output = trainer.wait(), trainer.said()
    status = status_of(tmp_path / "run")
    assert code == 0, output
    assert "SIGTERM: stopping after this step, on a checkpoint; before the first, soon\n" in output
    # While it prepares data there are no weights to save yet.
    assert status.state == "stopped" and status.checkpoint in (None, f"step-{status.step:08d}")
    again = StopAfter(status.step + 1)
    assert train(load(long_config), tmp_path / "run", stop=again.event, say=again) == "stopped"
    assert status_of(tmp_path / "run").step == status.step + 1
