"""What the API tells of nodes and containers, read from where it lies. Runs in the hypervisor."""

import base64
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any

from dflash_ops.sandbox import cgroups, containers, faults, layout
from dflash_ops.sandbox.guest_config import Config

VERSION = {"release": "9.2", "version": "9.2.11", "repoid": "dd7e9e1f0b2a4c5d"}
_NUMBERS = {
    "cores",
    "cpulimit",
    "cpuunits",
    "memory",
    "swap",
    "unprivileged",
    "onboot",
    "protection",
    "tty",
    "template",
}


def node_of(vmid: int) -> str | None:
    """The node that has the container."""
    found = [node for node in layout.NODES if Path(layout.config_file(vmid, node)).exists()]
    return found[0] if found else None


def missing(node: str, vmid: int) -> str:
    return f"Configuration file 'nodes/{node}/lxc/{vmid}.conf' does not exist"


def status(vmid: int, node: str) -> dict[str, Any]:
    """What a list of containers has of one."""
    config = dict(containers.read_config(vmid, node) or [])
    init = containers.init_of(vmid, node)
    facts: dict[str, Any] = {
        "vmid": vmid,
        "status": "running" if init else "stopped",
        "type": "lxc",
        "name": config.get("hostname", f"CT{vmid}"),
        "cpus": int(config.get("cores", "1")),
        "cpu": 0,
        "mem": _charged(vmid) if init else 0,
        "maxmem": int(config.get("memory", "512")) << 20,
        "swap": 0,
        "maxswap": int(config.get("swap", "512")) << 20,
        "disk": _used(vmid) if init else 0,
        "maxdisk": _size(config.get("rootfs", "")),
        "diskread": 0,
        "diskwrite": 0,
        "netin": 0,
        "netout": 0,
        "uptime": 0,
    }
    if init is not None:
        facts["pid"] = init.pid
        facts["uptime"] = int(time.clock_gettime(time.CLOCK_BOOTTIME) - init.start / os.sysconf("SC_CLK_TCK"))
        facts |= dict.fromkeys(("pressurecpusome", "pressureiofull", "pressureiosome", "pressurememorysome"))
    return facts | {key: config[key] for key in ("lock", "tags") if key in config}


def config(vmid: int, node: str, snapshot: str | None = None) -> dict[str, Any]:
    """A container's config as the API gives it: numbers as numbers, raw lines as pairs, and a digest."""
    read = Config.read(vmid, node)
    facts: dict[str, Any] = {}
    for key, value in read.pairs(snapshot):
        if key.startswith("lxc."):
            facts.setdefault("lxc", []).append([key, value])
        else:
            facts[key] = int(value) if key in _NUMBERS and value.isdigit() else value
    if text := read.description(snapshot):
        facts["description"] = text
    facts["digest"] = hashlib.sha1(Path(layout.config_file(vmid, node)).read_bytes()).hexdigest()
    return facts


def snapshots(vmid: int, node: str) -> list[dict[str, Any]]:
    """The snapshots, and at the end what is there now."""
    read = Config.read(vmid, node)
    rows: list[dict[str, Any]] = []
    for name in read.sections:
        row = {"name": name, "snaptime": int(read.value("snaptime", name) or 0), "description": read.description(name)}
        rows.append(row | ({"parent": parent} if (parent := read.value("parent", name)) else {}))
    now: dict[str, Any] = {
        "name": "current",
        "description": "You are here!",
        "digest": config(vmid, node)["digest"],
        "running": int(containers.init_of(vmid, node) is not None),
    }
    return [*rows, now | ({"parent": parent} if (parent := read.value("parent")) else {})]


def node(name: str, audited: bool) -> dict[str, Any]:
    """A row of the list of nodes; what it is loaded with only for whom `audited` says so."""
    down = name in faults.read().down
    row: dict[str, Any] = {
        "node": name,
        "type": "node",
        "id": f"node/{name}",
        "status": "offline" if down else "online",
        "ssl_fingerprint": fingerprint(name),
    }
    if audited and not down:
        memory = _memory()
        row |= {"cpu": 0.01, "maxcpu": os.cpu_count() or 1, "uptime": _uptime(), "level": ""}
        row |= {"mem": memory["used"], "maxmem": memory["total"], "disk": 0, "maxdisk": _root_size()}
    return row


def node_status() -> dict[str, Any]:
    """What /nodes/N/status tells: one machine stands for every node."""
    release = os.uname().release
    return {
        "cpu": 0.01,
        "uptime": _uptime(),
        "loadavg": [f"{load:.2f}" for load in os.getloadavg()],
        "kversion": f"Linux {release}",
        "pveversion": f"pve-manager/{VERSION['version']}/{VERSION['repoid']}",
        "current-kernel": {"sysname": "Linux", "release": release, "version": "#1", "machine": os.uname().machine},
        "cpuinfo": {"cpus": os.cpu_count() or 1, "sockets": 1},
        "memory": _memory(),
        "rootfs": {"total": _root_size(), "used": 0, "avail": _root_size(), "free": _root_size()},
    }


def fingerprint(node: str) -> str:
    """SHA-256 of the certificate that a node says is its own."""
    try:
        text = (Path(layout.configs(node)).parent / "pve-ssl.pem").read_text()
    except FileNotFoundError:
        return ""
    body = "".join(line for line in text.split("\n") if not line.startswith("-----"))
    digest = hashlib.sha256(base64.b64decode(body)).hexdigest().upper()
    return ":".join(re.findall("..", digest))


def _size(rootfs: str) -> int:
    found = re.search(r"size=(\d+)([KMGT]?)", rootfs)
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]] if found else 0


def _used(vmid: int) -> int:
    disk = os.statvfs(layout.container_root(vmid))
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _charged(vmid: int) -> int:
    try:
        return int(Path(cgroups.container_group(vmid), "memory.current").read_text())
    except (OSError, ValueError):
        return 0


def _memory() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().split("\n") if line)
    sizes = {row[0]: int(row[1]) << 10 for row in rows}
    total, free = sizes["MemTotal:"], sizes["MemAvailable:"]
    return {"total": total, "free": free, "used": total - free}


def _root_size() -> int:
    disk = os.statvfs("/")
    return disk.f_blocks * disk.f_frsize


def _uptime() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME))
