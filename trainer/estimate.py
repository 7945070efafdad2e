# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""What a training will be like, before anything is loaded: shapes, weights, tokens a step, memory.

The memory is counted from shapes. What is held is exact: weights, moments, head, batches. What a forward keeps for its
backward was fitted to an H200 (torch 2.11, six shapes of three models, block 8 and 16): see `kept_per_layer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import sizes
from trainer.blocks import TILE
from trainer.config import TrainConfig, idle_keys
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.refused import TargetError, check_config, text_config
from trainer.start import TrainingError, soft_cost_line
from trainer.target import first_line
from trainer.train import DEPTH

MIB = 2**20
BATCHES_HELD = DEPTH + 2  # waiting, one being made, one being learned from
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
    bytes_each: int  # of a weight and of a feature
    masks: int  # of numbers, [S, S] a row: torch makes one of a mask of booleans, a family may take two


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


# --- memory --------------------------------------------------------------------------------------------------------


def kept_per_layer(draft: DraftConfig, batch: Batch, bytes_each: int, given_bytes: int) -> float:
    """Bytes that one draft layer keeps for its backward.

    For each block token: 4 hidden states (2 of them of the stream, in the type of the target's embeddings), 4 of the
    width of all heads (queries before and after norm and rotation, the attention's output), 3 of the MLP's width, a
    key; for each token of context and blocks the key and the value that attention reads. On an H200, with a target in
    bfloat16, the sum over the layers was within 5% of what torch had allocated.
    """
    heads, key_value = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    block_token = 2 * draft.hidden_size + 4 * heads + 3 * draft.intermediate_size + key_value
    both = batch.tokens + batch.block_tokens
    stream = given_bytes * batch.block_tokens * 2 * draft.hidden_size
    return stream + bytes_each * (batch.block_tokens * block_token + both * 2 * key_value)


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
) -> list[Part]:
    """What the drafter's step takes on its device.

    bytes_each: of a product's factor, 2 under autocast. given_bytes: of what the target gives: features, embeddings,
    its head and so the logits. soft: objective kl or tv.
    """
    cast = 2 * weights if bytes_each == 2 else 0  # autocast's own copies of the float32 weights
    # The last states and the loss's gradient to them; and the features again, where autocast makes them smaller.
    hidden = 1.5 * given_bytes * batch.block_tokens * draft.hidden_size
    narrowed = bytes_each * batch.tokens * draft.feature_size if given_bytes > bytes_each else 0
    kept = draft.num_layers * kept_per_layer(draft, batch, bytes_each, given_bytes) + cast + hidden + narrowed
    chunk = min(chunk_blocks, batch.rows * batch.blocks)
    logits = given_bytes * chunk * (draft.block_size - 1) * draft.vocab_size * (SOFT_LOGITS if soft else 1)
    gradients = 4 * weights
    # The peak is at the last chunk of the loss, or at the end of the backward, whose gradients have replaced the rest.
    backward = max(kept + CHUNK_SHARE * logits, gradients + cast / draft.num_layers)
    return [
        Part("drafter's weights, float32", 4 * weights),
        Part("AdamW's moments", 8 * weights),
        *([Part("gradients of the forwards before", gradients)] if accumulates else []),
        Part(f"a forward and the loss of {chunk} blocks at a time", backward),
    ]


def batch_bytes(draft: DraftConfig, batch: Batch, *, bytes_each: int, soft: bool) -> float:
    """A batch of features as it waits between target and drafter."""
    per_token = draft.feature_size + (draft.hidden_size if soft else 0)
    blocks = batch.block_tokens * (2 * 8 + 8 + 1) + batch.rows * batch.blocks * draft.hidden_size * bytes_each
    return bytes_each * batch.tokens * per_token + blocks


def target_parts(target: Target, draft: DraftConfig, batch: Batch) -> list[Part]:
    """The frozen target, and what its forward takes."""
    per_token = 2 * len(draft.target_layer_ids) * target.hidden + 3 * target.intermediate + 3 * target.hidden
    masks = batch.rows * batch.row_tokens**2 * (1 + target.masks * target.bytes_each)
    forward = target.bytes_each * batch.tokens * per_token + masks
    return [Part("target's weights", target.bytes_each * target.weights), Part("target's forward", forward)]


def memory(
    target: Target,
    draft: DraftConfig,
    drafter_weights: int,
    batch: Batch,
    config: TrainConfig,
    target_device: str,
    device: str,
) -> dict[str, list[Part]]:
    """What each device holds at its peak, in bytes."""
    settings = config.train
    soft = settings.objective != "cross-entropy"
    bytes_each = 2 if device != "cpu" else 4
    given_bytes = target.bytes_each if device != "cpu" else 4  # a drafter on the CPU widens it
    micro_rows = settings.micro_rows or settings.rows_per_step
    waiting = batch_bytes(draft, batch, bytes_each=given_bytes, soft=soft) * BATCHES_HELD
    parts = {target_device: target_parts(target, draft, batch)}
    here = parts.setdefault(device, [])
    if device != target_device:
        here.append(Part("target's head", target.bytes_each * target.vocabulary * target.hidden))
    here += drafter_parts(
        draft,
        drafter_weights,
        batch,
        bytes_each=bytes_each,
        given_bytes=given_bytes,
        chunk_blocks=settings.chunk_blocks,
        accumulates=micro_rows < settings.rows_per_step,
        soft=soft,
    )
    here.append(Part(f"{BATCHES_HELD} batches of features", waiting))
    return parts


# --- the page ------------------------------------------------------------------------------------------------------


def dry_run(config: TrainConfig) -> str:
    """The page that `train --dry-run` prints. Reads the target's config and no weights.

    Raises TargetError or TrainingError when target and config don't fit, as a training would.
    """
    target, draft, batch, (target_device, device) = planned(config)
    with torch.device("meta"):
        weights = sum(p.numel() for p in DraftModel(draft).parameters())
    soft = config.train.objective != "cross-entropy"
    parts = memory(target, draft, weights, batch, config, target_device, device)
    return "\n".join(
        [
            *idle_keys(config),
            *_target_lines(target, draft, dtype_name(config, target_device), target_device, soft),
            *_drafter_lines(draft, weights, device),
            *_step_lines(config, draft, batch, soft),
            *(line for place, held in parts.items() for line in _memory_lines(place, held)),
        ]
    )


def planned(config: TrainConfig) -> tuple[Target, DraftConfig, Batch, tuple[str, str]]:
    """Target, drafter, one forward, and the devices of both. Raises TargetError or TrainingError."""
    settings = config.train
    target_device, device = device_name(settings.target_device or settings.device), device_name(settings.device)
    target, draft = read_shapes(config, 4 if dtype_name(config, target_device) == "float32" else 2)
    if device != "cpu" and config.data.row_tokens % TILE:
        raise TrainingError(f"data.row_tokens {config.data.row_tokens}: on a GPU it must be a multiple of {TILE}")
    blocks = settings.anchors
    while device != "cpu" and blocks * draft.block_size % TILE:
        blocks += 1
    batch = Batch(settings.micro_rows or settings.rows_per_step, config.data.row_tokens, blocks, draft.block_size)
    return target, draft, batch, (target_device, device)


def device_name(name: str) -> str:
    """As the config says; auto is the first GPU, or the CPU where there is none. It needn't be there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if name == "cuda" else name


def dtype_name(config: TrainConfig, device: str) -> str:
    return config.target.dtype if config.target.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"


def read_shapes(config: TrainConfig, bytes_each: int) -> tuple[Target, DraftConfig]:
    """The target's shape from its config.json, and the drafter's that fits it. Raises TargetError, TrainingError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = config.target.path
    folder = Path(name).expanduser()
    if (name.startswith(("/", ".", "~")) or folder.exists()) and not (folder / "config.json").is_file():
        raise TargetError(f"{name} is not a folder with a model (no config.json in it)")
    try:
        found = AutoConfig.from_pretrained(str(folder) if folder.exists() else name)
        check_config(found)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(found)
    except TargetError as error:
        raise TargetError(f"the target {name} can't be used: {error}") from error
    except Exception as error:  # transformers raises what it likes
        raise TargetError(f"the config of the target {name} can't be read: {first_line(error)}") from error
    text = text_config(found)
    if reason := sizes.too_long(text, config.data.row_tokens):
        raise TrainingError(f"the target {name}: {reason}")
    target = Target(
        name=name,
        family=str(found.model_type),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=sizes.intermediate_size(text),
        vocabulary=text.vocab_size,
        weights=sum(p.numel() for p in model.parameters()),
        bytes_each=bytes_each,
        masks=2 if len(set(getattr(text, "layer_types", None) or ())) > 1 else 1,
    )
    wanted = config.draft
    try:
        draft = sizes.draft_config(
            text,
            num_layers=wanted.layers,
            block_size=wanted.block,
            layer_ids=wanted.target_layer_ids or default_target_layer_ids(target.layers, wanted.captured),
            mask_token_id=wanted.mask_token_id or 0,  # which it is, the data says too
            sliding_window=wanted.sliding_window,
            sliding_layers=wanted.sliding_layers,
            causal=wanted.causal,
        )
    except ValueError as error:
        raise TrainingError(f"[draft] does not fit the target {name}: {error}") from error
    return target, draft


def _target_lines(target: Target, draft: DraftConfig, dtype: str, device: str, soft: bool) -> list[str]:
    layers = ", ".join(map(str, draft.target_layer_ids))
    run = target.layers if soft else max(draft.target_layer_ids) + 1
    return [
        f"target    {target.name}: {target.family}, {target.layers} layers of {target.hidden}, vocabulary "
        f"{target.vocabulary:,}, {target.weights:,} weights, {dtype} on {device}",
        f"          read after layers {layers}: {run} of {target.layers} run",
    ]


def _drafter_lines(draft: DraftConfig, weights: int, device: str) -> list[str]:
    kinds = [kind.removesuffix("_attention") for kind in draft.layer_types]
    seen = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    window = f" ({draft.sliding_window} tokens)" if draft.sliding_window else ""
    return [
        f"drafter   {draft.num_layers} layers of {draft.hidden_size}, {draft.num_heads} heads of {draft.head_dim} on "
        f"{draft.num_kv_heads} key/value heads, MLP {draft.intermediate_size:,}, block {draft.block_size}: "
        f"{weights:,} weights on {device}",
        f"          attention: {seen}{window}, {'causal' if draft.causal else 'both ways'} inside the block",
    ]


def _step_lines(config: TrainConfig, draft: DraftConfig, batch: Batch, soft: bool) -> list[str]:
    settings, rows = config.train, config.train.rows_per_step
    tokens = rows * batch.row_tokens
    predicted = rows * settings.anchors * (draft.block_size - 1)
    warmup = round(settings.steps * settings.warmup_ratio)
    return [
        f"step      {rows} rows of {batch.row_tokens:,} tokens: {tokens:,} tokens, in {rows // batch.rows} forwards of "
        f"{batch.rows}; {settings.anchors} blocks a row: {predicted:,} predicted slots",
        f"training  {settings.steps:,} steps: {settings.steps * tokens:,} tokens; {settings.objective} with "
        f"{settings.loss} weights; learning rate {settings.lr:g} after {warmup} steps, then a cosine",
        *([f"          {soft_cost_line(config, draft)}"] if soft else []),
    ]


def _memory_lines(device: str, parts: Sequence[Part]) -> list[str]:
    total = sum(part.bytes for part in parts) / MIB
    lines = [f"memory    {device}: {total:,.0f} MiB at the peak, by estimate"]
    lines += [f"          {part.bytes / MIB:>10,.0f}  {part.what}" for part in parts]
    if device == "cpu":
        return [*lines, "          (on a CPU this is rough: Python and torch themselves come on top)"]
    shown = total * FRAGMENTS + CUDA_MIB
    lines.append(f"          nvidia-smi will show about {shown:,.0f} MiB")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return lines
    has = torch.cuda.get_device_properties(index).total_memory / MIB
    if shown > has:
        advice = "lower train.micro_rows, train.chunk_blocks or train.anchors"
        return [*lines, f"          that is more than its {has:,.0f} MiB: {advice}"]
    return [*lines, f"          of its {has:,.0f} MiB"]
