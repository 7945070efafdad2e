"""The API of Proxmox VE, whatever carries it: a method, a path and parameters in; data, or an error with a code, out.

As in PVE the order is: is there such a call (501), may this user make it (403), has the node that is meant an answer
(595), are the parameters good (400); and whatever goes wrong after that is a 500. Runs in the hypervisor.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.sandbox import faults, guests, layout
from dflash_ops.sandbox.perl import Failure
from dflash_ops.sandbox.rights import Rights


class ApiError(Exception):
    """An answer that is no data. silent: its body is empty"""

    def __init__(self, code: int, message: str, errors: dict[str, str] | None = None, silent: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.errors, self.silent = code, message, errors, silent


class Page(list[dict[str, Any]]):
    """Some rows of a longer list, of which the answer also tells the length."""

    def __init__(self, rows: Sequence[dict[str, Any]], start: int, limit: int) -> None:
        super().__init__(rows[start : start + limit if limit else None])
        self.total = len(rows)


@dataclass(frozen=True)
class Parameter:
    """What a parameter may be. kind: "integer", "boolean", "string" or "name" (a configuration id)"""

    kind: str = "string"
    least: int | None = None
    most: int | None = None
    words: tuple[str, ...] = ()
    needed: bool = False

    def fault(self, value: str) -> str | None:
        """What is wrong with a value, in PVE's words."""
        if self.kind == "integer":
            if not re.fullmatch(r"-?\d+", value, re.ASCII):
                return f"type check ('integer') failed - got '{value}'"
            if self.least is not None and int(value) < self.least:
                return f"value must have a minimum value of {self.least}"
            if self.most is not None and int(value) > self.most:
                return f"value must have a maximum value of {self.most}"
        elif self.kind == "boolean" and value.lower() not in ("0", "1", "on", "off", "yes", "no", "true", "false"):
            return f"type check ('boolean') failed - got '{value}'"
        elif self.kind == "name" and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]+", value):
            return f"invalid configuration ID '{value}'"
        elif self.kind == "name" and self.most is not None and len(value) > self.most:
            return f"value may only be {self.most} characters long"
        elif self.words and value not in self.words:
            return f"value '{value}' does not have a value in the enumeration '{', '.join(self.words)}'"
        return None

    def read(self, value: str) -> Any:
        if self.kind == "integer":
            return int(value)
        return value.lower() in ("1", "on", "yes", "true") if self.kind == "boolean" else value


VMID = Parameter("integer", 100, 999_999_999, needed=True)
NODE = Parameter(needed=True)


@dataclass(frozen=True)
class Request:
    """A call that may be made. options: what was given besides the path's own words, as the types they stand for"""

    user: str
    rights: Rights
    node: str = layout.NODE
    vmid: int = 0
    words: dict[str, str] = field(default_factory=dict[str, str])
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def may(self, path: str, *privileges: str) -> bool:
        """Whether the user has one of the privileges there."""
        return not self.rights.at(self.user, path).keys().isdisjoint(privileges)

    def need(self, path: str, *privileges: str) -> None:
        """ApiError 403 unless the user has one of the privileges there."""
        if not self.may(path, *privileges):
            raise ApiError(403, f"Permission check failed ({path}, {'|'.join(privileges)})")


@dataclass(frozen=True)
class Call:
    """One call. place: where the privileges (one of them) are needed; without privileges anybody may, and the function
    itself leaves out what the user may not see. named: words of the path that are more than a name"""

    method: str
    path: str
    function: Callable[[Request], Any]
    place: str = ""
    privileges: tuple[str, ...] = ()
    options: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    named: dict[str, Parameter] = field(default_factory=dict[str, Parameter])

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path))


def answer(
    calls: Sequence[Call], method: str, path: str, given: dict[str, str], user: str, *, local: bool = False
) -> Any:
    """The data of one of the calls; ApiError when there is none.

    local: the asker does itself what it asks of this node, as pct and pvesh do, and needs no daemon for it
    """
    for call in calls:
        if call.method == method and (found := call.pattern.fullmatch(path.rstrip("/") or "/")):
            break
    else:
        raise ApiError(501, f"Method '{method} {path}' not implemented")
    words = found.groupdict()
    for name in given.keys() & words.keys():
        if given[name] != words[name]:
            raise _refused({name: "duplicate parameter (already defined in URI)"})
    request = Request(user, Rights.read(), words=words)
    if call.privileges:
        request.need(call.place.format(**words), *call.privileges)
    node = words.get("node", layout.NODE)
    if node == "localhost":
        node = layout.NODE
    if "node" in words and not (local and node == layout.NODE):
        _reach(node)
    given = {**given, **words}
    schema = {**call.options, **{name: VMID if name == "vmid" else NODE for name in words}, **call.named}
    errors = {
        name: "property is not defined in schema and the schema does not allow additional properties"
        for name in given.keys() - schema.keys()
    }
    for name, parameter in schema.items():
        if name not in given:
            errors |= {name: "property is missing and it is not optional"} if parameter.needed else {}
        elif (fault := parameter.fault(given[name])) is not None:
            errors[name] = fault
    if errors:
        raise _refused(errors)
    options = {name: schema[name].read(value) for name, value in given.items() if name not in words}
    request = Request(user, request.rights, node, int(words.get("vmid", "0")), words, options)
    if request.vmid and not Path(layout.config_file(request.vmid, node)).exists():
        raise ApiError(500, guests.missing(node, request.vmid))
    try:
        return call.function(request)
    except (Failure, OSError) as error:
        raise ApiError(500, str(error)) from error


def _refused(errors: dict[str, str]) -> ApiError:
    return ApiError(400, "Parameter verification failed.", errors)


def _reach(node: str) -> None:
    if node not in layout.NODES:
        why = f"failed to get address info for: {node}: Name or service not known"
        raise ApiError(500, f"hostname lookup '{node}' failed - {why}")
    wrong = faults.read()
    if node in wrong.down:
        why = "Connection refused" if node == layout.NODE else "No route to host"
        words = {596: "Connection timed out", 599: "Too many redirections"}
        raise ApiError(wrong.down_code, words.get(wrong.down_code, why), silent=True)
