"""With torch.fx repaired: traces beside each other, and what they leave."""

import contextlib
import math
import threading
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as traceback
from nursery import Nursery
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch_repaired import Two, add_one, raised, undo

from trainer import fx_faults
from trainer.fx_faults import Turns, in_threads
from trainer.threads import ThreadSafety

pytestmark = pytest.mark.usefixtures("torch_as_it_came")


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


def test_autograds_own_threads_see_the_state_of_the_thread_they_work_for(nursery: Nursery) -> None:
    done = nursery.start(code=IN_AUTOGRADS_THREADS)
    done.wait()
    plain, traced = [(False, False, False), (True, False, False)], [(False, True, True), (True, True, True)]
    assert done.said().strip() == f"{plain} {traced} True"
