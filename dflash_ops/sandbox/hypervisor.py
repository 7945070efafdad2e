"""The hypervisor: a root of its own, and the init that starts and outlives nothing.

`run` is the first process of a fresh pid namespace. It puts the root together, forks the SSH server and the fake GPUs'
daemon, starts the containers, and then reaps. When it ends, the kernel ends all that runs in the namespace.
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dflash_ops.sandbox import cgroups, container, gpud, kernel, layout, rootfs
from dflash_ops.sandbox.settings import Settings

FAKE_GPUS = 2
_PACKAGE = Path(__file__).parent
_LAUNCHER = """#!{python} -IS
import sys
sys.path.insert(0, "{support}/python")
from dflash_ops.sandbox.{module} import main
main()
"""


def run(settings: Settings, group: Path | None, server: Callable[[int], NoReturn], ready: int) -> NoReturn:
    """Be the hypervisor's init. `ready`: a pipe that gets one line of JSON, {"port": …} or {"error": …}.

    server: serves SSH in the process it is called in, and writes its port to the pipe that it is given.
    """
    try:
        kernel.die_with_parent(signal.SIGKILL)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # whoever called `up` waits for the end of the guard's stdout
        _build(settings, group)
        essential = _start_services(settings, server)
        for template in layout.CONTAINERS:
            if template.running:
                container.start(template.vmid)
        port = int(os.read(essential.pop("port"), 16) or b"0")
        os.write(ready, json.dumps({"port": port} if port else {"error": "the SSH server did not start"}).encode())
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(ready, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.close(ready)
    _reap_until(set(essential.values()))


def _reap_until(essential: set[int]) -> NoReturn:
    """Wait for children, adopted ones too, until one that the hypervisor can't do without has ended."""
    while True:
        with contextlib.suppress(InterruptedError):
            pid, _ = os.waitpid(-1, 0)
            if pid in essential:
                os._exit(0)


def _start_services(settings: Settings, server: Callable[[int], NoReturn]) -> dict[str, int]:
    """Fork the daemons; their pids by name, and under "port" the pipe that brings the SSH server's port."""
    port_reader, port_writer = os.pipe()
    services: dict[str, Callable[[], NoReturn]] = {"sshd": lambda: server(port_writer)}
    if _fake_gpus():
        names = [f"nvidia{index}" for index in range(FAKE_GPUS)]
        listener = gpud.listen(layout.GPU_SOCKET)
        services["gpud"] = lambda: gpud.serve(listener, gpud.make_devices(settings.name, names))
    pids: dict[str, int] = {}
    for name, service in services.items():
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                kernel.set_process_name(name)
                os.close(port_reader)
                service()
            finally:
                sys.stderr.flush()
                os._exit(1)
        pids[name] = pid
    os.close(port_writer)
    return {**pids, "port": port_reader}


def _build(settings: Settings, group: Path | None) -> None:
    """Put the hypervisor's root together and move into it."""
    if group is not None:
        cgroups.enter(group)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.set_hostname(layout.NODE)
    root = Path(settings.folder) / "root"
    _mount_disk(root, settings.disks.get("host"))
    rootfs.populate(root, layout.NODE, 0)
    rootfs.show_machine(root, settings.binds, 0)
    rootfs.make_devices(root, 0)
    _make_gpu_nodes(root)
    rootfs.mount_kernel_views(root)
    if group is not None:
        cgroups.mount_own(root)
    _install_support(root, settings)
    _make_containers(root, settings)
    kernel.change_root(str(root))


def _mount_disk(folder: Path, size: str | None) -> None:
    """A disk is a tmpfs: it needs no clearing up, and it can be full."""
    folder.mkdir(parents=True, exist_ok=True)
    kernel.mount("disk", str(folder), "tmpfs", 0, f"mode=755,size={size}" if size else "mode=755")


def _fake_gpus() -> bool:
    """Whether our own nodes stand in for GPUs: real ones have a major number of their own."""
    return os.major(Path("/dev/nvidia0").stat().st_rdev) == 1


def _make_gpu_nodes(root: Path) -> None:
    """Show the machine's GPUs; where it has none, make nodes that can be opened, held and locked."""
    real = sorted(Path("/dev").glob("nvidia*"))
    if any(path.name == "nvidia0" or path.name[6:].isdigit() for path in real):
        for path in real:
            rootfs.bind_at(root, str(path), 0, read_only=False)
        return
    for index in range(FAKE_GPUS):
        node = root / f"dev/nvidia{index}"
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(*rootfs.DEVICES["null"]))
        node.chmod(0o666)


def _install_support(root: Path, settings: Settings) -> None:
    """The hypervisor's programs, and the part of this package that they import: a copy, since they start often and
    find their byte code beside it."""
    support = root / str(layout.SUPPORT).lstrip("/")
    package = support / "python/dflash_ops/sandbox"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    for name in (
        "attach",
        "cgroups",
        "container",
        "containers",
        "kernel",
        "layout",
        "pct",
        "processes",
        "rootfs",
        "settings",
    ):
        shutil.copyfile(_PACKAGE / f"{name}.py", package / f"{name}.py")
    (support / "settings.json").write_text(settings.to_json())
    (support / "pct-delay").write_text(str(settings.pct_delay))
    for name in ("nvidia-smi", "sitecustomize.py"):
        text = (_PACKAGE / "guest" / name.replace("-", "_").removesuffix(".py")).with_suffix(".py").read_text()
        (support / name).write_text(f"#!{settings.base_python} -IS\n{text}" if name == "nvidia-smi" else text)
        (support / name).chmod(0o755)
    layers: dict[str, rootfs.Layer] = {}
    programs = {"pct": (layout.PCT_FOLDER, "pct")}
    if settings.lxc_attach:
        programs["lxc-attach"] = (layout.LXC_ATTACH_FOLDER, "attach")
    for name, (folder, module) in programs.items():
        launcher = support / name
        launcher.write_text(_LAUNCHER.format(python=settings.base_python, support=layout.SUPPORT, module=module))
        launcher.chmod(0o755)
        layers.setdefault(folder, rootfs.Layer()).add[name] = launcher
    if (root / "dev/nvidia0").exists() and os.major((root / "dev/nvidia0").stat().st_rdev) == 1:
        layers.setdefault(layout.NVIDIA_SMI_FOLDER, rootfs.Layer()).add["nvidia-smi"] = support / "nvidia-smi"
    for name in settings.without.get("host", []):
        for folder in layout.PROGRAM_FOLDERS:
            if (root / folder.lstrip("/") / name).exists() and not Path(folder).is_symlink():
                layers.setdefault(folder, rootfs.Layer()).remove.add(name)
    rootfs.apply_layers(root, layers, support / "layers/host")
    if settings.models is not None and Path(settings.models).is_dir():
        rootfs.bind_at(root, str(layout.MODELS), 0, settings.models)


def _make_containers(root: Path, settings: Settings) -> None:
    configs = root / str(layout.CONFIGS).lstrip("/")
    configs.mkdir(parents=True)
    (root / "etc/pve/lxc").symlink_to(f"nodes/{layout.NODE}/lxc")
    (root / "etc/pve/local").symlink_to(f"nodes/{layout.NODE}")
    for template in layout.CONTAINERS:
        (configs / f"{template.vmid}.conf").write_text(template.config())
        disk = root / str(layout.ROOTS).lstrip("/") / str(template.vmid) / "rootfs"
        _mount_disk(disk, settings.disks.get(str(template.vmid)))
        os.chown(disk, template.owner, template.owner)
        rootfs.populate(disk, template.hostname, template.owner)
