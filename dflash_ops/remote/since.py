"""What was made in the container since a moment: all that going back to a snapshot of that moment would lose; and which
runs go on in it, in whatever folder.

By the times of files, which are the container's own clock's, as the snapshot's is.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, environment, kin, processes, releases, rundir


def main(parameters: dict[str, Any]) -> int:
    paths = [Path(path) for path in parameters["paths"]]
    moment = parameters.get("since")

    def reply() -> dict[str, Any]:
        return {**live(paths), **(since(paths, moment) if moment is not None else {})}

    return answers.answer(paths[0], reply)


def live(paths: Sequence[Path]) -> dict[str, Any]:
    """live: the runs of these folders that go on. elsewhere: those of other folders, as [run id, folder]; the folder is
    None where its processes do not say it."""
    ours = {run["run_id"]: None for path in paths for run in rundir.live_runs(path)}
    real = {os.path.realpath(path) for path in paths}
    others: dict[str, str | None] = {}
    for run_id, folder in sorted(_marked(), key=str):
        if folder is None or not (folder / "exit.json").exists():  # what an ended run left may go
            if folder is not None and os.path.realpath(folder.parent.parent) in real:
                ours.setdefault(run_id)
            elif run_id not in ours:
                others[run_id] = others.get(run_id) or (str(folder.parent.parent) if folder is not None else None)
    return {"live": list(ours), "elsewhere": [[run_id, others[run_id]] for run_id in others if run_id not in ours]}


def _marked() -> set[tuple[str, Path | None]]:
    """The runs, with their folders, that living processes were started for, or supervise. Where a run began a tmux
    server every shell in it has inherited that run's marks, and is somebody's own all the same."""
    table = [process for process in processes.table() if not process.ended]
    found = {it.pid: processes.environment(it.pid) for it in table}
    found = {pid: marks for pid, marks in found.items() if marks.get(processes.RUN_ID)}
    servers = [pid for pid in found if kin.is_tmux_server(pid)]
    for server in servers:
        inherited = found[server][processes.RUN_ID]
        for pid in kin.lives_in_tmux([server], table):
            if pid in found and found[pid][processes.RUN_ID] == inherited and pid != server:
                del found[pid]
    for server in servers:
        del found[server]
    runs: set[tuple[str, Path | None]] = set()
    for marks in found.values():
        folder = marks.get(processes.RUN_DIR)
        runs.add((os.fsdecode(marks[processes.RUN_ID]), Path(os.fsdecode(folder)) if folder else None))
    for process in table:  # between a crash and a restart there is the supervisor alone
        words = processes.memory_file(process.pid, "cmdline").rstrip(b"\0").split(b"\0")
        if len(words) > 2 and words[-2] == b"supervisor" and b"/runs/" in words[-1]:
            folder = Path(os.fsdecode(words[-1]))
            runs.add((folder.name, folder))
    return runs


def since(paths: Sequence[Path], moment: float) -> dict[str, Any]:
    """moment: seconds since 1970. now: the same, of this clock. checkpoints: of older runs, as RUN/NAME; continued:
    older runs that have written since, with or without a checkpoint."""
    found: dict[str, Any] = {"now": time.time()}
    for path in paths:
        for key, names in _since(path, moment).items():
            found.setdefault(key, []).extend(names)
    return found


def _since(path: Path, moment: float) -> dict[str, list[str]]:
    runs: list[str] = []
    saved: list[str] = []
    continued: list[str] = []
    for folder in rundir.folders(path):
        if _made_at(folder) >= moment:
            runs.append(folder.name)
            continue
        if _written_at(folder) >= moment:
            continued.append(folder.name)
        for name in rundir.checkpoints(folder):
            if _changed_at(folder / "checkpoints" / name) >= moment:
                saved.append(f"{folder.name}/{name}")
    return {
        "runs": runs,
        "continued": continued,
        "checkpoints": saved,
        "releases": [
            name for name in releases.names(path) if _changed_at(path / "releases" / name / releases.MANIFEST) >= moment
        ],
        "environments": [
            name for name in environment.names(path) if _changed_at(path / "env" / name / "pyvenv.cfg") >= moment
        ],
    }


def _made_at(folder: Path) -> float:
    """When a run was made, as its record says; else when its record, or its folder, was last written."""
    try:
        text = str(rundir.read_run(folder).get("created_at"))
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return _changed_at(folder / "run.json") or _changed_at(folder)


def _written_at(folder: Path) -> float:
    """When something of a run was last written: its state, log, metrics, end."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0.0
    return max((_changed_at(folder / name) for name in names if not (folder / name).is_dir()), default=0.0)


def _changed_at(path: Path) -> float:
    """0 for what is not there: it can't be lost."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
