"""`dflash-ops init`: an inventory by asking, each answer tried on the machine that it is about.

What the command line says is not asked; the rest is asked of an `Asker`: a person at a terminal, or nobody. An answer
that turns out wrong is asked for again where there is somebody to ask, and raised where not.
"""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dflash_ops import init_answers as answers
from dflash_ops import init_api, init_schema, inventory_check, inventory_write
from dflash_ops import inventory_probe as probe
from dflash_ops.command import Container, Host
from dflash_ops.errors import (
    ConfigError,
    HostKeyError,
    LinkLostError,
    OpsError,
    PreflightError,
    UsageFault,
)
from dflash_ops.init_answers import Asker as Asker
from dflash_ops.init_answers import Said as Said
from dflash_ops.inventory import Inventory, parse
from dflash_ops.inventory_faults import listed, nearest
from dflash_ops.inventory_file import present, read
from dflash_ops.inventory_probe import Cards, Inside, Listed
from dflash_ops.inventory_tables import ALL, ContainerTable
from dflash_ops.shell import Shell

T = TypeVar("T")

_SECONDS = 20.0
_PATH, _PYTHON = ContainerTable.path, ContainerTable.python


@dataclass(frozen=True)
class Plan:
    """What is to be written. hosts, containers: tables by name, as inventory_write takes them; default: the `default`
    that comes with them; container: None where a host alone gets its [api]; files: what goes beside the inventory;
    tried: what the machines said; untried: what could not be tried, and how to."""

    file: Path
    host: str
    container: str | None
    hosts: dict[str, dict[str, Any]]
    containers: dict[str, dict[str, Any]]
    default: dict[str, str]
    files: dict[Path, bytes]
    tried: tuple[str, ...]
    untried: tuple[str, ...] = ()


def plan(shell: Shell | None, file: Path, said: Said, asker: Asker) -> Plan:
    """Asks, and tries the answers; writes nothing. shell: None tries nothing.

    ConfigError where the file is there and wrong; HostKeyError for a host whose key is not known, which is never asked
    again; UsageFault and PreflightError for answers that nobody can be asked to correct."""
    try:
        text = read(file) if present(file) else ""
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError("the inventory can't be read", where=str(file), why=why, next="say another --out") from error
    return _Init(shell, parse(text, file), said, asker).plan()


def write(plan: Plan) -> list[Path]:
    """Writes a plan, all or nothing; gives the files beside the inventory that were written."""
    return inventory_write.add(
        plan.file,
        hosts=plan.hosts,
        containers=plan.containers,
        head=init_schema.head(plan.file),
        beside=plan.files,
        renewed=[init_schema.own(plan.file)],
    )


def preview(plan: Plan) -> str:
    """The tables that a plan adds, as the file will have them."""
    default = "".join(f"default = {json.dumps(name)}\n\n" for name in plan.default.values())
    return default + inventory_write.rendered({"hosts": plan.hosts, "containers": plan.containers})


class _Init:
    def __init__(self, shell: Shell | None, book: Inventory, said: Said, asker: Asker) -> None:
        self._shell, self._book, self._said, self._asker = shell, book, said, asker
        self._tried: list[str] = []
        self._untried: list[str] = []
        self._new_hosts: dict[str, dict[str, Any]] = {}
        self._seen: dict[Container, Inside] = {}

    def plan(self) -> Plan:
        if (name := self._api_alone()) is not None:
            host = self._book.host(name)
            if host.api is not None:
                raise UsageFault(
                    f"host {name!r} has an [api] in the file already",
                    where=str(self._book.file),
                    next=f"change [hosts.{name}.api] by hand; dflash-ops inventory check --connect {name} tries it",
                )
            host, _, _ = self._use(name)
            api, files = self._api(host, name)
            return self._planned(name, None, {name: {"api": api}}, {}, files)
        self._sayable(user=self._said.container_user)
        host, new, listed = self._host()
        name = host.name
        if new:
            paths = {key: self._relative(getattr(host, key)) for key in ("key", "known_hosts", "ssh_config")}
            keys = {"address": host.address, "port": host.port, "user": host.user, **paths}
            free = self._free(answers.name_of(host.address))
            name = self._settled(
                self._said.host, "Its name in the inventory", "--host", free, lambda it: self._named("hosts", it, keys)
            )
            self._new_hosts = {name: keys}
        container = self._container(host, name, listed)
        api, files = self._api(host, name)
        hosts = {**self._new_hosts}
        if api:
            hosts[name] = {**hosts.get(name, {}), "api": api}
        tables = {container.name: self._keys(container, name)}
        return self._planned(name, container.name, hosts, tables, files)

    def _planned(
        self,
        host: str,
        container: str | None,
        hosts: dict[str, dict[str, Any]],
        containers: dict[str, dict[str, Any]],
        files: dict[Path, bytes],
    ) -> Plan:
        file = self._book.file
        default = inventory_write.new_default(self._book.tables, containers)
        files = {**files, **init_schema.files(file)}
        tried, untried = tuple(self._tried), tuple(self._untried)
        return Plan(file, host, container, hosts, containers, default, files, tried, untried)

    def _api_alone(self) -> str | None:
        """The host of the file that is to get its [api], and no container: no word is said of one."""
        said, hosts = self._said, self._book.tables.hosts
        of_a_container = (said.vmid, said.name, said.path, said.python, said.gpus, said.container_user)
        if said.api is None or said.api.strip().lower() == answers.NONE or said.address is not None:
            return None
        name = said.host or (next(iter(hosts)) if len(hosts) == 1 else None)
        return name if name in hosts and not any(word is not None for word in of_a_container) else None

    # -- the host. Its name is asked once it has answered; the connection goes on under the one that it began with.

    def _host(self) -> tuple[Host, bool, tuple[Listed, ...]]:
        """The host, connected to; whether it is to be written; its containers."""
        said, tables, where = self._said, self._book.tables.hosts, str(self._book.file)
        if said.host in tables:
            if said.address is not None:
                raise UsageFault(f"host {said.host!r} is in the file already", where=where, next="leave --address out")
            return self._use(said.host)
        if said.host is not None and said.address is None and tables and not self._asker.can_ask:
            raise UsageFault(
                f"no host is called {said.host!r}, and --address is not said",
                where=where,
                why=f"the file has: {listed(tables)}{nearest(said.host, tables)}",
                next="say one of these, or --address too for a new one",
            )
        question = "The Proxmox host: a name, an address, or an alias of ~/.ssh/config"
        if tables:
            question += f"; or one of this file: {', '.join(tables)}"
        return self._settled(said.address, question, "--address", None, self._try_host)

    def _try_host(self, word: str) -> tuple[Host, bool, tuple[Listed, ...]]:
        said = self._said
        if word in self._book.tables.hosts:
            return self._use(word)
        user, address = answers.user_and_address(word, said.user)
        host = Host(answers.name_of(address), address, said.port, user, said.key, said.known_hosts, said.ssh_config)
        for name, table in self._book.tables.hosts.items():
            if (table.address, table.port, table.user) == (host.address, host.port, host.user):
                return self._use(name)
        keys = {"address": host.address, "port": host.port, "user": host.user}
        inventory_write.added("", self._book.file, {"hosts": {"new": inventory_write.said(keys)}, "containers": {}})
        return host, True, self._reach(host)

    def _use(self, name: str) -> tuple[Host, bool, tuple[Listed, ...]]:
        """A host of the file. UsageFault where the command line says other things of it: they would be dropped."""
        host, where = self._book.host(name), str(self._book.file)
        if self._said.host not in (None, name):
            next = f"say --host {name} in place of --address and --host; a second name for it is written by hand"
            raise UsageFault(f"this address is host {name!r} in the file already", where=where, next=next)
        other = [
            f"--{key.replace('_', '-')}"
            for key in ("port", "user", "key", "known_hosts", "ssh_config")
            if (given := getattr(self._said, key)) is not None and _whole(given) != _whole(getattr(host, key))
        ]
        if other:
            raise UsageFault(
                f"host {name!r} is in the file with other values",
                where=where,
                why=f"they are not those of {', '.join(other)}",
                next=f"leave them out, or change [hosts.{name}] by hand",
            )
        return host, False, self._reach(host)

    def _reach(self, host: Host) -> tuple[Listed, ...]:
        if self._shell is None:
            return ()
        found = self._shell.ask(host, probe.containers(), timeout=_SECONDS)
        self._tried.append(f"host {host.address}: answers, {len(found)} containers")
        if not found:
            raise PreflightError("the host has no containers", where=host.address, next="on the host: pct list")
        return found

    # -- the container

    def _container(self, host: Host, host_name: str, listed: Sequence[Listed]) -> Container:
        said = self._said
        if said.vmid is None:
            for entry in listed:
                self._asker.tell(f"  {entry.vmid}  {entry.status:8} {entry.name}")
        running = [str(entry.vmid) for entry in listed if entry.status == "running"]
        default = running[0] if len(running) == 1 else None
        chosen = self._settled(
            said.vmid, "The container's number", "--vmid", default, lambda it: answers.one_of(it, listed, host)
        )
        bare = Container(host, chosen.vmid, said.path or _PATH, said.python or _PYTHON, user=said.container_user)
        asked = "Python in the container; the trainer's environment is made of it"
        bare = self._settled(said.python, asked, "--python", _PYTHON, lambda it: self._try_python(bare, it))
        self._hold("user", bare, None, self._inside(bare))  # nobody is asked for it
        asked = "Folder in the container for releases and runs"
        bare = self._settled(said.path, asked, "--path", _PATH, lambda it: self._try_path(bare, host_name, it))
        without = said.gpus is not None and not answers.gpus(said.gpus)
        host_cards = None if without or self._shell is None else inventory_check.host_cards(self._shell, host)
        inside = self._inside(bare)
        detected = answers.detected(host_cards, inside.cards) if inside else ()
        if host_cards and host_cards.refused and said.gpus is None:
            self._asker.tell(f"  the host shows no GPU: {host_cards.refused}")
        elif inside and inside.cards.refused and said.gpus is None:
            self._asker.tell(f"  the container shows no GPU: {inside.cards.refused}")
        bare = self._settled(
            said.gpus,
            "GPUs: the host's numbers, in the container's order",
            "--gpus",
            ",".join(map(str, detected)) or answers.NONE,
            lambda it: self._try_gpus(bare, it, host_cards, inside),
        )
        taken = self._taken()
        default = "trainer" if "trainer" not in taken else self._free(answers.name_of(chosen.name or str(chosen.vmid)))
        keys = self._keys(bare, host_name)
        name = self._settled(
            said.name, "Its name in the inventory", "--name", default, lambda it: self._named("containers", it, keys)
        )
        return replace(bare, name=name)

    def _keys(self, container: Container, host_name: str) -> dict[str, Any]:
        """The container's table: what is not so by default."""
        keys: dict[str, Any] = {"host": host_name, "vmid": container.vmid}
        plain = Container(container.host, container.vmid)
        for key in ("path", "python", "user", "gpus"):
            if getattr(container, key) != getattr(plain, key):
                keys[key] = getattr(container, key)
        return keys

    def _sayable(self, **keys: Any) -> None:
        """UsageFault for what no container's table can say."""
        new = {"new": inventory_write.said({"host": "x", "vmid": 100, **keys})}
        inventory_write.added("", self._book.file, {"hosts": {"x": {"address": "x"}}, "containers": new})

    def _try_python(self, container: Container, python: str) -> Container:
        self._sayable(python=python)
        container = replace(container, python=python)
        self._hold("python", container, None, self._inside(container))
        return container

    def _try_path(self, container: Container, host_name: str, path: str) -> Container:
        container = replace(container, path=path)
        self._sayable(vmid=container.vmid, path=path)
        for name, table in self._book.tables.containers.items():
            if (table.host, table.vmid, table.path) == (host_name, container.vmid, path):
                raise UsageFault(
                    f"container {container.vmid} with {path} is {name!r} in the file already",
                    where=str(self._book.file),
                    next="edit it there, or choose another folder",
                )
        self._hold("path", container, None, self._inside(container))
        return container

    def _try_gpus(self, container: Container, word: str, cards: Cards | None, inside: Inside | None) -> Container:
        container = replace(container, gpus=answers.gpus(word))
        if container.gpus and cards and cards.refused:
            raise PreflightError(
                "the host shows no GPU", where=container.host.address, why=cards.refused, next="say none"
            )
        self._hold("GPUs", container, cards, inside)
        return container

    def _hold(self, what: str, container: Container, cards: Cards | None, inside: Inside | None) -> None:
        """Raises what does not hold of one thing in a container."""
        if inside is None:
            return
        for check in inventory_check.judge("new", container, cards, inside):
            if check.name == what and check.level == "failure":
                flag = "--container-user" if what == "user" else f"--{what.lower()}"
                raise PreflightError(f"{what}: {check.evidence}", where=str(container), next=f"say another {flag}")
            if check.name == what:
                self._tried.append(f"{what}: {check.evidence}")
                if check.level == "warning":
                    self._asker.tell(f"  {check.evidence}")

    def _inside(self, container: Container) -> Inside | None:
        """What is in the container; asked once for what the command line says all of."""
        if self._shell is None:
            return None
        if container not in self._seen:
            self._seen[container] = inventory_check.inside(self._shell, container)
        return self._seen[container]

    # -- the API

    def _api(self, host: Host, host_name: str) -> tuple[dict[str, Any], dict[Path, bytes]]:
        """[hosts.NAME.api] and the node's CA beside the inventory; nothing where no token is named."""
        said = self._said
        if host.api is not None:
            init_api.refuse_others(said, host.api, host_name, self._book.file)
            return {}, {}
        question = "A token for the Proxmox API, as USER@REALM!NAME, without its secret"
        given = said.api if self._asker.can_ask else said.api or answers.NONE  # one may well go without
        return self._settled(given, question, "--api", answers.NONE, lambda it: self._try_api(host, host_name, it))

    def _try_api(self, host: Host, host_name: str, word: str) -> tuple[dict[str, Any], dict[Path, bytes]]:
        file = self._book.file
        keys = init_api.keys_of(word, self._said, self._relative(self._said.token_file))
        if not keys:
            return {}, {}
        inventory_write.added("", file, {"hosts": {"new": {"address": "x", "api": keys}}, "containers": {}})
        if self._shell is None:
            return keys, {}
        ca, tried = init_api.fetch_and_try(self._shell, host, host_name, file, keys)
        (self._tried if tried.went else self._untried).append(tried.words)
        name = init_api.ca_name(host_name)
        return {**keys, "ca": name}, {file.parent / name: ca}

    # -- shared

    def _settled(self, given: str | None, what: str, flag: str, default: str | None, try_it: Callable[[str], T]) -> T:
        """The answer that holds: what was given, or asked for, and tried; again as long as somebody corrects it."""
        while True:
            word = self._asker.ask(what, flag, default) if given is None else given
            try:
                return try_it(word)
            except (HostKeyError, LinkLostError):
                raise
            except OpsError as error:
                if not self._asker.again(error):
                    raise
                given = None

    def _named(self, kind: str, word: str, keys: dict[str, Any]) -> str:
        """The word, when a new table of that kind may be called so, in this file."""
        where, tables = str(self._book.file), self._book.tables
        if word in getattr(tables, kind):
            raise UsageFault(f"{word!r} is in the file already", where=where, next="choose another name")
        if word in tables.groups:
            raise UsageFault(f"a group is called {word!r} in the file", where=where, next="choose another name")
        new = {"hosts": self._new_hosts, "containers": {}, kind: {word: keys}}
        said = {of: {name: inventory_write.said(table) for name, table in them.items()} for of, them in new.items()}
        inventory_write.added(self._book.text, self._book.file, said)
        return word

    def _taken(self) -> set[str]:
        tables = self._book.tables
        return {*tables.hosts, *tables.containers, *tables.groups, ALL}

    def _free(self, word: str) -> str:
        taken = self._taken()
        names = (word, *(f"{word}-{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _relative(self, path: Path | None) -> str | None:
        """As the inventory says it: from its own folder where it lies in there."""
        if path is None:
            return None
        whole = path.expanduser().absolute()
        with contextlib.suppress(ValueError):
            return str(whole.relative_to(self._book.file.parent))
        return str(whole)


def _whole(value: object) -> object:
    """Paths from the root, so that two of them can be compared."""
    return os.path.normpath(value.expanduser().absolute()) if isinstance(value, Path) else value
