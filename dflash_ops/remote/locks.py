"""Locks of the container's folder: files that the kernel frees with whoever has them locked, however that one ends.

Standard library only, Python >= 3.9. (rundir and logfile, of which each run keeps a copy of its own, do without.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote.answers import Fault

_EVERY = 0.1


@contextlib.contextmanager
def named(
    path: Path, name: str, doing: str, parameters: dict[str, Any], on_wait: Callable[[], None] = lambda: None
) -> Generator[None, None, None]:
    """Holds <path>/locks/NAME.lock, which says who (`client`) has it since when. Fault("busy"), which says who does
    `doing`, after `patience` seconds. on_wait: called once, when another has it."""
    with (path / "locks" / f"{name}.lock").open("a+") as file:
        deadline, waiting = time.monotonic() + parameters["patience"], False
        while not take(file.fileno()):
            if not waiting:
                waiting = True
                on_wait()
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "somebody"
                raise Fault("busy", f"another {doing} is going on", f"held by {holder}", "run it again later")
            time.sleep(_EVERY)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):  # the words are a courtesy; a full disk is met, and told, later
            file.truncate(0)
            file.write(f"{parameters['client']} since {since}\n")
            file.flush()
        yield


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
