"""Snapshots of a container, and going back to one: all that was written in it since is gone then."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from dflash_ops import containers, proxmox, proxmox_values
from dflash_ops.answers import answer
from dflash_ops.command import Container
from dflash_ops.containers import Found
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError, UsageFault
from dflash_ops.proxmox import OnLog, delete, post
from dflash_ops.proxmox_values import Snapshot
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

_TASK_SECONDS = 600.0
_LOOK_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{1,39}", re.ASCII)


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


def make(
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
        found = containers.find(api, container.vmid)
        if any(it.name == name for it in _snapshots(found)):
            raise UsageFault(f"there is a snapshot {name} already", where=str(container), next="another name")
        call = post(*found.path("snapshot"), snapname=name, description=description)
        api.run(call, f"the snapshot of container {found.vmid}", on_log=on_log, seconds=_TASK_SECONDS)
        if all(it.name != name for it in _snapshots(found)):
            raise OpsError("the snapshot is not there, though its task went well", where=str(container))
    return Snapped(str(container), name, "made", time.monotonic() - begun)


def remove(shell: Shell, container: Container, name: str, *, on_log: OnLog = lambda line: None) -> Snapped:
    """Removes a snapshot; the container stays as it is."""
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = containers.find(api, container.vmid)
        _named(container, found, name)
        doing = f"removing the snapshot {name} of container {found.vmid}"
        api.run(delete(*found.path("snapshot", name)), doing, on_log=on_log, seconds=_TASK_SECONDS)
    return Snapped(str(container), name, "removed", time.monotonic() - begun)


def listing(shell: Shell, container: Container) -> Snapshots:
    """Oldest first."""
    with proxmox.connect(shell, container.host) as api:
        return Snapshots(str(container), tuple(_snapshots(containers.find(api, container.vmid))))


def lost(shell: Shell, container: Container, name: str, *, also: Sequence[Container] = ()) -> Lost:
    """What going back to a snapshot would lose. also: other folders in the same container.

    NotFoundError when there is no such snapshot; BusyError names the runs that go on."""
    with proxmox.connect(shell, container.host) as api:
        found = containers.find(api, container.vmid)
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
        found = containers.find(api, container.vmid)
        losing = _lost(shell, container, found, name, also)
        doing = f"going back to the snapshot {name} of container {found.vmid}"
        on_log(doing)
        api.run(post(*found.path("snapshot", name, "rollback")), doing, on_log=on_log, seconds=_TASK_SECONDS)
        if found.running:
            containers.change(container, containers.again(found), "started", "start", on_log)
    return WentBack(str(container), name, found.running, losing, time.monotonic() - begun)


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None or name in ("current", "vzdump"):
        raise UsageFault(
            "a snapshot can't be called that",
            where=repr(name),
            why="2 to 40 letters, digits, - and _, a letter first; not current, not vzdump",
        )


def _snapshots(found: Found) -> list[Snapshot]:
    return proxmox_values.snapshots(found.api.get(*found.path("snapshot")))


def _named(container: Container, found: Found, name: str) -> tuple[Snapshot, list[Snapshot]]:
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


def _lost(shell: Shell, container: Container, found: Found, name: str, also: Sequence[Container]) -> Lost:
    wanted, every = _named(container, found, name)
    newer = tuple(it.name for it in every if it.moment > wanted.moment)
    if not found.running:
        return Lost(str(container), wanted, known=False, newer_snapshots=newer)
    if not found.here:
        raise PreflightError(
            "what would be lost can't be seen", where=str(container), why=containers.elsewhere(container, found.node)
        )
    seen: dict[str, list[str]] = {}
    for place in containers.places(container, also):
        parameters = {"path": place.path, "since": wanted.moment}
        reply = answer(shell.run(place, bundle.command(place.python, "since", parameters), timeout=_LOOK_SECONDS))
        for key in ("live", "runs", "checkpoints", "releases", "environments"):
            seen.setdefault(key, []).extend(reply[key])
    if live := seen.pop("live"):
        raise BusyError(
            f"a run goes on in container {container.vmid}" if len(live) == 1 else "runs go on",
            where=str(container),
            why=", ".join(live),
            next=f"dflash-ops train stop {live[0]}",
        )
    return Lost(
        str(container), wanted, True, newer_snapshots=newer, **{key: tuple(names) for key, names in seen.items()}
    )
