"""A group of the unified cgroup hierarchy for the sandbox, laid out as Proxmox lays out its own.

    dflash-sandbox-NAME-PID/        the hypervisor's processes; the root of what the hypervisor sees
      lxc/200/ns/                   container 200's init; the root of what the container sees
        .lxc/                       everything that lxc-attach ever put there, together

Where the unified hierarchy is missing or not writable, processes stay in the cgroup that they are in: no function
fails for that. Light: every `lxc-attach` imports it.
"""

import os

from dflash_ops.sandbox import kernel

MOUNT = "/sys/fs/cgroup"


def unified_hierarchy() -> str | None:
    """This process's own group in the unified hierarchy, as a folder; None where there is none."""
    with open("/proc/self/mountinfo", errors="replace") as file:
        places = [row.split(" ")[4] for row in file.read().split("\n") if " - cgroup2 " in row]
    with open("/proc/self/cgroup") as file:
        own = [row[3:] for row in file.read().split("\n") if row.startswith("0::")]
    return (places[0] + own[0]).rstrip("/") if places and own else None


def place_for(name: str) -> str | None:
    """Where the group of this process's sandbox goes, below our own; None where there is no hierarchy."""
    base = unified_hierarchy()
    return None if base is None else f"{base}/dflash-sandbox-{name}-{os.getpid()}"


def create(group: str | None) -> str | None:
    """Make the group; None where that can't be done."""
    if group is None:
        return None
    try:
        os.mkdir(group)
    except OSError:
        return None
    return group


def enter(group: str) -> None:
    """Move this process into the group, if it exists."""
    try:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")
    except OSError:
        pass


def mount_own(root: str) -> None:
    """Make the group that this process is in the root of what it sees, and mount that below `root`."""
    try:
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("cgroup2", f"{root}{MOUNT}", "cgroup2", flags)
    except OSError:
        pass


def container_group(vmid: int) -> str:
    """The group of a container's init, as the hypervisor sees it."""
    return f"{MOUNT}/lxc/{vmid}/ns"


def create_container_group(vmid: int, owner: int) -> None:
    """Make the groups of a container and hand them to its user 0."""
    group = container_group(vmid)
    try:
        os.makedirs(f"{group}/.lxc", exist_ok=True)
        for folder in (group, f"{group}/.lxc"):
            for path in (folder, f"{folder}/cgroup.procs", f"{folder}/cgroup.subtree_control"):
                os.chown(path, owner, owner)
    except OSError:
        pass


def remove(group: str) -> None:
    """Remove a group and those below it; all must be empty of processes."""
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass
