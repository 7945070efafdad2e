"""Targets that scale their embeddings or logits: training and decoding apply the factors, held to transformers itself.

The reference knows none of our factors: a block's embeddings are the model's own hidden_states[0], the factor of the
logits is the ratio of the model's own logits to its head's product.
"""

# tolist is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import tiny_model
from torch import Tensor

from trainer.data import Document, make_row
from trainer.draft import DraftCache, DraftModel
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch
from trainer.feed import all_anchors_batch
from trainer.learner import Learner, features_of
from trainer.loss import Objective, Weighting
from trainer.optim import make_optimizer
from trainer.speculate import decode_speculative
from trainer.target import TargetModel

BLOCK, LAYERS, MASK, GAMMA = 4, (0, 2), 99, 2.0
FAMILIES = ["granite", "gemma3_text", "cohere2"]


@cache
def target_of(family: str) -> TargetModel:
    """Shared by the tests, which change nothing of it."""
    return TargetModel(tiny_model(family))


@torch.no_grad()
def own(target: TargetModel, ids: list[int]) -> Any:
    return target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)


class Recording(DraftModel):
    """A drafter that notes the embeddings it is given to decode with, and where its blocks begin."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.given: list[tuple[int, Tensor]] = []

    def forward_cached(self, features_new: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        self.given.append((int(positions[0, features_new.shape[1]]), embeds[0]))
        return super().forward_cached(features_new, embeds, positions, cache)


def drafter_of(target: TargetModel) -> Recording:
    torch.manual_seed(0)
    drafter = Recording(target.draft_config(1, BLOCK, LAYERS, MASK)).requires_grad_(True)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)  # so that the embeddings matter
    return drafter


def reference(target: TargetModel, drafter: DraftModel, ids: list[int], anchor: int) -> Tensor:
    """Logits of the slots behind an anchor, by the drafter's own decoding pass over what transformers gives. [P, V]"""
    seen, block = own(target, ids[:anchor]), own(target, [ids[anchor], *[MASK] * (BLOCK - 1)])
    features = torch.cat([seen.hidden_states[layer + 1] for layer in LAYERS], dim=-1)
    with torch.no_grad():
        embeds, positions = block.hidden_states[0], torch.arange(anchor + BLOCK)[None]
        hidden = DraftModel.forward_cached(drafter, features, embeds, positions, DraftCache())
        head = target.model.get_output_embeddings()
        product = head(seen.hidden_states[-1])
        ratio = (seen.logits * product).sum() / product.square().sum()
        return head(hidden[0, 1:]) * ratio


@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_training_s_blocks_are_those_of_decoding(family: str, objective: Objective) -> None:
    """Loss and leading right slots at every anchor of two packed documents."""
    target, random = target_of(family), np.random.default_rng(0)
    documents = [Document(random.integers(4, 98, size), np.arange(size) > 0) for size in (9, 7)]
    drafter = drafter_of(target)
    optimizer = make_optimizer(drafter, lr=1e-3, weight_decay=0.0)
    weighting = Weighting("exp-decay", gamma=GAMMA)
    learner = Learner(drafter, target.head_weight, optimizer, weighting, chunk_blocks=5, clip=1.0, objective=objective)
    rows = all_anchors_batch([make_row(0, documents, 20)], 4)
    batch: FeatureBatch = features_of(
        target, rows, drafter.config, torch.device("cpu"), anchors=4, teacher=objective == "kl"
    )
    terms = learner.measure_all(batch).terms

    loss, weights, right = 0.0, 0.0, 0
    entered = own(target, batch.blocks.ids_BQ[0].tolist()).hidden_states[0]
    torch.testing.assert_close(batch.embeds_BQH(), entered, rtol=1e-5, atol=1e-5)
    for document in documents:
        ids = document.ids.tolist()
        logits_SV = own(target, ids).logits[0]
        for anchor in range(1, len(ids) - 1):
            slots = min(BLOCK - 1, len(ids) - 1 - anchor)
            logits_PV = reference(target, drafter, ids, anchor)[:slots]
            labels = torch.tensor(ids[anchor + 1 : anchor + 1 + slots])
            weight_P = torch.exp(-torch.arange(slots) / GAMMA)
            log_q_PV = logits_PV.log_softmax(-1)
            slot_P = -log_q_PV.gather(-1, labels[:, None])[:, 0]
            if objective == "kl":
                p_PV = logits_SV[anchor : anchor + slots].softmax(-1)
                slot_P = (p_PV * (p_PV.log() - log_q_PV)).sum(-1)
            loss, weights = loss + float((weight_P * slot_P).sum()), weights + float(weight_P.sum())
            right += 1 + int((logits_PV.argmax(-1) == labels).int().cumprod(0).sum())
    assert float(terms.loss_sum) == pytest.approx(loss, rel=1e-4)
    assert float(terms.normaliser) == pytest.approx(weights, rel=1e-4)
    assert int(terms.accepted) == right


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_gives_the_drafter_what_the_target_s_layers_get(family: str) -> None:
    """And takes the drafts that the reference takes."""
    target = target_of(family)
    drafter, prompt = drafter_of(target), [5, 17, 60, 8]
    answer = decode_speculative(target, drafter, prompt, 10, frozenset())
    ids = prompt + answer.tokens
    assert len(drafter.given) == len(answer.accepted) >= 2
    for start, embeds in drafter.given:
        entered = own(target, [ids[start], *[MASK] * (BLOCK - 1)]).hidden_states[0][0]
        torch.testing.assert_close(embeds, entered, rtol=1e-5, atol=1e-5)
    start = len(prompt)
    for tau in answer.accepted[:-1]:
        drafts = reference(target, drafter, ids, start).argmax(-1).tolist()
        wanted = ids[start + 1 : start + BLOCK]
        right = next((n for n, (one, other) in enumerate(zip(drafts, wanted, strict=True)) if one != other), BLOCK - 1)
        assert tau == right + 1
        start += tau
