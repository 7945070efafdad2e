"""A release: the files that a deploy sends, what names them, and which files of a folder go into one. Pure.

A release's id is `YYYYMMDD-HHMMSS-<first 7 of the commit, or nogit>-<first 8 of the sha256 of its manifest's files and
empty folders>`, in UTC: ids sort by age, and equal endings mean equal content.
"""

import hashlib
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dflash_ops.errors import ConfigError, PreflightError
from dflash_ops.remote.releases import MANIFEST, canonical

if TYPE_CHECKING:
    import pathspec

SCHEMA_VERSION = 1
IGNORE_FILE = ".dflashignore"

# So many links the kernel follows for one name.
_MOST_LINKS = 40

# Never part of a release: git's own folder, caches of Python, what a Mac's Finder leaves in each folder, the manifest
# of a release that is deployed again.
_NEVER = (".git", "__pycache__/", "*.pyc", ".DS_Store", f"/{MANIFEST}")

# What is left out unless `--include` names it: sending it would be a mistake more often than not.
_LEFT_OUT = {
    "a secret": (
        *("*.env", ".env.*", ".envrc", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials"),
        *(".ssh/", ".aws/", ".gnupg/", ".docker/config.json", ".kube/config", "credentials.json", ".huggingface_token"),
        *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.kdbx", "*.jks"),
        # ssh's keys have no ending; a module of such a name has one, and a folder is none.
        *("id_*", "!id_*.*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", "!id_*.py", "!id_*/"),
        *("!.env.example", "!.env.sample", "!.env.template", "!example.env", "!sample.env", "!template.env"),
    ),
    "a checkpoint": (
        *("*.safetensors", "*.ckpt", "*.pt", "*.pth", "*.gguf"),
        *("pytorch_model*.bin", "model-*-of-*.bin", "optimizer.bin"),
        *("step-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]/", "checkpoint-[0-9]*/"),
    ),
}


@dataclass(frozen=True)
class FileEntry:
    """One file of a release. path: relative, with "/"; bytes that are not UTF-8 are surrogate escapes. mode: without
    write bits, for a release is read-only. link: where a symbolic link leads (then size is 0 and sha256 is empty), None
    for a regular file."""

    path: str
    mode: int
    size: int
    sha256: str
    link: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Every file of a release, sorted by path. folders: those with nothing in them."""

    files: tuple[FileEntry, ...]
    folders: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of the canonical spelling, in hex."""
        return hashlib.sha256(canonical(self.records(), list(self.folders))).hexdigest()

    def records(self) -> list[dict[str, Any]]:
        """The files as they are written down."""
        return [vars(file) for file in self.files]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Release:
    """commit: the full id, None when the files come from no git repository. user: whose the files are in the
    container, None for its root. branch, dirty: as of the Reading."""

    created_at: datetime
    commit: str | None
    manifest: Manifest
    user: str | None = None
    branch: str | None = None
    dirty: bool | None = None

    @property
    def id(self) -> str:
        time = self.created_at.astimezone(UTC).strftime("%Y%m%d-%H%M%S")
        return f"{time}-{self.commit[:7] if self.commit else 'nogit'}-{self.manifest.digest[:8]}"

    def record(self) -> dict[str, Any]:
        """What the manifest in the container says besides the files and folders."""
        created_at = self.created_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return {
            "schema_version": SCHEMA_VERSION,
            "release": self.id,
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.dirty,
            "created_at": created_at,
            "user": self.user,
        }


@dataclass(frozen=True)
class LeftOut:
    """A file that is not sent, and what it was taken for."""

    path: str
    why: str


def select(
    names: Iterable[str], ignore: Iterable[str] = (), include: Iterable[str] = ()
) -> tuple[list[str], list[LeftOut]]:
    """The names that go into a release, sorted, and those that are left out as what nobody means to send.

    ignore: the lines of a .dflashignore (gitignore's patterns); what they match is not sent, and not told. include:
    patterns that name what else would be left out. ConfigError for a line that is no pattern.
    """
    import pathspec  # here, as a deploy connects meanwhile

    ignored = _patterns(list(ignore), lambda number: f"{IGNORE_FILE}, line {number}")
    included = _patterns(list(include), lambda number: "--include")
    never = pathspec.GitIgnoreSpec.from_lines(_NEVER)
    taken_for = {what: pathspec.GitIgnoreSpec.from_lines(lines) for what, lines in _LEFT_OUT.items()}
    sent: list[str] = []
    left_out: list[LeftOut] = []
    for name in sorted(set(names), key=lambda name: name.encode("utf-8", "surrogateescape")):
        if ignored.match_file(name) or never.match_file(name):
            continue
        why = next((what for what, spec in taken_for.items() if spec.match_file(name)), None)
        if why is None or included.match_file(name):
            sent.append(name)
        else:
            left_out.append(LeftOut(name, why))
    return sent, left_out


def _patterns(lines: list[str], where: Callable[[int], str]) -> "pathspec.GitIgnoreSpec":
    import pathspec

    for number, line in enumerate(lines, 1):
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError as error:
            raise ConfigError(
                "not a pattern of gitignore", where=where(number), why=printable(line), next="correct it, or remove it"
            ) from error
    return pathspec.GitIgnoreSpec.from_lines(lines)


def check_link(name: str, links: Mapping[str, str]) -> None:
    """PreflightError when a symbolic link leads out of the release, be it by way of others: it would dangle in the
    container, or show what the container has there. links: all of the release, where each leads to."""
    text = links[name]
    if _leaves(name, links):
        raise PreflightError(
            "a symbolic link leads out of the source",
            where=printable(name),
            why=f"it points to {printable(text)}",
            next=f"make it relative, or name it in {IGNORE_FILE}",
        )


def _leaves(name: str, links: Mapping[str, str]) -> bool:
    """Follows a link as the kernel does: name by name, through every other link on its way."""
    at = name.split("/")[:-1]
    left = list(reversed(links[name].split("/")))
    if posixpath.isabs(links[name]):
        return True
    for _ in range(_MOST_LINKS):
        while left:
            part = left.pop()
            if part == ".." and not at:
                return True
            if part == "..":
                at.pop()
            elif part not in ("", "."):
                at.append(part)
                if (text := links.get("/".join(at))) is not None:
                    break
        else:
            return not at  # the release itself is a folder that holds the link
        if posixpath.isabs(text):
            return True
        at.pop()
        left += reversed(text.split("/"))
    return False  # it leads in a circle: nowhere


def printable(name: str) -> str:
    """A file's name for people: bytes that are not UTF-8, and control characters, as escapes."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
