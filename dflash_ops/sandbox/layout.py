"""Where things lie in the hypervisor, as strings: what loads on every call of `pct` does without pathlib."""

import os

SUPPORT = "/var/lib/sandbox"
# The cluster. Its nodes share one machine and one /etc/pve; a process is on the node that its host name says.
NODES = ("pve", "pve2")
NODE = os.uname().nodename if os.path.isdir(SUPPORT) and os.uname().nodename in NODES else NODES[0]
UNPRIVILEGED_BASE = 100_000
UNPRIVILEGED_COUNT = 65_536
CONTAINER_PATH = "/opt/dflash"


def configs(node: str) -> str:
    """Where the configs of a node's containers lie."""
    return f"/etc/pve/nodes/{node}/lxc"


def config_file(vmid: int, node: str) -> str:
    return f"{configs(node)}/{vmid}.conf"


def running(node: str) -> str:
    """Where the markers of a node's running containers lie."""
    return "/run/lxc" if node == NODES[0] else f"/run/lxc-{node}"


def container_root(vmid: int) -> str:
    """Where a container's own files lie."""
    return f"/var/lib/lxc/{vmid}/rootfs"


CONFIGS = configs(NODE)
CONFIG_MODE = 0o640  # of root and www-data: not for every user
LOCKS = "/run/lock/lxc"
RUNNING = running(NODE)
SETTINGS = f"{SUPPORT}/settings.json"
DRIVER = f"{SUPPORT}/driver"
PCT_DELAY = f"{SUPPORT}/pct-delay"
MODELS = f"{SUPPORT}/models"
GPU_SOCKET = "/run/sandbox-gpu.sock"
FAULTS = f"{SUPPORT}/api-faults.json"
CA = "/etc/pve/pve-root-ca.pem"
USERS, TOKENS = "/etc/pve/user.cfg", "/etc/pve/priv/token.cfg"
TASKS = "/var/log/pve/tasks"
SNAPSHOTS = f"{SUPPORT}/snapshots"
KERNEL_LOG = "/var/log/sandbox-kernel.json"  # lines as `journalctl -k -o json` gives them

# Where a real hypervisor keeps them.
PCT_FOLDER, PVESH_FOLDER, LXC_ATTACH_FOLDER, NVIDIA_SMI_FOLDER = "/usr/sbin", "/usr/bin", "/usr/bin", "/usr/bin"
PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
