"""The inventory: a TOML file that names hosts and containers.

    default = "trainer"                # the container meant when none is named
    source = ".."                      # what `deploy` sends, relative to this file

    [hosts.lab]
    address = "lab"                    # a host name, an address, or an alias of ~/.ssh/config
    port = 22                          # port, user, key, known_hosts: only what ssh's own configuration does not say

    [hosts.toy]
    sandbox = "default"                # instead of all that: a running `dflash-ops sandbox`

    [containers.trainer]
    host = "lab"
    vmid = 200
    path = "/opt/dflash"               # its folder: releases, runs, shared, env
    python = "/opt/venv/bin/python"    # what `env sync` makes the trainer's environment of, and what runs the trainer
                                       # where none was made; "sandbox": the sandbox's own
    gpus = [0, 1]                      # the host's indices of its GPUs, as the container sees them in turn
    via = "lxc-attach"                 # or "pct"
    env_check = true                   # whether `train start` compares its packages with the release's lock

    [containers.trainer.pins]          # what its environment has instead of what the lock says
    torch = "cu126"                    # another build of the locked torch, or a whole version: "2.12.1+cu126"
    cuda_index = "https://..."         # the package index that has it; PyTorch's site names one for each CUDA
    transformers = "5.20.0"

It is looked for at --inventory, at DFLASH_OPS_INVENTORY, then in the working folder and upwards: `dflash-ops.toml`, or
`inventory/default.toml`, or `inventory/sandbox.toml`. The first one found counts; files are never merged.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_ops.command import Container, Host, Pins
from dflash_ops.errors import ConfigError, NotFoundError

_VARIABLE = "DFLASH_OPS_INVENTORY"
_WHERE_TO_PUT_ONE = f"write a dflash-ops.toml (inventory/lab.toml.example shows one), or set {_VARIABLE}"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class HostTable(_Table):
    """[hosts.NAME]: either `sandbox`, or `address` and what ssh's own configuration does not say of it."""

    address: str | None = Field(None, pattern=r"^[^\s@]+$")
    port: int | None = Field(None, ge=1, le=65535)
    user: str | None = Field(None, min_length=1)
    key: str | None = Field(None, min_length=1)
    known_hosts: str | None = Field(None, min_length=1)
    sandbox: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]*$")

    @model_validator(mode="after")
    def _one_way_there(self) -> "HostTable":
        if self.sandbox is None and self.address is None:
            raise ValueError("needs `address`, or `sandbox`")
        if self.sandbox is not None and self.model_fields_set != {"sandbox"}:
            others = ", ".join(sorted(self.model_fields_set - {"sandbox"}))
            raise ValueError(f"`sandbox` says all there is to say; remove: {others}")
        return self


class PinsTable(_Table):
    """[containers.NAME.pins]"""

    torch: Annotated[str | None, Field(pattern=r"^(cpu|cu\d{3}|\d[\w.+!]*)$")] = None
    cuda_index: Annotated[str | None, Field(pattern=r"^(https?|file)://\S+$")] = None
    transformers: Annotated[str | None, Field(pattern=r"^\d[\w.+!]*$")] = None


class ContainerTable(_Table):
    """[containers.NAME]"""

    host: str
    vmid: int = Field(ge=100, le=999_999_999)
    path: str = Field("/opt/dflash", pattern=r"^/[^\x00]*[^\x00/]$")
    python: str = Field("python3", min_length=1)
    gpus: list[Annotated[int, Field(ge=0)]] = []
    via: Literal["lxc-attach", "pct"] = "lxc-attach"
    env_check: bool = True
    pins: PinsTable = PinsTable()


class InventoryFile(_Table):
    """The whole file."""

    default: str | None = None
    source: str | None = Field(None, min_length=1)
    hosts: dict[str, HostTable] = {}
    containers: dict[str, ContainerTable] = {}


@dataclass(frozen=True)
class Inventory:
    """A checked inventory. `file` is where it was read from."""

    file: Path
    tables: InventoryFile

    @property
    def source(self) -> Path | None:
        """What `deploy` sends when it is not told, if the file says so."""
        return self._relative("source", self.tables.source) if self.tables.source else None

    def container(self, name: str | None = None) -> Container:
        """The container of that name; without one, the default's, or the only one there is."""
        tables = self.tables.containers
        name = name or self.tables.default or (next(iter(tables)) if len(tables) == 1 else None)
        if name is None:
            raise ConfigError(
                "no container is named",
                where=str(self.file),
                why="it has no `default` and " + (f"these containers: {_list(tables)}" if tables else "no containers"),
                next="add `default`, or say -t NAME",
            )
        if name not in tables:
            raise NotFoundError(
                f"no container is called {name!r}",
                where=str(self.file),
                why=f"it has: {_list(tables)}{_nearest(name, tables)}",
                next="-t NAME with one of these",
            )
        table = tables[name]
        python, pins = table.python, Pins(table.pins.torch, table.pins.cuda_index, table.pins.transformers)
        if python == "sandbox":
            python = self._sandbox_python(name, table)
            if pins.torch is None:  # it is the one that this machine has, on a CPU or with some CUDA
                pins = replace(pins, torch=_own_torch())
        return Container(
            self.host(table.host),
            table.vmid,
            table.path,
            python,
            gpus=tuple(table.gpus),
            via=table.via,
            pins=pins,
            env_check=table.env_check,
        )

    def host(self, name: str) -> Host:
        table = self.tables.hosts[name]
        if table.sandbox is not None:
            from dflash_ops.sandbox.state import read

            state = read(os.environ.get("DFLASH_OPS_SANDBOX") or table.sandbox)
            return Host(name, state.host, state.port, state.user, state.key, state.known_hosts)
        assert table.address is not None  # the table was checked
        key = self._relative(f"hosts.{name}.key", table.key) if table.key else None
        known_hosts = self._relative(f"hosts.{name}.known_hosts", table.known_hosts) if table.known_hosts else None
        return Host(name, table.address, table.port, table.user, key, known_hosts)

    def _sandbox_python(self, name: str, table: ContainerTable) -> str:
        from dflash_ops.sandbox.state import read

        sandbox = self.tables.hosts[table.host].sandbox
        if sandbox is None:
            raise _bad(self.file, f"containers.{name}.python", f'"sandbox" needs a sandbox host; {table.host} is none')
        return str(read(os.environ.get("DFLASH_OPS_SANDBOX") or sandbox).python)

    def _relative(self, key: str, text: str) -> Path:
        """The path that a key of the file says; relative ones start at its folder."""
        try:
            return self.file.parent / Path(text).expanduser()
        except RuntimeError as error:  # no such user
            raise _bad(self.file, key, f"{text!r} has no home folder") from error


def _own_torch() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def find(explicit: Path | None = None, *, start: Path | None = None) -> Path:
    """The inventory file to use. ConfigError when there is none."""
    named = explicit or (Path(os.environ[_VARIABLE]) if os.environ.get(_VARIABLE) else None)
    try:
        if named is not None:
            return _named(named, "--inventory" if explicit else _VARIABLE)
        return _upwards(start.absolute() if start else working_folder())
    except OSError as error:
        where = os.fsdecode(error.filename or "")
        raise ConfigError(
            "the inventory can't be looked for", where=where, why=error.strerror or str(error), next=_WHERE_TO_PUT_ONE
        ) from error


def _named(named: Path, said_by: str) -> Path:
    file = _in_folder(named) if named.is_dir() else named
    if file is None or not file.is_file():
        raise ConfigError("there is no such inventory", where=str(named), why=f"{said_by} names it", next="correct it")
    return file


def _upwards(start: Path) -> Path:
    for folder in (start, *start.parents):
        if (file := folder / "dflash-ops.toml").is_file():
            return file
        if (file := _in_folder(folder / "inventory")) is not None:
            return file
    raise ConfigError(
        "no inventory", where=f"{start} and above", why="nothing says where to go", next=_WHERE_TO_PUT_ONE
    )


def working_folder() -> Path:
    """Where we are. ConfigError when that folder has been removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(
            "the working folder is gone", why=error.strerror or str(error), next="cd to a folder that is there"
        ) from error


def load(explicit: Path | None = None) -> Inventory:
    """Finds and reads the inventory."""
    file = find(explicit)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("the inventory can't be read", where=str(file), why=why, next="correct it") from error
    return parse(text, file)


def parse(text: str, file: Path) -> Inventory:
    """Checks an inventory's text; `file` is named in errors and is where relative paths start. Pure."""
    try:
        tables = InventoryFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "the inventory is not TOML", where=str(file), why=str(error), next="correct that line"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            "the inventory is not TOML", where=str(file), why="brackets in brackets without end", next="correct them"
        ) from error
    except ValidationError as error:
        raise _first_fault(error, file) from error
    for name, table in tables.containers.items():
        if table.host not in tables.hosts:
            raise _bad(
                file,
                f"containers.{name}.host",
                f"no host is called {table.host!r}; hosts: {_list(tables.hosts)}{_nearest(table.host, tables.hosts)}",
            )
        if len(set(table.gpus)) < len(table.gpus):
            raise _bad(file, f"containers.{name}.gpus", f"a GPU is named twice: {table.gpus}")
    if tables.default is not None and tables.default not in tables.containers:
        known = tables.containers
        raise _bad(
            file,
            "default",
            f"no container is called {tables.default!r}; containers: {_list(known)}{_nearest(tables.default, known)}",
        )
    return Inventory(file.absolute(), tables)


def _in_folder(folder: Path) -> Path | None:
    for name in ("default.toml", "sandbox.toml"):
        if (file := folder / name).is_file():
            return file
    return None


def _first_fault(error: ValidationError, file: Path) -> ConfigError:
    """pydantic's first complaint in our words: key, what it may be, the nearest right key."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(path[:-1]))
        why = f"no such key; allowed: {', '.join(allowed)}{_nearest(path[-1], allowed)}"
    elif fault["type"] == "missing":
        why = "is missing"
    elif fault["type"] == "value_error":
        why = fault["msg"].removeprefix("Value error, ")
    elif fault["type"] in ("model_type", "dict_type"):
        why = f"must be a table, not {fault['input']!r}"
    else:
        why = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, not {fault['input']!r}"
    if len(faults) > 1:
        why += f" (and {len(faults) - 1} more)"
    return _bad(file, key, why)


def _fields_at(path: list[str]) -> Iterable[str]:
    match path:
        case ["hosts", _]:
            return HostTable.model_fields
        case ["containers", _]:
            return ContainerTable.model_fields
        case ["containers", _, "pins"]:
            return PinsTable.model_fields
        case _:
            return InventoryFile.model_fields


def _bad(file: Path, key: str, why: str) -> ConfigError:
    return ConfigError(f"wrong inventory: {key}", where=str(file), why=why, next=f"correct `{key}`")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; nearest: {close[0]}" if close else ""
