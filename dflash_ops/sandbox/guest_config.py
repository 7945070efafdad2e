"""A container's config file: its own lines, and a section for each snapshot. Runs in the hypervisor."""

import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ops.sandbox import layout

Pairs = list[tuple[str, str]]


@dataclass
class Config:
    """A config file taken apart: the container's own lines, and those of each snapshot by its name, oldest first."""

    lines: list[str]
    sections: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @classmethod
    def read(cls, vmid: int, node: str = layout.NODE) -> "Config":
        """FileNotFoundError when the container has no config on that node."""
        config = current = cls([])
        lines = current.lines
        for line in Path(layout.config_file(vmid, node)).read_text(errors="replace").split("\n"):
            if found := re.fullmatch(r"\[([\w-]+)\]", line.strip()):
                lines = config.sections[found[1]] = []
            elif line.strip():
                lines.append(line)
        return config

    def write(self, vmid: int, node: str = layout.NODE) -> None:
        text = "".join(f"{line}\n" for line in self.lines)
        for name, lines in self.sections.items():
            text += f"\n[{name}]\n" + "".join(f"{line}\n" for line in lines)
        file = Path(layout.config_file(vmid, node))
        draft = file.with_suffix(".tmp")
        draft.touch(layout.CONFIG_MODE)
        draft.write_text(text)
        draft.replace(file)

    def pairs(self, name: str | None = None) -> Pairs:
        """The keys and values of the container itself, or as a snapshot kept them."""
        lines = self.lines if name is None else self.sections[name]
        split = (line.partition(":") for line in lines if ":" in line and not line.startswith("#"))
        return [(key.strip(), value.strip()) for key, _, value in split]

    def value(self, key: str, name: str | None = None) -> str | None:
        return dict(self.pairs(name)).get(key)

    def description(self, name: str | None = None) -> str:
        """The comment lines, decoded: one line of text each."""
        lines = self.lines if name is None else self.sections[name]
        return "".join(urllib.parse.unquote(line[1:]) + "\n" for line in lines if line.startswith("#"))

    def put(self, key: str, value: str | None) -> None:
        """Set a key of the container itself, or take it away."""
        self.lines = [line for line in self.lines if line.partition(":")[0] != key]
        if value is not None:
            self.lines.append(f"{key}: {value}")
