"""On a GPU: what computes there, fast, against the same in float64 on the CPU. Skipped without a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from test_cuda_attention import ANCHORS, LAYERS, ROW, error, given_for
from tiny_drafters import drafter
from tiny_targets import tiny_target
from torch import Tensor

from trainer.blocks import dense_mask, tile_lists, tile_mask
from trainer.compiled import compiled
from trainer.fast_draft import HOPPER, WorkingCopy, forward
from trainer.head_rows import rows_in_place
from trainer.learner import Learner
from trainer.loss import Weighting
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


WAYS = {"torch's": (False, False), "merged": (True, False), "kernels": (False, True), "all": (True, True)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [None, True])
def test_the_working_copy_on_the_gpu_is_the_drafter_in_float64(way: str, causal: bool | None) -> None:
    """Forward and backward, then: what lies from an anchor on changes no bit of its block."""
    config, (merged, fused) = replace(LAYERS, block_size=16, causal=causal), WAYS[way]
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
            exact_given.positions.to(GPU), here.positions_BQ, attention, merged, options, fused,
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


def test_the_tiles_are_the_same_compiled() -> None:
    blocks = given_for(replace(LAYERS, block_size=16), torch.float32).blocks().to(GPU)
    run, seen = compiled(tile_lists), LAYERS.sights
    for many in (1, 2):
        for sight in seen:
            words = blocks.anchors_BN, blocks.starts_BN, blocks.keep_BN, 16, ROW, sight, many
            assert all(a.equal(b) for a, b in zip(run(*words), tile_lists(*words), strict=True))


@pytest.mark.parametrize(("columns", "dtype"), [(300, torch.bfloat16), (4096, torch.float16), (9001, torch.bfloat16)])
def test_rows_of_logits_in_place_are_those_in_float64(columns: int, dtype: torch.dtype) -> None:
    draw = torch.Generator(GPU).manual_seed(3)
    logits = (torch.randn(40, columns, generator=draw, device=GPU) * 4).to(dtype)
    labels = torch.randint(0, columns, (40,), generator=draw, device=GPU)
    labels[:20] = logits[:20].argmax(-1)
    logits[10:15, 3] = logits[10:15].amax(-1)  # a tie: the first is the best one
    labels[20], labels[21] = 0, columns - 1
    wide = logits.double()
    total = wide.logsumexp(-1)
    expected = wide.softmax(-1)
    expected[torch.arange(40), labels] -= 1
    told = wide.gather(1, labels[:, None])[:, 0]
    first = torch.tensor([row.index(max(row)) for row in wide.tolist()], device=GPU)
    with torch.no_grad():
        kept = logits.clone()
        loss, right = rows_in_place(logits, labels, gradient=False)
        assert logits.equal(kept)
        again, _ = rows_in_place(logits, labels, gradient=True)
    assert again.equal(loss) and right.equal(first == labels)
    assert torch.allclose(loss.double(), total - told, atol=1e-5, rtol=1e-5)
    assert error(logits, expected.cpu()) < 0.004
