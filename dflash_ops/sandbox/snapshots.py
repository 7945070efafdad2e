"""Snapshots of a container: a section of its config file, and a copy of its own files beside the hypervisor's support.

What a container owns is the tmpfs at its rootfs, as the hypervisor sees it; what shows of the machine is mounted in the
container's own namespace only, so a copy holds the container's files and nothing else. Runs in the hypervisor.
"""

import contextlib
import os
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Generator
from pathlib import Path

from dflash_ops.sandbox import cgroups, containers, layout
from dflash_ops.sandbox.guest_config import Config
from dflash_ops.sandbox.perl import Failure
from dflash_ops.sandbox.tasks import say

_FREEZE_SECONDS = 5.0


def create(vmid: int, name: str, description: str = "") -> None:
    """Copy the container's files and note its config; what runs in it stands still meanwhile."""
    config = _unlocked(vmid)
    if name in config.sections:
        raise Failure(f"snapshot name '{name}' already used")
    with _lock_noted(vmid, config, "snapshot"), _frozen(vmid):
        say(f"snapshot of {_rootfs(vmid)} of container {vmid}")
        _copy(_files(vmid), _place(vmid, name))
    kept = [line for line in config.lines if not line.startswith("#") and line.partition(":")[0] != "lock"]
    comment = [f"#{urllib.parse.quote(line, safe=' /!?()=,.;-+*')}" for line in description.split("\n") if line]
    config.sections[name] = [*comment, *kept, f"snaptime: {int(time.time())}"]
    config.put("parent", name)
    config.write(vmid)


def rollback(vmid: int, name: str) -> None:
    """Put the container's files and config back as the snapshot has them. The container must be stopped."""
    config = _existing(vmid, name)
    if containers.init_of(vmid) is not None:
        raise Failure(f"unable to rollback vm {vmid}: vm is running")
    with _lock_noted(vmid, config, "rollback"):
        say(f"rollback of {_rootfs(vmid)} of container {vmid} to '{name}'")
        _copy(_place(vmid, name), _files(vmid))
    own = [line for line in config.lines if line.startswith("#")]
    config.lines = [*own, *(line for line in config.sections[name] if not _of_snapshot_alone(line))]
    config.put("parent", name)
    config.write(vmid)


def delete(vmid: int, name: str) -> None:
    """Forget a snapshot; those made after it hang on its parent from then on."""
    config = _existing(vmid, name)
    with _lock_noted(vmid, config, "snapshot-delete"):
        say(f"remove snapshot '{name}' of container {vmid}")
        shutil.rmtree(_place(vmid, name), ignore_errors=True)
    parent = config.value("parent", name)
    del config.sections[name]
    for lines in (config.lines, *config.sections.values()):
        if f"parent: {name}" in lines:
            lines[lines.index(f"parent: {name}")] = f"parent: {parent}" if parent else ""
            lines[:] = filter(None, lines)
    config.write(vmid)


def _of_snapshot_alone(line: str) -> bool:
    return line.startswith("#") or line.partition(":")[0] in ("snaptime", "parent")


def _unlocked(vmid: int) -> Config:
    config = Config.read(vmid)
    if lock := config.value("lock"):
        raise Failure(f"CT is locked ({lock})")
    return config


def _existing(vmid: int, name: str) -> Config:
    config = _unlocked(vmid)
    if name not in config.sections:
        raise Failure(f"snapshot '{name}' does not exist")
    return config


@contextlib.contextmanager
def _lock_noted(vmid: int, config: Config, word: str) -> Generator[None]:
    """`lock: word` stands in the file meanwhile, for everybody to see; when the work fails it goes again."""
    config.put("lock", word)
    config.write(vmid)
    try:
        yield
    finally:
        config.put("lock", None)
        config.write(vmid)


@contextlib.contextmanager
def _frozen(vmid: int) -> Generator[None]:
    """No process of the container runs meanwhile, where there is a cgroup to stop them by."""
    group = Path(cgroups.container_group(vmid))
    switch = group / "cgroup.freeze"
    with contextlib.suppress(OSError):
        switch.write_text("1")
        deadline = time.monotonic() + _FREEZE_SECONDS
        while "frozen 1" not in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            switch.write_text("0")


def _rootfs(vmid: int) -> str:
    return f"volume 'local-lvm:vm-{vmid}-disk-0'"


def _files(vmid: int) -> Path:
    return Path(layout.container_root(vmid))


def _place(vmid: int, name: str) -> Path:
    return Path(layout.SNAPSHOTS, str(vmid), name)


def _copy(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds; the folder itself stays, since it may be a mount."""
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    done = subprocess.run(
        ["cp", "-a", "--sparse=always", "--", f"{source}/.", str(target)],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
    )
    complaints = done.stderr.decode(errors="replace").split("\n")
    # Where the container could not be frozen, a file may go while we come to it.
    complaints = [line for line in complaints if line and not line.endswith(": No such file or directory")]
    if complaints:
        if target.is_relative_to(layout.SNAPSHOTS):
            shutil.rmtree(target, ignore_errors=True)
        raise Failure(complaints[0])
