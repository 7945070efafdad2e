"""What is wrong with an inventory: every fault with its line, its key, why, and the nearest right word. Pure."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from dflash_ops.inventory_lines import Lines, statements
from dflash_ops.inventory_tables import (
    ALL,
    PLAIN,
    SANDBOX,
    ApiTable,
    ContainerTable,
    HostTable,
    InventoryFile,
    PinsTable,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_KINDS = ("hosts", "containers", "groups")
_TABLES = {
    "[hosts.NAME]": HostTable,
    "[hosts.NAME.api]": ApiTable,
    "[containers.NAME]": ContainerTable,
    "[containers.NAME.pins]": PinsTable,
}
# What ssh calls what a host's table says.
_SSH_WORDS = {
    "hostname": "address",
    "identityfile": "key",
    "identity_file": "key",
    "userknownhostsfile": "known_hosts",
    "username": "user",
}
# What values of these keys look like, and what pydantic's types are in an inventory.
_LOOKS = {
    "path": "an absolute path, without / at its end",
    "address": "a host's name or address, without spaces and user@",
    "user": "a login name",
}
_TYPES = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "list_type": "a list in [brackets]",
}
_MOST_PARTS = 64  # of a key; the reader's time grows with their square and more
_MOST_LISTED = 30
_SECRETS = ("token", "secret", "password", "token_value", "value", "uuid")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. key: its path in the file, parts joined by dots; line: counted from 1, None where none
    can be named."""

    key: str
    why: str
    line: int | None = None


def not_toml(error: tomllib.TOMLDecodeError, text: str) -> Fault:
    """What the TOML reader says, with its line and the key there. The value is not shown: it may be a secret."""
    match = re.search(r"\(at line (\d+), column \d+\)", str(error))
    if match is None:
        return Fault("", str(error))
    line = int(match[1])
    key, equals, _ = text.split("\n")[line - 1].partition("=")
    return Fault("", f"{error}{f', at `{key.strip()}`' if equals else ''}", line)


def too_long(text: str) -> Fault | None:
    """A key of so many parts that reading it would not end."""
    found = re.search(rf"(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}", text)
    if found is None:
        return None
    return Fault("", f"a key of more than {_MOST_PARTS} parts", text.count("\n", 0, found.start()) + 1)


def not_read(error: Exception, text: str) -> Fault:
    """What Python's reader says of what is TOML, but too much of it."""
    if isinstance(error, RecursionError):
        return Fault("", "brackets in brackets without end")
    line = 1
    for it in statements(text):  # as far as they can be read
        line = it.end + 1
    return Fault("", f"a number is too long: {str(error).partition(';')[0]}", line)


def of_shape(errors: "Sequence[ErrorDetails]", lines: Lines) -> list[Fault]:
    """pydantic's complaints in our words."""
    return [_of_shape(fault, lines) for fault in errors]


def _of_shape(fault: "ErrorDetails", lines: Lines) -> Fault:
    path = [part for part in fault["loc"] if part != "[key]"]
    words = [str(part) for part in path]
    in_api = words[:1] == ["hosts"] and words[2:3] == ["api"]
    hides = in_api or words[-1:] == ["user"]  # it may be the secret, put in the wrong place
    shown = "what is there" if hides else brief(fault["input"])
    pattern = fault.get("ctx", {}).get("pattern")
    match fault["type"]:
        case "unexpected_keyword_argument" if in_api and words[-1] in _SECRETS:
            why = (
                "no secret belongs in this file: put it into the variable DFLASH_OPS_PVE_TOKEN (or name another as "
                "`token_env`), or into a file of mode 0600 and name that as `token_file`"
            )
        case "unexpected_keyword_argument":
            allowed = sorted(_fields_at(words[:-1]))
            why = f"no such key; allowed: {', '.join(allowed)}{_meant(words[-1], allowed)}"
        case "missing":
            why = "is missing"
        case "dataclass_type" | "dict_type":
            why = f"must be a table, not {shown}"
        case _ if "[key]" in fault["loc"]:
            why = (
                "can't be a name: that is at most 64 letters, digits, `_`, `-` and `.`, with none of the last two first"
            )
        case "string_pattern_mismatch" if re.search(r"[\x00-\x1f\x7f-\x9f]", fault["input"]):
            why = "must be without line breaks and control characters"
        case "string_pattern_mismatch" if pattern == PLAIN:
            why = "must not be empty"
        case "string_pattern_mismatch" if in_api:
            why = f"must look like {pattern}"
        case "string_pattern_mismatch" if words[-1] in _LOOKS:
            why = f"must be {_LOOKS[words[-1]]}, not {shown}"
        case kind if kind in _TYPES:
            quoted = ", without quotes" if isinstance(fault["input"], str) and kind != "list_type" else ""
            why = f"must be {_TYPES[kind]}{quoted}, not {shown}"
        case _:
            told = fault["msg"].removeprefix("Input should ").removeprefix("String should ")
            why = f"must {told}, not {shown}" if told != fault["msg"] else f"{told}, not {shown}"
    return Fault(".".join(words), why, lines.of(path))


def _meant(key: str, allowed: Sequence[str]) -> str:
    """The right word for a wrong key, or the table where it would be right."""
    if (word := _SSH_WORDS.get(key.lower())) in allowed:
        return f"; nearest: {word}"
    places = [place for place, table in _TABLES.items() if key in {it.name for it in fields(table)}]
    if key in {it.name for it in fields(InventoryFile)}:
        return "; it belongs at the top, before the first [table]"
    close = nearest(key, allowed)
    return close if close or not places else f"; it belongs in {' or '.join(places)}"


@dataclass(frozen=True)
class Broken:
    """Names of tables with faults of their own: they are there, and no more is said of them."""

    names: Mapping[str, frozenset[str]]

    def __contains__(self, word: object) -> bool:
        return any(word in names for names in self.names.values())


_NONE = Broken(dict.fromkeys(_KINDS, frozenset[str]()))


def without_faults(
    document: Mapping[str, Any], errors: "Sequence[ErrorDetails]"
) -> tuple[dict[str, Any], Broken] | None:
    """What is left of a document without its tables that have faults, and their names; None where a whole kind has one.

    The names in a table of no known kind count as there: it is a kind, mistyped."""
    bad: set[tuple[str, ...]] = set()
    for error in errors:
        path = tuple(map(str, error["loc"][:2]))
        bad.add(path if path[0] in _KINDS else path[:1])
    if any((kind,) in bad for kind in _KINDS):
        return None
    left = {key: value for key, value in document.items() if (key,) not in bad}
    stray = {name for path in bad if len(path) == 1 for name in _names(document.get(path[0]))}
    names: dict[str, frozenset[str]] = {}
    for kind in _KINDS:
        names[kind] = frozenset({path[-1] for path in bad if path[0] == kind} | stray)
        if kind in left:
            left[kind] = {name: table for name, table in left[kind].items() if name not in names[kind]}
    return left, Broken(names)


def _names(value: object) -> list[str]:
    return list(cast(dict[str, Any], value)) if isinstance(value, dict) else []


def between_tables(tables: InventoryFile, lines: Lines, broken: Broken = _NONE) -> list[Fault]:
    """What each table may say alone, but not beside the others. broken: what else there is."""
    found: list[Fault] = []

    def bad(path: Sequence[str], why: str) -> None:
        found.append(Fault(".".join(path), why, lines.of(path)))

    for kind, names in (("hosts", tables.hosts), ("containers", tables.containers), ("groups", tables.groups)):
        if ALL in names:
            bad((kind, ALL), "`all` means every container; choose another name")
    for name, table in tables.hosts.items():
        if why := _no_one_way(table):
            bad(("hosts", name), why)
    for name, table in tables.containers.items():
        if table.host not in tables.hosts:
            if table.host not in broken.names["hosts"]:
                hosts = [*tables.hosts, *sorted(broken.names["hosts"])]
                why = f"no host is called {table.host!r}; hosts: {listed(hosts)}{nearest(table.host, hosts)}"
                bad(("containers", name, "host"), why)
        elif table.python == SANDBOX and tables.hosts[table.host].sandbox is None:
            bad(("containers", name, "python"), f'"sandbox" needs a sandbox host; {table.host} is none')
        if len(set(table.gpus)) < len(table.gpus):
            bad(("containers", name, "gpus"), f"a GPU is named twice: {table.gpus}")
    circles = _circles(tables.groups)
    for name, members in tables.groups.items():
        for kind, others in (("host", tables.hosts), ("container", tables.containers)):
            if name in others:
                bad(("groups", name), f"a {kind} is called {name!r} too; choose another name")
        for word in members:
            if word not in broken and (why := _wrong_member(tables, word, broken)):
                bad(("groups", name), why)
        if name in circles:
            bad(("groups", name), f"a group can't hold itself: {' -> '.join(_ends(circles[name]))}")
    default = tables.default
    if default is not None and default not in tables.containers and default not in broken.names["containers"]:
        known = [*tables.containers, *sorted(broken.names["containers"])]
        why = f"no container is called {default!r}; containers: {listed(known)}"
        if default in tables.groups or default in tables.hosts:
            why += f"; a {'group' if default in tables.groups else 'host'} is, and a default is one container"
        else:
            why += nearest(default, known)
        bad(("default",), why)
    return found


def _no_one_way(table: HostTable) -> str:
    """Why a host's table does not say how to reach it, and only once."""
    if table.sandbox is None:
        return "needs `address`, or `sandbox`" if table.address is None else ""
    others = sorted(key.name for key in fields(table) if key.name != "sandbox" and getattr(table, key.name) is not None)
    return f"`sandbox` says all there is to say; remove: {', '.join(others)}" if others else ""


def _wrong_member(tables: InventoryFile, word: str, broken: Broken) -> str:
    if (word in tables.containers and word not in tables.hosts) or word in tables.groups or word == ALL:
        return ""
    if word in tables.hosts:
        return two_meanings(tables, word)
    known = [
        *tables.containers,
        *tables.hosts,
        *tables.groups,
        *sorted({name for names in broken.names.values() for name in names}),
    ]
    return f"nothing is called {word!r}; there are: {listed(known)}{nearest(word, known)}"


def two_meanings(tables: InventoryFile, word: str) -> str:
    """Why a name can't be used for several; empty when it can: a host and a container of one name must be the same."""
    if word not in tables.hosts or word not in tables.containers:
        return ""
    there = on_host(tables, word)
    if there == [word]:
        return ""
    return f"{word!r} is a container, and a host with these: {listed(there)}; give one of the two another name"


def on_host(tables: InventoryFile, host: str) -> list[str]:
    """The names of the containers on a host, in the file's order."""
    return [name for name, table in tables.containers.items() if table.host == host]


def _circles(groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Group -> the shortest way from it back to itself; each circle once, at its first group in the file."""
    left = {name: {word for word in words if word in groups} for name, words in groups.items()}
    while free := [name for name, words in left.items() if not words & left.keys()]:
        for name in free:  # no circle leads through these
            del left[name]
    found: dict[str, list[str]] = {}
    told: set[str] = set()
    for name in left:
        if name not in told and (circle := _circle(left, name)):
            found[name] = circle
            told.update(circle)
    return found


def _circle(groups: Mapping[str, Iterable[str]], start: str) -> list[str]:
    """The shortest way from a group back to itself; empty when there is none."""
    came_from: dict[str, str] = {}
    ahead = [start]
    for group in ahead:
        for word in groups[group]:
            if word == start:
                way = [start, group]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1] if group != start else [start, start]
            if word in groups and word not in came_from:
                came_from[word] = group
                ahead.append(word)
    return []


def _ends(circle: list[str]) -> list[str]:
    return circle if len(circle) <= 12 else [*circle[:6], f"({len(circle) - 12} more)", *circle[-6:]]


def members(tables: InventoryFile, word: str) -> list[str] | None:
    """The names of the containers that a word stands for, each once, in order; None when nothing is called so.
    The tables must be without faults."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    ahead = [word]
    while ahead:
        word = ahead.pop()
        if word in seen:
            continue
        seen.add(word)
        if word == ALL:
            found |= dict.fromkeys(tables.containers)
        elif word in tables.containers:
            found[word] = None
        elif word in tables.hosts:
            found |= dict.fromkeys(on_host(tables, word))
        elif word in tables.groups:
            ahead += reversed(tables.groups[word])
        else:
            return None
    return list(found)


def _fields_at(path: list[str]) -> list[str]:
    match path:
        case ["hosts", _]:
            table = HostTable
        case ["hosts", _, "api"]:
            table = ApiTable
        case ["containers", _]:
            table = ContainerTable
        case ["containers", _, "pins"]:
            table = PinsTable
        case _:
            table = InventoryFile
    return [key.name for key in fields(table)]


def brief(value: object) -> str:
    """A value as Python writes it, without passwords, cut where it is long."""
    try:
        text = repr(hidden(value))
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        return "what is there"
    return text if len(text) <= 80 else f"{text[:77]}..."


def hidden(value: Any) -> Any:
    """A value with no password in it: of https://USER:PASSWORD@..., and of USER:PASSWORD@..., the place is left."""
    match value:
        case str() if "://" in value:
            return re.sub(r"(?<=://)[^/?#\s]*@", "***@", value)
        case str():
            return re.sub(r"[^\s:/@]+:\S*@", "***@", value)
        case dict():
            return {hidden(key): hidden(inner) for key, inner in cast(dict[Any, Any], value).items()}
        case list() | tuple():
            return [hidden(inner) for inner in cast(list[Any], value)]
        case _:
            return value


def listed(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - _MOST_LISTED
    return ", ".join(known[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "") or "none"


def nearest(name: str, names: Iterable[str]) -> str:
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; nearest: {close[0]}" if close else ""
