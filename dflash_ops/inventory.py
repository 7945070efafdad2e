"""The inventory: a TOML file that names hosts and containers.

    default = "trainer"                # the container meant when none is named
    source = ".."                      # what `deploy` sends, relative to this file

    [hosts.lab]
    address = "lab"                    # a host name, an address, or an alias of ~/.ssh/config
    port = 22                          # port, user, key, known_hosts: only what ssh's own configuration does not say
    ssh_config = "ssh_config"          # another file than ~/.ssh/config, as in `ssh -F`

    [hosts.lab.api]                    # the Proxmox VE API: `ct` and `discover` use it, and go by ssh without it
    user = "bot@pve"
    token_name = "dflash"              # its secret: in the variable DFLASH_OPS_PVE_TOKEN, or in `token_file`, mode 0600
    ca = "lab-ca.pem"                  # or fingerprint = "AA:BB:..."

    [hosts.toy]
    sandbox = "default"                # instead of all that: a running `dflash-ops sandbox`

    [containers.trainer]
    host = "lab"
    vmid = 200
    path = "/opt/dflash"               # its folder: releases, runs, shared, env
    python = "/opt/venv/bin/python"    # what `env sync` makes the trainer's environment of, and what runs the trainer
                                       # where none was made; "sandbox": the sandbox's own
    gpus = [0, 1]                      # the host's indices of its GPUs, as the container sees them in turn
    user = "train"                     # whose releases are, and as whom `exec` and `shell` work; default: root
    via = "lxc-attach"                 # or "pct"
    env_check = true                   # whether `train start` compares its packages with the release's lock

    [containers.trainer.pins]          # what its environment has instead of what the lock says
    torch = "cu126"                    # another build of the locked torch, or a whole version: "2.12.1+cu126"
    cuda_index = "https://..."         # the package index that has it; PyTorch's site names one for each CUDA
    transformers = "5.20.0"

    [groups]                           # words of --on, beside the names of containers and hosts, and `all`
    night = ["trainer", "lab"]         # a host stands for all containers on it; groups may hold groups

It is looked for at --inventory, at DFLASH_OPS_INVENTORY, then in the working folder and upwards: `dflash-ops.toml`, or
`inventory/default.toml`, or `inventory/sandbox.toml`; then in the user's config folder, `dflash-ops/inventory.toml`.
The first one found counts; files are never merged. `inventory_tables` has every key, with its rules.
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import ValidationError

from dflash_ops.command import Api, Container, Host, Pins
from dflash_ops.errors import ConfigError, NotFoundError, UsageFault
from dflash_ops.inventory_faults import (
    Fault,
    between_tables,
    listed,
    members,
    nearest,
    not_read,
    not_toml,
    of_shape,
    too_long,
    two_meanings,
    without_faults,
)
from dflash_ops.inventory_file import find as find
from dflash_ops.inventory_file import read
from dflash_ops.inventory_file import working_folder as working_folder
from dflash_ops.inventory_lines import Lines, line_of
from dflash_ops.inventory_tables import SANDBOX, ApiTable, InventoryFile, checked

if TYPE_CHECKING:
    from dflash_ops.sandbox.state import SandboxState


@dataclass(frozen=True)
class Inventory:
    """A checked inventory. `file` is where it was read from."""

    file: Path
    tables: InventoryFile
    text: str = ""

    @property
    def source(self) -> Path | None:
        """What `deploy` sends when it is not told, if the file says so."""
        return self._path(("source",), self.tables.source)

    def container(self, name: str | None = None) -> Container:
        """The container of that name; without one, the default's, or the only one there is."""
        tables = self.tables.containers
        name = name or self.tables.default or (next(iter(tables)) if len(tables) == 1 else None)
        if name is None:
            raise ConfigError(
                "no container is named",
                where=str(self.file),
                why="it has no `default` and " + (f"these containers: {listed(tables)}" if tables else "no containers"),
                next="add `default`, or say -t NAME",
            )
        if name not in tables:
            kind = "host" if name in self.tables.hosts else "group" if name in self.tables.groups else ""
            raise NotFoundError(
                f"no container is called {name!r}",
                where=str(self.file),
                why=f"it has: {listed(tables)}{f'; a {kind} is' if kind else nearest(name, tables)}",
                next="-t NAME with one of these" + (f", or --on {name}" if kind else ""),
            )
        return self._container(name)

    def select(self, words: Sequence[str]) -> tuple[Container, ...]:
        """The containers that words name: containers, hosts (all their containers), groups, `all`; several in a word
        with commas between them. In the words' order, each once.

        UsageFault for no word at all, and for one with two meanings; NotFoundError for what nothing is called, and for
        hosts without containers."""
        chosen = {name: self.tables.containers[name].host for name in self.names(words)}
        hosts = {host: self.host(host) for host in dict.fromkeys(chosen.values())}
        return tuple(self._container(name, hosts[host]) for name, host in chosen.items())

    def names(self, words: Sequence[str]) -> tuple[str, ...]:
        """The names of the containers that `select` gives; no sandbox has to be up for that. Errors: select's."""
        said = [name for word in words for part in word.split(",") if (name := part.strip())]
        if not said:
            raise UsageFault(
                "no container is named", where=str(self.file), next="name a container, host, group, or all"
            )
        chosen = dict.fromkeys(name for word in said for name in self._named(word))
        if not chosen:
            raise NotFoundError(
                "no container is on " + ", ".join(said),
                where=str(self.file),
                why=f"it has these containers: {listed(self.tables.containers)}",
                next="add one: dflash-ops init, or dflash-ops inventory discover",
            )
        return tuple(chosen)

    def _named(self, word: str) -> list[str]:
        """The names of the containers that one word stands for."""
        tables = self.tables
        if why := two_meanings(tables, word):
            raise UsageFault(f"{word} has two meanings", where=str(self.file), why=why, next="or name the containers")
        if (found := members(tables, word)) is not None:
            return found
        known = [*tables.containers, *tables.hosts, *tables.groups]
        raise NotFoundError(
            f"nothing is called {word!r}",
            where=str(self.file),
            why=f"containers: {listed(tables.containers)}; hosts: {listed(tables.hosts)}; groups: "
            f"{listed(tables.groups)}{nearest(word, known)}",
            next="name one of these, or all",
        )

    def _container(self, name: str, host: Host | None = None) -> Container:
        table = self.tables.containers[name]
        python, pins = table.python, Pins(table.pins.torch, table.pins.cuda_index, table.pins.transformers)
        if python == SANDBOX:
            python = self._sandbox(table.host).python
            if pins.torch is None:  # it is the one that this machine has, on a CPU or with some CUDA
                pins = replace(pins, torch=_own_torch())
        return Container(
            host or self.host(table.host),
            table.vmid,
            table.path,
            python,
            gpus=tuple(table.gpus),
            via=table.via,
            pins=pins,
            env_check=table.env_check,
            user=table.user,
            name=name,
        )

    def host(self, name: str) -> Host:
        """The host of that name; NotFoundError where there is none, or its sandbox is not up."""
        if name not in self.tables.hosts:
            raise NotFoundError(
                f"no host is called {name!r}",
                where=str(self.file),
                why=f"it has: {listed(self.tables.hosts)}{nearest(name, self.tables.hosts)}",
                next="name one of these",
            )
        table = self.tables.hosts[name]
        if table.sandbox is not None:
            state = self._sandbox(name)
            api = Api(
                state.host,
                state.api_port,
                "bot@pve",
                "dflash",
                token_file=state.api_tokens / "bot@pve!dflash",
                ca=state.api_ca,
                node="pve",
            )
            return Host(name, state.host, state.port, state.user, state.key, state.known_hosts, api=api)
        assert table.address is not None  # the table was checked
        at = ("hosts", name)
        return Host(
            name,
            table.address,
            table.port,
            table.user,
            self._path((*at, "key"), table.key),
            self._path((*at, "known_hosts"), table.known_hosts),
            self._path((*at, "ssh_config"), table.ssh_config),
            self._api((*at, "api"), table.api) if table.api else None,
        )

    def _api(self, at: tuple[str, ...], table: ApiTable) -> Api:
        return Api(
            table.address,
            table.port,
            table.user,
            table.token_name,
            table.token_env,
            self._path((*at, "token_file"), table.token_file),
            self._path((*at, "ca"), table.ca),
            table.fingerprint.upper() if table.fingerprint else None,
            table.node,
        )

    def _sandbox(self, host: str) -> "SandboxState":
        from dflash_ops.sandbox.state import read

        sandbox = self.tables.hosts[host].sandbox
        assert sandbox is not None  # the tables were checked
        return read(os.environ.get("DFLASH_OPS_SANDBOX") or sandbox)

    def _path(self, key: tuple[str, ...], text: str | None) -> Path | None:
        """The path that a key of the file says; relative ones start at its folder."""
        if text is None:
            return None
        try:
            return self.file.parent / Path(text).expanduser()
        except RuntimeError as error:  # no such user
            fault = Fault(".".join(key), f"{text!r} has no home folder", line_of(self.text, key))
            raise _bad(self.file, fault) from error


def _own_torch() -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow to load, and for a sandbox alone

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def load(explicit: Path | None = None) -> Inventory:
    """Finds and reads the inventory."""
    file = find(explicit)
    return parse(read(file), file)


def parse(text: str, file: Path) -> Inventory:
    """Checks an inventory's text; `file` is named in errors and is where relative paths start. Pure.

    ConfigError names the first fault, and how many more there are."""
    found = examine(text)
    if isinstance(found, InventoryFile):
        return Inventory(file.absolute(), found, text)
    error = _bad(file, found[0])
    if len(found) > 1:
        error = ConfigError(
            error.what,
            where=error.where,
            why=f"{error.why} (and {len(found) - 1} more)",
            next=f"{error.next}; dflash-ops inventory check shows all",
        )
    raise error


def examine(text: str) -> InventoryFile | list[Fault]:
    """What an inventory's text says, or all that is wrong with it, in the order of its lines. Pure."""
    if fault := too_long(text):
        return [fault]
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return [not_toml(error, text)]
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        return [not_read(error, text)]
    return judged(document, Lines(text))


def judged(document: dict[str, Any], lines: Lines) -> InventoryFile | list[Fault]:
    """`examine` for TOML that has been read."""
    try:
        tables = checked(document)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        found = of_shape(errors, lines)
        if rest := without_faults(document, errors):
            found += between_tables(checked(rest[0]), lines, rest[1])
        return _by_line(found)
    except RecursionError:
        return [Fault("", "tables in tables without end")]
    return _by_line(between_tables(tables, lines)) or tables


def _by_line(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: fault.line or 0)


def _bad(file: Path, fault: Fault) -> ConfigError:
    where = str(file) if fault.line is None else f"{file}:{fault.line}"
    if not fault.key:
        return ConfigError("the inventory is not TOML", where=where, why=fault.why, next="correct that line")
    return ConfigError(f"wrong inventory: {fault.key}", where=where, why=fault.why, next=f"correct `{fault.key}`")
