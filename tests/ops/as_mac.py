"""Makes this Python one of a Mac, as far as a program can tell: what only Linux has is gone.

    python -c 'import as_mac; as_mac.become(); ...'

It must be the first import: libraries look once, when they are loaded. What a Mac does otherwise with the same names
(a file system without upper and lower case, poll on a terminal) is not shown by this.
"""

import fcntl
import importlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

# By module, what CPython has on Linux and not on macOS: its documentation's "Availability" of each, and configure's.
LINUX_ONLY: dict[Any, str] = {
    os: """
        CLONE_ EFD_ GRND_ MFD_ O_DIRECT$ O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE P_PIDFD PIDFD_ POSIX_FADV_ RWF_
        SCHED_BATCH SCHED_IDLE SCHED_RESET SPLICE_ TFD_ XATTR_ copy_file_range eventfd fdatasync getrandom
        getresgid getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate preadv2
        removexattr sched_getaffinity sched_getparam sched_getscheduler sched_param sched_rr_get_interval
        sched_setaffinity sched_setparam sched_setscheduler setns setresgid setresuid setxattr splice timerfd unshare
        waitid
    """,
    select: "EPOLL epoll",
    signal: "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: """
        AF_ALG AF_BLUETOOTH AF_CAN AF_NETLINK AF_PACKET AF_QIPCRTR AF_TIPC AF_VSOCK MSG_CMSG_CLOEXEC MSG_CONFIRM
        MSG_ERRQUEUE MSG_FASTOPEN MSG_MORE MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_MARK
        SO_INCOMING_CPU SO_PASSCRED SO_PASSSEC SO_PEERCRED SO_PEERSEC SO_PRIORITY SO_PROTOCOL TCP_CONGESTION TCP_CORK
        TCP_DEFER_ACCEPT TCP_INFO TCP_KEEPIDLE TCP_LINGER2 TCP_QUICKACK TCP_SYNCNT TCP_USER_TIMEOUT TCP_WINDOW_CLAMP
    """,
    fcntl: """
        DN_ F_ADD_SEALS F_GETLEASE F_GETPIPE_SZ F_GETSIG F_GET_SEALS F_NOTIFY F_OFD_ F_SEAL_ F_SETLEASE F_SETPIPE_SZ
    """,
    resource: """
        RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING RUSAGE_THREAD prlimit
    """,
    selectors: "EpollSelector",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
NOT_THERE = ("/proc", "/sys", "/dev/shm", "/run", "/etc/os-release")


def become() -> None:
    """Takes away what a Mac does not have, from here on and for the whole process."""
    for module, names in LINUX_ONLY.items():
        for word in names.split():
            for name in [
                it for it in dir(module) if it == word.rstrip("$") or (word[-1] == "_" and it.startswith(word))
            ]:
                delattr(module, name)
    importlib.reload(selectors)  # it chose the default one when it was loaded
    # urllib asks it for the system's proxies.
    proxies = types.ModuleType("_scproxy")
    proxies._get_proxies = proxies._get_proxy_settings = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies
    for name in ("spwd", "_posixshmem"):
        sys.modules[name] = None  # type: ignore[assignment]
    # Our Python was not built on one.
    os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = f"_sysconfigdata_{sys.abiflags}_linux_{sys.implementation._multiarch}"
    sys.platform = "darwin"
    real = os.uname()
    os.uname = lambda: os.uname_result(("Darwin", real.nodename, "24.0.0", "Darwin Kernel", "arm64"))
    for name in ("stat", "lstat", "readlink", "access", "open", "listdir", "scandir"):
        function = getattr(os, name)
        setattr(os, name, _without_linux(function))
        for can in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if function in can:
                can.add(getattr(os, name))
    sys.addaudithook(_audit)


def _is_linux(path: object) -> bool:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    text = str(path) if isinstance(path, str | os.PathLike) else ""
    return any(text == place or text.startswith(place + "/") for place in NOT_THERE)


def _without_linux(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *rest: Any, **more: Any) -> Any:
        if _is_linux(path):
            if function.__name__ == "access":
                return False
            raise FileNotFoundError(2, "No such file or directory (a Mac has none)", str(path))
        return function(path, *rest, **more)

    return call


def _audit(event: str, values: tuple[Any, ...]) -> None:
    if event == "open" and values and _is_linux(values[0]):
        raise FileNotFoundError(2, "No such file or directory (a Mac has none)", str(values[0]))
