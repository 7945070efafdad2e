"""Frees GPUs in the container: ends what runs of ours left when they were over, and what else was named; nothing more.

Who may be ended is asked anew before each signal, and a signal goes to a process by pid and start time, so none hits a
stranger. Living runs, who started us, and other containers (which can't be seen from here) are never touched; no GPU is
reset, no setting changed. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, gpuproof, owners, probe, processes

_KILL_SECONDS = 15.0
_MEMORY_SECONDS = 20.0


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    if parameters["wanted"] is None:
        return answers.answer(path, lambda: look(path))
    return answers.answer_with_beats(path, lambda: free(path, parameters))


# -- looking


def look(path: Path) -> dict[str, Any]:
    """Every process here that holds a GPU, and what else lives of the earlier runs that hold one; whose each is, and
    what nvidia-smi charges it with; by run, the files that its freeing would remove."""
    ours = owners.Owners(path)
    picture = gpuproof.look()
    holders = {holder["pid"]: holder for holder in probe.holders() if holder["minors"]}
    found: list[dict[str, Any]] = []
    everything = processes.table()
    above = owners.ancestors()
    owned = {process.pid: ours.of(process) for process in everything if not process.ended}
    stale = {owned[pid].run_id for pid in holders if pid in owned and owned[pid].kind == "earlier"}
    for process in everything:
        owner = owned.get(process.pid)
        rest_of_stale = owner is not None and owner.kind == "earlier" and owner.run_id in stale
        if owner is None or process.pid in above or not (process.pid in holders or rest_of_stale):
            continue
        holder = holders.get(process.pid)
        if holder is not None and holder["start"] != process.start:
            continue  # the pid has changed hands between the two looks
        charged = [mib for _, pid, mib in picture.charges if pid == process.pid]
        found.append(
            {
                **processes.describe(process),
                "parent": process.parent,
                "age_s": round(processes.age_seconds(process), 1),
                "user": holder["user"] if holder else None,
                "minors": holder["minors"] if holder else [],
                "used_mib": sum(mib or 0.0 for mib in charged) if charged else None,
                "owner": owner.kind,
                "run_id": owner.run_id,
            }
        )
    gone = [
        {"pid": pid, "used_mib": mib, "held_by": _heirs(picture, uuid)}
        for uuid, pid, mib in picture.charges
        if processes.read(pid) is None
    ]
    files = {run: [owners.printable(it) for it in owners.files({run})] for run in sorted(filter(None, stale))}
    return {
        "boot_id": ours.boot_id,
        "processes": found,
        "gone": gone,
        "why": "" if picture.missing else picture.why,
        "others": _others(picture),
        "files": files,
    }


def _heirs(picture: gpuproof.Picture, uuid: str) -> list[int]:
    """Who may hold the memory that a dead process is charged with: the living that hold the card and are charged with
    nothing of it."""
    card = picture.card(uuid)
    charged = {pid for of, pid, _ in picture.charges if of == uuid}
    return [it["pid"] for it in gpuproof.holders_of(card) if it["pid"] not in charged] if card else []


def _others(picture: gpuproof.Picture) -> list[dict[str, Any]]:
    """By card, the memory that no process which can be seen from here is charged with."""
    told: list[dict[str, Any]] = []
    for card in picture.cards:
        charged = sum(mib or 0.0 for uuid, _, mib in picture.charges if uuid == card.uuid)
        if card.used is not None:
            told.append({"index": card.index, "mib": max(0.0, card.used - charged)})
    return told


# -- freeing


def free(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Ends what was chosen: SIGTERM, grace, SIGKILL; then waits for the memory. parameters: wanted, as `look` gave
    them; boot_id, of that look."""
    began = time.monotonic()
    ours = owners.Owners(path)
    if ours.boot_id != parameters["boot_id"]:
        raise answers.Fault(
            "busy", "the host was restarted meanwhile", "pids mean others now", "dflash-ops gpu free, again"
        )
    wanted: list[dict[str, Any]] = parameters["wanted"]
    named = {(it["pid"], it["start"]) for it in wanted}
    runs = {it["run_id"] for it in wanted if it["owner"] == "earlier"}
    above = owners.ancestors()

    def left() -> list[processes.Process]:
        """Those that were named, as far as they still are no living run's, and whatever lives of the freed runs."""
        everything = processes.table()  # before the groups are asked: see kin.of_run_and_spared
        grouped: set[int] = set()
        for run_id in runs:
            grouped |= ours.group_of(run_id)
        found: list[processes.Process] = []
        for process in everything:
            if process.ended or process.pid in above:
                continue
            owner = ours.of(process)
            if owner.kind == "run":
                continue
            rest = owner.kind == "earlier" and owner.run_id in runs
            if rest or process.pid in grouped or (process.pid, process.start) in named:
                found.append(process)
        proof.note(found)
        return found

    described: dict[tuple[int, int], dict[str, Any]] = {}

    def tell(process: processes.Process) -> dict[str, Any]:
        """As it is now; with its command of before when it has gone meanwhile."""
        before = described.get((process.pid, process.start))
        now = processes.describe(process)
        if before is not None and now["command"] == processes.GONE:
            now["command"] = before["command"]
        described[process.pid, process.start] = now
        return now

    proof = gpuproof.Proof([], None, [])
    first = left()
    for process in first:
        tell(process)  # before the proof asks nvidia-smi: another free may be ending them
    proof = gpuproof.Proof(first, None, [])
    for process in first:
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)
    grace = float(parameters["grace"])
    processes.wait_until(lambda: not left(), grace, on_wait=lambda s: answers.beat("they end; killed in", s))
    killed = [tell(process) for process in left()]
    kill_seconds = float(parameters.get("kill_seconds", _KILL_SECONDS))
    survivors = [
        tell(process)
        for process in processes.kill_all(left, kill_seconds, on_wait=lambda s: answers.beat("killing what is left", s))
    ]
    back = bool(survivors) or processes.wait_until(
        proof.back, _MEMORY_SECONDS, every=0.2, on_wait=lambda s: answers.beat("waiting for the GPU's memory", s)
    )
    alive = {it["pid"] for it in survivors}
    removed = [] if survivors else owners.remove_files({run for run in runs if run is not None})
    return {
        "seconds": round(time.monotonic() - began, 3),
        "freed": [it for (pid, _), it in described.items() if pid not in alive],
        "killed": [it for it in killed if it["pid"] not in alive],
        "survivors": survivors,
        "removed": removed,
        "gpu": {**proof.result(), "back": back and not survivors},
    }
