"""Configs to start with: `preset = "qwen3-4b"` in a config builds on one, `python -m trainer config` writes one.

A preset is a TOML file in this folder. What the config itself says goes before it.
"""

import argparse
import json
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


def written(model: type[BaseModel], preset: str | None) -> str:
    """A config of this model as TOML, every key explained.

    Keys of the preset are set, those that have no default are to be filled in; the others stand there as comments with
    their default.
    """
    values = values_of(preset) if preset else {}
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
    """`python -m trainer config [PRESET] [--out FILE]`. Raises OSError when the file can't be written."""
    from trainer.config import TrainConfig

    parser = argparse.ArgumentParser("python -m trainer config", description="Write a config, every key explained.")
    parser.add_argument("preset", nargs="?", choices=names(), help="one of %(choices)s; without: no preset's values")
    parser.add_argument("--out", type=Path, help="a file that is not there yet (default: the terminal)")
    options = parser.parse_args(list(words))
    text = written(TrainConfig, options.preset)
    if options.out is None:
        print(text, end="")
        return 0
    with options.out.open("x") as file:
        file.write(text)
    print(f"wrote {options.out}; fill in {', '.join(unfilled(tomllib.loads(text)))}")
    return 0
