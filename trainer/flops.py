"""What a step costs, counted: floating point operations by shapes alone."""

from typing import NamedTuple

from trainer.draft_config import DraftConfig


class StepFlops(NamedTuple):
    """Floating point operations that one row costs a step, 2 for each multiplication."""

    target: float
    drafter: float
    head: float
    attention: float  # of target and drafter

    @property
    def total(self) -> float:
        return sum(self)


def step_flops(draft: DraftConfig, *, row_tokens: int, anchors: int, soft: bool) -> StepFlops:
    """What a row of S tokens with N blocks costs; soft: with objective kl or tv.

    The target's layers are taken to be of the drafter's sizes. `layer` and `kv` are the weights of a layer's matrices
    and of its keys and values; the backward of a product costs as much again for the weights, and for the input:

        target    = 2 S layer * (last captured layer + 1; soft: all L)
        drafter   = 4 S F H (the features want no gradient) + 6 n (S kv + N T layer)
        head      = 2 N (T-1) H V * (2: forward, gradient to the hidden states; soft: 3, the teacher's logits)
        attention = 4 A D (S S a target layer: every key is multiplied; 3 N T (S/2 + T) a drafter layer, which sees half
                    of its row on average)
    """
    hidden, wide = draft.hidden_size, draft.num_heads * draft.head_dim
    key_value = 2 * hidden * draft.num_kv_heads * draft.head_dim
    layer = 2 * hidden * wide + key_value + 3 * hidden * draft.intermediate_size
    target_layers = draft.num_target_layers if soft else max(draft.target_layer_ids) + 1
    block_tokens, seen = anchors * draft.block_size, row_tokens / 2 + draft.block_size
    context, blocks = row_tokens * key_value, block_tokens * layer
    return StepFlops(
        target=2.0 * row_tokens * layer * target_layers,
        drafter=4.0 * row_tokens * draft.feature_size * hidden + 6.0 * draft.num_layers * (context + blocks),
        head=2.0 * anchors * (draft.block_size - 1) * hidden * draft.vocab_size * (3 if soft else 2),
        attention=4.0 * wide * (row_tokens**2 * target_layers + 3 * block_tokens * seen * draft.num_layers),
    )


def soft_target_cost(draft: DraftConfig, *, row_tokens: int, anchors: int) -> float:
    """What a step with objective kl or tv costs, in steps with cross-entropy: the ratio of their step_flops."""
    soft, hard = (step_flops(draft, row_tokens=row_tokens, anchors=anchors, soft=soft) for soft in (True, False))
    return soft.total / hard.total
