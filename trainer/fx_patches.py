"""What torch.fx.Tracer patches while it traces, seen by the thread that traces only.

There are two kinds. A patch of nn.Module.__call__ or __getattr__ records into one trace: here the attribute becomes a
switch for as long as any thread traces, which asks for the patch of the thread that calls it and else does what the
attribute did before. A wrapped function (math.sqrt, torch.fx.wrap) records into the trace of the proxy that it is
given, whosever that is, and is plain without one: here all traces share one, the last to end takes it away.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportMissingTypeArgument=false, reportUnknownLambdaType=false
# (torch.fx's patcher is private)

import builtins
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.fx._symbolic_trace as symbolic_trace

from trainer.fx_globals import CannotHold, Undo
from trainer.fx_state import FxState, current

_lock = threading.RLock()
_places: dict[tuple[int, str], "_Place"] = {}  # what is patched now
_MISSING = object()


def patches_per_thread() -> Undo:
    """Raises CannotHold, and has changed nothing then."""
    patcher = getattr(symbolic_trace, "_Patcher", None)
    methods = {"patch", "patch_method", "visit_once", "revert_all_patches", "reapply_all_patches"}
    functions = {"_autowrap_check", "_patch_wrapped_functions", "_create_wrapped_func", "_create_wrapped_method"}
    lacking = (methods - set(getattr(patcher, "__dict__", ()))) | (functions - set(symbolic_trace.__dict__))
    if patcher is None or lacking:
        raise CannotHold(f"torch.fx's patcher is not as known: {', '.join(sorted(lacking)) or 'it is gone'}")
    patch_wrapped_functions = symbolic_trace._patch_wrapped_functions

    def patch_wrapped(patcher: Any) -> None:
        with _lock:  # what it finds wrapped must not be taken away before it has its own
            patch_wrapped_functions(patcher)

    changes: list[tuple[Any, str, Any]] = [
        (patcher, "patch", _patch),
        (patcher, "patch_method", _patch_method),
        (symbolic_trace, "_autowrap_check", _autowrap_check),
        (symbolic_trace, "_patch_wrapped_functions", patch_wrapped),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return undo


class _Place:
    """An attribute of a class, or an entry of a module's dict, while it is patched."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.key = owner, name, (id(owner), name)
        self.users = 0
        self.original: Any = (
            owner.get(name, _MISSING) if isinstance(owner, dict) else owner.__dict__.get(name, _MISSING)
        )
        if self.original is not _MISSING:
            self.plain = self.original
        else:  # a builtin that a module's functions use, or an inherited method
            self.plain = getattr(builtins, name) if isinstance(owner, dict) else getattr(owner, name)

    def set(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def restore(self) -> None:
        if self.original is not _MISSING:
            self.set(self.original)
        elif isinstance(self.owner, dict):
            del self.owner[self.name]
        else:
            delattr(self.owner, self.name)

    def switch(self) -> Callable[..., Any]:
        """What the attribute is while threads have patches for it."""
        plain, key = self.plain, self.key

        @functools.wraps(plain)
        def switch(*args: Any, **kwargs: Any) -> Any:
            patches = current().patches.get(key)
            return (patches[-1] if patches else plain)(*args, **kwargs)

        # A compilation in a thread that traces nothing looks through the switch, at what stays when it is gone.
        switch._torchdynamo_inline = plain  # type: ignore[attr-defined]
        return switch


class _Patch:
    """One patch of a trace; it can be taken away and put back, as dynamo does round a compilation."""

    def __init__(self, owner: Any, name: str, new: Callable[..., Any], state: FxState | None) -> None:
        """state: of the thread that alone is to see it; None: the function is wrapped for all, and `new` not read."""
        self._owner, self._name, self._new, self._state = owner, name, new, state
        self._key, self._on = (id(owner), name), False

    def patch(self) -> None:
        with _lock:
            if self._on:
                return
            place = _places.get(self._key) or _Place(self._owner, self._name)
            if not place.users:
                _places[self._key] = place
                wrapped = self._state is None
                place.set(_wrappers.wrapper(place.plain, place.owner, place.name) if wrapped else place.switch())
            place.users += 1
            if self._state is not None:
                self._state.patches.setdefault(self._key, []).append(self._new)
            self._on = True

    def revert(self) -> None:
        with _lock:
            if not self._on:
                return
            place = _places[self._key]
            place.users -= 1
            if not place.users:
                place.restore()
                del _places[self._key]
            if self._state is not None:
                mine = self._state.patches[self._key]
                mine.reverse()  # the newest of them, where one is there twice
                mine.remove(self._new)
                mine.reverse()
            self._on = False


class _Wrappers:
    """The wrapped functions, one for each plain one and for good: a Tracer remembers functions by id, wrapped ones too,
    when it is made while another one traces."""

    def __init__(self) -> None:
        self._of_plain: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._of_wrapper: dict[int, Callable[..., Any]] = {}

    def wrapper(self, plain: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
        if id(plain) not in self._of_plain:
            if isinstance(owner, type):
                wrapper = symbolic_trace._create_wrapped_method(owner, name)
            else:
                wrapper = symbolic_trace._create_wrapped_func(plain)
            self._of_plain[id(plain)] = plain, wrapper
            self._of_wrapper[id(wrapper)] = plain
        return self._of_plain[id(plain)][1]

    def plain(self, function: Any) -> Any:
        return self._of_wrapper.get(id(function), function)

    def ids(self, plain: Any) -> set[int]:
        """Under which ids a Tracer may remember it."""
        known = self._of_plain.get(id(plain))
        return {id(plain)} | ({id(known[1])} if known else set())


_wrappers = _Wrappers()


def _patch(self: Any, frame_dict: dict[str, Any], name: str, new_fn: Callable[..., Any], deduplicate: bool = True):
    """In place of _Patcher.patch."""
    _add(self, frame_dict, name, new_fn, deduplicate)


def _patch_method(self: Any, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True):
    """In place of _Patcher.patch_method."""
    _add(self, cls, name, new_fn, deduplicate)


def _add(patcher: Any, owner: Any, name: str, new: Callable[..., Any], shared: bool) -> None:
    patch = _Patch(owner, name, new, None if shared else current())
    patch.patch()
    patcher.patches_made.append(patch)


def _autowrap_check(patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
    """In place of torch's, which passes over functions that another thread's trace has wrapped already."""
    if not patcher.visit_once(frame_dict):
        return
    with _lock:
        for name, value in list(frame_dict.items()):
            plain = _wrappers.plain(value)
            if not name.startswith("_") and callable(plain) and _wrappers.ids(plain) & function_ids:
                patcher.patch(frame_dict, name, plain)
