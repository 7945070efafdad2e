"""Reads what remote scripts say: their answers, and their refusals as our errors. Pure."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from dflash_ops.command import Result
from dflash_ops.errors import BusyError, ConfigError, NotFoundError, OpsError, PreflightError, VerificationError

_ERRORS: Mapping[str, type[OpsError]] = {
    "failed": OpsError,
    "config": ConfigError,
    "preflight": PreflightError,
    "busy": BusyError,
    "not_found": NotFoundError,
    "verification": VerificationError,
}


def answer(result: Result) -> dict[str, Any]:
    """The answer of a script that has ended: the last line that is one. Raises what it refused with instead."""
    for line in reversed(result.out.split(b"\n")):
        reply = document(line)
        if reply is not None:
            return accepted(reply, str(result.place))
    raise no_answer(result)


def accepted(reply: dict[str, Any], place: str) -> dict[str, Any]:
    """The answer, when it is none of the refusals, which are raised."""
    if not reply["ok"]:
        raise_fault(reply, place)
    return reply


def raise_fault(reply: Mapping[str, Any], place: str) -> NoReturn:
    """Raises what a script refused with."""
    error = _ERRORS.get(str(reply.get("kind")), OpsError)
    where = f"{place}: {reply['where']}" if reply.get("where") else place
    what = str(reply.get("what", "the script in the container failed"))
    raise error(what, where=where, why=str(reply.get("why", "")), next=str(reply.get("next", "")))


def document(line: bytes) -> dict[str, Any] | None:
    """A line that a script said; None for the noise of a login shell."""
    try:
        reply: Any = json.loads(line)
    except ValueError:
        return None
    return cast(dict[str, Any], reply) if isinstance(reply, dict) and "ok" in reply else None


def no_answer(result: Result) -> OpsError:
    """Why a script that has ended said nothing."""
    if result.code in (126, 127):
        return PreflightError(
            "there is no Python",
            where=str(result.place),
            why=result.last_words,
            next="install python3 there, or correct `python` in the inventory",
        )
    return OpsError("the script in the container failed", where=str(result.place), why=result.last_words)
