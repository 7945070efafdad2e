"""Configs to start with: `preset = "qwen3-4b"` in a config builds on one, `python -m trainer config` writes one.

A preset is a TOML file in this folder. What the config itself says goes before it.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo

FOLDER = Path(__file__).parent
WIDTH = 110
EXAMPLES = {"target.path": "Qwen/Qwen3-4B", "data.train": "conversations.jsonl", "train.steps": 10000}
"""Values of the keys that have neither a default nor a value of the preset, for a written config's explanations."""
UNFILLED = "FILL IN"
"""What stands there as their value. A config that still has it is refused."""


def names() -> list[str]:
    """The presets there are."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def values_of(name: str) -> dict[str, Any]:
    """A preset's keys, in sections. `name` is one of names()."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def gpus_of(word: str) -> tuple[list[str], list[str]]:
    """The targets and drafters that a layout's word means: "5+3" has targets on GPUs 0 to 4 and drafters on 5 to 7, and
    "8" a target and a drafter on each of eight. Raises ValueError.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2})?", word, re.ASCII):
        raise ValueError(f'{word!r} is neither TARGETS+DRAFTERS, as "5+3", nor a number of GPUs that have both')

    def named(first: int, count: int) -> list[str]:
        return [f"cuda:{first}" if count == 1 else f"cuda:{first}-{first + count - 1}"]

    targets, plus, drafters = word.partition("+")
    if not plus:
        return named(0, int(word)), named(0, int(word))
    return named(0, int(targets)), named(int(targets), int(drafters))


def laid_out(values: Mapping[str, Any], word: str, rows: int) -> dict[str, Any]:
    """A preset's values with that layout (gpus_of), and rows of a step that its drafters share evenly: at least those
    of the preset, or else `rows`.
    """
    targets, drafters = gpus_of(word)
    train, count = values.get("train", {}), int(word.rpartition("+")[2])
    even = -(-train.get("rows_per_step", rows) // count) * count
    layout = {**values.get("layout", {}), "targets": targets, "drafters": drafters}
    return {**values, "train": {**train, "rows_per_step": even}, "layout": layout}


def written(model: type[BaseModel], preset: str | None, layout: str | None = None) -> str:
    """A config of this model as TOML, every key explained.

    Keys of the preset are set, those that have no default are to be filled in; the others stand there as comments with
    their default. layout: as gpus_of has it; ValueError when it is none.
    """
    values = values_of(preset) if preset else {}
    if layout is not None:
        values = laid_out(values, layout, dict(_fields(model.model_fields["train"]))["rows_per_step"].default)
    head = f"# The preset {preset}, with every key there is.\n" if preset else "# Every key there is.\n"
    head += f'# A key behind a # has its default; where "{UNFILLED}" stands, there is none.\n\n'
    plain = {n: info for n, info in model.model_fields.items() if not _is_section(info)}
    top = "\n".join(_key(n, info, values, "") for n, info in plain.items() if n != "preset")
    sections = [
        f"\n\n[{name}]\n" + "\n".join(_key(n, f, values.get(name, {}), f"{name}.") for n, f in _fields(info))
        for name, info in model.model_fields.items()
        if _is_section(info)
    ]
    return head + top + "".join(sections) + "\n"


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _fields(info: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    yield from info.annotation.model_fields.items()


def _key(name: str, info: FieldInfo, values: Mapping[str, Any], section: str) -> str:
    """The explanation of a key, and its line."""
    explained = "".join(f"# {line}\n" for line in wrap(" ".join((info.description or "").split()), WIDTH))
    if name in values:
        return f"{explained}{name} = {_toml(values[name])}"
    if info.is_required():
        example = _toml(EXAMPLES[section + name])
        return f"{explained}# For example {example}.\n{name} = {_toml(UNFILLED)}"
    if info.default is None:
        return f"{explained}#{name} ="
    return f"{explained}#{name} = {_toml(info.default)}"


def _toml(value: object) -> str:
    """A value in TOML: its strings, numbers, booleans and lists are JSON's."""
    return json.dumps(value)


def unfilled(values: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """The keys, dotted, that still have to be filled in: of a config's values, or of a section's."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from unfilled(cast(dict[str, Any], value), f"{section}{name}.")
        elif value == UNFILLED:
            yield section + name


def main(words: Sequence[str]) -> int:
    """`python -m trainer config [PRESET] [--layout GPUS] [--out FILE]`. Raises OSError."""
    from trainer.config import TrainConfig

    parser = argparse.ArgumentParser("python -m trainer config", description="Write a config, every key explained.")
    parser.add_argument("preset", nargs="?", choices=names(), help="one of %(choices)s; without: no preset's values")
    parser.add_argument(
        "--layout", metavar="GPUS", help='"5+3": targets on five GPUs, drafters on three; "8": both on each of eight'
    )
    parser.add_argument("--out", type=Path, help="a file that is not there yet (default: the terminal)")
    options = parser.parse_args(list(words))
    try:
        text = written(TrainConfig, options.preset, options.layout)
    except ValueError as error:
        parser.error(f"--layout: {error}")
    if options.out is None:
        print(text, end="")
        return 0
    with options.out.open("x") as file:
        file.write(text)
    print(f"wrote {options.out}; fill in {', '.join(unfilled(tomllib.loads(text)))}")
    return 0
