"""A container of the sandbox as this machine sees it: its files and its processes.

For what a test itself puts there, looks at and clears away: a command in the container takes a third of a second, and
where the product is not asked it proves nothing.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stand_in
from stand_in import retry_until

from dflash_ops.command import Container


def folder_of(container: Container) -> Path:
    """The container's `path`: releases, runs and the rest. Links to whole paths in it lead elsewhere from here."""
    return _init_of(container) / "root" / container.path.lstrip("/")


def _init_of(container: Container) -> Path:
    """The folder in /proc of the container's init."""
    assert container.host.key is not None  # it lies in the sandbox's folder
    init_pid = json.loads((container.host.key.parent / "state.json").read_bytes())["init_pid"]
    hypervisor = Path(f"/proc/{init_pid}/root")
    pid = (hypervisor / "run" / "lxc" / f"{container.vmid}.init").read_text().split()[0]
    return hypervisor / "proc" / pid


def processes_of(container: Container) -> list[list[bytes]]:
    """The words of each process of the container."""
    own = (_init_of(container) / "ns" / "pid").readlink()
    found: list[list[bytes]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "ns" / "pid").readlink() == own:
                found.append((folder / "cmdline").read_bytes().split(b"\0"))
    return found


@contextlib.contextmanager
def stand_in_at(container: Container) -> Iterator[Container]:
    """The container with the stand-in trainer; at the end whatever still runs there is killed."""
    put_stand_in(container)
    try:
        yield container
    finally:
        end_runs(container)


def put_stand_in(container: Container) -> None:
    """The release with the stand-in trainer and `current` on it, as a deploy leaves them."""
    folder = folder_of(container)
    stand_in.make_release(folder)
    owner = folder.parent.stat().st_uid
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, owner, owner)


def run_folder(container: Container, run_id: str) -> Path:
    return folder_of(container) / "runs" / run_id


def record_of(container: Container, run_id: str, name: str = "run.json") -> dict[str, Any]:
    return json.loads((run_folder(container, run_id) / name).read_bytes())


def wait_for_log(container: Container, run_id: str, words: bytes = b"step") -> None:
    """Until the run has written this into its log."""
    log = run_folder(container, run_id) / "log"
    retry_until(lambda: log.exists() and words in log.read_bytes())


def end_runs(container: Container) -> None:
    """SIGKILL to whatever lives of the container's runs, their supervisors and windows too."""
    with contextlib.suppress(FileNotFoundError):
        names = [it.name.encode() for it in (folder_of(container) / "runs").iterdir()]
        retry_until(lambda: not _killed(names))


def _killed(names: list[bytes]) -> list[int]:
    """The processes that lived and had one of the names in their words, environment or control groups."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = b"".join((folder / file).read_bytes() for file in ("cmdline", "environ", "cgroup"))
            if any(name in told for name in names) and stand_in.exists(int(folder.name)):
                os.kill(int(folder.name), signal.SIGKILL)
                found.append(int(folder.name))
    return found
