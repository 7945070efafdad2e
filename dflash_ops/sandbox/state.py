"""What `up` leaves for others to read: where a sandbox listens, its keys, its containers.

The file is `<user state folder>/sandbox/<name>/state.json`; it exists from the moment that the sandbox is ready until
the sandbox ends. A file whose processes are gone (crash, reboot) counts as absent. Light: no paramiko.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from dflash_ops.errors import NotFoundError, UsageFault
from dflash_ops.sandbox.processes import ProcessId, boot_id

SCHEMA_VERSION = 1
_PATHS = ("key", "known_hosts", "folder", "api_ca", "api_tokens")


class ContainerState(TypedDict):
    hostname: str
    unprivileged: bool
    status: str  # "running" or "stopped", when the state was written; `status()` asks anew


@dataclass(frozen=True)
class SandboxState:
    """A living sandbox.

    folder: its state folder, removed when it ends
    python: the trainer's Python, at the same path in the containers
    pid, start: its guard, the process that `down` ends
    init_pid, init_start: the hypervisor's init, seen from this machine
    nodes: node of the cluster -> port of its SSH server; `port` is the first one's
    api_port: where the API listens; api_ca: the certificate of the authority that signed its own
    api_tokens: folder with a file for each of its tokens, named USER@REALM!NAME, that holds the secret
    """

    name: str
    pid: int
    start: int
    init_pid: int
    init_start: int
    boot_id: str
    host: str
    port: int
    user: str
    key: Path
    known_hosts: Path
    folder: Path
    python: str
    containers: dict[int, ContainerState] = field(default_factory=dict[int, ContainerState])
    nodes: dict[str, int] = field(default_factory=dict[str, int])
    api_port: int = 0
    api_ca: Path = Path()
    api_tokens: Path = Path()
    schema_version: int = SCHEMA_VERSION

    @property
    def guard(self) -> ProcessId:
        return ProcessId(self.pid, self.start)

    @property
    def init(self) -> ProcessId:
        return ProcessId(self.init_pid, self.init_start)

    @property
    def alive(self) -> bool:
        return self.boot_id == boot_id() and self.guard.alive and self.init.alive


def base_folder() -> Path:
    """Where every sandbox of this user keeps its folder."""
    import platformdirs  # here, since every command loads this file

    return platformdirs.user_state_path("dflash-ops") / "sandbox"


def folder_of(name: str) -> Path:
    """The state folder of the sandbox `name`; UsageFault when that can't be a name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise UsageFault(
            "not a name for a sandbox", where=repr(name), why="a name is 1 to 31 of a-z, 0-9 and -, no - first"
        )
    return base_folder() / name


def write(state: SandboxState) -> None:
    """Put the state file in its place by rename, so that nobody reads half of it."""
    data = asdict(state)
    data.update({name: str(data[name]) for name in _PATHS})
    draft = state.folder / "state.json.new"
    draft.write_text(json.dumps(data, indent=1))
    draft.replace(state.folder / "state.json")


def load(name: str) -> SandboxState | None:
    """The state file's content, of a living sandbox or a dead one; None when there is none that can be read."""
    try:
        data: dict[str, Any] = json.loads((folder_of(name) / "state.json").read_text())
        if data["schema_version"] != SCHEMA_VERSION:
            return None
        for path in _PATHS:
            data[path] = Path(data[path])
        data["containers"] = {int(vmid): entry for vmid, entry in data["containers"].items()}
        return SandboxState(**data)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read(name: str = "default") -> SandboxState:
    """The living sandbox of that name; NotFoundError when there is none."""
    state = load(name)
    if state is None or not state.alive:
        option = "" if name == "default" else f" --name {name}"
        raise NotFoundError(
            "no sandbox is running",
            where=name,
            why="its state file names a dead process" if state else "there is no state file",
            next=f"dflash-ops sandbox up{option}",
        )
    return state
