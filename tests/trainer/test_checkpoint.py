"""Checkpoints: whole or not there, exact, and older ones used when the newest is damaged."""

import contextlib
import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_draft import CONFIG

from trainer.checkpoint import (
    CheckpointError,
    Progress,
    damage,
    load_checkpoint,
    load_drafter,
    newest_good_checkpoint,
    save_checkpoint,
    save_drafter,
)
from trainer.data import Cursor
from trainer.draft import DraftModel
from trainer.optim import make_optimizer


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
    older = {"schema_version": 1, "progress": progress, "files": json.loads(state.read_bytes())["files"], "own": ""}
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


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json", "state.json"])
@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(
    name: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    model, optimizer = trained(1)
    older = save_checkpoint(tmp_path, model, optimizer, at(5), keep=2)
    newest = save_checkpoint(tmp_path, model, optimizer, at(10), keep=2)
    said: list[str] = []
    assert newest_good_checkpoint(tmp_path, said.append) == newest and said == []
    harm(newest / name)
    assert newest_good_checkpoint(tmp_path, said.append) == older
    (line,) = said
    assert line.startswith("checkpoint step-00000010 is damaged (") and line.endswith("): trying an older one")


def test_a_changed_step_is_damage(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    state = save_checkpoint(tmp_path, model, optimizer, at(5), keep=2) / "state.json"
    state.write_text(state.read_text().replace('"row": 10', '"row": 12'))
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* \(1\) are damaged: delete them to begin anew"):
        newest_good_checkpoint(tmp_path, said.append)
    assert "state.json is not what was written" in said[0]


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
    save_drafter(folder, DraftModel(CONFIG), CONFIG)
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


def test_only_a_drafter_or_an_empty_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = tmp_path / "work", tmp_path / "file"
    folder.mkdir()
    monkeypatch.chdir(folder)
    save_drafter(Path(), DraftModel(CONFIG), CONFIG)
    save_drafter(folder, DraftModel(CONFIG), CONFIG, torch.bfloat16)
    assert load_drafter(folder, "cpu", torch.float32)[1] == CONFIG
    (folder / "thesis.tex").write_text("years of work")
    file.write_text("more of it")
    for place in (folder, file):
        with pytest.raises(CheckpointError, match="is not a drafter: it will not be replaced"):
            save_drafter(place, DraftModel(CONFIG), CONFIG)
    assert (folder / "thesis.tex").exists() and file.exists()
