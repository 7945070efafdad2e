"""What a run needs of the container besides code: a config that the release takes, the model and the data that this
names, free GPUs, room for checkpoints, shared memory, apprise.

Each refusal says what is missing and what to do. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflash_ops.remote import environment, gpuproof, notify, probe, processes, rundir
from dflash_ops.remote.answers import Fault, beat

CHECK_SECONDS = 60.0  # for the release's trainer to check its config
ROOM_BYTES = 1 << 30
SHM_BYTES = 64 << 20  # for each GPU: NCCL and torch's workers exchange data there
_SHM = Path("/dev/shm")
# Keys of the config that name what must be there, and the folder of shared/ where such things usually lie.
_NAMED = {"target.path": "models", "data.train": "data", "data.heldout": "data", "init_from": "drafters"}
# A card that somebody else uses: more than a desktop or a persistence daemon takes.
_TAKEN_SHARE = 0.1
_FREE_SECONDS = 3.0
# What the release's check says before its answer may begin as JSON does: so many lines of that kind are tried.
_ANSWER_BEGINS, _TRIED = re.compile(rb"^\{", re.MULTILINE), 10
_NOT_CHECKED = "models and data were not checked: the release's check gave no answer"
_SHOWN = 200  # characters of a name that a message quotes


def look(parameters: dict[str, Any]) -> gpuproof.Picture | None:
    """The container's GPUs, where a start has to do with them."""
    if parameters["gpus"] == [] or (parameters.get("share_gpus") and not parameters.get("locks")):
        return None
    return gpuproof.look()


def unlocked(parameters: dict[str, Any], picture: gpuproof.Picture | None) -> dict[str, list[str]]:
    """{"uuids" of all the GPUs that this start will use, "held": those whose locks came with it}; empty when these are
    the same. The inventory says what numbers they have on the host; nvidia-smi here knows what they are."""
    if not parameters.get("locks") or picture is None:
        return {}
    wanted = {card.uuid for card in picture.cards if card.index in parameters["gpus"]}
    held = {lock for lock in probe.gpu_locks(processes.open_files(os.getpid())) if not lock.isdigit()}
    return {"uuids": sorted(wanted), "held": sorted(held)} if wanted and wanted != held else {}


def check(
    path: Path,
    parameters: dict[str, Any],
    resumed: Path | None,
    leaving: Collection[int] = frozenset(),
    picture: gpuproof.Picture | None = None,
) -> list[str]:
    """Fault when something is missing; else what could not be checked, one line each. leaving: pids that will have
    ended by the start. picture: a look at the GPUs of a moment ago."""
    notes: list[str] = [_NOT_CHECKED] if parameters.get("unchecked_config") else []
    gpus: list[int] | None = parameters["gpus"]
    _shared_memory(len(gpus or []))
    _room(path, parameters, resumed)
    if gpus != [] and not parameters.get("share_gpus"):
        notes += _gpus(path, gpus, leaving, picture or gpuproof.look())
    urls: list[str] = parameters.get("notify") or []
    if not all(map(notify.is_webhook, urls)):
        _apprise(parameters["python"])
    return notes


def checked_config(file: Path, release: Path, python: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The config as the release's own trainer reads it: --set, preset and defaults in it. When that trainer does not
    tell, it is empty, and `check` says so: "unchecked_config" is set in the parameters. Fault when it refuses it."""
    words = [python, "-m", "trainer", "check", str(file), "--json"]
    for setting in parameters["set"]:
        words += ["--set", setting]
    try:
        code, told, said = _run_with_beats(words, release, CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        look = f"cd {shlex.quote(str(release))} && {shlex.quote(python)} -v -m trainer check --help"
        advice = f"start again; if it hangs again, see where, in the container: {look}"
        why = f"no answer in {CHECK_SECONDS:g} s"
        raise Fault("preflight", "the release's check of the config hangs", why, advice) from None
    except OSError as error:
        raise Fault("preflight", "the release can't check the config", str(error), "dflash-ops deploy") from None
    if code == 0:
        config = _answer_in(told)
        parameters["unchecked_config"] = config is None
        return config or {}
    lines = [line for line in said.decode("utf-8", "replace").strip().split("\n") if line.strip()]
    # The user knows the file by the name on their own machine.
    why = (lines[-1] if lines else f"exit code {code}").replace(str(file), parameters["config_name"])
    if code == 3:
        raise Fault("config", "the trainer refuses the config", why, "correct it and start again")
    raise Fault("preflight", f"the trainer of release {release.name} does not run", why, "dflash-ops deploy")


def _answer_in(told: bytes) -> dict[str, Any] | None:
    """The first JSON object that begins a line; None when there is none. Libraries that the trainer loads may say
    something before it, or after."""
    for begin in itertools.islice(_ANSWER_BEGINS.finditer(told), _TRIED):
        try:
            return dict(json.JSONDecoder().raw_decode(told[begin.start() :].decode())[0])
        except (ValueError, RecursionError):
            continue
    return None


def _run_with_beats(words: list[str], folder: Path, seconds: float) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a command that may take a while. TimeoutExpired when it takes longer; then
    nothing of its session lives on."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        asked = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            close_fds=True,
            start_new_session=True,
        )

        def ended() -> bool:
            return asked.poll() is not None

        try:
            if not processes.wait_until(
                ended, seconds, every=0.02, on_wait=lambda left: beat("the release checks the config", left)
            ):
                raise subprocess.TimeoutExpired(words[1:4], seconds)
        finally:
            if asked.returncode is None:  # not reaped: the number of its group can't be somebody else's yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(asked.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, where no signal ends it
                    asked.wait(1.0)
        out.seek(0)
        errors.seek(0)
        return asked.wait(), out.read(), errors.read()


def check_named(config: dict[str, Any], release: Path, parameters: dict[str, Any], resumed: Path | None) -> None:
    """Fault when the config names a model or data that the container has not; the trainer would find that out only
    after it has loaded its libraries. It runs in the release's folder: relative paths begin there."""
    sections = {it: config[it] for it in ("target", "data") if isinstance(config.get(it), dict)}
    named: dict[str, Any] = {f"{it}.{key}": value for it, section in sections.items() for key, value in section.items()}
    if resumed is None and not parameters["init_from"]:  # else it is not looked at
        named["init_from"] = config.get("init_from")
    lacking: dict[str, str] = {}
    advice: list[str] = []
    for key, kind in _NAMED.items():
        said = named.get(key)
        if not isinstance(said, str) or (said.startswith("~") and "HOME" in parameters["env_names"]):
            continue
        place = os.path.join(release, said if key == "init_from" else _at_home(said))
        absent = "" if os.path.exists(place) else f"no {_quoted(place)}"
        if why := _lack_of_model(said, place) if kind == "models" else absent:
            lacking[key] = why
            advice.append(_advice(key, said, os.path.normpath(place), kind, parameters["path"]))
    if lacking:
        reasons = "; ".join(f"{key}: {why}" for key, why in lacking.items())
        what = f"{parameters['config_name']} names what the container lacks"
        raise Fault("preflight", what, reasons, "; ".join(dict.fromkeys(advice)))


def on_cpu_all_the_same(config: dict[str, Any], python: str, gpus: list[int] | None) -> list[str]:
    """A note where GPUs are asked for by number and the training will run on the CPU. config: as `checked_config` gives
    it; python: the trainer's."""
    layout: dict[str, Any] = config["layout"] if isinstance(config.get("layout"), dict) else {}
    words = {word for key in ("targets", "drafters") if isinstance(layout.get(key), list) for word in layout[key]}
    if not gpus or not words or not words <= {"auto", "cpu"}:  # who names a GPU is told by the trainer that it lacks it
        return []
    why = "the config's layout says so"
    if "auto" in words:
        try:
            if environment.look(python)["torch_cuda"] != "none":
                return []
        except Fault:
            return []
        why = f"torch of {python} is built for the CPU alone (dflash-ops env check)"
    return [f"warning: it trains on the CPU, and only keeps GPU {', '.join(map(str, gpus))} from others: {why}"]


def _at_home(said: str) -> str:
    try:
        return os.path.expanduser(said)
    except ValueError:  # a user's name with a NUL in it
        return said


def _quoted(name: str) -> str:
    """A name as a message shows it: on one line, and its middle left out where it is long."""
    if len(name) > _SHOWN:
        name = f"{name[: _SHOWN // 2]}…{name[1 - _SHOWN // 2 :]}"
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in name)


def _lack_of_model(said: str, place: str) -> str:
    """Why there is no model; empty when there is one, or when the trainer would take it for a hub name, which is not
    looked for here. A hub name has one slash at most."""
    if os.path.exists(place):
        return "" if os.path.isfile(os.path.join(place, "config.json")) else f"no config.json in {_quoted(place)}"
    return f"no {_quoted(place)}" if said.startswith(("/", ".", "~")) or said.count("/") > 1 else ""


def _advice(key: str, said: str, place: str, folder: str, path: str) -> str:
    """How what is lacking comes into the container, and what the config must say then. No command for a name that a
    message can't show as it is: the command would name another file."""
    if _quoted(said) != said or _quoted(place) != place:
        return f"correct {key}"
    name, inside = os.path.basename(place), os.path.relpath(place, path)
    if inside.startswith("shared/"):
        return f"dflash-ops put {shlex.quote(name)} {shlex.quote(os.path.dirname(inside))}/, or correct {key}"
    local = said.rstrip("/") if said.startswith("/") else name  # most likely a path of the user's own machine
    setting = shlex.quote(f"{key}={path}/shared/{folder}/{name}")
    return f"dflash-ops put {shlex.quote(local)} shared/{folder}/, then --set {setting}"


def _gpus(path: Path, wanted: list[int] | None, leaving: Collection[int], picture: gpuproof.Picture) -> list[str]:
    """wanted: as nvidia-smi numbers them here; None: all that there are, of which nothing is asked but that no
    process of the container uses them that is in no run."""
    if picture.missing:
        return [f"GPUs were not checked: {picture.why}"] if wanted else []
    if picture.why:
        if wanted is None:
            return [f"GPUs were not checked: {picture.why}"]
        raise Fault("preflight", "nvidia-smi does not answer", picture.why, "in the container: nvidia-smi")
    known = {card.index for card in picture.cards}
    missing = sorted(set(wanted or []) - known)
    if missing:
        has = ", ".join(map(str, sorted(known))) or "none"
        raise Fault(
            "preflight",
            f"there is no GPU {', '.join(map(str, missing))}",
            f"nvidia-smi in the container shows {has}",
            "correct --gpus, `gpus` in the inventory, or what the host passes in (dev0: /dev/nvidia0 ...)",
        )
    found: list[tuple[Fault, bool]] = []

    def settled() -> bool:
        found[:] = _taken(path, wanted, gpuproof.look(), leaving)
        return not found or found[0][1]

    # What has just been ended may still be on the driver's books.
    processes.wait_until(settled, _FREE_SECONDS, 0.3, lambda left: beat("waiting for the GPU's memory", left))
    if found:
        raise found[0][0]
    return []


def _taken(
    path: Path, wanted: list[int] | None, picture: gpuproof.Picture, leaving: Collection[int] = frozenset()
) -> list[tuple[Fault, bool]]:
    """Who uses the wanted cards, other than runs that live: for those there are locks. With it, whether that is a
    process that lives, so that waiting is in vain."""
    ours = _pids_of_live_runs(path) | set(leaving)
    for card in picture.cards:
        if wanted is not None and card.index not in wanted:
            continue
        for uuid, pid, mib in picture.charges:
            if uuid != card.uuid or pid in ours:
                continue
            command = processes.command(pid)[:80]
            who = f"process {pid} ({command or 'which is gone; a child of it keeps the memory'})"
            why = f"{who} of no run uses {mib or 0:.0f} MiB"
            advice = "dflash-ops gpu free --unknown, which shows it first; or --share-gpus"
            return [(Fault("busy", f"GPU {card.index} is taken", why, advice), bool(command))]
        own = sum(mib or 0.0 for uuid, _, mib in picture.charges if uuid == card.uuid)
        if wanted is not None and card.used is not None and card.total:
            others = card.used - own
            if others > _TAKEN_SHARE * card.total:
                why = f"{others:.0f} of its {card.total:.0f} MiB are in use, by nobody in this container"
                advice = "dflash-ops gpu-status; or --share-gpus"
                return [(Fault("busy", f"GPU {card.index} is taken", why, advice), False)]
    return []


def _pids_of_live_runs(path: Path) -> set[int]:
    found: set[int] = set()
    for run in rundir.live_runs(path):
        found |= {process.pid for process in rundir.members(run)}
        child = run["state"].get("child")
        if child is not None and processes.read(child["pid"]) is None:
            found.add(child["pid"])  # it has just died, and its run is being cleared up
    return found


def _room(path: Path, parameters: dict[str, Any], resumed: Path | None) -> None:
    """Room for two checkpoints more, as large as those of the run that is gone on from or of the last of this name."""
    earlier = [resumed] if resumed else []
    same = [folder for folder in rundir.folders(path) if rundir.name_of(folder.name) == parameters["name"]]
    earlier += reversed(same)
    size = next((size for size in map(_newest_checkpoint, earlier) if size), 0)
    needed = max(int(parameters.get("room_bytes", ROOM_BYTES)), 2 * size)
    (path / "runs").mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path / "runs").free
    if free < needed:
        why = f"{free >> 20} MiB are free, {needed >> 20} needed"
        if 2 * size == needed:
            why += f": two checkpoints of {size >> 20} MiB"
        raise Fault(
            "preflight",
            "there is no room for the checkpoints",
            why,
            "remove old runs and releases (dflash-ops prune --keep 3), or enlarge the container's disk",
            str(path / "runs"),
        )


def _newest_checkpoint(folder: Path) -> int:
    names = rundir.checkpoints(folder)
    size = 0
    for place, _, files in os.walk(folder / "checkpoints" / names[-1] if names else folder / "checkpoints" / "none"):
        for name in files:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # removed meanwhile
    return size


def _shared_memory(gpus: int) -> None:
    needed = SHM_BYTES * gpus
    if not gpus:
        return
    try:
        free = shutil.disk_usage(_SHM).free
    except OSError as error:
        free, why = 0, error.strerror or str(error)
    else:
        why = f"{free >> 20} MiB are free, {needed >> 20} needed for {gpus} GPUs"
    if free < needed:
        raise Fault(
            "preflight",
            "/dev/shm is too small",
            why,
            f"in the container: ls -l {_SHM}, and remove what dead processes left; or mount -o remount,size=2G {_SHM}",
        )


def _apprise(python: str) -> None:
    words = [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('apprise') is None)"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return  # the same Python checks the config next, and says more
    if done.returncode:
        raise Fault(
            "preflight",
            "only webhooks (https://...) can be notified",
            "the container's Python has no apprise, which other URLs need",
            f"in the container: {python} -m pip install apprise",
        )
