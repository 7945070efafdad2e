"""The system calls that Python 3.11 has no name for (mounts, namespaces, capabilities), or one that costs too much.

Light: the programs inside the sandbox import it on every call. Every function raises OSError.
"""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

# Of a pseudo-terminal's master: its number; locked or not.
TIOCGPTN = 0x80045430
TIOCSPTLCK = 0x40045431

# As the module signal has them: that loads enum, which would cost each `lxc-attach` 10 ms of CPU.
SIGINT, SIGQUIT, SIGPIPE, SIGXFSZ = 2, 3, 13, 25
_SIG_DFL, _SIG_IGN = 0, 1

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24

# Numbered alike on every architecture: they came after the tables were unified.
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1

# What LXC takes from a privileged container, and mknod, which a real one has but confines by a device cgroup.
DROPPED_CAPABILITIES = {
    "sys_module": 16,
    "sys_rawio": 17,
    "sys_boot": 22,
    "sys_time": 25,
    "mknod": 27,
    "mac_override": 32,
    "mac_admin": 33,
    "syslog": 34,
}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def unshare(flags: int) -> None:
    """Leave the named namespaces for fresh ones (CLONE_NEWPID: from the next child on)."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int, kind: int = 0) -> None:
    """Enter the namespace that an open /proc/PID/ns file names."""
    _checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), os.fsencode(kind), ctypes.c_ulong(flags), os.fsencode(options)
    )
    _checked(result, f"mount {source} on {target}")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def change_root(new_root: str) -> None:
    """Make `new_root`, a mount point, the root folder, and let go of the old one."""
    os.chdir(new_root)
    # Inside a user namespace the mounts taken along are locked to their parents; a fresh bind of the root is not.
    mount(".", ".", "", MS_BIND | MS_REC)
    os.chdir(new_root)
    _checked(_libc.pivot_root(b".", b"."), f"pivot_root to {new_root}")
    # The old root now lies over the new one at the same place: the topmost goes.
    unmount(".")
    os.chdir("/")


def bind(source: str, target: str, *, read_only: bool = True, recursive: bool = True) -> None:
    """Show `source` (a folder or a file) at `target`, which must exist; read-only reaches the submounts too."""
    mount(source, target, "", MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Make the mount at `target` and every mount below it read-only."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    if result == 0:
        return
    # No mount_setattr (kernels before 5.12, gVisor): one remount for each mount, with the flags that it has.
    for path, flags in _mounts_below(target):
        mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def _mounts_below(target: str) -> list[tuple[str, int]]:
    names = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}
    top = os.path.realpath(target)
    with open("/proc/self/mountinfo", "rb") as file:
        rows = file.read().decode("utf-8", "surrogateescape").split("\n")
    found: list[tuple[str, int]] = []
    for row in rows:
        words = row.split(" ")
        if len(words) < 6:
            continue
        path = words[4].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1").decode("utf-8")
        if path == top or path.startswith(top.rstrip("/") + "/"):
            found.append((path, sum(names.get(option, 0) for option in words[5].split(","))))
    return found


def die_with_parent(signal_number: int) -> None:
    """Have this signal sent to us when the process that forked us ends; forgotten when our user id changes."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")


def ignore_signals(*numbers: int) -> None:
    """For this process and what it becomes."""
    for number in numbers:
        _libc.signal(ctypes.c_int(number), ctypes.c_void_p(_SIG_IGN))


def default_signals(*numbers: int) -> None:
    """For this process and what it becomes."""
    for number in numbers:
        _libc.signal(ctypes.c_int(number), ctypes.c_void_p(_SIG_DFL))


def set_process_name(name: str) -> None:
    """The name in /proc/PID/comm: at most 15 bytes."""
    _checked(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Take DROPPED_CAPABILITIES from what the next exec may hold. Those the kernel does not know are skipped."""
    for number in DROPPED_CAPABILITIES.values():
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)


def set_hostname(name: str) -> None:
    data = name.encode()
    _checked(_libc.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor that is not among `kept`."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                pass  # the listing's own descriptor is gone already
