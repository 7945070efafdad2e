"""What a remote script says: lines of JSON, and a refusal with the parts of the one line that the user gets.

{"schema_version": 1, "ok": true, ...} or {"schema_version": 1, "ok": false, "kind", "what", "why", "next", "where"}.
dflash_ops.answers reads them. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
# The kinds of refusal, with the exit codes of the errors that they become.
EXIT_CODES = {"failed": 1, "config": 3, "preflight": 6, "busy": 7, "not_found": 8, "verification": 9}
_CORRECT_PATH = "correct `path` in the inventory"


class Fault(Exception):
    """A refusal. kind: a key of EXIT_CODES."""

    def __init__(self, kind: str, what: str, why: str = "", next: str = "", where: str = "") -> None:
        super().__init__(what)
        self.kind = kind
        self.parts = {"what": what, "why": why, "next": next, "where": where}


def answer(path: Path | None, verb: Callable[[], dict[str, Any]]) -> int:
    """Runs a verb and says its answer, or why there is none; returns the exit code. path: the folder it works in."""
    try:
        reply = verb()
    except Fault as fault:
        return refuse(fault)
    except OSError as error:
        return refuse(system_fault(path, error))
    say(reply)
    return 0


def system_fault(path: Path | None, error: OSError) -> Fault:
    """What the system refused, as a fault. path: the inventory's `path`, where one plays a part."""
    why, where = error.strerror or str(error), str(error.filename or path or "")
    if path is not None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            import shutil  # seldom needed, and long to load

            while not path.exists():
                path = path.parent
            return disk_full(path, f"{shutil.disk_usage(path).free} bytes are left")
        if error.errno == errno.EROFS and path.exists():
            advice = f"in the container: findmnt -T {path}; on the host: dmesg (a disk with errors becomes read-only)"
            return Fault("preflight", "the container's file system is read-only", why, advice, where)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return Fault("preflight", "the container does not let us write there", why, _CORRECT_PATH, where)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            return Fault("preflight", "the container has no such folder and can't make it", why, _CORRECT_PATH, where)
    return Fault("failed", "the container could not do it", why, "", where)


def disk_full(folder: Path, why: str) -> Fault:
    return Fault("preflight", "the container's disk is full", why, f"in the container: df -h {folder}", str(folder))


def kind_of(place: Path) -> str:
    """What lies there, itself and not what it leads to, as a message says it; empty when nothing does."""
    try:
        kind = stat.S_IFMT(os.lstat(place).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    what = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a fifo"}
    what |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return what.get(kind, "something else")


def in_the_way(lock: Path, thing: Path) -> Fault:
    """thing: what is no regular file, or no folder, where a lock must be."""
    kind, must = kind_of(thing), "a regular file" if thing == lock else "a folder"
    remove = "rm -r" if kind == "a folder" else "rm"
    advice = f"remove it, in the container: {remove} {shlex.quote(str(thing))}"
    what = f"the lock {lock.name} can't be held"
    return Fault("preflight", what, f"{thing} is {kind}, and must be {must}", advice, str(lock))


def refuse(fault: Fault) -> int:
    """Says a fault; returns its exit code."""
    _write({"ok": False, "kind": fault.kind, **fault.parts})
    return EXIT_CODES[fault.kind]


def say(reply: dict[str, Any]) -> None:
    _write({"ok": True, **reply})


_BEAT_SECONDS = 1.0
_last_beat = 0.0


def beat(doing: str, left: float) -> None:
    """A sign of life while something is waited for: what, and for how many seconds more. At most one a second; whoever
    asked may give up after 15 s of silence, for then we hang."""
    global _last_beat
    moment = time.monotonic()
    if _beats and moment - _last_beat >= _BEAT_SECONDS:
        _last_beat = moment
        _write({"doing": doing, "left_s": round(left)})


_beats = False


def answer_with_beats(path: Path | None, verb: Callable[[], dict[str, Any]]) -> int:
    """As `answer`, for whoever listens to the signs of life too."""
    global _beats
    _beats = True
    return answer(path, verb)


def _write(reply: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more; what was done stays done
        sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **reply}) + "\n")
        sys.stdout.flush()
