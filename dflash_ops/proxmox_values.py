"""What Proxmox VE says, as values: questions, ids of tasks, containers, snapshots. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

Method = Literal["get", "post", "delete"]

_NODE = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_UPID = re.compile(
    rf"UPID:(?P<node>{_NODE}):(?P<pid>[0-9A-Fa-f]{{8}}):(?P<pstart>[0-9A-Fa-f]{{8,9}}):(?P<start>[0-9A-Fa-f]{{8}}):"
    r"(?P<type>[^:\s]+):(?P<id>[^:\s]*):(?P<user>[^:\s]+):"
)
# The node that is asked, whatever its name.
THIS_NODE = "localhost"
# What pvesh calls an HTTP method.
PVESH_VERBS: Mapping[Method, str] = {"get": "get", "post": "create", "delete": "delete"}


@dataclass(frozen=True)
class Call:
    """A question. path: its words as they are, escaped only on their way."""

    method: Method
    path: tuple[str, ...]
    parameters: Mapping[str, str | int] = field(default_factory=dict[str, str | int])

    def __str__(self) -> str:
        return f"{self.method.upper()} /{'/'.join(self.path)}"

    @property
    def node(self) -> str | None:
        """The node that it is about, if any."""
        return self.path[1] if len(self.path) > 1 and self.path[0] == "nodes" else None

    @property
    def vmid(self) -> str | None:
        """The container that it is about, if any."""
        return self.path[3] if len(self.path) > 3 and self.path[0] == "nodes" and self.path[2] == "lxc" else None


@dataclass(frozen=True)
class Upid:
    """The id of a task: `UPID:node:pid:pstart:start:type:id:user:`. started_at: seconds since 1970; user: who began it,
    with the token's name where it was one (`bot@pve!dflash`)."""

    text: str
    node: str
    type: str
    id: str
    user: str
    started_at: int

    @classmethod
    def parse(cls, text: str) -> "Upid":
        """ValueError when it is none."""
        found = _UPID.fullmatch(text)
        if found is None:
            raise ValueError(f"no id of a task: {text!r}")
        return cls(text, found["node"], found["type"], found["id"], found["user"], int(found["start"], 16))


@dataclass(frozen=True)
class ClusterContainer:
    """A container as the cluster knows it. status: running, stopped, or unknown while its node is silent."""

    vmid: int
    node: str
    name: str
    status: str
    template: bool = False


@dataclass(frozen=True)
class Snapshot:
    """created_at: RFC 3339, by the node's clock; parent: the snapshot before it."""

    name: str
    created_at: str | None
    description: str
    parent: str | None

    @property
    def moment(self) -> int:
        """created_at as seconds since 1970; 0 when it is not known."""
        return int(datetime.fromisoformat(self.created_at).timestamp()) if self.created_at else 0


def containers(resources: object) -> list[ClusterContainer]:
    """The containers of `/cluster/resources?type=vm`, by id."""
    found = [
        ClusterContainer(
            vmid=vmid,
            node=str(it["node"]),
            name=str(it.get("name") or f"CT{vmid}"),
            status=str(it.get("status") or "unknown"),
            template=bool(it.get("template")),
        )
        for it in _records(resources)
        if it.get("type") == "lxc" and (vmid := integer(it.get("vmid"))) is not None and "node" in it
    ]
    return sorted(found, key=lambda it: it.vmid)


def integer(value: object) -> int | None:
    """A whole number, which Perl may give as text; None for what is none."""
    try:
        return int(str(value))
    except ValueError:
        return None


def nodes(answer: object) -> list[str]:
    """The names of `/nodes`."""
    return [str(it["node"]) for it in _records(answer) if "node" in it]


def is_virtual_machine(resources: object, vmid: int) -> bool:
    """Whether that id is a virtual machine's."""
    return any(it.get("type") == "qemu" and it.get("vmid") == vmid for it in _records(resources))


def snapshots(listed: object) -> list[Snapshot]:
    """The snapshots of `/nodes/N/lxc/ID/snapshot`, oldest first; what is listed as `current` is none."""
    found = [
        Snapshot(
            name=str(it["name"]),
            created_at=_rfc3339(it.get("snaptime")),
            description=str(it.get("description") or "").strip(),
            parent=str(it["parent"]) if it.get("parent") else None,
        )
        for it in _records(listed)
        if it.get("name") not in (None, "current")
    ]
    return sorted(found, key=lambda it: (it.moment, it.name))


def _rfc3339(seconds: object) -> str | None:
    try:
        return f"{datetime.fromtimestamp(int(str(seconds)), UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return None


def log_lines(answer: object) -> list[tuple[int, str]]:
    """(number, text) of a task's log, without the line that says there is none yet."""
    rows = _records(answer)
    lines = [(number, str(it.get("t", ""))) for it in rows if (number := integer(it.get("n"))) is not None]
    return [] if lines == [(1, "no content")] else lines


def rights_on_containers(permissions: object) -> dict[str, set[str]]:
    """Path -> what one may do with virtual machines and containers there, of `/access/permissions`."""
    found: dict[str, set[str]] = {}
    for path, rights in cast(Mapping[str, Any], permissions if isinstance(permissions, Mapping) else {}).items():
        if isinstance(rights, Mapping) and (names := {str(it) for it in rights if str(it).startswith("VM.")}):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            found[path] = names
    return found


def printed_json(text: str) -> Any:
    """The JSON that pvesh printed last; what a login shell or a task said before it is passed over. None when nothing
    was printed: a call without an answer. ValueError when the end of it is no JSON."""
    lines = text.strip().split("\n")
    for first in range(len(lines)):
        if lines[first].lstrip()[:1] in ("[", "{", '"') or lines[first].strip() == "null":
            try:
                return json.loads("\n".join(lines[first:]))
            except (ValueError, RecursionError):
                continue
    if text.strip():
        raise ValueError(f"no JSON: {lines[-1][:200]!r}")
    return None


def _records(answer: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(answer, list):
        return []
    return [cast(Mapping[str, Any], it) for it in cast(list[object], answer) if isinstance(it, Mapping)]
