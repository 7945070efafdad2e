"""What the hypervisor does with a container: status, start, stop, reboot. Snapshots are in snapshots.py.

Each asks Proxmox VE (proxmox.py), waits for the task that it began, and looks afterwards whether it is as it was meant
to be: an HA-managed container, for one, is only asked to start.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ops import proxmox, proxmox_faults, proxmox_values
from dflash_ops.answers import answer
from dflash_ops.command import Container
from dflash_ops.errors import NotFoundError, OpsError, PreflightError, TimedOutError
from dflash_ops.proxmox import OnLog, Proxmox, post
from dflash_ops.proxmox_values import THIS_NODE
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

SHUTDOWN_SECONDS = 60
_TASK_SECONDS = 600.0
_SETTLE_SECONDS = 60.0
_LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class GoingOn:
    """A run that goes on in the container. folder: where, when it is none of the inventory's folders; "?" when nothing
    tells."""

    id: str
    folder: str | None = None

    def __str__(self) -> str:
        return self.id if self.folder is None else f"{self.id} in {self.folder}"

    @property
    def advice(self) -> str:
        """How to end it."""
        if self.folder is None:
            return f"dflash-ops train stop {self.id}"
        return f"ask whose it is; dflash-ops train stop {self.id}, by an inventory whose `path` is {self.folder}"


# Told which runs go on, or why nobody could look; raises where the container must stay as it is.
OnRuns = Callable[[Sequence[GoingOn], OpsError | None], None]


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
class Found:
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
        found = find(api, container.vmid)
    facts = found.facts

    def number(key: str) -> int | None:
        return proxmox_values.integer(facts.get(key))

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
        cpus=_decimal(facts.get("cpus")),
        memory_bytes=number("maxmem"),
        memory_used_bytes=number("mem") if found.running else None,
        asked=api.asked.where,
    )


def start(shell: Shell, container: Container, *, on_log: OnLog = lambda line: None) -> Changed:
    """Starts it, unless it runs."""
    with proxmox.connect(shell, container.host) as api:
        found = find(api, container.vmid)
        return change(container, found, "started", "start", on_log)


def stop(
    shell: Shell,
    container: Container,
    *,
    kill: bool = False,
    timeout: int = SHUTDOWN_SECONDS,
    on_runs: OnRuns | None = None,
    also: Sequence[Container] = (),
    on_log: OnLog = lambda line: None,
) -> Changed:
    """Shuts it down, and waits up to `timeout` seconds for that; or kills it at once.

    on_runs: hears of runs that go on in it, before anything happens; None: nobody looks. also: other folders in the
    same container that may have runs."""
    with proxmox.connect(shell, container.host) as api:
        found = find(api, container.vmid)
        _look_for_runs(shell, container, found, on_runs, also)
        if kill:
            return change(container, found, "killed", "stop", on_log)
        return change(container, found, "stopped", "shutdown", on_log, timeout=timeout)


def reboot(
    shell: Shell,
    container: Container,
    *,
    timeout: int = SHUTDOWN_SECONDS,
    on_runs: OnRuns | None = None,
    also: Sequence[Container] = (),
    on_log: OnLog = lambda line: None,
) -> Changed:
    """Shuts it down and starts it again; see `stop`. PreflightError when it is stopped."""
    with proxmox.connect(shell, container.host) as api:
        found = find(api, container.vmid)
        if not found.running:
            raise PreflightError(
                f"container {container.vmid} is stopped", where=str(container), next="dflash-ops ct start"
            )
        _look_for_runs(shell, container, found, on_runs, also)
        return change(container, found, "rebooted", "reboot", on_log, timeout=timeout)


def elsewhere(container: Container, node: str) -> str:
    """What to do when a container is on another node than the inventory's host."""
    which = f"[containers.{container.name}]" if container.name else f"container {container.vmid}"
    return (
        f"container {container.vmid} is on node {node} now, not on host {container.host}: in the inventory, "
        f"{which} needs a `host` that is {node}"
    )


# -- where it is, and how it stands


def find(api: Proxmox, vmid: int) -> Found:
    """The container's node, and what that says of it."""
    node, name = _place(api, vmid)
    own = api.host.api.node if api.host.api is not None else None
    if own is not None or node == THIS_NODE:
        here = node in (own, THIS_NODE)
        return Found(api, vmid, node, name, here, _current(api, node, vmid))
    try:  # it is most often on the node that we ask, and this tells that too
        return Found(api, vmid, node, name, True, _current(api, THIS_NODE, vmid))
    except NotFoundError:
        return Found(api, vmid, node, name, False, _current(api, node, vmid))


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


def _decimal(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _ha_managed(ha: Any) -> bool:
    return isinstance(ha, dict) and bool(ha.get("managed"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def again(found: Found) -> Found:
    return Found(found.api, found.vmid, found.node, found.name, found.here, _current(found.api, found.node, found.vmid))


def change(container: Container, found: Found, did: str, verb: str, on_log: OnLog, **parameters: int) -> Changed:
    begun = time.monotonic()
    wants_running = did in ("started", "rebooted")
    if did != "rebooted" and found.running == wants_running:
        return Changed(str(container), did, False, found.node, 0.0, 0)
    doing = {"started": "starting", "stopped": "shutting down", "killed": "killing", "rebooted": "rebooting"}[did]
    doing = f"{doing} container {found.vmid}"
    on_log(doing)
    seconds = _TASK_SECONDS + parameters.get("timeout", 0)
    warnings = 0
    try:
        warnings = found.api.run(
            post(*found.path("status", verb), **parameters), doing, on_log=on_log, seconds=seconds
        ).warnings
    except OpsError:
        # Somebody else was quicker, or the answer was lost.
        if did == "rebooted" or not _is_so(found, wants_running):
            raise
    _settle(container, found, wants_running, did)
    return Changed(str(container), did, True, found.node, time.monotonic() - begun, warnings)


def _is_so(found: Found, running: bool) -> bool:
    try:
        return again(found).running == running
    except OpsError:
        return False


def _settle(container: Container, found: Found, wants_running: bool, did: str) -> None:
    """Waits until it is as it was meant to be: with HA a task has only asked for it."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while again(found).running != wants_running:
        if time.monotonic() > deadline:
            word = "running" if wants_running else "stopped"
            raise TimedOutError(
                f"container {found.vmid} is not {word}, though its task went well",
                where=str(container),
                why=f"it was to be {did} {_SETTLE_SECONDS:.0f} s ago",
                next="on the host: ha-manager status; pct status " + str(found.vmid),
            )
        time.sleep(0.5)


def _look_for_runs(
    shell: Shell, container: Container, found: Found, on_runs: OnRuns | None, also: Sequence[Container]
) -> None:
    if on_runs is None or not found.running:
        return
    try:
        if not found.here:
            raise PreflightError(elsewhere(container, found.node))
        live = going_on(look_into(shell, container, also))
    except OpsError as error:
        on_runs((), error)
    else:
        if live:
            on_runs(live, None)


def look_into(shell: Shell, container: Container, also: Sequence[Container], **parameters: Any) -> dict[str, Any]:
    """What `since` tells of the container: of its folders, and of the runs in any folder that go on."""
    parameters["paths"] = list(dict.fromkeys(it.path for it in (container, *also)))
    return answer(shell.run(container, bundle.command(container.python, "since", parameters), timeout=_LOOK_SECONDS))


def going_on(reply: dict[str, Any]) -> tuple[GoingOn, ...]:
    """The runs of such an answer that go on."""
    others = [GoingOn(run_id, folder or "?") for run_id, folder in reply["elsewhere"]]
    return (*map(GoingOn, reply["live"]), *others)
