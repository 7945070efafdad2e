"""What was started by hand: tmux sessions of the container's default server, and who else holds a GPU; and their end.

A session's processes are those below its panes and those that were started in one of them, by tmux's own words in their
environment. tmux servers, runs of ours, and whatever was started elsewhere are never touched. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, cgroups, gpuproof, kin, probe, processes, rundir

TMUX_SECONDS = 15.0
_KILL_SECONDS = 15.0
_MEMORY_SECONDS = 20.0
_TMUX = ("tmux", "-L", "default")
_FIELDS = ("session_name", "session_created", "session_attached", "pid", "socket_path", "pane_id", "pane_pid")
_SHELLS = {"bash", "sh", "dash", "zsh", "fish", "ksh", "ash"}
_SHOW = "dflash-ops train list --all"


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    name = parameters.get("stop")
    if name is None:
        return answers.answer(path, lambda: listing(path))
    kill = float(parameters.get("kill_seconds", _KILL_SECONDS))
    return answers.answer_with_beats(path, lambda: stop(path, name, float(parameters["grace"]), kill))


def listing(path: Path) -> dict[str, Any]:
    """The runs, the sessions, and the processes with a GPU that are of no run and no session."""
    boot = processes.boot_id()
    runs = [rundir.facts(folder, boot) for folder in rundir.folders(path)]
    holders = {holder["pid"]: holder for holder in probe.holders() if holder["minors"]}
    charges: dict[int, float] = {}
    if holders:
        for _, pid, mib in gpuproof.look().charges:
            charges[pid] = charges.get(pid, 0.0) + (mib or 0.0)
    ours = _of_runs(path)
    sessions: list[dict[str, Any]] = []
    seen: set[int] = set()
    for session in _sessions():
        members = _members(session, _spared(path))
        seen |= {process.pid for process in members}
        described = [_described(process, holders, charges) for process in members]
        shown = {key: session[key] for key in ("name", "created_at", "attached")}
        sessions.append({**shown, "processes": described})
    # An open device without a charge is a monitor's; but where the charged one is dead it may be its heir's, and where
    # nobody is charged the driver does not tell.
    all_count = not charges or any(processes.read(pid) is None for pid in charges)
    others = [
        _described(process, holders, charges)
        for process in (processes.read(pid) for pid in holders if pid not in seen and pid not in ours)
        if process is not None and (process.pid in charges or all_count)
    ]
    return {"runs": runs, "sessions": sessions, "gpu_processes": others}


def stop(path: Path, name: str, grace: float, kill: float) -> dict[str, Any]:
    """Ends the session of exactly this name, and its processes: SIGTERM, grace, the session, SIGKILL, a new scan, and
    the GPU memory back. Panes that another session shows too (a group, a linked window) go on there."""
    began = time.monotonic()
    every = _sessions()
    session = next((session for session in every if session["name"] == name), None)
    if session is None:
        names = ", ".join(session["name"] for session in every) or "none"
        raise answers.Fault("not_found", f"there is no session {name!r}", f"tmux has: {names}", _SHOW)
    ours = _spared(path)
    # Remembered, since without its session a process is known by its environment alone.
    shared = {pane for other in every if other["id"] != session["id"] for pane in other["panes"]}
    panes: dict[str, Any] = {
        **session,
        "panes": {pane: pid for pane, pid in session["panes"].items() if pane not in shared},
    }
    also = sorted(other["name"] for other in every if other is not session and other["panes"].keys() & session["panes"])
    known: dict[int, processes.Process] = {}

    def left() -> list[processes.Process]:
        for process in _members(panes, ours):
            known.setdefault(process.pid, process)
        below: set[int] = set()
        everything = processes.table()
        for process in known.values():
            if processes.alive(process.identity()):
                below |= kin.descendants(process, everything) | {process.pid}
        found = [process for process in everything if process.pid in below and not process.ended]
        found = _may_be_ended(found, ours)
        proof.note(found)
        return found

    first, spared = _members(panes, ours), _not_ended(panes, ours)
    ended = [processes.describe(process) for process in first]
    proof = gpuproof.Proof(first, None, [])
    for process in left():
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)
    processes.wait_until(
        lambda: all(_is_idle_shell(process) for process in left()),
        grace,
        on_wait=lambda left: answers.beat(f"session {name}: its processes end; killed in", left),
    )
    _tmux("kill-session", "-t", panes["id"])  # by id: tmux would take a name such as $1 for one
    processes.wait_until(lambda: not left(), 1.0)
    killed = [processes.describe(process) for process in left() if not _is_idle_shell(process)]
    processes.kill_all(left, kill, on_wait=lambda left: answers.beat(f"session {name}: killing what is left", left))
    survivors = [processes.describe(process) for process in left()]
    back = bool(survivors) or processes.wait_until(
        proof.back, _MEMORY_SECONDS, every=0.2, on_wait=lambda left: answers.beat("waiting for the GPU's memory", left)
    )
    still = any(session["id"] == panes["id"] and session["server"] == panes["server"] for session in _sessions())
    return {
        "session": name,
        "seconds": round(time.monotonic() - began, 3),
        "ended": ended,
        "killed": killed,
        "survivors": survivors,
        "session_left": still,
        "spared": [processes.describe(process) for process in spared],
        "also_in": also,
        "gpu": {**proof.result(), "back": back and not survivors},
    }


def _sessions() -> list[dict[str, Any]]:
    """The sessions of root's default tmux server; none without a server or without tmux."""
    words = "\t".join(f"#{{{name}}}" for name in ("session_id", *_FIELDS))
    done = _tmux("list-panes", "-a", "-F", words)
    found: dict[str, dict[str, Any]] = {}
    if done is None or done.returncode != 0:
        return []
    for row in done.stdout.decode("utf-8", "replace").split("\n"):
        cells = row.split("\t")
        if len(cells) != len(_FIELDS) + 1 or not (cells[4].isdigit() and cells[7].isdigit()):
            continue
        number, name, created, attached, server, socket, pane, pid = cells
        moment = time.gmtime(int(created)) if created.isdigit() else None
        session = found.setdefault(
            number,
            {
                "id": number,
                "name": name,
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment) if moment else None,
                "attached": attached not in ("", "0"),
                "server": int(server),
                "socket": socket,
                "panes": {},
            },
        )
        session["panes"][pane] = int(pid)
    return list(found.values())


def _tmux(*words: str) -> subprocess.CompletedProcess[bytes] | None:
    environment = {key: value for key, value in os.environb.items() if key not in (b"TMUX", b"TMUX_PANE")}
    try:
        return subprocess.run(
            [*_TMUX, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=TMUX_SECONDS, env=environment
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        why = f"tmux gave no answer in {TMUX_SECONDS:.0f} s"
        raise answers.Fault("failed", "the tmux server hangs", why, "in the container: tmux -L default ls") from None


def _members(session: dict[str, Any], ours: set[int]) -> list[processes.Process]:
    """The session's living processes that its end may end, those that ran away from it included."""
    return _may_be_ended(_all_of(session), ours)


def _not_ended(session: dict[str, Any], ours: set[int]) -> list[processes.Process]:
    """The session's living processes that its end leaves alone: tmux servers, and what is of a run."""
    every = _all_of(session)
    ends = {process.pid for process in _may_be_ended(every, ours)}
    return [process for process in every if process.pid not in ends]


def _all_of(session: dict[str, Any]) -> list[processes.Process]:
    everything = processes.table()
    pids: set[int] = set()
    for pid in session["panes"].values():
        root = processes.read(pid)
        if root is not None and root.parent == session["server"]:
            pids |= kin.descendants(root, everything) | {pid}
    # TMUX=socket,server's pid,session; a pane's id is never given twice by one server.
    mark = f"{session['socket']},{session['server']},".encode()
    for process in everything:
        environment = processes.environment(process.pid)
        pane = os.fsdecode(environment.get(b"TMUX_PANE", b""))
        if pane in session["panes"] and environment.get(b"TMUX", b"").startswith(mark):
            pids.add(process.pid)
    return [process for process in everything if process.pid in pids and not process.ended]


def _may_be_ended(found: list[processes.Process], ours: set[int]) -> list[processes.Process]:
    """Not a tmux server and its sessions, which are others; nothing of a run; not us nor who started us."""
    servers = [process.pid for process in found if kin.is_tmux_server(process.pid)]
    spared = ours | _ancestors() | kin.lives_in_tmux(servers, processes.table() if servers else [])
    return [process for process in found if process.pid not in spared]


def _of_runs(path: Path) -> set[int]:
    """Every process of the runs of this folder, supervisors included, and what ended runs left."""
    boot = processes.boot_id()
    found: set[int] = set()
    ids: set[bytes] = set()
    for folder in rundir.folders(path):
        run = rundir.facts(folder, boot)
        ids.add(os.fsencode(folder.name))
        if run["state"].get("boot_id") == boot:
            supervisor = processes.find(run["state"].get("supervisor"))
            found |= {supervisor.pid} if supervisor else set()
            if run["exit"] is None or cgroups.pids(run["state"].get("cgroup"), folder.name):
                found |= {process.pid for process in rundir.members(run)}
    return found | {pid for pid, run_id in _marked().items() if run_id in ids}


def _marked() -> dict[int, bytes]:
    """The processes that were started with a run's id, with it. Where a run began a tmux server every shell in it has
    inherited that run's id, and is somebody's own all the same."""
    everything = processes.table()
    marked = {it.pid: processes.environment(it.pid).get(processes.RUN_ID) for it in everything}
    marked = {pid: run_id for pid, run_id in marked.items() if run_id is not None}
    servers = {pid: run_id for pid, run_id in marked.items() if kin.is_tmux_server(pid)}
    for server, inherited in servers.items():
        for pid in kin.lives_in_tmux([server], everything):
            if marked.get(pid) == inherited:
                del marked[pid]
    return marked


def _spared(path: Path) -> set[int]:
    """What the end of a session never touches: processes of any run, of whatever folder."""
    return _of_runs(path) | _marked().keys()


def _ancestors() -> set[int]:
    found: set[int] = set()
    pid = os.getpid()
    while pid > 1 and pid not in found:
        found.add(pid)
        process = processes.read(pid)
        pid = process.parent if process is not None else 0
    return found


def _is_idle_shell(process: processes.Process) -> bool:
    """A prompt that nobody has typed at: it ignores SIGTERM and goes with its session."""
    if processes.comm(process.pid) not in _SHELLS:
        return False
    return not any(other.parent == process.pid and not other.ended for other in processes.table())


def _described(
    process: processes.Process, holders: dict[int, dict[str, Any]], charges: dict[int, float]
) -> dict[str, Any]:
    holder = holders.get(process.pid)
    return {
        **processes.describe(process),
        "age_s": round(processes.age_seconds(process), 1),
        "gpus": holder["minors"] if holder else [],
        "used_mib": charges.get(process.pid),
    }
