"""A run's own control group, where one can be made, and what the kernel says of memory that ran out.

The group lies below the one that the supervisor is in and is named after the run. Only such a group may be killed as a
whole: every lxc-attach shares one group with every other. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

_PREFIX = "dflash-run-"


def create(run_id: str) -> str | None:
    """Makes the group of this run below our own; None where we may not, or where there is no unified hierarchy."""
    own = _own_folder("cgroup2")
    if own is None:
        return None
    group = own / f"{_PREFIX}{run_id}"
    try:
        group.mkdir(exist_ok=True)
        if not os.access(group / "cgroup.procs", os.W_OK):
            raise PermissionError
    except OSError:
        return None
    return str(group)


def pids(group: str | None, run_id: str) -> set[int]:
    """The processes of the run's group and of the groups below it; none when it is not this run's or is gone."""
    found: set[int] = set()
    if not _is_of(group, run_id):
        return found
    for folder, _, _ in os.walk(str(group)):
        with contextlib.suppress(OSError, ValueError):
            found |= {int(word) for word in Path(folder, "cgroup.procs").read_text().split()}
    return found - {0}


def kill(group: str | None, run_id: str) -> bool:
    """SIGKILL to all of the group at once, so that no fork can escape; False where the kernel can't (before 5.14)."""
    if not _is_of(group, run_id) or os.getpid() in pids(group, run_id):
        return False
    try:
        Path(str(group), "cgroup.kill").write_text("1")
    except OSError:
        return False
    return True


def remove(group: str | None, run_id: str) -> None:
    """Removes the empty group; one that is not empty stays."""
    if _is_of(group, run_id):
        for folder, _, _ in os.walk(str(group), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _is_of(group: Any, run_id: str) -> bool:
    """Records may be foreign: only a folder with the run's whole name, in a cgroup file system, is its group."""
    if not isinstance(group, str) or os.path.basename(group) != f"{_PREFIX}{run_id}":
        return False
    return os.path.isfile(os.path.join(group, "cgroup.procs"))


class OutOfMemory:
    """Whether the kernel killed somebody in our memory group for lack of memory, since the last look."""

    _EVERY = 0.5

    def __init__(self) -> None:
        self._file = _counter()
        self._count = self._read()
        self._at = 0.0
        self.seen_at: float | None = None

    def look(self, *, now: bool = False) -> None:
        """Reads the kernel's count, at most twice a second unless `now`."""
        moment = time.monotonic()
        if self._file is None or (moment - self._at < self._EVERY and not now):
            return
        self._at = moment
        count = self._read()
        if count > self._count:
            self._count, self.seen_at = count, moment

    def within(self, seconds: float) -> bool:
        """Whether there was such a kill in the last `seconds`. The group may be the whole container's."""
        self.look(now=True)
        return self.seen_at is not None and time.monotonic() - self.seen_at < seconds

    def _read(self) -> int:
        with contextlib.suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", self._file.read_text() if self._file else "", re.MULTILINE)
            return int(match.group(1)) if match else 0
        return 0


def _counter() -> Path | None:
    """The count's file of the nearest group above us that has one: in the unified hierarchy, else in the old."""
    folder = _own_folder("cgroup2")
    while folder is not None and (folder / "cgroup.procs").exists():
        if (folder / "memory.events").exists():
            return folder / "memory.events"
        folder = folder.parent
    folder = _own_folder("memory")
    return folder / "memory.oom_control" if folder and (folder / "memory.oom_control").exists() else None


def _own_folder(kind: str) -> Path | None:
    """Our own group as a folder. kind: "cgroup2", or the name of a controller of the old hierarchies."""
    try:
        mounts = [row.split(" ") for row in Path("/proc/self/mountinfo").read_text(errors="replace").split("\n")]
        rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().split("\n") if row.count(":") >= 2]
    except OSError:
        return None
    for words in mounts:
        if "-" not in words:
            continue
        after = words[words.index("-") + 1 :]
        unified = kind == "cgroup2" and after[0] == "cgroup2"
        if not unified and not (after[0] == "cgroup" and kind in after[-1].split(",")):
            continue
        for number, controllers, group in rows:
            if (number == "0" and not controllers) if unified else kind in controllers.split(","):
                # A mount may show a part of the hierarchy only; what is outside of it can't be reached by it.
                inside = os.path.relpath(group, words[3])
                if not inside.startswith(".."):
                    return Path(os.path.normpath(os.path.join(words[4], inside)))
    return None
