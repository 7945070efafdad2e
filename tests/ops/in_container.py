"""A container of the sandbox as this machine sees it: its files and its processes.

For what a test itself puts there, looks at and clears away: a command in the container takes a third of a second, and
where the product is not asked it proves nothing.
"""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stand_in
from stand_in import retry_until

from dflash_ops.command import Container, Host

_RUN_ID = re.compile(r".+-\d{8}-\d{6}-[0-9a-f]{4}")


def folder_of(container: Container) -> Path:
    """The container's `path`: releases, runs and the rest. Links to whole paths in it lead elsewhere from here."""
    return _init_of(container) / "root" / container.path.lstrip("/")


def folder_of_host(host: Host) -> Path:
    """What the container's host has as its `/`."""
    return _hypervisor(host) / "root"


def processes_of(place: Host | Container) -> list[list[bytes]]:
    """The words of each process of the container, or of the host without its containers'."""
    init = _init_of(place) if isinstance(place, Container) else _hypervisor(place)
    own = (init / "ns" / "pid").readlink()
    found: list[list[bytes]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "ns" / "pid").readlink() == own:
                found.append((folder / "cmdline").read_bytes().split(b"\0"))
    return found


def _init_of(container: Container) -> Path:
    """The folder in /proc of the container's init."""
    root = folder_of_host(container.host)
    return root / "proc" / (root / "run" / "lxc" / f"{container.vmid}.init").read_text().split()[0]


def _hypervisor(host: Host) -> Path:
    """The folder in /proc of the hypervisor's init."""
    assert host.key is not None  # it lies in the sandbox's folder
    return Path("/proc", str(json.loads((host.key.parent / "state.json").read_bytes())["init_pid"]))


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


def left_by_deploys(container: Container) -> list[str]:
    """What a deploy must not leave: archives, half releases, staging folders; and its own processes, which may take a
    moment to end."""
    with contextlib.suppress(AssertionError):
        retry_until(lambda: not _left_by_deploys(container), 10)
    return _left_by_deploys(container)


def _left_by_deploys(container: Container) -> list[str]:
    folder, host = folder_of(container), container.host
    found = [Path(at, name) for at, names, files in os.walk(folder / "incoming") for name in (*names, *files)]
    found += [*(folder / "releases").glob("*.tmp-*"), *folder.glob(".current-*")]
    found += folder_of_host(host).glob("var/tmp/dflash-ops-stage-*")
    lines = [b" ".join(words) for place in (container, host) for words in processes_of(place)]
    push = f"pct push {container.vmid} ".encode()
    return [*map(str, found), *(repr(line) for line in lines if b" receive deploy by" in line or push in line)]


def current_release(container: Container) -> str:
    return (folder_of(container) / "current").readlink().name


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
        found = (it.name for it in (folder_of(container) / "runs").iterdir())
        names = [name.encode() for name in found if _RUN_ID.fullmatch(name)]
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
