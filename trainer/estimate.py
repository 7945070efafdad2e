# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""What a training will be like, before anything is loaded: shapes, weights, tokens a step, memory (memory.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import sizes
from trainer.blocks import TILE
from trainer.byhand import runs_by_hand
from trainer.config import TrainConfig, forwards, idle_keys, micro_rows
from trainer.devices import Devices, listed, plus
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.hooked import Parts
from trainer.layout import Layout, check_tiles, parse
from trainer.memory import CUDA_MIB, FRAGMENTS, MIB, Batch, Part, Target, memory, parameter_sizes, remedies, said
from trainer.refused import TargetError, check_config, text_config
from trainer.start import TrainingError, soft_cost_line
from trainer.target import first_line


def dry_run(config: TrainConfig) -> str:
    """The page that `train --dry-run` prints. Reads the target's config and no weights.

    Raises TargetError or TrainingError when target and config don't fit, as a training would.
    """
    target, draft, batch, layout = planned(config)
    soft = config.train.objective != "cross-entropy"
    parts = memory(target, draft, batch, config, layout)
    return "\n".join(
        [
            *idle_keys(config),
            *_target_lines(target, draft, dtype_name(config, layout), layout.targets, soft),
            *_drafter_lines(draft, sum(parameter_sizes(draft)), layout.drafters),
            *_step_lines(config, draft, batch, soft),
            *_memory_lines(parts, config),
        ]
    )


def planned(config: TrainConfig) -> tuple[Target, DraftConfig, Batch, Layout]:
    """Target, drafter, one forward, and who runs where. Raises TargetError or TrainingError."""
    layout = parse(config.layout)
    target, draft = read_shapes(config, 4 if dtype_name(config, layout) == "float32" else 2)
    check_tiles(config, layout)
    blocks = config.train.anchors
    while any(name != "cpu" for name in layout.drafters) and blocks * draft.block_size % TILE:
        blocks += 1
    return target, draft, Batch(micro_rows(config), config.data.row_tokens, blocks, draft.block_size), layout


def dtype_name(config: TrainConfig, layout: Layout) -> str:
    """The target's type."""
    on_cpu = all(device == "cpu" for place in layout.targets for device in place)
    return config.target.dtype if config.target.dtype != "auto" else "float32" if on_cpu else "bfloat16"


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
        parts = Parts(model)
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
        layer_weights=tuple(sum(p.numel() for p in layer.parameters()) for layer in parts.layers),
        tied=parts.head.weight is parts.embedding.weight,
        bytes_each=bytes_each,
        masks=masks_of(text, bytes_each),
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


def _target_lines(target: Target, draft: DraftConfig, dtype: str, places: Sequence[Devices], soft: bool) -> list[str]:
    where = listed(dict.fromkeys(map(plus, places)))
    workers = f", {len(places)} workers" if len(places) > 1 else ""
    layers = ", ".join(map(str, draft.target_layer_ids))
    run = target.layers if soft else max(draft.target_layer_ids) + 1
    return [
        f"target    {target.name}: {target.family}, {target.layers} layers of {target.hidden}, vocabulary "
        f"{target.vocabulary:,}, {target.weights:,} weights, {dtype} on {where}{workers}",
        f"          read after layers {layers}: {run} of {target.layers} run",
    ]


def _drafter_lines(draft: DraftConfig, weights: int, places: Devices) -> list[str]:
    each = f", {len(places)} drafters of one step" if len(places) > 1 else ""
    kinds = [kind.removesuffix("_attention") for kind in draft.layer_types]
    seen = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    window = f" ({draft.sliding_window} tokens)" if draft.sliding_window else ""
    return [
        f"drafter   {draft.num_layers} layers of {draft.hidden_size}, {draft.num_heads} heads of {draft.head_dim} on "
        f"{draft.num_kv_heads} key/value heads, MLP {draft.intermediate_size:,}, block {draft.block_size}: "
        f"{weights:,} weights on {listed(dict.fromkeys(places))}{each}",
        f"          attention: {seen}{window}, {'causal' if draft.causal else 'both ways'} inside the block",
    ]


def _step_lines(config: TrainConfig, draft: DraftConfig, batch: Batch, soft: bool) -> list[str]:
    settings, rows = config.train, config.train.rows_per_step
    tokens = rows * batch.row_tokens
    predicted = rows * settings.anchors * (draft.block_size - 1)
    warmup = round(settings.steps * settings.warmup_ratio)
    count = forwards(config)
    return [
        f"step      {rows} rows of {batch.row_tokens:,} tokens: {tokens:,} tokens, in {count} "
        f"forward{'s' if count > 1 else ''} of {batch.rows}; {settings.anchors} blocks a row: {predicted:,} predicted "
        f"slots",
        f"training  {settings.steps:,} steps: {settings.steps * tokens:,} tokens; {settings.objective} with "
        f"{settings.loss} weights; learning rate {settings.lr:g} after {warmup} steps, then a cosine",
        *([f"          {soft_cost_line(config, draft)}"] if soft else []),
    ]


def _memory_lines(parts: Mapping[str, Sequence[Part]], config: TrainConfig) -> list[str]:
    """Devices that are alike, to the MiB, are told of once."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for device, held in parts.items():
        rounded = tuple((part.what, round(part.bytes / MIB)) for part in held)
        alike.setdefault((rounded, _whole_memory(device)), []).append(device)
    return [line for names in alike.values() for line in _lines_of(names, parts[names[0]], config)]


def _whole_memory(device: str) -> float | None:
    """MiB of a GPU that is here."""
    index = int(device.partition(":")[2] or 0)
    if device == "cpu" or index >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_properties(index).total_memory / MIB


def _lines_of(names: Sequence[str], parts: Sequence[Part], config: TrainConfig) -> list[str]:
    total = sum(part.bytes for part in parts) / MIB
    each = ", each" if len(names) > 1 else ""
    lines = [f"memory    {listed(names)}{each}: {total:,.0f} MiB at the peak, by estimate"]
    lines += [f"          {part.bytes / MIB:>10,.0f}  {part.what}" for part in parts]
    if names[0] == "cpu":
        return [*lines, "          (on a CPU this is rough: Python and torch themselves come on top)"]
    shown = total * FRAGMENTS + CUDA_MIB
    lines.append(f"          nvidia-smi will show about {shown:,.0f} MiB")
    if (has := _whole_memory(names[0])) is None:
        return lines
    if shown > has:
        return [*lines, f"          that is more than its {has:,.0f} MiB: {said(remedies(parts, config))}"]
    return [*lines, f"          of its {has:,.0f} MiB"]


def masks_of(config: Any, bytes_each: int) -> int:
    """Target.masks of a model's config: none where its layers are compiled: attention then takes documents' lengths."""
    biased = any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias"))
    if bytes_each == 2 and runs_by_hand(config) and not biased and config.hidden_act == "silu":
        return 0
    return 2 if len(set(getattr(config, "layer_types", None) or ())) > 1 else 1
