"""Ends one run: SIGTERM, grace, then every process of it, and the proof that none is left.

Nothing else is ever signalled: not the tmux server, not another run, nothing by name or by cgroup (every lxc-attach
shares one). Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, processes, rundir

_KILL_SECONDS = 15.0
_SUPERVISOR_SECONDS = 20.0  # it may still be clearing what the trainer left


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: stop(path, parameters["run"], grace=float(parameters["grace"])))


def stop(path: Path, run: str | None, grace: float) -> dict[str, Any]:
    """Stops the run, or the only one that lives. Fault not_found when nothing of it runs."""
    with rundir.start_lock(path):  # a start that is going on ends first: its run then is whole
        folder = _target(path, run)
    return stop_folder(folder, grace)


def stop_folder(folder: Path, grace: float) -> dict[str, Any]:
    """Stops this run; the answer names what would not die, with where it hangs in the kernel."""
    began = time.monotonic()
    boot = processes.boot_id()
    run = rundir.facts(folder, boot)
    members = rundir.members(run)
    if run["exit"] is not None and not members:
        raise answers.Fault(
            "not_found", f"run {folder.name} is not running", _ended(run["exit"]), "dflash-ops train list"
        )
    supervisor = processes.find(run["state"].get("supervisor")) if run["supervisor_alive"] else None
    if supervisor is None and not members:
        raise answers.Fault(
            "not_found",
            f"run {folder.name} is not running",
            "its supervisor was lost and nothing of it lives",
            "dflash-ops train list",
        )
    trainer = processes.find(run["state"].get("child")) if run["child_alive"] else None
    for process in [supervisor] if supervisor else [trainer] if trainer else members:
        processes.send(process, signal.SIGTERM)
    for process in ([supervisor] if supervisor else []) + members:
        if process.state == "T":
            processes.send(process, signal.SIGCONT)  # a stopped process can't save

    def gone() -> bool:
        return not processes.alive(run["state"].get("supervisor")) and not rundir.members(run)

    killed: list[dict[str, Any]] = []
    if not processes.wait_until(gone, grace):
        killed = [processes.describe(process) for process in rundir.members(run)]
        processes.kill_all(lambda: rundir.members(run), _KILL_SECONDS)
        if supervisor and not processes.wait_until(gone, _SUPERVISOR_SECONDS):
            _end_supervisor(folder, supervisor)
    # The proof: a scan that finds nothing. What was killed needs a moment to be gone.
    processes.wait_until(lambda: not rundir.members(run), 1.0)
    survivors = [processes.describe(process) for process in rundir.members(run)]
    after = rundir.facts(folder, boot)
    return {
        "run_id": folder.name,
        "seconds": round(time.monotonic() - began, 3),
        "was_lost": supervisor is None,
        "killed": killed,
        "survivors": survivors,
        "facts": after,
    }


def _target(path: Path, run: str | None) -> Path:
    if run is not None:
        folder = rundir.find(path, run)
        if folder.name == run:
            return folder
        # By name: the newest of that name, unless an older one still has processes.
        boot = processes.boot_id()
        named = [other for other in rundir.folders(path) if rundir.name_of(other.name) == run]
        return next((other for other in reversed(named) if rundir.members(rundir.facts(other, boot))), folder)
    live = rundir.live_runs(path)
    if not live:
        boot = processes.boot_id()
        lost = [
            facts for facts in (rundir.facts(folder, boot) for folder in rundir.folders(path)) if rundir.members(facts)
        ]
        live = lost
    if not live:
        raise answers.Fault("not_found", "nothing is running", "", "dflash-ops train list")
    if len(live) > 1:
        names = ", ".join(facts["run_id"] for facts in live)
        raise answers.Fault("busy", "which run?", f"running are {names}", "dflash-ops train stop RUN")
    return path / "runs" / live[0]["run_id"]


def _end_supervisor(folder: Path, supervisor: processes.Process) -> None:
    """For a supervisor that does not end though its trainer has: it goes too, and its record is written for it."""
    processes.send(supervisor, signal.SIGKILL)
    processes.wait_until(lambda: not processes.alive(supervisor.identity()), 5.0)
    if not (folder / "exit.json").exists():
        rundir.write_json(folder / "exit.json", rundir.exit_record(folder.name, None, stopped=True))


def _ended(exit_record: dict[str, Any]) -> str:
    if exit_record.get("ended_at") is None:
        return "it has ended; its record does not say how"
    return f"it ended at {exit_record['ended_at']} with exit code {exit_record.get('code')}"
