"""On a GPU: what computes there, fast, against the same in float64 on the CPU. Skipped without a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_cuda_attention import ANCHORS, LAYERS, ROW, error, given_for
from tiny_drafters import drafter
from tiny_targets import tiny_target
from torch import Tensor

from trainer.blocks import dense_mask, tile_lists, tile_mask
from trainer.compiled import compiled
from trainer.draft_kernels import NONE, Kernels, arrange, kernels_for, mlp
from trainer.fast_draft import HOPPER, Shape, Turns, WorkingCopy, arranged, forward
from trainer.head_rows import rows_in_place, takes
from trainer.learner import Learner
from trainer.loss import Objective, Weighting, chunk_loss
from trainer.optim import make_optimizer
from trainer.threads import nothing_compiles
from trainer.warm import BatchShape, made_up_batch, made_up_rows, warm_up

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


ALL = Kernels(heads=True, mlp=True)
WAYS = {"torch's": (False, NONE), "merged": (True, NONE), "kernels": (False, ALL), "all": (True, ALL)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [None, True])
def test_the_working_copy_on_the_gpu_is_the_drafter_in_float64(way: str, causal: bool | None) -> None:
    """Forward and backward, then: what lies from an anchor on changes no bit of its block."""
    config, (merged, kernels) = replace(LAYERS, block_size=16, causal=causal), WAYS[way]
    options = tuple(sorted(HOPPER.items())) if way == "all" else ()
    exact_model, exact_given = drafter(config).requires_grad_(True), given_for(config, torch.float64)
    blocks = exact_given.blocks()
    masks = tuple(dense_mask(blocks, ROW, sight) for sight in config.sights)
    exact = exact_model(
        exact_given.features, exact_given.embeds(blocks), exact_given.positions, blocks.positions_BQ, masks
    )
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights *= exact_given.keep[0].repeat_interleave(16)[None, :, None]
    (exact * weights).sum().backward()

    model = drafter(config, torch.float32).to(GPU).requires_grad_(True)
    working, run = WorkingCopy(model, torch.bfloat16), compiled(forward)
    many = config.num_kv_heads if merged else 1

    def hidden(features: Tensor) -> Tensor:
        here = blocks.to(GPU)
        attention = tuple(tile_mask(here, ROW, sight, many) for sight in config.sights)
        anchors = exact_given.embeds(blocks).unflatten(1, (len(exact_given.anchors), -1))[:, :, 0]
        return run(
            working.weights, working.shape, model.rotary.frequencies, features.to(GPU, torch.bfloat16),
            anchors.to(GPU, torch.bfloat16), exact_given.table[config.mask_token_id].to(GPU, torch.bfloat16),
            exact_given.positions.to(GPU), here.positions_BQ, attention, merged, options, kernels,
        )  # fmt: skip

    found = hidden(exact_given.features)
    kept = exact_given.keep[0].repeat_interleave(16)
    assert error(found[0, kept.to(GPU)].detach(), exact[0, kept].detach()) < 0.05
    (found.double() * weights.to(GPU)).sum().backward()
    gradients = {id(w.master): w.gradient for w in working.weights_of(list(model.parameters()))}
    for (name, parameter), theirs in zip(model.named_parameters(), exact_model.parameters(), strict=True):
        assert error(gradients[id(parameter)], cast(Tensor, theirs.grad)) < 0.05, name
    moved = exact_given.features.clone()
    moved[0, 131:] += 100.0
    after, starts = hidden(moved), [0, 100, 130, 280]
    changed = (after != found)[0].unflatten(0, (-1, 16)).flatten(1).any(1).tolist()
    for n, place in enumerate(ANCHORS):
        start = max(start for start in starts if start <= place)
        assert changed[n] == (bool(exact_given.keep[0, n]) and max(131, start) < place), place


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, document ids and positions of a row of 512 tokens."""
    rest = 512 - sum(lengths)
    documents = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * rest
    positions = [p for length in lengths for p in range(length)] + [0] * rest
    ids = torch.randint(4, 90, (1, 512), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor([documents]), torch.tensor([positions])


@pytest.mark.parametrize("lengths", [[512], [100, 30, 150, 180], [1, 2, 300]], ids=str)
def test_the_compiled_target_is_the_one_run_by_hand(lengths: list[int]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    exact, target, rows = tiny_target("qwen3", **sizes), tiny_target("qwen3", **sizes), packed(lengths)
    exact.model.double()
    target.model.to(GPU, torch.bfloat16)
    plain = target.features(*rows, (1, 3)).float().cpu()
    target.prepare(1, 512, (1, 3), final=True, compiled=compiled)
    assert cast(Any, target._runner).fast is not None
    with nothing_compiles(GPU):
        found, final = (x.float().cpu() for x in target.features_and_final(*rows, (1, 3)))
        again = target.features(*rows, (1, 3)).float().cpu()
    expected, last = exact.features_and_final(*rows, (1, 3))
    seen = rows[1][0] >= 0
    allowed = max(0.03, 1.5 * error(plain[0, seen], expected[0, seen]))
    assert error(found[0, seen], expected[0, seen]) < allowed
    assert error(final[0, seen], last[0, seen]) < 2 * allowed
    assert again.equal(found)  # to the bit, each time


def test_features_in_fp8_on_the_gpu_are_near() -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    exact, target, rows = tiny_target("qwen3", **sizes), tiny_target("qwen3", **sizes), packed([200, 100])
    target.model.to(GPU, torch.bfloat16)
    target.prepare(1, 512, (1, 3), fp8=True, compiled=compiled)
    found, seen = target.features(*rows, (1, 3)).float().cpu(), rows[1][0] >= 0
    assert 1e-3 < error(found[0, seen], exact.features(*rows, (1, 3))[0, seen].double()) < 0.2


def learner_of(*, copies: bool) -> Learner:
    torch.manual_seed(0)
    model = drafter(replace(LAYERS, block_size=16), torch.float32).to(GPU).requires_grad_(True)
    head = torch.randn(128, 64, device=GPU, dtype=torch.bfloat16)
    return Learner(
        model, head, make_optimizer(model, lr=1e-3, weight_decay=0.1), Weighting("d-pace"), chunk_blocks=8, clip=1.0,
        copies=copies,
    )  # fmt: skip


def steps(*, copies: bool, batches: int = 1) -> tuple[list[tuple[float, ...]], list[Tensor]]:
    learner = learner_of(copies=copies)
    assert kernels_for(torch.zeros(1, device=GPU), LAYERS.head_dim, tokens=(ROW, 24 * 16)) == ALL
    shape = BatchShape(1, ROW, 24, torch.bfloat16, teacher=False)
    warm_up([learner], shape, say=lambda line: None)
    figures: list[tuple[float, ...]] = []
    with nothing_compiles(GPU):
        for step in range(3):
            for number in range(batches):
                lengths = [[ROW], [100, 200, 150], [40] * 10][(step + number) % 3]
                rows = made_up_rows(shape, lengths, 120)
                learner.learn(made_up_batch(learner.model.config, shape, GPU, rows))
            figures.append(learner.update(1e-3).read()[:4])
        learner.measure_all(made_up_batch(learner.model.config, shape, GPU))
    return figures, [p.detach().cpu() for p in learner.model.parameters()]


@pytest.mark.parametrize("batches", [1, 3])
def test_steps_on_copies_are_near_those_without_and_the_same_each_time(batches: int) -> None:
    plain, fast, again = (steps(copies=copies, batches=batches) for copies in (False, True, True))
    assert fast[0] == again[0] and all(a.equal(b) for a, b in zip(fast[1], again[1], strict=True))
    for one, other in zip(plain[0], fast[0], strict=True):
        assert other == pytest.approx(one, rel=0.05, abs=0.01)  # a single token weighs 0.002


def test_no_kernel_is_chosen_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last bits would differ from GPU to GPU, and with them replicas. Nothing is found compiled here."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.utils import fresh_cache

    chosen: list[str] = []
    choose = CachingAutotuner.benchmark_all_configs

    def told(self: Any, *given: Any, **named: Any) -> Any:
        chosen.append(self.fn.__name__)
        return choose(self, *given, **named)

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", told)
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    target = tiny_target("qwen3", **sizes)
    target.model.to(GPU, torch.bfloat16)
    with fresh_cache():
        steps(copies=True)
        target.prepare(1, 512, (1, 3), compiled=compiled)
        target.features(*packed([100, 30]), (1, 3))
        torch.cuda.synchronize()
    assert chosen == []


def test_rows_longer_than_a_gpu_merges_are_learned_from_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows as long and as short ones: the attention of both kinds, in a step as training has it."""
    read: list[tuple[float, ...]] = []
    for longest in (ROW, ROW - 1):
        monkeypatch.setattr("trainer.fast_draft.LONG", longest)
        torch.compiler.reset()
        read.append(steps(copies=True)[0][-1])
    for one, other in zip(*read, strict=True):
        assert other == pytest.approx(one, rel=0.02, abs=0.01)


def test_the_tiles_are_the_same_compiled() -> None:
    blocks = given_for(replace(LAYERS, block_size=16), torch.float32).blocks().to(GPU)
    run, seen = compiled(tile_lists), LAYERS.sights
    for many in (1, 2):
        for sight in seen:
            words = blocks.anchors_BN, blocks.starts_BN, blocks.keep_BN, 16, ROW, sight, many
            assert all(a.equal(b) for a, b in zip(run(*words), tile_lists(*words), strict=True))


@pytest.mark.parametrize("columns", [300, 4096, 8192, 9001])
def test_rows_of_logits_in_place_are_those_in_float64(columns: int) -> None:
    draw = torch.Generator(GPU).manual_seed(3)
    logits = (torch.randn(40, columns, generator=draw, device=GPU) * 4).bfloat16()
    assert takes(logits) and not takes(logits.half())
    labels = torch.randint(0, columns, (40,), generator=draw, device=GPU)
    labels[:20] = logits[:20].argmax(-1)
    logits[10:15, 3] = logits[10:15].amax(-1)  # a tie: the first is the best one
    labels[20], labels[21] = 0, columns - 1
    wide = logits.double()
    total = wide.logsumexp(-1)
    expected = wide.softmax(-1)
    expected[torch.arange(40), labels] -= 1
    told = wide.gather(1, labels[:, None])[:, 0]
    listed = cast(list[list[float]], wide.tolist())
    first = torch.tensor([row.index(max(row)) for row in listed], device=GPU)
    with torch.no_grad():
        kept = logits.clone()
        loss, right = rows_in_place(logits, labels, gradient=False)
        assert logits.equal(kept)
        again, also = rows_in_place(logits, labels, gradient=True)
    assert again.equal(loss) and right.equal(first == labels) and also.equal(right)
    assert torch.allclose(loss.double(), total - told, atol=1e-5, rtol=1e-5)
    assert error(logits, expected.cpu()) < 0.004


@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
@pytest.mark.parametrize("columns", [128, 9001])
def test_a_chunk_s_loss_compiled_is_that_in_float64(objective: Objective, columns: int) -> None:
    draw = torch.Generator().manual_seed(4)
    hidden, teacher = (torch.randn(6, 15, 64, generator=draw) for _ in range(2))
    head = torch.randn(columns, 64, generator=draw) * 0.3
    labels, mask = torch.randint(0, columns, (6, 15), generator=draw), torch.rand(6, 15, generator=draw) < 0.9
    hidden, teacher, head = (x.bfloat16() for x in (hidden, teacher, head))
    soft, run = objective != "cross-entropy", compiled(chunk_loss)

    def given(device: torch.device, dtype: torch.dtype) -> list[Any]:
        tensors = [x.to(device, dtype) for x in (hidden, head, teacher)]
        last = tensors[2] if soft else None
        return [tensors[0], tensors[1], labels.to(device), mask.to(device), last, Weighting("d-pace"), objective]

    with torch.no_grad():
        exact = chunk_loss(*given(torch.device("cpu"), torch.float64), True)
        for wants_grad in (True, False):
            found = run(*given(GPU, torch.bfloat16), wants_grad)
            assert float(found[0]) == pytest.approx(float(exact[0]), rel=0.01)
            assert float(found[1]) == pytest.approx(float(exact[1]), rel=0.01)
            if wants_grad:
                assert error(found[3], exact[3]) < 0.02


@pytest.mark.parametrize("merged", [False, True])
def test_heads_of_several_rows_are_arranged_as_in_torch_s_words(merged: bool) -> None:
    """Three rows of 32 block tokens and 48 of context, in two layers' product; forward and backward."""
    draw = torch.Generator(GPU).manual_seed(6)
    groups, subs, size = 2, 3, 64
    widths = (subs * groups + 2 * groups) * size, 2 * 2 * groups * size
    leaves = [torch.randn(3, n, w, generator=draw, device=GPU) for n, w in zip((32, 48), widths, strict=True)]
    leaves += [torch.randn(size, generator=draw, device=GPU) for _ in range(2)]
    angles = [torch.randn(3, n, size // 2, generator=draw, device=GPU) for n in (32, 48)]
    turns = [(x.cos(), x.sin()) for x in angles]
    whole = Turns(*((torch.cat((c, c), -1)[:, None], torch.cat((s, s), -1)[:, None]) for c, s in turns))
    shape = Shape(subs * groups, groups, size, 1e-6, 1.0, (0,))

    def run(kernel: bool) -> tuple[list[Tensor], list[Tensor]]:
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        qkv, kv = own[0], own[1].split(2 * groups * size, dim=-1)[1]
        if kernel:
            found = arrange(qkv, kv, own[2], own[3], *turns, eps=1e-6, groups=groups, merged=merged)
        else:
            layer: Any = SimpleNamespace(q_norm=own[2], k_norm=own[3])
            found = arranged(qkv, kv, layer, shape, whole, merged=merged)
        weights = [torch.randn(x.shape, generator=torch.Generator(GPU).manual_seed(7), device=GPU) for x in found]
        sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()  # type: ignore[union-attr]
        return [x.detach() for x in found], [cast(Tensor, leaf.grad) for leaf in own]

    for mine, theirs in zip(run(True), run(False), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.shape == other.shape
            assert error(one, other.double().cpu()) < 1e-5


def test_the_mlp_takes_as_many_rows_as_a_large_step_has() -> None:
    gate_up = torch.randn(1, 65_536, 2 * 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(32, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    found = mlp(gate_up, down)
    found.float().square().sum().backward()
    wide = gate_up.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    exact = (torch.nn.functional.silu(gate) * up) @ down.detach().double().T
    exact.square().sum().backward()
    assert error(found.detach(), exact.detach().cpu()) < 0.01
    assert error(cast(Tensor, gate_up.grad), cast(Tensor, wide.grad).cpu()) < 0.02
