"""Trainings with any number of target workers and drafters: the same losses, whoever did what and when."""

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Nursery
from safetensors.torch import load_file
from tiny_runs import StopAfter, assert_same_weights, config_of, figures, metrics_of, silent, status_of

from trainer import patience, workers
from trainer.features import FeatureBatch
from trainer.records import checkpoint_name
from trainer.train import train
from trainer.watchdog import STALLED_CODE

STEPS = 4
LAYOUTS = [(targets, drafters) for drafters in (1, 2, 3) for targets in (1, 2, 4)]
SOME = [(1, 1), (4, 1), (1, 2), (2, 2), (1, 3), (4, 3)]


def layout(targets: int, drafters: int, **more: Any) -> dict[str, Any]:
    return {
        "layout__targets": ["cpu"] * targets,
        "layout__drafters": ["cpu"] * drafters,
        "layout__allow_shared_device": True,
        "layout__check_every": 1,
        "train__rows_per_step": 5,  # which neither two nor three drafters share evenly
        "train__steps": STEPS,
        "train__eval_every": 2,
        **more,
    }


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / checkpoint_name(step) / "model.safetensors")


@pytest.fixture(autouse=True)
def _uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target workers that take a while, each time another one: their results come in any order."""
    features_of, moody = workers.features_of, random.Random(0)

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(moody.choice([0.0, 0.0, 0.01]))
        return features_of(*given, **named)

    monkeypatch.setattr(workers, "features_of", slowly)


def test_losses_do_not_depend_on_the_number_of_targets_and_hardly_on_that_of_drafters(
    tiny_folder: Path, tmp_path: Path, soak: bool
) -> None:
    layouts = LAYOUTS if soak else SOME
    for targets, drafters in layouts:
        train(config_of(tiny_folder, **layout(targets, drafters)), tmp_path / f"{targets}+{drafters}", say=silent)
    alone = metrics_of(tmp_path / "1+1")
    for targets, drafters in layouts:
        run, like = tmp_path / f"{targets}+{drafters}", tmp_path / f"1+{drafters}"
        # For the same number of drafters to the bit.
        assert figures(metrics_of(run)) == figures(metrics_of(like))
        assert_same_weights(run, like, STEPS)
        # For another number the sums are made in another order.
        for record, expected in zip(metrics_of(run), alone, strict=True):
            assert record.loss == pytest.approx(expected.loss, abs=1e-6)
            assert record.heldout_loss == pytest.approx(expected.heldout_loss, abs=1e-6)
            assert (record.tokens, record.accept, record.heldout_cycle_accept) == (
                expected.tokens, expected.accept, expected.heldout_cycle_accept,
            )  # fmt: skip
        threads = {f"target-{n}" for n in range(targets)} if targets > 1 else {"target"}
        threads |= {f"drafter-{n}" for n in range(drafters)} if drafters > 1 else {"drafter"}
        for record in metrics_of(run):
            assert record.workers is not None and set(record.workers) == threads
        for name in threads:
            seconds = [(record.workers or {})[name] for record in metrics_of(run)]
            assert sum(each.working for each in seconds) > 0 or name.startswith("target-")  # which others may outrun
            assert sum(each.working + each.waiting for each in seconds) > 0
    expected, found = weights(tmp_path / "1+1"), weights(tmp_path / "4+3")
    # AdamW makes whole steps of gradients that are next to nothing, whose sign is rounding's: few weights of many.
    moved = sum(float((expected[name] - found[name]).norm()) for name in expected)
    assert moved < 1e-3 * sum(float(weight.norm()) for weight in expected.values())


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_a_training_with_several_drafters_is_resumed_to_the_bit_and_with_another_number_too(
    optimizer: str, tiny_folder: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_folder, **layout(2, 3, layout__optimizer=optimizer, train__steps=6))
    train(config, tmp_path / "whole", say=silent)
    stop = StopAfter(3)
    assert train(config, tmp_path / "cut", stop=stop.event, say=stop) == "stopped"
    step = status_of(tmp_path / "cut").step
    assert 3 <= step < 6
    # Another number of drafters, and of those who keep moments, goes on from it.
    other = config_of(tiny_folder, **layout(1, 2, train__steps=6))
    lines: list[str] = []
    assert train(other, tmp_path / "other", resume=tmp_path / "cut", say=lines.append) == "finished"
    assert any("layout.drafters is ['cpu', 'cpu'], was " in line for line in lines)
    assert train(config, tmp_path / "cut", say=silent) == "finished"
    assert figures(metrics_of(tmp_path / "cut")) == figures(metrics_of(tmp_path / "whole"))
    assert_same_weights(tmp_path / "cut", tmp_path / "whole", 6)
    for record, expected in zip(metrics_of(tmp_path / "other"), metrics_of(tmp_path / "whole")[step:], strict=True):
        assert record.loss == pytest.approx(expected.loss, abs=1e-5)


def test_the_error_of_any_worker_ends_the_training_and_names_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.learner import Learner

    def failing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
        calls = iter(range(10_000))

        def call(*given: Any, **named: Any) -> Any:
            if next(calls) >= at:
                raise RuntimeError("the cable is loose")
            return function(*given, **named)

        return call

    for name, owner, attribute, worker in (
        ("target", workers, "features_of", r"target-\d"),
        ("drafter", Learner, "learn", r"drafter-\d"),
    ):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the cable is loose") as caught:
            patch.setattr(owner, attribute, failing(getattr(owner, attribute), 14))
            train(
                config_of(tiny_folder, **layout(2, 2, train__checkpoint_every=1, train__steps=12)),
                tmp_path / name,
                say=silent,
            )
        assert any(re.search(worker, note) for note in caught.value.__notes__)
        status = status_of(tmp_path / name)
        assert status.state == "failed" and status.error == "RuntimeError: the cable is loose"
        # The last step may be one whose checkpoint was still being written.
        assert status.checkpoint is not None
        assert load_file(tmp_path / name / "checkpoints" / status.checkpoint / "model.safetensors")


def test_running_out_of_memory_names_the_worker_and_what_to_lower(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tiny import tiny_toml

    from trainer.__main__ import main

    told = "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 1 has a total capacity of 139.80 GiB of which 1.25 GiB "
    told += "is free."

    def short(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError(told)

    monkeypatch.setattr(workers, "features_of", short)
    files = (tiny_folder / "target", tiny_folder / "train.jsonl", tiny_folder / "heldout.jsonl")
    (tmp_path / "c.toml").write_text(tiny_toml(*files, **layout(2, 2)))
    assert main(["train", str(tmp_path / "c.toml"), str(tmp_path / "run")]) == 1
    said = capfd.readouterr().err
    assert re.match(
        r"TrainingError: target-\d ran out of memory on cuda:1 with 3 rows of \d+ tokens, \d+ anchors each: 3.50 GiB "
        r"more were asked for, 1.25 GiB of 139.80 GiB are free; lower train.micro_rows",
        said,
    ), said
    assert said.count("\n") == 1
    assert status_of(tmp_path / "run").error == said.strip()


def test_the_first_error_is_raised_whoever_else_fails_after_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter's fault on a GPU makes a target's next copy to it fail, too."""
    from trainer.learner import Learner

    died, calls, features_of = threading.Event(), iter(range(10_000)), workers.features_of

    def dies(learner: Learner, batch: FeatureBatch) -> None:
        died.set()
        raise ValueError("an illegal access")

    def follows(*given: Any, **named: Any) -> Any:
        if next(calls) > 0:
            assert died.wait(60)
            time.sleep(0.1)
            raise RuntimeError("what came of it")
        return features_of(*given, **named)

    monkeypatch.setattr(Learner, "learn", dies)
    monkeypatch.setattr(workers, "features_of", follows)
    with pytest.raises(ValueError, match="an illegal access") as caught:
        train(config_of(tiny_folder, **layout(1, 1, train__micro_rows=1)), tmp_path, say=silent)
    assert "raised in the worker drafter (cpu)" in caught.value.__notes__


def test_a_deep_queue_is_no_error(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.learner import Learner

    learn = Learner.learn

    def slowly(learner: Learner, batch: FeatureBatch) -> None:
        time.sleep(0.02)
        learn(learner, batch)

    monkeypatch.setattr(Learner, "learn", slowly)
    deep = layout(1, 1, layout__depth=60, train__steps=45, train__rows_per_step=1, train__eval_every=0)
    assert train(config_of(tiny_folder, **deep), tmp_path, say=silent) == "finished"


def test_a_stop_is_answered_though_a_worker_hangs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "GIVE_UP_SECONDS", 1.0)
    monkeypatch.setattr("trainer.pipeline.JOIN_SECONDS", 0.1)
    release, calls, features_of, stop = threading.Event(), iter(range(10_000)), workers.features_of, threading.Event()

    def hangs(*given: Any, **named: Any) -> Any:
        if next(calls) == 5:
            stop.set()
            assert release.wait(60)
        return features_of(*given, **named)

    monkeypatch.setattr(workers, "features_of", hangs)
    lines: list[str] = []
    try:
        config = config_of(tiny_folder, **layout(1, 2, train__steps=60, train__eval_every=0, train__micro_rows=3))
        assert train(config, tmp_path, stop=stop, say=lines.append) == "stopped"
    finally:
        release.set()
    status = status_of(tmp_path)
    assert status.state == "stopped" and 1 <= status.step <= 2 and status.checkpoint == checkpoint_name(status.step)
    assert "the thread 'target' is still busy and was left behind" in lines
    assert "nothing got on for 1 s after the stop: the step under way is given up" in lines or status.step == 2
    # What was saved is whole, and of that step.
    other = tmp_path / "other"
    ends = StopAfter(status.step)
    train(config, other, stop=ends.event, say=ends)
    reached = status_of(other).step
    if reached == status.step:
        assert_same_weights(tmp_path, other, reached)


STANDING = """
import sys, threading
import trainer.workers
from trainer.__main__ import leave, main

features_of, calls = trainer.workers.features_of, []

def standing(*args, **named):
    calls.append(1)
    if len(calls) == 7:
        threading.Event().wait()
    return features_of(*args, **named)

trainer.workers.features_of = standing
leave(main())
"""


def test_a_training_that_stands_still_ends_with_a_code_of_its_own(
    tiny_folder: Path, tmp_path: Path, nursery: Nursery
) -> None:
    from tiny import tiny_toml

    changes = layout(2, 2, layout__stall_seconds=2, train__checkpoint_every=1, train__steps=9)
    files = (tiny_folder / "target", tiny_folder / "train.jsonl", tiny_folder / "heldout.jsonl")
    (tmp_path / "c.toml").write_text(tiny_toml(*files, **changes))
    ended = nursery.start("train", tmp_path / "c.toml", tmp_path / "run", code=STANDING)
    assert ended.wait() == STALLED_CODE, ended.said()
    first = "the training stands still: nothing got on for 2 s; the process ends with code 14"
    assert first in ended.said().split("\n")
    assert re.search(r"'target-\d' works on item 6, for [\d.]+ s", ended.said())
    assert "in standing" in ended.said()  # where it stands
    status = status_of(tmp_path / "run")
    assert (status.state, status.error) == ("failed", first)
    assert status.checkpoint is not None and weights(tmp_path / "run", status.step)
