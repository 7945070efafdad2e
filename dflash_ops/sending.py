"""The two ways of an archive into a container, both checked there file by file.

push:   to a 0700 folder on the host over SFTP, then `pct push`, which says nothing when the disk is full
stream: through the stdin of the command that waits for it in the container; nothing is staged anywhere
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from dflash_ops.command import Command, Container, Result
from dflash_ops.conversation import Conversation
from dflash_ops.errors import BusyError, OpsError
from dflash_ops.progress import Advance, Progress
from dflash_ops.release import FileEntry
from dflash_ops.shell import Shell
from dflash_ops.source import archive_size, sha256_of, temporary_file, write_archive
from dflash_ops.staging import staging

Via = Literal["push", "stream"]

# What pct says when it waits for the container's lock, and when it gets it; anything else on stderr is a failure,
# whatever the exit code.
_WAITING, _GOT_IT = "trying to acquire lock...", "OK"
_LOCK_TIMEOUT_CODE = 4
ANSWER_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 1_000_000


def by_push(
    shell: Shell, container: Container, files: Sequence[FileEntry], root: Path, part: str, way: Progress
) -> dict[str, Any]:
    """Sends the contents of these files; gives the part of the request that tells the container what to expect."""
    with temporary_file() as archive:
        write_archive(files, root, archive)
        archive.flush()
        size, sha256 = sha256_of(archive)
        push_file(shell, container, archive, size, part, way)
    return {"by": "push", "size": size, "sha256": sha256}


def by_stream(talk: Conversation, files: Sequence[FileEntry], root: Path, way: Progress) -> int:
    """Sends the contents of these files in frames, as remote/talk.py reads them; gives their bytes."""
    size = archive_size(files)
    way.step(f"streaming {size} bytes into the container")
    with way.bytes("sending", total=size) as advance:
        frames = _Frames(talk, advance)
        write_archive(files, root, frames)
    talk.say(b'{"end": true}\n')
    return frames.sent


class _Frames:
    def __init__(self, talk: Conversation, advance: Advance) -> None:
        self._talk, self._advance = talk, advance
        self.sent = 0

    def write(self, data: bytes, /) -> None:
        self._talk.say(json.dumps({"bytes": len(data)}).encode() + b"\n" + data)
        self.sent += len(data)
        self._advance(len(data))


def push_file(shell: Shell, container: Container, file: BinaryIO, size: int, part: str, way: Progress) -> None:
    """Brings a file to `part` in the container. That it arrived whole is for the container to say."""
    host = container.host
    way.step(f"staging on {host}")
    with staging(shell, host) as folder:
        staged = f"{folder}/{PurePosixPath(part).name}"
        way.step(f"sending {size} bytes to {host}:{staged}")
        with way.bytes(f"sending to {host}", total=size) as advance:
            shell.send(host, file, staged, on_sent=advance)
        way.step(f"pct push {container.vmid} {staged} {part}")
        _push(shell, container, staged, part, size)


def _push(shell: Shell, container: Container, staged: str, part: str, size: int) -> None:
    """`pct push`, which waits at most 10 s for its lock: so up to three of them. That it worked is for the container to
    say, that it failed may be said here."""
    command = Command(("env", "LC_ALL=C.UTF-8", "pct", "push", str(container.vmid), staged, part))
    timeout = ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND
    result = shell.run(container.host, command, timeout=timeout)
    if result.code == _LOCK_TIMEOUT_CODE:
        result = _push_again(shell, container, command, timeout)
    complaint = push_complaint(result)
    if result.code != 0:
        raise shell.explain(container, result)
    if complaint:
        raise OpsError("pct push failed", where=str(container), why=complaint)


def _push_again(shell: Shell, container: Container, command: Command, timeout: float) -> Result:
    """The second and the third push, of which BusyError says that they did not get the lock either."""
    import stamina

    # stamina logs its retries; without a handler Python would print them on stderr.
    logging.getLogger("stamina").addHandler(logging.NullHandler())
    for attempt in stamina.retry_context(on=BusyError, attempts=2, wait_initial=1.0, wait_max=5.0):
        with attempt:
            result = shell.run(container.host, command, timeout=timeout)
            if result.code != _LOCK_TIMEOUT_CODE:
                return result
            raise BusyError(
                "another pct command holds the container's lock",
                where=str(container),
                why=push_complaint(result),
                next="see on the host what runs: ps aux | grep pct",
            )
    raise AssertionError("unreachable")


def push_complaint(result: Result) -> str:
    """What pct says against a push; empty when it has nothing to say but that it waited for a lock."""
    text = result.err.decode("utf-8", "replace").replace(_WAITING, "")
    lines = [line.strip() for line in text.split("\n")]
    return "; ".join(line for line in lines if line and line != _GOT_IT)
