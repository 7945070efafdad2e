"""A folder on the host for what is on its way into a container, and a `pct push` that waits there for its file."""

import contextlib
import os
from collections.abc import Generator

from dflash_ops.command import PCT, Command, Container, Host, Result
from dflash_ops.conversation import Conversation
from dflash_ops.errors import BusyError, PreflightError
from dflash_ops.shell import Shell

_STAGES = "/var/tmp/dflash-ops-stage-"

# A push ahead holds the container's pct lock while it waits for its word, and others wait 10 s for that lock.
_WORD_SECONDS = 8


def _make(wait: int) -> str:
    """Makes a folder that lives as long as this command. Folders of earlier ones that nobody holds any more (the kernel
    frees a flock with its holder) are removed first; the lock, for which it waits so many seconds, keeps a folder from
    being taken between its making and its locking. Each user has a lock: the kernel lets nobody, not even root, create
    over another's file in a sticky folder. One line and no "!": root's login shell may be csh. systemd-tmpfiles leaves
    locked folders alone."""
    return (
        'umask 077; me=$(id -u); exec 8>"/run/lock/dflash-ops-stage$([ "$me" = 0 ] || echo "-$me").lock" '
        f"&& flock -w {wait} 8 || exit 7; "
        f"for old in {_STAGES}*; do "
        'if [ -L "$old" ] || [ -f "$old" ]; then :; '
        'elif [ -O "$old" ] && flock -n "$old" true; then rm -rf -- "$old"; fi; done; '
        f"stage=$(mktemp -d {_STAGES}XXXXXXXX) || exit 6; "
        'exec 9<"$stage" && flock -n 9 || exit 1; exec 8>&-; '
        "trap 'rm -rf -- \"$stage\"' EXIT; trap 'exit 1' HUP INT TERM; "
        'echo "stage:$stage"; '
    )


_STAGE_SCRIPT = _make(30) + "cat >/dev/null"

# `pct push` starts as soon as there is a folder, and reads what it pushes from its stdin: the folder's `archive` once
# we hear "go", of which it says "taken"; nothing at any other word, after $1 seconds of none, or at our end. The folder
# stays until our end, however long the upload takes. The pipe has no name: pct opens /dev/stdin long after its start,
# when all may have been written, and a named one would wait for another writer then.
_WAITING_PUSH_SCRIPT = (
    f"seconds=$1; shift; {_make(10)} "
    f'if [ "$me" = 0 ]; then set -- pct "$@"; else set -- sudo -n -- {PCT} "$@"; fi; exec 3>&1; '
    'said=$({ [ "$(timeout "$seconds" head -n 1)" = go ] && echo taken >&3 && cat "$stage/archive"; } 2>/dev/null '
    '| LC_ALL=C.UTF-8 "$@" 2>&1 >/dev/null 3>&- 9<&-); code=$?; '
    'printf "%s\n" "$said" "pushed:$code"; cat >/dev/null'
)


@contextlib.contextmanager
def staging(shell: Shell, host: Host) -> Generator[str, None, None]:
    """A folder (0700) on the host that is gone when the block ends, also by a broken link; what killed clients have
    left there is removed first. Gives its path."""
    with shell.converse(host, Command(("sh", "-c", _STAGE_SCRIPT))) as talk:
        yield _folder(host, talk)
        talk.finish()


class WaitingPush:
    """A `pct push` that has begun, and waits for its file. archive: where on the host that file is to be written;
    ended: whether it has had its word."""

    def __init__(self, host: Host, talk: Conversation) -> None:
        self.archive = f"{_folder(host, talk)}/archive"
        self.ended = False
        self._host, self._talk = host, talk

    def go(self, *, timeout: float) -> Result | None:
        """Lets it have its file, and waits for its end. None when it had not waited so long, and pushed nothing; the
        file is still there then."""
        self._talk.say(b"go\n")
        return self._end(timeout)

    def withdraw(self, *, timeout: float) -> None:
        """Lets it end with an empty file; nothing of it is under way afterwards."""
        self._talk.say(b"no\n")
        self._end(timeout)

    def clear(self, *, timeout: float) -> None:
        """Removes its folder; it is gone afterwards."""
        self._talk.finish(timeout=timeout)

    def _end(self, timeout: float) -> Result | None:
        self.ended, taken, said = True, False, list[bytes]()
        while (line := self._talk.hear(timeout=timeout)) is not None:
            if line.startswith(b"pushed:"):
                code = int(line.removeprefix(b"pushed:"))
                return Result(self._host, Command(("pct", "push")), code, b"", b"\n".join(said)) if taken else None
            if line == b"taken":
                taken = True
            else:
                said.append(line)
        return None


@contextlib.contextmanager
def waiting_push(shell: Shell, container: Container, part: str) -> Generator[WaitingPush, None, None]:
    """A `pct push` to `part` in the container that takes its 0.6 s while the file is still to come. Whoever leaves the
    block without `go` lets it end with an empty one."""
    words = (str(_WORD_SECONDS), "push", str(container.vmid), "/dev/stdin", part)
    with shell.converse(container.host, Command(("sh", "-c", _WAITING_PUSH_SCRIPT, "sh", *words))) as talk:
        yield WaitingPush(container.host, talk)


def _folder(host: Host, talk: Conversation) -> str:
    while (text := talk.hear()) is not None:
        if text.startswith(b"stage:"):
            return os.fsdecode(text.removeprefix(b"stage:"))
    result = talk.finish()
    if result.code == 7:
        raise BusyError("the staging lock stayed taken", where=str(host), why="30 s", next="run it again later")
    raise PreflightError("no staging folder could be made", where=str(host), why=result.last_words)
