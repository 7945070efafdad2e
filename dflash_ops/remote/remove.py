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
            _refuse_needed(folder, living)
        removed = [_described(folder) for folder in found.values()]
        if not dry_run:
            for folder in found.values():
                group = rundir.facts(folder, boot)["state"].get("cgroup")
                os.rename(folder, folder.with_name(f".{folder.name}.removed"))
                cgroups.remove(group, folder.name)
            if found:
                rundir.sync_folder(path / "runs")
    if not dry_run:
        # Those that an earlier removal left, too.
        gone = [folder for folder in (path / "runs").iterdir() if _GONE.fullmatch(folder.name)]
        stayed = [(folder, why) for folder in gone if (why := _delete(folder))]
        if stayed:
            where = ", ".join(str(folder) for folder, _ in stayed)
            what = "the runs are off the list, but files of them stay on the disk"
            raise answers.Fault("failed", what, stayed[0][1], "remove what holds them, then that folder", where)
    return {"removed": removed}


def _delete(folder: Path) -> str:
    """Deletes a folder, of a link only the link; why something of it stayed, empty when nothing did."""
    try:
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
            return ""
        shutil.rmtree(folder, ignore_errors=True)  # as much as can go
        if folder.exists():
            shutil.rmtree(folder)  # once more, for its error
    except FileNotFoundError:
        return ""  # another removal was at it
    except OSError as error:
        return f"{os.fsdecode(error.filename or folder)}: {error.strerror or error}"
    return ""


def _refuse_living(run: dict[str, Any], living: list[dict[str, Any]]) -> None:
    run_id = run["run_id"]
    stop = f"dflash-ops train stop {run_id}"
    if rundir.lives(run):
        raise answers.Fault("busy", f"run {run_id} goes on", "what goes on is not removed", stop)
    members = rundir.members(run)
    if members:
        who = ", ".join(str(process.pid) for process in members)
        raise answers.Fault("busy", f"run {run_id} has living processes", who, stop)
    # A run that waits for its restart has only its supervisor, which no record names when state.json is torn.
    supervisor = re.compile(rf"/{run_id}/ops supervisor (.*/)?{run_id}$")
    for process in processes.table() if run["exit"] is None else ():
        if not process.ended and supervisor.search(processes.command(process.pid)):
            raise answers.Fault("busy", f"run {run_id} has a living supervisor", str(process.pid), stop)


def _refuse_needed(folder: Path, living: list[dict[str, Any]]) -> None:
    real = folder.resolve()
    for other in living:
        start = other["run"].get("init_from")
        if other["run"].get("resumes") == folder.name or (start and real in Path(start).resolve().parents):
            why = f"it may have to begin from it again: run {other['run_id']} goes on"
            raise answers.Fault("busy", f"run {folder.name} is needed", why, f"dflash-ops train stop {other['run_id']}")


def _described(folder: Path) -> dict[str, Any]:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return {"run_id": folder.name, "size": size, "checkpoints": len(rundir.checkpoints(folder))}
