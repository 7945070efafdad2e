"""Target and drafter together: what a block's loss depends on, packed rows, normalisation, odd shapes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainer.acceptance import answers_in
from trainer.blocks import dense_mask, whole_tiles
from trainer.data import Document, Row, make_row
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch, RowBatch
from trainer.feed import row_batch
from trainer.flops import soft_target_cost, step_flops
from trainer.learner import Figures, Learner, features_of
from trainer.loss import Objective, Weighting, chunk_loss
from trainer.optim import make_optimizer
from trainer.target import TargetModel, load_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float32)


def document(length: int, seed: int = 0, supervised: float = 1.0) -> Document:
    random = np.random.default_rng([seed, length])
    return Document(random.integers(0, 250, length), random.random(length) < supervised)


def learner_of(target: TargetModel, lr: float = 1e-3) -> Learner:
    torch.manual_seed(0)
    model = DraftModel(target.draft_config(1, 4, (1, 2, 3)))
    optimizer = make_optimizer(model, lr=lr, weight_decay=0.0)
    return Learner(model, target.head_weight, optimizer, Weighting("d-pace"), chunk_blocks=16, clip=1e9)


def config_of(learner: Learner) -> DraftConfig:
    return learner.model.config


def features(target: TargetModel, learner: Learner, rows: Sequence[Row], anchors: int = 64) -> FeatureBatch:
    return features_of(target, row_batch(rows, anchors, seed=0), config_of(learner), CPU)


@pytest.fixture(scope="module")
def exact_target(tiny_folder: Path) -> TargetModel:
    return load_target(tiny_folder / "target", "cpu", torch.float64)


def exact_learner(
    target: TargetModel, kind: str, objective: Objective, chunk_blocks: int = 16, clip: float = 0.001, **changes: float
) -> Learner:
    """In float64. Its step is plain gradient descent, so that the weights show the gradient and not only its sign."""
    torch.manual_seed(0)
    model = DraftModel(replace(target.draft_config(1, 4, (1, 2, 3)), **changes)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weighting = Weighting(kind)  # type: ignore[arg-type]
    return Learner(
        model, target.head_weight, optimizer, weighting, chunk_blocks=chunk_blocks, clip=clip, objective=objective
    )


ROWS = [
    make_row(0, [document(9), document(12, seed=1)], 24),
    make_row(1, [document(24, seed=2, supervised=0.6)], 24),
    make_row(2, [document(3, seed=3)], 24),  # few slots beside many: what a mean of means would get wrong
    make_row(3, [document(20, seed=4, supervised=0.9)], 24),
]


def hidden(learner: Learner, batch: FeatureBatch) -> Tensor:
    """[N, T, H] of the first row."""
    blocks = batch.blocks
    mask = dense_mask(blocks, batch.positions_BS.shape[1])
    out = learner.model(batch.features_BSF, batch.embeds_BQH(), batch.positions_BS, blocks.positions_BQ, (mask,))
    return out[0].unflatten(0, (blocks.anchors_BN.shape[1], -1)).detach()


def test_a_block_depends_on_its_documents_tokens_up_to_its_anchor_and_on_nothing_else(target: TargetModel) -> None:
    learner = learner_of(target)
    rows = row_batch([make_row(0, [document(9), document(12, seed=1)], 24)], 64, seed=0)
    anchors, starts = rows.anchors_BN[0].tolist(), [0] * 9 + [9] * 12
    before = hidden(learner, features_of(target, rows, config_of(learner), CPU))
    for position in range(21):
        ids_BS = rows.ids_BS.clone()
        ids_BS[0, position] = (ids_BS[0, position] + 1) % 250
        after = hidden(learner, features_of(target, replace(rows, ids_BS=ids_BS), config_of(learner), CPU))
        for n in range(int(rows.keep_BN.sum())):
            depends = starts[anchors[n]] <= position <= anchors[n]
            assert bool((after[n] != before[n]).any()) == depends, (position, anchors[n])


def test_a_packed_row_is_its_documents_one_at_a_time(target: TargetModel) -> None:
    learner = learner_of(target)
    documents = [document(15), document(2, seed=1), document(30, seed=2, supervised=0.7), document(5, seed=3)]
    packed = learner.measure_all(features(target, learner, [make_row(0, documents, 60)])).terms
    alone = learner.measure_all(features(target, learner, [make_row(0, [d], 60) for d in documents])).terms
    for name, value in vars(packed).items():
        torch.testing.assert_close(value, getattr(alone, name), rtol=1e-5, atol=1e-4)


def test_features_are_the_targets_own_on_each_document_alone(target: TargetModel) -> None:
    documents = [document(15), document(30, seed=2)]
    batch = features(target, learner_of(target), [make_row(0, documents, 60)])
    start = 0
    for alone in documents:
        with torch.no_grad():
            states = target.model(torch.from_numpy(alone.ids)[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1] for layer in (1, 2, 3)], dim=-1)  # state 0 is the embedding
        end = start + len(alone)
        torch.testing.assert_close(batch.features_BSF[:, start:end], expected, rtol=1e-4, atol=1e-4)
        start = end


def test_gradients_are_divided_by_what_the_whole_step_supervised(target: TargetModel) -> None:
    """The same row once or four times, at once or one by one: the same mean, so the same gradient."""
    row = make_row(0, [document(30)], 32)
    norms: list[float] = []
    for batches in ([[row]], [[row] * 4], [[row]] * 4, [[row] * 3, [row]]):
        learner = learner_of(target)
        for rows in batches:
            learner.learn(features(target, learner, rows))
        read = learner.update(1e-3).read()
        norms.append(read.grad_norm)
        assert read.loss == pytest.approx(5.9, abs=1) and read.finite
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)


def test_warming_up_leaves_no_trace(target: TargetModel) -> None:
    learner = learner_of(target)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.warm_up(features(target, learner, [make_row(0, [document(20)], 32)]))
    assert all((tensor == before[name]).all() for name, tensor in learner.model.state_dict().items())
    assert not learner.optimizer.state and all(p.grad is None for p in learner.model.parameters())


def test_a_step_without_anything_to_learn_changes_nothing(target: TargetModel) -> None:
    learner = learner_of(target)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.learn(features(target, learner, [make_row(0, [], 16), make_row(1, [document(9, supervised=0.0)], 16)]))
    learner.update(1e-3)
    assert all((tensor == before[name]).all() for name, tensor in learner.model.state_dict().items())


@settings(max_examples=12)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.5, 1.0])), max_size=5), min_size=1, max_size=3
    ),
    anchors=st.integers(1, 24),
)
def test_rows_of_any_documents_give_finite_gradients(
    target: TargetModel, rows: list[list[tuple[int, float]]], anchors: int
) -> None:
    learner = learner_of(target)
    row_tokens = max(2, max(sum(length for length, _ in row) for row in rows))
    made = [
        make_row(i, [document(n, seed=j, supervised=share) for j, (n, share) in enumerate(row)], row_tokens)
        for i, row in enumerate(rows)
    ]
    batch = features(target, learner, made, anchors)
    learner.learn(batch)
    read = learner.update(1e-3).read()
    assert np.isfinite(read.grad_norm) and read.finite
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())
    assert (read.grad_norm > 0) == np.isfinite(read.loss) == bool(batch.blocks.label_mask_BNP.any())


def test_rows_move_and_keep_their_meaning(target: TargetModel) -> None:
    rows = replace(row_batch([make_row(7, [document(9)], 16)], 4, seed=0), numbers=(7,), lines=((3,),))
    moved = rows.to(CPU)
    assert isinstance(moved, RowBatch) and (moved.numbers, moved.lines) == ((7,), ((3,),))
    for one, other in zip(vars(rows).values(), vars(moved).values(), strict=True):
        assert (one == other).all() if isinstance(one, Tensor) else one == other
    batch = features_of(target, rows, config_of(learner_of(target)), CPU)
    assert batch.rows.numbers == (7,)  # so that a bad step can name its data


def test_empty_slots_change_no_loss_and_no_gradient(target: TargetModel) -> None:
    learner, row = learner_of(target), make_row(0, [document(40), document(30, seed=1)], 96)
    figures: list[Figures] = []
    for slots in (9, 32):
        rows = row_batch([row], 9, 0)
        anchors, keep = (rows.anchors_BN, rows.keep_BN) if slots == 9 else whole_tiles(rows.anchors_BN, rows.keep_BN, 4)
        assert anchors.shape[1] == slots
        batch = features_of(
            target, replace(rows, anchors_BN=anchors, keep_BN=keep), config_of(learner), torch.device("cpu")
        )
        learner.learn(batch)
        figures.append(learner.update(0.0).read())
    assert figures[1][:4] == pytest.approx(figures[0][:4], rel=1e-5)
    assert figures[1].accuracy_by_slot == figures[0].accuracy_by_slot


def test_a_bfloat16_target_on_the_cpu_teaches_as_a_float32_one_does(target: TargetModel, tiny_folder: Path) -> None:
    figures: list[Figures] = []
    for teacher in (target, load_target(tiny_folder / "target", "cpu", torch.bfloat16)):
        learner = learner_of(teacher)
        batch = features(teacher, learner, [make_row(0, [document(40)], 64)])
        assert batch.features_BSF.dtype == batch.embeds_BQH().dtype == torch.float32
        learner.learn(batch)
        figures.append(learner.update(1e-3).read())
    exact, rounded = figures
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


# --- all anchors ---


@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
def test_all_anchors_in_parts_are_all_anchors_at_once(exact_target: TargetModel, objective: Objective) -> None:
    learner, teacher = exact_learner(exact_target, "d-pace", objective), objective == "kl"
    rows, config = row_batch(ROWS, 24, 0), learner.model.config
    whole = learner.measure_all(features_of(exact_target, rows, config, CPU, teacher=teacher)).terms
    batch = features_of(exact_target, rows, config, CPU, anchors=6, teacher=teacher)
    assert batch.forwards() == 4 and batch.part(1).blocks.ids_BQ.shape == (4, 24)
    measured = learner.measure_all(batch)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(measured.terms, name), value, rtol=0, atol=1e-9)
    # The acceptance length over all anchors is the mean of what each of them accepts, and its bonus.
    keep_BN = batch.blocks.keep_BN
    assert measured.terms.accepted == (measured.accepted_BN + 1)[keep_BN].sum()
    assert measured.terms.blocks == keep_BN.sum()
    ends = [span for row in ROWS for span in answers_in(row.loss_mask, row.document_ids)]
    assert [sum(cycles) for cycles in measured.answers()] == [end - 1 - first for first, end in ends]
    some = learner.measure_all(features_of(exact_target, row_batch(ROWS, 6, 0), config, CPU, teacher=teacher))
    with pytest.raises(ValueError, match="no block was measured at token"):
        some.answers()
    with pytest.raises(ValueError, match="24 anchors a row are no multiple of 5"):
        features_of(exact_target, rows, config, CPU, anchors=5)
    with pytest.raises(ValueError, match="only measure_all"):
        learner.learn(batch)


# --- the target's side ---


def test_the_blocks_embeddings_are_the_target_s_of_their_tokens(target: TargetModel) -> None:
    learner = learner_of(target)
    batch = features(target, learner, [make_row(0, [document(30)], 32), make_row(1, [document(9)], 32)])
    assert torch.equal(batch.embeds_BQH(), target.embedding(batch.blocks.ids_BQ))


def test_the_teacher_of_a_slot_is_what_the_target_predicts_its_token_from(exact_target: TargetModel) -> None:
    config = exact_target.draft_config(1, 4, (1, 2, 3))
    rows = row_batch(ROWS, 20, 0)
    batch = features_of(exact_target, rows, config, CPU, teacher=True)
    assert features_of(exact_target, rows, config, CPU).teacher_BNPH() is None
    teacher_BNPH, seen = batch.teacher_BNPH(), 0
    assert teacher_BNPH is not None
    for b, row in enumerate(ROWS):
        for d in range(int(row.document_ids.max()) + 1):
            ids = torch.from_numpy(row.ids[row.document_ids == d])
            start = int((row.document_ids == d).argmax())
            with torch.no_grad():
                logits = exact_target.model(ids[None]).logits[0]
            for n, anchor in enumerate(rows.anchors_BN[b].tolist()):
                for k in range(1, config.block_size):
                    if not batch.blocks.label_mask_BNP[b, n, k - 1] or row.document_ids[anchor] != d:
                        continue
                    predicted = exact_target.head_weight @ teacher_BNPH[b, n, k - 1]
                    torch.testing.assert_close(predicted, logits[anchor - start + k - 1], rtol=0, atol=1e-6)
                    seen += 1
    assert seen > 50


@pytest.mark.parametrize("objective", ["cross-entropy", "kl", "tv"])
def test_the_target_s_logit_scale_stands_before_the_head(exact_target: TargetModel, objective: Objective) -> None:
    """A factor in the config does what the same factor in the head does, teacher included."""
    scale, read = 0.3, list[Figures]()
    scaled = exact_learner(exact_target, "d-pace", objective, logit_scale=scale)
    plain = exact_learner(exact_target, "d-pace", objective)
    plain._head_VH = exact_target.head_weight * scale
    for learner in (scaled, plain):
        teacher = objective != "cross-entropy"
        learner.learn(features_of(exact_target, row_batch(ROWS, 20, 0), learner.model.config, CPU, teacher=teacher))
        read.append(learner.update(0.5).read())
    assert read[0][:4] == pytest.approx(read[1][:4], abs=1e-10)
    for one, other in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("soft", [False, True])
def test_the_cost_of_a_step_is_what_torch_counts(target: TargetModel, soft: bool) -> None:
    config = target.draft_config(2, 4, (1, 2, 3))
    model = DraftModel(config)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.0)
    objective: Objective = "tv" if soft else "cross-entropy"
    learner = Learner(
        model, target.head_weight, optimizer, Weighting("d-pace"), chunk_blocks=3, clip=1, objective=objective
    )
    with FlopCounterMode(display=False) as counter:
        rows = row_batch([make_row(0, [document(40)], 40)], 10, 0)
        learner.learn(features_of(target, rows, config, CPU, teacher=soft))
    flops = step_flops(config, row_tokens=40, anchors=10, soft=soft)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    assert counted == flops.target + flops.drafter + flops.head  # on the CPU torch does not count attention
    assert flops.total == counted + flops.attention


def test_soft_targets_cost_the_target_s_last_layers_and_one_more_head(target: TargetModel) -> None:
    config = target.draft_config(1, 4, (1, 2, 3))
    cost = soft_target_cost(config, row_tokens=96, anchors=8)
    assert 1 < cost < 6 / 4 * 3 / 2
    assert soft_target_cost(replace(config, vocab_size=10**9), row_tokens=96, anchors=8) == pytest.approx(
        3 / 2, rel=1e-3
    )
    deep = replace(config, num_target_layers=10**6)
    assert soft_target_cost(deep, row_tokens=96, anchors=8) > 1e4


@pytest.mark.parametrize(("rows", "objective"), [(ROWS[:1], "cross-entropy"), (ROWS, "tv")])
def test_parts_are_laid_out_as_batches_to_learn_from_are(
    target: TargetModel, rows: list[Row], objective: Objective
) -> None:
    """Compiled code is for one size and layout. Here by a backend without kernels; test_cuda.py has the real one."""
    torch.compiler.reset()
    learner, teacher = learner_of(target), objective != "cross-entropy"
    learner._objective = objective
    learner._forward = torch.compile(learner.model, backend="eager", dynamic=False, fullgraph=True)
    learner._chunk = torch.compile(chunk_loss, backend="eager", dynamic=False, fullgraph=True)

    def batch(anchors: int) -> FeatureBatch:
        made = row_batch(rows, anchors, 0)
        return features_of(target, made, config_of(learner), CPU, anchors=6, teacher=teacher)

    learner.warm_up(batch(6))
    with torch.compiler.set_stance("fail_on_recompile"):
        learner.learn(batch(6))
        learner.measure_all(batch(6))
        assert len(learner.measure_all(batch(24)).accepted_BN[0]) == 24
    learner.update(1e-3)
