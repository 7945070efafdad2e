"""What torch.fx keeps for the whole process, for each thread by itself.

A state belongs to the thread that made it, and follows its work into autograd's own threads: while those run a backward
for a thread they see its state, just as they see its autocast and its dispatch modes. (Part of tracing a backward on a
GPU runs there: with a state of their own, they would lose what the tracing thread had switched on.)
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch's store of Python objects that go along with a thread's work is private)

import contextvars
import copy
import threading
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch

_own = threading.local()
# torch hands the context of the thread that starts a backward to autograd's threads, by this key. A store of our own by
# the same means is no choice: what is left in it when a thread ends is taken down without Python's lock, and crashes.
_CONTEXT = "context"
MAKE_FX = ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER")
_published: "contextvars.ContextVar[FxState | None]" = contextvars.ContextVar("trainer.fx_state", default=None)
_all: "weakref.WeakSet[FxState]" = weakref.WeakSet()
_all_lock = threading.Lock()


class FxState:
    """One thread's."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.foreign = isinstance(self.thread, threading._DummyThread)  # not started by Python: perhaps by autograd
        self.values: dict[tuple[str, str], Any] = {}  # by module and name
        self.patches: dict[tuple[int, str], list[Any]] = {}  # by whose attribute it is: see fx_patches.py


def current() -> FxState:
    """The state of the thread that this work belongs to."""
    state = cast("FxState | None", getattr(_own, "state", None))
    if state is None:
        state = _own.state = FxState()
        with _all_lock:
            _all.add(state)
    if state.foreign:
        return _starter() or state
    if _published.get() is not state:
        _published.set(state)
    return state


def _starter() -> FxState | None:
    """In a thread of autograd's: the state of the thread whose backward it runs now."""
    if torch._C._is_key_in_tls(_CONTEXT):
        context = cast(contextvars.Context, torch._C._get_obj_in_tls(_CONTEXT))
        if starter := context.get(_published):
            return starter
    # Older versions hand over no context, and a backward that such a thread starts itself hands over that thread's. But
    # all hand over the dispatch modes. With none, nothing is traced here. Else it is for the thread that traces with
    # make_fx: one at a time under the compiler's lock.
    if not torch._C._len_torch_dispatch_stack():
        return None
    tracing = [state for state in states() if state.values.get(MAKE_FX) is not None]
    return tracing[0] if len(tracing) == 1 else None


def states() -> list[FxState]:
    """Those of all threads that have one."""
    with _all_lock:
        return list(_all)


def forget(module: str) -> None:
    """Drops what every thread has of a module: the names are the module's own again."""
    for state in states():
        for key in [key for key in list(state.values) if key[0] == module]:
            state.values.pop(key, None)


class PerThread:
    """A module's names, as attributes, with a value in each thread."""

    def __init__(self, module: str, defaults: Mapping[str, Any]) -> None:
        """defaults: what a thread starts with; copied for each."""
        self.__dict__.update(_module=module, _defaults=dict(defaults))

    def __getattr__(self, name: str) -> Any:  # only for what is not in __dict__: the module's names
        values = current().values
        try:
            return values[self._module, name]
        except KeyError:
            return values.setdefault((self._module, name), copy.copy(self._defaults[name]))

    def __setattr__(self, name: str, value: Any) -> None:
        current().values[self._module, name] = value
