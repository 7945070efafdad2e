"""What an inventory says, as values for showing: lists of it, and all that one name stands for. Pure."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dflash_ops.errors import NotFoundError
from dflash_ops.inventory import Inventory
from dflash_ops.inventory_faults import hidden, listed, nearest


@dataclass(frozen=True)
class Row:
    """A key of a table. said: whether its value stands in the file; else it is the default."""

    key: str
    value: Any
    said: bool


@dataclass(frozen=True)
class Entry:
    """What a name stands for. kind: "host", "container" or "group"; containers: the names of those it means."""

    kind: str
    name: str
    rows: tuple[Row, ...]
    containers: tuple[str, ...]


def meant(book: Inventory) -> str | None:
    """The container that is meant when none is named; None when one has to be."""
    names = list(book.tables.containers)
    return book.tables.default or (names[0] if len(names) == 1 else None)


def groups_of(book: Inventory) -> dict[str, list[str]]:
    """Container -> the groups that it is in, by its own name, its host's, or another group's."""
    found: dict[str, list[str]] = {container: [] for container in book.tables.containers}
    for group in book.tables.groups:
        for container in _names(book, group):
            found[container].append(group)
    return found


def empty_hosts(book: Inventory) -> list[str]:
    """The hosts that no container is on."""
    used = {table.host for table in book.tables.containers.values()}
    return [name for name in book.tables.hosts if name not in used]


def listing(book: Inventory) -> dict[str, Any]:
    """The whole inventory as a document: what it says, defaults filled in, without passwords."""
    tables, groups = book.tables, groups_of(book)
    return {
        "file": str(book.file),
        "default": meant(book),
        "hosts": [{"name": name, **hidden(dataclasses.asdict(table))} for name, table in tables.hosts.items()],
        "containers": [
            {"name": name, **hidden(dataclasses.asdict(table)), "groups": groups[name]}
            for name, table in tables.containers.items()
        ],
        "groups": [
            {"name": name, "members": members, "containers": _names(book, name)}
            for name, members in tables.groups.items()
        ],
    }


def about(book: Inventory, name: str) -> list[Entry]:
    """All that a name stands for: mostly one thing, two where a host and its container share it."""
    tables = book.tables
    found: list[Entry] = []
    if name in tables.hosts:
        table = tables.hosts[name]
        rows = [row for row in _rows(table) if row.said] if table.sandbox else _rows(table)
        found.append(
            Entry("host", name, tuple(rows), tuple(on for on, it in tables.containers.items() if it.host == name))
        )
    if name in tables.containers:
        found.append(Entry("container", name, tuple(_rows(tables.containers[name])), (name,)))
    if name in tables.groups:
        members = Row("members", tables.groups[name], True)
        found.append(Entry("group", name, (members,), tuple(_names(book, name))))
    if not found:
        known = [*tables.containers, *tables.hosts, *tables.groups]
        raise NotFoundError(
            f"nothing is called {name!r}",
            where=str(book.file),
            why=f"there are: {listed(known)}{nearest(name, known)}",
            next="dflash-ops inventory list",
        )
    return found


def _names(book: Inventory, group: str) -> list[str]:
    """A group of hosts without containers has none."""
    try:
        return list(book.names([group]))
    except NotFoundError:
        return []


def _rows(table: Any, before: str = "") -> list[Row]:
    """The keys of a table and of those in it, in their order. A key with its default's value counts as not said."""
    rows: list[Row] = []
    for key in dataclasses.fields(table):
        value = getattr(table, key.name)
        if dataclasses.is_dataclass(value):
            rows += _rows(value, f"{before}{key.name}.")
            continue
        default = key.default_factory() if key.default_factory is not dataclasses.MISSING else key.default
        rows.append(Row(f"{before}{key.name}", hidden(value), value != default))
    return rows
