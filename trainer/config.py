"""TrainConfig: one TOML file says what is trained. Imports neither torch nor transformers, so that checking is quick.

    config = load(Path("config.toml"), sets=["train.steps=200"])

A mistake is a ConfigFault: which file, which key, why, and the nearest right key.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from trainer import devices, presets

SCHEMA_VERSION = 1

# Keys of earlier versions, and where they are now.
MOVED = {
    "train.device": 'layout.drafters (a list, e.g. ["cuda:0"])',
    "train.target_device": 'layout.targets (a list, e.g. ["cuda:0"])',
}


class ConfigFault(ValueError):
    """A config that the trainer refuses.

    `key` is dotted ("train.steps"), or several with commas between; "" when the file as a whole is wrong.
    """

    def __init__(self, file: str, key: str, why: str, nearest: str | None = None) -> None:
        self.file, self.key, self.why, self.nearest = file, key, why, nearest
        place = f"{file}: {key}" if key else file
        super().__init__(f"{place}: {why}" + (f"; did you mean {nearest}?" if nearest else ""))


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TargetSection(Section):
    """[target]: the frozen model that the drafter learns to predict."""

    path: str = Field(min_length=1)
    """A local folder (relative to where the trainer runs: the release) or a Hugging Face hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and features of the target. auto: bfloat16 on CUDA, float32 on the CPU."""
    fp8: bool = False
    """Features with the target's matrices in fp8: faster, less exact. A GPU of Hopper or later; Llama and Qwen3."""


class DraftSection(Section):
    """[draft]: the shape of the drafter; the sizes not named here are the target's own."""

    layers: int = Field(default=5, ge=1)
    """Decoder layers of the drafter."""
    block: int = Field(default=16, ge=2, le=128)
    """Tokens in a block, the anchor included."""
    captured: int = Field(default=5, ge=1)
    """How many layers of the target are captured, evenly spaced, when target_layer_ids names none."""
    target_layer_ids: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """Captured layers, zero-based: the feature is the residual stream after that layer (z-lab's ids)."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token that stands for "not known yet"; must not occur in the data. None: the target's own choice."""
    sliding_window: int | None = Field(default=None, ge=2)
    """Context tokens before a slot that the sliding layers see, at least the block's size. None: no layer slides."""
    sliding_layers: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """Layers of the drafter that slide, zero-based. None: all, when there is a sliding_window."""
    causal: bool = False
    """Slots of a block see no later ones. Older servers don't know such drafters: false is what all load alike."""

    @model_validator(mode="after")
    def _layers_once(self) -> "DraftSection":
        named = self.target_layer_ids
        if named is not None and (not named or len({*named}) < len(named)):
            raise ValueError(f"target_layer_ids {list(named)}: name some layers, each once")
        return self

    @model_validator(mode="after")
    def _whole_windows(self) -> "DraftSection":
        if self.sliding_window is None:
            if self.sliding_layers is not None:
                raise ValueError("sliding_layers need a sliding_window")
        elif self.sliding_window < self.block:
            raise ValueError(f"sliding_window {self.sliding_window} is smaller than the block of {self.block} tokens")
        elif self.sliding_layers is not None:
            named = set(self.sliding_layers)
            if not named or len(named) < len(self.sliding_layers) or named - set(range(self.layers)):
                why = f"name some of the layers 0..{self.layers - 1}, each once"
                raise ValueError(f"sliding_layers {list(self.sliding_layers)}: {why}")
        return self


class DataSection(Section):
    """[data]: conversations, as {"messages"}, as {"conversations"} (ShareGPT), or as {"prompt", "response"}.

    A path names a folder made by `python -m trainer prepare`, or what that reads: JSON lines (.jsonl, .jsonl.gz),
    Parquet, or a folder of them. What is not prepared yet is prepared into the run's folder first.
    """

    train: str = Field(min_length=1)
    """Conversations to learn from."""
    heldout: Annotated[str, Field(min_length=1)] | None = None
    """Conversations that are only measured on."""
    row_tokens: int = Field(default=1024, ge=8)
    """Tokens in a row; several conversations are packed into one, longer ones are cut."""
    last_turn_only: bool = False
    """Learn from the last answer of a conversation only, instead of from all."""
    shuffle: bool = True
    """A new order of the conversations in each epoch, drawn from train.seed."""


class TrainSection(Section):
    """[train]: the course of the training."""

    steps: int = Field(ge=1)
    """Optimiser steps of the whole training."""
    rows_per_step: int = Field(default=8, ge=1)
    """Rows that one optimiser step learns from."""
    micro_rows: int | None = Field(default=None, ge=1)
    """Rows in one forward; smaller saves memory, same result but for rounding. None: all rows of a drafter's share."""
    anchors: int = Field(default=128, ge=1)
    """Blocks per row, spread evenly over its conversations."""
    loss: Literal["exp-decay", "d-pace"] = "d-pace"
    """Weights of a block's slots: fixed exponential decay, or D-PACE (by how likely the slots before are accepted)."""
    gamma: float | None = Field(default=None, gt=0)
    """exp-decay: slots after which the weight has fallen to 1/e. None: 7, 5, 4 for blocks of 16, 10, 8."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """d-pace: how far each slot's chance of acceptance is lifted towards 1."""
    objective: Literal["cross-entropy", "kl", "tv"] = "cross-entropy"
    """A slot's loss, weighted by `loss`: the cross entropy of the data's token. Or its distance from the target's own
    distribution, for which all its layers are run: KL divergence, or total variation (the chance of a rejection)."""
    lr: float = Field(default=6e-4, gt=0)
    """Highest learning rate."""
    warmup_ratio: float = Field(default=0.04, ge=0, le=1)
    """Share of the steps in which the learning rate rises; it falls to 0 as a cosine after."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of the matrices (norms have none)."""
    clip: float = Field(default=1.0, gt=0)
    """Highest norm of the whole gradient."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Draws weights, order of the data and anchors."""
    chunk_blocks: int = Field(default=256, ge=1)
    """Blocks whose logits exist at one time; smaller saves memory, same result but for rounding."""
    log_every: int = Field(default=1, ge=1)
    """Steps between two records; the first and the last step make one in any case."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between two measurements on data.heldout; 0: at the end only."""
    decode_every: int = Field(default=0, ge=0)
    """Steps between two real decodings of prompts of data.heldout, and one at the end; 0: never. `best` goes by it.

    Each makes a checkpoint.
    """
    decode_prompts: int = Field(default=16, ge=1)
    """Prompts that are decoded then, one after the other: the first ones of data.heldout."""
    decode_tokens: int = Field(default=64, ge=2)
    """Tokens of each of their answers, at most."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between two checkpoints; the last step makes one in any case, and each after which is decoded."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    fx_fix: Literal["per-thread", "always-false", "off"] = "per-thread"
    """How torch.fx is made fit for threads: each has its own state; or none is told that it traces; or not at all."""


class LayoutSection(Section):
    """[layout]: who runs where. Target and drafter workers are threads of one process.

    A device's word is auto (the first GPU, or the CPU), cpu, cuda:N, or cuda:0-4 (a worker on each of the five).
    """

    targets: tuple[str, ...] = ("auto",)
    """Target workers: auto (first GPU, or CPU), cpu, cuda:N, cuda:0-4 (five), cuda:0+1 (one spread over both)."""
    drafters: tuple[str, ...] = ("auto",)
    """Drafters, which share each step: auto, cpu, cuda:N, cuda:5-7 (three)."""
    allow_shared_device: bool = False
    """Several drafters may be on one device: for trying a layout out, for it is slower than one."""
    queue_mib: int = Field(default=4096, ge=1)
    """MiB of features that may wait on a drafter's device, for each drafter; one batch always may."""
    depth: int = Field(default=2, ge=1)
    """Batches of features that may wait, for each drafter."""
    optimizer: Literal["replicated", "sharded"] = "replicated"
    """AdamW's moments: all on each drafter, or a part on each, which saves memory and gives the same weights."""
    reduce: Literal["copies", "nccl"] = "copies"
    """How gradients are summed: by copies from GPU to GPU, or by NCCL, which can stand still beside other threads."""
    check_every: int = Field(default=100, ge=0)
    """Steps between two proofs that all drafters have the same weights; 0: none."""
    stall_seconds: int = Field(default=900, ge=0)
    """Seconds without any progress after which all threads' stacks are printed and the process ends; 0: never."""
    check_memory: bool = True
    """Refuse a layout that by estimate needs more memory than is free on a GPU."""

    @field_validator("targets", "drafters", mode="before")
    @classmethod
    def _words(cls, value: object, field: ValidationInfo) -> tuple[str, ...]:
        words = devices.words(value)
        (devices.all_workers if field.field_name == "targets" else devices.drafters)(words)
        return words


class TrainConfig(Section):
    """The whole file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this format."""
    preset: str | None = None
    """Values to start from: qwen3-4b, qwen3-8b or smollm2-135m. What this file says goes before them."""
    init_from: str | None = None
    """Folder of a drafter whose weights the training starts with (its shape must be [draft]'s). None: fresh weights."""
    target: TargetSection
    draft: DraftSection = DraftSection()
    data: DataSection
    train: TrainSection
    layout: LayoutSection = LayoutSection()

    @model_validator(mode="after")
    def _workers_that_fit(self) -> "TrainConfig":
        if why := self.unfit(devices.all_workers(self.layout.targets), devices.drafters(self.layout.drafters)):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _prompts_to_decode(self) -> "TrainConfig":
        if self.train.decode_every and self.data.heldout is None:
            raise ValueError("train.decode_every needs data.heldout: its prompts are what is decoded")
        return self

    def unfit(self, targets: Sequence[devices.Devices], drafters: devices.Devices) -> str | None:
        """Why these targets and drafters, the layout's, can't train by this config, as far as their names tell."""
        layout, rows = self.layout, self.train.rows_per_step
        return devices.fault(
            targets, drafters, rows=rows, allow_shared=layout.allow_shared_device, reduce=layout.reduce
        )


def load(source: Path | str | bytes, sets: Sequence[str] = (), file: str | None = None) -> TrainConfig:
    """Reads a config from a file or from TOML text as bytes; `sets` are "key=value" words that override it.

    file: the name that errors show; default: the path, or "config". Raises ConfigFault.
    """
    if isinstance(source, bytes):
        name, content = file or "config", source
    else:
        name = file or str(source)
        try:
            content = Path(source).read_bytes()
        except OSError as error:
            raise ConfigFault(name, "", f"can't be read: {error.strerror}") from error
    try:
        data = tomllib.loads(content.decode("utf-8-sig"))  # Windows' editors begin a file with a mark
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigFault(name, "", f"not TOML: {error}") from error
    for word in sets:
        _override(data, word)
    version = data.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, bool):  # True is 1 to Python
        raise ConfigFault(name, "schema_version", f"should be {SCHEMA_VERSION}, got {version!r}")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        why = f"{version} is newer than this trainer, which knows {SCHEMA_VERSION}"
        raise ConfigFault(name, "schema_version", why)
    data = _on_preset(data, name)
    if lacking := ", ".join(presets.unfilled(data)):
        raise ConfigFault(name, lacking, f'still to be filled in, where "{presets.UNFILLED}" stands')
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        raise _fault(name, error) from error


def _override(data: dict[str, Any], word: str) -> None:
    """Puts one `--set key=value` into the file's data; the value is TOML, or text when it isn't."""
    key, equals, text = word.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigFault("--set", word, 'expected key=value, as in "train.steps=200"')
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    for section in sections:
        inner = data.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigFault("--set", key, f"{section} is a value, not a section")
        data = cast(dict[str, Any], inner)
    data[last] = value


def _on_preset(data: dict[str, Any], file: str) -> dict[str, Any]:
    """The file's data over the values of the preset that it names."""
    chosen = data.get("preset")
    if chosen is None:
        return data
    if chosen not in presets.names():
        why = f"{chosen!r} is none of {', '.join(presets.names())}"
        close = difflib.get_close_matches(str(chosen), presets.names(), n=1)
        raise ConfigFault(file, "preset", why, close[0] if close else None)
    merged: dict[str, Any] = presets.values_of(chosen)
    for key, value in data.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _fault(file: str, error: ValidationError) -> ConfigFault:
    """The first finding of pydantic, as one of ours; an unknown key goes before a missing one, which it explains."""
    findings = error.errors(include_url=False)
    first = next((f for f in findings if f["type"] == "extra_forbidden"), findings[0])
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("tuple["))
    if key in MOVED:
        return ConfigFault(file, key, f"moved to {MOVED[key]}")
    if first["type"] == "extra_forbidden":
        return ConfigFault(file, key, "unknown key", _nearest(key))
    why = {
        "missing": "missing",
        "value_error": first["msg"].removeprefix("Value error, "),
    }.get(first["type"], f"{first['msg'].replace('Input should', 'should')}, got {first['input']!r}")
    return ConfigFault(file, key, why)


def _nearest(key: str) -> str | None:
    """The right key that resembles a wrong one: the same word in another section, or a similar word, here first."""
    section, _, word = key.rpartition(".")
    keys = sorted(known_keys(), key=lambda known: known.rpartition(".")[0] != section)
    words = {known.rpartition(".")[2]: known for known in reversed(keys)}
    if "." in words.get(word, ""):
        return words[word]
    here = [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(word, here, n=1):
        return words[close[0]]
    if re.search("device|gpu", word):
        return "layout.targets or layout.drafters"
    close = [word] if word in words else difflib.get_close_matches(word, words, n=1)
    return words[close[0]] if close else None


def known_keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the format, dotted, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from known_keys(info.annotation, f"{prefix}{name}.")


def default_gamma(block: int) -> float:
    """The published decay for a block size: 7 for 16, 5 for 10, 4 for 8."""
    return 7.0 if block >= 16 else 5.0 if block >= 10 else 4.0


def micro_rows(config: TrainConfig) -> int:
    """Rows of one forward: as set, or the greatest share that a drafter has of a step's rows."""
    return config.train.micro_rows or -(-config.train.rows_per_step // len(devices.drafters(config.layout.drafters)))


def forwards(config: TrainConfig) -> int:
    """Forwards of a step, of all drafters together: drafter r of R learns from the rows r, r + R, r + 2R, ..."""
    rows, size, count = config.train.rows_per_step, micro_rows(config), len(devices.drafters(config.layout.drafters))
    return sum(-(-len(range(drafter, rows, count)) // size) for drafter in range(count))


def _padding_line(config: TrainConfig) -> str | None:
    """Rows of padding that a step's forwards are filled up with, if any."""
    rows, size, count = config.train.rows_per_step, micro_rows(config), len(devices.drafters(config.layout.drafters))
    if not (padding := forwards(config) * size - rows):
        return None
    shared = f" shared by {count} drafters" if count > 1 else ""
    return (
        f"train.rows_per_step {rows}{shared} in forwards of {size} rows: padding makes up {padding} of a step's "
        f"{rows + padding} rows, which costs time and teaches nothing; a multiple of {size * count} has none"
    )


def idle_keys(config: TrainConfig) -> list[str]:
    """What is set and does nothing beside the other keys, a line each; and what is lost by keys that don't fit.

    They are said and not refused: a preset may set them, and a key can't be taken back with --set.
    """
    draft, settings = config.draft, config.train
    lines: list[str] = []
    if "gamma" in settings.model_fields_set and settings.gamma is not None and settings.loss != "exp-decay":
        lines.append(f"train.gamma {settings.gamma:g} does nothing: train.loss is {settings.loss}")
    if "alpha" in settings.model_fields_set and settings.loss != "d-pace":
        lines.append(f"train.alpha {settings.alpha:g} does nothing: train.loss is {settings.loss}")
    named = len(draft.target_layer_ids or ())
    if "captured" in draft.model_fields_set and named not in (0, draft.captured):
        lines.append(f"draft.captured {draft.captured} does nothing: draft.target_layer_ids names {named} layers")
    if padding := _padding_line(config):
        lines.append(padding)
    if settings.anchors > (tokens := config.data.row_tokens):
        lines.append(
            f"train.anchors {settings.anchors}: more than a row of {tokens} tokens (data.row_tokens) has places for, "
            f"at most {tokens - 1}: the others are padding, which costs time and teaches nothing"
        )
    if settings.eval_every and config.data.heldout is None:
        lines.append(f"train.eval_every {settings.eval_every} does nothing: there is no data.heldout")
    both = math.lcm(settings.eval_every, settings.checkpoint_every)
    if config.data.heldout and not settings.decode_every and both > max(settings.eval_every, settings.checkpoint_every):
        lines.append(
            f"train.eval_every {settings.eval_every} and train.checkpoint_every {settings.checkpoint_every} meet every "
            f"{both} steps only: what is measured at other steps is not saved, and can't be the best"
        )
    return lines


def as_mapping(config: TrainConfig) -> Mapping[str, Any]:
    """The config with every default filled in, as plain values."""
    return config.model_dump(mode="json")
