"""With torch.fx repaired: compiled functions and compilations beside a thread that traces."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch_repaired import Two, add_one, raised, undo

from trainer.forms import forms_move
from trainer.fx_faults import Turns, in_threads
from trainer.threads import ThreadSafety, make_compiler_thread_safe, make_torch_thread_safe

pytestmark = pytest.mark.usefixtures("torch_as_it_came")


def called_beside_a_trace(compiled: Callable[[Tensor], Tensor]) -> tuple[Tensor, str]:
    """What a compiled function returns while another thread traces, and that thread's code."""
    turns, answers, codes = Turns(), list[Tensor](), list[str]()
    told: list[bool] = []  # whether it traces, of the thread that does

    def body(x: Tensor) -> Tensor:
        told.append(is_fx_symbolic_tracing())
        turns.reach("tracing")
        turns.wait("called")
        told.append(is_fx_symbolic_tracing())
        return x * 2

    def call() -> None:
        turns.wait("tracing")
        try:
            answers.append(compiled(torch.ones(2)))
        finally:
            turns.reach("called")

    errors = in_threads(lambda: codes.append(torch.fx.symbolic_trace(body).code), call)
    raised(errors)
    assert told == [True, True]
    return answers[0], codes[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_was_compiled_before_runs_beside_a_trace(backend: str, runs: range) -> None:
    compiled = torch.compile(add_one, backend=backend, fullgraph=True)
    compiled(torch.ones(2))
    try:
        called_beside_a_trace(compiled)
    except (RuntimeError, NameError) as error:  # refused; or, where that is no more, recorded into the other's trace
        assert "FX to symbolically trace" in str(error) or "not installed as a submodule" in str(error)
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
    if make_torch_thread_safe("always-false").flag_is_false:
        torch.fx.symbolic_trace(lambda x: compiled(x))  # what the first fix gives away


def test_a_thread_that_traces_sees_so_and_its_module_while_others_call_compiled_functions(
    safety: ThreadSafety, runs: range
) -> None:
    compiled, plain = torch.compile(Two(), backend="eager", fullgraph=True), Two()
    x = torch.ones(1, 2)
    want, code = compiled(x), torch.fx.symbolic_trace(plain).code
    done, called = threading.Event(), [threading.Event(), threading.Event()]
    told: list[bool] = []

    class Traced(Two):
        def forward(self, x: Tensor) -> Tensor:
            for event in called:
                event.clear()
            for event in called:  # by each of the others, while this one traces
                assert event.wait(30)
            told.append(is_fx_symbolic_tracing())
            return super().forward(x)

    def trace() -> None:
        try:
            for _ in runs:
                assert torch.fx.symbolic_trace(Traced()).code == code
                assert not is_fx_symbolic_tracing()
        finally:
            done.set()

    def call(event: threading.Event) -> None:
        try:
            while not done.is_set():
                assert torch.equal(compiled(x), want) and not is_fx_symbolic_tracing()
                event.set()
        finally:
            done.set()
            event.set()

    raised(in_threads(trace, *(lambda event=event: call(event) for event in called)))
    assert told == [True] * len(runs)


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


# Compiled forms of one function.


def lost_forms() -> list[Exception]:
    """What went wrong in three threads that call a function in the six forms that it has; until it first does."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    calls = [(torch.ones(size), negative) for size in (3, 4, 5) for negative in (True, False)]
    for call in calls:
        compiled(*call)
    lost = threading.Event()

    def work() -> None:
        for number in range(1000):
            if lost.is_set():
                break
            try:
                compiled(*calls[number % 6])
            except RuntimeError:
                lost.set()
                raise

    with torch.compiler.set_stance("fail_on_recompile"):
        return [error for error in in_threads(work, work, work) if error]


def scaled(x: Tensor, negative: bool) -> Tensor:
    return x * -2 if negative else x * 2


def test_a_form_is_lost_without_the_repair_and_none_with_it() -> None:
    safety = make_torch_thread_safe("off")
    assert make_compiler_thread_safe() is safety
    if not lost_forms():
        pytest.skip(f"torch {torch.__version__} no longer loses forms")
    assert "forms" in safety.found and "forms" in safety.left

    safety = make_torch_thread_safe()
    assert make_compiler_thread_safe() is safety
    assert "forms" in safety.repaired and not safety.left and "forms" in str(safety)
    torch._dynamo.reset()
    assert lost_forms() == []
    assert make_compiler_thread_safe() is safety and forms_move() is None
    safety.undo()
    assert forms_move() is not None


def test_a_torch_whose_forms_cant_be_kept_in_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if forms_move() is None:
        pytest.skip(f"in torch {torch.__version__} forms no longer move")
    import torch._C._dynamo.eval_frame as eval_frame

    monkeypatch.delattr(eval_frame, "_set_lru_cache")
    make_torch_thread_safe()
    safety = make_compiler_thread_safe()
    assert safety is not None and "forms" in safety.left
    assert "not repaired: forms" in str(safety) and "_set_lru_cache is gone" in str(safety)


def test_without_a_repair_there_is_nothing_to_complete() -> None:
    assert make_compiler_thread_safe() is None
