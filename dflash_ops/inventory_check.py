"""Holds an inventory against the machines that it names: hosts that answer, containers that run, and what is in them.

shell.begin(host); look(shell, host, containers)      -> every check of one host
"""

from collections.abc import Iterable, Mapping, Sequence

from dflash_ops import inventory_probe as probe
from dflash_ops.checks import Check
from dflash_ops.command import Container, Host
from dflash_ops.errors import LinkLostError, OpsError, TimedOutError
from dflash_ops.inventory import Inventory
from dflash_ops.inventory_probe import Card, Cards, Inside, Listed
from dflash_ops.inventory_tables import InventoryFile
from dflash_ops.many import At, Board, Outcome, each
from dflash_ops.shell import Shell

_SECONDS = 20.0  # for each question


def remarks(tables: InventoryFile) -> list[Check]:
    """What may be meant, but often is not. Pure."""
    found: list[Check] = []
    addresses: dict[tuple[object, ...], str] = {}
    for name, host in tables.hosts.items():
        at = (host.address, host.port, host.user, host.sandbox, host.ssh_config)
        if (other := addresses.setdefault(at, name)) != name:
            found.append(Check("host", name, "note", f"has the address of {other}: two names for one host"))
    places: dict[tuple[str, int, str], str] = {}
    for name, container in tables.containers.items():
        at = (container.host, container.vmid, container.path)
        if (other := places.setdefault(at, name)) != name:
            evidence = f"is the container and the path of {other}: they share releases and runs"
            found.append(Check("container", name, "note", evidence))
    return found


def ask(book: Inventory, names: Sequence[str], *, board: Board | None = None) -> list[Outcome[Host, tuple[Check, ...]]]:
    """Asks every host at once, or those alone that have these containers: what is there, by the host's name.

    names: words of `Inventory.names`; none for all there is. A host that can't be reached has its error."""
    wanted = book.names(names) if names else tuple(book.tables.containers)
    by_host: dict[str, list[str]] = {} if names else {host: [] for host in book.tables.hosts}
    for name in wanted:
        by_host.setdefault(book.tables.containers[name].host, []).append(name)
    places = {name: _there(book, name) for name in by_host}

    def verb(at: At[Host]) -> tuple[Check, ...]:
        return look(at.shell, at.place, {name: book.container(name) for name in by_host[at.name]})

    with Shell() as shell:
        return each(shell, places, verb, board=board)


def _there(book: Inventory, host: str) -> Host | OpsError:
    try:
        return book.host(host)
    except OpsError as error:  # a sandbox that is down
        return error


def look(shell: Shell, host: Host, containers: Mapping[str, Container]) -> tuple[Check, ...]:
    """Asks a host and these containers of it, by their names in the inventory. Raises what says that the host can't be
    reached; all else is a check."""
    try:
        listed = shell.ask(host, probe.containers(), timeout=_SECONDS)
    except (LinkLostError, TimedOutError):
        raise
    except OpsError as error:
        if error.exit_code in (4, 5):  # it was never reached
            raise
        return (Check("host", str(host), "failure", error.line(), error.next or None),)
    found = [Check("host", str(host), "ok", f"answers; {len(listed)} containers")]
    if host.api is not None:
        found.append(_api(shell, host))
    cards: Cards | None = None
    if any(container.gpus for container in containers.values()):
        cards = shell.ask(host, probe.cards(), timeout=_SECONDS)
        if cards.refused:
            found.append(Check("GPUs", str(host), "failure", cards.refused, "on the host: nvidia-smi"))
    for name, container in containers.items():
        there = {entry.vmid: entry for entry in listed}.get(container.vmid)
        found += _outside(name, container, there, listed)
        if there is None or there.status != "running":
            continue
        try:
            seen = shell.ask(container, probe.inside(container), timeout=_SECONDS)
        except LinkLostError:
            raise
        except OpsError as error:
            found.append(Check("container", name, "failure", error.line(), error.next or None))
            continue
        found += judge(name, container, cards, seen)
    return tuple(found)


def _api(shell: Shell, host: Host) -> Check:
    """Whether the host's API answers to the token."""
    from dflash_ops import proxmox

    assert host.api is not None
    try:
        with proxmox.connect(shell, host) as api:
            version = api.get("version").get("version", "unknown")
    except OpsError as error:
        return Check("API", str(host), "failure", error.line(), error.next or None)
    if api.by_pvesh:
        fix = f"put the token's secret into {host.api.token_env}, or name a file of mode 0600 as `token_file`"
        return Check("API", str(host), "note", f"version {version}, by pvesh over ssh: there is no token here", fix)
    return Check("API", str(host), "ok", f"version {version}, as {host.api.user}!{host.api.token_name}")


def _outside(name: str, container: Container, there: Listed | None, listed: Sequence[Listed]) -> list[Check]:
    vmid = container.vmid
    if there is None:
        others = ", ".join(f"{entry.vmid} ({entry.name})" for entry in listed) or "none"
        fix = f"correct `containers.{name}.vmid` or `.host`; after a migration: dflash-ops inventory discover"
        return [Check("container", name, "failure", f"there is no container {vmid} on {container.host}: {others}", fix)]
    if there.status != "running":
        evidence = f"container {vmid} ({there.name}) is {there.status}"
        return [Check("container", name, "failure", evidence, f"on the host: pct start {vmid}")]
    return [Check("container", name, "ok", f"{vmid} is {there.name!r} and runs")]


def judge(name: str, container: Container, host: Cards | None, seen: Inside) -> list[Check]:
    """What a container has against what the inventory says of it. host: its GPUs, None where none matter. Pure."""
    return [
        _python(name, container, seen),
        *_path(name, container, seen),
        *_user(name, container, seen),
        *_gpus(name, container, host, seen.cards),
    ]


def _python(name: str, container: Container, seen: Inside) -> Check:
    fix = f"install it in the container, or correct `containers.{name}.python`"
    if seen.python is None:
        evidence = f"{container.python} does not run: {seen.python_said or 'it says nothing'}"
        return Check("python", name, "failure", evidence, fix)
    version = ".".join(map(str, seen.python))
    if seen.python[:2] < probe.OLDEST_FOR_SCRIPTS:
        return Check(
            "python", name, "failure", f"{container.python} is {version}; 3.9 is the least, 3.11 to train", fix
        )
    if seen.python[:2] < probe.OLDEST_PYTHON:
        return Check("python", name, "warning", f"{container.python} is {version}; the trainer needs 3.11", fix)
    return Check("python", name, "ok", f"{container.python} is {version}")


def _path(name: str, container: Container, seen: Inside) -> list[Check]:
    if not seen.path:
        return [Check("path", name, "ok", f"{container.path} can be written")]
    fix = f"make room in the container, or correct `containers.{name}.path`"
    return [Check("path", name, "failure", f"{container.path} can't be written: {seen.path}", fix)]


def _user(name: str, container: Container, seen: Inside) -> list[Check]:
    if container.user is None:
        return []
    if not seen.user:
        return [Check("user", name, "ok", f"there is a user {container.user}")]
    fix = f"in the container: useradd --create-home {container.user}; or correct `containers.{name}.user`"
    return [Check("user", name, "failure", seen.user, fix)]


def _gpus(name: str, container: Container, host: Cards | None, seen: Cards) -> list[Check]:
    if not container.gpus or host is None or host.refused:
        if seen.cards and not container.gpus:
            evidence = f"the container has {len(seen.cards)}, the inventory names none: nothing locks them"
            return [Check("GPUs", name, "note", evidence, f"add `gpus` to [containers.{name}]")]
        return []
    fix = f"correct `containers.{name}.gpus`, or what the host passes in (dev0: /dev/nvidia0 ...)"
    by_index = {card.index: card for card in host.cards}
    missing = [index for index in container.gpus if index not in by_index]
    if missing:
        evidence = f"the host has no GPU {_words(missing)}; it has {_words(by_index)}"
        return [Check("GPUs", name, "failure", evidence, fix)]
    if seen.refused:
        return [Check("GPUs", name, "failure", f"the container sees none: {seen.refused}", fix)]
    wanted = [by_index[index].uuid for index in container.gpus]
    got = [card.uuid for card in seen.cards]
    if wanted == got:
        cards = [by_index[index] for index in container.gpus]
        return [Check("GPUs", name, "ok", f"{_words(container.gpus)}: {described(cards)}")]
    indices: dict[str, object] = {card.uuid: card.index for card in host.cards}
    there = _words(indices.get(uuid, "unknown") for uuid in got)
    evidence = f"the inventory says {_words(container.gpus)}, the container has the host's {there}, in that order"
    return [Check("GPUs", name, "failure", evidence, f"gpus = [{there}] in [containers.{name}]")]


def _words(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def described(cards: Sequence[Card]) -> str:
    """ "2x NVIDIA H200" for people."""
    names = [card.name for card in cards]
    return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
