"""What a training takes of each device's memory, counted from shapes before anything is loaded.

What is held is exact: weights, moments, head, batches. What a forward keeps for its backward was fitted to an H200
(torch 2.11, six shapes of three models, block 8 and 16): see `kept_per_layer`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.config import TrainConfig, micro_rows
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.layout import Layout
from trainer.reduction import shards
from trainer.replicas import AHEAD
from trainer.spread import shares

MIB = 2**20
MOMENTS = "AdamW's moments"
SPREAD = 'spread the target over more GPUs (layout.targets = ["cuda:0+1"])'
SHARDED = 'set layout.optimizer = "sharded"'
CHUNK_SHARE = 1.1  # what lives beside a chunk's logits, over the logits
SOFT_LOGITS = 3  # with objective kl or tv a chunk has the drafter's logits, the target's, and their gradient
CUDA_MIB = 760  # what CUDA itself takes on a device: nvidia-smi shows it, torch does not (H200, driver 580)
FRAGMENTS = 1.06  # what torch has reserved over what it has given out


@dataclass(frozen=True)
class Target:
    """What is to be known of a target without its weights."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    weights: int
    layer_weights: tuple[int, ...]  # of each layer
    tied: bool  # the head is the embedding
    bytes_each: int  # of a weight and of a feature
    masks: int  # of numbers, [S, S] a row: torch makes one of a mask of booleans, a family may take two; 0: no mask

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.vocabulary * self.hidden

    def spread(self, count: int) -> list[int]:
        """The weights on each of `count` devices. Raises TargetError when they are more than it has layers."""
        on = [0] * count
        for weights, place in zip(self.layer_weights, shares(self.layers, count), strict=True):
            on[place] += weights
        on[0] += self.weights - sum(on)
        if count > 1:  # the head goes to the last; a tied one is there besides the embedding
            on[0] -= 0 if self.tied else self.head
            on[-1] += self.head
        return on


@dataclass(frozen=True)
class Batch:
    """The shapes of one forward."""

    rows: int
    row_tokens: int
    blocks: int  # of a row, as many as the kernels take
    block: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    @property
    def block_tokens(self) -> int:
        return self.rows * self.blocks * self.block


@dataclass(frozen=True)
class Part:
    """Something that takes memory on a device at its peak."""

    what: str
    bytes: float
    remedies: tuple[str, ...] = ()  # what makes it smaller: "lower KEY", or in other words


def kept_per_layer(draft: DraftConfig, batch: Batch, bytes_each: int, given_bytes: int) -> float:
    """Bytes that one draft layer keeps for its backward.

    For each block token: 4 hidden states (2 of them of the stream, in the type of the target's embeddings), 4 of the
    width of all heads (queries before and after norm and rotation, the attention's output twice), 2 of the MLP's width,
    a key and a value before and one of each after norm and rotation, as for each token of the context. On the CPU a
    third of the MLP's width, gate times up. On an H200, with a target in bfloat16, the sum over the layers was within
    5% of what torch had allocated.
    """
    heads, key_value = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    mlp = (2 if bytes_each == 2 else 3) * draft.intermediate_size  # a GPU's kernel makes gate times up again
    block_token = 2 * draft.hidden_size + 4 * heads + mlp
    both = batch.tokens + batch.block_tokens
    stream = given_bytes * batch.block_tokens * 2 * draft.hidden_size
    return stream + bytes_each * (batch.block_tokens * block_token + both * 4 * key_value)


def drafter_parts(
    draft: DraftConfig,
    weights: int,
    batch: Batch,
    *,
    bytes_each: int,
    given_bytes: int,
    chunk_blocks: int,
    accumulates: bool,
    soft: bool,
    moments: int | None = None,
    summing: float = 0,
) -> list[Part]:
    """What the drafter's step takes on its device.

    bytes_each: of a product's factor, 2 on a GPU. given_bytes: of what the target gives: features, embeddings,
    its head and so the logits. soft: objective kl or tv. moments: weights that it keeps moments of; None: all.
    summing: bytes that it takes besides to sum up the gradients of all drafters.
    """
    working = bytes_each == 2  # on a GPU
    copies = 2 * weights if working else 0
    # The last states and the loss's gradient to them; and the features again, where autocast makes them smaller.
    hidden = 1.5 * given_bytes * batch.block_tokens * draft.hidden_size
    narrowed = bytes_each * batch.tokens * draft.feature_size if given_bytes > bytes_each else 0
    kept = draft.num_layers * kept_per_layer(draft, batch, bytes_each, given_bytes) + hidden + narrowed
    chunk = min(chunk_blocks, batch.rows * batch.blocks)
    logits = given_bytes * chunk * (draft.block_size - 1) * draft.vocab_size * (SOFT_LOGITS if soft else 1)
    # In the copies' type, unless several drafters' are summed up: sums are float32.
    gradients = (2 if working and (accumulates or not summing) else 4) * weights
    # The peak is at the last chunk of the loss, or at the end of the backward, whose gradients have replaced the rest.
    backward = max(kept + CHUNK_SHARE * logits, gradients + summing)
    return [
        Part("drafter's weights, float32", 4 * weights, ("lower draft.layers",)),
        Part(MOMENTS, 8 * weights, ("lower draft.layers",))
        if moments is None
        else Part(f"{MOMENTS}, a share", 8 * moments, ("lower draft.layers",)),
        *([Part("the drafter's copies in bfloat16", copies, ("lower draft.layers",))] if working else []),
        *([Part("gradients of the forwards before", 4 * weights, ("lower draft.layers",))] if accumulates else []),
        Part(
            f"a forward and the loss of {chunk} blocks at a time",
            backward,
            ("lower train.micro_rows", "lower train.chunk_blocks", "lower train.anchors"),
        ),
    ]


def batch_bytes(draft: DraftConfig, batch: Batch, *, bytes_each: int, soft: bool) -> float:
    """A batch of features as it waits between target and drafter."""
    per_token = draft.feature_size + (draft.hidden_size if soft else 0)
    blocks = batch.block_tokens * (2 * 8 + 8 + 1) + batch.rows * batch.blocks * draft.hidden_size * bytes_each
    return bytes_each * batch.tokens * per_token + blocks


def target_parts(target: Target, weights: int, draft: DraftConfig, batch: Batch) -> list[Part]:
    """`weights` weights of the frozen target, and what its forward takes. (All of it, where layers are spread.)"""
    per_token = 2 * len(draft.target_layer_ids) * target.hidden + 3 * target.intermediate + 3 * target.hidden
    masks = batch.rows * batch.row_tokens**2 * (1 + target.masks * target.bytes_each) if target.masks else 0
    forward = target.bytes_each * batch.tokens * per_token + masks
    return [
        Part("target's weights", target.bytes_each * weights, (SPREAD,)),
        Part("target's forward", forward, ("lower train.micro_rows", "lower data.row_tokens")),
    ]


def parameter_sizes(draft: DraftConfig) -> list[int]:
    """The weights of each of a drafter's tensors."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in DraftModel(draft).parameters()]


def memory(
    target: Target, draft: DraftConfig, batch: Batch, config: TrainConfig, layout: Layout
) -> dict[str, list[Part]]:
    """What each device holds at its peak, in bytes: targets' devices first."""
    parts: dict[str, list[Part]] = {}
    for place, workers in Counter(layout.targets).items():  # workers of one place share its weights
        for device, weights in zip(place, target.spread(len(place)), strict=True):
            held, forward = target_parts(target, weights, draft, batch)
            if config.target.fp8:  # beside the others, which decode
                narrow = sum(target.layer_weights) / len(place)
                parts.setdefault(device, []).append(Part("target's matrices in fp8", narrow, (SPREAD,)))
            if len(place) > 1:
                held = replace(held, what=f"{held.what}, a share of its layers")
            parts.setdefault(device, []).extend((held, _times(workers, forward, "targets")))
    heads = {place[-1] for place in layout.targets}
    for device, count in Counter(layout.drafters).items():
        here = parts.setdefault(device, [])
        if device not in heads:
            here.append(Part("target's head", target.bytes_each * target.head))
        own = _drafter_s(target, draft, batch, config, layout, on_cpu=device == "cpu")
        here += [_times(count, part, "drafters") for part in own]
    return parts


def _times(count: int, part: Part, whose: str) -> Part:
    return part if count == 1 else replace(part, what=f"{part.what}, of {count} {whose}", bytes=count * part.bytes)


def _drafter_s(
    target: Target, draft: DraftConfig, batch: Batch, config: TrainConfig, layout: Layout, *, on_cpu: bool
) -> list[Part]:
    """What one of the drafters takes."""
    settings, count, lengths = config.train, len(layout.drafters), parameter_sizes(draft)
    soft = settings.objective != "cross-entropy"
    given_bytes = 4 if on_cpu else target.bytes_each  # a drafter on the CPU widens it
    sharded = count > 1 and config.layout.optimizer == "sharded"
    largest = max(sum(lengths[index] for index in own) for own in shards(lengths, count))
    # NCCL sums all in one; else tensor by tensor: a sum and, on one device, what is added to it. What comes from
    # another device has a room that stays.
    copies, several = config.layout.reduce != "nccl", len(set(layout.drafters)) > 1
    summing = 0 if count == 1 else (2 - several) * 4 * max(lengths) if copies else 4 * sum(lengths)
    parts = drafter_parts(
        draft,
        sum(lengths),
        batch,
        bytes_each=4 if on_cpu else 2,
        given_bytes=given_bytes,
        chunk_blocks=settings.chunk_blocks,
        accumulates=batch.rows < -(-settings.rows_per_step // count),
        soft=soft,
        moments=largest if sharded else None,
        summing=summing,
    )
    if count > 1 and not sharded:
        parts = [replace(part, remedies=(SHARDED,)) if part.what == MOMENTS else part for part in parts]
    one = batch_bytes(draft, batch, bytes_each=given_bytes, soft=soft)
    held = batches_held(config, layout, one)
    less = ("lower layout.depth", "lower layout.queue_mib", "lower train.micro_rows")
    if copies and several:
        parts.append(Part("room for others' gradients", 4 * max(lengths)))
    return [*parts, Part(f"{held} batches of features", held * one, less)]


def batches_held(config: TrainConfig, layout: Layout, one: float) -> int:
    """Batches of `one` bytes on a drafter's device: those that wait, are being made for it, and are learned from."""
    waiting = min(config.layout.depth, max(1, int(config.layout.queue_mib * MIB // one)))
    in_hand = 1  # the main thread's, which waits for room with a drafter
    return waiting + -(-len(layout.targets) // len(layout.drafters)) + in_hand + AHEAD


def remedies(parts: Sequence[Part], config: TrainConfig, first: Sequence[str] = ()) -> list[str]:
    """`first`, then what makes the largest of the parts smaller, then the others: not what is as low as it can be."""
    lowest = {
        "lower train.micro_rows": micro_rows(config),
        "lower train.chunk_blocks": config.train.chunk_blocks,
        "lower train.anchors": config.train.anchors,
        "lower layout.depth": config.layout.depth,
        "lower layout.queue_mib": config.layout.queue_mib,
        "lower draft.layers": config.draft.layers,
    }
    found = [remedy for part in sorted(parts, key=lambda part: -part.bytes) for remedy in part.remedies]
    return [remedy for remedy in dict.fromkeys((*first, *found)) if lowest.get(remedy, 2) > 1]


def said(remedies: Sequence[str], most: int = 4) -> str:
    """The first of the remedies in words: "lower train.micro_rows or train.anchors, or set ..."."""
    first = remedies[:most]
    keys = [remedy.removeprefix("lower ") for remedy in first if remedy.startswith("lower ")]
    lower = f"lower {', '.join(keys[:-1])} or {keys[-1]}" if len(keys) > 1 else f"lower {keys[0]}" if keys else ""
    return ", or ".join([*([lower] if lower else []), *(remedy for remedy in first if not remedy.startswith("lower "))])
