"""deploy, releases, rollback, put: code and files into a container, whole or not at all.

A deploy is one conversation with `receive.py` in the container, which holds the deploy lock as long as it lasts, and
one `pct push`:

    container: takes the lock, clears leftovers, says where to push
    host:      the archive arrives over SFTP in a 0700 folder, `pct push` copies it into the container
    container: checks the archive, unpacks to a fresh folder, checks every file, fsync, rename, swaps `current`

No exit code and no silence counts as success: `pct push` has exit code 0 on a full disk. Only the container's own
count of the bytes does.
"""

import getpass
import json
import logging
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import stamina

from dflash_ops import answers
from dflash_ops.command import Command, Container, Query, Result
from dflash_ops.conversation import Conversation
from dflash_ops.errors import (
    BusyError,
    NotFoundError,
    OpsError,
    PreflightError,
    UsageFault,
)
from dflash_ops.release import Release, printable
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell
from dflash_ops.source import Source, read, sha256_of, temporary_file, write_archive
from dflash_ops.staging import staging

# stamina logs its retries; without a handler Python would print them on stderr.
logging.getLogger("stamina").addHandler(logging.NullHandler())

OnStep = Callable[[str], None]

# What pct says when it waits for the container's lock, and when it gets it; anything else on stderr is a failure,
# whatever the exit code.
_WAITING, _GOT_IT = "trying to acquire lock...", "OK"
_LOCK_TIMEOUT_CODE = 4
_SLOWEST_BYTES_PER_SECOND = 1_000_000
_ANSWER_SECONDS = 60.0
# A killed deploy lets go of the lock within moments; a living one may take minutes, which nobody should wait out.
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Deployed:
    """A release that is current now. size: bytes of its files; sent: bytes of the archive; previous: the release that
    was current before, None for the first."""

    container: str
    release: str
    commit: str | None
    files: int
    size: int
    sent: int
    seconds: float
    previous: str | None


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
class RolledBack:
    container: str
    release: str
    previous: str | None


@dataclass(frozen=True)
class Stored:
    """Files put into the container's shared folder; sent: their bytes."""

    container: str
    paths: tuple[str, ...]
    sent: int
    seconds: float


def deploy(shell: Shell, container: Container, source: Source, *, on_step: OnStep = lambda step: None) -> Deployed:
    """Sends the source as a new release and makes it current."""
    begun = time.monotonic()
    on_step(f"reading {source}")
    commit, manifest = read(shell, source)
    with (
        temporary_file() as archive,
        _receiver(shell, container, "deploy", 2 * manifest.size, on_step) as (talk, ready),
    ):
        release = Release(later_than(ready["newest"], datetime.now(UTC)), commit, manifest)
        write_archive(release, source.root, archive)
        size, sha256 = sha256_of(archive)
        _send(shell, container, archive, size, ready["part"], on_step)
        on_step(f"unpacking and checking {release.id}")
        done = _request(
            shell, container, talk, {"id": release.id, "size": size, "sha256": sha256}, size + manifest.size
        )
    return Deployed(
        container=str(container),
        release=release.id,
        commit=commit,
        files=len(manifest.files),
        size=manifest.size,
        sent=size,
        seconds=time.monotonic() - begun,
        previous=done["previous"],
    )


def releases(shell: Shell, container: Container) -> list[ListedRelease]:
    """The container's releases, the oldest first."""
    reply = shell.ask(container, _query(container, {"do": "releases"}))
    return [
        ListedRelease(
            id=item["id"],
            current=item["id"] == reply["current"],
            files=item["files"],
            size=item["bytes"],
            commit=item["commit"],
            damaged=item["damaged"],
        )
        for item in reply["releases"]
    ]


def rollback(shell: Shell, container: Container, release: str | None = None) -> RolledBack:
    """Makes an earlier release current again: the one named, else the newest before the current one."""
    reply = shell.ask(container, _query(container, {"do": "rollback", "release": release}))
    return RolledBack(str(container), reply["release"], reply["previous"])


def put(
    shell: Shell, container: Container, files: list[Path], target: str, *, on_step: OnStep = lambda step: None
) -> Stored:
    """Copies files into the container's shared folder. target: `shared/...` (or below it, absolute); a name for one
    file, a folder with `/` at its end for any number."""
    begun = time.monotonic()
    wanted = shared_names(container.path, [file.name for file in files], target)
    for file in files:
        if not file.is_file():
            raise NotFoundError("no such file to put", where=printable(str(file)), next="name a regular file")
    sent = 0
    with _receiver(shell, container, "put", sum(file.stat().st_size for file in files), on_step) as (talk, ready):
        for place, name in zip(files, wanted, strict=True):
            with place.open("rb") as file:
                size, sha256 = sha256_of(file)
                _send(shell, container, file, size, ready["part"], on_step)
            on_step(f"checking shared/{printable(name)}")
            _request(shell, container, talk, {"target": name, "size": size, "sha256": sha256}, size)
            sent += size
    paths = tuple(f"{container.path}/shared/{name}" for name in wanted)
    return Stored(str(container), paths, sent, time.monotonic() - begun)


def shared_names(path: str, names: list[str], target: str) -> list[str]:
    """Where files of these names go, relative to <path>/shared. UsageFault for a target outside it."""
    relative = target.removeprefix(f"{path}/")
    below = relative.removeprefix("shared/")
    parts = PurePosixPath(below).parts
    if below == relative or below.startswith("/") or ".." in parts or "\0" in below:
        raise UsageFault(
            "put writes only below shared/",
            where=printable(target),
            why=f"it is {path}/shared",
            next="put FILE shared/data/",
        )
    if not below or below.endswith("/"):
        return [str(PurePosixPath(below, name)) for name in names]
    if len(names) > 1:
        raise UsageFault(
            "several files need a folder", where=printable(target), next=f"end it with /: {printable(target)}/"
        )
    return [str(PurePosixPath(below))]


def later_than(newest: str | None, now: datetime) -> datetime:
    """The time of a new release: now, but after the newest one, so that ids sort by age though clocks jump, differ
    between laptops, and count no fractions."""
    if newest is None:
        return now
    before = datetime.strptime(newest[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    return max(now, before + timedelta(seconds=1))


# -- the conversation with receive.py


@contextmanager
def _receiver(
    shell: Shell, container: Container, do: str, need_bytes: int, on_step: OnStep
) -> Generator[tuple[Conversation, dict[str, Any]], None, None]:
    """receive.py, holding its lock until the block ends, and its first answer: where it wants files pushed."""
    on_step(f"asking {container}")
    with shell.converse(container, _command(container, {"do": do}), timeout=_ANSWER_SECONDS) as talk:
        ready = _answer(shell, container, talk)
        if ready["free_bytes"] < need_bytes:
            raise PreflightError(
                "the container's disk is too full",
                where=str(container),
                why=f"{need_bytes} bytes are needed, {ready['free_bytes']} are free",
                next=f"in the container: df -h {container.path}",
            )
        with talk.beating():
            yield talk, ready


def _send(shell: Shell, container: Container, file: BinaryIO, size: int, part: str, on_step: OnStep) -> None:
    host = container.host
    on_step(f"staging on {host}")
    with staging(shell, host) as folder:
        staged = f"{folder}/{PurePosixPath(part).name}"
        on_step(f"sending {size} bytes to {host}:{staged}")
        shell.send(host, file, staged)
        on_step(f"pct push {container.vmid} {staged} {part}")
        _push(shell, container, staged, part, size)


def _push(shell: Shell, container: Container, staged: str, part: str, size: int) -> None:
    """`pct push`, which waits at most 10 s for its lock: so up to three of them. That it worked is for the container to
    say, that it failed may be said here."""
    command = Command(("env", "LC_ALL=C.UTF-8", "pct", "push", str(container.vmid), staged, part))
    timeout = _ANSWER_SECONDS + size / _SLOWEST_BYTES_PER_SECOND

    @stamina.retry(on=BusyError, attempts=3, wait_initial=1.0, wait_max=5.0)
    def push() -> Result:
        result = shell.run(container.host, command, timeout=timeout)
        if result.code == _LOCK_TIMEOUT_CODE:
            raise BusyError(
                "another pct command holds the container's lock",
                where=str(container),
                why=push_complaint(result),
                next="see on the host what runs: ps aux | grep pct",
            )
        return result

    result = push()
    complaint = push_complaint(result)
    if result.code != 0:
        raise shell.explain(container, result)
    if complaint:
        raise OpsError("pct push failed", where=str(container), why=complaint)


def push_complaint(result: Result) -> str:
    """What pct says against a push; empty when it has nothing to say but that it waited for a lock."""
    text = result.err.decode("utf-8", "replace").replace(_WAITING, "")
    lines = [line.strip() for line in text.split("\n")]
    return "; ".join(line for line in lines if line and line != _GOT_IT)


def _request(
    shell: Shell, container: Container, talk: Conversation, request: dict[str, Any], size: int
) -> dict[str, Any]:
    talk.say(json.dumps(request).encode() + b"\n")
    return _answer(shell, container, talk, _ANSWER_SECONDS + size / _SLOWEST_BYTES_PER_SECOND)


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
