"""Where things lie in the hypervisor, and which containers it has."""

from pathlib import Path
from typing import NamedTuple

NODE = "pve"
UNPRIVILEGED_BASE = 100_000
UNPRIVILEGED_COUNT = 65_536
CONTAINER_PATH = "/opt/dflash"

CONFIGS = Path("/etc/pve/nodes", NODE, "lxc")
LOCKS = Path("/run/lock/lxc")
ROOTS = Path("/var/lib/lxc")
RUNNING = Path("/run/lxc")
SUPPORT = Path("/var/lib/sandbox")
SETTINGS = SUPPORT / "settings.json"
PCT_DELAY = SUPPORT / "pct-delay"
MODELS = SUPPORT / "models"
GPU_SOCKET = Path("/run/sandbox-gpu.sock")
KERNEL_LOG = Path("/var/log/sandbox-kernel.json")  # lines as `journalctl -k -o json` gives them

# Where a real hypervisor keeps them.
PCT_FOLDER, LXC_ATTACH_FOLDER, NVIDIA_SMI_FOLDER = "/usr/sbin", "/usr/bin", "/usr/bin"
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class Template(NamedTuple):
    """A container that `up` makes."""

    vmid: int
    unprivileged: bool
    running: bool

    @property
    def hostname(self) -> str:
        return f"train{self.vmid}"

    @property
    def owner(self) -> int:
        """The machine's id of the container's user 0."""
        return UNPRIVILEGED_BASE if self.unprivileged else 0

    def config(self) -> str:
        """The text of its file below /etc/pve."""
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
        return "\n".join([*lines, "unprivileged: 1"] if self.unprivileged else lines) + "\n"


CONTAINERS = (
    Template(200, unprivileged=False, running=True),
    Template(201, unprivileged=True, running=True),
    Template(202, unprivileged=False, running=False),
)
