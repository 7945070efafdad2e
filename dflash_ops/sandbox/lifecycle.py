"""up, down, status: the sandbox as seen from the machine that it runs on."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import platformdirs

from dflash_ops.errors import BusyError, OpsError, PreflightError, UsageFault
from dflash_ops.sandbox import layout, remains, state
from dflash_ops.sandbox.processes import ProcessId
from dflash_ops.sandbox.settings import Settings
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.sandbox.templates import CONTAINERS

FAKE_GPUS = 2
# Those that a root of its own makes itself: a bind of them would hide ours.
_OWN_FOLDERS = ("/", "/proc", "/sys", "/dev", "/run", "/etc", "/tmp", "/var", "/root", "/opt")


def up(
    name: str = "default",
    *,
    owner: int | None = None,
    pct_delay: float = 0.0,
    lxc_attach: bool = True,
    disks: Mapping[str, str] | None = None,
    without: Mapping[str, Sequence[str]] | None = None,
    binds: Sequence[str | Path] = (),
    models: str | Path | None = None,
) -> SandboxState:
    """Start a sandbox as a process of its own, and return when its SSH server answers.

    owner: pid of the process whose end is the sandbox's end too
    pct_delay: the least seconds that a pct call takes (a real one: 0.6)
    lxc_attach: False hides lxc-attach on the hypervisor
    disks: "host", or a vmid -> the most that fits on its disk, such as "64M"
    without: vmid (or "host") -> names of programs that it lacks
    binds: folders to show, read-only, at their own path besides the trainer's Python
    models: the folder of models (default: the user's cache folder, when it is there)

    PreflightError: not root, or a program is missing; BusyError: it is up already; UsageFault: bad options.
    """
    _preflight()
    folder = state.folder_of(name)
    settings = Settings(
        name=name,
        folder=str(folder),
        python=sys.executable,
        base_python=_base_python(),
        stdlib=os.path.dirname(os.path.realpath(os.__file__)),  # noqa: PTH120
        owner=_owner(owner),
        pct_delay=pct_delay,
        lxc_attach=lxc_attach,
        disks=_checked_disks(disks or {}),
        without={vmid: list(names) for vmid, names in _by_place(without or {}).items()},
        binds=_visible_folders(binds),
        models=str(models or models_folder()),
        fake_gpus=0 if _has_gpus() else FAKE_GPUS,
        nvidia_smi=_hidden_nvidia_smi(),
        libraries=[path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path and Path(path).is_dir()],
    )
    with _exclusive() as lock:
        found = state.load(name)
        if found is not None and found.alive:
            raise BusyError("the sandbox is up already", where=name, next=f"dflash-ops sandbox down --name {name}")
        _end(name)
        folder.mkdir(mode=0o700, parents=True)
        _launch(settings, lock)
    return state.read(name)


def models_folder() -> Path:
    """Where this user's models lie, shown to containers made from then on; `python -m trainer import-gguf` adds one."""
    return platformdirs.user_cache_path("dflash-ops") / "models"


def down(name: str = "default") -> bool:
    """End the sandbox and remove all that it left; False when there was nothing to end or remove."""
    with _exclusive():
        return _end(name)


def status(name: str = "default") -> SandboxState:
    """The living sandbox, with its containers as they are now; NotFoundError when there is none."""
    found = state.read(name)
    containers = dict(found.containers)
    hypervisor_root = Path(f"/proc/{found.init_pid}/root")
    for vmid, entry in found.containers.items():
        markers = [hypervisor_root / f"{layout.running(node)}/{vmid}.init".lstrip("/") for node in layout.NODES]
        running = any(_lives(hypervisor_root, marker) for marker in markers)
        containers[vmid] = {**entry, "status": "running" if running else "stopped"}
    return replace(found, containers=containers)


def _lives(hypervisor_root: Path, marker: Path) -> bool:
    """Whether the init lives that a marker names: the hypervisor's pid of it, so the hypervisor's /proc is asked."""
    try:
        inner = ProcessId.parse(marker.read_text())
        return inner is not None and _start_time(hypervisor_root / f"proc/{inner.pid}/stat") == inner.start
    except (FileNotFoundError, PermissionError):
        return False


def _start_time(stat_file: Path) -> int | None:
    try:
        text = stat_file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text[text.rindex(b")") + 2 :].split()[19])


def _preflight() -> None:
    if sys.platform != "linux":
        raise PreflightError("the sandbox needs Linux", why=f"this is {sys.platform}")
    if os.geteuid() != 0:
        raise PreflightError("the sandbox needs root", why="it makes namespaces and mounts", next="run it with sudo")
    missing = [name for name in ("bash", "setsid") if shutil.which(name) is None]
    if missing:
        raise PreflightError("the sandbox needs a program that is missing", why=", ".join(missing))


def _base_python() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _has_gpus() -> bool:
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def _hidden_nvidia_smi() -> str | None:
    """Where the machine's nvidia-smi is, when a fresh environment would not find it."""
    found = shutil.which("nvidia-smi")
    usual = {Path(folder) for folder in layout.PROGRAM_FOLDERS}
    return found if _has_gpus() and found and Path(found).parent not in usual else None


def _owner(pid: int | None) -> tuple[int, int] | None:
    if pid is None:
        return None
    identity = ProcessId.of(pid)
    if identity is None:
        raise UsageFault("no such owner", where=f"pid {pid}", why="no process has this pid")
    return identity.pid, identity.start


def _by_place(options: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    places = {"host", *(str(template.vmid) for template in CONTAINERS)}
    for place in map(str, options):
        if place not in places:
            raise UsageFault("no such place in the sandbox", where=place, why=f"there are {', '.join(sorted(places))}")
    return {str(place): value for place, value in options.items()}


def _checked_disks(disks: Mapping[str, str]) -> dict[str, str]:
    for place, size in _by_place(disks).items():
        if not re.fullmatch(r"[1-9]\d*[kKmMgG]?", str(size)):
            raise UsageFault("not a size", where=f"disk {place}", why=f"{size!r}; a size is such as 64M")
    return {str(place): size for place, size in disks.items()}


def _visible_folders(extra: Sequence[str | Path]) -> list[str]:
    """The trainer's Python and the user's folders, outermost first, without those that show anyway."""
    for path in extra:
        if str(path) in _OWN_FOLDERS or not Path(path).is_absolute() or not Path(path).exists():
            raise UsageFault("can't bind this", where=str(path), why="it must be an existing, absolute, smaller folder")
    wanted = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), *map(str, extra)}
    # Each link on the way from the interpreter's name to the interpreter must resolve inside too.
    hop = Path(sys.executable)
    while hop.is_symlink():
        hop = Path(os.path.normpath(hop.parent / hop.readlink()))
        wanted.add(str(hop.parent.parent))
    chosen: list[Path] = []
    for path in sorted(map(Path, wanted)):
        if str(path) not in _OWN_FOLDERS and not any(path.is_relative_to(outer) for outer in (Path("/usr"), *chosen)):
            chosen.append(path)
    return [str(path) for path in chosen]


@contextmanager
def _exclusive() -> Generator[int]:
    """One `up` or `down` at a time for this user; yields the descriptor that holds the lock, which lasts until the last
    process that has it closes it. The lock is on the folder: a lock file would stay behind."""
    base = state.base_folder()
    base.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _launch(settings: Settings, lock: int) -> None:
    """Start the guard and wait until it is ready. It shares the lock until it has written down who it is: when we are
    killed before that, the next `up` or `down` must not look for it in vain, and wipe its folder under its feet."""
    # Nothing of the caller's environment: process 1 of a container shows its own to whoever looks.
    environment = {
        "PATH": ":".join(layout.PROGRAM_FOLDERS),
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with (Path(settings.folder) / "log").open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_ops.sandbox", "guard", settings.name, str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=[lock],
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        out, _ = process.communicate(settings.to_json().encode())
        log.seek(0)  # by its descriptor: a guard that fails removes the file
        words = log.read().decode(errors="replace").strip().split("\n")[-1]
    answer = json.loads(out or b'{"error": "it ended while it started"}')
    if "error" in answer:
        remains.end(Path(settings.folder))
        remains.clear(Path(settings.folder))
        raise OpsError("the sandbox did not start", where=settings.name, why=words or answer["error"])


def _end(name: str) -> bool:
    """End what lives of the sandbox, and remove what is left; False when there was nothing."""
    folder = state.folder_of(name)
    existed = folder.exists()
    if not remains.end(folder):
        raise OpsError("the sandbox does not end", where=name, why="a process of it does not die on SIGKILL")
    remains.clear(folder)
    return existed
