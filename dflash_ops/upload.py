"""A file's way onto a host: over SFTP, or through a command where there is no SFTP; and why it did not arrive."""

import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from dflash_ops.command import Command, Host, Result
from dflash_ops.conversation import Conversation
from dflash_ops.errors import OpsError, PreflightError

if TYPE_CHECKING:
    from dflash_ops.ssh import Link

_PART_BYTES = 1 << 18

OnSent = Callable[[int], None]
# How much has arrived, or None and why.
Arrived = tuple[int | None, str]


def over_sftp(link: "Link", file: BinaryIO, remote_path: str, wanted: int, on_sent: OnSent | None) -> Arrived:
    """All of the file, `wanted` bytes. NoSftpError when the host gives no such session."""
    left = 0

    def count(sent: int, _: int) -> None:
        nonlocal left
        if on_sent is not None:
            on_sent(sent - left)
        left = sent

    file.seek(0)
    with link.sftp() as sftp:
        try:
            # Its own check of the size is all that tells of a full disk: the writes are not waited for.
            return sftp.putfo(file, remote_path, wanted, count).st_size, ""
        except OSError as error:
            return None, str(error)


def cat_command(remote_path: str) -> Command:
    """Writes its stdin to the file, and says its size."""
    script = 'exec 8>"$1" && echo ready && cat >&8 && stat -c %s "$1"'
    return Command(("sh", "-c", script, "sh", remote_path))


def through_cat(talk: Conversation, file: BinaryIO, on_sent: OnSent | None) -> Arrived:
    """All of the file to `cat_command`."""
    file.seek(0)
    if talk.hear() == b"ready":
        while not talk.ended and (part := file.read(_PART_BYTES)):
            talk.say(part)
            if on_sent is not None:
                on_sent(len(part))
    result = talk.finish()
    return (int(result.out), "") if result.code == 0 else (None, result.last_words)


def room_command(remote_path: str) -> Command:
    """Asks what is free where the file was to go: SFTP says no more than "Failure"."""
    return Command(("df", "-B1", "--output=avail,target", "--", _folder(remote_path)))


def not_sent(host: Host, remote_path: str, wanted: int, why: str, room: Result) -> OpsError:
    """That the file did not arrive; PreflightError when the disk was full. room: the answer to `room_command`."""
    free, _, mount = room.out.strip().rpartition(b"\n")[2].strip().partition(b" ")
    if free.isdigit() and int(free) < wanted:
        return PreflightError(
            "the host's disk is full",
            where=f"{host}:{_folder(remote_path)}",
            why=f"{wanted} bytes to send, {int(free)} left",
            # The folder itself is gone by then.
            next=f"free some space on the host: df -h {shlex.quote(os.fsdecode(mount))}",
        )
    return OpsError("the upload failed", where=f"{host}:{remote_path}", why=why)


def _folder(remote_path: str) -> str:
    return remote_path.rpartition("/")[0] or "/"
