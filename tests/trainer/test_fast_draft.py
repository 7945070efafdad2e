"""The drafter on matrices of its own against draft.py's: forward, gradients, masks of merged heads, whole steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from test_learner import ROWS
from tiny_drafters import CONFIG, KINDS, YARN, Given, drafter
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.blocks import TILE, Blocks, dense_mask, make_blocks, tile_mask
from trainer.data import Row
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.draft_kernels import NONE
from trainer.fast_draft import WorkingCopy, attend, attention_of, by_token, forward, merge
from trainer.features import FeatureBatch
from trainer.feed import row_batch
from trainer.learner import Learner, features_of
from trainer.loss import Weighting
from trainer.optim import make_optimizer
from trainer.replicas import Replicas
from trainer.target import TargetModel, load_target
from trainer.threads import make_torch_thread_safe
from trainer.update import Weight, adamw, update_weights
from trainer.warm import BatchShape, compile_all

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def exact_target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float64)


def fast(working: WorkingCopy, model: DraftModel, row: Given, blocks: Blocks) -> Tensor:
    masks = tuple(dense_mask(blocks, row.row_tokens, sight) for sight in row.config.sights)
    anchors = row.embeds(blocks).unflatten(1, (len(row.anchors), -1))[:, :, 0]
    return forward(
        working.weights, working.shape, model.rotary.frequencies, row.features, anchors,
        row.table[row.config.mask_token_id], row.positions, blocks.positions_BQ, masks, False, (), NONE,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "yarn"])
def test_forward_and_gradients_are_the_drafters_own(kind: str) -> None:
    config = KINDS.get(kind) or replace(CONFIG, rope_scaling=YARN)
    model, row = drafter(config).requires_grad_(True), Given([9, 12], [0, 4, 8, 9, 15, 20], config=config)
    blocks = row.blocks()
    hidden = row.hidden(model, blocks)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (hidden * weights).sum().backward()
    expected = {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    working = WorkingCopy(model, torch.float64)
    found = fast(working, model, row, blocks)
    torch.testing.assert_close(found[0].unflatten(0, (6, -1)), hidden)
    (found[0].unflatten(0, (6, -1)) * weights).sum().backward()
    gradients = {id(w.master): w.gradient for w in working.weights_of(list(model.parameters()))}
    assert len(gradients) == len(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[id(parameter)], expected[name], msg=name)

    # Added up twice: the sums of two batches, where the trained weights have theirs. (Norms have theirs there anyway.)
    working.add_up()
    fast(working, model, row, blocks)[0].unflatten(0, (6, -1)).mul(weights).sum().backward()
    working.add_up()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(cast(Tensor, parameter.grad), 2 * expected[name], msg=name)
    assert all(copy.grad is None for copy in working.copies)


def test_copies_follow_the_weights_whoever_changes_them() -> None:
    model = drafter(CONFIG, torch.float32)
    working = WorkingCopy(model, torch.bfloat16)
    assert all(place.part(place.copy).equal(place.master.bfloat16()) for place in working._places.values())
    other = drafter(CONFIG, torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.load_state_dict(other.state_dict())
    before = working.copies[1].clone()
    working.refresh()
    assert not before.equal(working.copies[1])
    assert all(place.part(place.copy).equal(place.master.bfloat16()) for place in working._places.values())


# --- masks ---------------------------------------------------------------------------------------------------------


def shown(mask: BlockMask, queries: int, keys: int, *, transposed: bool) -> Tensor:
    """What a kernel would show, from the lists of one side."""
    dense = torch.zeros(queries, keys, dtype=torch.bool)
    said: Any = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys))
    sides = [(mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True)]
    if transposed:
        sides = [(mask.q_num_blocks, mask.q_indices, False), (mask.full_q_num_blocks, mask.full_q_indices, True)]
    for counts, places, whole in sides:
        assert counts is not None and places is not None
        for line in range(counts.shape[2]):
            for place in places[0, 0, line, : int(counts[0, 0, line])].tolist():
                query, key = (place, line) if transposed else (line, place)
                here = slice(query * TILE, (query + 1) * TILE), slice(key * TILE, (key + 1) * TILE)
                assert not dense[here].any(), "a tile that is listed twice"
                dense[here] = True if whole else said[here]
    return dense


@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2**32),
    st.sampled_from(list(KINDS)),
)
def test_tiles_of_merged_heads_show_what_the_dense_mask_shows(
    lengths: list[int], many: int, seed: int, kind: str
) -> None:
    row_tokens = 256
    config = replace(KINDS[kind], block_size=16, sliding_window=40 if KINDS[kind].sliding_window else None)
    tokens = min(sum(lengths), row_tokens)
    draw = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, tokens, (1, 16), generator=draw).sort().values
    numbers = [n for n, length in enumerate(lengths) for _ in range(length)][:row_tokens]
    places = [p for length in lengths for p in range(length)][:row_tokens]
    ids = torch.tensor([numbers + [-1] * (row_tokens - tokens)])
    positions = torch.tensor([places + [0] * (row_tokens - tokens)])
    keep = torch.rand(1, 16, generator=draw) < 0.8
    blocks = make_blocks(
        ids.clamp(min=0), ids >= 0, ids, positions, anchors, keep, block_size=16, mask_token_id=1
    )  # fmt: skip
    queries, keys = 256, row_tokens + 256
    for sight in config.sights:
        exact = dense_mask(blocks, row_tokens, sight)[0, 0]
        mask = tile_mask(blocks, row_tokens, sight, many)
        assert mask.seq_lengths == (many * queries, many * keys)
        expected = torch.block_diag(*[exact.int()] * many).bool()
        for transposed in (False, True):
            found = shown(mask, many * queries, many * keys, transposed=transposed)
            assert found.equal(expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_merged_heads_attend_as_single_ones() -> None:
    row = Given([60, 30], [0, 5, 20, 44, 59, 60, 70, 88], row_tokens=128, config=replace(CONFIG, block_size=16))
    blocks = row.blocks()
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, n, 8, generator=draw, dtype=torch.float64) for h, n in ((6, 128), (3, 256), (3, 256)))
    exact = by_token(attend(q, k, v, dense_mask(blocks, 128), ()), 1)
    assert exact.equal(attend(q, k, v, dense_mask(blocks, 128), ()).transpose(1, 2).flatten(2))
    for many in (1, 3):
        mask = tile_mask(blocks, 128, merged_heads=many)
        given = merge(q, k, v) if many > 1 else (q, k, v)
        found = by_token(attend(*given, mask, ()), many)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_heads_are_merged_on_whole_tiles_only() -> None:
    row = Given([20], [0, 5])
    with pytest.raises(ValueError, match="8 queries on 32 keys are no whole tiles of 128: heads can't be merged"):
        tile_mask(row.blocks(), 24, merged_heads=2)


# --- steps ---------------------------------------------------------------------------------------------------------


def test_the_update_is_adamw_with_decay_and_leaves_all_as_it_was_when_it_is_not_taken() -> None:
    torch.manual_seed(0)
    own = [torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), torch.nn.Parameter(torch.randn(4).double())]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in own]

    def optimizer_of(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.AdamW:
        groups = [{"params": [parameters[0]], "weight_decay": 0.1}, {"params": [parameters[1]], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999))

    ours, reference = optimizer_of(own), optimizer_of(theirs)
    copy = torch.empty(5, 3, dtype=torch.bfloat16)
    for step in range(6):
        gradients = [torch.randn_like(p) * 10 ** (step - 3) for p in own]
        lr, scale = 1e-2 / (step + 1), torch.tensor(0.5, dtype=torch.float64)
        weights = [Weight(own[0], gradients[0], copy), Weight(own[1], gradients[1], None)]
        held = [p.detach().clone() for p in own]
        bad = [replace(weight, gradient=torch.full_like(weight.gradient, torch.nan)) for weight in weights]
        before = {k: [t.clone() for t in s.values()] for k, s in enumerate(ours.state.values())}
        with torch.no_grad():
            update_weights(ours, bad, lr=lr, scale=scale, good=torch.tensor(False))
        assert all(p.equal(h) for p, h in zip(own, held, strict=True))
        for number, state in enumerate(ours.state.values()):
            assert not before or all(t.equal(b) for t, b in zip(state.values(), before[number], strict=True))
        with torch.no_grad():
            update_weights(ours, weights, lr=lr, scale=scale, good=torch.tensor(True))
        for group in reference.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient * scale
        reference.step()
        for mine, other in zip(own, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(ours.state[mine][key], reference.state[other][key], rtol=1e-12, atol=0)
        assert copy.equal(own[0].detach().bfloat16())


def learner_of(target: TargetModel, *, copies: bool = True, clip: float = 0.05) -> Learner:
    torch.manual_seed(0)
    model = DraftModel(target.draft_config(2, 4, (1, 2, 3))).to(target.head_weight.dtype)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    weighting = Weighting("d-pace")
    return Learner(model, target.head_weight, optimizer, weighting, chunk_blocks=16, clip=clip, copies=copies)


def batch_of(target: TargetModel, learner: Learner, rows: Sequence[Row], replica: int = 0) -> FeatureBatch:
    made = replace(row_batch(rows, 20, 0), replica=replica)
    return features_of(target, made, learner.model.config, CPU)


def same(one: Learner, other: Learner, tolerance: float = 1e-9) -> None:
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)
        assert a.grad is None
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(one.optimizer.state[a][key], other.optimizer.state[b][key], msg=name)


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_steps_of_one_and_of_many_batches_are_those_without_copies(exact_target: TargetModel, clip: float) -> None:
    plain, working = (learner_of(exact_target, copies=copies, clip=clip) for copies in (False, True))
    for batches in ([[ROWS[1]]], [[ROWS[0]], [ROWS[2]], [ROWS[3]]], [ROWS], [[ROWS[3]]]):
        both = []
        for learner in (plain, working):
            for rows in batches:
                learner.learn(batch_of(exact_target, learner, rows))
            both.append(learner.update(1e-2).read())
        assert both[0].finite and both[0][:4] == pytest.approx(both[1][:4], rel=1e-9)
        same(working, plain)
    measured = [
        learner.measure_all(batch_of(exact_target, learner, ROWS)).terms.figures() for learner in (plain, working)
    ]
    torch.testing.assert_close(measured[0], measured[1])


def test_a_step_that_is_not_finite_changes_nothing(exact_target: TargetModel) -> None:
    learner = learner_of(exact_target)
    learner.learn(batch_of(exact_target, learner, [ROWS[1]]))
    learner.update(1e-2)
    held = [p.detach().clone() for p in learner.model.parameters()]
    copies = [copy.detach().clone() for copy in cast(WorkingCopy, learner._working).copies]
    batch = batch_of(exact_target, learner, [ROWS[1]])
    batch.features_BSF[0, 3] = torch.inf
    learner.learn(batch)
    assert not learner.update(1e-2).read().finite
    assert all(p.equal(h) for p, h in zip(learner.model.parameters(), held, strict=True))
    assert all(c.equal(h) for c, h in zip(cast(WorkingCopy, learner._working).copies, copies, strict=True))
    learner.learn(batch_of(exact_target, learner, [ROWS[1]]))
    assert learner.update(1e-2).read().finite


@pytest.mark.parametrize("optimizer", ["replicated", "sharded"])
def test_replicas_with_copies_do_what_one_does(exact_target: TargetModel, optimizer: Any) -> None:
    alone = learner_of(exact_target)
    shared = [learner_of(exact_target) for _ in range(2)]
    with Replicas(shared, optimizer=optimizer, check_every=1) as replicas:
        for _ in range(3):
            for number, row in enumerate(ROWS):
                alone.learn(batch_of(exact_target, alone, [row]))
                replicas.learn(batch_of(exact_target, shared[number % 2], [row], number % 2))
            expected, found = alone.update(1e-2).read(), replicas.update(1e-2).read()
            assert found[:4] == pytest.approx(expected[:4], rel=1e-9)
        replicas.check()
    for learner in shared:
        for a, b in zip(learner.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_all_of_it_compiles_whole_and_nothing_afterwards() -> None:
    """As on a GPU, with dynamo alone: forward, loss, update, the tiles' lists."""
    torch._dynamo.reset()
    safety = make_torch_thread_safe()
    draft = replace(CONFIG, num_layers=1, layer_types=CONFIG.layer_types[:1], vocab_size=256)

    def whole(function: Callable[..., Any]) -> Callable[..., Any]:
        return cast(Any, torch.compile(function, backend="eager", dynamic=False, fullgraph=True))

    try:
        learner = compiled_learner(draft, whole)
        compile_all([learner], BatchShape(2, 24, 5, torch.float32, teacher=False), say=lambda line: None)
        assert not learner.optimizer.state and all(p.grad is None for p in learner.model.parameters())
        with torch.compiler.set_stance("fail_on_recompile"):
            trains(learner, draft)
    finally:
        safety.undo()
        torch._dynamo.reset()


def compiled_learner(draft: DraftConfig, whole: Callable[[Any], Any]) -> Learner:
    torch.manual_seed(0)
    model = DraftModel(draft)
    head = torch.randn(draft.vocab_size, draft.hidden_size)
    learner = Learner(
        model, head, make_optimizer(model, lr=1e-3, weight_decay=0.0), Weighting("d-pace"),
        chunk_blocks=4, clip=1.0, copies=True,
    )  # fmt: skip
    learner._working = WorkingCopy(model, torch.bfloat16)  # gradients of one batch and sums are of two types then
    learner._forward, learner._step = whole(learner._forward), whole(adamw)
    return learner


def trains(learner: Learner, draft: DraftConfig) -> None:
    """Steps of one batch and of two, and a measurement."""
    from test_warm import Target

    target: Any = Target()
    for batches in (1, 2, 1):
        for _ in range(batches):
            learner.learn(features_of(target, row_batch(ROWS[:2], 5, 0), draft, CPU, anchors=5))
        learner.update(1e-3)
    learner.measure_all(features_of(target, row_batch(ROWS[:2], 5, 0), draft, CPU, anchors=5))


@pytest.mark.parametrize(
    ("capability", "head_dim", "row_tokens", "merged", "forward", "backward"),
    [
        ((9, 0), 128, 4096, True, True, True),
        ((9, 0), 64, 8192, True, True, True),
        ((9, 0), 128, 8320, False, True, False),  # where the pieces of one head fill the GPU
        ((9, 0), 256, 4096, True, False, False),
        ((9, 0), 256, 16384, True, False, False),
        ((8, 0), 128, 16384, True, False, False),  # not measured there
        ((10, 0), 128, 4096, True, False, False),
    ],
)
def test_attention_is_as_it_was_measured(
    capability: tuple[int, int],
    head_dim: int,
    row_tokens: int,
    merged: bool,
    forward: bool,
    backward: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    here, options = attention_of(torch.device("cuda:0"), head_dim, row_tokens)
    kinds = {name[:3] for name, _ in options}
    assert (here, "fwd" in kinds, "bwd" in kinds) == (merged, forward, backward)
    assert attention_of(torch.device("cpu"), head_dim, row_tokens) == (False, ())
