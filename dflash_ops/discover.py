"""`inventory discover`: the containers of a host's cluster with the GPUs that their configurations pass in, and the
writing of chosen ones into the inventory.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dflash_ops import inventory_write, proxmox, proxmox_faults, proxmox_values
from dflash_ops.command import Command, Host
from dflash_ops.errors import NotFoundError, OpsError, UnreachableError, UsageFault
from dflash_ops.inventory import Inventory
from dflash_ops.proxmox import Proxmox
from dflash_ops.proxmox_gpus import PassedGpus, index_of_minors, passed_gpus
from dflash_ops.proxmox_values import THIS_NODE, ClusterContainer
from dflash_ops.shell import Shell

# pvesh takes most of a second for each, whatever the host does meanwhile.
_AT_ONCE = 4
_MINORS = Command(("sh", "-c", "cat /proc/driver/nvidia/gpus/*/information 2>/dev/null; exit 0"))


@dataclass(frozen=True)
class Discovered:
    """A container of the cluster. gpus: the host's indices of the GPUs that its configuration passes in; mig: whether
    MIG instances are among them; problems: what keeps programs in it from its GPUs, or us from its configuration; host:
    the inventory's host that is its node, known_as: the inventory's names of it; stale: of those, the ones that the
    inventory has on another host, with that host: it was migrated."""

    node: str
    vmid: int
    name: str
    status: str
    gpus: tuple[int, ...]
    mig: bool
    problems: tuple[str, ...]
    host: str | None
    known_as: tuple[str, ...]
    stale: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Discovery:
    """host: the one that was asked, and how; node: its own name, None when it did not say."""

    host: str
    asked: str
    node: str | None
    containers: tuple[Discovered, ...]


@dataclass(frozen=True)
class Added:
    """A container that was written into the inventory; new_host: whether its host was, too."""

    name: str
    host: str
    vmid: int
    gpus: tuple[int, ...]
    new_host: bool


def discover(shell: Shell, inventory: Inventory, host: Host) -> Discovery:
    """Every container that may be seen, by its id. PreflightError when a token may see none; a container whose
    configuration can't be read has that among its problems."""
    with proxmox.connect(shell, host) as api:
        listed = [it for it in proxmox_values.containers(api.get("cluster", "resources", type="vm")) if not it.template]
        if not listed and (nothing := _sees_nothing(api)) is not None:
            raise nothing
        own = _own_node(api, shell, host, listed)

        def ask(it: ClusterContainer) -> PassedGpus:
            return _passed(api, it)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            passed = list(pool.map(ask, listed))
        index = _indices(shell, host) if any(it.minors for it in passed) else {}
        asked = api.asked.where
    hosts = _hosts_by_node(inventory, host.name, own)
    cluster = _of_the_cluster(inventory, hosts, host.name, own, [it.node for it in listed])
    known = {it.vmid: _known_as(inventory, cluster, it.vmid) for it in listed}
    return Discovery(
        host.name,
        asked,
        own,
        tuple(
            Discovered(
                node=it.node,
                vmid=it.vmid,
                name=it.name,
                status=it.status,
                # What the other nodes' cards are called there, only they know.
                gpus=tuple(sorted(index.get(minor, minor) if it.node == own else minor for minor in gpus.minors)),
                mig=gpus.mig,
                problems=gpus.problems if gpus.hook is None else (*gpus.problems, _by_hook(gpus.hook)),
                host=hosts.get(it.node),
                known_as=tuple(known[it.vmid]),
                stale={name: on for name, on in known[it.vmid].items() if cluster[on] not in (None, it.node)},
            )
            for it, gpus in zip(listed, passed, strict=True)
        ),
    )


def add(file: Path, inventory: Inventory, found: Discovery, chosen: Mapping[int, str | None]) -> list[Added]:
    """Writes containers into the inventory, all or none, comments kept. chosen: vmid -> name, None for its own.

    NotFoundError for one that was not discovered; UsageFault for one that is there already, or a name that is taken.
    A node that is no host of the inventory yet becomes one, by its name."""
    by_vmid = {it.vmid: it for it in found.containers}
    hosts: dict[str, Mapping[str, object]] = {}
    containers: dict[str, Mapping[str, object]] = {}
    added: list[Added] = []
    for vmid, wanted in chosen.items():
        it = by_vmid.get(vmid)
        if it is None:
            raise NotFoundError(
                f"there is no container {vmid} to add",
                where=found.host,
                why=f"it has: {', '.join(map(str, by_vmid)) or 'none'}",
                next="dflash-ops inventory discover",
            )
        if it.known_as:
            raise _there_already(file, it)
        name = wanted or free_name(it, [*inventory.tables.containers, *containers])
        host = it.host or it.node
        if it.host is None and host not in hosts:
            if host in inventory.tables.hosts:
                raise UsageFault(
                    f"node {it.node} of container {vmid} is no host that is known",
                    where=str(file),
                    why=f"a host is called {host}, but it is another machine",
                    next=f"`node` in [hosts.NAME.api] of the host that is {it.node}",
                )
            hosts[host] = {"address": it.node}
        if name in containers:
            raise UsageFault(f"two containers can't both be {name}", where=str(file), next="--add VMID=NAME")
        containers[name] = {"host": host, "vmid": vmid, "gpus": list(it.gpus) or None}
        added.append(Added(name, host, vmid, it.gpus, it.host is None))
    if containers:
        inventory_write.add(file, hosts=hosts, containers=containers)
    return added


def _there_already(file: Path, it: Discovered) -> UsageFault:
    what, why = f"container {it.vmid} is in the inventory already", f"as {in_inventory(it)}"
    if not it.stale:
        return UsageFault(what, where=str(file), why=why)
    tables = ", ".join(f"[containers.{name}]" for name in it.stale)
    host = f"to {it.host}" if it.host is not None else f"to a host that is {it.node}; there is none yet in the file"
    return UsageFault(what, where=str(file), why=why, next=f"change `host` in {tables} {host}")


def in_inventory(it: Discovered) -> str:
    """The inventory's names of a container; for one that was migrated, where the inventory has it, and where it is."""
    return ", ".join(
        f"{name} (says {it.stale[name]}; now on {it.node})" if name in it.stale else name for name in it.known_as
    )


def free_name(it: Discovered, taken: Sequence[str]) -> str:
    """What the inventory can call a container: its own name, with its id where that is taken or is no name."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", it.name.partition(".")[0]).strip("-_")[:50]  # 64 with its id
    if not name or name == "all":
        return f"ct{it.vmid}"
    return name if name not in taken else f"{name}-{it.vmid}"


def _passed(api: Proxmox, it: ClusterContainer) -> PassedGpus:
    try:
        config: Any = api.get("nodes", it.node, "lxc", it.vmid, "config")
    except OpsError as error:
        if isinstance(error, UnreachableError) and f"node {it.node} " not in error.what:
            raise  # not its node is silent, but the one that we ask
        return PassedGpus(problems=(f"its configuration can't be read: {error.what}",))
    return passed_gpus(cast(Mapping[str, Any], config) if isinstance(config, dict) else {})


def _sees_nothing(api: Proxmox) -> OpsError | None:
    if api.by_pvesh:
        return None
    return proxmox_faults.sees_nothing(api.asked, api.get("access", "permissions"))


def _own_node(api: Proxmox, shell: Shell, host: Host, listed: Sequence[ClusterContainer]) -> str | None:
    """The name of the node that is asked: the inventory's word, or that of a container which is there."""
    if host.api is not None and host.api.node is not None:
        return host.api.node
    if api.by_pvesh:
        name = shell.run(host, Command(("uname", "-n"))).out.decode("utf-8", "replace").strip()
        return name.partition(".")[0] or None
    nodes = proxmox_values.nodes(api.get("nodes"))
    if len(nodes) == 1:
        return nodes[0]
    for node in dict.fromkeys(it.node for it in listed):
        one = next(it for it in listed if it.node == node)
        try:
            api.get("nodes", THIS_NODE, "lxc", one.vmid, "config")
        except OpsError:
            continue
        return node
    return None


def _indices(shell: Shell, host: Host) -> dict[int, int]:
    """Minor number -> the host's index of its cards; empty when it can't be asked by ssh: they are mostly the same."""
    try:
        return index_of_minors(shell.run(host, _MINORS).out.decode("utf-8", "replace"))
    except OpsError:
        return {}


def _by_hook(visible: str) -> str:
    return f"NVIDIA's hook passes its GPUs: NVIDIA_VISIBLE_DEVICES={visible}"


def _hosts_by_node(inventory: Inventory, asked: str, own: str | None) -> dict[str, str]:
    """Node -> the inventory's host: what `node` of [hosts.NAME.api] says, else the host's name or address."""
    found: dict[str, str] = {}
    for name, table in inventory.tables.hosts.items():
        words = [table.api.node if table.api else None, name, table.address, (table.address or "").partition(".")[0]]
        for word in words:
            if word:
                found.setdefault(word, name)
    return {**found, own: asked} if own else found


def _of_the_cluster(
    inventory: Inventory, hosts: Mapping[str, str], asked: str, own: str | None, nodes: Sequence[str]
) -> dict[str, str | None]:
    """The inventory's hosts that are of the cluster of the one that was asked, each with its node. A number is one
    container's in a whole cluster, wherever it was migrated to, and another's in the next cluster."""
    node_of: dict[str, str | None] = {host: node for node, host in hosts.items() if node in nodes}
    node_of[asked] = own if own is not None else node_of.get(asked)
    tables = inventory.tables.hosts

    def place(name: str) -> tuple[object, ...]:
        return (tables[name].address, tables[name].port, tables[name].sandbox)

    places = {place(name): node for name, node in node_of.items() if name in tables}
    return {**{name: places[place(name)] for name in tables if place(name) in places}, **node_of}


def _known_as(inventory: Inventory, cluster: Mapping[str, object], vmid: int) -> dict[str, str]:
    """The inventory's names of a container, each with the host that it is on by the inventory."""
    tables = inventory.tables.containers
    return {name: table.host for name, table in tables.items() if table.host in cluster and table.vmid == vmid}


def shown(found: Discovery) -> list[Discovered]:
    """Those with GPUs first, then by id."""
    return sorted(found.containers, key=lambda it: (not (it.gpus or it.mig), it.vmid))
