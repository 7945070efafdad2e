"""A group of the unified cgroup hierarchy for the sandbox, laid out as Proxmox lays out its own.

    dflash-sandbox-NAME-PID/        the hypervisor's processes; the root of what the hypervisor sees
      lxc/200/ns/                   container 200's init; the root of what the container sees
        .lxc/                       everything that lxc-attach ever put there, together

Where the unified hierarchy is missing or not writable, processes stay in the cgroup that they are in: no function
fails for that.
"""

import contextlib
import os
from pathlib import Path

from dflash_ops.sandbox import kernel

MOUNT = Path("/sys/fs/cgroup")


def unified_hierarchy() -> Path | None:
    """This process's own group in the unified hierarchy, as a folder; None where there is none."""
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").split("\n")
    places = [row.split(" ")[4] for row in mounts if " - cgroup2 " in row]
    own = [row[3:] for row in Path("/proc/self/cgroup").read_text().split("\n") if row.startswith("0::")]
    return Path(places[0] + own[0]) if places and own else None


def place_for(name: str) -> Path | None:
    """Where the group of this process's sandbox goes, below our own; None where there is no hierarchy."""
    base = unified_hierarchy()
    return base / f"dflash-sandbox-{name}-{os.getpid()}" if base else None


def create(group: Path | None) -> Path | None:
    """Make the group; None where that can't be done."""
    if group is None:
        return None
    try:
        group.mkdir()
    except OSError:
        return None
    return group


def enter(group: Path) -> None:
    """Move this process into the group, if it exists."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def mount_own(root: Path) -> None:
    """Make the group that this process is in the root of what it sees, and mount that below `root`."""
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("cgroup2", str(root) + str(MOUNT), "cgroup2", flags)


def container_group(vmid: int) -> Path:
    """The group of a container's init, as the hypervisor sees it."""
    return MOUNT / "lxc" / str(vmid) / "ns"


def create_container_group(vmid: int, owner: int) -> None:
    """Make the groups of a container and hand them to its user 0."""
    group = container_group(vmid)
    with contextlib.suppress(OSError):
        (group / ".lxc").mkdir(parents=True, exist_ok=True)
        for folder in (group, group / ".lxc"):
            for path in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
                os.chown(path, owner, owner)


def remove(group: Path) -> None:
    """Remove a group and those below it; all must be empty of processes."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
