"""Checkpoints written from a thread: of the moment, one at a time, and no failure goes unseen."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_checkpoint import at, files_of_at_most, learn, trained
from tiny_checkpoints import load_checkpoint
from tiny_runs import StopAfter, config_of, figures, metrics_of, silent, status_of

from trainer import files, saving
from trainer.checkpoint import Score, Written, newest_good_checkpoint, read_state, write_checkpoint
from trainer.config import TrainConfig, as_mapping
from trainer.origin import changes_since, origin_of
from trainer.randomness import random_states, restore_random_states
from trainer.saving import Saver
from trainer.snapshot import HostCopy, Trained
from trainer.train import train
from trainer.watchdog import Watchdog


class Held:
    """Writes that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Semaphore(0)
        write = saving.write_checkpoint

        def held(*args: Any, **named: Any) -> Written:
            self.began.release()
            assert self.go.wait(60)
            return write(*args, **named)

        monkeypatch.setattr(saving, "write_checkpoint", held)


def saver(folder: Path, told: list[Written], steps: int = 1, **named: Any) -> tuple[Saver, Any, Any]:
    model, optimizer = trained(steps)
    state = Trained.alone(model, optimizer)
    made = Saver(folder, state, keep=2, origin=None, saved=told.append, say=print, **named)
    return made, model, optimizer


def test_what_is_written_is_the_moment_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, told = Held(monkeypatch), list[Written]()
    writer, model, optimizer = saver(tmp_path, told)
    then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step_then = optimizer.state_dict()["state"][0]["step"].clone()
    with writer:
        writer.save(at(1), Score(2.0, "cycle"))
        held.began.acquire()
        for _ in range(2):  # the training goes on meanwhile
            learn(model, optimizer)
        torch.rand(3)
        writer.poll()
        assert told == [] and newest_good_checkpoint(tmp_path, print) is None
        held.go.set()
        writer.wait()
        assert told == [Written(tmp_path / "step-00000001", True)]
    load_checkpoint(tmp_path / "step-00000001", model, optimizer)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in then.items())
    assert torch.equal(optimizer.state_dict()["state"][0]["step"], step_then)


def test_the_next_save_waits_for_the_one_under_way_and_the_end_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, told = Held(monkeypatch), list[Written]()
    writer, model, optimizer = saver(tmp_path, told)
    with writer:
        writer.save(at(1))
        held.began.acquire()
        second = threading.Thread(target=lambda: writer.save(at(2)))
        second.start()
        assert not held.began.acquire(timeout=0.2)  # it has not begun, and its copy would spoil the first one's
        held.go.set()
        second.join()
        assert [written.path.name for written in told] == ["step-00000001"]
        learn(model, optimizer)
    assert [written.path.name for written in told] == ["step-00000001", "step-00000002"]
    other, other_optimizer = trained(0)
    load_checkpoint(tmp_path / "step-00000001", other, other_optimizer)


def test_a_failed_write_is_told_in_the_callers_thread_and_the_older_one_is_whole(tmp_path: Path) -> None:
    told: list[Written] = []
    writer, *_ = saver(tmp_path, told)
    writer.save(at(1))
    writer.wait()
    size = (tmp_path / "step-00000001/model.safetensors").stat().st_size
    with files_of_at_most(size // 2):
        writer.save(at(2))
        message = r"no checkpoint could be written: .*step-00000002.*; step-00000001 is whole: mend the disk and start"
        with pytest.raises(OSError, match=message):
            writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    writer.wait()  # told once
    writer.save(at(3))
    writer.wait()
    assert [written.path.name for written in told] == ["step-00000001", "step-00000003"]
    with files_of_at_most(size // 2), pytest.raises(OSError, match="there is none yet"):
        first, *_ = saver(tmp_path / "other", told)
        with first:
            first.save(at(1))


def test_an_error_on_its_way_is_not_hidden_by_the_writes(tmp_path: Path) -> None:
    told: list[Written] = []
    writer, *_ = saver(tmp_path, told)
    with pytest.raises(KeyError, match="theirs") as caught, files_of_at_most(100), writer:
        writer.save(at(1))
        raise KeyError("theirs")
    assert "no checkpoint could be written" in caught.value.__notes__[0]
    with pytest.raises(KeyError), writer:  # and a good one is told on the way out
        writer.save(at(2))
        raise KeyError
    assert [written.path.name for written in told] == ["step-00000002"]


def test_who_waits_for_a_slow_write_beats_while_it_gets_on_and_not_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, beats, looks = tmp_path / ".step-00000001.tmp", threading.Semaphore(0), threading.Semaphore(0)
    left: list[int] = []

    def beaten() -> bool:
        return beats.acquire(timeout=30)

    def looked(times: int) -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(times):
            assert looks.acquire(timeout=30)

    def slow(*args: Any, beat: Callable[[], None], **named: Any) -> Written:
        looked(1)
        building.mkdir()
        with (building / "model.safetensors").open("wb", buffering=0) as file:
            file.truncate(4 * 2**20)  # as safetensors does
            assert beaten()
            for place in range(0, 4 * 2**20, 2**20):
                file.seek(place)
                file.write(b"x" * 2**20)
                assert beaten()
        beat()  # which changes nothing on the disk
        assert beaten()
        looked(5)
        while beats.acquire(blocking=False):
            pass
        looked(20)  # and nothing new was to be seen
        left.append(beats.acquire(blocking=False))
        return Written(tmp_path / "step-00000001", False)

    monkeypatch.setattr(saving, "write_checkpoint", slow)
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.002)
    writer, *_ = saver(tmp_path, [], beat=beats.release)
    got_on = writer._got_on
    monkeypatch.setattr(writer, "_got_on", lambda: (got_on(), looks.release())[0])
    writer.save(at(1))
    writer.wait()
    assert left == [False]


def test_a_writer_beats_after_each_file_and_digest_and_inside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(1)
    at_each: list[tuple[str, ...]] = []  # what was there when it beat

    def beat() -> None:
        at_each.append(tuple(sorted(path.name for path in tmp_path.glob(".*.tmp/*"))))

    monkeypatch.setattr(files, "PIECE", 2**14)
    monkeypatch.setattr(files, "READ", 2**14)
    snapshot = HostCopy().take(Trained.alone(model, optimizer))
    written = write_checkpoint(tmp_path, snapshot, at(1), 2, beat=beat).path
    sizes = {path.name: path.stat().st_size for path in written.iterdir()}
    one, two = "model.safetensors", "optimizer.safetensors"

    def pieces(*names: str) -> int:
        return sum(-(-sizes[name] // 2**14) for name in names)

    assert sizes[one] > 2 * 2**14
    # Written, synced in pieces, synced.
    assert at_each.count((one,)) == 2 + pieces(one)
    assert at_each.count(("config.json", one, two)) == 2 + pieces(two)
    assert len(at_each) - at_each.index(("config.json", one, two, "random.json")) == pieces(
        "config.json", one, two, "random.json"
    )


# --- in a training ---


def test_a_training_goes_on_while_its_checkpoint_is_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("step 3/"):  # one step after the save
            held.go.set()

    changes = {"train__steps": 6, "train__checkpoint_every": 2, "train__keep": 9, "train__eval_every": 0}
    assert train(config_of(tiny_folder, **changes), tmp_path, say=say) == "finished"
    order = [line.split("/")[0].split(",")[0] for line in lines if line.startswith(("step ", "saved "))]
    assert order.index("saved step-00000002") > order.index("step 3")
    assert {line for line in order if "saved" in line} == {f"saved step-0000000{step}" for step in (2, 4, 6)}
    assert status_of(tmp_path).checkpoint == "step-00000006"


def test_the_watchdog_of_a_training_hears_that_its_last_write_gets_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, beat, beats = saving.write_checkpoint, Watchdog.beat, threading.Semaphore(0)
    heard: list[bool] = []

    def slow(folder: Path, *args: Any, **named: Any) -> Written:
        building = folder / ".step-00000002.tmp"
        building.mkdir(parents=True)
        while beats.acquire(blocking=False):  # those of the steps
            pass
        for number in range(100):  # the first may come before anybody waits
            (building / f"{number}").touch()
            heard.append(beats.acquire(timeout=0.1))
            if sum(heard) == 3:
                break
        return write(folder, *args, **named)

    monkeypatch.setattr(saving, "write_checkpoint", slow)
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.002)
    monkeypatch.setattr(Watchdog, "beat", lambda watchdog: (beats.release(), beat(watchdog))[1])
    assert train(config_of(tiny_folder, train__steps=2, train__eval_every=0), tmp_path, say=silent) == "finished"
    assert sum(heard) == 3


def test_a_checkpoint_is_told_of_as_soon_as_it_is_on_the_disk(tiny_folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line.split("/")[0].split(",")[0])
        if line.startswith("step 3/"):
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()

    train(config_of(tiny_folder, train__steps=6, train__checkpoint_every=2), tmp_path, say=say)
    assert lines.index("step 2") < lines.index("saved step-00000002") < lines.index("step 4")


def test_a_full_disk_ends_a_training_in_one_line_with_what_is_left(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_checkpoint

    def full(folder: Path, snapshot: Any, progress: Any, keep: int, **named: Any) -> Written:
        if progress.step == 4:
            raise OSError(28, "No space left on device", str(folder))
        return write(folder, snapshot, progress, keep, **named)

    monkeypatch.setattr(saving, "write_checkpoint", full)
    config = config_of(tiny_folder, train__checkpoint_every=2, train__steps=20)
    message = r"No space left on device: .*; step-00000002 is whole: mend the disk and start again"
    with pytest.raises(OSError, match=message):
        train(config, tmp_path, say=silent)
    status = status_of(tmp_path)
    assert status.state == "failed" and status.error is not None and "No space left on device" in status.error
    assert status.checkpoint == "step-00000002"
    monkeypatch.setattr(saving, "write_checkpoint", write)
    lines: list[str] = []
    assert train(config, tmp_path, say=lines.append) == "finished"
    assert any(line.endswith("at step 2") for line in lines)
    assert [figure["step"] for figure in figures(metrics_of(tmp_path))] == list(range(1, 21))


def test_a_disk_too_full_for_the_status_too_still_tells_of_the_checkpoint(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    def nothing_more(*args: Any, **named: Any) -> None:
        monkeypatch.setattr("trainer.journal.replace_file", full)
        full()

    monkeypatch.setattr(saving, "write_checkpoint", nothing_more)
    config = config_of(tiny_folder, train__steps=2, train__checkpoint_every=9)
    with pytest.raises(OSError, match=r"no checkpoint could be written: .*No space left on device; there is none"):
        train(config, tmp_path, say=silent)


def test_a_step_is_saved_once_by_each_run(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=2)
    for run, count in (("first", 1), ("first", 0), ("second", 1), ("second", 0)):
        lines: list[str] = []
        resume = tmp_path / "first" if run == "second" else None
        train(config, tmp_path / run, resume=resume, say=lines.append)
        assert len([line for line in lines if line.startswith("saved step-00000002")]) == count
    scores = [read_state(tmp_path / run / "checkpoints/step-00000002").score for run in ("first", "second")]
    assert scores[0] is not None and scores[0] == scores[1]


def test_a_resume_tells_what_has_changed_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = StopAfter(2)
    train(config_of(tiny_folder, train__steps=8), tmp_path, stop=part.event, say=part)
    again = StopAfter(4)
    train(config_of(tiny_folder, train__steps=8), tmp_path, stop=again.event, say=again)
    assert not [line for line in again.lines if "since this checkpoint" in line or "the checkpoint's" in line]
    monkeypatch.setattr("trainer.origin.code_digest", lambda: "f" * 64)
    monkeypatch.setenv("DFLASH_RELEASE", "20261129-2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    lines: list[str] = []
    train(config_of(tiny_folder, train__steps=9, train__lr=0.01), tmp_path, say=lines.append)
    said = [line for line in lines if "since this checkpoint" in line or "the checkpoint's" in line]
    config_line, code_line, machine_line = said
    lr = "train.lr is 0.01, was 0.0006"
    assert config_line == f"the config has changed since this checkpoint: {lr}, train.steps is 9, was 8"
    assert code_line.startswith("the trainer's code is not the checkpoint's: 20261129-2 (ffffffffffff) here, ")
    assert "(threads 77, was " in machine_line and machine_line.endswith("what would have come there")
    origin = read_state(tmp_path / "checkpoints/step-00000009").origin
    assert origin is not None and origin.release == "20261129-2" and origin.machine.threads == 77


def test_an_older_config_is_compared_by_its_defaults(tiny_folder: Path) -> None:
    config = config_of(tiny_folder)
    now = origin_of(config, torch.device("cpu"))
    older = {**as_mapping(config), "train": {k: v for k, v in as_mapping(config)["train"].items() if k != "clip"}}
    assert changes_since(now.model_copy(update={"config": older}), now) == []
    other = TrainConfig.model_validate({**as_mapping(config), "train": {**as_mapping(config)["train"], "clip": 3.0}})
    (line,) = changes_since(now.model_copy(update={"config": older}), origin_of(other, torch.device("cpu")))
    assert line.endswith("train.clip is 3.0, was 1.0")
    # A key that is gone: what is there is compared as it is.
    strange = {**older, "train": {**older["train"], "gone": 1}}
    (line,) = changes_since(now.model_copy(update={"config": strange}), now)
    assert "train.gone is unknown, was 1" in line


def test_a_state_of_generators_that_is_none_is_told() -> None:
    states = random_states()
    restore_random_states(states)
    for key in ("python", "numpy", "torch"):
        with pytest.raises(ValueError, match="the states of the random generators can't be read"):
            restore_random_states({**states, key: None})


def test_a_fresh_training_seeds_all_random_generators(tiny_folder: Path, tmp_path: Path) -> None:
    def states(name: str, seed: int) -> dict[str, object]:
        random.random(), np.random.rand(), torch.rand(1)
        train(config_of(tiny_folder, train__steps=1, train__seed=seed), tmp_path / name, say=silent)
        return json.loads((tmp_path / name / "checkpoints/step-00000001/random.json").read_bytes())

    before = random_states()
    try:
        one, same, other = states("one", 2**40), states("same", 2**40), states("other", 2**41)
    finally:
        restore_random_states(before)
    assert one == same
    assert all(one[key] != other[key] for key in ("python", "numpy", "torch"))


def test_what_is_odd_is_said_once_and_a_finished_training_mends_it_too(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_of(tiny_folder, train__steps=2, train__checkpoint_every=1, train__eval_every=1, train__keep=1)
    train(config, tmp_path, say=silent)
    hint, folder = tmp_path / "checkpoints/best.json", tmp_path / "checkpoints"
    whole = hint.read_bytes()
    hint.write_bytes(whole[:-3])
    (folder / ".step-00000002.lock").write_text("left by a kill")
    lines: list[str] = []
    train(config, tmp_path, say=lines.append)
    assert lines.count("best.json is damaged: it is made anew") == 1
    assert hint.read_bytes() == whole and not list(folder.glob(".*"))
