"""A container's life from start to stop, made of namespaces inside the hypervisor's. Runs in the hypervisor.

start                      setup (forked)                     init (forked by setup)
  makes the cgroup           own mount namespace
  forks setup                puts the root together
  writes the id maps  <---   new user namespace (unprivileged)
  notes init's pid    <---   new mount, pid, uts, ipc ones, ends   mounts /proc and its like
  returns             <-------------------------------------------  changes root, says ready, reaps for ever
"""

import contextlib
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

from dflash_ops.sandbox import cgroups, containers, driver, kernel, layout, rootfs
from dflash_ops.sandbox.processes import ProcessId
from dflash_ops.sandbox.settings import Settings

UPTIME_SECONDS = 0.25  # how old /proc/uptime may be inside


class StartError(Exception):
    """A container did not start; the text says why."""


def stop(vmid: int) -> None:
    """Kill the container: its init's death ends all that runs in it."""
    identity = containers.init_of(vmid)
    if identity is not None and not identity.kill():
        raise StartError(f"container {vmid} does not end")
    Path(layout.RUNNING, f"{vmid}.init").unlink(missing_ok=True)


def shutdown(vmid: int, seconds: float) -> bool:
    """Ask the container's init to end cleanly; False when it has not after `seconds`."""
    identity = containers.init_of(vmid)
    if identity is None:
        return True
    identity.signal(signal.SIGPWR)
    return identity.wait(seconds)


def start(vmid: int) -> None:
    """Start the container and return when its init runs; StartError when that fails."""
    config = dict(containers.read_config(vmid) or [])
    owner = layout.UNPRIVILEGED_BASE if containers.is_unprivileged(vmid) else 0
    cgroups.create_container_group(vmid, owner)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    setup = os.fork()
    if setup == 0:
        _setup(vmid, config.get("hostname", f"CT{vmid}"), owner, theirs)
    theirs.close()
    try:
        _follow_setup(vmid, setup, ours)
    finally:
        ours.close()
        os.waitpid(setup, 0)


def _follow_setup(vmid: int, setup: int, channel: socket.socket) -> None:
    while True:
        message, _, rest = channel.recv(4096).decode().partition(" ")
        match message:
            case "map":
                line = f"0 {layout.UNPRIVILEGED_BASE} {layout.UNPRIVILEGED_COUNT}\n"
                Path(f"/proc/{setup}/uid_map").write_text(line)
                Path(f"/proc/{setup}/gid_map").write_text(line)
                channel.send(b"mapped")
            case "init":
                identity = ProcessId.of(int(rest))
                running = Path(layout.RUNNING)
                running.mkdir(parents=True, exist_ok=True)
                draft = running / f"{vmid}.new"
                draft.write_text(str(identity))
                draft.rename(running / f"{vmid}.init")
                channel.send(b"noted")
            case "ready":
                return
            case _:
                raise StartError(rest or f"the setup of container {vmid} ended early")


def _setup(vmid: int, hostname: str, owner: int, channel: socket.socket) -> NoReturn:
    """In the first child: never returns."""
    try:
        os.setsid()
        _let_go_of_files(channel)
        cgroups.enter(cgroups.container_group(vmid))
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        root = Path(layout.container_root(vmid))
        _put_together(vmid, root, owner)
        if owner:
            driver.hide()
            kernel.unshare(kernel.CLONE_NEWUSER)
            channel.send(b"map")
            channel.recv(16)
            os.setgroups([])
            os.setgid(0)
            os.setuid(0)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
        init = os.fork()
        if init:
            channel.send(f"init {init}".encode())
            os._exit(0)
        channel.recv(16)
        _init(root, hostname, channel)
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send(f"failed {type(error).__name__}: {error}".encode()[:4000])
    os._exit(1)


def _let_go_of_files(channel: socket.socket) -> None:
    """Close all that was inherited: an ssh channel's pipes, the lock of a `pct start`."""
    kernel.close_all_but({0, 1, 2, channel.fileno()})
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _put_together(vmid: int, root: Path, owner: int) -> None:
    """Mount the container's root: its own disk is there already, the rest comes over it."""
    settings = Settings.from_json(Path(layout.SETTINGS).read_text())
    rootfs.show_machine(root, settings.binds, owner)
    rootfs.make_devices(root, owner)
    for device in sorted(Path("/dev").glob("nvidia*")):
        rootfs.bind_at(root, str(device), owner, read_only=False)
    layers: dict[str, rootfs.Layer] = {}
    rootfs.take_away(root, settings.without.get(str(vmid), []), layers)
    support = Path(layout.SUPPORT)
    if (support / "nvidia-smi").exists():
        layers.setdefault(layout.NVIDIA_SMI_FOLDER, rootfs.Layer()).add["nvidia-smi"] = support / "nvidia-smi"
    if Path(layout.GPU_SOCKET).exists():
        rootfs.bind_at(root, "/dev/nvidia-sandbox", owner, layout.GPU_SOCKET, read_only=False)
        for stdlib in {settings.stdlib, *map(str, Path("/usr/lib").glob("python3.[0-9]*"))}:
            layers.setdefault(stdlib, rootfs.Layer()).add["sitecustomize.py"] = support / "sitecustomize.py"
    scratch = support / "layers" / str(vmid)
    shutil.rmtree(scratch, ignore_errors=True)
    rootfs.apply_layers(root, layers, scratch)
    if Path(layout.MODELS).is_dir():
        rootfs.bind_at(root, f"{layout.CONTAINER_PATH}/shared/models", owner, layout.MODELS)


def _init(root: Path, hostname: str, channel: socket.socket) -> NoReturn:
    """Process 1 of the container."""
    kernel.set_hostname(hostname)
    rootfs.mount_kernel_views(root)
    driver.show(Path(layout.DRIVER), root)
    uptime = _virtual_uptime(root)
    for name in ("sys", "sysrq-trigger"):
        with contextlib.suppress(FileNotFoundError):
            kernel.bind(str(root / "proc" / name), str(root / "proc" / name), recursive=False)
    cgroups.mount_own(str(root))
    kernel.change_root(str(root))
    kernel.set_process_name("init")
    # What Python installed for itself; from inside, a signal that process 1 leaves at its default does nothing to it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGPWR})
    channel.send(b"ready")
    channel.close()
    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    while True:
        if uptime is not None:
            seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
            os.pwrite(uptime, b"%.2f %.2f\n" % (seconds, seconds * (os.cpu_count() or 1)), 0)
        _reap()
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGPWR}, UPTIME_SECONDS)
        if received is not None and received.si_signo == signal.SIGPWR:
            _end_cleanly()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_cleanly() -> NoReturn:
    """SIGTERM to all, up to five seconds for them to end, then the end of process 1 kills the rest."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
    for _ in range(50):
        _reap()
        if [path.name for path in Path("/proc").iterdir() if path.name.isdigit()] == ["1"]:
            break
        time.sleep(0.1)
    os._exit(0)


def _virtual_uptime(root: Path) -> int | None:
    """A file of ours over /proc/uptime, counting from the container's start as lxcfs does; its descriptor."""
    folder = root / "run/.uptime"
    folder.mkdir()
    kernel.mount("lxcfs", str(folder), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=16k")
    descriptor = os.open(folder / "uptime", os.O_WRONLY | os.O_CREAT, 0o444)
    try:
        kernel.bind(str(folder / "uptime"), str(root / "proc/uptime"))
    except OSError:
        os.close(descriptor)
        descriptor = None
    kernel.unmount(str(folder))
    folder.rmdir()
    return descriptor
