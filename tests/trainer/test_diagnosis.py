"""What is told when torch's tracer or compiler fails beside threads."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch import Tensor

from trainer import threads
from trainer.diagnosis import advice, concerns_compiler, diagnosis, explain
from trainer.fx_faults import Turns, in_threads
from trainer.pipeline import Pipeline, Stage
from trainer.threads import make_torch_thread_safe


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    undo()
    yield
    undo()


def undo() -> None:
    if safety := threads.installed():
        safety.undo()


def refused_beside_a_trace() -> str:
    """What is told of a compiled function that refuses to run while the thread 'tracer' traces."""
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(1))
    turns, told = Turns(), list[str]()

    def body(x: Tensor) -> Tensor:
        turns.reach("tracing")
        turns.wait("told")
        return x + 1

    def trace() -> None:
        threading.current_thread().name = "tracer"
        torch.fx.symbolic_trace(body)

    def call() -> None:
        threading.current_thread().name = "caller"
        turns.wait("tracing")
        try:
            compiled(torch.ones(1))
            told.append(diagnosis(RuntimeError("nothing went wrong")))
        except RuntimeError as error:
            assert concerns_compiler(error)
            told.append(diagnosis(error))
        finally:
            turns.reach("told")

    assert in_threads(trace, call) == [None, None]
    return told[0]


def test_it_tells_who_traced_and_what_each_thread_did() -> None:
    told = refused_beside_a_trace()
    if "nothing went wrong" in told:
        pytest.skip(f"torch {torch.__version__} no longer refuses")
    assert "failed in the thread 'caller': RuntimeError: Detected that you are using FX" in told
    assert "tracing now: 'tracer'" in told
    assert "told that it traces: one flag for all threads: yes" in told
    assert "advice: train.fx_fix is not per-thread" in told
    assert f"torch {torch.__version__}" in told
    for name in ("'tracer'", "'caller'", "'MainThread'"):
        assert f"thread {name}:" in told
    assert "turns.wait" in told.partition("thread 'tracer':")[2].partition("\nthread ")[0]


def test_it_tells_the_flag_of_each_thread() -> None:
    make_torch_thread_safe()
    told = refused_beside_a_trace()
    line = next(line for line in told.splitlines() if line.startswith("told that it traces:"))
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        assert "'tracer' yes" in line and "'caller' no" in line
        assert "fix: torch" in told and "repaired flag" in told
    else:
        assert "each thread by itself; 'caller' no" in line
        assert "tracing now: 'tracer'" in told and "repaired metadata" in told


def test_it_tells_who_compiles() -> None:
    told: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        told.append(diagnosis(ValueError("no")))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert "compiling now: 'MainThread'" in told[0]
    assert "compiling now: no thread" in diagnosis(ValueError("no"))


def test_only_errors_of_the_compiler_are_explained_and_once() -> None:
    ours = ValueError("a row is too long")
    explain(ours)
    assert not concerns_compiler(ours) and not hasattr(ours, "__notes__")
    inside: dict[str, type[Exception]] = {"OutOfMemoryError": torch.OutOfMemoryError}
    for name, concerned in (("OutOfMemoryError", False), ("KeyError", True)):
        with pytest.raises(Exception, match="no room") as raised:
            exec(compile(f"raise {name}('no room')", "/x/torch/_inductor/compile_fx.py", "exec"), inside)
        assert concerns_compiler(raised.value) is concerned
    with pytest.raises(Exception, match="no") as caught:
        torch.fx.symbolic_trace(lambda x: [*x, int("no")])  # a proxy can't be taken apart
    explain(caught.value)
    explain(caught.value)
    assert len(caught.value.__notes__) == 1
    wrapped = RuntimeError("the target failed")
    wrapped.__cause__ = caught.value
    assert concerns_compiler(wrapped)


def refused_compilation(warmed_up: tuple[int, ...]) -> RuntimeError:
    """Of a worker's thread, whose function was compiled for these sizes and is called with another one."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False, fullgraph=True)
    for size in warmed_up:
        compiled(torch.ones(size))

    def work() -> None:
        threading.current_thread().name = "drafter-1"
        try:
            compiled(torch.ones(3))
        except Exception as error:
            explain(error)
            raise

    with torch.compiler.set_stance("fail_on_recompile"):
        (error,) = in_threads(work)
    assert isinstance(error, RuntimeError) and concerns_compiler(error)
    return error


def test_a_compilation_after_the_warm_up_names_the_worker_the_guard_and_what_to_do() -> None:
    error = refused_compilation((1, 2))
    told = error.__notes__[0].splitlines()
    assert "in the thread 'drafter-1'" in told[0]
    assert told[1].startswith("guard: ") and "/1: " in told[1] and told[1].endswith("expected 2, actual 3")
    assert told[2].startswith("guard: ") and "/0: " in told[2] and told[2].endswith("expected 1, actual 3")
    assert "after the warm-up: the guards tell" in told[3] and "python -m trainer warm" in told[3]
    never = refused_compilation(())
    assert "after the warm-up: there is no form of it" in never.__notes__[0].splitlines()[1]
    assert advice(error) == told[3].removeprefix("advice: ")


def test_the_advice_goes_by_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Detected that you are using FX to symbolically trace a dynamo-optimized function")
    assert "train.fx_fix is not per-thread" in advice(error)
    safety = make_torch_thread_safe()
    assert "selftest threads" in advice(error)
    monkeypatch.setitem(safety.left, "overlap", "bad")
    assert "could not be repaired (overlap)" in advice(error)


def test_a_stage_that_fails_in_the_tracer_says_so_from_its_own_thread() -> None:
    def stage(item: int) -> Tensor:
        return torch.fx.symbolic_trace(lambda x: [*x])(torch.ones(item))

    with (
        pytest.raises(torch.fx.proxy.TraceError) as caught,
        Pipeline([1, 2], [Stage("target", [stage])], depth=1, failed=explain) as pipeline,
    ):
        list(pipeline)
    assert "failed in the thread 'target'" in caught.value.__notes__[0]
    assert "thread 'MainThread':" in caught.value.__notes__[0]


def test_a_diagnosis_that_fails_hides_nothing() -> None:
    def stage(item: int) -> int:
        raise ValueError("the real one")

    def failed(error: BaseException) -> None:
        raise RuntimeError("of the diagnosis")

    with (
        pytest.raises(ValueError, match="the real one"),
        Pipeline([1], [Stage("s", [stage])], depth=1, failed=failed) as pipeline,
    ):
        list(pipeline)
