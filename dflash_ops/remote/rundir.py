"""Run folders as they lie in the container: reading them, writing their records, and whether a run lives.

<path>/runs/<run id>/ holds run.json (what was started), state.json and exit.json (what the supervisor knows), and the
trainer's own files. Every record is written by rename, so a reader sees a whole one or none. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote import cgroups, kin, logfile, processes
from dflash_ops.remote.answers import Fault, beat, in_the_way

SCHEMA_VERSION = 1
# The locks of a GPU on the hypervisor are files of this name with N.lock and UUID.lock.
GPU_LOCK = "dflash-ops-gpu-"

_RUN_ID = re.compile(r"[a-z0-9-]+-\d{8}-\d{6}-[0-9a-f]{4}")
_STARTING_SECONDS = 60.0


def now() -> str:
    """The time as RFC 3339 in UTC."""
    import datetime

    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_json(path: Path) -> dict[str, Any] | None:
    """The record; None when it is missing or not ours to read (a torn or foreign file is as good as none)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType] # see `_sound`


def write_json(path: Path, record: dict[str, Any], mode: int = 0o644) -> None:
    """Writes the record whole or not at all, and on the disk when this returns."""
    write_file(path, (json.dumps(record, indent=1) + "\n").encode(), mode)


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    sync_folder(path.parent)


def exit_record(run_id: str, code: int | None, **more: Any) -> dict[str, Any]:
    """An exit.json. code: as a shell tells it, None when nobody knows; `more` replaces what is not so by default."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "code": code,
        "signal": None,
        "ended_at": now(),
        "seconds": None,
        "stopped": False,
        "last_lines": [],
        "log_lost_bytes": 0,
        "left": [],
        "oom": False,
        "stalled": False,
        "restarts": [],
    }
    return {**record, **more}


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def start_lock(path: Path, seconds: float = 30.0) -> Generator[None, None, None]:
    """Held while a run is being made, so that two starts, or a start and a stop, see each other whole. Fault("busy")
    after so many seconds; Fault("preflight") when something else has the place of the lock's file."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = _lock_file(path)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            yield  # no file can be made there: nobody makes a run
            return
        opened.callback(os.close, descriptor)

        def taken() -> bool:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not processes.wait_until(taken, seconds, on_wait=lambda left: beat("another start is going on", left)):
            why = f"{path / 'locks' / 'start.lock'} was held for {seconds:.0f} s"
            raise Fault("busy", "another start is going on", why, "run it again later")
        yield


def _lock_file(path: Path) -> int:
    """A descriptor of the lock's file, which is made when it is not there; never another file by way of a link."""
    file = path / "locks" / "start.lock"
    for place, must_be in ((file.parent, Path.is_dir), (file, _is_regular)):
        if os.path.lexists(place) and not must_be(place):
            raise in_the_way(file, place)
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o666)
    except OSError as error:
        if error.errno != errno.EROFS or not file.exists():
            raise
        return os.open(file, os.O_RDONLY | flags)  # a lock needs no right to write


def _is_regular(place: Path) -> bool:
    return stat.S_ISREG(os.lstat(place).st_mode)


def folders(path: Path) -> list[Path]:
    """The run folders, oldest first by this machine's clock: the time in an id is that of the laptop that chose it."""
    try:
        found = [folder for folder in (path / "runs").iterdir() if _RUN_ID.fullmatch(folder.name) and folder.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(found, key=_made_at)


def _made_at(folder: Path) -> tuple[int, str]:
    try:
        return (folder / "run.json").stat().st_mtime_ns, folder.name
    except OSError:
        return 0, folder.name


def name_of(run_id: str) -> str:
    """The name inside a run id: all before -YYYYMMDD-HHMMSS-xxxx."""
    return run_id[:-21]


def find(path: Path, run: str) -> Path:
    """The folder of an exact run id, or of the newest run of that name."""
    every = folders(path)
    for folder in every:
        if folder.name == run:
            return folder
    named = [folder for folder in every if name_of(folder.name) == run]
    if not named:
        known = ", ".join(folder.name for folder in every[-3:]) or "none yet"
        raise Fault("not_found", f"there is no run {run}", f"newest runs: {known}", "dflash-ops train list")
    return named[-1]


def _sound(record: dict[str, Any], fields: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """The record without the fields that are not what they should be: one foreign file must not end every listing."""
    return {name: value for name, value in record.items() if value is None or name not in fields or fields[name](value)}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # false for NaN as well


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_code(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 255


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_record(value: Any) -> bool:
    return isinstance(value, dict)


def _are(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))  # pyright: ignore[reportUnknownArgumentType]


# What is read of the records, here or by dflash_ops.runs.
_RUN_FIELDS = {
    "release": _is_text,
    "created_at": _is_text,
    "resumes": _is_text,
    "init_from": _is_text,
    "gpus": _are(_is_integer),
    "settings": _are(_is_text),
    "env_names": _are(_is_text),
    "command": _are(_is_text),
    "restart": _is_integer,
    "restart_wait": _is_number,
    "stall_minutes": _is_number,
    "log_part_bytes": _is_integer,
}
_STATE_FIELDS = {
    "boot_id": _is_text,
    "state": _is_text,
    "cgroup": _is_text,
    "supervisor": processes.is_identity,
    "child": processes.is_identity,
    "restarts": _are(_is_record),
}
_EXIT_FIELDS = {
    "code": _is_code,
    "signal": _is_code,
    "ended_at": _is_text,
    "seconds": _is_number,
    "stopped": _is_flag,
    "last_lines": _are(_is_text),
    "log_lost_bytes": _is_count,
    "left": _are(_is_record),
    "oom": _is_flag,
    "stalled": _is_flag,
    "restarts": _are(_is_record),
}


def facts(folder: Path, boot: str) -> dict[str, Any]:
    """What the run's folder and the process table say; what it means is for `dflash_ops.runs` to judge."""
    ended = read_exit(folder)
    state = _sound(read_json(folder / "state.json") or {}, _STATE_FIELDS)
    same_boot = state.get("boot_id") == boot
    supervisor_alive = same_boot and processes.alive(state.get("supervisor"))
    if ended is None and not supervisor_alive:
        ended = read_exit(folder)  # it may have ended between the two looks
    return {
        "run_id": folder.name,
        "run": read_run(folder),
        "state": state,
        "exit": ended,
        "status": read_json(folder / "status.json"),
        "supervisor_alive": supervisor_alive,
        "child_alive": same_boot and processes.alive(state.get("child")),
        "starting": not state and _is_new(folder),
        "log_bytes": logfile.end(folder),
        "checkpoints": checkpoints(folder),
    }


def read_run(folder: Path) -> dict[str, Any]:
    """run.json, as far as it is ours."""
    return _sound(read_json(folder / "run.json") or {}, _RUN_FIELDS)


def read_exit(folder: Path) -> dict[str, Any] | None:
    """exit.json, as far as it is ours; None while there is none."""
    ended = read_json(folder / "exit.json")
    return None if ended is None else _sound(ended, _EXIT_FIELDS)


# By the signals that a stop sends, or cleanly: with any other code a stopped trainer has failed by itself.
_CODES_OF_A_STOP = (None, 0, 128 + 2, 128 + 9, 128 + 15)
_CODE_OF_AN_ABORT = 128 + 6


def how_it_ended(ended: dict[str, Any], status: dict[str, Any] | None) -> str:
    """finished, stopped or failed, for everybody who tells. ended: exit.json; status: status.json, which counts only
    where the exit code leaves a choice."""
    code, said = ended.get("code"), (status or {}).get("state")
    if ended.get("stopped") and not (said == "finished" and code == 0):
        aborted = bool(ended.get("stalled")) and code == _CODE_OF_AN_ABORT  # by us, before the stop
        return "stopped" if code in _CODES_OF_A_STOP or aborted else "failed"
    if code == 0 and said == "stopped":
        return "stopped"  # by a signal that was not ours: it saved and ended before its last step
    return "finished" if code == 0 else "failed"


def _is_new(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime < _STARTING_SECONDS
    except OSError:  # removed meanwhile
        return False


def checkpoints(folder: Path) -> list[str]:
    """Names of the run's checkpoints, oldest first."""
    try:
        return sorted(
            entry.name for entry in (folder / "checkpoints").iterdir() if re.fullmatch(r"step-\d+", entry.name)
        )
    except OSError:
        return []


def lives(run: dict[str, Any]) -> bool:
    """Whether the run of these facts goes on, or is just being started."""
    return run["exit"] is None and (run["supervisor_alive"] or run["starting"])


def live_runs(path: Path) -> list[dict[str, Any]]:
    boot = processes.boot_id()
    return [run for run in (facts(folder, boot) for folder in folders(path)) if lives(run)]


def members(run: dict[str, Any]) -> list[processes.Process]:
    """The living processes of the run of these facts, its supervisor left out."""
    return members_and_spared(run)[0]


def members_and_spared(run: dict[str, Any]) -> tuple[list[processes.Process], list[processes.Process]]:
    """As `members`; and what lives in a tmux server that the run began, which no end of the run ends."""
    state: dict[str, Any] = run["state"] if run["state"].get("boot_id") == processes.boot_id() else {}

    def group() -> set[int]:
        return cgroups.pids(state.get("cgroup"), run["run_id"])

    return kin.of_run_and_spared(run["run_id"], state.get("supervisor"), state.get("child"), group)
