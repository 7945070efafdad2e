"""Removes runs that are over: never one that goes on, has living processes, or that a living one began from.

All of them can go, or none goes. Each leaves by one rename, so that a removal killed half way leaves no half run.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, cgroups, processes, rundir

_GONE = re.compile(r"\..*\.removed")


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: remove(path, parameters["runs"], dry_run=parameters["dry_run"]))


def remove(path: Path, names: list[str], *, dry_run: bool) -> dict[str, Any]:
    """names: ids, or a name for the newest of it. dry_run: says what would go."""
    with rundir.start_lock(path):
        found = {folder.name: folder for folder in (rundir.find(path, name) for name in names)}
        boot = processes.boot_id()
        living = rundir.live_runs(path)
        for folder in found.values():
            _refuse_living(rundir.facts(folder, boot), living)
        removed = [_described(folder) for folder in found.values()]
        if not dry_run:
            for folder in found.values():
                group = rundir.facts(folder, boot)["state"].get("cgroup")
                os.rename(folder, folder.with_name(f".{folder.name}.removed"))
                cgroups.remove(group, folder.name)
            if found:
                rundir.sync_folder(path / "runs")
    if not dry_run:
        for folder in (path / "runs").iterdir():  # those that an earlier removal left, too
            if _GONE.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
    return {"removed": removed}


def _refuse_living(run: dict[str, Any], living: list[dict[str, Any]]) -> None:
    run_id = run["run_id"]
    stop = f"dflash-ops train stop {run_id}"
    if rundir.lives(run):
        raise answers.Fault("busy", f"run {run_id} goes on", "what goes on is not removed", stop)
    members = rundir.members(run)
    if members:
        who = ", ".join(str(process.pid) for process in members)
        raise answers.Fault("busy", f"run {run_id} has living processes", who, stop)
    for other in living:
        if other["run"].get("resumes") == run_id:
            why = f"it may have to begin from it again: run {other['run_id']} goes on"
            raise answers.Fault("busy", f"run {run_id} is needed", why, f"dflash-ops train stop {other['run_id']}")


def _described(folder: Path) -> dict[str, Any]:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return {"run_id": folder.name, "size": size, "checkpoints": len(rundir.checkpoints(folder))}
