"""What a remote script says: lines of JSON, and a refusal with the parts of the one line that the user gets.

{"schema_version": 1, "ok": true, ...} or {"schema_version": 1, "ok": false, "kind", "what", "why", "next", "where"}.
dflash_ops.answers reads them. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

SCHEMA_VERSION = 1
# The kinds of refusal, with the exit codes of the errors that they become.
EXIT_CODES = {"failed": 1, "config": 3, "preflight": 6, "busy": 7, "not_found": 8, "verification": 9}


class Fault(Exception):
    """A refusal. kind: a key of EXIT_CODES."""

    def __init__(self, kind: str, what: str, why: str = "", next: str = "", where: str = "") -> None:
        super().__init__(what)
        self.kind = kind
        self.parts = {"what": what, "why": why, "next": next, "where": where}


def answer(verb: Callable[[], dict[str, Any]]) -> int:
    """Runs a verb and says its answer, or its fault; returns the exit code."""
    try:
        reply = verb()
    except Fault as fault:
        return refuse(fault)
    say(reply)
    return 0


def refuse(fault: Fault) -> int:
    """Says a fault; returns its exit code."""
    _write({"ok": False, "kind": fault.kind, **fault.parts})
    return EXIT_CODES[fault.kind]


def say(reply: dict[str, Any]) -> None:
    _write({"ok": True, **reply})


def _write(reply: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more; what was done stays done
        sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **reply}) + "\n")
        sys.stdout.flush()
