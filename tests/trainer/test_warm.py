"""Warming up. The CPU compiles nothing by itself: here the learners are compiled with dynamo alone, or by Inductor."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from tiny_drafters import CONFIG
from torch import Tensor

from trainer import warm
from trainer.data import make_row
from trainer.documents import Document
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.feed import all_anchors_batch, row_batch
from trainer.fx_faults import in_threads
from trainer.learner import Learner, features_of
from trainer.loss import Objective, Weighting, chunk_loss
from trainer.optim import make_optimizer
from trainer.threads import make_torch_thread_safe
from trainer.warm import BatchShape, Warmed, compile_all, warm_up

CPU = torch.device("cpu")
SHAPE = BatchShape(rows=2, row_tokens=24, anchors=5, dtype=torch.float32, teacher=False)
DRAFT = replace(CONFIG, num_layers=1, layer_types=CONFIG.layer_types[:1])


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    safety = make_torch_thread_safe()
    yield
    safety.undo()
    torch._dynamo.reset()


def compiled_learner(draft: DraftConfig = DRAFT, objective: Objective = "cross-entropy") -> Learner:
    """As on a GPU, with dynamo alone."""
    torch.manual_seed(0)
    model = DraftModel(draft)
    head = torch.randn(draft.vocab_size, draft.hidden_size)
    # 10 blocks a forward: the last chunk is smaller.
    learner = Learner(
        model, head, make_optimizer(model, lr=1e-3, weight_decay=0.0), Weighting("d-pace"),
        chunk_blocks=4, clip=1.0, objective=objective,
    )  # fmt: skip
    learner._forward = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    learner._chunk = cast(Any, torch.compile(chunk_loss, backend="eager", dynamic=False, fullgraph=True))
    return learner


class Target:
    """What a target gives, drawn anew each time."""

    device = CPU

    def embedding(self, ids: Tensor) -> Tensor:
        return torch.randn(*ids.shape, DRAFT.hidden_size)

    def features(self, ids: Tensor, *_: object) -> Tensor:
        return torch.cat([torch.randn(*ids.shape, DRAFT.hidden_size) for _ in DRAFT.target_layer_ids], dim=-1)

    def features_and_final(self, ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return self.features(ids), torch.randn(*ids.shape, DRAFT.hidden_size)


def trains(learner: Learner, teacher: bool) -> None:
    """Some steps and a measurement at all anchors, as a training has them: short documents, rows of padding."""

    def document(length: int) -> Document:
        return Document(torch.randint(0, 120, (length,)).numpy(), torch.ones(length, dtype=torch.bool).numpy())

    target = cast(Any, Target())
    rows = [[make_row(0, [document(9), document(11)], 24), make_row(1, [], 24)], [make_row(2, [document(24)], 24)] * 2]
    for number, both in enumerate(rows):
        learner.learn(features_of(target, row_batch(both, 5, number), DRAFT, CPU, anchors=5, teacher=teacher))
        learner.update(1e-3)
        everywhere = features_of(target, all_anchors_batch(both, 5), DRAFT, CPU, anchors=5, teacher=teacher)
        assert everywhere.forwards() > 2
        learner.measure_all(everywhere)


def quietly(_: str) -> None:
    pass


def raised(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
def test_nothing_compiles_in_a_thread_that_trains_afterwards(objective: Objective) -> None:
    learner, teacher = compiled_learner(objective=objective), objective != "cross-entropy"
    state, weights = torch.get_rng_state(), {n: value.clone() for n, value in learner.model.state_dict().items()}
    compile_all([learner], replace(SHAPE, teacher=teacher), say=quietly)

    # It leaves no trace in the drafter, nor in random numbers.
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in learner.model.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert not learner.optimizer.state and learner.step_terms is None

    with torch.compiler.set_stance("fail_on_recompile"):
        raised(in_threads(lambda: trains(learner, teacher)))
        # And what was not warmed up is refused in the thread that needs it, with the guard.
        more = warm.made_up_batch(DRAFT, replace(SHAPE, anchors=6, teacher=teacher), CPU)
        (error,) = in_threads(lambda: learner.learn(more))
        assert isinstance(error, RuntimeError) and "fail_on_recompile" in str(error)
        assert "expected 20, actual 24" in str(error)


def squared(x: Tensor) -> Tensor:
    return x * x


class Stub:
    """A learner whose warm-up calls functions."""

    device = CPU
    model = type("Model", (), {"config": DRAFT})

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = calls

    def warm_up(self, _: object) -> None:
        for call in self._calls:
            call()


def stubs(*learners: Stub) -> list[Learner]:
    return cast("list[Learner]", list(learners))


def test_three_learners_may_have_more_forms_than_dynamo_keeps_on_its_own() -> None:
    compiled = torch.compile(squared, backend="eager", dynamic=False, fullgraph=True)
    threes = [Stub(*(lambda n=n: compiled(torch.ones(n)) for n in range(k, k + 4))) for k in (1, 11, 21)]
    with pytest.raises(Exception, match="Hard failure due to fullgraph=True"):
        for learner in threes:
            learner.warm_up(None)
    torch._dynamo.reset_code(squared.__code__)
    compile_all(stubs(*threes), SHAPE, say=quietly)
    with torch.compiler.set_stance("fail_on_recompile"):  # in a thread, too, with dynamo's own limit
        raised(in_threads(*(lambda learner=learner: learner.warm_up(None) for learner in threes)))


@pytest.mark.parametrize("teacher", [False, True])
def test_the_batch_it_makes_up_is_laid_out_as_a_trainings(teacher: bool) -> None:
    made = warm.made_up_batch(DRAFT, replace(SHAPE, teacher=teacher), CPU)
    rows = row_batch([make_row(0, [], 24)] * 2, 5, 0)
    real = features_of(cast(Any, Target()), rows, DRAFT, CPU, anchors=5, teacher=teacher)
    assert made.forwards() == real.forwards() == 1
    for one, other in zip(made._on_device(), real._on_device(), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert int(made.blocks.keep_BN.sum()) == 10  # blocks that learn something


def test_a_stop_waits_for_one_learner_only() -> None:
    done: list[str] = []

    def check() -> None:
        if done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compile_all(
            stubs(*[Stub(lambda: done.append(threading.current_thread().name))] * 3), SHAPE, say=quietly, check=check
        )
    assert done == [threading.current_thread().name]


def test_each_learner_is_allowed_the_time_of_a_cold_compilation() -> None:
    """Less than that many seconds without a beat are no hang, whatever layout.stall_seconds says."""
    order: list[object] = []

    @contextlib.contextmanager
    def allow(seconds: float) -> Iterator[None]:
        order.append(seconds)
        yield
        order.append("over")

    compile_all(stubs(*[Stub(lambda: order.append("compiled"))] * 2), SHAPE, say=quietly, allow=allow)
    assert order == [900.0, "compiled", "over"] * 2


def test_an_error_names_device_and_drafter() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        compile_all(stubs(Stub(), Stub(fails)), SHAPE, say=quietly)
    assert caught.value.worker == "drafter-1"  # for shortage.py
    assert caught.value.__notes__ == ["while cpu was warmed up, in which nothing else runs"]


def test_on_the_cpu_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "use_compile_cache", lambda say: pytest.fail("no cache is needed"))
    said: list[str] = []
    assert warm_up(stubs(Stub(lambda: pytest.fail("nothing is compiled"))), SHAPE, say=said.append) == [] and not said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor uses what torch is about to drop
def test_it_tells_what_was_compiled_and_what_was_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor, and products, for which it makes no kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(lambda x: x @ x, dynamic=False)

    def warmed(*sizes: int) -> Warmed:
        torch._dynamo.reset()  # as a new process has it
        said: list[str] = []
        (one,) = compile_all(
            stubs(*(Stub(lambda n=n: compiled(torch.ones(n, n))) for n in sizes)), SHAPE, say=said.append
        )
        assert said == [str(one)]
        return one

    cold, again, partly = warmed(4), warmed(4), warmed(4, 5)
    assert (cold.compiled, cold.found, cold.state) == (1, 0, "cold")
    assert (again.compiled, again.found, again.state) == (0, 1, "warm")
    assert (partly.compiled, partly.found, partly.state) == (1, 1, "partly warm")
    assert str(replace(cold, seconds=41.234)) == (
        "cpu warmed up in 41.2 s, cold: 1 graphs compiled, 0 from the compile cache"
    )
    assert any(tmp_path.iterdir())
