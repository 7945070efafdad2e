"""torch.fx beside threads: each fault is brought about without the repair, and gone with it."""

import gc
import math
import sys
import threading
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as traceback
from torch import Tensor, nn
from torch_repaired import add_one, one_flag, raised

from trainer import fx_faults
from trainer.diagnosis import tracing_threads
from trainer.fx_faults import FAULTS, Fault, Turns, in_threads
from trainer.fx_globals import all_functions
from trainer.threads import ThreadSafety, installed, make_torch_thread_safe

NAMES = [fault.name for fault in FAULTS]

pytestmark = pytest.mark.usefixtures("torch_as_it_came")


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_fault_is_there_without_the_repair(fault: Fault) -> None:
    if fault.probe() is None:
        pytest.skip(f"torch {torch.__version__} no longer has it: {fault.title}")
    assert fault.name in make_torch_thread_safe("off").found
    assert fault.probe() is not None


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_fault_is_gone_with_the_repair(fault: Fault, safety: ThreadSafety, runs: range) -> None:
    assert [fault.probe() for _ in runs] == [None for _ in runs]
    assert not safety.left and not safety.refused and not safety.flag_is_false


def test_a_probe_leaves_torch_as_it_was() -> None:
    before = everything()
    for fault in FAULTS:
        fault.probe()
        assert changes(before) == [], fault.name
    assert traceback.get_current_meta() == {}


def test_a_thread_that_waits_for_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_faults, "SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="nobody reached 'the moon'"):
        Turns().wait("the moon")
    stop = threading.Event()
    with pytest.raises(TimeoutError, match="did not end"):
        in_threads(stop.wait)
    stop.set()


# Making and undoing.


def everything() -> dict[str, Any]:
    """All that a repair touches, to be compared by identity."""
    functions = [f for f in all_functions() if f.__code__.co_filename in {module.__file__ for module in TOUCHED}]
    return names() | {f"code of {f.__qualname__} at {id(f)}": (f, f.__code__) for f in functions}


TOUCHED = (symbolic_trace, traceback, proxy_tensor, sys.modules["torch._higher_order_ops.flex_attention"])


def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in TOUCHED:
        found[f"class of {module.__name__}"] = type(module)
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    for owner in (nn.Module, symbolic_trace._Patcher, symbolic_trace.Tracer, math):
        found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items()}
    return found


def changes(before: dict[str, Any]) -> list[str]:
    now = names()
    code = {name for name in before if name.startswith("code of ")}
    found = [name for name in code if before[name][0].__code__ is not before[name][1]]
    return found + [n for n, value in before.items() if n not in code and (n not in now or now[n] is not value)]


@pytest.mark.parametrize("fix", ["per-thread", pytest.param("always-false", marks=one_flag), "off"])
def test_undoing_makes_torch_what_it_was(fix: Any) -> None:
    before = everything()
    safety = make_torch_thread_safe(fix)
    assert bool(changes(before)) == (fix != "off")
    torch.fx.symbolic_trace(add_one)
    safety.undo()
    assert changes(before) == []
    assert installed() is None


@one_flag
def test_a_repair_is_made_once_and_another_one_takes_its_place() -> None:
    before, first = everything(), make_torch_thread_safe()
    assert make_torch_thread_safe() is first
    second = make_torch_thread_safe("always-false")
    assert second is not first and installed() is second and second.flag_is_false
    assert type(symbolic_trace).__name__ == "module"
    first.undo()  # again: does nothing to the second
    assert installed() is second
    second.undo()
    assert changes(before) == []


def test_nothing_is_changed_while_a_thread_traces() -> None:
    turns = Turns()

    def body(x: Tensor) -> Tensor:
        turns.reach("tracing")
        turns.wait("tried")
        return x + 1

    def attempt() -> None:
        turns.wait("tracing")
        try:
            for change in (make_torch_thread_safe, first.undo):
                with pytest.raises(RuntimeError, match=r"while the thread 'Thread-.* traces"):
                    change("always-false") if change is make_torch_thread_safe else change()
        finally:
            turns.reach("tried")

    first = make_torch_thread_safe()
    raised(in_threads(lambda: torch.fx.symbolic_trace(body), attempt))
    assert installed() is first and tracing_threads() == []


@one_flag
def test_the_fields_first_fix_is_told_for_what_it_is() -> None:
    safety = make_torch_thread_safe("always-false")
    assert "flag" in safety.left and "stuck-flag" in safety.repaired
    assert "a thread that does as well" in str(safety)


@one_flag
def test_a_torch_that_is_not_as_known_gets_the_first_fix_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_fx_tracing() -> bool:
        return bool(symbolic_trace._is_fx_tracing_flag)

    monkeypatch.setattr(symbolic_trace.is_fx_tracing, "__code__", is_fx_tracing.__code__.replace(
        co_filename=symbolic_trace.__file__,
        co_firstlineno=symbolic_trace.is_fx_tracing.__code__.co_firstlineno,
        co_qualname="is_fx_tracing",
    ))  # fmt: skip
    safety = make_torch_thread_safe()
    assert safety.flag_is_false and "is_fx_tracing is not what its source says" in str(safety)
    assert {"metadata", "make-fx", "stuck-flag"} <= set(safety.repaired) and "flag" in safety.left


def test_the_fields_first_fix_does_nothing_where_torch_has_no_flag_for_all() -> None:
    before, safety = everything(), make_torch_thread_safe("always-false")
    if "flag" in safety.found:
        pytest.skip(f"torch {torch.__version__} has one for all")
    assert changes(before) == [] and not safety.flag_is_false and safety.left == safety.found
    safety.undo()
    assert installed() is None


def test_a_torch_without_the_faults_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_faults, "found", dict)
    before = everything()
    safety = make_torch_thread_safe()
    assert changes(before) == [] and "none of the known faults" in str(safety)


def test_functions_are_found_whoever_has_frozen_them() -> None:
    """By all_functions the repair reaches functions that were wrapped before it; gc.get_objects hides frozen ones."""

    def own() -> None: ...

    gc.freeze()
    try:
        assert any(one is own for one in all_functions())
    finally:
        gc.unfreeze()
