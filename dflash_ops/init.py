"""`dflash-ops init`: an inventory by asking, each answer tried on the machine that it is about.

What the command line says is not asked; the rest is asked of an `Asker`: a person at a terminal, or nobody. An answer
that turns out wrong is asked for again where there is somebody to ask, and raised where not.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dflash_ops import init_answers as answers
from dflash_ops import inventory_check, inventory_write
from dflash_ops import inventory_probe as probe
from dflash_ops.command import Command, Container, Host
from dflash_ops.errors import (
    ConfigError,
    HostKeyError,
    LinkLostError,
    OpsError,
    PreflightError,
    UsageFault,
)
from dflash_ops.inventory import Inventory, parse
from dflash_ops.inventory_file import present, read
from dflash_ops.inventory_probe import Cards, Inside, Listed
from dflash_ops.inventory_tables import ContainerTable
from dflash_ops.shell import Shell

T = TypeVar("T")

_SECONDS = 20.0
_CA = "/etc/pve/pve-root-ca.pem"
_PATH, _PYTHON = ContainerTable.path, ContainerTable.python


@dataclass(frozen=True)
class Said:
    """What the command line says; None is asked for, or left out. address: may be USER@ADDRESS; host, name: of the
    tables in the inventory; gpus: "0,1", or "none"; api: whose token, USER@REALM!NAME, or "none"."""

    address: str | None = None
    port: int | None = None
    user: str | None = None
    key: Path | None = None
    known_hosts: Path | None = None
    ssh_config: Path | None = None
    host: str | None = None
    vmid: str | None = None
    name: str | None = None
    path: str | None = None
    python: str | None = None
    gpus: str | None = None
    container_user: str | None = None
    api: str | None = None


class Asker(Protocol):
    """Who is asked for what the command line does not say. can_ask: whether there is somebody."""

    can_ask: bool

    def ask(self, what: str, flag: str, default: str | None) -> str:
        """The answer. UsageFault, naming the flag, where nobody can be asked."""
        ...

    def again(self, error: OpsError) -> bool:
        """Whether to ask again after a wrong answer; tells why it is wrong."""
        ...

    def tell(self, text: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What is to be written. hosts, containers: tables by name, as inventory_write takes them; files: what goes beside
    the inventory; tried: what the machines said."""

    file: Path
    host: str
    container: str
    hosts: dict[str, dict[str, Any]]
    containers: dict[str, dict[str, Any]]
    files: dict[Path, bytes]
    tried: tuple[str, ...]


def plan(shell: Shell | None, file: Path, said: Said, asker: Asker) -> Plan:
    """Asks, and tries the answers; writes nothing. shell: None tries nothing.

    ConfigError where the file is there and wrong; HostKeyError for a host whose key is not known, which is never asked
    again; UsageFault and PreflightError for answers that nobody can be asked to correct."""
    return _Init(shell, parse(read(file) if present(file) else "", file), said, asker).plan()


def write(plan: Plan) -> None:
    """Writes a plan: files beside the inventory first, all or nothing."""
    made: list[Path] = []
    try:
        for path, content in plan.files.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                made.append(path)
        inventory_write.add(plan.file, hosts=plan.hosts, containers=plan.containers, head=_head(plan.file))
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError("the inventory can't be written", where=str(plan.file), why=str(error)) from error
        raise


def preview(plan: Plan) -> str:
    """The tables that a plan adds, as the file will have them."""
    return inventory_write.rendered({"hosts": plan.hosts, "containers": plan.containers})


def _head(file: Path) -> str:
    return (
        f"#:schema ./{schema_file(file).name}\n# Written by dflash-ops init. Every key: dflash-ops inventory schema\n"
    )


def schema_file(file: Path) -> Path:
    """Where editors find the schema of an inventory in this folder."""
    beside = file.parent / "schema.json"
    with contextlib.suppress(OSError):
        if beside.read_bytes() == _schema():
            return beside
    return file.parent / "dflash-ops.schema.json"


def _schema() -> bytes:
    from dflash_ops.inventory_tables import schema_text

    return schema_text().encode()


class _Init:
    def __init__(self, shell: Shell | None, book: Inventory, said: Said, asker: Asker) -> None:
        self._shell, self._book, self._said, self._asker = shell, book, said, asker
        self._tried: list[str] = []
        self._seen: dict[Container, Inside] = {}

    def plan(self) -> Plan:
        host, new, listed = self._host()
        name = host.name
        if new:
            free = self._free(answers.name_of(host.address), self._book.tables.hosts)
            name = self._settled(self._said.host, "Its name in the inventory", "--host", free, self._free_host)
        container = self._container(host, name, listed)
        api, files = self._api(host, name)
        hosts: dict[str, dict[str, Any]] = {}
        if new:
            paths = {key: self._relative(getattr(host, key)) for key in ("key", "known_hosts", "ssh_config")}
            hosts[name] = {"address": host.address, "port": host.port, "user": host.user, **paths}
        if api:
            hosts.setdefault(name, {})["api"] = api
        keys: dict[str, Any] = {"host": name, "vmid": container.vmid}
        plain = Container(host, container.vmid)
        for key in ("path", "python", "user", "gpus"):
            if getattr(container, key) != getattr(plain, key):
                keys[key] = getattr(container, key)
        if not present(self._book.file):
            files[schema_file(self._book.file)] = _schema()
        tables = {container.name: keys}
        return Plan(self._book.file, name, container.name, hosts, tables, files, tuple(self._tried))

    # -- the host. Its name is asked once it has answered; the connection goes on under the one that it began with.

    def _host(self) -> tuple[Host, bool, tuple[Listed, ...]]:
        """The host, connected to; whether it is to be written; its containers."""
        said, tables = self._said, self._book.tables.hosts
        if said.host in tables:
            if said.address is not None:
                raise UsageFault(
                    f"host {said.host!r} is in the file already", where=str(self._book.file), next="leave --address out"
                )
            return self._try_host(said.host)
        question = "The Proxmox host: a name, an address, or an alias of ~/.ssh/config"
        if tables:
            question += f"; or one of this file: {', '.join(tables)}"
        return self._settled(said.address, question, "--address", None, self._try_host)

    def _try_host(self, word: str) -> tuple[Host, bool, tuple[Listed, ...]]:
        said = self._said
        if word in self._book.tables.hosts:
            host = self._book.host(word)
            return host, False, self._reach(host)
        user, _, address = word.rpartition("@")
        host = Host(
            answers.name_of(address), address, said.port, user or said.user, said.key, said.known_hosts, said.ssh_config
        )
        for name, table in self._book.tables.hosts.items():
            if (table.address, table.port, table.user) == (host.address, host.port, host.user):
                host = self._book.host(name)
                return host, False, self._reach(host)
        keys = {"address": host.address, "port": host.port, "user": host.user}
        inventory_write.added("", self._book.file, {"hosts": {"new": inventory_write.said(keys)}, "containers": {}})
        return host, True, self._reach(host)

    def _reach(self, host: Host) -> tuple[Listed, ...]:
        if self._shell is None:
            return ()
        found = self._shell.ask(host, probe.containers(), timeout=_SECONDS)
        self._tried.append(f"host {host.address}: answers, {len(found)} containers")
        if not found:
            raise PreflightError("the host has no containers", where=host.address, next="on the host: pct list")
        return found

    def _free_host(self, word: str) -> str:
        return self._named("hosts", word, {"address": "x"})

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
        asked = "Folder in the container for releases and runs"
        bare = self._settled(said.path, asked, "--path", _PATH, lambda it: self._try_path(bare, host_name, it))
        host_cards = self._cards(host)
        inside = self._inside(bare)
        detected = answers.detected(host_cards, inside.cards) if inside else ()
        if inside and inside.cards.refused and said.gpus is None:
            self._asker.tell(f"  the container shows no GPU: {inside.cards.refused}")
        bare = self._settled(
            said.gpus,
            "GPUs: the host's numbers, in the container's order",
            "--gpus",
            ",".join(map(str, detected)) or answers.NONE,
            lambda it: self._try_gpus(bare, it, host_cards, inside),
        )
        taken = self._book.tables.containers
        default = (
            "trainer" if "trainer" not in taken else self._free(answers.name_of(chosen.name or str(chosen.vmid)), taken)
        )
        name = self._settled(said.name, "Its name in the inventory", "--name", default, self._free_container)
        return replace(bare, name=name)

    def _try_python(self, container: Container, python: str) -> Container:
        container = replace(container, python=python)
        self._hold("python", container, None, self._inside(container))
        return container

    def _try_path(self, container: Container, host_name: str, path: str) -> Container:
        container = replace(container, path=path)
        keys = {"host": "x", "vmid": container.vmid, "path": path}
        tables = {"hosts": {"x": {"address": "x"}}, "containers": {"new": keys}}
        inventory_write.added("", self._book.file, tables)
        for name, table in self._book.tables.containers.items():
            if (table.host, table.vmid, table.path) == (host_name, container.vmid, path):
                raise UsageFault(
                    f"container {container.vmid} with {path} is {name!r} in the file already",
                    where=str(self._book.file),
                    next="edit it there, or choose another folder",
                )
        inside = self._inside(container)
        self._hold("path", container, None, inside)
        self._hold("user", container, None, inside)
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
                raise PreflightError(
                    f"{what}: {check.evidence}", where=str(container), next=f"say another --{what.lower()}"
                )
            if check.name == what:
                self._tried.append(f"{what}: {check.evidence}")
                if check.level == "warning":
                    self._asker.tell(f"  {check.evidence}")

    def _inside(self, container: Container) -> Inside | None:
        """What is in the container; asked once for what the command line says all of."""
        if self._shell is None:
            return None
        if container not in self._seen:
            self._seen[container] = self._shell.ask(container, probe.inside(container), timeout=_SECONDS)
        return self._seen[container]

    def _cards(self, host: Host) -> Cards | None:
        return self._shell.ask(host, probe.cards(), timeout=_SECONDS) if self._shell else None

    def _free_container(self, word: str) -> str:
        return self._named("containers", word, {"host": "x", "vmid": 100})

    # -- the API

    def _api(self, host: Host, host_name: str) -> tuple[dict[str, Any], dict[Path, bytes]]:
        """[hosts.NAME.api] and the node's CA beside the inventory; nothing where no token is named."""
        if host.api is not None:  # it is in the file
            return {}, {}
        question = "A token for the Proxmox API, as USER@REALM!NAME, without its secret"
        given = self._said.api if self._asker.can_ask else self._said.api or answers.NONE  # one may well go without
        token = self._settled(given, question, "--api", answers.NONE, answers.token)
        if token is None:
            return {}, {}
        keys: dict[str, Any] = {"user": token[0], "token_name": token[1]}
        if self._shell is None:
            return keys, {}
        asked = self._shell.run(host, Command(("cat", _CA), root=True), timeout=_SECONDS)
        if asked.code != 0 or b"-----BEGIN CERTIFICATE-----" not in asked.out:
            raise PreflightError(
                "the node's CA can't be read",
                where=f"{host.address}:{_CA}",
                why=asked.last_words,
                next=f"leave --api out; copy the file here, and name it as `ca` in [hosts.{host_name}.api]",
            )
        name = f"{host_name}-ca.pem"
        path = self._book.file.parent / name
        if path.exists() and path.read_bytes() != asked.out:
            raise ConfigError(
                "another CA is there already", where=str(path), next="compare the two, and remove the old one"
            )
        self._tried.append(f"API: the node's CA was read from {_CA}")
        return {**keys, "ca": name}, {path: asked.out}

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
        """The word, when a new table of that kind may be called so."""
        if word in getattr(self._book.tables, kind):
            raise UsageFault(f"{word!r} is in the file already", where=str(self._book.file), next="choose another name")
        hosts = {"x": {"address": "x"}} if kind == "containers" else {}
        inventory_write.added("", self._book.file, {"hosts": hosts, "containers": {}, kind: {word: keys}})
        return word

    def _free(self, word: str, taken: "dict[str, Any]") -> str:
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
