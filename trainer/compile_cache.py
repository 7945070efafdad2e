"""Where what torch compiles is kept from one process to the next.

Inductor's and AOTAutograd's results and Triton's kernels go below <shared>/compile-cache/<key>, where <shared> is
$DFLASH_SHARED or ~/.cache/dflash. The key names torch, CUDA, the GPUs and the trainer's own compiled code: torch
itself looks more closely at what fits, but whoever cleans up can see what is of no use any more. Each process that uses
a folder holds its lock, so that none is deleted under a living one.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
COMPILED = (  # modules whose code torch compiles
    "blocks",
    "compiled",
    "draft",
    "draft_config",
    "draft_kernels",
    "fast_draft",
    "fast_target",
    "features",
    "fp8",
    "head_rows",
    "learner",
    "loss",
    "update",
)
WAIT = 5.0  # seconds for another process to be done with cleaning up

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pruned:
    folder: Path
    bytes: int


def shared_root() -> Path:
    """The folder of all keys. Raises OSError when there is none."""
    if shared := os.environ.get("DFLASH_SHARED"):
        return Path(shared) / "compile-cache"
    try:
        return Path.home() / ".cache" / "dflash" / "compile-cache"
    except RuntimeError as error:  # no HOME, and none in the list of users
        raise OSError(errno.ENOENT, "there is no home folder: set DFLASH_SHARED") from error


def key() -> str:
    """Names what compiled code depends on, for people and for cleaning up."""
    gpus = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    cuda = f"cuda{torch.version.cuda}" if torch.version.cuda else "cpu"
    return "-".join([f"torch{torch.__version__.partition('+')[0]}", cuda, *map(_word, sorted(gpus)), _digest()])


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _digest() -> str:
    """Of the trainer's compiled code, and of Python, whose pickles the caches hold."""
    found = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for name in COMPILED:
        found.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return found.hexdigest()[:12]


_used: list[Path | None] = []  # by this process, at most one


def use_compile_cache(say: Say) -> Path | None:
    """Has torch keep what it compiles from now on, and find what was kept. Call it before anything compiles.

    Returns the folder; None when there is none, which is said and no error: torch then takes one of its own, which may
    not last. TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR of the environment win. A second call changes nothing.
    """
    if not _used:
        _used.append(_use(say))
    return _used[0]


def _use(say: Say) -> Path | None:
    if os.environ.get(INDUCTOR) and os.environ.get(TRITON):
        return Path(os.environ[INDUCTOR])
    place = "the compile cache"
    try:
        folder = shared_root() / key()
        place = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _hold_for_good(_lock_of(folder))
        folder.mkdir(exist_ok=True)  # who held the lock may have deleted it
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        why = error.strerror or error
        say(f"compiled code can't be kept in {place}: {why}; the next start compiles anew (DFLASH_SHARED says where)")
        return None
    own = _torchs_own()  # whose import, here or before, has it written into the environment, as nobody's wish
    if os.environ.get(INDUCTOR) == own:
        del os.environ[INDUCTOR]
    os.environ.setdefault(INDUCTOR, str(folder / "inductor"))
    # One for all devices: else Inductor gives each its own, and equal GPUs compile the same kernels again.
    os.environ.setdefault(TRITON, str(folder / "triton"))
    return folder if os.environ[INDUCTOR] == str(folder / "inductor") else Path(os.environ[INDUCTOR])


def _torchs_own() -> str:
    """Where Inductor keeps things when it isn't told."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def prune(say: Say) -> list[Pruned]:
    """Deletes what is kept under other keys than this process's, unless a living process uses it. Raises OSError."""
    root = shared_root()
    pruned: list[Pruned] = []
    for folder in sorted(_folders(root)):
        if folder in _used or folder.name == key():
            continue
        try:
            descriptor = _taken(_lock_of(folder), fcntl.LOCK_EX)
        except OSError as error:
            say(f"{folder} stays: whether a process uses it can't be told ({error.strerror})")
            continue
        if descriptor is None:
            say(f"{folder} stays: a process uses it")
            continue
        try:
            size = sum(file.lstat().st_size for file in folder.rglob("*"))
            shutil.rmtree(folder)
            pruned.append(Pruned(folder, size))
        finally:
            _lock_of(folder).unlink(missing_ok=True)
            os.close(descriptor)
    return pruned


def _folders(root: Path) -> Iterator[Path]:
    """Those that this module has made: others have no lock beside them."""
    if root.is_dir():
        yield from (folder for folder in root.iterdir() if folder.is_dir() and _lock_of(folder).is_file())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _hold_for_good(lock: Path) -> None:
    """Shares the lock until this process ends. Raises OSError when somebody who deletes doesn't get done."""
    until = time.monotonic() + WAIT
    try:
        while _taken(lock, fcntl.LOCK_SH) is None:
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "another process is deleting it")
            time.sleep(0.05)
    except OSError as error:
        # A file system without locks: nothing can be deleted there either.
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
            raise


def _taken(lock: Path, kind: int) -> int | None:
    """The descriptor that holds it; None when another process does. Raises OSError, also where there are no locks."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass  # deleted between the two looks
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
