"""Packs remote scripts for their way: one short command, and everything else on its stdin.

The command is `python -c READ VERB [MARK]`; stdin carries the sources of the modules, how to import them, and the
verb's parameters as one JSON document, so neither a length limit nor a process list ever meets a parameter, and half a
document starts nothing.
"""

import functools
import json
import re
from importlib import resources
from typing import Any

from dflash_ops.command import Command

# `start` also carries what a run keeps for itself; other verbs only what their module imports.
_ALSO = {"start": ("notify", "stop", "supervisor", "view", "watch")}
_IMPORT = re.compile(r"^\s*from dflash_ops\.remote(?:\.(\w+))? import (.+)$", re.MULTILINE)

# One line of what every login shell takes as it is: nothing has to be packed. The document is one line of stdin, too:
# what follows is the verb's.
_READ = 'import json,sys;bundle=json.loads(sys.stdin.buffer.readline());exec(bundle["boot"])'

# Makes the modules importable under their full names; each is compiled when it is imported first.
_BOOT = """
import sys, types
from importlib.machinery import ModuleSpec
modules, package = bundle["modules"], "dflash_ops.remote"
class Carried:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.startswith(package + ".") and name[18:] in modules else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__[18:]
        exec(compile(modules[name], name + ".py", "exec"), module.__dict__)
sys.meta_path.insert(0, Carried())
sys.modules.update({"dflash_ops": types.ModuleType("dflash_ops"), package: types.ModuleType(package)})
sys.modules[package].__path__ = []
verb = __import__(package + "." + sys.argv[1], fromlist=["main"])
verb.SOURCES = modules
sys.exit(verb.main(bundle["parameters"]))
"""


def command(
    python: str,
    verb: str,
    parameters: dict[str, Any],
    *,
    mark: str = "",
    host_prefix: tuple[str, ...] = (),
    root: bool = False,
    bare: bool = False,
) -> Command:
    """The command that runs `verb` (a module of this folder) with its parameters, in the container or on the host.

    mark: a word that process lists show (the run id), so that others can see what goes on. root: on a host, as root
    where the login user may be root there. bare: without installed packages, whose start-up files in a trainer's Python
    take longer than many a verb.
    """
    modules = {name: source(name) for name in needs(verb)}
    document = json.dumps({"boot": _BOOT, "modules": modules, "parameters": parameters}).encode() + b"\n"
    words = (python, "-IS" if bare else "-I", "-c", _READ, verb, *((mark,) if mark else ()))
    return Command(argv=words, stdin=document, host_prefix=host_prefix, root=root)


def needs(verb: str) -> list[str]:
    """The modules that travel for a verb: its own, what it imports of this folder, and what those import."""
    found: list[str] = []
    wanted = [*_ALSO.get(verb, ()), verb]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.append(name)
            for module, names in _IMPORT.findall(source(name)):
                wanted += [module] if module else [word.split()[0] for word in names.split("#")[0].split(",")]
    return found


@functools.cache
def source(name: str) -> str:
    """The source of a module of this folder."""
    return resources.files("dflash_ops.remote").joinpath(f"{name}.py").read_text(encoding="utf-8")
