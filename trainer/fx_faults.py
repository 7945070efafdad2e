"""The ways in which torch.fx breaks beside threads, each brought about on purpose, by events and not by luck.

A probe returns None when all went well, else what went wrong, in a line. It leaves torch as it was, even where the
fault damages it for good; other threads must not trace meanwhile.
"""

# Probes look at what torch keeps for itself.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch._higher_order_ops.utils as higher_order
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as traceback
from torch import Tensor, nn

SECONDS = 30.0  # a wait that takes longer has failed

Probe = Callable[[], str | None]
_MISSING = object()


@dataclass(frozen=True)
class Fault:
    name: str
    title: str
    probe: Probe


class Turns:
    """Threads that take turns: each waits for what another has reached."""

    def __init__(self) -> None:
        self._reached: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._reached.setdefault(name, threading.Event())

    def reach(self, name: str) -> None:
        self._event(name).set()

    def wait(self, name: str) -> None:
        if not self._event(name).wait(SECONDS):
            raise TimeoutError(f"nobody reached {name!r} in {SECONDS:.0f} s")


def in_threads(*works: Callable[[], object]) -> list[Exception | None]:
    """Runs each in a thread of its own; what each raised. Raises TimeoutError when one doesn't end."""
    errors: list[Exception | None] = [None] * len(works)

    def run(index: int) -> None:
        try:
            works[index]()
        except Exception as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"a thread did not end in {2 * SECONDS:.0f} s")
    return errors


@contextlib.contextmanager
def torch_restored() -> Generator[None]:
    """Puts back what overlapping traces may leave behind in a torch with the faults."""
    places: list[tuple[Any, str]] = [(nn.Module, "__call__"), (nn.Module, "__getattr__")]
    places += [(symbolic_trace, "_is_fx_tracing_flag"), (symbolic_trace, "CURRENT_PATCHER")]
    places += [(traceback, name) for name in META_GLOBALS] + [(proxy_tensor, "_CURRENT_MAKE_FX_TRACER")]
    dicts: list[tuple[dict[str, Any], str]] = [(math.__dict__, name) for name in math.__dict__]
    dicts += [(names, name) for (_, name), names in symbolic_trace._wrapped_fns_to_patch.items()]
    before = [getattr(owner, name, _MISSING) for owner, name in places]
    inside = [names.get(name, _MISSING) for names, name in dicts]
    meta = dict(traceback.get_current_meta())
    try:
        yield
    finally:
        for (owner, name), value in zip(places, before, strict=True):
            if value is not _MISSING and getattr(owner, name) is not value:
                setattr(owner, name, value)
        for (names, name), value in zip(dicts, inside, strict=True):
            if value is _MISSING:
                names.pop(name, None)
            elif names.get(name) is not value:
                names[name] = value
        now = traceback.get_current_meta()
        if now != meta:
            now.clear()
            now.update(meta)


META_GLOBALS = ("current_meta", "should_preserve_node_meta", "_should_preserve_node_meta", "current_replay_node")


def flag() -> str | None:
    """One thread traces, another asks whether it does itself; then that one clears the flag for itself, as dynamo does
    where it compiles the body of a higher-order operator."""
    turns, other = Turns(), list[bool]()
    own: list[bool] = []
    cleared = getattr(higher_order, "_set_compilation_env", None) if "torch._dynamo" in sys.modules else None

    def trace() -> None:
        def body(x: Tensor) -> Tensor:
            own.append(symbolic_trace.is_fx_symbolic_tracing())
            turns.reach("tracing")
            turns.wait("asked")
            own.append(symbolic_trace.is_fx_symbolic_tracing())
            turns.reach("looked")
            return x + 1

        try:
            torch.fx.symbolic_trace(body)
        finally:
            turns.reach("looked")

    def ask() -> None:
        turns.wait("tracing")
        other.append(symbolic_trace.is_fx_symbolic_tracing())
        with cleared() if cleared else contextlib.nullcontext():
            turns.reach("asked")
            turns.wait("looked")

    with torch_restored():
        errors = in_threads(trace, ask)
    if other[:1] == [True]:
        return "a thread that traces nothing is told that it does: compiled functions refuse to run in it"
    if own == [True, False]:
        return "another thread took the flag from the thread that traces"
    if own != [True, True]:
        return "the thread that traces is not told so"
    return first_error(errors)


@dataclass
class _Overlap:
    errors: list[Exception | None] = field(default_factory=list[Exception | None])
    graphs: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    flag: bool = False
    patched: bool = False


def _overlapping() -> _Overlap:
    """Two traces: the first begins, the second begins, the first ends, the second goes on and ends."""
    turns, overlap = Turns(), _Overlap()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            turns.reach("first begins")
            turns.wait("second begins")
            return self.inner(x) + math.sqrt(x.sum())

    class Second(First):
        def forward(self, x: Tensor) -> Tensor:
            turns.reach("second begins")
            turns.wait("first ends")
            return self.inner(x) + math.sqrt(x.sum())

    def graph(name: str, module: nn.Module) -> None:
        overlap.graphs[name] = [str(node.op) for node in torch.fx.Tracer().trace(module).nodes]

    def first() -> None:
        try:
            graph("first", First())
        finally:
            turns.reach("first ends")

    def second() -> None:
        turns.wait("first begins")
        try:
            graph("second", Second())
        finally:
            turns.reach("second begins")

    call, getattribute = nn.Module.__call__, nn.Module.__getattr__
    with torch_restored():
        overlap.errors = in_threads(first, second)
        overlap.flag = symbolic_trace.is_fx_symbolic_tracing()
        overlap.patched = nn.Module.__call__ is not call or nn.Module.__getattr__ is not getattribute
    return overlap


def stuck_flag() -> str | None:
    return "two traces that overlap leave the flag on for ever" if _overlapping().flag else None


def overlap() -> str | None:
    found = _overlapping()
    if error := first_error(found.errors):
        return error
    if found.patched:
        return "two traces that overlap leave nn.Module patched for ever"
    whole = ["placeholder", "call_module", "call_method", "call_function", "call_function", "output"]
    wrong = [name for name in ("first", "second") if found.graphs[name] != whole]
    return f"of two traces that overlap, the {wrong[0]} recorded {found.graphs[wrong[0]]}" if wrong else None


def metadata() -> str | None:
    """One thread annotates what it traces, inside another's `preserve_node_meta`, which ends first."""
    turns, seen = Turns(), dict[str, Any]()

    def annotating() -> None:
        turns.wait("preserving")
        try:
            with traceback.annotate({"trainer": 1}) if hasattr(traceback, "annotate") else contextlib.nullcontext():
                seen["preserves"] = traceback.has_preserved_node_meta()
                turns.reach("annotated")
                turns.wait("preserved")
                seen["own"] = dict(traceback.get_current_meta().get("custom", {}))
        finally:
            turns.reach("annotated")

    def preserving() -> None:
        try:
            with traceback.preserve_node_meta():
                turns.reach("preserving")
                turns.wait("annotated")
                seen["meta"] = dict(traceback.get_current_meta())
        finally:
            turns.reach("preserved")

    with torch_restored():
        errors = in_threads(annotating, preserving)
    if error := first_error(errors):
        return error
    if seen["preserves"] or "custom" in seen["meta"]:
        return "a thread sees the metadata of what another one traces"
    return None if seen["own"] == {"trainer": 1} else "a thread's metadata were lost while another one's ended"


def module_patches() -> str | None:
    """One thread traces a module, another one calls a part of it."""
    turns, answers = Turns(), list[Any]()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            turns.reach("tracing")
            turns.wait("called")
            return self.inner(x)

    root, graphs = Root(), list[torch.fx.Graph]()

    def trace() -> None:
        graphs.append(torch.fx.Tracer().trace(root))

    def call() -> None:
        turns.wait("tracing")
        try:
            answers.extend((root.inner(torch.ones(2)), root.inner.weight))
        finally:
            turns.reach("called")

    with torch_restored():
        errors = in_threads(trace, call)
    if error := first_error(errors):
        return error
    if not all(isinstance(answer, Tensor) for answer in answers) or len(graphs[0].nodes) != 3:
        return "a module called in one thread is recorded into what another one traces"
    return None


def make_fx() -> str | None:
    """One thread traces with make_fx, another one asks for the tracer at work.

    The trace itself is left out: it would load dynamo, which takes seconds.
    """
    turns, other = Turns(), list[Any]()
    at_work = getattr(proxy_tensor, "_set_make_fx_tracer", None)
    if at_work is None:
        return None

    def trace() -> None:
        with at_work(cast(Any, object())):
            turns.reach("tracing")
            turns.wait("asked")

    def ask() -> None:
        turns.wait("tracing")
        other.append(getattr(proxy_tensor, "_CURRENT_MAKE_FX_TRACER", None))
        turns.reach("asked")

    with torch_restored():
        errors = in_threads(trace, ask)
    if other != [None]:
        return "a thread takes another one's make_fx tracer for its own"
    return first_error(errors)


def first_error(errors: list[Exception | None]) -> str | None:
    """The first error of several threads, in a line; one that waited for a thread that failed says the least."""
    found = sorted((error for error in errors if error), key=lambda error: isinstance(error, TimeoutError))
    return f"{type(found[0]).__name__}: {found[0]}".split("\n")[0] if found else None


FAULTS = (
    Fault("flag", "the tracing flag is everyone's", flag),
    Fault("stuck-flag", "the tracing flag stays on", stuck_flag),
    Fault("metadata", "metadata of traces are everyone's", metadata),
    Fault("module-patches", "patches of nn.Module are everyone's", module_patches),
    Fault("overlap", "traces that overlap break each other", overlap),
    Fault("make-fx", "the make_fx tracer is everyone's", make_fx),
)


def found() -> dict[str, str]:
    """What this torch has, as it is now: by the fault's name, what went wrong."""
    return {fault.name: wrong for fault in FAULTS if (wrong := fault.probe()) is not None}
