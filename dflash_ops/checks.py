"""What is wrong with a host or a container: facts in, checks out, each with its evidence and what mends it. Pure.

A failure would stop a run or make it wrong, a warning costs speed or room, a note is worth knowing.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflash_ops import sudo
from dflash_ops.command import Container
from dflash_ops.gpus import Gpu, GpuStatus

SCHEMA_VERSION = 1
_GIB = 1 << 30
_ROOM, _ENOUGH_ROOM = 1 * _GIB, 20 * _GIB
_SHM, _ENOUGH_SHM = 64 << 20, 1 * _GIB
_MEMORY, _ENOUGH_MEMORY = 2 * _GIB, 8 * _GIB
_INODES = 10_000
_SKEW_SECONDS = 30.0

Level = Literal["ok", "note", "warning", "failure"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. evidence: what was seen; fix: what to run, where it is not ok."""

    name: str
    where: str
    level: Level
    evidence: str
    fix: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """checks: all of them, in their order. fixed: what --fix did, or why it could not."""

    container: str
    checks: tuple[Check, ...]
    fixed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing would stop a run."""
        return all(check.level != "failure" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "container": self.container,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "fixed": list(self.fixed),
        }


@dataclass(frozen=True)
class Facts:
    """What was found out. inside: None when the container could not be asked, `refused` says why; skew_s: how far the
    host's clock is ahead of ours; gpus: None when gpu-status failed, `gpus_refused` says why. mends: what to do about
    what was refused."""

    host: Mapping[str, Any]
    inside: Mapping[str, Any] | None
    gpus: GpuStatus | None
    skew_s: float
    refused: str = ""
    gpus_refused: str = ""
    mends: str = ""


def judge(container: Container, facts: Facts) -> list[Check]:
    """Every check. Pure."""
    checks = [*_host(container, facts)]
    if facts.inside is None:
        where = str(container)
        fix = facts.mends or f"dflash-ops ct start; or on the host: pct start {container.vmid}"
        checks.append(Check("container", where, "failure", facts.refused, fix))
    else:
        checks += _programs(container, facts.inside)
        checks += _room(container, facts.inside)
        checks += _left(container, facts.inside)
        if _wants_gpus(container, facts):
            checks += _devices(container, facts, facts.inside)
    if facts.gpus is not None:
        checks += _cards(container, facts.gpus)
    elif facts.gpus_refused:
        checks.append(Check("GPUs", str(container.host), "failure", facts.gpus_refused, "dflash-ops gpu-status"))
    return checks


def _wants_gpus(container: Container, facts: Facts) -> bool:
    return bool(container.gpus) or "/dev/nvidia" in (facts.host["config"] or "")


def _host(container: Container, facts: Facts) -> list[Check]:
    host, where = facts.host, str(container.host)
    wants = _wants_gpus(container, facts)
    checks: list[Check] = []

    skew = abs(facts.skew_s)
    level: Level = "warning" if skew > _SKEW_SECONDS else "ok"
    checks.append(Check("clock", where, level, f"{skew:.0f} s from this machine's", "on the host: chronyc makestep"))

    if host.get("user"):
        evidence = (
            f"{host['user']} is root in containers only: a GPU's lock keeps out this container's starts alone, and who "
            "holds a GPU on the host can't be seen"
        )
        fix = f"on the host, in a file of /etc/sudoers.d: {host['user']} ALL=(root) NOPASSWD: ALL"
        checks.append(Check("sudo", where, "note", evidence, fix))
    if host.get("lacks_pvesh"):
        checks.append(Check("pvesh", where, "note", *sudo.no_pvesh(host["lacks_pvesh"])))
    packages = dict(re.findall(r"^(\S+) (\d\S*)$", host["asked"]["packages"]["out"], re.MULTILINE))
    pct, lxc = packages.get("pve-container"), packages.get("lxc-pve") or packages.get("lxc")
    evidence = f"pve-container {pct or 'unknown'}, lxc {lxc or 'unknown'}, kernel {host['kernel']}"
    if lxc and _version(lxc) < (5, 0, 2):
        evidence += ": pct exec exits 0 for a command that a signal ended"
        checks.append(Check("pct", where, "warning", evidence, "upgrade to Proxmox VE 8, which has lxc 5.0.2 or newer"))
    elif host["programs"]["pct"] is None:
        checks.append(
            Check("pct", where, "failure", "there is no pct", "correct the host's address: it must be Proxmox VE")
        )
    else:
        checks.append(Check("pct", where, "ok", evidence))
    if host["programs"]["lxc-attach"] is None and container.via == "lxc-attach":
        evidence = "there is no lxc-attach; each command goes through pct exec and takes 0.6 s more"
        checks.append(Check("lxc-attach", where, "note", evidence, "apt-get install lxc-pve"))
    if container.gpus and host["programs"]["flock"] is None:
        checks.append(Check("flock", where, "failure", "GPU locks need it", "apt-get install util-linux"))
    checks += _disk("staging disk", where, host["disk"], _ROOM // 4, _ROOM, "deploys")
    checks += _stale(where, host)
    if not wants:
        return checks

    if host["nouveau"]:
        fix = "echo blacklist nouveau > /etc/modprobe.d/nouveau.conf; update-initramfs -u; then restart the host"
        checks.append(Check("nouveau", where, "failure", "the nouveau module is loaded and keeps the GPUs", fix))
    driver = _driver(host)
    if driver is None:
        evidence = "/proc/driver/nvidia/version is missing, and nvidia-smi does not answer"
        checks.append(
            Check("driver", where, "failure", evidence, "install NVIDIA's driver on the host; modprobe nvidia")
        )
    else:
        checks.append(Check("driver", where, "ok", f"version {driver}"))
        if "nvidia-uvm" not in host["devices"]:
            fix = "on the host: nvidia-modprobe -c0 -u, at each boot; or dflash-ops doctor --fix"
            evidence = "/dev/nvidia-uvm is missing: CUDA does not start, though nvidia-smi works"
            checks.append(Check("nvidia-uvm", where, "failure", evidence, fix))
    return checks


def _driver(facts: Mapping[str, Any]) -> str | None:
    """The version of the kernel's driver, as this side tells it."""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", facts["driver"] or "")
    smi = re.search(r"DRIVER version\s*:\s*(\d\S*)", facts["asked"]["smi"]["out"])
    return match.group(1) if match else smi.group(1) if smi else None


def _devices(container: Container, facts: Facts, inside: Mapping[str, Any]) -> list[Check]:
    """The container's way to the GPUs: its nodes, its config, its user libraries."""
    host, where = facts.host, str(container)
    checks: list[Check] = []
    driver = _driver(host)
    smi = re.search(r"NVIDIA-SMI version\s*:\s*(\d\S*)", inside["asked"]["smi"]["out"])
    libraries = inside["libcuda"] or ([smi.group(1)] if smi else [])
    answered = inside["asked"]["smi"]
    if "no answer" in answered["why"]:
        fix = "on the host: journalctl -k --grep NVRM; then restart the host"
        checks.append(Check("nvidia-smi", where, "failure", f"{answered['why']}: the driver hangs", fix))
    elif not libraries or "mismatch" in answered["out"]:
        fix = f"in the container: ./NVIDIA-Linux-x86_64-{driver or 'VERSION'}.run --no-kernel-module"
        words = answered["out"].strip().split("\n")[-1] or "there is no libcuda and no nvidia-smi"
        checks.append(Check("user libraries", where, "failure", words, fix))
    elif driver is not None and driver not in libraries:
        evidence = f"the host's driver is {driver}, the container has {', '.join(libraries)}"
        fix = f"in the container: ./NVIDIA-Linux-x86_64-{driver}.run --no-kernel-module, and remove the others"
        checks.append(Check("user libraries", where, "failure", evidence, fix))
    else:
        checks.append(Check("user libraries", where, "ok", f"version {', '.join(libraries)}"))

    nodes, majors = inside["devices"], host["majors"]
    if "nvidia-uvm" not in nodes and "nvidia-uvm" in host["devices"]:
        free = _free_entry(host["config"] or "")
        fix = (
            f"on the host: pct set {container.vmid} --dev{free} /dev/nvidia-uvm,mode=0666; pct reboot {container.vmid}"
        )
        evidence = "/dev/nvidia-uvm is not there: torch.cuda.is_available() is False, though nvidia-smi works"
        checks.append(Check("nvidia-uvm", where, "failure", evidence, fix))
    for name, node in nodes.items():
        wanted = _major(name, majors)
        if node["major"] is not None and wanted is not None and node["major"] != wanted:
            evidence = f"/dev/{name} has major {node['major']}, the kernel's is {wanted}"
            checks.append(Check("stale node", where, "failure", evidence, f"on the host: pct reboot {container.vmid}"))
        elif node["refused"].startswith("no answer"):
            fix = "on the host: journalctl -k --grep NVRM; then restart the host"
            evidence = f"/dev/{name} can't be opened, {node['refused']}: the driver hangs"
            checks.append(Check("node", where, "failure", evidence, fix))
        elif node["refused"]:
            evidence = f"/dev/{name} can't be opened: {node['refused']}"
            fix = f"on the host: pct set {container.vmid} --devN /dev/{name},mode=0666; pct reboot {container.vmid}"
            checks.append(Check("node", where, "failure", evidence, fix))
    checks += _config(container, host)

    cards = sorted(name for name in nodes if re.fullmatch(r"nvidia\d+", name))
    if container.gpus and len(cards) != len(container.gpus):
        evidence = f"the inventory gives it {len(container.gpus)} GPUs, it has {', '.join(cards) or 'none'}"
        fix = f"`gpus` in the inventory, or on the host: pct set {container.vmid} --dev0 /dev/nvidia0,mode=0666 ..."
        checks.append(Check("GPU count", where, "failure", evidence, fix))
    elif facts.gpus is not None:
        checks += _order(container, facts.gpus.gpus)
    return checks


def _major(node: str, majors: Mapping[str, int]) -> int | None:
    """The major that the kernel has for a node: nvidia0, nvidiactl and nvidia-modeset are the driver's own."""
    if re.fullmatch(r"nvidia(\d+|ctl|-modeset)", node):
        return majors.get("nvidia-frontend", majors.get("nvidia"))
    own = [
        name for name in majors if name.startswith("nvidia-") and name != "nvidia-frontend" and node.startswith(name)
    ]
    return majors[max(own, key=len)] if own else None


def _order(container: Container, gpus: Sequence[Gpu]) -> list[Check]:
    """Whether the inventory numbers the GPUs as host and container do: else each start is asked for twice."""
    there = {gpu.in_container[container.vmid]: gpu.index for gpu in gpus if container.vmid in gpu.in_container}
    seen = tuple(index for _, index in sorted(there.items()))
    where = str(container)
    if not there:
        fix = "in the container: nvidia-smi -L"
        return [Check("GPU order", where, "failure", "nvidia-smi in the container shows no GPU of the host", fix)]
    if not container.gpus:
        evidence = "the inventory declares no GPUs, so that a start takes no locks: another container may take them too"
        return [Check("GPU locks", where, "note", evidence, f"in the inventory: gpus = {list(seen)}")]
    if len(there) < len(container.gpus) or None in seen:
        evidence = (
            f"of {len(container.gpus)} GPUs nvidia-smi in the container shows {len(there)}, not all of the host's"
        )
        return [Check("GPU order", where, "failure", evidence, "dflash-ops gpu-status; on the host: nvidia-smi -L")]
    if seen != container.gpus:
        evidence = f"the inventory says gpus = {list(container.gpus)}, in the order of the container it is {list(seen)}"
        return [Check("GPU order", where, "warning", evidence, f"in the inventory: gpus = {list(seen)}")]
    return [Check("GPU order", where, "ok", f"host's {', '.join(map(str, seen))}")]


def _config(container: Container, host: Mapping[str, Any]) -> list[Check]:
    text, where = host["config"], f"/etc/pve/lxc/{container.vmid}.conf"
    if text is None:
        return [Check("container config", where, "note", "it can't be read")]
    text = text.split("\n[")[0]  # what follows are snapshots
    checks: list[Check] = []
    if re.search(r"^lxc\.cgroup\.devices", text, re.MULTILINE):
        evidence = "lxc.cgroup.devices.* means nothing since Proxmox VE 7"
        checks.append(
            Check("container config", where, "warning", evidence, "write lxc.cgroup2.devices.allow, or dev0: entries")
        )
    allowed = {int(it) for it in re.findall(r"^lxc\.cgroup2\.devices\.allow:\s*c (\d+):", text, re.MULTILINE)}
    entries = re.findall(r"^dev\d+:\s*(/dev/nvidia\S*?)(?:,|\s|$)", text, re.MULTILINE)
    if allowed:
        missing = {name: major for name, major in host["majors"].items() if major not in allowed}
        uvm = {name: major for name, major in missing.items() if name == "nvidia-uvm"}
        if uvm and not entries:
            lines = "; ".join(f"lxc.cgroup2.devices.allow: c {major}:* rwm" for major in uvm.values())
            evidence = f"hand-written majors {sorted(allowed)} lack nvidia-uvm's {uvm['nvidia-uvm']}: they go stale"
            checks.append(
                Check("container config", where, "failure", evidence, f"{lines}; or dev0: entries, which stay")
            )
        else:
            evidence = "majors are written by hand: they go stale with a new kernel"
            checks.append(
                Check("container config", where, "note", evidence, "dev0: /dev/nvidia0,mode=0666 and its like")
            )
    elif entries:
        checks.append(Check("container config", where, "ok", f"dev entries for {', '.join(entries)}"))
    return checks


def _free_entry(config: str) -> int:
    taken = {int(number) for number in re.findall(r"^dev(\d+):", config, re.MULTILINE)}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _cards(container: Container, seen: GpuStatus) -> list[Check]:
    """What gpu-status says of the container's cards; of all when none are declared."""
    checks: list[Check] = []
    for gpu in seen.gpus:
        if container.gpus and gpu.index is not None and gpu.index not in container.gpus:
            continue
        number = gpu.uuid if gpu.index is None else gpu.index
        where = f"{seen.host} GPU {number}"
        level: Level = {"ok": "ok", "warning": "warning", "sick": "failure"}.get(gpu.health, "note")  # pyright: ignore[reportAssignmentType]
        words = "; ".join(gpu.findings) or f"{gpu.name}, driver {gpu.driver}"
        checks.append(Check("health", where, level, words, "dflash-ops gpu-status" if gpu.findings else None))
        if gpu.persistence == "Disabled":
            evidence = "persistence mode is off: each first use starts the card anew, which takes seconds"
            checks.append(
                Check(
                    "persistence", where, "warning", evidence, "on the host: systemctl enable --now nvidia-persistenced"
                )
            )
        if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < gpu.power_default_w:
            evidence = f"capped at {gpu.power_limit_w:.0f} W of {gpu.power_default_w:.0f} W"
            fix = f"on the host: nvidia-smi -i {number} -pl {gpu.power_default_w:.0f}"
            checks.append(Check("power cap", where, "warning", evidence, fix))
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            evidence = f"PCIe x{gpu.pcie_width:.0f} of x{gpu.pcie_width_max:.0f}"
            fix = f"on the host: lspci -vv -s {gpu.bus_id[-12:]}; reseat the card, or another slot"
            checks.append(Check("PCIe width", where, "warning", evidence, fix))
    for problem in seen.problems:
        checks.append(
            Check("gpu-status", seen.host, "note", problem, None if "Next: " in problem else "dflash-ops gpu-status")
        )
    return checks


def _programs(container: Container, inside: Mapping[str, Any]) -> list[Check]:
    where = str(container)
    old = _version(inside["python"]) < (3, 9)
    fix = "in the container: apt-get install python3 (3.9 or newer), or another `python` in the inventory"
    checks = [
        Check(
            "python",
            where,
            "failure" if old else "ok",
            f"{container.python} is {inside['python']}",
            fix if old else None,
        )
    ]
    for name, level in (("tmux", "failure"), ("tar", "warning")):
        found = inside["programs"][name]
        fix = None if found else f"in the container: apt-get install {name}"
        checks.append(Check(name, where, "ok" if found else level, found or "it is missing", fix))  # pyright: ignore[reportArgumentType]
    charmap = inside["asked"]["charmap"]["out"].strip() or "unknown"
    plain = "utf" not in charmap.lower() and "utf" not in inside["encoding"].lower()
    checks.append(
        Check(
            "locale", where, "warning" if plain else "ok", charmap, "in the container: LANG=C.UTF-8" if plain else None
        )
    )
    return checks


def _room(container: Container, inside: Mapping[str, Any]) -> list[Check]:
    where, count = str(container), max(1, len(container.gpus))
    checks = _disk("disk", where, inside["disk"], _ROOM, _ENOUGH_ROOM, "checkpoints")
    shm = inside["shm"]["free"] if inside["shm"] else 0
    level: Level = "failure" if shm < _SHM * count else "warning" if shm < _ENOUGH_SHM else "ok"
    fix = None if level == "ok" else "in the container: mount -o remount,size=8G /dev/shm; for good: in its /etc/fstab"
    checks.append(Check("/dev/shm", where, level, f"{_size(shm)} are free", fix))
    memory = inside["memory"]
    if memory is not None:
        level = "failure" if memory < _MEMORY else "warning" if memory < _ENOUGH_MEMORY else "ok"
        fix = None if level == "ok" else f"on the host: pct set {container.vmid} --memory 32768"
        checks.append(Check("memory limit", where, level, _size(memory), fix))
    return checks


def _disk(name: str, where: str, disk: Mapping[str, Any] | None, least: int, enough: int, wanting: str) -> list[Check]:
    """wanting: what needs the room there. Releases lie on a container's disk alone, and removing them makes it no
    larger than it is."""
    if disk is None:
        return []
    checks: list[Check] = []
    level: Level = "failure" if disk["free"] < least else "warning" if disk["free"] < enough else "ok"
    evidence = f"{disk['folder']}: {_size(disk['free'])} free of {_size(disk['size'])}"
    fix = None
    if level != "ok":
        evidence += f"; {_size(enough)} wanted for {wanting}"
        helps = wanting == "checkpoints" and disk["size"] >= (least if level == "failure" else enough)
        prune = "dflash-ops prune --keep 3, or " if helps else ""
        room = "a larger disk" if wanting == "checkpoints" else "make room on the host"
        fix = f"{prune}{room} (df -h {shlex.quote(disk['folder'])})"
    checks.append(Check(name, where, level, evidence, fix))
    left = disk["inodes_free"]
    if left is not None and left < _INODES:
        fix = f"remove small files there (df -i {shlex.quote(disk['folder'])})"
        checks.append(Check(f"{name} inodes", where, "failure", f"{left} inodes are free", fix))
    return checks


def _left(container: Container, inside: Mapping[str, Any]) -> list[Check]:
    where = str(container)
    checks = _stale(where, inside)
    for run_id, pids in sorted(inside["orphans"].items()):
        evidence = f"{run_id} is over, and {len(pids)} of its processes live: {', '.join(map(str, pids[:5]))}"
        checks.append(Check("orphaned run", where, "warning", evidence, f"dflash-ops train stop {run_id}"))
    if not inside["orphans"]:
        checks.append(Check("orphaned runs", where, "ok", "none"))
    return checks


def _stale(where: str, facts: Mapping[str, Any]) -> list[Check]:
    if not facts["stale"]:
        return [Check("stale staging", where, "ok", "none")]
    files = [it["file"] for it in facts["stale"]]
    evidence = f"{len(files)} left by deploys or starts that were killed, the first {files[0]}"
    return [Check("stale staging", where, "note", evidence, "dflash-ops doctor --fix")]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split(":")[-1].split("-")[0])[:3])


def _size(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"
