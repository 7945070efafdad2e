"""Locks of the container's folder: files that the kernel frees with whoever has them locked, however that one ends.

Standard library only, Python >= 3.9. (rundir and logfile, of which each run keeps a copy of its own, do without.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote.answers import Fault, in_the_way

_EVERY = 0.1
_WORDS_BYTES = 1000  # of who holds a lock, at most


@contextlib.contextmanager
def named(
    path: Path, name: str, doing: str, parameters: dict[str, Any], on_wait: Callable[[], None] = lambda: None
) -> Generator[None, None, None]:
    """Holds <path>/locks/NAME.lock, which says who (`client`) has it since when; both are made when they are not there.
    Fault("busy"), which says who does `doing`, after `patience` seconds; Fault("preflight") when something else has the
    file's place. on_wait: called once, when another has it."""
    descriptor = _open(path / "locks" / f"{name}.lock")
    try:
        deadline, waiting = time.monotonic() + parameters["patience"], False
        while not take(descriptor):
            if not waiting:
                waiting = True
                on_wait()
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, _WORDS_BYTES, 0).decode("utf-8", "replace").strip() or "somebody"
                raise Fault("busy", f"another {doing} is going on", f"held by {holder}", "run it again later")
            time.sleep(_EVERY)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):  # the words are a courtesy; a full disk is met, and told, later
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{parameters['client']} since {since}\n".encode("utf-8", "replace"))
        yield
    finally:
        os.close(descriptor)


def _open(place: Path) -> int:
    """A descriptor of the lock's file, which is made when it is not there. Never another file by way of a link, for
    its text is replaced; and no wait for whoever has a fifo's other end."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOENT) and os.path.lexists(place.parent):
            raise in_the_way(place, place.parent) from None
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise in_the_way(place, place) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise in_the_way(place, place)
    return descriptor


def take(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed; False when another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(place: str) -> bool:
    """Whether somebody has this file or folder locked, alone or with others; also when that can't be told."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not take(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)
