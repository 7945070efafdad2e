"""Ends one run: SIGTERM, grace, then every process of it, and the proof that none is left.

Nothing else is ever signalled: no tmux server, not even one that the run itself began, nor what lives in it; no other
run; nothing by name, and no cgroup but the run's own (every lxc-attach shares one). Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dflash_ops.remote import answers, cgroups, gpuproof, probe, processes, rundir

_SUPERVISOR_SECONDS = 20.0  # it may still be clearing what the trainer left


class Limits(NamedTuple):
    """Seconds: for the run to save and end by itself, for SIGKILL to take effect, for GPU memory to be free again."""

    grace: float
    kill_seconds: float = 15.0
    memory_seconds: float = 20.0


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    limits = Limits(float(parameters["grace"]))
    for name in ("kill_seconds", "memory_seconds"):
        if name in parameters:
            limits = limits._replace(**{name: float(parameters[name])})
    again = bool(parameters.get("again"))
    return answers.answer_with_beats(path, lambda: stop(path, parameters["run"], limits, again=again))


def stop(path: Path, run: str | None, limits: Limits, *, again: bool = False) -> dict[str, Any]:
    """Stops the run, or the only one that lives. Fault not_found when nothing of it runs; not so when asked `again`,
    since an earlier try, whose answer was lost, may have ended it."""
    with rundir.start_lock(path):  # a start that is going on ends first: its run then is whole
        folder = _target(path, run)
    return stop_folder(folder, limits, again=again)


def stop_folder(folder: Path, limits: Limits, *, again: bool = False) -> dict[str, Any]:
    """Stops this run; the answer names what would not die, with where it hangs in the kernel, and what GPU memory is
    not back."""
    began = time.monotonic()
    boot = processes.boot_id()
    run = rundir.facts(folder, boot)
    members = rundir.members(run)
    same_boot = run["state"].get("boot_id") == boot
    child = run["state"].get("child") if same_boot else None
    supervisor = processes.find(run["state"].get("supervisor")) if run["supervisor_alive"] else None
    proof = gpuproof.Proof(members, child, run["run"].get("gpus") or [])
    over = not members and (supervisor is None or run["exit"] is not None)
    if over and not again and (not same_boot or proof.back()):
        why = _ended(run["exit"]) if run["exit"] is not None else "its supervisor was lost and nothing of it lives"
        raise answers.Fault("not_found", f"run {folder.name} is not running", why, "dflash-ops train list")
    trainer = processes.find(child) if run["child_alive"] else None
    for process in [supervisor] if supervisor else [trainer] if trainer else members:
        processes.send(process, signal.SIGTERM)
    for process in ([supervisor] if supervisor else []) + members:
        if process.state == "T":
            processes.send(process, signal.SIGCONT)  # a stopped process can't save

    def left() -> list[processes.Process]:
        found = rundir.members(rundir.facts(folder, boot))  # anew: the supervisor may have begun another attempt
        proof.note(found)
        return found

    def spared() -> list[processes.Process]:
        return rundir.members_and_spared(rundir.facts(folder, boot))[1]

    def gone() -> bool:
        return not processes.alive(run["state"].get("supervisor")) and not left()

    killed: list[dict[str, Any]] = []
    if not processes.wait_until(gone, limits.grace, on_wait=_say("it saves and ends; killed in", run)):
        killed = [processes.describe(process) for process in left()]
        if not spared():  # they are in the group too
            cgroups.kill(run["state"].get("cgroup"), folder.name)
        processes.kill_all(left, limits.kill_seconds, on_wait=_say("killing what is left", run))
        # One that will not die still holds the GPU: the supervisor stays, with its lock, and records the end.
        if supervisor and not left():
            ends = _say("its supervisor ends", run)
            if not processes.wait_until(gone, _SUPERVISOR_SECONDS, on_wait=ends):
                _end_supervisor(folder, supervisor)
    # The proof: a scan that finds nothing. What was killed needs a moment to be gone.
    processes.wait_until(lambda: not left(), 1.0)
    survivors = [processes.describe(process) for process in left()]
    back = bool(survivors) or processes.wait_until(
        proof.back, limits.memory_seconds, every=0.2, on_wait=_say("waiting for the GPU's memory", run)
    )
    if not survivors:
        cgroups.remove(run["state"].get("cgroup"), folder.name)
    return {
        "run_id": folder.name,
        "seconds": round(time.monotonic() - began, 3),
        "was_lost": supervisor is None and run["exit"] is None,
        "killed": killed,
        "survivors": survivors,
        "gpu": {**proof.result(), "back": back and not survivors},
        "spared": [{**processes.describe(it), "holds": _holds(it, folder)} for it in spared()],
        "facts": rundir.facts(folder, boot),
    }


def _holds(process: processes.Process, folder: Path) -> str:
    """What of the run a process still holds that the stop leaves alone: a GPU, or a file of the run's folder."""
    links = processes.open_files(process.pid)
    minors = probe.minors_of(process.pid, links)
    if minors:
        return "GPU " + ", ".join(map(str, minors))
    return next((link for link in links if link.startswith(f"{folder}/")), "")


def _say(doing: str, run: dict[str, Any]) -> Callable[[float], None]:
    return lambda left: answers.beat(f"run {run['run_id']}: {doing}", left)


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
        with contextlib.suppress(OSError):  # a disk that takes nothing: the run is lost then
            rundir.write_json(folder / "exit.json", rundir.exit_record(folder.name, None, stopped=True))


def _ended(exit_record: dict[str, Any]) -> str:
    if exit_record.get("ended_at") is None:
        return "it has ended; its record does not say how"
    if exit_record.get("code") is None:
        return f"it ended at {exit_record['ended_at']} without an exit code"
    return f"it ended at {exit_record['ended_at']} with exit code {exit_record['code']}"
