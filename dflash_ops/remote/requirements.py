"""A hashed lock (`trainer/requirements.lock`, as pip and uv read it): its packages, and which of them a machine needs.

Lines are `NAME==VERSION ; MARKER --hash=...`, and nothing else. Pure; standard library only, Python >= 3.9.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_ops.remote.answers import Fault

NAME = "trainer/requirements.lock"

_LINE = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;]+)\s*(?:;\s*(.+))?")
_HASH = re.compile(r"\s--hash=(\S+)")
_PYTHON = re.compile(r"^#.*\bpython >= ?(\d+\.\d+)", re.MULTILINE)
# What comes with one build of torch and no other: another CUDA brings others, the CPU's none.
_OF_TORCH_BUILD = re.compile(r"(nvidia|cuda|triton|pytorch-triton)(-|$)")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


class Locked(NamedTuple):
    """name: in its normal spelling; marker: for which machines, "" for all; hashes: `sha256:...`; line: as written."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    line: str

    @property
    def of_torch_build(self) -> bool:
        return _OF_TORCH_BUILD.match(self.name) is not None


class Pins(NamedTuple):
    """What a container has instead of what the lock says. torch: a version (`2.12.1+cu126`), or another build of the
    locked one (`cu126`, `cpu`); torch_index: where that build is found; transformers: a version."""

    torch: str | None = None
    torch_index: str | None = None
    transformers: str | None = None


class Lock(NamedTuple):
    """python: the oldest that it is for, None when it doesn't say."""

    packages: tuple[Locked, ...]
    python: str | None

    def version(self, name: str) -> str | None:
        return next((package.version for package in self.packages if package.name == name), None)

    def pinned(self, pins: Pins) -> dict[str, str]:
        """The versions that replace the lock's, by name."""
        found: dict[str, str] = {}
        if pins.torch is not None:
            locked = self.version("torch")
            whole = pins.torch[:1].isdigit() or locked is None
            found["torch"] = pins.torch if whole else f"{locked}+{pins.torch}"
        if pins.transformers is not None:
            found["transformers"] = pins.transformers
        return found

    def kept(self, pins: Pins, facts: dict[str, str]) -> list[Locked]:
        """What of the lock a machine with these facts gets as it is written."""
        replaced = self.pinned(pins)
        return [
            package
            for package in self.packages
            if package.name not in replaced
            and not (package.of_torch_build and "torch" in replaced)
            and applies(package.marker, facts)
        ]

    def cuda(self, pins: Pins) -> str | None:
        """The CUDA that torch shall be built with: "12.6", "none" for the CPU's build; None when nothing says."""
        if pins.torch is not None:
            build = self.pinned(pins)["torch"].partition("+")[2]
            match = re.fullmatch(r"cu(\d+)(\d)", build)
            return f"{match.group(1)}.{match.group(2)}" if match else "none" if build == "cpu" else None
        version = next((package.version for package in self.packages if _is_cuda(package.name)), None)
        return ".".join(version.split(".")[:2]) if version else None


def _is_cuda(name: str) -> bool:
    return re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name) is not None


def parse(text: str, where: str = NAME) -> Lock:
    """Fault("config") for a line that is no `NAME==VERSION`."""
    packages: list[Locked] = []
    for line in re.sub(r"\\\r?\n", " ", text).split("\n"):
        line = line.strip()
        if not line or line.startswith("#") or line.startswith("--only-binary"):
            continue
        said, hashes = _HASH.sub("", f" {line}").strip(), tuple(_HASH.findall(f" {line}"))
        said = re.sub(r"\s#.*$", "", said).strip()
        match = _LINE.fullmatch(said)
        if match is None:
            raise Fault("config", "the lock has a line that is no NAME==VERSION", said[:100], "make it anew", where)
        name, version, marker = match.groups()
        if marker:
            applies(marker, {})
        packages.append(Locked(normal(name), version, (marker or "").strip(), hashes, line))
    found = _PYTHON.search(text)
    return Lock(tuple(packages), found.group(1) if found else None)


def normal(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same(wanted: str, has: str) -> bool:
    """Whether an installed version is the wanted one; without a build (`+cpu`) in `wanted`, any build will do."""
    wanted, has = wanted.lower(), has.lower()
    return wanted == has or ("+" not in wanted and wanted == has.partition("+")[0])


def applies(marker: str, facts: dict[str, str]) -> bool:
    """Whether a marker is true for a machine. facts: by the marker's names; with none, only the marker's form is
    checked. Fault("config") for what is no marker."""
    if not marker:
        return True
    try:
        return _holds(ast.parse(marker.strip(), mode="eval").body, facts)
    except (SyntaxError, TypeError, KeyError) as error:
        raise Fault("config", "the lock has a marker that is none", f"{marker!r}: {error}", "make it anew") from None


def _holds(node: ast.expr, facts: dict[str, str]) -> bool:
    if isinstance(node, ast.BoolOp):
        values = [_holds(each, facts) for each in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise TypeError("neither a comparison nor several")
    operation, sides = type(node.ops[0]), (node.left, node.comparators[0])
    left, right = (_text(side, facts) for side in sides)
    versions = any(isinstance(side, ast.Name) and "version" in side.id for side in sides)
    if versions and operation not in (ast.In, ast.NotIn):
        return bool(_COMPARE[operation](_numbers(left), _numbers(right)))
    return bool(_COMPARE[operation](left, right))


def _text(node: ast.expr, facts: dict[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return facts.get(node.id, "")
    raise TypeError("neither a name nor a text")


def _numbers(version: str) -> tuple[int, ...]:
    """3.11.0rc1 -> (3, 11): zeros at the end say nothing."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
