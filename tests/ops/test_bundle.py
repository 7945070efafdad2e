"""What travels with a remote script: exactly what it imports, by one rule, so that no list can miss a module."""

import json
import sys
from pathlib import Path

import pytest

from dflash_ops.command import Local
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

VERBS = ("start", "stop", "report", "follow", "gpuview", "free", "doctor", "receive")


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_verb_imports_travels_with_it(shell: Shell, tmp_path: Path, verb: str) -> None:
    """Its module is imported, with no dflash_ops to be found: the parameters are wrong, which only it can say."""
    names = bundle.needs(verb)
    assert names[0] == verb or verb in names
    done = shell.run(Local(), bundle.command(sys.executable, verb, {}))
    assert b"KeyError" in done.err and b"ModuleNotFoundError" not in done.err and b"ImportError" not in done.err
    program = "\n".join(f"from dflash_ops.remote import {name}" for name in names)
    command = bundle.command(sys.executable, verb, {})
    document = json.loads(command.stdin)
    document["boot"] = document["boot"].replace("sys.exit(verb", program + "\nprint('whole')\nsys.exit(verb")
    changed = json.dumps(document).encode() + b"\n"
    assert b"whole" in shell.run(Local(), type(command)(command.argv, changed)).out


def test_nothing_else_travels() -> None:
    for verb in VERBS:
        carried = json.loads(bundle.command(sys.executable, verb, {}).stdin)["modules"]
        assert "bundle" not in carried and ("supervisor" in carried) == (verb == "start")
