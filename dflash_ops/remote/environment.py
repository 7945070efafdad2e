"""The container's environments: <path>/env/<id> is a venv, `current` there leads to the one that the trainer runs by.

Its id is a digest of what it was made from: the lock, the container's pins, its Python. `env.json` in it is written
last: without one it is what a killed build left. Where no environment was ever made, the trainer runs by the `python`
of the inventory. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, locks, releases, requirements, rundir
from dflash_ops.remote.answers import Fault
from dflash_ops.remote.requirements import Lock, Pins

RECORD = "env.json"
# Before the name of one that is being removed.
DOOMED = ".gone-"
# Who uses an environment, where it is no run.
WARMING = "env warm"

_LOOK_SECONDS = 60.0
_SMI_SECONDS = 10.0
_SHOWN = 5
_SYNC = "dflash-ops env sync"
# The oldest driver for each CUDA, by NVIDIA's rule that minor versions run on every driver of their major one.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}

# What a Python has, told by itself: names of folders alone, since torch takes seconds to import.
_LOOK = r"""
import json, os, platform, re, sys
packages, cuda = {}, None
for folder in sys.path:
    try:
        names = os.listdir(folder)
    except OSError:
        continue
    for name in names:
        found = re.fullmatch(r"([^~].*?)-([^-]+)(?:-py[\d.]+)?\.(?:dist-info|egg-info)", name)
        if found:
            packages.setdefault(re.sub(r"[-_.]+", "-", found.group(1)).lower(), found.group(2))
    if cuda is None and "torch" in names:
        try:
            with open(os.path.join(folder, "torch", "version.py")) as file:
                found = re.search(r"^cuda\b[^=]*=\s*(?:'([\d.]+)'|None)", file.read(), re.MULTILINE)
            cuda = (found.group(1) or "none") if found else None
        except OSError:
            pass
system = platform.uname()
print(json.dumps({
    "packages": packages,
    "torch_cuda": cuda,
    "glibc": platform.libc_ver()[1],
    "facts": {
        "python_version": "%d.%d" % sys.version_info[:2],
        "python_full_version": platform.python_version(),
        "implementation_name": sys.implementation.name,
        "implementation_version": platform.python_version(),
        "platform_python_implementation": platform.python_implementation(),
        "os_name": os.name,
        "sys_platform": sys.platform,
        "platform_system": system.system,
        "platform_machine": system.machine,
        "platform_release": system.release,
        "platform_version": system.version,
        "extra": "",
    },
}))
"""


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: _VERBS[parameters["do"]](path, parameters))


# -- for others


def python_of(path: Path, python: str) -> str:
    """What runs the trainer: the current environment's Python by its real path, so that a run keeps the one it started
    with; `python` where none was ever made. Fault when the current one is not whole."""
    link = path / "env" / "current"
    if not os.path.lexists(link):
        return python
    folder = Path(os.path.realpath(link))
    if rundir.read_json(folder / RECORD) is None or not os.access(folder / "bin" / "python", os.X_OK):
        raise Fault("preflight", "the environment is not whole", f"{link} leads to {folder}", _SYNC, str(path / "env"))
    return str(folder / "bin" / "python")


@contextlib.contextmanager
def python_kept(path: Path, python: str) -> Generator[str, None, None]:
    """What `python_of` gives; its environment counts as used until the block ends, though no run shows that."""
    with contextlib.ExitStack() as held:
        with rundir.start_lock(path):  # a prune that goes on has chosen what goes
            chosen = python_of(path, python)
            folder = os.path.dirname(os.path.dirname(chosen))
            if os.path.exists(os.path.join(folder, RECORD)):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield chosen


def refuse_mismatch(path: Path, release: Path, python: str, wanted: dict[str, Any]) -> None:
    """Fault("preflight") with both columns when a Python (what `python_of` gave) has not what the release wants. A
    release without a lock wants nothing. wanted: {"pins": {...}, "check": bool, "gpus": bool} of the inventory."""
    if not wanted["check"] or not (release / requirements.NAME).is_file():
        return
    rows = compare(read_lock(release), Pins(**wanted["pins"]), look(python), wanted["gpus"])
    wrong = [row for row in rows if not row["ok"]]
    if wrong:
        said = [told(row) for row in wrong[:_SHOWN]]
        more = f" (and {len(wrong) - _SHOWN} more: dflash-ops env check)" if len(wrong) > _SHOWN else ""
        where = f"release {release.name}, {python}"
        advice = f"{_SYNC}; or say in the inventory what this container has: pins, or env_check = false"
        raise Fault("preflight", "the environment is not what the release wants", "; ".join(said) + more, advice, where)


# -- verbs


def check(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Every row of the comparison, for the current environment and the release asked for."""
    release = release_folder(path, parameters["release"])
    python = python_of(path, parameters["python"])
    rows = compare(read_lock(release), Pins(**parameters["pins"]), look(python), parameters["gpus"])
    return {"release": release.name, "python": python, "environment": current(path), "rows": rows}


def list_all(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """All environments, the oldest first, and the living runs that use each."""
    del parameters
    return {"current": current(path), "environments": [describe(path, name) for name in names(path)]}


_VERBS = {"check": check, "list": list_all}


# -- reading


def current(path: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(path / "env" / "current"))
    except OSError:
        return None


def names(path: Path) -> list[str]:
    """The ids of all environments, the oldest first; also of those that no build has finished."""
    try:
        found = [
            entry
            for entry in (path / "env").iterdir()
            if (entry / "pyvenv.cfg").is_file() and not entry.is_symlink() and not entry.name.startswith(DOOMED)
        ]
    except FileNotFoundError:
        return []
    return [
        entry.name for entry in sorted(found, key=lambda entry: ((entry / "pyvenv.cfg").stat().st_mtime, entry.name))
    ]


def describe(path: Path, name: str) -> dict[str, Any]:
    record = rundir.read_json(path / "env" / name / RECORD)
    return {
        "id": name,
        "whole": record is not None,
        "current": name == current(path),
        "used_by": users(path, name),
        **{key: (record or {}).get(key) for key in ("made_at", "python", "torch", "transformers", "bytes", "release")},
    }


def users(path: Path, name: str) -> list[str]:
    """The living runs of an environment, and WARMING. Both sides by their real paths: a run knows its Python by that,
    and links may lead here."""
    folder = os.path.realpath(path / "env" / name)
    found: list[str] = []
    for run in rundir.live_runs(path):
        command = run["run"].get("command")
        if isinstance(command, list) and command:
            bin_folder = os.path.dirname(str(command[0]))  # pyright: ignore[reportUnknownArgumentType]
            if os.path.dirname(os.path.realpath(bin_folder)) == folder:
                found.append(run["run_id"])
    return [*found, WARMING] if locks.is_held(folder) else found  # by somebody in `python_kept`


def release_folder(path: Path, wanted: str | None) -> Path:
    """The release asked for, else the current one, by its real path."""
    if wanted is not None and wanted not in releases.names(path):
        every = releases.names(path)
        near = [name for name in every if name.startswith(wanted[:8])][-1:] or every[-1:]
        why = f"nearest: {near[0]}" if near else "there is none yet"
        raise Fault("not_found", f"there is no release {wanted}", why, "dflash-ops releases")
    found = wanted or releases.current(path)
    if found is None:
        raise Fault("not_found", "nothing is deployed", f"{path / 'current'} is missing", "dflash-ops deploy")
    return path / "releases" / found


def read_lock(release: Path) -> Lock:
    place = release / requirements.NAME
    try:
        return requirements.parse(place.read_text(encoding="utf-8"), str(place))
    except (FileNotFoundError, NotADirectoryError):
        why = f"it has no {requirements.NAME}"
        raise Fault("not_found", f"release {release.name} does not say what it needs", why, "deploy one") from None
    except UnicodeDecodeError as error:
        raise Fault("config", "the lock is no text", str(error), "make it anew", str(place)) from None


def look(python: str) -> dict[str, Any]:
    """What a Python has: {"packages": {name: version}, "torch_cuda", "glibc", "facts"}."""
    words = [python, "-I", "-c", _LOOK]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_SECONDS)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Fault("preflight", "that Python does not run", str(error), _SYNC, python) from None


def environment_id(lock: bytes, pins: dict[str, Any], facts: dict[str, str], interpreter: str) -> str:
    """Of what an environment is made from: the same always gives the same. interpreter: the Python that it leads to,
    by its real path."""
    python = [facts["python_full_version"], facts["implementation_name"], interpreter, platform.machine()]
    made_from = [hashlib.sha256(lock).hexdigest(), sorted(pins.items()), *python]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]


# -- comparing


def compare(lock: Lock, pins: Pins, has: dict[str, Any], gpus: bool) -> list[dict[str, Any]]:
    """[{"name", "wanted", "has", "ok"}]: Python, CUDA, driver, torch, transformers, then all others by name. wanted:
    None where nothing is. gpus: whether the container has any, so that a driver must be there."""
    facts, packages, cuda = has["facts"], has["packages"], lock.cuda(pins)
    oldest, python = lock.python, facts["python_full_version"]
    old = oldest is not None and not requirements.applies(f"python_full_version >= '{oldest}'", facts)
    rows = [_row("python", oldest and f">= {oldest}", python, not old)]
    rows.append(_row("CUDA of torch", cuda, has["torch_cuda"], cuda is None or cuda == has["torch_cuda"]))
    rows.append(_driver(cuda if cuda != "none" else None, gpus))
    wanted = {package.name: package.version for package in lock.kept(pins, facts)}
    wanted.update(lock.pinned(pins))
    first = [name for name in ("torch", "transformers") if name in wanted]
    for name in (*first, *sorted(wanted.keys() - set(first))):
        version = packages.get(name)
        rows.append(_row(name, wanted[name], version, version is not None and requirements.same(wanted[name], version)))
    return rows


def told(row: dict[str, Any]) -> str:
    """A row that does not fit, in words."""
    return f"{row['name']}: wanted {row['wanted']}, has {row['has'] or 'nothing'}"


def _row(name: str, wanted: str | None, has: str | None, ok: bool) -> dict[str, Any]:
    return {"name": name, "wanted": wanted, "has": has, "ok": ok}


def _driver(cuda: str | None, gpus: bool) -> dict[str, Any]:
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0]) if cuda else None
    if oldest is None:
        return _row("driver", None, None, True)
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        # The mark: gpu-status must not take this for a user of the GPU.
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SMI_SECONDS,
            env={**os.environ, "DFLASH_OPS_PROBE": "1"},
        )  # fmt: skip
        version = done.stdout.decode("ascii", "replace").split("\n")[0].strip() if done.returncode == 0 else ""
    except subprocess.TimeoutExpired:
        version = f"no answer in {_SMI_SECONDS:.0f} s"
    except OSError:
        version = ""
    major = version.partition(".")[0]
    return _row("driver", f">= {oldest}", version or None, int(major) >= oldest if major.isdigit() else not gpus)
