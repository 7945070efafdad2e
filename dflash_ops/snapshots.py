"""Snapshots of a container, and going back to one: all that was written in it since is gone then."""

import contextlib
import re
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from dflash_ops import containers, proxmox, proxmox_faults, proxmox_values
from dflash_ops.command import Container
from dflash_ops.containers import Found, GoingOn
from dflash_ops.errors import (
    BusyError,
    NotFoundError,
    OpsError,
    PreflightError,
    TimedOutError,
    UnreachableError,
    UsageFault,
)
from dflash_ops.proxmox import OnLog, delete, post
from dflash_ops.proxmox_values import Snapshot
from dflash_ops.shell import Shell

_TASK_SECONDS = 600.0
# How long the start that a rollback began may take before we start the container ourselves.
_START_SECONDS = 20.0
# How many names of the same second are tried.
_NAMES = 20
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
    """What going back to a snapshot would lose. known: False when nobody could look, or what they see can't be trusted;
    unknown: why. live: the runs that go on, for which going back is refused; continued: runs that are older than the
    snapshot and have written since; checkpoints: of such, as RUN/NAME; newer_snapshots: some storages refuse to go back
    behind them."""

    container: str
    snapshot: Snapshot
    known: bool
    unknown: str = ""
    live: tuple[GoingOn, ...] = ()
    runs: tuple[str, ...] = ()
    continued: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    newer_snapshots: tuple[str, ...] = ()

    def beyond(self, shown: "Lost") -> list[str]:
        """What is lost now and was not on a list that was made before, in words."""
        more = [f"the snapshot {self.snapshot.name} is another one"] if self.snapshot != shown.snapshot else []
        if shown.known and not self.known:
            more.append(self.unknown)
        for what, ours, theirs in (
            ("run", self.runs, shown.runs),
            ("what run wrote:", self.continued, shown.continued),
            ("checkpoint", self.checkpoints, shown.checkpoints),
            ("release", self.releases, shown.releases),
            ("environment", self.environments, shown.environments),
            ("snapshot", self.newer_snapshots, shown.newer_snapshots),
        ):
            more += [f"{what} {name}" for name in ours if name not in theirs]
        return more


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
    own = _own_name()
    _check_name(name or own)
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = containers.find(api, container.vmid)
        for number in range(1, _NAMES + 1):  # others may make one in the same second
            called = name or (own if number == 1 else f"{own}-{number}")
            if any(it.name == called for it in _snapshots(found)):
                continue
            call = post(*found.path("snapshot"), snapname=called, description=description)
            try:
                api.run(call, f"the snapshot of container {found.vmid}", on_log=on_log, seconds=_TASK_SECONDS)
            except OpsError as error:
                if name is None and "already used" in str(error):
                    continue
                raise
            if all(it.name != called for it in _snapshots(found)):
                raise OpsError("the snapshot is not there, though its task went well", where=str(container))
            return Snapped(str(container), called, "made", time.monotonic() - begun)
    raise UsageFault(f"there is a snapshot {name or own} already", where=str(container), next="another name")


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

    NotFoundError when there is no such snapshot."""
    with proxmox.connect(shell, container.host) as api:
        found = containers.find(api, container.vmid)
        return _lost(shell, container, found, name, also)


def refuse_living(container: Container, losing: Lost) -> None:
    """BusyError names the runs that go on."""
    if live := losing.live:
        raise BusyError(
            f"a run goes on in container {container.vmid}" if len(live) == 1 else "runs go on",
            where=str(container),
            why=", ".join(map(str, live)),
            next=live[0].advice,
        )


def rollback(
    shell: Shell,
    container: Container,
    name: str,
    *,
    shown: Lost | None = None,
    also: Sequence[Container] = (),
    on_log: OnLog = lambda line: None,
) -> WentBack:
    """Puts the container back to a snapshot: all that was written in it since is gone. BusyError while a run lives, and
    when more would be lost than was shown (shown: what `lost` said when somebody agreed to it).

    Proxmox VE kills a running container for it, and starts it again."""
    begun = time.monotonic()
    with proxmox.connect(shell, container.host) as api:
        found = containers.find(api, container.vmid)
        if found.running and not api.by_pvesh:
            allowed = api.get("access", "permissions", path=f"/vms/{found.vmid}")
            if lacking := proxmox_faults.lacks_power(api.asked, allowed, found.vmid):
                raise lacking
        losing = _lost(shell, container, found, name, also)
        refuse_living(container, losing)
        if shown is not None and (more := losing.beyond(shown)):
            raise BusyError(
                "more would be lost than was shown",
                where=str(container),
                why=", ".join(more),
                next="the same again, which shows all of it",
            )
        doing = f"going back to the snapshot {name} of container {found.vmid}"
        on_log(doing)
        parameters = {"start": 1} if found.running else {}
        with _told_how_it_stands(container, found, name, on_log):
            api.run(
                post(*found.path("snapshot", name, "rollback"), **parameters),
                doing,
                on_log=on_log,
                seconds=_TASK_SECONDS,
            )
        if found.running:
            _started(container, found, name, on_log)
    return WentBack(str(container), name, found.running, losing, time.monotonic() - begun)


@contextlib.contextmanager
def _told_how_it_stands(container: Container, found: Found, name: str, on_log: OnLog) -> Generator[None, None, None]:
    """An error, or Ctrl-C, in the middle: what was a running container may be back, and down."""
    look = "dflash-ops ct status"
    if found.running:
        look += "; when it is stopped, and nothing works on it any more: dflash-ops ct start"
    try:
        yield
    except KeyboardInterrupt:
        on_log(f"container {found.vmid} may be back at {name} already; how it stands: {look}")
        raise
    except OpsError as error:
        now = _standing(found)
        as_before = now == ("running" if found.running else "stopped")
        if as_before and not isinstance(error, UnreachableError | TimedOutError):
            raise  # it was refused, and nothing has happened
        raise type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}; container {found.vmid} {f'is {now} now' if now else 'may be stopped'}, and may be back "
            f"at {name} already",
            next="; ".join(part for part in (error.next, look) if part),
        ) from error


def _standing(found: Found) -> str | None:
    try:
        return "running" if containers.again(found).running else "stopped"
    except OpsError:
        return None


def _started(container: Container, found: Found, name: str, on_log: OnLog) -> None:
    """Waits until it runs again. The start is a task of its own, of which the rollback's end says nothing: when nothing
    comes of it another start tells why."""
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not (now := containers.again(found)).running:
            if time.monotonic() > deadline:
                containers.change(container, now, "started", "start", on_log)
                return
            time.sleep(0.2)
    except OpsError as error:
        raise type(error)(
            f"container {found.vmid} is back at snapshot {name}, and does not run: {error.what}",
            where=error.where,
            why=error.why,
            next="; ".join(part for part in (error.next, "then dflash-ops ct start") if part),
        ) from error
    except KeyboardInterrupt:
        on_log(f"container {found.vmid} is back at snapshot {name}; whether it runs again: dflash-ops ct status")
        raise


def _own_name() -> str:
    return f"dflash-{datetime.now(UTC):%Y%m%d-%H%M%S}"


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
        stopped = "the container is stopped; dflash-ops ct start, then again, lists it"
        return Lost(str(container), wanted, known=False, unknown=stopped, newer_snapshots=newer)
    if not found.here:
        raise PreflightError(
            "what would be lost can't be seen", where=str(container), why=containers.elsewhere(container, found.node)
        )
    try:
        reply = containers.look_into(shell, container, also, since=wanted.moment)
    except UnreachableError:
        raise
    except OpsError as error:
        raise type(error)(
            f"what would be lost can't be seen: {error.what}",
            where=error.where,
            why=error.why,
            next=f"{error.next or 'mend that'}; or dflash-ops ct stop --yes, then the same again: with the container "
            "stopped nothing is listed, and it goes back",
        ) from error
    lists = {key: tuple(reply[key]) for key in ("runs", "continued", "checkpoints", "releases", "environments")}
    ahead = wanted.moment - reply["now"]
    unknown = f"the clock was set back: it is {ahead:.0f} s behind the snapshot" if ahead > 1 else ""
    live = containers.going_on(reply)
    return Lost(str(container), wanted, not unknown, unknown, live, newer_snapshots=newer, **lists)
