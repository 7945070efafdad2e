"""What `doctor` wants to know of a host, or of a container: facts only; what they mean is judged by dflash_ops.doctor.

With `fix` it first does what is safe anywhere: it removes what dead deploys and starts left, and has the driver make
/dev/nvidia-uvm. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import glob
import os
import platform
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, gpuasked, locks, owners, processes

_SECONDS = 8.0
_OPEN_SECONDS = 15.0  # without persistence each card is started anew, one after the other
NO_ANSWER = "no answer"
_DAY = 86400.0
_STAGES = "/var/tmp/dflash-ops-stage-*"
_PROGRAMS = (
    "pct",
    "lxc-attach",
    "flock",
    "journalctl",
    "nvidia-smi",
    "nvidia-modprobe",
    "tmux",
    "tar",
    "git",
    "setsid",
)
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64")


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"]) if parameters["path"] else None
    return answers.answer(path, lambda: examine(path, parameters))


def examine(path: Path | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """path: where the container's runs lie, None on a host (then `vmid` says whose config is read)."""
    # Of a login user who is not root PATH may lack them.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
    fixed = _fix(path) if parameters["fix"] else []
    opening = Opening(_nodes())  # meanwhile the programs answer
    programs = {"smi": ["nvidia-smi", "--version"]}
    if path is None:
        programs["pve"] = ["pveversion"]
        programs["packages"] = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", "pve-container", "lxc-pve", "lxc"]
    else:
        programs["charmap"] = ["locale", "charmap"]
    facts: dict[str, Any] = {
        "now": time.time(),
        "kernel": platform.release(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "programs": {name: shutil.which(name) for name in _PROGRAMS},
        "asked": gpuasked.ask(programs, _SECONDS),
        "devices": _devices(opening),
        "majors": _majors(),
        "driver": _text("/proc/driver/nvidia/version") or _text("/sys/module/nvidia/version"),
        "stale": [_described(file) for file in stale_files(path)],
        "fixed": fixed,
    }
    if path is None:
        facts["user"] = getpass.getuser() if os.geteuid() else None
        facts["config"] = _text(f"/etc/pve/lxc/{parameters['vmid']}.conf")
        facts["nouveau"] = re.search(r"^nouveau ", _text("/proc/modules") or "", re.MULTILINE) is not None
        facts["disk"] = _disk(Path("/var/tmp"))
        return facts
    folder = next(it for it in (path, *path.parents) if it.exists())
    ours = owners.Owners(path)
    orphans: dict[str, list[int]] = {}
    for process in processes.table():
        owner = ours.of(process) if not process.ended else owners.UNKNOWN
        if owner.kind == "earlier" and owner.run_id:
            orphans.setdefault(owner.run_id, []).append(process.pid)
    return {
        **facts,
        "libcuda": sorted({match.group(1) for match in map(_libcuda, _libraries()) if match}),
        "disk": _disk(folder),
        "shm": _disk(Path("/dev/shm")),
        "memory": _memory(),
        "orphans": orphans,
        "encoding": sys.getfilesystemencoding(),
    }


# -- what was left, and its removal


def stale_files(path: Path | None) -> list[str]:
    """What dead deploys, transfers and starts of ours left, a day old and held by nobody."""
    if path is None:
        found = glob.glob(_STAGES)
    else:
        found = [*path.glob("incoming/*"), *path.glob("releases/new.tmp-*"), *path.glob("runs/.*.tmp")]
    # A login user's files on a host where they are root by sudo are theirs still.
    ours = {os.geteuid(), int(os.environ.get("SUDO_UID") or os.geteuid())}
    stale: list[str] = []
    for file in map(str, found):
        try:
            state = os.lstat(file)
        except OSError:
            continue
        # A deploy that goes on holds its own.
        if time.time() - state.st_mtime > _DAY and state.st_uid in ours and not locks.is_held(file):
            stale.append(file)
    return sorted(stale)


def _fix(path: Path | None) -> list[str]:
    """Does what is safe; says what it did, or why it could not."""
    done: list[str] = []
    for file in stale_files(path):
        try:
            if os.path.isdir(file) and not os.path.islink(file):
                shutil.rmtree(file)
            else:
                os.unlink(file)
            done.append(f"removed {file}")
        except OSError as error:
            done.append(f"could not remove {file}: {error.strerror}")
    lacks_uvm = os.path.exists("/dev/nvidia0") and not os.path.exists("/dev/nvidia-uvm")
    if path is None and lacks_uvm and shutil.which("nvidia-modprobe"):
        told = gpuasked.ask({"modprobe": ["nvidia-modprobe", "-c0", "-u"]}, _SECONDS)["modprobe"]
        made = os.path.exists("/dev/nvidia-uvm")
        words = told["why"] or told["out"].strip() or f"it ended with {told['code']}"
        done.append("nvidia-modprobe -c0 -u made /dev/nvidia-uvm" if made else f"nvidia-modprobe -c0 -u: {words}")
    return done


# -- facts


def _nodes() -> dict[str, os.stat_result]:
    """The nodes of the NVIDIA driver by their paths."""
    found: dict[str, os.stat_result] = {}
    for file in sorted(glob.glob("/dev/nvidia*")):
        try:
            state = os.stat(file)
        except OSError:
            continue
        if not stat.S_ISDIR(state.st_mode) and not stat.S_ISSOCK(state.st_mode):
            found[file] = state
    return found


class Opening:
    """Opens files, each in a process of its own: a sick driver holds for ever who opens its device."""

    def __init__(self, files: Mapping[str, os.stat_result], seconds: float = _OPEN_SECONDS) -> None:
        self.files, self._seconds, self._deadline = files, seconds, time.monotonic() + seconds
        self._children = {file: self._start(file) for file in files}

    def _start(self, file: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = errno.EIO
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):  # who reads our answer waits for the end of these
                os.dup2(null, descriptor)
            os.open(file, os.O_RDWR | os.O_CLOEXEC)
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)

    def refused(self) -> dict[str, str]:
        """By file why it can't be opened, empty where it can. To be asked once."""
        codes: dict[str, int] = {}

        def all_ended() -> bool:
            for file, pid in self._children.items():
                if file not in codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[file] = os.waitstatus_to_exitcode(status)
            return len(codes) == len(self._children)

        processes.wait_until(all_ended, max(0.0, self._deadline - time.monotonic()), every=0.01)
        for file, pid in self._children.items():
            if file not in codes:
                os.kill(pid, signal.SIGKILL)  # our child still: nobody else can have its pid
        hangs = f"{NO_ANSWER} in {self._seconds:.0f} s"
        return {
            file: (codes[file] and os.strerror(codes[file])) or "" if file in codes else hangs for file in self.files
        }


def _devices(opening: Opening) -> dict[str, dict[str, Any]]:
    """By name, the nodes of the NVIDIA driver: major and minor (None: no device), and why one can't be opened."""
    refused = opening.refused()
    found: dict[str, dict[str, Any]] = {}
    for file, state in opening.files.items():
        is_device = stat.S_ISCHR(state.st_mode)
        found[os.path.basename(file)] = {
            "major": os.major(state.st_rdev) if is_device else None,
            "minor": os.minor(state.st_rdev) if is_device else None,
            "refused": refused[file],
        }
    return found


def _majors() -> dict[str, int]:
    """The numbers that this kernel gave the NVIDIA driver: /proc/devices."""
    rows = re.findall(r"^ *(\d+) (nvidia\S*)$", _text("/proc/devices") or "", re.MULTILINE)
    return {name: int(number) for number, name in rows}


def _libraries() -> list[str]:
    return [file for folder in _LIBRARIES for file in glob.glob(f"{folder}/libcuda.so.*")]


def _libcuda(file: str) -> re.Match[str] | None:
    """The driver's version in a library's name; libcuda.so.1 has none."""
    return re.search(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$", file)


def _disk(folder: Path) -> dict[str, Any] | None:
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return {
        "folder": str(folder),
        "free": state.f_bavail * state.f_frsize,
        "size": state.f_blocks * state.f_frsize,
        "inodes_free": state.f_favail if state.f_files else None,
        "inodes": state.f_files or None,
    }


def _memory() -> int | None:
    """Bytes that this container may use: its control group's limit, or what lxcfs shows as the machine's."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text("/proc/meminfo") or "", re.MULTILINE)
    if match:
        limits.append(int(match.group(1)) * 1024)
    return min(limits) if limits else None


def _described(file: str) -> dict[str, Any]:
    try:
        age = time.time() - os.lstat(file).st_mtime
    except OSError:
        age = 0.0
    return {"file": file, "age_s": round(age)}


def _text(file: str) -> str | None:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return None
