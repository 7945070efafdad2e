"""Files and folders that are on the disk whole, or not at all."""

# safetensors' functions are typed loosely.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import ctypes
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.locks import locked

READ = 2**20  # bytes of a file that are read at a time
PIECE = 64 * 2**20  # bytes that the disk is to take at a time
WRITE_OUT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER


def nothing() -> None:
    pass


def file_digest(path: Path, beat: Callable[[], None] = nothing) -> str:
    """beat: called as it gets on."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ):
            digest.update(piece)
            beat()
    return digest.hexdigest()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], beat: Callable[[], None] = nothing) -> None:
    """One safetensors file, synced to the disk. beat: called as the disk gets on with it. Raises OSError."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})  # transformers wants to be told
    except SafetensorError as error:  # what it makes of a full disk, too
        raise OSError(f"can't write {path}: {error}") from error
    path.chmod(0o644)  # safetensors makes it 0600, and servers run as somebody else
    beat()
    sync(path, beat)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """A file in the place of an older one: a reader sees the one or the other, after a crash too."""
    building = path.with_name(f".{path.name}.tmp")
    write_synced(building, data)
    building.replace(path)
    sync(path.parent)


def sync(path: Path, beat: Callable[[], None] = nothing) -> None:
    """Flushes a file or a folder's entries to the disk. beat: called as the disk gets on with a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if beat is not nothing:
            _write_out(path, beat)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beat()


def _write_out(path: Path, beat: Callable[[], None]) -> None:
    """Has the disk take a file piece by piece, where Linux can: one sync of it all says nothing until it is over.

    What goes wrong is told by the sync behind it: the kernel tells an error once to each descriptor that was open.
    """
    write_out = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if write_out is None:
        return
    with path.open("rb") as file:
        for start in range(0, path.stat().st_size, PIECE):
            write_out(file.fileno(), ctypes.c_int64(start), ctypes.c_int64(PIECE), WRITE_OUT)
            beat()


@contextlib.contextmanager
def built_beside(folder: Path) -> Generator[Path]:
    """A temporary folder beside `folder`, which takes its place at the end of the block; an error leaves no trace.

    What is at `folder` steps aside first and goes away after. Raises Locked when another process is building it.
    """
    make_synced(folder.parent)
    building, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    with locked(folder.with_name(f".{folder.name}.lock"), str(folder)):
        for leftover in (building, old):
            remove(leftover)
        building.mkdir()
        try:
            yield building
            sync(building)
            if os.path.lexists(folder):
                folder.rename(old)
            building.rename(folder)
        except BaseException:
            remove(building)
            if os.path.lexists(old) and not os.path.lexists(folder):
                old.rename(folder)
            raise
        sync(folder.parent)
        remove(old)


def remove(path: Path) -> None:
    """A folder, a file or a link goes away, as far as the disk lets it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def make_synced(folder: Path) -> None:
    """Makes a folder and those above it that are missing; each one's entry is on the disk after."""
    if folder.exists():
        return
    make_synced(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)
