"""Packs remote scripts for their way: one short command, and everything else on its stdin.

The command is `python -c BOOT VERB [MARK]`; stdin carries the sources of the modules and the verb's parameters as one
JSON document, so neither a length limit nor a process list ever meets a parameter, and half a document starts nothing.
"""

import json
from importlib import resources
from typing import Any

from dflash_ops.command import Command

# The modules each verb needs, in the order of their imports. `start` also carries what a run keeps for itself.
_NEEDS = {
    "start": ("answers", "processes", "rundir", "releases", "stop", "supervisor", "view", "start"),
    "stop": ("answers", "processes", "rundir", "stop"),
    "report": ("answers", "processes", "rundir", "report"),
    "follow": ("answers", "processes", "rundir", "follow"),
    "probe": ("answers", "processes", "rundir", "probe"),
    "receive": ("answers", "releases", "receive"),
}

# Puts the modules into sys.modules under their full names, so that their imports of each other find them there.
_BOOT = """
import json, sys, types
bundle = json.loads(sys.stdin.buffer.readline())  # one line: what follows is the verb's
package = types.ModuleType("dflash_ops.remote")
sys.modules.update({"dflash_ops": types.ModuleType("dflash_ops"), "dflash_ops.remote": package})
for name, source in bundle["modules"].items():
    module = sys.modules["dflash_ops.remote." + name] = types.ModuleType("dflash_ops.remote." + name)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
    setattr(package, name, module)
verb = getattr(package, sys.argv[1])
verb.SOURCES = bundle["modules"]
sys.exit(verb.main(bundle["parameters"]))
"""


def command(
    python: str, verb: str, parameters: dict[str, Any], *, mark: str = "", host_prefix: tuple[str, ...] = ()
) -> Command:
    """The command that runs `verb` (a module of this folder) with its parameters, in the container or on the host.

    mark: a word that process lists show (the run id), so that others can see what goes on.
    """
    modules = {name: source(name) for name in _NEEDS[verb]}
    document = json.dumps({"modules": modules, "parameters": parameters}).encode() + b"\n"
    words = (python, "-I", "-c", _BOOT, verb, *((mark,) if mark else ()))
    return Command(argv=words, stdin=document, host_prefix=host_prefix)


def source(name: str) -> str:
    """The source of a module of this folder."""
    return resources.files("dflash_ops.remote").joinpath(f"{name}.py").read_text(encoding="utf-8")
