"""Whose a process of this container is: of a run that lives, of an earlier run of ours, or of nobody that we know.

Each evidence is sound by itself, and life wins: what anything says belongs to a living run is never an earlier run's.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from dflash_ops.remote import cgroups, kin, processes, rundir


class Owner(NamedTuple):
    """kind: "run" (it lives), "earlier" (a run of ours that is over), "unknown". run_id: the run's."""

    kind: str
    run_id: str | None


UNKNOWN = Owner("unknown", None)


class Owners:
    """The runs below `path`, as they are now, and the processes that are certainly theirs.

    A process belongs to an earlier run when it was started with that run's id and folder, or is in that run's own
    control group; to a living one when it is among its members, its supervisor, or was started with its id. What lives
    in a tmux server that a run began is nobody's but its user's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.boot_id = processes.boot_id()
        self._live: dict[str, dict[str, Any]] = {}
        self._over: dict[str, Path] = {}
        for folder in rundir.folders(path):
            # One that has ended is over, whatever else its folder says: of a thousand runs few are looked at closely.
            run = None if (folder / "exit.json").exists() else rundir.facts(folder, self.boot_id)
            if run is not None and rundir.lives(run):
                self._live[folder.name] = run
            else:
                self._over[folder.name] = folder
        table = processes.table()  # before the groups are asked: see kin.of_run_and_spared
        self._members: dict[tuple[int, int], str] = {}
        for run_id, run in self._live.items():
            supervisor = processes.find(run["state"].get("supervisor")) if run["supervisor_alive"] else None
            for process in [*rundir.members(run), *([supervisor] if supervisor else [])]:
                self._members[process.pid, process.start] = run_id
        grouped = {pid: run_id for run_id in self._over for pid in self.group_of(run_id)}
        self._grouped = {(it.pid, it.start): grouped[it.pid] for it in table if it.pid in grouped}
        # A tmux server that a run began, and people's sessions in it: they have the run's id, and are no rest of it.
        servers = [it.pid for it in table if kin.is_tmux_server(it.pid)]
        begun = [pid for pid in servers if pid in grouped or processes.RUN_ID in processes.environment(pid)]
        self._in_tmux = kin.lives_in_tmux(begun, table)
        self._told: dict[tuple[int, int], Owner] = {}

    def of(self, process: processes.Process) -> Owner:
        """Whose this process is."""
        identity = (process.pid, process.start)
        environment = processes.environment(process.pid)
        named = os.fsdecode(environment.get(processes.RUN_ID, b""))
        owner = UNKNOWN
        if identity in self._members:
            owner = Owner("run", self._members[identity])
        elif process.pid in self._in_tmux:
            pass
        elif not environment and identity in self._told:
            return self._told[identity]  # one that hangs on its way out has lost its environment, and is whose it was
        elif named in self._live:
            owner = Owner("run", named)
        elif named in self._over and environment.get(processes.RUN_DIR) == os.fsencode(self.path / "runs" / named):
            owner = Owner("earlier", named)
        elif identity in self._grouped:
            owner = Owner("earlier", self._grouped[identity])
        if environment:
            self._told[identity] = owner
        return owner

    def group_of(self, run_id: str) -> set[int]:
        """The pids in the control group of an earlier run, now."""
        state = rundir.read_json(self._over[run_id] / "state.json") if run_id in self._over else None
        return cgroups.pids(state.get("cgroup"), run_id) if state and state.get("boot_id") == self.boot_id else set()

    def remove_groups(self) -> None:
        """Removes the control groups of earlier runs that are empty now."""
        for run_id, folder in self._over.items():
            state = rundir.read_json(folder / "state.json") or {}
            cgroups.remove(state.get("cgroup"), run_id)

    def runs(self, named: set[str]) -> list[dict[str, Any]]:
        """The facts of the living runs, of those that are named, and of the newest one."""
        newest = list(self._over)[-1:]
        over = [run_id for run_id in self._over if run_id in named or run_id in newest]
        return [*self._live.values(), *(rundir.facts(self._over[run_id], self.boot_id) for run_id in over)]


# Where a run's processes leave shared memory and temporary files.
_TEMPORARY = ("/dev/shm", "/tmp", "/var/tmp")


def files(runs: set[str]) -> list[str]:
    """The shared memory and temporary files whose names carry one of these runs' whole id, without what another user
    owns or what lies on a mount."""
    marks = [re.compile(rf"(?<![A-Za-z0-9-]){re.escape(run)}(?![A-Za-z0-9-])") for run in sorted(runs)]
    found: list[str] = []
    mounted = _mount_points() if marks else []
    for folder in _TEMPORARY if marks and mounted is not None else ():
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if not any(mark.search(name) for mark in marks):
                continue
            file = os.path.join(folder, name)
            below = os.path.join(os.path.realpath(folder), name)
            if any(point == below or point.startswith(f"{below}/") for point in mounted or ()):
                continue  # its files are somebody's, by another name
            try:
                own = os.lstat(file).st_uid == os.geteuid()
            except OSError:
                continue  # gone meanwhile
            found += [file] if own else []
    return found


def remove_files(runs: set[str]) -> list[str]:
    """Removes `files`; what links point to stays. Says which, for people."""
    removed: list[str] = []
    for file in files(runs):
        try:
            if os.path.isdir(file) and not os.path.islink(file):
                import shutil  # with all its kinds of archives

                shutil.rmtree(file)
            else:
                os.unlink(file)
        except OSError:
            continue  # in use, or gone meanwhile
        removed.append(printable(file))
    return removed


def printable(name: str) -> str:
    """A file's name for people: bytes that are not UTF-8, and control characters, as escapes."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _mount_points() -> list[str] | None:
    """Where something is mounted, as this namespace sees it; None when that can't be read."""
    try:
        rows = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")
    except OSError:
        return None
    octal = re.compile(r"\\([0-7]{3})")  # a space is \040
    return [octal.sub(lambda it: chr(int(it.group(1), 8)), row.split(" ")[4]) for row in rows if row.count(" ") > 4]


def ancestors() -> set[int]:
    """Our own pid and those of who started us: what no verb may end."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = processes.read(pid)
        pid = process.parent if process is not None else 0
    return found
