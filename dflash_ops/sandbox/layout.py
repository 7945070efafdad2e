"""Where things lie in the hypervisor, and which containers it has."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SUPPORT = Path("/var/lib/sandbox")
# The cluster. Its nodes share one machine and one /etc/pve; a process is on the node that its host name says.
NODES = ("pve", "pve2")
NODE = os.uname().nodename if SUPPORT.is_dir() and os.uname().nodename in NODES else NODES[0]
UNPRIVILEGED_BASE = 100_000
UNPRIVILEGED_COUNT = 65_536
CONTAINER_PATH = "/opt/dflash"
_UVM_MAJOR = "511"  # of nvidia-uvm, where the machine's kernel has none


def configs(node: str) -> Path:
    """Where the configs of a node's containers lie."""
    return Path("/etc/pve/nodes", node, "lxc")


def running(node: str) -> Path:
    """Where the markers of a node's running containers lie."""
    return Path("/run/lxc" if node == NODES[0] else f"/run/lxc-{node}")


CONFIGS = configs(NODE)
CONFIG_MODE = 0o640  # of root and www-data: not for every user
LOCKS = Path("/run/lock/lxc")
ROOTS = Path("/var/lib/lxc")
RUNNING = running(NODE)
SETTINGS = SUPPORT / "settings.json"
DRIVER = SUPPORT / "driver"
PCT_DELAY = SUPPORT / "pct-delay"
MODELS = SUPPORT / "models"
GPU_SOCKET = Path("/run/sandbox-gpu.sock")
FAULTS = SUPPORT / "api-faults.json"
CA = Path("/etc/pve/pve-root-ca.pem")
USERS, TOKENS = Path("/etc/pve/user.cfg"), Path("/etc/pve/priv/token.cfg")
TASKS = Path("/var/log/pve/tasks")
SNAPSHOTS = SUPPORT / "snapshots"
KERNEL_LOG = Path("/var/log/sandbox-kernel.json")  # lines as `journalctl -k -o json` gives them

# Where a real hypervisor keeps them.
PCT_FOLDER, PVESH_FOLDER, LXC_ATTACH_FOLDER, NVIDIA_SMI_FOLDER = "/usr/sbin", "/usr/bin", "/usr/bin", "/usr/bin"
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class Template(NamedTuple):
    """A container that `up` makes."""

    vmid: int
    unprivileged: bool
    running: bool
    gpus: str = ""

    @property
    def hostname(self) -> str:
        return f"train{self.vmid}"

    @property
    def owner(self) -> int:
        """The machine's id of the container's user 0."""
        return UNPRIVILEGED_BASE if self.unprivileged else 0

    def config(self, devices: Sequence[str] = ()) -> str:
        """The text of its file below /etc/pve. devices: the GPUs' files that it gets"""
        mac = f"BC:24:11:00:02:{self.vmid - 200:02X}"
        lines = [
            "arch: amd64",
            "cores: 2",
            f"hostname: {self.hostname}",
            "memory: 8192",
            f"net0: name=eth0,bridge=vmbr0,hwaddr={mac},ip=dhcp,type=veth",
            "ostype: debian",
            f"rootfs: local-lvm:vm-{self.vmid}-disk-0,size=8G",
            "swap: 512",
        ]
        lines += ["unprivileged: 1"] if self.unprivileged else []
        return "".join(f"{line}\n" for line in [*lines, *self._gpu_lines(devices)])

    def _gpu_lines(self, devices: Sequence[str]) -> list[str]:
        """How GPUs are passed in: as entries, which Proxmox VE has since 8.2, or by hand; some containers have none."""
        if self.gpus == "entries":
            return [f"dev{number}: {device},mode=0666" for number, device in enumerate(devices)]
        if self.gpus != "by hand" or not devices:
            return []
        rows = Path("/proc/devices").read_text().split("\n")
        uvm = [row.split()[0] for row in rows if row.endswith(" nvidia-uvm")]
        allowed = [f"lxc.cgroup2.devices.allow: c {major}:* rwm" for major in ("195", *(uvm or [_UVM_MAJOR]))]
        mounts = [f"{device} {device.lstrip('/')} none bind,optional,create=file" for device in devices]
        return [*allowed, *(f"lxc.mount.entry: {mount}" for mount in mounts)]


CONTAINERS = (
    Template(200, unprivileged=False, running=True, gpus="entries"),
    Template(201, unprivileged=True, running=True, gpus="by hand"),
    Template(202, unprivileged=False, running=False),
)
