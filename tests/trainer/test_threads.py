"""torch.fx beside threads: each fault is brought about without the repair, and gone with it."""

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as traceback
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from trainer import fx_faults
from trainer.diagnosis import tracing_threads
from trainer.fx_faults import FAULTS, Fault, Turns, in_threads
from trainer.fx_patches import anything_patched
from trainer.threads import ThreadSafety, installed, make_torch_thread_safe

NAMES = [fault.name for fault in FAULTS]


@pytest.fixture(scope="module", autouse=True)
def _undone_at_the_end() -> Iterator[None]:
    yield
    undo()


@pytest.fixture(autouse=True)
def _as_it_came(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test begins with torch as it came, or repaired if it asks for that, and leaves nothing of a trace."""
    if "safety" not in request.fixturenames:
        undo()
    torch._dynamo.reset()
    yield
    assert symbolic_trace.is_fx_symbolic_tracing() is False
    assert not anything_patched()


def undo() -> None:
    if safety := installed():
        safety.undo()


@pytest.fixture
def safety() -> ThreadSafety:
    return make_torch_thread_safe()


@pytest.fixture
def runs(soak: bool) -> range:
    return range(50 if soak else 5)


def raised(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def add_one(x: Tensor) -> Tensor:
    return x + 1


# The faults.


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
    modules = (symbolic_trace, traceback, proxy_tensor, sys.modules["torch._higher_order_ops.flex_attention"])
    found: dict[str, Any] = {}
    for module in modules:
        found[f"class of {module.__name__}"] = type(module)
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    for owner in (nn.Module, symbolic_trace._Patcher, symbolic_trace.Tracer, math):
        found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items()}
    import gc

    files = {module.__file__ for module in modules}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename in files:
            found[f"code of {function.__qualname__} at {id(function)}"] = function.__code__
            found[f"function {id(function)}"] = function  # kept, so that no other gets its id
    return found


def changes(before: dict[str, Any]) -> list[str]:
    now = everything()
    return [name for name, value in before.items() if name not in now or now[name] is not value]


@pytest.mark.parametrize("fix", ["per-thread", "always-false", "off"])
def test_undoing_makes_torch_what_it_was(fix: Any) -> None:
    before = everything()
    safety = make_torch_thread_safe(fix)
    assert bool(changes(before)) == (fix != "off")
    torch.fx.symbolic_trace(add_one)
    safety.undo()
    assert changes(before) == []
    assert installed() is None


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


def test_the_fields_first_fix_is_told_for_what_it_is() -> None:
    safety = make_torch_thread_safe("always-false")
    assert "flag" in safety.left and "stuck-flag" in safety.repaired
    assert "a thread that does as well" in str(safety)


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


def test_a_torch_without_the_faults_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_faults, "found", dict)
    before = everything()
    safety = make_torch_thread_safe()
    assert changes(before) == [] and "none of the known faults" in str(safety)


# Compiled functions beside a thread that traces.


def called_beside_a_trace(compiled: Callable[[Tensor], Tensor]) -> tuple[Tensor, str]:
    """What a compiled function returns while another thread traces, and that thread's code."""
    turns, answers, codes = Turns(), list[Tensor](), list[str]()

    def body(x: Tensor) -> Tensor:
        turns.reach("tracing")
        turns.wait("called")
        return x * 2

    def call() -> None:
        turns.wait("tracing")
        try:
            answers.append(compiled(torch.ones(2)))
        finally:
            turns.reach("called")

    errors = in_threads(lambda: codes.append(torch.fx.symbolic_trace(body).code), call)
    raised(errors)
    return answers[0], codes[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_was_compiled_before_runs_beside_a_trace(backend: str, runs: range) -> None:
    compiled = torch.compile(add_one, backend=backend, fullgraph=True)
    compiled(torch.ones(2))
    try:
        called_beside_a_trace(compiled)
    except RuntimeError as error:
        assert "FX to symbolically trace" in str(error)
    else:
        pytest.skip(f"torch {torch.__version__} no longer refuses")
    make_torch_thread_safe()
    for _ in runs:
        answer, code = called_beside_a_trace(compiled)
        assert answer.tolist() == [2, 2] and "x * 2" in code


def test_a_thread_that_traces_a_compiled_function_is_still_refused(safety: ThreadSafety) -> None:
    compiled = torch.compile(add_one, backend="eager")
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        torch.fx.symbolic_trace(lambda x: compiled(x))
    assert compiled(torch.ones(1)).item() == 2
    undo()
    make_torch_thread_safe("always-false")
    torch.fx.symbolic_trace(lambda x: compiled(x))  # what the first fix gives away


class Two(nn.Module):
    """A module with parts, a parameter and a wrapped function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def test_dynamo_compiles_in_one_thread_while_another_traces(safety: ThreadSafety, runs: range) -> None:
    for _ in runs:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: object, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        module, x = Two(), torch.ones(1, 2)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        answer, code = called_beside_a_trace(lambda _, x=x, compiled=compiled: compiled(x))
        torch.testing.assert_close(answer, module(x), rtol=0, atol=0)
        assert "x * 2" in code
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
        assert len(graphs) == 1  # not compiled once more when the other trace was over


def recorded() -> list[object]:
    """What a compilation with a backward records of its nodes."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    compiled = torch.compile(Two(), backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    compiled(torch.ones(1, 2)).sum().backward()
    kept = ("stack_trace", "custom", "partitioner_tag", "autograd_backward", "fwd_source_fn_stack")
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    first = min(node.meta["seq_nr"] for node in nodes if node.meta.get("seq_nr", -1) >= 0)  # autograd counts on and on
    assert len(graphs) == 2 and any("stack_trace" in node.meta for node in graphs[1].graph.nodes)
    return [
        (
            str(node),
            sorted(node.meta),
            max(node.meta.get("seq_nr", -1) - first, -1),
            [str(node.meta.get(key)) for key in kept],
        )
        for node in nodes
    ]


def test_a_compilation_records_the_same_with_the_repair(safety: ThreadSafety) -> None:
    repaired = recorded()
    undo()
    assert repaired == recorded()


# Traces.


def test_many_threads_trace_at_once(safety: ThreadSafety, runs: range) -> None:
    want = torch.fx.symbolic_trace(Two()).code
    start = threading.Barrier(4)
    codes: list[str] = []

    def trace() -> None:
        start.wait(30)
        for _ in range(5):
            codes.append(torch.fx.symbolic_trace(Two()).code)
            with traceback.annotate({"thread": threading.get_ident()}):
                make_fx(add_one)(torch.ones(1))

    for _ in runs:
        raised(in_threads(trace, trace, trace, trace))
    assert set(codes) == {want}


def test_a_trace_inside_a_trace(safety: ThreadSafety) -> None:
    inner: list[str] = []

    class Outer(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            inner.append(torch.fx.symbolic_trace(Two()).code)
            assert symbolic_trace.is_fx_symbolic_tracing()
            return self.second(y) * math.sqrt(self.scale.sum())

    graph = torch.fx.symbolic_trace(Outer()).graph
    undo()
    plain, inner_codes = torch.fx.symbolic_trace(Outer()).graph, inner
    assert [str(node) for node in graph.nodes] == [str(node) for node in plain.nodes]
    assert inner_codes[0] == inner_codes[1] == torch.fx.symbolic_trace(Two()).code


@pytest.mark.parametrize("made", ["before", "during"])
def test_a_function_stays_wrapped_whenever_the_tracer_was_made(safety: ThreadSafety, made: str) -> None:
    """A Tracer knows the functions of math by what they were when it was made."""
    turns = Turns()

    def first(x: Tensor) -> Any:
        turns.reach("first traces")
        turns.wait("second traces")
        return math.sqrt(x)

    def second(x: Tensor) -> Any:
        turns.reach("second traces")
        turns.wait("first ended")
        return math.sqrt(x)

    early, plain, targets = torch.fx.Tracer(), math.sqrt, list[object]()

    def trace_first() -> None:
        try:
            torch.fx.Tracer().trace(first)
        finally:
            turns.reach("first ended")

    def trace_second() -> None:
        turns.wait("first traces")
        graph = (early if made == "before" else torch.fx.Tracer()).trace(second)
        targets.extend(node.target for node in graph.nodes if node.op == "call_function")

    raised(in_threads(trace_first, trace_second))
    assert targets == [plain] and math.sqrt is plain


def test_an_error_inside_a_trace_ends_it(safety: ThreadSafety) -> None:
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__

    def body(x: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        torch.fx.symbolic_trace(body)
    assert not symbolic_trace.is_fx_symbolic_tracing()
    assert symbolic_trace.CURRENT_PATCHER is None
    assert nn.Module.__call__ is call and nn.Module.__getattr__ is getattribute


def test_a_thread_that_ends_while_it_traces_leaves_nothing(safety: ThreadSafety, runs: range) -> None:
    call = nn.Module.__call__
    turns, told = Turns(), list[bool]()

    class Leaving(Two):
        def forward(self, x: Tensor) -> Tensor:
            turns.reach("tracing")
            turns.wait("the other traces")
            raise SystemExit  # what `sys.exit` in a thread does

    class Staying(Two):
        def forward(self, x: Tensor) -> Tensor:
            turns.reach("the other traces")
            left.join(30)
            told.append(symbolic_trace.is_fx_symbolic_tracing())
            return super().forward(x)

    def leave() -> None:
        with contextlib.suppress(SystemExit):  # as Python does; pytest would not
            torch.fx.symbolic_trace(Leaving())

    left = threading.Thread(target=leave)
    left.start()
    turns.wait("tracing")
    graph = torch.fx.symbolic_trace(Staying()).graph
    assert told == [True] and not left.is_alive()
    assert [node.op for node in graph.nodes].count("call_module") == 3
    assert nn.Module.__call__ is call


def test_make_fx_in_one_thread_beside_another(safety: ThreadSafety, runs: range) -> None:
    turns = Turns()

    def body(x: Tensor) -> Tensor:
        turns.reach("first traces")
        turns.wait("second traced")
        return x.sin() + 1

    codes: dict[str, str] = {}

    def first() -> None:
        codes["first"] = make_fx(body)(torch.ones(1)).code

    def second() -> None:
        turns.wait("first traces")
        try:
            assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
            codes["second"] = make_fx(torch.cos)(torch.ones(1)).code
        finally:
            turns.reach("second traced")

    raised(in_threads(first, second))
    assert "sin" in codes["first"] and "cos" not in codes["first"] and "cos" in codes["second"]


def test_block_masks_in_threads(safety: ThreadSafety, runs: range) -> None:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key // 16 <= query // 16

    compiled = torch.compile(add_one, backend="eager")
    want = create_block_mask(mask, 1, 1, 256, 256, device="cpu").kv_num_blocks

    def work() -> None:
        for _ in range(4):
            compiled(torch.ones(2))
            assert torch.equal(create_block_mask(mask, 1, 1, 256, 256, device="cpu").kv_num_blocks, want)

    for _ in runs:
        raised(in_threads(work, work, work))
    assert traceback.get_current_meta() == {}


def test_dynamos_own_clearing_of_the_flag_reaches_its_thread_only(safety: ThreadSafety) -> None:
    from torch._higher_order_ops.utils import _set_compilation_env

    def body(x: Tensor) -> Tensor:
        with _set_compilation_env():
            assert not symbolic_trace.is_fx_symbolic_tracing()
        assert symbolic_trace.is_fx_symbolic_tracing()
        return x + 1

    torch.fx.symbolic_trace(body)
    assert fx_faults.flag() is None  # with another thread in it, now that dynamo is there


IN_AUTOGRADS_THREADS = """
import os, threading, torch
import torch.fx.traceback as traceback
from torch.fx.experimental.proxy_tensor import make_fx
from trainer.threads import make_torch_thread_safe

if torch.version.cuda and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # crashes in threads without a GPU
make_torch_thread_safe()
seen = set()

class Deep(torch.autograd.Function):  # autograd goes on in threads of its own from the 60th backward in a backward on
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        mine = threading.current_thread() is thread
        seen.add((mine, traceback.has_preserved_node_meta(), "custom" in traceback.get_current_meta()))
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return grad, None

def deep(x):
    Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    return x + 1

def work():
    deep(torch.ones(1))
    plain = set(seen)
    seen.clear()
    with traceback.preserve_node_meta(), traceback.annotate({"trainer": 1}):
        make_fx(deep)(torch.ones(1))
        traced = set(seen)
        seen.clear()
        deep(torch.ones(1))  # without a dispatch mode: only torch's own context tells
    handed_over = (False, True, True) in seen or not hasattr(torch._C, "_remove_obj_from_tls")
    print(sorted(plain), sorted(traced), handed_over, flush=True)

thread = threading.Thread(target=work)
thread.start()
thread.join()
os._exit(0)
"""


def test_autograds_own_threads_see_the_state_of_the_thread_they_work_for() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IN_AUTOGRADS_THREADS], capture_output=True, text=True, cwd=root, timeout=100
    )
    plain, traced = [(False, False, False), (True, False, False)], [(False, True, True), (True, True, True)]
    assert done.stdout.strip() == f"{plain} {traced} True", done.stderr
