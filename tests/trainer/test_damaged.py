"""Checkpoints that are not what was written: each is named, and the one before is used."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import at, flip, trained, truncate
from tiny_checkpoints import save_checkpoint

from trainer.checkpoint import (
    CheckpointError,
    StateFile,
    damage,
    judge,
    load_drafter,
    newest_good_checkpoint,
)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def made_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


FILES = ["model.safetensors", "optimizer.safetensors", "config.json", "random.json", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, flip, emptied, Path.unlink, made_a_folder])
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


def test_a_state_nested_without_end_is_damage(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    older = save_checkpoint(tmp_path, model, optimizer, at(5), keep=2)
    newest = save_checkpoint(tmp_path, model, optimizer, at(10), keep=2)
    (newest / "state.json").write_text('{"schema_version": ' + "[" * 200_000)
    (tmp_path / "best.json").write_text("[" * 200_000)
    said: list[str] = []
    assert newest_good_checkpoint(tmp_path, said.append) == older and len(said) == 1
    assert judge(tmp_path).best is None
    (newest / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="no drafter in"):
        load_drafter(newest, "cpu", torch.float32)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    model, optimizer = trained(1)
    for step in (5, 10):
        save_checkpoint(folder, model, optimizer, at(step), keep=2)
    return folder


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_byte_of_any_file_counts(two_checkpoints: Path, name: str, where: float, change: int) -> None:
    """Flipped in any way, or cut off there."""
    file = two_checkpoints / "step-00000010" / name
    good = file.read_bytes()
    place = int(where * len(good))
    said: list[str] = []
    try:
        for bad in (good[:place] + bytes([good[place] ^ change]) + good[place + 1 :], good[:place]):
            file.write_bytes(bad)
            assert newest_good_checkpoint(two_checkpoints, said.append) == two_checkpoints / "step-00000005"
    finally:
        file.write_bytes(good)
    assert len(said) == 2 and all("step-00000010 is damaged" in line for line in said)
    assert damage(two_checkpoints / "step-00000010") is None


def test_what_is_no_checkpoint_at_all_is_passed_over(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    older = save_checkpoint(tmp_path, model, optimizer, at(5), keep=9)
    damaged = save_checkpoint(tmp_path, model, optimizer, at(6), keep=9) / "state.json"
    damaged.write_bytes(damaged.read_bytes().replace(b'"schema_version": 2', b'"schema_version": 6'))  # one bit
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000008").mkdir()
    shutil.copytree(older, tmp_path / "step-00000009")
    shutil.copytree(older, tmp_path / "step-00000010")
    (tmp_path / "step-00000010/state.json").write_text('{"schema_version": 2}')
    (tmp_path / ".step-00000011.tmp").mkdir()
    said: list[str] = []
    assert newest_good_checkpoint(tmp_path, said.append) == older
    assert [line.split(" (")[1].split("): ")[0] for line in said] == [
        "state.json can't be read: progress Field required",
        "it is step-00000005 under another name",
        "state.json is missing",
        f"[Errno 20] Not a directory: '{tmp_path}/step-00000007/state.json'",
        "state.json is not what was written",
    ]
    # The next save clears all of that away.
    save_checkpoint(tmp_path, model, optimizer, at(6), keep=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("own_kind", [True, False])
def test_a_newer_trainer_s_checkpoint_is_refused_and_stays(own_kind: bool, tmp_path: Path) -> None:
    """Going on from the older one would write it over; to call it damaged is to advise that it be deleted."""
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, at(5), keep=9)
    newest = save_checkpoint(tmp_path, model, optimizer, at(10), keep=9)
    state = StateFile.model_validate_json((newest / "state.json").read_bytes())
    written = state.model_copy(update={"schema_version": 99}).written()
    (newest / "state.json").write_bytes(written.replace(b'"progress": {', b'"course": {') if own_kind else written)
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"step-00000010: schema_version 99 is newer than .* knows 2: go on with"):
        newest_good_checkpoint(tmp_path, said.append)
    assert said == [] and "schema_version 99 is newer" in str(damage(newest))


def test_what_may_not_be_read_is_damage_in_a_checkpoint_and_an_error_in_the_folder() -> None:
    """A training that took "may not" for "there are none" would begin anew."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else for a moment")
    with tempfile.TemporaryDirectory() as everybodys:
        folder = Path(everybodys)
        model, optimizer = trained(1)
        older = save_checkpoint(folder, model, optimizer, at(5), keep=2)
        newest = save_checkpoint(folder, model, optimizer, at(10), keep=2)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        (newest / "model.safetensors").chmod(0o600)
        said: list[str] = []
        with nobody():
            assert newest_good_checkpoint(folder, said.append) == older
        assert len(said) == 1 and "Permission denied" in said[0]
        folder.chmod(0o700)
        with nobody(), pytest.raises(PermissionError):
            newest_good_checkpoint(folder, said.append)


@contextlib.contextmanager
def nobody() -> Generator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_changed_step_is_damage(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    state = save_checkpoint(tmp_path, model, optimizer, at(5), keep=2) / "state.json"
    state.write_text(state.read_text().replace('"row": 10', '"row": 12'))
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* \(1\) are damaged: delete them to begin anew"):
        newest_good_checkpoint(tmp_path, said.append)
    assert "state.json is not what was written" in said[0]
