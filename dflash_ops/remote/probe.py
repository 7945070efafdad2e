"""Who holds the GPUs of a host, or of a container.

nvidia-smi alone names no living child of a dead parent, so holders are found by their open descriptors of /dev/nvidiaN,
and by what they have mapped of it. The same code runs on the hypervisor (which sees every process, and the GPU locks)
and in each container. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_ops.remote import gpuasked, processes, rundir

_LOCK = re.compile(rf"/{rundir.GPU_LOCK}(\d+|GPU-[\w-]+)\.lock$")
_RUN_ID = re.compile(r"[a-z0-9-]+-\d{8}-\d{6}-[0-9a-f]{4}(?![0-9a-f])")
_RUN_GROUP = re.compile(rb"/dflash-run-([a-z0-9-]+-\d{8}-\d{6}-[0-9a-f]{4})(?:/|$)", re.MULTILINE)
_MAPPED = re.compile(rb" /dev/nvidia(\d+)$", re.MULTILINE)
_VMID = re.compile(rb"^0::/lxc/(\d+)(?:/|$)", re.MULTILINE)


def holders() -> list[dict[str, Any]]:
    """Every living process with an open /dev/nvidiaN, or with one of the hypervisor's GPU locks."""
    return [found for process in processes.table() if (found := holder(process)) is not None]


def holder(process: processes.Process) -> dict[str, Any] | None:
    """One of `holders`; None for a process that holds nothing."""
    if process.ended or process.pid == os.getpid():
        return None
    links = processes.open_files(process.pid)
    minors = minors_of(process.pid, links)
    locks = gpu_locks(links)
    if not minors and not locks:
        return None
    environment = processes.environment(process.pid)
    if gpuasked.PROBE in environment:
        return None
    # A supervisor, and what starts one, names its run in its command line; its environment has no run id.
    named = _RUN_ID.search(processes.command(process.pid)) if locks else None
    return {
        **_described(process),
        "minors": minors,
        "locks": sorted(int(lock) for lock in locks if lock.isdigit()),
        "locked_uuids": sorted(lock for lock in locks if not lock.isdigit()),
        "locks_for": named.group() if named else None,
    }


def _described(process: processes.Process) -> dict[str, Any]:
    cgroup = _cgroup(process.pid)
    named = os.fsdecode(processes.environment(process.pid).get(processes.RUN_ID, b""))
    return {
        **processes.describe(process),
        "group": process.group,
        "namespace_pids": _namespace_pids(process.pid),
        "pid_namespace": pid_namespace(process.pid),
        "vmid": vmid_of(cgroup),
        "run_id": named or run_of(cgroup),
        "age_s": round(processes.age_seconds(process), 1),
        "user": _user(process.pid),
        "parent": process.parent,
    }


def hidden() -> list[dict[str, Any]]:
    """The processes of which we may not see what they have open: none for root."""
    if os.geteuid() == 0:
        return []
    found = [it for it in processes.table() if not it.ended and not os.access(f"/proc/{it.pid}/fd", os.R_OK)]
    return [
        {**it.identity(), "vmid": vmid_of(_cgroup(it.pid)), "namespace_pids": _namespace_pids(it.pid)} for it in found
    ]


def _cgroup(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cgroup").read_bytes()
    except OSError:
        return b""


def charged(pid: int) -> dict[str, Any] | None:
    """A living process that nvidia-smi charges, and that may not be looked into: as one of `holders`, without devices.
    None for the dead, and for one that can be looked into: it would be among them, if the pid had no new owner."""
    process = processes.read(pid)
    if process is None or process.ended or os.access(f"/proc/{pid}/fd", os.R_OK):
        return None
    return {**_described(process), "minors": [], "locks": [], "locked_uuids": [], "locks_for": None}


def gpu_locks(links: Iterable[str]) -> set[str]:
    """The indices and the UUIDs whose locks are among these files."""
    return {match.group(1) for match in map(_LOCK.search, links) if match}


def cards(folder: Path = Path("/proc/driver/nvidia/gpus"), nodes: Path = Path("/dev")) -> list[dict[str, Any]]:
    """The GPUs that the driver has, by its own table, which answers also when nvidia-smi hangs or does not know one:
    {"bus", "minor", "uuid", "name"}. Without those that have no node here, or no UUID yet."""
    found: list[dict[str, Any]] = []
    for bus, minor in sorted(device_minor_by_bus(folder).items()):
        try:
            text = (folder / bus / "information").read_text(errors="replace")
        except OSError:
            continue
        told = dict(re.findall(r"^([^:\n]+):[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE))
        uuid = told.get("GPU UUID", "")
        if (
            re.fullmatch(r"GPU-[\w-]+", uuid)
            and told.get("GPU Excluded") != "Yes"
            and (nodes / f"nvidia{minor}").exists()
        ):
            found.append({"bus": bus, "minor": minor, "uuid": uuid, "name": told.get("Model", "")})
    return found


def device_minor_by_bus(folder: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, int]:
    """PCI bus id -> N of /dev/nvidiaN, where the driver tells; nvidia-smi's index may be another number."""
    minors: dict[str, int] = {}
    try:
        buses = os.listdir(folder)
    except OSError:
        return minors
    for bus in buses:
        try:
            text = (folder / bus / "information").read_text(errors="replace")
        except OSError:
            continue
        match = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if match:
            minors[bus] = int(match.group(1))
    return minors


def minors(pid: int) -> list[int]:
    """The N of every /dev/nvidiaN that the process holds."""
    return minors_of(pid, processes.open_files(pid))


def minors_of(pid: int, links: Iterable[str]) -> list[int]:
    """The same, where it is known what files it has open."""
    return processes.device_minors(links) or _mapped_minors(pid)


def _mapped_minors(pid: int) -> list[int]:
    """The N of every /dev/nvidiaN that is mapped: a mapping keeps the device open when its descriptor is closed."""
    return mapped_minors(processes.memory_file(pid, "maps"))


def mapped_minors(maps: bytes) -> list[int]:
    """The same, of the text of /proc/PID/maps."""
    return sorted({int(number) for number in _MAPPED.findall(maps)}) if b"/dev/nvidia" in maps else []


def _user(pid: int) -> str | None:
    """Whose the process is: a name of this machine, else a number."""
    try:
        number = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def pid_namespace(pid: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _namespace_pids(pid: int) -> list[int]:
    """The process's pids, from this namespace inwards: the last is the one it has in its own container."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return []
    match = re.search(r"^NSpid:\s*([\d\t ]+)$", status, re.MULTILINE)
    return [int(number) for number in match.group(1).split()] if match else []


def vmid_of(cgroup: bytes) -> int | None:
    """The container by a process's cgroup, `0::/lxc/200/ns/...` seen from the host. The whole part counts: 20 is not
    200."""
    match = _VMID.search(cgroup)
    return int(match.group(1)) if match else None


def run_of(cgroup: bytes) -> str | None:
    """The run in whose own control group a process is, whatever its environment says."""
    match = _RUN_GROUP.search(cgroup)
    return match.group(1).decode() if match else None
