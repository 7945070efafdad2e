"""The two ways of an archive into a container, both checked there file by file.

push:   to a 0700 folder on the host over SFTP, then `pct push`, which says nothing when the disk is full. Where an
        archive is likely to be wanted, and small, that pct is started `ahead`: its 0.6 s pass while we still ask.
stream: through the stdin of the command that waits for it in the container; nothing is staged anywhere
"""

import contextlib
import json
import logging
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from dflash_ops.command import Command, Container, Result, pct
from dflash_ops.conversation import Conversation
from dflash_ops.errors import BusyError, LinkLostError, OpsError, PreflightError
from dflash_ops.progress import Advance, Progress
from dflash_ops.release import FileEntry
from dflash_ops.shell import Shell
from dflash_ops.source import archive_size, sha256_of, temporary_file, write_archive
from dflash_ops.staging import WaitingPush, staging, waiting_push

Via = Literal["push", "stream"]

# What pct says when it waits for the container's lock, and when it gets it; anything else on stderr is a failure,
# whatever the exit code.
_WAITING, _GOT_IT = "trying to acquire lock...", "OK"
_SUDO_ASIDE = "sudo: unable to resolve host"
_LOCK_TIMEOUT_CODE = 4
ANSWER_SECONDS = 60.0
_ASIDE_SECONDS = 10.0
SLOWEST_BYTES_PER_SECOND = 1_000_000
# A push that waits for its file holds pct's lock on the container, for which others wait 10 s: so the file must be here
# soon, also over a slow line.
_SMALL_BYTES = 256 << 10


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


class Ahead:
    """A push that may be begun before anybody knows what is to be pushed. It serves once; `ahead` makes it."""

    def __init__(self, shell: Shell, container: Container, part: str, way: Progress) -> None:
        self._shell, self._container, self._part, self._way = shell, container, part, way
        self._stack, self._pool = contextlib.ExitStack(), ThreadPoolExecutor(1)
        self._coming: Future[WaitingPush] | None = None

    def begin(self, likely: Sequence[FileEntry] = ()) -> None:
        """Begins it, once, and doesn't wait for that. likely: files whose contents it may have to carry; where they are
        too many bytes nothing is begun."""
        if self._coming is None and archive_size(likely) <= _SMALL_BYTES:
            self._way.step(f"staging on {self._container.host}")
            pushing = waiting_push(self._shell, self._container, self._part)
            self._coming = self._pool.submit(self._stack.enter_context, pushing)

    def carry(self, files: Sequence[FileEntry], root: Path) -> dict[str, Any] | None:
        """Sends the contents of these files through it, and gives what `by_push` does; None when they must go another
        way: it was not begun, they are too many bytes, or its folder is gone."""
        push, host = self._begun(), self._container.host
        if push is None or push.ended or archive_size(files) > _SMALL_BYTES:
            self.withdraw()
            return None
        archive = BytesIO()
        write_archive(files, root, archive)
        size, sha256 = sha256_of(archive)
        self._way.step(f"sending {size} bytes to {host}:{push.archive}")
        try:
            with self._way.bytes(f"sending to {host}", total=size) as advance:
                self._shell.send(host, archive, push.archive, on_sent=advance)
        except (LinkLostError, PreflightError):  # neither goes better another way
            raise
        except OpsError:
            self.withdraw()
            return None
        told = {"by": "push", "size": size, "sha256": sha256}
        self._way.step(f"pct push {self._container.vmid} {push.archive} {self._part}")
        ended = push.go(timeout=ANSWER_SECONDS)
        if ended is not None and ended.code == 0 and not push_complaint(ended):
            return {**told, "ahead": True}
        # It has pushed nothing: the upload took longer than it waits, or there was no folder yet. The file is there.
        self._way.step(f"pct push {self._container.vmid} {push.archive} {self._part}, once more")
        _push(self._shell, self._container, push.archive, self._part, size)
        return told

    def withdraw(self) -> None:
        """Ends it, when it is not needed: afterwards nothing of it is under way."""
        if (push := self._begun()) is not None and not push.ended:
            push.withdraw(timeout=ANSWER_SECONDS)

    def clear(self) -> None:
        """Removes what it has on the host, now that the container has its file."""
        with contextlib.suppress(OpsError):  # the next one removes it; a broken link others meet, too
            if (push := self._begun()) is not None:
                push.clear(timeout=_ASIDE_SECONDS)

    def revoke(self) -> None:
        """Ends it after a failure, and removes the empty file that it pushed: nobody may be there who would."""
        with contextlib.suppress(OpsError):
            if (push := self._begun()) is not None and not push.ended:
                push.withdraw(timeout=_ASIDE_SECONDS)
                self._shell.run(self._container, Command(("rm", "-f", "--", self._part)), timeout=_ASIDE_SECONDS)

    def close(self) -> None:
        self._pool.shutdown()
        self._stack.close()

    def _begun(self) -> WaitingPush | None:
        with contextlib.suppress(OpsError):  # whoever needs it next hears why it can't be
            return None if self._coming is None else self._coming.result()
        return None


@contextlib.contextmanager
def ahead(shell: Shell, container: Container, part: str, way: Progress) -> Generator[Ahead, None, None]:
    """A push to `part` in the container that can be begun ahead; what is not used of it ends with the block."""
    push = Ahead(shell, container, part, way)
    try:
        yield push
    except LinkLostError:
        raise
    except OpsError:
        push.revoke()
        raise
    finally:
        push.close()


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
    command = pct("push", str(container.vmid), staged, part)
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
    lines = [line.strip() for line in result.err.decode("utf-8", "replace").replace(_WAITING, "").split("\n")]
    return "; ".join(line for line in lines if line and line != _GOT_IT and not line.startswith(_SUDO_ASIDE))
