"""What is wrong with an inventory: every fault with its line, its key, why, and the nearest right word. Pure."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dflash_ops.inventory_tables import SANDBOX, ApiTable, ContainerTable, HostTable, InventoryFile, PinsTable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, ValidationError

ALL = "all"  # the word of --on for every container
# Finding a line reads the text again and again: 17 times for a long one, more where a statement has many lines.
_LONGEST_TEXT, _MOST_TRIES = 100_000, 100
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


def of_shape(error: "ValidationError", text: str) -> list[Fault]:
    """pydantic's complaints in our words."""
    return [_of_shape(fault, text) for fault in error.errors(include_url=False)]


def _of_shape(fault: "ErrorDetails", text: str) -> Fault:
    path = [part for part in fault["loc"] if part != "[key]"]
    words = [str(part) for part in path]
    in_api = words[:1] == ["hosts"] and words[2:3] == ["api"]
    shown = "what is there" if in_api else brief(fault["input"])  # it may be the secret, put in the wrong place
    match fault["type"]:
        case "unexpected_keyword_argument" if in_api and words[-1] in _SECRETS:
            why = (
                "no secret belongs in this file: put it into the variable DFLASH_OPS_PVE_TOKEN (or name another as "
                "`token_env`), or into a file of mode 0600 and name that as `token_file`"
            )
        case "unexpected_keyword_argument":
            allowed = sorted(_fields_at(words[:-1]))
            why = f"no such key; allowed: {', '.join(allowed)}{nearest(words[-1], allowed)}"
        case "missing":
            why = "is missing"
        case "dataclass_type" | "dict_type":
            why = f"must be a table, not {shown}"
        case _ if "[key]" in fault["loc"]:
            why = (
                "can't be a name: that is at most 64 letters, digits, `_`, `-` and `.`, with none of the last two first"
            )
        case "string_pattern_mismatch" if in_api:
            why = f"must look like {fault.get('ctx', {}).get('pattern')}"
        case _:
            why = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, not {shown}"
    return Fault(".".join(words), why, line_of(text, path))


def between_tables(tables: InventoryFile, text: str) -> list[Fault]:
    """What each table may say alone, but not beside the others."""
    found: list[Fault] = []

    def bad(path: Sequence[str], why: str) -> None:
        found.append(Fault(".".join(path), why, line_of(text, path)))

    for kind, names in (("hosts", tables.hosts), ("containers", tables.containers), ("groups", tables.groups)):
        if ALL in names:
            bad((kind, ALL), "`all` means every container; choose another name")
    for name, table in tables.hosts.items():
        if why := _no_one_way(table):
            bad(("hosts", name), why)
    for name, table in tables.containers.items():
        if table.host not in tables.hosts:
            hosts = tables.hosts
            why = f"no host is called {table.host!r}; hosts: {listed(hosts)}{nearest(table.host, hosts)}"
            bad(("containers", name, "host"), why)
        elif table.python == SANDBOX and tables.hosts[table.host].sandbox is None:
            bad(("containers", name, "python"), f'"sandbox" needs a sandbox host; {table.host} is none')
        if len(set(table.gpus)) < len(table.gpus):
            bad(("containers", name, "gpus"), f"a GPU is named twice: {table.gpus}")
    for name, members in tables.groups.items():
        for kind, others in (("host", tables.hosts), ("container", tables.containers)):
            if name in others:
                bad(("groups", name), f"a {kind} is called {name!r} too; choose another name")
        for word in members:
            if why := _wrong_member(tables, word):
                bad(("groups", name), why)
        if circle := _circle(tables.groups, name):
            bad(("groups", name), f"a group can't hold itself: {' -> '.join(circle)}")
    if tables.default is not None and tables.default not in tables.containers:
        known = tables.containers
        why = f"no container is called {tables.default!r}; containers: {listed(known)}"
        if tables.default in tables.groups or tables.default in tables.hosts:
            why += f"; a {'group' if tables.default in tables.groups else 'host'} is, and a default is one container"
        else:
            why += nearest(tables.default, known)
        bad(("default",), why)
    return found


def _no_one_way(table: HostTable) -> str:
    """Why a host's table does not say how to reach it, and only once."""
    if table.sandbox is None:
        return "needs `address`, or `sandbox`" if table.address is None else ""
    others = sorted(key.name for key in fields(table) if key.name != "sandbox" and getattr(table, key.name) is not None)
    return f"`sandbox` says all there is to say; remove: {', '.join(others)}" if others else ""


def _wrong_member(tables: InventoryFile, word: str) -> str:
    if (word in tables.containers and word not in tables.hosts) or word in tables.groups or word == ALL:
        return ""
    if word in tables.hosts:
        return two_meanings(tables, word)
    known = [*tables.containers, *tables.hosts, *tables.groups]
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


def _circle(groups: Mapping[str, Sequence[str]], start: str) -> list[str]:
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


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, at which the statement begins that first says `path`, or as much of it as there is.

    The TOML reader of the standard library keeps no lines, so it is asked how much of the text it takes to have the
    path: a text cut between two statements is TOML too, and nothing that follows takes a path away.
    """
    document = _parsed(text) if len(text) <= _LONGEST_TEXT else None
    if document is None:
        return None
    while path and not _has(document, path):
        path = path[:-1]
    if not path:
        return None
    lines = text.split("\n")
    low, high, tries = 0, len(lines), _MOST_TRIES  # the path is not in the first `low` lines, and in the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        for cut in (*range(middle, low, -1), *range(middle + 1, high)):  # at the middle, or as near as a cut may be
            tries -= 1
            if tries < 0:
                return None
            if (document := _parsed("\n".join((*lines[:cut], "")))) is not None:
                break
        else:
            break  # one statement from line low + 1 to line high
        low, high = (low, cut) if _has(document, path) else (cut, high)
    return low + 1


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _has(document: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


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
    """A value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def nearest(name: str, names: Iterable[str]) -> str:
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; nearest: {close[0]}" if close else ""
