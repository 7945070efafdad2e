"""What travels with a remote script: exactly what it imports, by one rule, so that no list can miss a module."""

import json
import sys
from pathlib import Path

import pytest

from dflash_ops import gpus
from dflash_ops.command import Container, Host, Local
from dflash_ops.remote import bundle, start
from dflash_ops.shell import Shell

# What takes long to load and is not needed to look at GPUs.
HEAVY = {"dataclasses", "inspect", "datetime", "shutil", "site"}
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


def test_a_run_keeps_all_that_its_tools_import() -> None:
    kept = set(start.TOOLS)
    assert kept == {name for tool in kept for name in bundle.needs(tool)}


def test_nvidia_smi_answers_while_a_view_of_gpus_loads(shell: Shell) -> None:
    """It is started before the modules that look around are even compiled; and those load little."""
    command = gpus.container_query(Container(Host("h", "h"), 200, python=sys.executable)).command
    document = json.loads(command.stdin)
    document["boot"] = document["boot"].replace("sys.exit(verb", _SPY + "sys.exit(verb")
    said = shell.run(Local(), type(command)(command.argv, json.dumps(document).encode() + b"\n")).out
    assert said.split() == [b"answers,gpuasked,gpuview", b"none"]


# Prints which modules of ours are there when programs are started, and what heavy ones there are in the end.
_SPY = f"""
def spied(*words):
    print(",".join(sorted(name[len(package) + 1:] for name in sys.modules if name.startswith(package + "."))))
    return asked(*words)
asked, verb.gpuasked.Asked = verb.gpuasked.Asked, spied
verb.answers.say = lambda _: print(",".join({HEAVY} & set(sys.modules)) or "none", flush=True)
"""
