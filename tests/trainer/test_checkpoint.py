"""Checkpoints: whole or not there, exact, and older ones used when the newest is damaged."""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_draft import CONFIG
from tiny_checkpoints import load_checkpoint, save_checkpoint, save_drafter

from trainer.checkpoint import (
    CheckpointError,
    Progress,
    Score,
    StateFile,
    Written,
    damage,
    judge,
    load_drafter,
    newest_good_checkpoint,
    write_checkpoint,
)
from trainer.data import Cursor
from trainer.draft import DraftModel
from trainer.files import file_digest
from trainer.optim import make_optimizer
from trainer.snapshot import HostCopy, Trained


def trained(steps: int, seed: int = 0) -> tuple[DraftModel, torch.optim.AdamW]:
    """A drafter after some steps on random gradients."""
    torch.manual_seed(seed)
    model = DraftModel(CONFIG)
    optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        learn(model, optimizer)
    return model, optimizer


def learn(model: DraftModel, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()


def at(step: int) -> Progress:
    return Progress(step=step, row=2 * step, data_digest="d", first_loss=5.0)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def test_a_checkpoint_gives_back_everything_exactly(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    saved = save_checkpoint(tmp_path, model, optimizer, at(3), keep=2)
    other, other_optimizer = trained(1, seed=1)
    assert load_checkpoint(saved, other, other_optimizer) == at(3)
    # The same from here on, moments and their step counts included.
    for one, its in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(7)
        learn(one, its)
    for name, tensor in model.state_dict().items():
        assert (other.state_dict()[name] == tensor).all(), name


def test_a_cursor_comes_back_and_a_checkpoint_from_before_cursors_is_whole(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    placed = at(1).model_copy(update={"cursor": Cursor(row=2, epoch=1, group=3, index=4)})
    saved = save_checkpoint(tmp_path, model, optimizer, placed, keep=2)
    assert load_checkpoint(saved, model, optimizer) == placed
    # As the first version wrote it, sealed over its own fields.
    state = saved / "state.json"
    progress = {"step": 1, "row": 2, "data_digest": "d", "first_loss": 5.0}
    files = json.loads(state.read_bytes())["files"]
    del files["random.json"]
    (saved / "random.json").unlink()
    older = {"schema_version": 1, "progress": progress, "files": files, "own": ""}
    seal = hashlib.sha256(json.dumps(older, separators=(",", ":")).encode()).hexdigest()
    state.write_text(json.dumps({**older, "own": seal}, indent=2))
    assert damage(saved) is None
    assert load_checkpoint(saved, model, optimizer) == at(1)
    state.write_text(json.dumps({**older, "progress": {**progress, "row": 3}, "own": seal}))
    assert damage(saved) == "state.json is not what was written"


def test_a_checkpoint_before_the_first_step_gives_a_fresh_optimiser(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved = save_checkpoint(tmp_path, model, optimizer, at(0), keep=2)
    other, other_optimizer = trained(0, seed=1)
    load_checkpoint(saved, other, other_optimizer)
    assert not other_optimizer.state
    assert all((other.state_dict()[name] == tensor).all() for name, tensor in model.state_dict().items())


def test_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    (tmp_path / ".step-00000009.tmp").mkdir()
    for step in (5, 10, 99999999, 100000000):
        save_checkpoint(tmp_path, model, optimizer, at(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-100000000", "step-99999999"]


def test_a_damaged_later_one_goes_and_not_the_one_just_written(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for step in (5, 10):
        save_checkpoint(tmp_path, model, optimizer, at(step), keep=2)
    flip(tmp_path / "step-00000010/model.safetensors")
    save_checkpoint(tmp_path, model, optimizer, at(7), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


def test_a_whole_checkpoint_of_the_step_is_never_replaced_a_damaged_one_is(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    model_file = save_checkpoint(tmp_path, model, optimizer, at(5), keep=1) / "model.safetensors"
    before = model_file.stat().st_ino
    save_checkpoint(tmp_path, model, optimizer, at(5), keep=1)
    assert model_file.stat().st_ino == before
    flip(model_file)
    saved = save_checkpoint(tmp_path, model, optimizer, at(5), keep=1)
    assert newest_good_checkpoint(tmp_path, print) == saved


# --- the best one ---


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_best_one_stays_beside_the_newest(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    scores = [None, 2.0, 3.0, 2.5, None, 2.9]
    for step, value in enumerate(scores, start=1):
        score = None if value is None else Score(value, "cycle")
        save_checkpoint(tmp_path, model, optimizer, at(step), keep=2, score=score)
    assert names(tmp_path) == ["best.json", "step-00000003", "step-00000005", "step-00000006"]
    expected = {"schema_version": 1, "name": "step-00000003", "score": 3.0, "measured": "cycle"}
    assert json.loads((tmp_path / "best.json").read_bytes()) == expected
    save_checkpoint(tmp_path, model, optimizer, at(7), keep=2, score=Score(3.1, "cycle"))
    assert names(tmp_path) == ["best.json", "step-00000006", "step-00000007"]


def test_a_decoded_score_goes_before_an_estimate(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for step, score in enumerate([Score(3.0, "cycle"), Score(1.5, "decoded"), Score(4.0, "cycle")], start=1):
        save_checkpoint(tmp_path, model, optimizer, at(step), keep=1, score=score)
    best = judge(tmp_path).best
    assert best is not None and (best.name, best.score, best.measured) == ("step-00000002", 1.5, "decoded")


@pytest.mark.parametrize("harm", ["its weights", "it is gone"])
def test_a_damaged_best_is_replaced_by_the_next_one_that_was_measured(harm: str, tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, at(1), keep=1, score=Score(3.0, "cycle"))
    if harm == "its weights":
        flip(tmp_path / "step-00000001/model.safetensors")
        os.utime(tmp_path / "step-00000001/model.safetensors", ns=(0, 0))
    else:
        shutil.rmtree(tmp_path / "step-00000001")
    assert judge(tmp_path).best is None
    save_checkpoint(tmp_path, model, optimizer, at(2), keep=1, score=Score(2.0, "cycle"))
    assert best_name(tmp_path) == "step-00000002"
    assert names(tmp_path) == ["best.json", "step-00000002"]


def best_name(folder: Path) -> str | None:
    best = judge(folder).best
    return best and best.name


def written(folder: Path, step: int, score: Score | None = None, keep: int = 1) -> Written:
    model, optimizer = trained(1)
    return write_checkpoint(folder, HostCopy().take(Trained.alone(model, optimizer)), at(step), keep, score=score)


OTHERS = {
    "cut": lambda content: content[:-9],
    "edited": lambda content: content.replace(b"5.0", b"1.0"),
    "newer": lambda content: content.replace(b'"schema_version": 1', b'"schema_version": 9'),
    "gone": None,
}


@pytest.mark.parametrize("harm", OTHERS)
def test_nothing_depends_on_best_json(harm: str, tmp_path: Path) -> None:
    written(tmp_path, 1, Score(5.0, "decoded"))
    hint, change = tmp_path / "best.json", OTHERS[harm]
    before = hint.read_bytes()
    if change:
        hint.write_bytes(change(before))
    else:
        hint.unlink()
    assert best_name(tmp_path) == "step-00000001"
    notes = written(tmp_path, 2, Score(2.5, "decoded")).notes
    told = {
        "cut": "best.json is damaged: it is made anew",
        "newer": "best.json is of schema_version 9, newer than this",
    }
    assert [note.startswith(told[harm]) for note in notes] == [True] * (harm in told)
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000002"]
    assert hint.read_bytes() == before


def test_a_kill_between_a_checkpoint_and_best_json_loses_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*given: object) -> None:
        raise Killed

    written(tmp_path, 1, Score(2.0, "decoded"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("trainer.checkpoint.replace_synced", killed)
        written(tmp_path, 2, Score(9.0, "decoded"))
    written(tmp_path, 3, Score(2.5, "decoded"))
    assert names(tmp_path) == ["best.json", "step-00000002", "step-00000003"]
    assert json.loads((tmp_path / "best.json").read_bytes())["name"] == best_name(tmp_path) == "step-00000002"


def test_a_score_goes_away_with_what_was_scored(tmp_path: Path) -> None:
    written(tmp_path, 2, Score(1.2, "decoded"))
    written(tmp_path, 3, Score(9.0, "decoded"), keep=9)
    flip(tmp_path / "step-00000003/model.safetensors")
    written(tmp_path, 3, Score(1.5, "decoded"), keep=9)
    assert json.loads((tmp_path / "best.json").read_bytes())["score"] == 1.5
    assert written(tmp_path, 4, Score(1.7, "decoded")).best


def test_scores_on_other_data_or_settings_are_not_compared(tmp_path: Path) -> None:
    written(tmp_path, 1, Score(9.0, "decoded", "one", "16 prompts"))
    assert not written(tmp_path, 2, Score(2.0, "decoded", "one", "16 prompts")).best
    assert written(tmp_path, 3, Score(2.0, "decoded", "one", "8 prompts")).best
    assert written(tmp_path, 4, Score(1.0, "cycle", "other", "rows of 64")).best
    assert not written(tmp_path, 5).best and best_name(tmp_path) == "step-00000004"


def old_format(checkpoint: Path) -> None:
    """As the trainer wrote it whose scores were in best.json alone."""
    state = json.loads((checkpoint / "state.json").read_bytes())
    del state["score"]
    state["own"] = ""
    seal = hashlib.sha256(json.dumps(state, indent=2).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps({**state, "own": seal}, indent=2))
    assert damage(checkpoint) is None


def test_an_older_best_has_its_score_in_best_json(tmp_path: Path) -> None:
    old_format(written(tmp_path, 1, Score(5.0, "decoded")).path)
    assert not written(tmp_path, 2, Score(2.5, "decoded", "data", "16 prompts")).best
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000002"]
    assert written(tmp_path, 3, Score(5.5, "decoded", "data", "16 prompts")).best
    assert names(tmp_path) == ["best.json", "step-00000003"]


def test_older_ones_stay_while_best_json_can_not_tell_which_is_the_best(tmp_path: Path) -> None:
    old_format(written(tmp_path, 1, Score(5.0, "decoded")).path)
    truncate(tmp_path / "best.json")
    for step in (2, 3):
        (note,) = written(tmp_path, step, Score(2.5, "decoded")).notes
        assert note.startswith("best.json is damaged: one of step-00000001 may be the best, so all are kept; delete ")
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000002", "step-00000003"]
    (tmp_path / "best.json").unlink()
    assert written(tmp_path, 4).notes == ()
    assert names(tmp_path) == ["best.json", "step-00000002", "step-00000004"]


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_best_one_that_can_not_be_read_just_now_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = written(tmp_path, 1, Score(5.0, "decoded")).path
    before = (tmp_path / "best.json").read_bytes()
    os.utime(best / name, ns=(0, 0))
    opened = Path.open

    def failing(path: Path, *given: Any, **named: Any) -> Any:
        if path == best / name:
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *given, **named)

    def read(path: Path) -> bytes:
        with failing(path, "rb") as file:
            return file.read()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        patch.setattr(Path, "read_bytes", read)
        (note,) = written(tmp_path, 2, Score(2.5, "decoded")).notes
    assert note.startswith("checkpoint step-00000001 can't be read, and may be the best: it is kept ([Errno 5]")
    assert (tmp_path / "best.json").read_bytes() == before and best_name(tmp_path) == "step-00000001"


def test_the_best_one_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = written(tmp_path, 1, Score(5.0, "decoded")).path
    read: list[Path] = []

    def noted(path: Path) -> str:
        read.append(path.parent)
        return file_digest(path)

    monkeypatch.setattr("trainer.state.file_digest", noted)
    monkeypatch.setattr("trainer.checkpoint._verified", {})  # as in a process that was just started
    for step in (2, 3):
        written(tmp_path, step)
    assert read.count(best) == 4  # its files
    os.utime(best / "model.safetensors", ns=(0, 0))
    written(tmp_path, 4)
    assert read.count(best) == 8


def test_what_is_somebody_else_s_in_the_folder_stays(tmp_path: Path) -> None:
    saved = written(tmp_path, 1).path
    others = [".git", ".notes", "notes", "step-00000001.keepme", "step-3", "step-000000001", "step-best"]
    for name in others:
        shutil.copytree(saved, tmp_path / name)
    for name in (".step-00000001.tmp", ".step-00000001.old", ".best.json.tmp", ".step-100000000.lock"):
        (tmp_path / name).write_text("left behind by a kill")
    written(tmp_path, 2)
    assert names(tmp_path) == sorted([*others, "step-00000002"])
    said: list[str] = []
    assert newest_good_checkpoint(tmp_path, said.append) == tmp_path / "step-00000002" and said == []


# --- the state ---


def test_all_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    model, optimizer = trained(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    draw()  # leaves half a pair of normal numbers behind in two of them
    saved = save_checkpoint(tmp_path, model, optimizer, at(1), keep=1)
    after = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(6)
    load_checkpoint(saved, model, optimizer)
    assert draw() == after


def test_state_json_is_readable_and_says_everything(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    saved = save_checkpoint(tmp_path, model, optimizer, at(1), keep=1)
    state = json.loads((saved / "state.json").read_bytes())
    assert list(state) == ["schema_version", "progress", "score", "origin", "files", "own"]
    assert state["schema_version"] == 2
    assert sorted(state["files"]) == ["config.json", "model.safetensors", "optimizer.safetensors", "random.json"]
    assert StateFile.model_validate(state).progress == at(1)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more into a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_oserror_and_leaves_the_older_one_alone(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    saved = save_checkpoint(tmp_path, model, optimizer, at(5), keep=1)
    size = (saved / "model.safetensors").stat().st_size
    for limit in (size // 2, size):  # in the model, in the moments
        with files_of_at_most(limit), pytest.raises(OSError, match=r"can't write .*step-00000006.*safetensors"):
            save_checkpoint(tmp_path, model, optimizer, at(6), keep=1)
        assert newest_good_checkpoint(tmp_path, print) == saved
        assert list(tmp_path.iterdir()) == [saved]


def test_every_new_folder_and_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    model, optimizer = trained(1)
    save_checkpoint(tmp_path / "run/checkpoints", model, optimizer, at(5), keep=1)
    building = "run/checkpoints/.step-00000005.tmp"
    names = ("model.safetensors", "config.json", "optimizer.safetensors", "random.json", "state.json")
    files = [f"{building}/{name}" for name in names]
    assert synced == [".", "run", *files, building, "run/checkpoints"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_good_checkpoint(tmp_path / "none", print) is None


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    saved = save_checkpoint(tmp_path, model, optimizer, at(1), keep=1)
    other = DraftModel(replace(CONFIG, num_layers=3, layer_types=(), mask_token_id=5))
    with pytest.raises(CheckpointError, match="its num_layers is 2, wanted 3, its mask_token_id is 127, wanted 5"):
        load_checkpoint(saved, other, make_optimizer(other, lr=1.0, weight_decay=0))


def test_a_drafter_with_wrong_tensors_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_drafter(folder, DraftModel(CONFIG))
    good = load_file(folder / "model.safetensors")
    changes = {
        "norm.weight is missing": {k: v for k, v in good.items() if k != "norm.weight"},
        "lm_head.weight is unknown": {**good, "lm_head.weight": torch.zeros(1)},
        r"fc.weight has shape \[32, 32\], expected \[32, 64\]": {**good, "fc.weight": torch.zeros(32, 32)},
    }
    for message, tensors in changes.items():
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_drafter(folder, "cpu", torch.float32)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no drafter in"):
        load_drafter(folder, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match="no drafter in"):
        load_drafter(tmp_path / "none", "cpu", torch.float32)
