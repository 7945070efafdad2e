"""Takes releases into <path>/releases and files into <path>/shared; lists releases and swaps back.

`deploy` and `put` are conversations: this end takes the lock, clears what killed ones left, and says where `pct push`
shall write; the other end says what was written there, and hears whether it is whole. A link that ends, or is silent
for 30 s, ends the conversation and frees the lock.

Parameters: path; do, the verb; client, for others to read; patience, seconds to wait for a lock; the verb's own.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import select
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, releases
from dflash_ops.remote.answers import Fault

_SILENCE_SECONDS = 30.0


def main(parameters: dict[str, Any]) -> int:
    """Runs one verb; its last line of output is its answer, or why not. Returns the exit code."""
    path = Path(parameters["path"])
    os.umask(0o022)
    return answers.answer(path, lambda: _VERBS[parameters["do"]](path, parameters))


# -- verbs


def deploy(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Hears {"id", "size", "sha256"} of the archive it has made room for; the release is current when this returns."""
    _make_folders(path)
    with _lock(path, "deploy", parameters):
        releases.remove_leftovers(path)
        with _room(path, "deploy") as part:
            request = _hear()
            if request is None:
                return {"event": "left"}
            previous, release = releases.current(path), str(request["id"])
            _check_part(part, request)
            if not (path / "releases" / release).exists():
                releases.unpack(part, path, release)
            files = releases.verify(path / "releases" / release, release)
            releases.activate(path, release)
    return {"event": "done", "release": release, "previous": previous, "files": len(files)}


def put(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Hears {"target", "size", "sha256"} of one file after the other; target is relative to <path>/shared."""
    _make_folders(path)
    done = 0
    with _lock(path, "put", parameters):
        for old in (path / "incoming").glob("put-*.part"):
            old.unlink()
        with _room(path, "put") as part:
            while (request := _hear()) is not None:
                _check_part(part, request)
                _move_into_shared(part, path / "shared", str(request["target"]))
                done += 1
                answers.say({"event": "stored", "target": request["target"]})
    return {"event": "done", "files": done}


def list_releases(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """All releases, the oldest first."""
    described = [releases.describe(path, name) for name in releases.names(path)]
    return {"current": releases.current(path), "releases": described}


def rollback(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Makes an earlier release current: the one asked for, else the newest that is older than the current one."""
    release: str | None = parameters["release"]
    if not (path / "releases").is_dir():
        raise Fault("not_found", "there are no releases yet", "", "dflash-ops deploy", str(path))
    _make_folders(path)
    with _lock(path, "deploy", parameters):
        names, now = releases.names(path), releases.current(path)
        if release is None:
            older = [name for name in names if now is None or name < now]
            if not older:
                raise Fault("not_found", "there is no earlier release", f"current: {now}", "dflash-ops releases")
            release = older[-1]
        elif release not in names:
            near = [name for name in names if name.startswith(release[:8])][-1:] or names[-1:]
            why = f"nearest: {near[0]}" if near else ""
            raise Fault("not_found", f"there is no release {release}", why, "dflash-ops releases")
        files = releases.verify(path / "releases" / release, release)
        releases.activate(path, release)
    return {"release": release, "previous": now, "files": len(files)}


_VERBS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "deploy": deploy,
    "put": put,
    "releases": list_releases,
    "rollback": rollback,
}


# -- parts of them


def _make_folders(path: Path) -> None:
    for name in ("releases", "runs", "shared/data", "locks"):
        (path / name).mkdir(parents=True, exist_ok=True)
    (path / "incoming").mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _lock(path: Path, name: str, parameters: dict[str, Any]) -> Generator[None, None, None]:
    """Holds <path>/locks/<name>.lock, which says who has it since when; the kernel frees it with this process."""
    with (path / "locks" / f"{name}.lock").open("a+") as file:
        deadline = time.monotonic() + parameters["patience"]
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().strip() or "somebody"
                    raise Fault(
                        "busy", f"another {name} is going on", f"held by {holder}", "run it again later"
                    ) from None
                time.sleep(0.1)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):  # the words are a courtesy; a full disk is met, and told, later
            file.truncate(0)
            file.write(f"{parameters['client']} since {since}\n")
            file.flush()
        yield


@contextlib.contextmanager
def _room(path: Path, name: str) -> Generator[Path, None, None]:
    """Says where an archive or file may be pushed, and how much fits; what was pushed there is removed afterwards."""
    part = path / "incoming" / f"{name}-{secrets.token_hex(4)}.part"
    newest = releases.names(path)[-1:]
    free = shutil.disk_usage(path).free
    answers.say({"event": "ready", "part": str(part), "free_bytes": free, "newest": newest[0] if newest else None})
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _check_part(part: Path, request: dict[str, Any]) -> None:
    """`pct push` exits 0 on nearly every failure, and is silent on a full disk: only the bytes tell."""
    wanted = int(request["size"])
    try:
        size = part.stat().st_size
        with part.open("rb") as file:
            sha256 = releases.sha256(file)
    except FileNotFoundError:
        raise Fault("verification", "nothing arrived in the container", f"no {part}", "run it again") from None
    if size == wanted and sha256 == request["sha256"]:
        return
    free = shutil.disk_usage(part.parent).free
    if size < wanted and free < wanted - size:
        raise answers.disk_full(part.parent, f"{size} of {wanted} bytes arrived, {free} are left")
    why = (
        f"{size} of {wanted} bytes" if size != wanted else f"sha256 {sha256[:16]}..., sent {request['sha256'][:16]}..."
    )
    raise Fault("verification", "what arrived is not what was sent", why, "run it again", str(part))


def _move_into_shared(part: Path, shared: Path, name: str) -> None:
    target = shared / name
    if not releases.is_inside(name) or shared.resolve() not in target.resolve().parents:
        raise Fault("failed", "the file would leave shared/", repr(name), "name a place below shared/")
    if target.is_dir():
        raise Fault("failed", "that is a folder", str(target), "end it with / to put files into it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part.chmod(0o644)
    releases.sync(part)
    try:
        part.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # That part of shared/ is a mount of its own.
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            shutil.copyfile(part, beside)
            releases.sync(beside)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    releases.sync(target.parent)


# -- the conversation

_heard = bytearray()


def _hear() -> dict[str, Any] | None:
    """The next request; None when the other end has left. It sends an empty line now and then as a sign of life."""
    while True:
        line, found, rest = _heard.partition(b"\n")
        if found:
            _heard[:] = rest
            if line.strip():
                return json.loads(line)
        elif select.select([0], [], [], _SILENCE_SECONDS)[0] and (part := os.read(0, 1 << 16)):
            _heard.extend(part)
        else:
            return None
