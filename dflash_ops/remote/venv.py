"""Makes the environment that a release's lock asks for, and makes it the current one.

Under one lock, which dies with its holder: what is wanted is said, with the room that it takes; when the other end has
sent the wheels, or needs none, it says go. The venv is built in its own place, since it can't be moved; `current`
changes by one rename once all of it is there, is the wanted one, and is on the disk. The one before stays. A link that
ends, or is silent for 30 s, ends the build. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, environment, locks, releases, requirements, rundir
from dflash_ops.remote.answers import Fault
from dflash_ops.remote.attending import Attending
from dflash_ops.remote.requirements import Lock, Pins

# Packages with torch's CUDA build: 2.9 GB to download (x86_64, Python 3.11, torch 2.13), which are kept while they are
# unpacked to somewhat over twice of that; with the CPU's build: 0.6 GB. Where an environment is there, its size counts.
_TYPICAL_BYTES = {"cuda": 10 << 30, "cpu": 3 << 30}
_WITHOUT_TORCH_BYTES = 200 << 20
_SAID_CHARACTERS = 500
_WHEELS = re.compile(r"\.wheels-[0-9a-f]{12}")


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    os.umask(0o022)
    return answers.answer(path, lambda: _VERBS[parameters["do"]](path, parameters))


def sync(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Says {"event": "plan", ...}; hears {"go": true, "wheels": a folder or null}; says {"event": "line"} for each line
    of pip or uv; answers with the environment's id, and `made`: false when it was there."""
    release = environment.release_folder(path, parameters["release"])
    lock, pins = environment.read_lock(release), Pins(**parameters["pins"])
    with _only_one(path, parameters):
        has = environment.look(sys.executable)
        text = (release / requirements.NAME).read_bytes()
        interpreter = os.path.realpath(sys.executable)
        name = environment.environment_id(text, parameters["pins"], has["facts"], interpreter)
        folder = path / "env" / name
        _clear(path, but=f".wheels-{name}")  # our own wheels are gone on with
        before = environment.current(path)
        made = rundir.read_json(folder / environment.RECORD) is None or not _fits(lock, pins, folder)
        if made:
            if used := environment.users(path, name):
                raise Fault("busy", f"environment {name} is damaged, and in use", f"by {used[0]}", "stop it first")
            installer = _installer(has, lock)
            wanted = lock.kept(pins, has["facts"])
            answers.say(
                {
                    "event": "plan",
                    "id": name,
                    "installer": installer[0],
                    "packages": [[package.name, package.version, list(package.hashes)] for package in wanted],
                    "pinned": lock.pinned(pins),
                    "facts": has["facts"],
                    "glibc": has["glibc"],
                    "free_bytes": shutil.disk_usage(path).free,
                    "need_bytes": _need(path, lock, pins),
                    "unused": [each for each in _unused(path) if each["id"] != name],
                }
            )
            other = Attending()
            request = other.hear()
            if request is None:
                return {"event": "left"}
            wheels = Path(request["wheels"]) if request["wheels"] else None
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder, installer, lock, pins, has, wheels, other)
            _finish(folder, lock, pins, release, parameters)
            if wheels is not None:
                shutil.rmtree(wheels, ignore_errors=True)
        _activate(path, name)
    record = rundir.read_json(folder / environment.RECORD) or {}
    return {"event": "done", "id": name, "made": made, "previous": before, "release": release.name, "record": record}


@contextlib.contextmanager
def _only_one(path: Path, parameters: dict[str, Any]) -> Generator[None, None, None]:
    with locks.named(path, "env", "env sync", parameters):
        (path / "env").mkdir(exist_ok=True)
        yield


def _clear(path: Path, but: str | None = None) -> int:
    """Removes what killed builds and prunes have left; gives the bytes that this freed."""
    with os.scandir(path / "env") as entries:
        left = [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(environment.DOOMED) or (_WHEELS.fullmatch(entry.name) and entry.name != but)
        ]
    return sum(releases.remove(place) for place in left)


def _fits(lock: Lock, pins: Pins, folder: Path) -> bool:
    """Whether all that is locked is there; the driver is none of the environment's business."""
    try:
        has = environment.look(str(folder / "bin" / "python"))
    except Fault:
        return False
    return all(row["ok"] for row in environment.compare(lock, pins, has, gpus=False))


def _installer(has: dict[str, Any], lock: Lock) -> tuple[str, ...]:
    """("uv", its program), or ("pip",). Fault when the container has neither, or too old a Python."""
    facts = has["facts"]
    if lock.python and not requirements.applies(f"python_full_version >= '{lock.python}'", facts):
        why = f"it is {facts['python_full_version']}, the lock is for {lock.python} and newer"
        raise Fault("preflight", "the container's Python is too old", why, "name a newer `python`", sys.executable)
    beside = (os.path.dirname(sys.executable), os.path.expanduser("~/.local/bin"))
    uv = shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(beside))
    if uv:
        return ("uv", uv)
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        why = "it has neither uv nor Python's venv and ensurepip"
        raise Fault("preflight", "the container can't make a venv", why, "apt-get install python3-venv")
    return ("pip",)


def _need(path: Path, lock: Lock, pins: Pins) -> int:
    """About how many bytes a build takes. Wheels that are sent are counted by who sends them."""
    if lock.version("torch") is None:
        return _WITHOUT_TORCH_BYTES
    kind = "cpu" if lock.cuda(pins) == "none" else "cuda"
    found = [rundir.read_json(path / "env" / name / environment.RECORD) or {} for name in environment.names(path)]
    like = [int(record["bytes"]) for record in found if record.get("kind") == kind]
    return int(like[-1] * 1.5) if like else _TYPICAL_BYTES[kind]


def prune(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Removes all environments but the newest `keep`, the current one, and those that runs or warm-ups use. Unfinished
    ones are no newest ones. dry_run: only says which."""
    if not (path / "env").is_dir():
        return {"removed": [], "kept": [], "freed_bytes": 0}
    # A start that is going on has chosen its Python already, and shows it to nobody yet.
    with _only_one(path, parameters), rundir.start_lock(path, parameters["patience"]):
        every = [environment.describe(path, name) for name in environment.names(path)]
        whole = [each["id"] for each in every if each["whole"]]
        users = {each["id"]: each["used_by"][0] for each in every if each["used_by"]}
        reasons = {name: f"{'' if it == environment.WARMING else 'run '}{it} uses it" for name, it in users.items()}
        reasons.update({each["id"]: "current" for each in every if each["current"]})
        for name in whole[max(0, len(whole) - parameters["keep"]) :]:
            reasons.setdefault(name, "among the newest")
        doomed, freed = [each["id"] for each in every if each["id"] not in reasons], 0
        if not parameters["dry_run"]:
            freed = _clear(path)  # first: a sync may have made again what a killed prune has left half
            for name in doomed:
                # By rename first: half an environment has no environment's name.
                os.rename(path / "env" / name, path / "env" / f"{environment.DOOMED}{name}")
            freed += _clear(path)
            releases.sync(path / "env")
    kept = [{"id": each["id"], "why": reasons[each["id"]]} for each in every if each["id"] in reasons]
    return {"removed": doomed, "kept": kept, "freed_bytes": freed}


_VERBS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {"sync": sync, "prune": prune}


def _unused(path: Path) -> list[dict[str, Any]]:
    """Environments that neither runs nor the next start need."""
    every = [environment.describe(path, name) for name in environment.names(path)]
    return [each for each in every if not each["current"] and not each["used_by"]]


# -- building


def _build(
    folder: Path,
    installer: tuple[str, ...],
    lock: Lock,
    pins: Pins,
    has: dict[str, Any],
    wheels: Path | None,
    other: Attending,
) -> None:
    kept, pinned = lock.kept(pins, has["facts"]), lock.pinned(pins)
    make, *rest = commands(sys.executable, folder, installer, pinned, pins.torch_index, wheels)
    _run(other, make)
    (folder / "locked.txt").write_text("".join(f"{package.line}\n" for package in kept))
    (folder / "versions.txt").write_text("".join(f"{package.name}=={package.version}\n" for package in kept))
    for words in rest:
        _run(other, words)


def commands(
    base: str,
    folder: Path,
    installer: tuple[str, ...],
    pinned: dict[str, str],
    torch_index: str | None,
    wheels: Path | None,
) -> list[list[str]]:
    """What makes an environment: the venv, what is locked, what is pinned, and that all of it fits together. base: the
    Python that it is of; installer: as `_installer` gives it."""
    python, uv = str(folder / "bin" / "python"), installer[1:]
    make = [*uv, "venv", "--python", base, str(folder)] if uv else [base, "-m", "venv", str(folder)]
    install = [*uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    # No source packages: what they build depends on the machine, and their builds fetch what nobody has locked.
    install += ["--only-binary", ":all:"]
    where = ["--no-index", "--find-links", str(wheels)] if wheels else []
    found = [make, [*install, "--require-hashes", "--no-deps", "-r", str(folder / "locked.txt"), *where]]
    if pinned:
        # They replace what is locked, so nobody knows their hashes; what they need must be what is locked.
        if torch_index and not wheels:
            where = ["--extra-index-url", torch_index]
            where += ["--index-strategy", "unsafe-best-match"] if uv else []
        named = [f"{name}=={version}" for name, version in pinned.items()]
        found.append([*install, *named, "-c", str(folder / "versions.txt"), *where])
    found.append([*uv, "pip", "check", "--python", python] if uv else [python, "-m", "pip", "check"])
    return found


def _finish(folder: Path, lock: Lock, pins: Pins, release: Path, parameters: dict[str, Any]) -> None:
    """Checks what was built, brings it to the disk, and says so in it."""
    has = environment.look(str(folder / "bin" / "python"))
    rows = environment.compare(lock, pins, has, gpus=False)
    wrong = [environment.told(row) for row in rows if not row["ok"]]
    if wrong:
        raise Fault("verification", "the environment is not what was asked for", "; ".join(wrong[:5]), "", str(folder))
    size = 0
    for at, folders, files in os.walk(folder):
        size += sum(os.lstat(os.path.join(at, name)).st_size for name in (*folders, *files))
    os.sync()
    record = {
        "schema_version": rundir.SCHEMA_VERSION,
        "id": folder.name,
        "made_at": rundir.now(),
        "made_by": parameters["client"],
        "release": release.name,
        "python": has["facts"]["python_full_version"],
        "torch": has["packages"].get("torch"),
        "transformers": has["packages"].get("transformers"),
        "kind": "cpu" if has["torch_cuda"] in (None, "none") else "cuda",
        "pins": parameters["pins"],
        "packages": has["packages"],
        "bytes": size,
    }
    rundir.write_json(folder / environment.RECORD, record)


def _activate(path: Path, name: str) -> None:
    if environment.current(path) == name:
        return
    for old in (path / "env").glob(".current-*"):
        old.unlink()
    link = path / "env" / f".current-{secrets.token_hex(4)}"
    link.symlink_to(name)
    link.replace(path / "env" / "current")
    releases.sync(path / "env")


def _run(other: Attending, words: list[str]) -> None:
    """Runs pip or uv. Fault with its own words: those from its first mark of an error on, else the last."""
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "UV_NO_PROGRESS": "1"}
    code, lines = other.run(words, {**os.environ, **quiet, "UV_PYTHON_DOWNLOADS": "never"})
    if not code:
        return
    marked = [number for number, line in enumerate(lines) if line.startswith(("ERROR:", "error:", "×"))]
    said = " ".join(lines[marked[0] :] if marked else lines[-2:])
    why = (said if len(said) <= _SAID_CHARACTERS else f"{said[:_SAID_CHARACTERS]}...") or f"exit code {code}"
    full = any("No space left" in line for line in lines)
    advice = "free some space: dflash-ops env list shows what is not used" if full else "mend that, and run it again"
    raise Fault("preflight", f"{_program(words)} failed", why, advice)


def _program(words: list[str]) -> str:
    """uv venv, uv pip install, pip check, ...: what was run, in short."""
    by_uv = os.path.basename(words[0]) == "uv"
    doing = next((word for word in ("venv", "install", "check") if word in words), "")
    return f"{'uv ' if by_uv else ''}{'' if doing == 'venv' else 'pip '}{doing}"
