"""What the verbs of deploy.py give."""

from dataclasses import dataclass

from dflash_ops.changes import Changes
from dflash_ops.release import LeftOut
from dflash_ops.sending import Via


@dataclass(frozen=True)
class LiveRun:
    """A run that goes on; it keeps the release that it started with."""

    run_id: str
    release: str


@dataclass(frozen=True)
class Deployed:
    """A release that is whole in the container, and current unless `activated` is false. size: bytes of its files;
    sent: bytes of the archives, 0 when the container had everything; reused: files that did not travel; previous: the
    release that was current before, None for the first; left_out: what was not sent as a secret or a checkpoint;
    snapshot: the container's, made before, None unless asked for."""

    container: str
    release: str
    commit: str | None
    files: int
    size: int
    sent: int
    seconds: float
    previous: str | None
    activated: bool
    reused: int
    via: Via
    left_out: tuple[LeftOut, ...]
    runs: tuple[LiveRun, ...]
    snapshot: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a deploy would do now. size: bytes of all files; to_send: bytes of the content that the container lacks, in
    `lacking` files; diff: the changes as text, None unless asked for; damaged: why `current` is none."""

    container: str
    current: str | None
    damaged: str
    commit: str | None
    files: int
    size: int
    lacking: int
    to_send: int
    changes: Changes
    diff: str | None
    left_out: tuple[LeftOut, ...]
    runs: tuple[LiveRun, ...]


@dataclass(frozen=True)
class ListedRelease:
    """A release in the container. files, size (bytes), commit: None when its manifest can't be read (damaged)."""

    id: str
    current: bool
    files: int | None
    size: int | None
    commit: str | None
    damaged: bool


@dataclass(frozen=True)
class Listing:
    """The container's releases, the oldest first. damaged: why `current` is none of them; empty when it is, or before
    the first deploy."""

    releases: tuple[ListedRelease, ...]
    damaged: str


@dataclass(frozen=True)
class RolledBack:
    container: str
    release: str
    previous: str | None


@dataclass(frozen=True)
class Kept:
    id: str
    why: str


@dataclass(frozen=True)
class Pruned:
    """removed: the ids that are gone, or would be; freed: bytes, 0 for a dry run."""

    container: str
    dry_run: bool
    removed: tuple[str, ...]
    kept: tuple[Kept, ...]
    freed: int
