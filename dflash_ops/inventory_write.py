"""Adding hosts and containers to an inventory: what is there stays as it is, comments and order too.

New tables go to the end of the file, where they come between nobody's lines; only where the file's own form forbids
that (`hosts = {...}`) is a table put beside the others. The new text is read back before it takes the old one's place.
"""

import contextlib
import itertools
import os
import tempfile
import tomllib
from collections.abc import Container, Generator, Mapping
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.exceptions

from dflash_ops.errors import BusyError, ConfigError, OpsError, UsageFault
from dflash_ops.inventory import examine, judged, parse
from dflash_ops.inventory_file import BOM, decoded, present
from dflash_ops.inventory_lines import Lines
from dflash_ops.inventory_tables import InventoryFile

Entry = Mapping[str, object]  # a table's keys as the inventory writes them; None is left out


def add(
    file: Path,
    *,
    hosts: Mapping[str, Entry] | None = None,
    containers: Mapping[str, Entry] | None = None,
    head: str = "",
    beside: Mapping[Path, bytes] | None = None,
    renewed: Container[Path] = (),
) -> list[Path]:
    """Adds all of these at once, or nothing. A host that is there may get its `api`; one that is there word for word,
    with a new container of it, is that one. head: what a new file begins with. beside: files that the inventory needs,
    of which those `renewed` may be there with other words. Gives those of `beside` that were written.

    Makes the file where there is none. Where there was one container and no `default`, that one becomes the default:
    what worked without -t still does. UsageFault where a name is taken or a key is wrong; ConfigError where the file is
    wrong already, can't be written, or one beside it is another one; BusyError where somebody else writes it."""
    new = {"hosts": _written(hosts or {}), "containers": _written(containers or {})}
    try:
        real = file.resolve()  # a link stays a link
        real.parent.mkdir(parents=True, exist_ok=True)
        with _alone(real.parent):
            old = real.read_bytes() if present(real) else head.encode()
            text = added(decoded(old, file), file, new)
            more = {
                path: content for path, content in (beside or {}).items() if _is_to_be_written(path, content, renewed)
            }
            _place({**more, real: (BOM + text if old.startswith(BOM.encode()) else text).encode()})
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise ConfigError(
            "the inventory can't be written", where=str(file), why=getattr(error, "strerror", None) or str(error)
        ) from error
    return [*more]


def _is_to_be_written(path: Path, content: bytes, renewed: Container[Path]) -> bool:
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        return True
    if there != content and path not in renewed:
        raise ConfigError(
            "another file is there already", where=str(path), next="compare it with what is meant, and remove it"
        )
    return there != content


def added(text: str, file: Path, new: Mapping[str, Mapping[str, Entry]]) -> str:
    """The text with new tables: {"hosts": {name: keys}, "containers": {name: keys}}. Pure; `file` is for errors."""
    before = parse(text, file).tables
    document = tomllib.loads(text)
    if new["containers"]:
        there = document.get("hosts", {})
        new = {**new, "hosts": {name: keys for name, keys in new["hosts"].items() if there.get(name) != keys}}
    for kind, tables in (("hosts", before.hosts), ("containers", before.containers)):
        for name, keys in new[kind].items():
            may_be_there = kind == "hosts" and [*keys] == ["api"] and name in tables and before.hosts[name].api is None
            if name in tables and not may_be_there:
                raise UsageFault(
                    f"there is a {kind[:-1]} {name!r} already", where=str(file), next="choose another name, or edit it"
                )
    default = new_default(before, new["containers"])
    wanted: dict[str, Any] = {**default, **document}
    for kind, entries in new.items():
        if entries:
            there = wanted.get(kind, {})
            wanted[kind] = {**there, **{name: {**there.get(name, {}), **keys} for name, keys in entries.items()}}
    if isinstance(wrong := judged(wanted, Lines("")), list):
        raise UsageFault(f"this can't be written into the inventory: {wrong[0].key}", where=str(file), why=wrong[0].why)
    begun = _with_default(text, default)
    kinds = [kind for kind, entries in new.items() if entries]
    for ways in itertools.product((_at_the_end, _beside_the_others), repeat=len(kinds)):
        result = begun
        try:
            # What goes to the end comes last: it must not come between the others.
            for way, kind in sorted(zip(ways, kinds, strict=True), key=lambda it: it[0] is _at_the_end):
                result = way(result, {kind: new[kind]})
            if tomllib.loads(result) == wanted and isinstance(examine(result), InventoryFile):
                return result
        except (ValueError, tomlkit.exceptions.TOMLKitError):  # not in this way
            continue
    what = "the inventory is written in a way that can't be added to"
    raise OpsError(what, where=str(file), next=f"add:\n{rendered(new)}")


def rendered(new: Mapping[str, Mapping[str, Entry]]) -> str:
    """The new tables as TOML."""
    tables = [{kind: {name: said(keys)}} for kind, entries in new.items() for name, keys in entries.items()]
    return "\n".join(tomlkit.dumps(table).strip("\n") + "\n" for table in tables)


def new_default(before: InventoryFile, containers: Mapping[str, Entry]) -> dict[str, str]:
    """The `default` that is added with these containers: the only one until now, which was meant without one."""
    if before.default is None and containers and len(before.containers) == 1:
        return {"default": next(iter(before.containers))}
    return {}


def _with_default(text: str, default: Mapping[str, str]) -> str:
    """The text with a `default` before all else, but behind comments at its top that have an empty line after them."""
    if not default:
        return text
    lines = text.splitlines(keepends=True)
    head = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if head < len(lines) and lines[head].strip():  # the comment belongs to what follows: only a schema's line is apart
        head = int(text.startswith("#:schema"))
    ending = _line_ending(text)
    new = tomlkit.dumps(default).strip() + ending
    if head < len(lines) and lines[head].strip():
        new += ending
    elif head < len(lines):
        new = ending + new
    return "".join((*lines[:head], new, *lines[head:]))


def _at_the_end(text: str, new: Mapping[str, Mapping[str, Entry]]) -> str:
    ending = _line_ending(text)
    tail = rendered(new).replace("\n", ending)
    if text and not text.endswith("\n"):
        text += ending
    return f"{text}{ending if text else ''}{tail}"


def _beside_the_others(text: str, new: Mapping[str, Mapping[str, Entry]]) -> str:
    document: Any = tomlkit.parse(text)
    for kind, tables in new.items():
        for name, keys in tables.items():
            there = document.setdefault(kind, tomlkit.table(is_super_table=True))
            if name in there:
                there[name].update(keys)
            else:
                there[name] = dict(keys)
    return tomlkit.dumps(document)


def _line_ending(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _written(entries: Mapping[str, Entry]) -> dict[str, dict[str, object]]:
    return {name: said(keys) for name, keys in entries.items()}


def said(keys: Entry) -> dict[str, object]:
    """The keys that say something: None is left out, paths are text, and tuples are arrays."""
    return {key: _plain(value) for key, value in keys.items() if value is not None}


def _plain(value: object) -> object:
    match value:
        case Mapping():
            return said(value)  # pyright: ignore[reportUnknownArgumentType]
        case tuple() | list():
            return [*value]  # pyright: ignore[reportUnknownVariableType]
        case Path():
            return str(value)
        case _:
            return value


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None, None, None]:
    """Nobody else of us adds to a file of this folder meanwhile. BusyError when somebody does."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError("somebody else is writing the inventory", where=str(folder), next="run it again") from error
        except OSError:
            pass  # some network file systems can't lock a folder: better unguarded than not at all
        yield
    finally:
        os.close(descriptor)


def _place(files: Mapping[Path, bytes]) -> None:
    """Puts these in their places by rename, the last one last, with the rights that were there. All are whole on the
    disk before the first one is: a disk that is full leaves things as they were."""
    drafts: dict[Path, Path] = {}
    made: list[Path] = []
    try:
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(prefix=f".{file.name[:40]}.", dir=file.parent)
            drafts[file] = Path(draft)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(descriptor)
                os.fchmod(descriptor, file.stat().st_mode & 0o7777 if file.exists() else 0o644)
        for file, draft in drafts.items():
            is_new = not file.exists()
            draft.replace(file)
            made += [file] if is_new else []
    except BaseException:
        for path in (*drafts.values(), *made):
            path.unlink(missing_ok=True)
        raise
