"""The hypervisor: a root of its own, and the init that starts and outlives nothing.

`run` is the first process of a fresh pid namespace. It puts the root together, forks the SSH servers (one for each node
of the cluster), the API's and the fake GPUs' daemon, starts the containers, and then reaps. When it ends, the kernel
ends all that runs in the namespace.
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dflash_ops.sandbox import api_server, cgroups, container, driver, gpud, kernel, layout, rootfs
from dflash_ops.sandbox.settings import Settings
from dflash_ops.sandbox.templates import CONTAINERS

_PACKAGE = Path(__file__).parent
_HYPERVISOR_MODULES = (
    "api", "attach", "calls", "cgroups", "container", "containers", "driver", "faults", "guest_config", "guests",
    "jobs", "kernel", "layout", "nvidia", "pct", "pct_snapshots", "perl", "processes", "pvesh", "pveum", "rights",
    "rootfs", "settings", "snapshots", "sudo", "tasks", "terminal", "transfer", "users",
)  # fmt: skip
_LAUNCHER = """#!{python} -IS
import sys
sys.path.insert(0, "{support}/python")
from dflash_ops.sandbox.{module} import main
main()
"""


def run(settings: Settings, group: str | None, server: Callable[[int], NoReturn], ready: int) -> NoReturn:
    """Be the hypervisor's init. `ready`: a pipe that gets one line of JSON, {"error": …} or {"port": …, "nodes": {node:
    port of its SSH server}, "api": what api_server.serve tells}.

    server: serves SSH in the process it is called in, and writes its port to the pipe that it is given.
    """
    try:
        kernel.die_with_parent(signal.SIGKILL)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # whoever called `up` waits for the end of the guard's stdout
        _build(settings, group)
        essential, pipes = _start_services(settings, server)
        for template in CONTAINERS:
            if template.running:
                container.start(template.vmid)
        os.write(ready, json.dumps(_facts(pipes)).encode())
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


def _start_services(settings: Settings, server: Callable[[int], NoReturn]) -> tuple[dict[str, int], dict[str, int]]:
    """Fork the daemons; the pids of those that the hypervisor can't do without, and by each server's name the pipe that
    tells where it listens."""
    servers: dict[str, Callable[[int], NoReturn]] = {"sshd": server, "pveproxy": api_server.serve}
    servers |= {f"sshd-{node}": partial(_serve_node, node, server) for node in layout.NODES[1:]}
    pids: dict[str, int] = {}
    pipes: dict[str, int] = {}
    for name, serve in servers.items():
        reader, writer = os.pipe()
        pids[name] = _fork(name, partial(serve, writer))
        os.close(writer)
        pipes[name] = reader
    if settings.fake_gpus:
        names = [f"nvidia{index}" for index in range(settings.fake_gpus)]
        listener = gpud.listen(Path(layout.GPU_SOCKET))
        pids["gpud"] = _fork("gpud", lambda: gpud.serve(listener, gpud.make_devices(settings.name, names)))
    return pids, pipes


def _fork(name: str, service: Callable[[], NoReturn]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            kernel.set_process_name(name)
            service()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(1)
    return pid


def _serve_node(node: str, server: Callable[[int], NoReturn], ready: int) -> NoReturn:
    """The SSH server of another node of the cluster: its host name makes the node, all else is shared."""
    kernel.unshare(kernel.CLONE_NEWUTS)
    kernel.set_hostname(node)
    server(ready)


def _facts(pipes: dict[str, int]) -> dict[str, Any]:
    """What the servers say once they listen."""
    said = {name: os.read(pipe, 1 << 16) for name, pipe in pipes.items()}
    silent = [name for name, words in said.items() if not words]
    if silent:
        return {"error": f"{silent[0]} did not start"}
    ports = {node: int(said["sshd" if node == layout.NODES[0] else f"sshd-{node}"]) for node in layout.NODES}
    return {"port": ports[layout.NODES[0]], "nodes": ports, "api": json.loads(said["pveproxy"])}


def _build(settings: Settings, group: str | None) -> None:
    """Put the hypervisor's root together and move into it."""
    if group is not None:
        cgroups.enter(group)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.set_hostname(layout.NODES[0])
    root = Path(settings.folder) / "root"
    _mount_disk(root, settings.disks.get("host"))
    rootfs.populate(root, layout.NODES[0], 0)
    rootfs.show_machine(root, settings.binds, 0)
    rootfs.make_devices(root, 0)
    _make_gpu_nodes(root, settings)
    _name_libraries(root, settings.libraries)
    rootfs.mount_kernel_views(root)
    if group is not None:
        cgroups.mount_own(str(root))
    _install_support(root, settings)
    driver.show(root / layout.DRIVER.lstrip("/"), root)
    kernel.change_root(str(root))
    _make_containers(settings)


def _mount_disk(folder: Path, size: str | None) -> None:
    """A disk is a tmpfs: it needs no clearing up, and it can be full."""
    folder.mkdir(parents=True, exist_ok=True)
    kernel.mount("disk", str(folder), "tmpfs", 0, f"mode=755,size={size}" if size else "mode=755")


def _make_gpu_nodes(root: Path, settings: Settings) -> None:
    """Show the machine's GPUs; where it has none, make nodes that can be opened, held and locked."""
    if not settings.fake_gpus:
        for path in sorted(Path("/dev").glob("nvidia*")):
            rootfs.bind_at(root, str(path), 0, read_only=False)
    names = [f"nvidia{index}" for index in range(settings.fake_gpus)]
    for name in [*names, "nvidiactl", "nvidia-uvm"] if names else []:
        node = root / "dev" / name
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(*rootfs.DEVICES["null"]))
        node.chmod(0o666)


def _name_libraries(root: Path, folders: list[str]) -> None:
    """Let the loader find a GPU driver's libraries without LD_LIBRARY_PATH, as in a container that has the driver."""
    if folders:
        with (root / "etc/ld.so.conf").open("a") as file:
            file.write("".join(f"{folder}\n" for folder in folders))
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ldconfig", "-X", "-r", str(root)], check=False, capture_output=True)


def _install_support(root: Path, settings: Settings) -> None:
    """The hypervisor's programs, and the part of this package that they import: a copy, since they start often and
    find their byte code beside it."""
    support = root / layout.SUPPORT.lstrip("/")
    package = support / "python/dflash_ops/sandbox"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    for name in _HYPERVISOR_MODULES:
        shutil.copyfile(_PACKAGE / f"{name}.py", package / f"{name}.py")
    (support / "settings.json").write_text(settings.to_json())
    (support / "pct-delay").write_text(str(settings.pct_delay))
    smi = (_PACKAGE / "guest/nvidia_smi.py").read_text()
    programs = {
        "pct": (layout.PCT_FOLDER, _launcher(settings, "pct")),
        "pvesh": (layout.PVESH_FOLDER, _launcher(settings, "pvesh")),
        "pveum": (layout.PCT_FOLDER, _launcher(settings, "pveum")),
        "sudo": ("/usr/bin", _launcher(settings, "sudo")),
        "lxc-attach": (layout.LXC_ATTACH_FOLDER, _launcher(settings, "attach")),
        "nvidia-smi": (layout.NVIDIA_SMI_FOLDER, f"#!{settings.base_python} -IS\n{smi}"),
    }
    if settings.fake_gpus:  # a fake GPU's kernel messages are fake too: what somebody writes into that file
        programs["journalctl"] = ("/usr/bin", f"#!/bin/sh\ncat {layout.KERNEL_LOG} 2>/dev/null; exit 0\n")
    if settings.nvidia_smi:
        programs["nvidia-smi"] = (layout.NVIDIA_SMI_FOLDER, f'#!/bin/sh\nexec {settings.nvidia_smi} "$@"\n')
    elif not settings.fake_gpus:
        del programs["nvidia-smi"]  # the machine's own is where it is looked for, or nowhere
    if not settings.lxc_attach:
        del programs["lxc-attach"]
    if settings.fake_gpus:
        names = [f"nvidia{index}" for index in range(settings.fake_gpus)]
        driver.write(root / layout.DRIVER.lstrip("/"), [gpud.uuid_of(settings.name, name) for name in names])
    (support / "task-worker").write_text(_launcher(settings, "jobs"))
    (support / "task-worker").chmod(0o755)
    layers: dict[str, rootfs.Layer] = {}
    for name, (folder, text) in programs.items():
        (support / name).write_text(text)
        (support / name).chmod(0o755)
        layers.setdefault(folder, rootfs.Layer()).add[name] = support / name
    shutil.copyfile(_PACKAGE / "guest/sitecustomize.py", support / "sitecustomize.py")
    rootfs.take_away(root, settings.without.get("host", []), layers)
    rootfs.apply_layers(root, layers, support / "layers/host")
    if settings.models is not None and Path(settings.models).is_dir():
        rootfs.bind_at(root, layout.MODELS, 0, settings.models)


def _launcher(settings: Settings, module: str) -> str:
    return _LAUNCHER.format(python=settings.base_python, support=layout.SUPPORT, module=module)


def _make_containers(settings: Settings) -> None:
    """Configs and disks, made from within: what a container gets of /etc is what the hypervisor got."""
    for node in layout.NODES:
        Path(layout.configs(node)).mkdir(parents=True)
    Path("/etc/pve/lxc").symlink_to(f"nodes/{layout.NODE}/lxc")
    Path("/etc/pve/local").symlink_to(f"nodes/{layout.NODE}")
    nodes = sorted(Path("/dev").glob("nvidia*"), key=lambda path: (path.name.startswith("nvidia-"), path.name))
    devices = [str(path) for path in nodes if path.is_char_device()]
    for template in CONTAINERS:
        config = Path(layout.config_file(template.vmid, layout.NODE))
        config.touch(layout.CONFIG_MODE)
        config.write_text(template.config(devices))
        disk = Path(layout.container_root(template.vmid))
        _mount_disk(disk, settings.disks.get(str(template.vmid)))
        os.chown(disk, template.owner, template.owner)
        rootfs.populate(disk, template.hostname, template.owner)
