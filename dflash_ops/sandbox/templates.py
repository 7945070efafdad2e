"""The containers that `up` makes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_ops.sandbox.layout import UNPRIVILEGED_BASE

_UVM_MAJOR = "511"  # of nvidia-uvm, where the machine's kernel has none


class Template(NamedTuple):
    """One of them."""

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
