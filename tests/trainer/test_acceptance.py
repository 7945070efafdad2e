"""The cycle walk over stored answers is the decoding loop's own, and a drafter that has learned its data by heart is
accepted whole, by the walk and by the loop."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import tiny_target

from trainer.acceptance import answer_cycles, answers_in, by_position, summarise
from trainer.data import Document, Row, make_row
from trainer.draft import DraftModel
from trainer.feed import all_anchors_batch, row_batch
from trainer.learner import Learner, Measured, features_of
from trainer.loss import Weighting
from trainer.optim import learning_rate, make_optimizer
from trainer.speculate import Decoded, decode_plain, decode_speculative
from trainer.target import TargetModel

NEVER: frozenset[int] = frozenset()
CPU = torch.device("cpu")


# --- the walk, on made-up counts ---


def row_of(documents: Sequence[Sequence[tuple[int, int]]], padding: int) -> Row:
    """Documents given as turns: how many tokens the prompt has, and the answer."""
    made: list[Document] = []
    for turns in documents:
        mask = [supervised for prompt, answer in turns for supervised in [False] * prompt + [True] * answer]
        made.append(Document(np.zeros(len(mask), dtype=np.int64), np.array(mask, dtype=np.bool_)))
    return make_row(0, made, sum(map(len, made)) + padding)


def decoded_by_token(row: Row, accepted: Sequence[int]) -> list[list[int]]:
    """The loop of speculate.py, token by token: the prompt's pass gives the first, each cycle one after the other."""
    answers: list[list[int]] = []
    for document in range(int(row.document_ids.max(initial=-1)) + 1):
        places = np.flatnonzero(row.document_ids == document)
        supervised = [bool(row.loss_mask[place]) for place in places]
        index = 0
        while index < len(places):
            if not supervised[index]:
                index += 1
                continue
            cycles: list[int] = []
            while index + 1 < len(places) and supervised[index + 1]:
                given, gave = accepted[places[index]] + 1, 0
                while gave < given and index + 1 < len(places) and supervised[index + 1]:
                    index, gave = index + 1, gave + 1
                cycles.append(gave)
            answers.append(cycles)
            index += 1
    return answers


turns = st.tuples(st.integers(1, 3), st.integers(0, 12))


@given(st.lists(st.lists(turns, min_size=1, max_size=3), max_size=4), st.integers(0, 5), st.randoms())
def test_a_walk_commits_tokens_as_the_loop_does(
    documents: list[list[tuple[int, int]]], padding: int, random: Any
) -> None:
    row = row_of(documents, padding)
    accepted = [random.choice([0, 0, 1, 2, 7, 30]) for _ in row.ids]
    cycles = answer_cycles(row.loss_mask, row.document_ids, np.array(accepted, dtype=np.int64))
    assert cycles == decoded_by_token(row, accepted)
    lengths = [answer for turns in documents for _, answer in turns if answer]
    assert [sum(own) for own in cycles] == [length - 1 for length in lengths]  # the first token is the prompt's pass's


def test_answers_end_with_their_documents_and_with_their_turns() -> None:
    row = row_of([[(0, 3)], [(0, 2), (1, 1)], [(2, 0)], [(1, 4)]], padding=2)
    assert answers_in(row.loss_mask, row.document_ids) == [(0, 3), (3, 5), (6, 7), (10, 14)]
    assert answers_in(row.loss_mask[:0], row.document_ids[:0]) == []
    supervised_padding = np.ones_like(row.loss_mask)  # what no document holds is no answer
    assert answers_in(supervised_padding, row.document_ids)[-1] == (9, 14)


def test_a_walk_needs_the_anchors_that_it_visits_and_no_others() -> None:
    row = row_of([[(2, 6)]], padding=0)
    anchors, accepted = np.array([2, 5, 0, 0]), np.array([2, 1, 9, 9])
    keep = np.array([True, True, False, False])
    by_place = by_position(anchors, keep, accepted, len(row.ids))
    assert by_place.tolist() == [-1, -1, 2, -1, -1, 1, -1, -1]
    assert answer_cycles(row.loss_mask, row.document_ids, by_place) == [[3, 2]]
    by_place[5] = -1
    with pytest.raises(ValueError, match="no block was measured at token 5 of the row"):
        answer_cycles(row.loss_mask, row.document_ids, by_place)


def test_the_figures_weigh_answers_alike_or_cycles_alike() -> None:
    figures = summarise([[4, 4], [], [1, 1, 1, 1, 1, 1]])
    assert (figures.macro, figures.micro) == (2.5, 14 / 8)
    assert figures.histogram == {1: 6, 4: 2} and list(figures.histogram) == [1, 4]
    assert (figures.answers, figures.cycles) == (2, 8)
    nothing = summarise([[]])
    assert np.isnan(nothing.macro) and np.isnan(nothing.micro) and (nothing.answers, nothing.cycles) == (0, 0)


# --- the walk against the loop, on a drafter's own acceptance ---


@dataclass(frozen=True)
class Learned:
    """Greedy answers of a tiny random target, and a drafter that learns them."""

    target: TargetModel
    prompts: list[list[int]]
    answers: list[Decoded]
    learner: Learner

    @property
    def rows(self) -> list[Row]:
        """Each answer in a row of its own."""
        documents = [self.document(number, answer.tokens) for number, answer in enumerate(self.answers)]
        return [make_row(number, [document], len(document)) for number, document in enumerate(documents)]

    def document(self, number: int, answer: list[int]) -> Document:
        prompt = self.prompts[number]
        mask = [False] * len(prompt) + [True] * len(answer)
        return Document(np.array(prompt + answer), np.array(mask))

    def decode(self, number: int, limit: int, ends: frozenset[int] = NEVER) -> Decoded:
        return decode_speculative(self.target, self.learner.model, self.prompts[number], limit, ends)

    def measure_all(self, rows: Sequence[Row]) -> Measured:
        batch = all_anchors_batch(rows, 16)
        return self.learner.measure_all(features_of(self.target, batch, self.learner.model.config, CPU, anchors=16))


@cache
def learned(block: int, limit: int, steps: int, half: int = 0, count: int = 8) -> tuple[Learned, Learned]:
    """How it was after `half` of the steps, and at the end."""
    target = tiny_target(hidden_size=64, intermediate_size=96, head_dim=16)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, target.config.vocab_size, (count, 8), generator=draw).tolist()
    answers = [decode_plain(target, prompt, limit, NEVER) for prompt in prompts]
    torch.manual_seed(0)
    model = DraftModel(target.draft_config(2, block, (1, 2, 3)))

    def with_learner(model: DraftModel) -> Learned:
        optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.0)
        learner = Learner(model, target.head_weight, optimizer, Weighting("d-pace"), chunk_blocks=256, clip=1.0)
        return Learned(target, prompts, answers, learner)

    earlier, made = with_learner(model), with_learner(model)
    for step in range(1, steps + 1):
        batch = features_of(target, row_batch(made.rows, 12, step), model.config, CPU)
        made.learner.learn(batch)
        made.learner.update(learning_rate(step, steps=steps, highest=1e-2, warmup_ratio=0.04))
        if step == half:
            earlier = with_learner(deepcopy(model))
    return earlier, made


def half_learned() -> Learned:
    return learned(block=8, limit=41, steps=100, half=60, count=8)[0]


def test_the_walk_is_the_loop_s_cycles_for_answers_that_a_limit_cut() -> None:
    half = half_learned()
    walked = half.measure_all(half.rows).answers()
    figures = summarise(walked)
    assert 1.3 < figures.micro < 7 and len(figures.histogram) > 4  # of all kinds, so that equality says something
    for number, cycles in enumerate(walked):
        real = half.decode(number, limit=41)
        assert real.tokens == half.answers[number].tokens
        # Only the loop knows what the last cycle gave beyond the limit.
        left = len(real.tokens) - 1 - sum(real.accepted[:-1])
        assert cycles == [*real.accepted[:-1], min(real.accepted[-1], left)]


def test_the_walk_is_the_loop_s_cycles_for_answers_with_an_end_token() -> None:
    """Answers ended at one and another of their tokens, several to a row, as documents of their own."""
    half = half_learned()
    documents: list[Document] = []
    real: list[list[int]] = []
    for number, answer in enumerate(half.answers):
        for place in range(0, len(answer.tokens), 3):
            end = answer.tokens[place]
            if end in answer.tokens[:place]:
                continue
            decoded = half.decode(number, 41, frozenset([end]))
            assert decoded.tokens == answer.tokens[: place + 1]
            documents.append(half.document(number, decoded.tokens))
            real.append(decoded.accepted)
    rows = [make_row(first, documents[first : first + 4], 200) for first in range(0, len(documents), 4)]
    assert half.measure_all(rows).answers() == real
    assert len(real) > 30 and [] in real  # an answer of its end token alone has no cycle


def test_the_mean_over_anchors_is_the_walk_s_up_to_the_cap_at_an_answer_s_end() -> None:
    """The exact relation of the two: accepted + 1 at each anchor; the walk takes no more than the tokens left."""
    half = half_learned()
    rows = half.rows
    measured = half.measure_all(rows)
    blocks = measured.batch.blocks
    by_row = [
        by_position(a.numpy(), k.numpy(), n.numpy(), len(rows[0].ids))
        for a, k, n in zip(blocks.anchors_BN, blocks.keep_BN, measured.accepted_BN, strict=True)
    ]
    every = [int(count) + 1 for row in by_row for count in row[row >= 0]]
    assert float(measured.terms.figures()[2]) == pytest.approx(sum(every) / len(every), rel=1e-6)
    assert len(every) == int(measured.terms.blocks) == 8 * 40  # each token of an answer but its last
    for row, accepted, cycles in zip(rows, by_row, measured.answers(), strict=True):
        place = int(row.loss_mask.argmax())
        for tau in cycles:
            left = len(row.ids) - 1 - place
            assert accepted[place] <= left and tau == min(int(accepted[place]) + 1, left)
            place += tau


# --- by heart ---


@pytest.mark.parametrize(("block", "limit", "steps", "half", "count"), [(8, 41, 100, 60, 8), (16, 33, 110, 0, 4)])
def test_what_is_learned_by_heart_is_accepted_whole(block: int, limit: int, steps: int, half: int, count: int) -> None:
    """Above 0.9 x block: by the walk, and by the decoding loop from the prompts alone."""
    _, done = learned(block=block, limit=limit, steps=steps, half=half, count=count)
    measured = done.measure_all(done.rows)
    walked = summarise(measured.answers())
    assert walked.macro > 0.9 * block and walked.micro > 0.9 * block
    real = [done.decode(number, limit) for number in range(count)]
    assert [answer.tokens for answer in real] == [answer.tokens for answer in done.answers]
    cycles = [tau for answer in real for tau in answer.accepted]
    assert sum(cycles) / len(cycles) > 0.9 * block
    _, accuracy, accept = measured.terms.figures().tolist()
    # Over all anchors, the last ones of an answer can't have whole blocks: of n tokens the k-th last accepts k.
    most = sum(min(block, 1 + left) for left in range(1, limit)) / (limit - 1)
    assert accuracy > 0.98 and 0.95 * most < accept <= most
