"""The verbs of `ct`: what the hypervisor does with a container. Status, start, stop, reboot; snapshots and going back.

Each asks Proxmox VE (proxmox.py), waits for the task that it began, and looks afterwards whether it is as it was meant
to be: an HA-managed container, for one, is only asked to start.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from dflash_ops import proxmox, proxmox_faults, proxmox_values
from dflash_ops.answers import answer
from dflash_ops.command import Container
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError, TimedOutError, UsageFault
from dflash_ops.proxmox import OnLog, Proxmox, delete, post
from dflash_ops.proxmox_values import THIS_NODE, Snapshot
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

SHUTDOWN_SECONDS = 60
_TASK_SECONDS = 600.0
_SETTLE_SECONDS = 60.0
_LOOK_SECONDS = 60.0
_SNAPSHOT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{1,39}", re.ASCII)


@dataclass(frozen=True)
class ContainerStatus:
    """A container as its node tells. here: whether that node is the inventory's host; status: running or stopped;
    lock: backup, snapshot ... while one works on it; asked: how it was asked."""

    container: str
    vmid: int
    name: str
    node: str
    here: bool
    status: str
    uptime_s: int | None
    lock: str | None
    ha_managed: bool
    cpus: float | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    asked: str


@dataclass(frozen=True)
class Changed:
    """did: started, stopped, killed, rebooted; changed: False when it was so already; warnings: those of the task."""

    container: str
    did: str
    changed: bool
    node: str
    seconds: float
    warnings: int


@dataclass(frozen=True)
class Snapshots:
    container: str
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Snapped:
    container: str
    snapshot: str
    did: Literal["made", "removed"]
    seconds: float


@dataclass(frozen=True)
class Lost:
    """What going back to a snapshot would lose. known: False when the container is stopped and nobody could look.
    checkpoints: of runs that are older than the snapshot, as RUN/NAME; newer_snapshots: some storages refuse to go back
    behind them."""

    container: str
    snapshot: Snapshot
    known: bool
    live: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    newer_snapshots: tuple[str, ...] = ()


@dataclass(frozen=True)
class WentBack:
    """started: whether the container runs again, as it did before."""

    container: str
    snapshot: str
    started: bool
    lost: Lost
    seconds: float


@dataclass(frozen=True)
class _Found:
    """Where a container is, and what its node says of it."""

    api: Proxmox
    vmid: int
    node: str
    name: str
    here: bool
    facts: dict[str, Any]

    @property
    def running(self) -> bool:
        return self.facts.get("status") == "running"

    def path(self, *words: str) -> tuple[str | int, ...]:
        return ("nodes", self.node, "lxc", self.vmid, *words)


def status(shell: Shell, container: Container) -> ContainerStatus:
    """NotFoundError when no node has it; PreflightError says which right is missing."""
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
    facts = found.facts

    def number(key: str) -> int | None:
        return int(facts[key]) if facts.get(key) is not None else None

    return ContainerStatus(
        container=str(container),
        vmid=container.vmid,
        name=found.name,
        node=found.node,
        here=found.here,
        status=str(facts.get("status")),
        uptime_s=number("uptime") if found.running else None,
        lock=str(facts["lock"]) if facts.get("lock") else None,
        ha_managed=_ha_managed(facts.get("ha")),
        cpus=float(facts["cpus"]) if facts.get("cpus") is not None else None,
        memory_bytes=number("maxmem"),
        memory_used_bytes=number("mem") if found.running else None,
        asked=api.asked.where,
    )


def start(shell: Shell, container: Container, *, on_log: OnLog = lambda line: None) -> Changed:
    """Starts it, unless it runs."""
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        return _change(container, found, "started", "start", on_log)


def stop(
    shell: Shell,
    container: Container,
    *,
    kill: bool = False,
    timeout: int = SHUTDOWN_SECONDS,
    on_log: OnLog = lambda line: None,
) -> Changed:
    """Shuts it down, and waits up to `timeout` seconds for that; or kills it at once. Nothing is asked about runs."""
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        if kill:
            return _change(container, found, "killed", "stop", on_log)
        return _change(container, found, "stopped", "shutdown", on_log, timeout=timeout)


def reboot(
    shell: Shell, container: Container, *, timeout: int = SHUTDOWN_SECONDS, on_log: OnLog = lambda line: None
) -> Changed:
    """Shuts it down and starts it again. PreflightError when it is stopped."""
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        if not found.running:
            raise PreflightError(
                f"container {container.vmid} is stopped", where=str(container), next="dflash-ops ct start"
            )
        return _change(container, found, "rebooted", "reboot", on_log, timeout=timeout)


def snapshot(
    shell: Shell,
    container: Container,
    name: str | None = None,
    *,
    description: str = "made by dflash-ops",
    on_log: OnLog = lambda line: None,
) -> Snapped:
    """Makes a snapshot, by default with the time as its name. UsageFault when it can't be called that."""
    name = name or f"dflash-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    _check_name(name)
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        if any(it.name == name for it in _snapshots(found)):
            raise UsageFault(f"there is a snapshot {name} already", where=str(container), next="another name")
        call = post(*found.path("snapshot"), snapname=name, description=description)
        api.run(call, f"the snapshot of container {found.vmid}", on_log=on_log, seconds=_TASK_SECONDS)
        if all(it.name != name for it in _snapshots(found)):
            raise OpsError("the snapshot is not there, though its task went well", where=str(container))
    return Snapped(str(container), name, "made", time.monotonic() - begun)


def remove_snapshot(shell: Shell, container: Container, name: str, *, on_log: OnLog = lambda line: None) -> Snapped:
    """Removes a snapshot; the container stays as it is."""
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        _named(container, found, name)
        doing = f"removing the snapshot {name} of container {found.vmid}"
        api.run(delete(*found.path("snapshot", name)), doing, on_log=on_log, seconds=_TASK_SECONDS)
    return Snapped(str(container), name, "removed", time.monotonic() - begun)


def snapshots(shell: Shell, container: Container) -> Snapshots:
    """Oldest first."""
    with proxmox.connect(shell, container.host) as api:
        return Snapshots(str(container), tuple(_snapshots(_find(api, container.vmid))))


def lost(shell: Shell, container: Container, name: str, *, also: Sequence[Container] = ()) -> Lost:
    """What going back to a snapshot would lose. also: other folders in the same container.

    NotFoundError when there is no such snapshot; BusyError names the runs that go on."""
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        return _lost(shell, container, found, name, also)


def rollback(
    shell: Shell,
    container: Container,
    name: str,
    *,
    also: Sequence[Container] = (),
    on_log: OnLog = lambda line: None,
) -> WentBack:
    """Puts the container back to a snapshot: all that was written in it since is gone. BusyError while a run lives.

    Proxmox VE kills a running container for it; it is started again afterwards."""
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = _find(api, container.vmid)
        losing = _lost(shell, container, found, name, also)
        doing = f"going back to the snapshot {name} of container {found.vmid}"
        api.run(post(*found.path("snapshot", name, "rollback")), doing, on_log=on_log, seconds=_TASK_SECONDS)
        if found.running:
            _change(container, _again(found), "started", "start", on_log)
    return WentBack(str(container), name, found.running, losing, time.monotonic() - begun)


def elsewhere(container: Container, node: str) -> str:
    """What to do when a container is on another node than the inventory's host."""
    which = f"[containers.{container.name}]" if container.name else f"container {container.vmid}"
    return (
        f"container {container.vmid} is on node {node} now, not on host {container.host}: in the inventory, "
        f"{which} needs a `host` that is {node}"
    )


# -- where it is, and how it stands


def _find(api: Proxmox, vmid: int) -> _Found:
    """The container's node, and what that says of it."""
    node, name = _place(api, vmid)
    own = api.host.api.node if api.host.api is not None else None
    if own is not None or node == THIS_NODE:
        here = node in (own, THIS_NODE)
        return _Found(api, vmid, node, name, here, _current(api, node, vmid))
    try:  # it is most often on the node that we ask, and this tells that too
        return _Found(api, vmid, node, name, True, _current(api, THIS_NODE, vmid))
    except NotFoundError:
        return _Found(api, vmid, node, name, False, _current(api, node, vmid))


def _place(api: Proxmox, vmid: int) -> tuple[str, str]:
    """(node, name) of a container."""
    resources = api.get("cluster", "resources", type="vm")
    for it in proxmox_values.containers(resources):
        if it.vmid == vmid:
            return it.node, it.name
    if proxmox_values.is_virtual_machine(resources, vmid):
        raise NotFoundError(
            f"{vmid} is a virtual machine, not a container",
            where=api.asked.where,
            next="correct `vmid` in the inventory",
        )
    try:  # the list leaves out what we may not see; this says more
        facts = _current(api, THIS_NODE, vmid)
    except PreflightError as error:
        if api.by_pvesh:
            raise
        raise proxmox_faults.sees_nothing(api.asked, api.get("access", "permissions")) or error from error
    except NotFoundError as error:  # whoever hears this would see it on the list
        raise NotFoundError(
            f"there is no container {vmid}",
            where=api.asked.where,
            why="no node of the cluster has it",
            next="on the host: pvesh get /cluster/resources --type vm; then correct `vmid` in the inventory",
        ) from error
    return THIS_NODE, str(facts.get("name") or f"CT{vmid}")


def _current(api: Proxmox, node: str, vmid: int) -> dict[str, Any]:
    facts: Any = api.get("nodes", node, "lxc", vmid, "status", "current")
    if not isinstance(facts, dict):
        raise OpsError("Proxmox VE says nothing of the container", where=api.asked.where, why=f"{facts!r}"[:200])
    return facts  # pyright: ignore[reportUnknownVariableType]


def _ha_managed(ha: Any) -> bool:
    return isinstance(ha, dict) and bool(ha.get("managed"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _again(found: _Found) -> _Found:
    return _Found(
        found.api, found.vmid, found.node, found.name, found.here, _current(found.api, found.node, found.vmid)
    )


def _change(container: Container, found: _Found, did: str, verb: str, on_log: OnLog, **parameters: int) -> Changed:
    begun = time.monotonic()
    wants_running = did in ("started", "rebooted")
    if did != "rebooted" and found.running == wants_running:
        return Changed(str(container), did, False, found.node, 0.0, 0)
    doing = {"started": "starting", "stopped": "shutting down", "killed": "killing", "rebooted": "rebooting"}[did]
    seconds = _TASK_SECONDS + parameters.get("timeout", 0)
    warnings = 0
    try:
        task = found.api.run(
            post(*found.path("status", verb), **parameters),
            f"{doing} container {found.vmid}",
            on_log=on_log,
            seconds=seconds,
        )
        warnings = task.warnings
    except OpsError:
        # Somebody else was quicker.
        if did == "rebooted" or _again(found).running != wants_running:
            raise
    _settle(container, found, wants_running, did)
    return Changed(str(container), did, True, found.node, time.monotonic() - begun, warnings)


def _settle(container: Container, found: _Found, wants_running: bool, did: str) -> None:
    """Waits until it is as it was meant to be: with HA a task has only asked for it."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while _again(found).running != wants_running:
        if time.monotonic() > deadline:
            word = "running" if wants_running else "stopped"
            raise TimedOutError(
                f"container {found.vmid} is not {word}, though its task went well",
                where=str(container),
                why=f"it was to be {did} {_SETTLE_SECONDS:.0f} s ago",
                next="on the host: ha-manager status; pct status " + str(found.vmid),
            )
        time.sleep(1.0)


# -- snapshots


def _check_name(name: str) -> None:
    if _SNAPSHOT_NAME.fullmatch(name) is None or name in ("current", "vzdump"):
        raise UsageFault(
            "a snapshot can't be called that",
            where=repr(name),
            why="2 to 40 letters, digits, - and _, a letter first; not current, not vzdump",
        )


def _snapshots(found: _Found) -> list[Snapshot]:
    return proxmox_values.snapshots(found.api.get(*found.path("snapshot")))


def _named(container: Container, found: _Found, name: str) -> tuple[Snapshot, list[Snapshot]]:
    """The snapshot of that name, and all there are."""
    every = _snapshots(found)
    for it in every:
        if it.name == name:
            return it, every
    raise NotFoundError(
        f"there is no snapshot {name}",
        where=str(container),
        why=f"it has: {', '.join(it.name for it in every[-10:]) or 'none'}",
        next="dflash-ops ct snapshots",
    )


def _lost(shell: Shell, container: Container, found: _Found, name: str, also: Sequence[Container]) -> Lost:
    wanted, every = _named(container, found, name)
    newer = tuple(it.name for it in every if (it.created_at or 0) > (wanted.created_at or 0))
    if not found.running:
        return Lost(str(container), wanted, known=False, newer_snapshots=newer)
    if not found.here:
        raise PreflightError(
            "what would be lost can't be seen", where=str(container), why=elsewhere(container, found.node)
        )
    places = list({(it.path, it.python): it for it in (container, *also)}.values())
    seen: dict[str, list[str]] = {}
    for place in places:
        parameters = {"path": place.path, "since": wanted.created_at or 0}
        reply = answer(shell.run(place, bundle.command(place.python, "since", parameters), timeout=_LOOK_SECONDS))
        for key in ("live", "runs", "checkpoints", "releases", "environments"):
            seen.setdefault(key, []).extend(reply[key])
    if seen["live"]:
        raise BusyError(
            f"a run goes on in container {container.vmid}" if len(seen["live"]) == 1 else "runs go on",
            where=str(container),
            why=", ".join(seen["live"]),
            next=f"dflash-ops train stop {seen['live'][0]}",
        )
    return Lost(
        str(container), wanted, True, newer_snapshots=newer, **{key: tuple(names) for key, names in seen.items()}
    )
