"""Where what torch compiles is kept, and that nothing is deleted under a living process."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nursery import Nursery

from trainer import compile_cache
from trainer.compile_cache import COMPILED, INDUCTOR, TRITON, key, prune, shared_root, use_compile_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of a process that is fresh for each test: the locks that it holds for good."""
    monkeypatch.setenv("DFLASH_SHARED", str(tmp_path))
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(compile_cache, "_used", [])
    descriptors: list[int] = []
    taken = compile_cache._taken

    def remembered(lock: Path, kind: int) -> int | None:
        descriptor = taken(lock, kind)
        if descriptor is not None and kind == fcntl.LOCK_SH:
            descriptors.append(descriptor)
        return descriptor

    monkeypatch.setattr(compile_cache, "_taken", remembered)
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def silent(line: str) -> None:
    pytest.fail(line)


def test_torch_is_told_once_and_before_it_compiles(tmp_path: Path) -> None:
    folder = use_compile_cache(silent)
    assert folder == tmp_path / "compile-cache" / key() and folder.is_dir()
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder / "inductor"), str(folder / "triton"))
    os.environ[INDUCTOR] = "elsewhere"
    assert use_compile_cache(silent) == folder
    assert list(folder.iterdir()) == []  # nothing of the look whether it can be written


def test_what_the_user_has_set_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    assert use_compile_cache(silent) == tmp_path / "mine"
    assert os.environ[INDUCTOR] == str(tmp_path / "mine")
    assert os.environ[TRITON] == str(shared_root() / key() / "triton")
    monkeypatch.setattr(compile_cache, "_used", [])
    monkeypatch.setenv(TRITON, str(tmp_path / "too"))
    assert use_compile_cache(silent) == tmp_path / "mine" and os.environ[TRITON] == str(tmp_path / "too")
    monkeypatch.setattr(compile_cache, "_used", [])
    monkeypatch.delenv(INDUCTOR)
    assert use_compile_cache(silent) == shared_root() / key() and os.environ[TRITON] == str(tmp_path / "too")


INDUCTOR_FIRST = """
import os
from torch._inductor.runtime.cache_dir_utils import cache_dir
from trainer.compile_cache import use_compile_cache

own = cache_dir()
assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own
use_compile_cache(print)
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_what_torch_itself_has_set_does_not(nursery: Nursery) -> None:
    """Inductor writes its own choice into the environment when it is imported, which may be long before."""
    ended = nursery.start(code=INDUCTOR_FIRST)
    assert ended.wait() == 0, ended.said()
    assert ended.said().strip() == str(shared_root() / key() / "inductor")


def test_without_a_shared_folder_it_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_SHARED")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert use_compile_cache(silent) == tmp_path / "me" / ".cache" / "dflash" / "compile-cache" / key()


def test_a_folder_that_cant_be_written_is_said_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_SHARED", str(tmp_path / "file"))
    said: list[str] = []
    assert use_compile_cache(said.append) is None
    assert use_compile_cache(said.append) is None
    assert len(said) == 1 and INDUCTOR not in os.environ and TRITON not in os.environ
    assert str(tmp_path / "file" / "compile-cache" / key()) in said[0] and "Not a directory" in said[0]
    assert "DFLASH_SHARED" in said[0]


def test_the_key_names_torch_cuda_gpus_and_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H100 80GB", "NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    start = "torch2.13.0-cuda13.0-nvidia_h100_80gb-nvidia_h200-"
    first = key()
    assert first.startswith(start) and len(first) == len(start) + 12
    read = Path.read_bytes
    for name in COMPILED:
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, name=name: read(path) + (b"#" if path.name == f"{name}.py" else b"")
        )
        assert key() != first, name


def test_the_key_knows_every_file_that_calls_the_compiler() -> None:
    calls = {path.stem for path in (ROOT / "trainer").glob("*.py") if "torch.compile(" in path.read_text()}
    assert calls - {"selftest", "forms"} <= set(COMPILED)  # these two compile for themselves


def other(name: str) -> Path:
    """What another version has left."""
    folder = shared_root() / name
    (folder / "inductor" / "ab").mkdir(parents=True)
    (folder / "inductor" / "ab" / "kernel.so").write_bytes(b"1234")
    folder.with_name(f"{name}.lock").touch()
    return folder


def test_only_what_nobody_uses_is_deleted(monkeypatch: pytest.MonkeyPatch, held: list[int]) -> None:
    """A lock is an open file's, not a process's: here one process plays two."""
    with monkeypatch.context() as changed:
        changed.setattr(compile_cache, "key", lambda: "living")
        living = use_compile_cache(silent)
    assert living == shared_root() / "living" and len(held) == 1
    monkeypatch.setattr(compile_cache, "_used", [])
    for name in (INDUCTOR, TRITON):
        monkeypatch.delenv(name)
    mine, old, foreign = use_compile_cache(silent), other("old"), shared_root() / "not-ours"
    foreign.mkdir()
    said: list[str] = []
    sizes = {one.folder: one.bytes for one in prune(said.append)}
    assert list(sizes) == [old] and sizes[old] >= 4
    assert said == [f"{living} stays: a process uses it"]
    assert not old.exists() and not old.with_name("old.lock").exists()
    os.close(held.pop(0))  # as when its process ends
    assert [one.folder for one in prune(silent)] == [living]
    assert mine is not None and mine.is_dir() and foreign.is_dir()


def test_one_that_is_being_deleted_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_root().mkdir(parents=True)
    descriptor = compile_cache._taken(shared_root() / f"{key()}.lock", fcntl.LOCK_EX)
    assert descriptor is not None
    monkeypatch.setattr(compile_cache, "WAIT", 0.01)
    said: list[str] = []
    assert use_compile_cache(said.append) is None and "another process is deleting it" in said[0]
    os.close(descriptor)
    monkeypatch.setattr(compile_cache, "_used", [])
    assert use_compile_cache(silent) is not None


def test_a_file_system_without_locks_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    old = other("old")
    monkeypatch.setattr(fcntl, "flock", none)
    assert use_compile_cache(silent) is not None
    said: list[str] = []
    assert prune(said.append) == [] and old.is_dir()
    assert "can't be told (Operation not supported)" in said[0]
