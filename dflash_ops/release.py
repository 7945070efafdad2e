"""A release: the files that a deploy sends, what names them, and which files of a folder go into one. Pure.

A release's id is `YYYYMMDD-HHMMSS-<first 7 of the commit, or nogit>-<first 8 of the sha256 of its manifest's files>`,
in UTC: ids sort by age, and equal endings mean equal content.
"""

import hashlib
import json
import posixpath
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pathspec

from dflash_ops.errors import ConfigError, PreflightError
from dflash_ops.remote.releases import MANIFEST, canonical, is_inside

SCHEMA_VERSION = 1
IGNORE_FILE = ".dflashignore"

# Never part of a release: git's own folder, caches of Python, the manifest of a release that is deployed again.
_NEVER = (".git/", "/.git", "__pycache__/", "*.pyc", f"/{MANIFEST}")


@dataclass(frozen=True)
class FileEntry:
    """One file of a release. path: relative, with "/"; bytes that are not UTF-8 are surrogate escapes. link: where a
    symbolic link leads (then size is 0 and sha256 is empty), None for a regular file."""

    path: str
    mode: int
    size: int
    sha256: str
    link: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Every file of a release, sorted by path."""

    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """sha256 of the files' canonical spelling, in hex."""
        return hashlib.sha256(canonical([asdict(file) for file in self.files])).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Release:
    """commit: the full id, None when the files come from no git repository."""

    created_at: datetime
    commit: str | None
    manifest: Manifest

    @property
    def id(self) -> str:
        time = self.created_at.astimezone(UTC).strftime("%Y%m%d-%H%M%S")
        return f"{time}-{self.commit[:7] if self.commit else 'nogit'}-{self.manifest.digest[:8]}"

    def record(self) -> bytes:
        """The manifest as it lies in the release."""
        created_at = self.created_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        files: list[dict[str, Any]] = [asdict(file) for file in self.manifest.files]
        record = {"schema_version": SCHEMA_VERSION, "release": self.id, "commit": self.commit, "created_at": created_at}
        return (json.dumps({**record, "files": files}, indent=0) + "\n").encode("ascii")


def select(names: Iterable[str], ignore: Iterable[str] = ()) -> list[str]:
    """The names that go into a release, sorted: all but what the lines of a .dflashignore (gitignore's patterns)
    match, and what never does. ConfigError for a line that is no pattern."""
    lines = list(ignore)
    for number, line in enumerate(lines, 1):
        _check_pattern(line, number)
    spec = pathspec.GitIgnoreSpec.from_lines([*lines, *_NEVER])
    return sorted(
        {name for name in names if not spec.match_file(name)}, key=lambda name: name.encode("utf-8", "surrogateescape")
    )


def _check_pattern(line: str, number: int) -> None:
    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except ValueError as error:
        raise ConfigError(
            "not a pattern of gitignore",
            where=f"{IGNORE_FILE}, line {number}",
            why=printable(line),
            next="correct that line, or remove it",
        ) from error


def check_link(name: str, text: str) -> None:
    """PreflightError when a symbolic link leads out of the release: it would dangle in the container, or show what the
    container has there."""
    if posixpath.isabs(text) or not is_inside(posixpath.normpath(posixpath.join(posixpath.dirname(name), text))):
        raise PreflightError(
            "a symbolic link leads out of the source",
            where=printable(name),
            why=f"it points to {printable(text)}",
            next=f"make it relative, or name it in {IGNORE_FILE}",
        )


def printable(name: str) -> str:
    """A file's name for people: bytes that are not UTF-8, and control characters, as escapes."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
