"""deploy, plan, releases, rollback, prune: code into a container, whole or not at all.

A deploy is one conversation with `receive.py` in the container, which holds the deploy lock as long as it lasts, and at
most one archive:

    container: greets, while the source is read here
    container: takes the lock, clears leftovers, compares the manifest with what it has, says what it lacks
    host:      what is lacking comes as one archive, by `pct push` or through the container's stdin (sending.py)
    container: links and unpacks in a fresh folder, checks every file, fsync, rename, swaps `current`

No exit code and no silence counts as success: `pct push` has exit code 0 on a full disk. Only the container's own
count of the bytes does.
"""

import base64
import getpass
import json
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dflash_ops import answers, sending
from dflash_ops.changes import MAX_TEXT_BYTES, Changes, changes, unified
from dflash_ops.command import Command, Container, Query
from dflash_ops.conversation import Conversation
from dflash_ops.errors import NotFoundError, OpsError, PreflightError
from dflash_ops.progress import Progress
from dflash_ops.release import FileEntry, LeftOut, Manifest, Release, printable
from dflash_ops.remote import bundle
from dflash_ops.sending import ANSWER_SECONDS, SLOWEST_BYTES_PER_SECOND, Via
from dflash_ops.shell import Shell
from dflash_ops.source import Reading, Source, SourceChanged, read

OnWarning = Callable[[str], None]

# A killed deploy lets go of the lock within moments; a living one may take minutes, which nobody should wait out.
_PATIENCE_SECONDS = 5.0
# Code is small; more than this is likely to be data, which belongs into shared/.
_LARGE_BYTES = 50_000_000


@dataclass(frozen=True)
class LiveRun:
    """A run that goes on; it keeps the release that it started with."""

    run_id: str
    release: str


@dataclass(frozen=True)
class Deployed:
    """A release that is whole in the container, and current unless `activated` is false. size: bytes of its files;
    sent: bytes of the archives, 0 when the container had everything; reused: files that did not travel; previous: the
    release that was current before, None for the first; left_out: what was not sent as a secret or a checkpoint."""

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


def deploy(
    shell: Shell,
    container: Container,
    source: Source,
    *,
    via: Via = "push",
    activate: bool = True,
    user: str | None = None,
    way: Progress | None = None,
    warn: OnWarning = lambda text: None,
) -> Deployed:
    """Sends the source as a new release, and makes it current unless told not to. user: whose the files are there.

    A source that changes while it is read is read once more, then SourceChanged; BusyError names another deploy.
    """
    way = way or Progress()
    try:
        return _deploy(shell, container, source, via, activate, user, way, warn)
    except SourceChanged as error:
        way.step(f"{error.where} changed meanwhile: once more")
        return _deploy(shell, container, source, via, activate, user, way, warn)


def _deploy(
    shell: Shell,
    container: Container,
    source: Source,
    via: Via,
    activate: bool,
    user: str | None,
    way: Progress,
    warn: OnWarning,
) -> Deployed:
    begun = time.monotonic()
    way.step(f"reading {source}")
    shell.load()
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        # A connection and a Python there take as long as the reading here.
        greeted = pool.submit(stack.enter_context, _receiver(shell, container, user, activate))
        reading = read(shell, source)
        manifest = reading.manifest
        way.step(f"asking {container}")
        import tarfile  # noqa: F401  # pyright: ignore[reportUnusedImport] (needed next; now there is time)

        talk = greeted.result()
        talk.say(_line(_described(manifest)))
        ready = _answer(shell, container, talk, _patience(manifest.size))
        created_at = later_than(ready["newest"], now())
        release = Release(created_at, reading.commit, manifest, user, reading.branch, reading.dirty)
        lacking, sent = _entries(manifest, ready["lacking"]), 0
        reused = len(manifest.files) - len(_files_of(manifest, ready["lacking"]))
        _check_room(container, ready, lacking, via)
        _warn_of_much(lacking, container, warn)
        while True:  # the container asks again for what vanished meanwhile, but not for ever
            request = {"id": release.id, "record": release.record()}
            if lacking and via == "stream":
                talk.say(_line({**request, "by": "stream"}))
                sent += sending.by_stream(talk, lacking, source.root, way)
                way.step(f"checking {release.id}")
            else:
                told = sending.by_push(shell, container, lacking, source.root, ready["part"], way) if lacking else {}
                sent += told.get("size", 0)
                way.step(f"unpacking and checking {release.id}")
                talk.say(_line({**request, "by": None, **told}))
            done = _answer(shell, container, talk, _patience(manifest.size))
            if done["event"] == "left":
                raise OpsError("the container gave up waiting for us", where=str(container), next="deploy again")
            if done["event"] == "done":
                break
            lacking = _entries(manifest, done["lacking"])
            way.step(f"{len(lacking)} files have vanished there meanwhile")
    return Deployed(
        container=str(container),
        release=release.id,
        commit=reading.commit,
        files=len(manifest.files),
        size=manifest.size,
        sent=sent,
        seconds=time.monotonic() - begun,
        previous=done["previous"],
        activated=activate,
        reused=reused,
        via=via,
        left_out=reading.left_out,
        runs=_live_runs(done),
    )


def plan(
    shell: Shell, container: Container, source: Source, *, texts: bool = False, way: Progress | None = None
) -> Plan:
    """What a deploy would do now; nothing changes. texts: with the changes of files as text."""
    way = way or Progress()
    way.step(f"reading {source}")
    reading = read(shell, source)
    manifest = reading.manifest
    way.step(f"asking {container}")
    parameters = {**_described(manifest), "do": "compare", "texts": MAX_TEXT_BYTES if texts else 0}
    reply = shell.ask(container, _query(container, parameters), timeout=_patience(manifest.size))
    found = changes(reply["files"], reply["folders"], manifest)
    lacking = _entries(manifest, reply["lacking"])
    return Plan(
        container=str(container),
        current=reply["current"],
        damaged=reply["current_damaged"],
        commit=reading.commit,
        files=len(manifest.files),
        size=manifest.size,
        lacking=len(_files_of(manifest, reply["lacking"])),
        to_send=sum(file.size for file in lacking),
        changes=found,
        diff=_diff(found, reply, reading, source.root) if texts else None,
        left_out=reading.left_out,
        runs=_live_runs(reply),
    )


def _diff(found: Changes, reply: dict[str, Any], reading: Reading, root: Path) -> str:
    old = {str(file["path"]): file for file in reply["files"]}
    new = {file.path: file for file in reading.manifest.files}
    text: list[str] = []
    for name in sorted((*found.added, *found.changed, *found.removed)):
        if name.endswith("/"):
            text.append(f"empty folder {name} {'added' if name in found.added else 'removed'}\n")
            continue
        was = base64.b64decode(reply["texts"][name]) if name in reply["texts"] else None
        entry = new.get(name)
        try:
            small = entry is not None and entry.link is None and entry.size <= MAX_TEXT_BYTES
            is_now = (root / name).read_bytes() if small else None
        except OSError as error:
            raise SourceChanged(name) from error
        text.append(unified(name, old.get(name), entry, was, is_now))
    return "".join(text)


def releases(shell: Shell, container: Container) -> Listing:
    """The container's releases."""
    reply = shell.ask(container, _query(container, {"do": "releases"}))
    listed = tuple(
        ListedRelease(
            id=item["id"],
            current=item["id"] == reply["current"],
            files=item["files"],
            size=item["bytes"],
            commit=item["commit"],
            damaged=item["damaged"],
        )
        for item in reply["releases"]
    )
    return Listing(listed, reply["current_damaged"])


def rollback(shell: Shell, container: Container, release: str | None = None) -> RolledBack:
    """Makes another release current: the one named, else the newest before the current one. Every file of it is checked
    first."""
    reply = shell.ask(container, _query(container, {"do": "rollback", "release": release}))
    return RolledBack(str(container), reply["release"], reply["previous"])


def prune(shell: Shell, container: Container, keep: int, *, dry_run: bool = False) -> Pruned:
    """Removes all but the newest `keep` releases; never the current one, one that a run uses, or the newest that is
    whole."""
    parameters = {"do": "prune", "keep": keep, "dry_run": dry_run}
    reply = shell.ask(container, _query(container, parameters), timeout=10 * ANSWER_SECONDS)
    kept = tuple(Kept(item["id"], item["why"]) for item in reply["kept"])
    return Pruned(str(container), dry_run, tuple(reply["removed"]), kept, reply["freed_bytes"])


def now() -> datetime:
    return datetime.now(UTC)


def later_than(newest: str | None, now: datetime) -> datetime:
    """The time of a new release: now, but after the newest one, so that ids sort by age though clocks jump, differ
    between laptops, and count no fractions."""
    if newest is None:
        return now
    before = datetime.strptime(newest[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    return max(now, before + timedelta(seconds=1))


# -- what is lacking


def _described(manifest: Manifest) -> dict[str, Any]:
    return {"files": manifest.records(), "folders": list(manifest.folders)}


def _files_of(manifest: Manifest, lacking: Sequence[str]) -> list[FileEntry]:
    """Every file with one of these contents."""
    wanted = set(lacking)
    return [file for file in manifest.files if file.link is None and file.sha256 in wanted]


def _entries(manifest: Manifest, lacking: Sequence[str]) -> list[FileEntry]:
    """One file for each of these contents."""
    return list({file.sha256: file for file in _files_of(manifest, lacking)}.values())


def _check_room(container: Container, ready: dict[str, Any], lacking: Sequence[FileEntry], via: Via) -> None:
    sent = sum(file.size for file in lacking)
    # A pushed archive lies there beside what is unpacked of it.
    need = ready["copied"] + (2 if via == "push" else 1) * sent
    if ready["free_bytes"] < need:
        raise PreflightError(
            "the container's disk is too full",
            where=str(container),
            why=f"{need} bytes are needed, {ready['free_bytes']} are free",
            next=f"dflash-ops prune --keep 3, or in the container: df -h {container.path}",
        )


def _warn_of_much(lacking: Sequence[FileEntry], container: Container, warn: OnWarning) -> None:
    sent = sum(file.size for file in lacking)
    if sent > _LARGE_BYTES:
        largest = sorted(lacking, key=lambda file: file.size, reverse=True)[:3]
        names = ", ".join(f"{printable(file.path)} ({file.size / 1e6:.0f} MB)" for file in largest)
        warn(
            f"{sent / 1e6:.0f} MB go to {container}, among them {names}. Data belongs into shared/: dflash-ops put; "
            "what no release needs, into .dflashignore"
        )


def _live_runs(reply: dict[str, Any]) -> tuple[LiveRun, ...]:
    return tuple(LiveRun(run["run_id"], run["release"]) for run in reply["runs"])


# -- the conversation with receive.py


@contextmanager
def _receiver(
    shell: Shell, container: Container, user: str | None, activate: bool
) -> Generator[Conversation, None, None]:
    """receive.py, which has greeted and waits for a manifest; it holds its lock from then on until the block ends."""
    command = _command(container, {"do": "deploy", "user": user, "activate": activate})
    with shell.converse(container, command, timeout=ANSWER_SECONDS) as talk:
        _answer(shell, container, talk)
        with talk.beating():
            yield talk


def _patience(size: int) -> float:
    return ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def _line(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode("ascii") + b"\n"


def _answer(shell: Shell, container: Container, talk: Conversation, timeout: float | None = None) -> dict[str, Any]:
    """The next answer in the conversation, or its refusal as one of our errors."""
    while (line := talk.hear(timeout=timeout)) is not None:
        reply = answers.document(line)
        if reply is not None:
            return answers.accepted(reply, str(container))
    result = talk.finish()
    error = shell.explain(container, result)
    raise error if isinstance(error, PreflightError | NotFoundError) else answers.no_answer(result)


def _query(container: Container, parameters: dict[str, Any]) -> Query[dict[str, Any]]:
    return Query(_command(container, parameters), answers.answer)


def _command(container: Container, parameters: dict[str, Any]) -> Command:
    common = {
        "path": container.path,
        "client": f"{getpass.getuser()}@{socket.gethostname()}",
        "patience": _PATIENCE_SECONDS,
    }
    return bundle.command(container.python, "receive", {**common, **parameters})
