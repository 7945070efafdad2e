"""Makes globals of a module per thread, in a module that knows nothing of it.

Code reaches a global in two ways, and both are turned to the thread's own value:
- Functions of the module itself read and write its dict, past any hook. They get new code: the module's source,
  compiled again with the global replaced, is put into the function objects that there are (`__code__`). So their
  identity stays, on which torch's tables go, and whoever holds one already, as a compiled function does, runs the new
  code too.
- Others read and write the module's attribute. The module object gets a class with a property of that name.

Nothing is guessed: a function is touched only when its code is what its source compiles to.
"""

# Code objects hold anything.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import ast
import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from trainer.fx_state import PerThread, forget

Undo = Callable[[], None]
_PLACE = "the place of a PerThread"  # in the new code, until the object itself is put there


class CannotHold(RuntimeError):
    """This torch offers nothing that the repair could take hold of: one line says what."""


def per_thread(module: ModuleType, names: tuple[str, ...], functions: list[FunctionType] | None = None) -> Undo:
    """Gives each thread its own value of these globals, which begin as the module's source says.

    functions: all_functions(), if it is at hand. Raises CannotHold, and has changed nothing then.
    """
    functions = all_functions() if functions is None else functions
    first_values = {name: _first_value(_source(module), module, name) for name in names}
    holder = PerThread(module.__name__, first_values)
    codes = _new_codes(module, {name: name for name in names}, holder, functions)
    for other, alias, name in _copies(module, names):
        codes += _new_codes(other, {alias: name}, holder, functions)
    before = [(function, function.__code__) for function, _ in codes]
    old_class = module.__class__
    for function, code in codes:
        function.__code__ = code
    module.__class__ = type("PerThreadModule", (old_class,), {name: _attribute(holder, name) for name in names})

    def undo() -> None:
        module.__class__ = old_class
        for function, code in before:
            function.__code__ = code
        forget(module.__name__)

    return undo


def always(function: FunctionType, value: bool) -> Undo:
    """Makes a function answer this, whoever holds it already."""
    before = function.__code__
    function.__code__ = _yes.__code__ if value else _no.__code__

    def undo() -> None:
        function.__code__ = before

    return undo


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _attribute(holder: PerThread, name: str) -> property:
    def read(module: ModuleType) -> Any:
        return getattr(holder, name)

    def write(module: ModuleType, value: Any) -> None:
        setattr(holder, name, value)

    return property(read, write)


def all_functions() -> list[FunctionType]:
    """All there are, wherever they are held: inside decorators, in closures, in classes."""
    gc.unfreeze()  # what somebody has frozen is not told of otherwise
    return [thing for thing in gc.get_objects() if type(thing) is FunctionType]


@functools.cache
def _source(module: ModuleType) -> ast.Module:
    file = getattr(module, "__file__", None) or ""
    try:
        return ast.parse(Path(file).read_bytes(), file)
    except (OSError, SyntaxError, ValueError) as error:
        raise CannotHold(f"the source of {module.__name__} can't be read: {error}") from error


def _first_value(tree: ast.Module, module: ModuleType, name: str) -> Any:
    """What the module sets the global to when it is imported: a literal."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                return ast.literal_eval(cast(ast.Assign, node).value)
            except ValueError as error:
                raise CannotHold(f"{module.__name__}.{name} does not begin as a plain value") from error
    raise CannotHold(f"{module.__name__} has no global {name}")


def _copies(module: ModuleType, names: tuple[str, ...]) -> Iterator[tuple[ModuleType, str, str]]:
    """Where `from module import name` has put the same dict or list: module, its name there, name."""
    shared = {id(module.__dict__[n]): n for n in names if isinstance(module.__dict__[n], dict | list)}
    for other in list(sys.modules.values()):
        if other is not module and type(other) is ModuleType and other.__name__.startswith("torch."):
            for alias, value in list(other.__dict__.items()):
                if id(value) in shared:
                    yield other, alias, shared[id(value)]


def _new_codes(
    module: ModuleType, names: dict[str, str], holder: PerThread, functions: list[FunctionType]
) -> list[tuple[FunctionType, CodeType]]:
    """The functions of a module that use these globals, by their name in it, each with its new code."""
    file, replaced = cast(str, module.__file__), _replaced(module, tuple(names.items()))
    found: list[tuple[FunctionType, CodeType]] = []
    for function in functions:
        code = function.__code__
        if code.co_filename != file or (place := (code.co_qualname, code.co_firstlineno)) not in replaced:
            continue
        old, new = replaced[place]
        if not _same(code, old):
            raise CannotHold(f"{module.__name__}.{code.co_qualname} is not what its source says")
        if _uses(new, set(names)):
            raise CannotHold(f"{module.__name__}.{code.co_qualname} uses a global in a way that can't be replaced")
        found.append((function, _filled(new, holder)))
    if not found:
        raise CannotHold(f"no function of {module.__name__} uses {', '.join(names)}")
    return found


@functools.cache
def _replaced(
    module: ModuleType, names: tuple[tuple[str, str], ...]
) -> dict[tuple[str, int], tuple[CodeType, CodeType]]:
    """The code of every function that uses one of the globals, as its source says, and with them replaced."""
    used, file = {name for name, _ in names}, cast(str, module.__file__)
    old = _by_place(compile(_source(module), file, "exec", dont_inherit=True))
    tree = _source.__wrapped__(module)  # one to change
    for index, part in enumerate(tree.body):
        if any(isinstance(node, ast.Name) and node.id in used for node in ast.walk(part)):
            tree.body[index] = _Replaced(dict(names)).visit(part)
    new = _by_place(compile(tree, file, "exec", dont_inherit=True))
    return {place: (code, new[place]) for place, code in old.items() if _uses(code, used)}


def _by_place(module_code: CodeType) -> dict[tuple[str, int], CodeType]:
    """The code of every function of a compiled module, by qualified name and line."""
    return {(code.co_qualname, code.co_firstlineno): code for code in _inside(module_code)}


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


def _uses(code: CodeType, names: set[str]) -> bool:
    """Whether a function, or one inside it, reads or writes one of these globals."""
    return any(
        step.argval in names and step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
        for part in (code, *_inside(code))
        if names & set(part.co_names)
        for step in dis.get_instructions(part)
    )


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two pieces of code do the same; where they are and how far they are specialised doesn't count."""
    plain = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_exceptiontable")
    if any(getattr(one, part) != getattr(other, part) for part in plain) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _filled(code: CodeType, holder: PerThread) -> CodeType:
    """Code with the PerThread itself where its place was kept."""

    def filled(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return _filled(constant, holder)
        return holder if isinstance(constant, str) and constant == _PLACE else constant

    return code.replace(co_consts=tuple(map(filled, code.co_consts)))


class _Replaced(ast.NodeTransformer):
    """Turns a global `name` into `holder.name` in every function, except where a function has a variable so called."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._local: list[set[str]] = []  # of the functions around

    def _function(self, node: Any) -> Any:
        body = list(_own_nodes(node))
        declared = {name for part in body if isinstance(part, ast.Global) for name in part.names}
        stored = {part.id for part in body if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        arguments = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        outer = self._local[-1] if self._local else set[str]()
        self._local.append(((outer | stored) - declared) | arguments)
        node.body = [self.visit(part) for part in node.body] if isinstance(node.body, list) else self.visit(node.body)
        self._local.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not self._local or node.id not in self._names or node.id in self._local[-1]:
            return node
        place = ast.copy_location(ast.Constant(_PLACE), node)
        return ast.copy_location(ast.Attribute(place, self._names[node.id], node.ctx), node)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is written in a function, without the insides of functions and classes in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(child)
