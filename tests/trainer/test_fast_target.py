"""The target's layers as compiled functions against the layers run by hand; tiles of documents; products in fp8."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from tiny_targets import tiny_target
from torch import Tensor

from trainer import fast_target, warm
from trainer.byhand import ByHand
from trainer.fast_target import Compile, Documents, FastLayers, as_it_is
from trainer.fp8 import narrowed, product
from trainer.refused import TargetError
from trainer.target import TargetModel
from trainer.warm import BatchShape, warm_up_targets

LAYERS = (1, 4)
NEAR = {"rtol": 1e-3, "atol": 1e-5}  # transformers' norm is in float32, whatever it gets


def exact_target(family: str) -> TargetModel:
    target = tiny_target(family)
    target.model.double()
    return target


def rows_of(*rows: Sequence[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, document ids and positions of rows with documents of these lengths, then padding."""
    documents, positions = [], []
    for lengths in rows:
        padding = size - sum(lengths)
        documents.append([n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
        positions.append([p for length in lengths for p in range(length)] + [0] * padding)
    ids = torch.randint(4, 90, (len(rows), size), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor(documents), torch.tensor(positions)


def prepared(target: TargetModel, rows: tuple[Tensor, Tensor, Tensor], *, compiled: Compile = as_it_is) -> None:
    target.prepare(*rows[0].shape, LAYERS, final=True, compiled=compiled)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_fast_layers_give_what_the_layers_run_by_hand_give(family: str) -> None:
    packed, whole = rows_of([5, 9, 2], [1, 19], size=20), rows_of([20], [20], size=20)
    plain, fast = exact_target(family), exact_target(family)
    prepared(fast, packed)
    runner = fast._runner
    assert isinstance(runner, ByHand) and isinstance(runner.fast, FastLayers)
    for rows in (packed, whole):
        torch.testing.assert_close(fast.features(*rows, LAYERS), plain.features(*rows, LAYERS), **NEAR)
        for found, expected in zip(
            fast.features_and_final(*rows, LAYERS), plain.features_and_final(*rows, LAYERS), strict=True
        ):
            torch.testing.assert_close(found, expected, **NEAR)
    # The modules compute as before, also where their weights have become views.
    other = rows_of([7], size=7)
    torch.testing.assert_close(fast.features(*other, LAYERS), plain.features(*other, LAYERS), **NEAR)


def test_only_rows_of_the_prepared_shape_go_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ran = exact_target("qwen3"), list[tuple[int, ...]]()
    run = FastLayers.run
    monkeypatch.setattr(FastLayers, "run", lambda self, x, *a, **k: ran.append(x.shape[:2]) or run(self, x, *a, **k))
    prepared(target, rows_of([20], size=20))
    ran.clear()
    for rows in (rows_of([20], size=20), rows_of([20], [20], size=20), rows_of([3, 4], size=20), rows_of([8], size=8)):
        target.features(*rows, LAYERS)
    assert ran == [(1, 20), (1, 20)]


def test_a_prepared_target_compiles_nothing_more_whatever_its_documents() -> None:
    torch._dynamo.reset()
    target = exact_target("qwen3")
    rows = rows_of([20], size=20)
    prepared(target, rows, compiled=lambda f: torch.compile(f, backend="eager", dynamic=False, fullgraph=True))
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for lengths in ([20], [1] * 20, [3, 4], [19, 1]):
                target.features_and_final(*rows_of(lengths, size=20), LAYERS)
    finally:
        torch._dynamo.reset()


def test_weights_that_lie_together_are_held_once() -> None:
    target = exact_target("qwen3")
    prepared(target, rows_of([20], size=20))
    runner: Any = target._runner
    for layer, weights in zip(target.model.model.layers, runner.fast._weights, strict=True):
        for own, held in ((layer.self_attn.v_proj, weights.qkv[2]), (layer.mlp.up_proj, weights.gate_up)):
            assert own.weight.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


def test_a_target_with_biases_is_left_as_it_is() -> None:
    target = tiny_target("qwen3", attention_bias=True)
    prepared(target, rows_of([20], size=20))
    runner: Any = target._runner
    assert runner.fast is None and fast_target.why_not(runner) == "its projections have biases"


def test_documents_end_where_the_next_begin() -> None:
    _, ids, _ = rows_of([5, 9, 2], [1, 19], size=20)
    documents = Documents.of(ids, torch.device("cpu"))
    assert documents.ends.tolist() == [0, 5, 14, 16, 20, 21, 40] and documents.longest == 19 and not documents.single
    assert Documents.of(rows_of([20], [20], size=20)[1], torch.device("cpu")).single


def test_a_product_in_fp8_is_near_and_exact_where_fp8_is() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 64), torch.randn(32, 64) * torch.logspace(-4, 2, 32)[:, None]
    exact = torch.nn.functional.linear(x, weight)
    found = product(x, narrowed(weight))
    assert found.shape == exact.shape and found.dtype == x.dtype
    error = (found - exact).norm(dim=(0, 1)) / exact.norm(dim=(0, 1))
    assert float(error.max()) < 0.09  # each row of the matrix has its own scale: small ones are as near as large ones
    whole = torch.randint(-8, 9, (4, 64)).float()
    whole[:, 0] = 448.0
    assert torch.equal(product(whole, narrowed(whole)), whole @ whole.T)
    assert torch.equal(product(torch.zeros(1, 64), narrowed(weight)), torch.zeros(1, 32))


def test_fp8_is_refused_where_it_can_not_be() -> None:
    with pytest.raises(TargetError, match=r"target.fp8 is not possible here: only a GPU multiplies in fp8"):
        tiny_target("qwen3").prepare(1, 20, LAYERS, fp8=True)


def test_features_in_fp8_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.target.fp8_why_not", lambda device: None)
    plain, fast = tiny_target("qwen3"), tiny_target("qwen3")
    rows = rows_of([20], size=20)
    fast.prepare(1, 20, LAYERS, fp8=True)
    found, exact = fast.features(*rows, LAYERS), plain.features(*rows, LAYERS)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.2


def test_targets_are_warmed_up_once_each_and_on_the_cpu_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target, shape = tiny_target("qwen3"), BatchShape(1, 20, 4, torch.float32, teacher=True)
    assert warm_up_targets([target], shape, LAYERS, say=print) == []
    # As on a GPU:
    monkeypatch.setattr(warm, "_is_gpu", lambda device: True)
    monkeypatch.setattr(warm, "compiled", as_it_is)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    said = list[str]()
    warmed = warm_up_targets([target, target], shape, LAYERS, say=said.append)
    assert [one.device for one in warmed] == ["the target on cpu"]
    assert said[-1].startswith("the target on cpu warmed up in 0.")
    runner: Any = target._runner
    assert runner.fast.shape == (1, 20)
