"""Holds an inventory against the machines that it names: hosts that answer, containers that run, and what is in them.

shell.begin(host); look(shell, host, containers)      -> every check of one host
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dflash_ops import inventory_probe as probe
from dflash_ops import sudo
from dflash_ops.checks import Check
from dflash_ops.command import Container, Host
from dflash_ops.errors import LinkLostError, NotFoundError, OpsError, TimedOutError
from dflash_ops.inventory import Inventory
from dflash_ops.inventory_faults import Fault
from dflash_ops.inventory_lines import line_of
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


def files(book: Inventory) -> tuple[list[Fault], list[Check]]:
    """The files that an inventory names: those of no user are faults; what is not there is a warning."""
    faults: list[Fault] = []
    checks: list[Check] = []
    for key, text, what in _files(book.tables):
        where = ".".join(key)
        try:
            path = book.file.parent / Path(text).expanduser()
        except RuntimeError:
            faults.append(Fault(where, f"{text!r} has no home folder", line_of(book.text, key)))
            continue
        if why := _not_there(path, folder=what == "folder"):
            checks.append(Check("file", where, "warning", f"{path} {why}", f"make it, or correct `{where}`"))
    return faults, checks


def _files(tables: InventoryFile) -> Iterator[tuple[tuple[str, ...], str, str]]:
    if tables.source is not None:
        yield ("source",), tables.source, "folder"
    for name, host in tables.hosts.items():
        for key in ("key", "known_hosts", "ssh_config"):
            if text := getattr(host, key):
                yield ("hosts", name, key), text, "file"
        for key in ("token_file", "ca"):
            if text := getattr(host.api, key, None):
                yield ("hosts", name, "api", key), text, "file"


def _not_there(path: Path, *, folder: bool) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "is not there" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
    if stat.S_ISDIR(mode) != folder:
        return "is no folder" if folder else "is a folder"
    return "" if os.access(path, os.R_OK) else "can't be read: it is not ours"


def ask(book: Inventory, names: Sequence[str], *, board: Board | None = None) -> list[Outcome[Host, tuple[Check, ...]]]:
    """Asks every host at once, or those alone that have these containers: what is there, by the host's name.

    names: words of `Inventory.names`; none for all there is. A host that can't be reached has its error."""
    containers, hosts = wanted(book, names)
    by_host: dict[str, list[str]] = {host: [] for host in hosts}
    for name in containers:
        by_host.setdefault(book.tables.containers[name].host, []).append(name)
    places = {name: _there(book, name) for name in by_host}

    def verb(at: At[Host]) -> tuple[Check, ...]:
        return look(at.shell, at.place, {name: book.container(name) for name in by_host[at.name]})

    with Shell() as shell:
        return each(shell, places, verb, board=board)


def wanted(book: Inventory, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The containers, and the hosts beside theirs, that words name; all for none. A host may be without containers.
    Errors: those of `Inventory.names`."""
    if not names:
        return tuple(book.tables.containers), tuple(book.tables.hosts)
    hosts = [word for name in names for part in name.split(",") if (word := part.strip()) in book.tables.hosts]
    try:
        return book.names(names), tuple(hosts)
    except NotFoundError:
        known = (book.tables.hosts, book.tables.groups)
        if not hosts or not all(any(word.strip() in it for it in known) for name in names for word in name.split(",")):
            raise
        return (), tuple(hosts)


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
    elif (user := shell.lacks_pvesh(host)) is not None:
        found.append(Check("pvesh", str(host), "note", *sudo.no_pvesh(user)))
    cards: Cards | None = None
    if any(container.gpus for container in containers.values()):
        cards = host_cards(shell, host)
        if cards.refused:
            found.append(Check("GPUs", str(host), "failure", cards.refused, "on the host: nvidia-smi"))
    for name, container in containers.items():
        there = {entry.vmid: entry for entry in listed}.get(container.vmid)
        found += _outside(name, container, there, listed)
        if there is None or there.status != "running":
            continue
        try:
            seen = inside(shell, container)
        except LinkLostError:
            raise
        except OpsError as error:
            found.append(Check("container", name, "failure", error.line(), error.next or None))
            continue
        found += judge(name, container, cards, seen)
    return tuple(found)


def host_cards(shell: Shell, host: Host) -> Cards:
    """The host's GPUs; where nvidia-smi does not answer, that is why there are none. LinkLostError is raised."""
    try:
        return shell.ask(host, probe.cards(), timeout=_SECONDS)
    except LinkLostError:
        raise
    except OpsError as error:
        return Cards((), f"nvidia-smi on the host: {error.line()}")


def inside(shell: Shell, container: Container) -> Inside:
    """What is in a container that runs. A driver that hangs may stop nvidia-smi from being stopped; then all but the
    GPUs is asked."""
    try:
        return shell.ask(container, probe.inside(container), timeout=_SECONDS)
    except TimedOutError:
        why = f"nvidia-smi gave no answer within {_SECONDS:.0f} s"
        return shell.ask(container, probe.inside(container, why), timeout=_SECONDS)


def api_version(shell: Shell, host: Host) -> tuple[str, bool]:
    """The version that the host's API says, and whether it was asked by pvesh, for want of a token. Raises OpsError."""
    from dflash_ops import proxmox

    with proxmox.connect(shell, host) as api:
        return str(api.get("version").get("version", "unknown")), api.by_pvesh


def _api(shell: Shell, host: Host) -> Check:
    """Whether the host's API answers to the token."""
    assert host.api is not None
    try:
        version, by_pvesh = api_version(shell, host)
    except OpsError as error:
        return Check("API", str(host), "failure", error.line(), error.next or None)
    if by_pvesh:
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
        return [
            Check(
                "container",
                name,
                "failure",
                evidence,
                f"dflash-ops ct start -t {name}; or on the host: pct start {vmid}",
            )
        ]
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
