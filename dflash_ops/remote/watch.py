"""Sees that a trainer hangs: no new step for so many minutes; and says where its threads are.

Progress is a new step in status.json; before the first one anything that is written, for data is prepared and kernels
compiled then. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import processes, rundir

_EVERY = 1.0
_PY_SPY_SECONDS = 20.0
_MOST_THREADS = 200
_LAST_BYTES = 64 * 1024


class Watchdog:
    """minutes: how long without progress is a stall; 0: never."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self._folder, self._seconds = folder, 60.0 * minutes
        self._seen: Any = None
        self._before_training: tuple[Any, ...] | None = None
        self._since = self._looked = time.monotonic()
        self._first = step_of(folder)
        self.every = min(_EVERY, self._seconds / 4) if minutes else _EVERY
        self.stalled = False

    def look(self, log_end: int) -> bool:
        """Whether it has just begun to stall, or just gone on: `stalled` says which. Between two looks twice `every`
        counts at most. log_end: bytes of the log so far;
        our own notes in it belong to `forgive`."""
        now = time.monotonic()
        if not self._seconds or now - self._looked < self.every:
            return False
        # Time in which we were stopped ourselves (SIGSTOP, a suspended container) is no time without progress.
        self._since += max(0.0, now - self._looked - 2 * self.every)
        self._looked = now
        status = rundir.read_json(self._folder / "status.json") or {}
        step = status.get("step")
        training = status.get("state") == "training" and step != self._first
        self._before_training = None if training else (step, status.get("state"), status.get("updated_at"))
        marks: Any = step if self._before_training is None else (*self._before_training, log_end)
        if marks != self._seen:
            self._seen, self._since = marks, now
        stalled = now - self._since >= self._seconds
        changed, self.stalled = stalled != self.stalled, stalled
        return changed

    def forgive(self, log_end: int) -> None:
        """What we wrote into the log ourselves is no progress of the trainer's."""
        if self._before_training is not None:
            self._seen = (*self._before_training, log_end)

    @property
    def quiet_seconds(self) -> float:
        return time.monotonic() - self._since


def step_of(folder: Path) -> int:
    """The last step that the trainer told of; 0 for none."""
    step = (rundir.read_json(folder / "status.json") or {}).get("step")
    return step if type(step) is int else 0


def did_a_step_since(folder: Path, moment: str) -> bool:
    """Whether the last record of metrics.jsonl is of a step done after this RFC 3339 time."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return False
    for line in reversed(lines):
        try:
            return _seconds(json.loads(line)["time"]) >= _seconds(moment)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # torn, or the empty rest behind the last line feed
    return False


def _seconds(moment: str) -> float:
    return datetime.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def stacks(trainer: processes.Process, python: str) -> str:
    """Where each thread of the trainer is: by py-spy where there is one, else by the kernel. A trainer that catches
    SIGUSR1 (faulthandler does) writes its own Python stacks into the log too."""
    lines = [f"process {trainer.pid}, state {trainer.state}; its threads, by the kernel:"]
    folder = processes.PROC / str(trainer.pid) / "task"
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder), key=int)[:_MOST_THREADS]:
            lines.append(_thread(folder / name))
    spy = shutil.which("py-spy", path=os.path.dirname(python) + os.pathsep + os.environ.get("PATH", os.defpath))
    if spy is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            words = [spy, "dump", "--pid", str(trainer.pid)]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PY_SPY_SECONDS)
            lines.append((done.stdout or done.stderr).decode("utf-8", "replace").strip())
    if catches(trainer, signal.SIGUSR1) and processes.send(trainer, signal.SIGUSR1):
        lines.append("it was asked for its Python stacks (SIGUSR1); they follow")
    return "\n".join(lines)


def catches(process: processes.Process, number: int) -> bool:
    """Whether the process has a handler for the signal; without one it would be killed."""
    try:
        status = (processes.PROC / str(process.pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(match and int(match.group(1), 16) >> (number - 1) & 1)


def dumps_no_core(process: processes.Process) -> bool:
    """Whether SIGABRT would leave no core file, which could be as large as the memory."""
    with contextlib.suppress(OSError):
        limits = (processes.PROC / str(process.pid) / "limits").read_text(errors="replace")
        return re.search(r"^Max core file size\s+0\s", limits, re.MULTILINE) is not None
    return False


def _thread(folder: Path) -> str:
    def word(name: str) -> str:
        with contextlib.suppress(OSError):
            return (folder / name).read_text(errors="replace").strip("\0 \n")
        return ""

    state = word("stat").rpartition(")")[2].split()
    call = word("syscall").partition(" ")[0]
    where = f"in {word('wchan').strip('0') or '?'}" if state and state[0] != "R" else "running"
    return f"  {folder.name} {word('comm')}: state {state[0] if state else '?'}, {where}" + (
        f", system call {call}" if call.isdigit() else ""
    )
