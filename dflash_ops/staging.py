"""A folder on the host for what is on its way into a container, and a `pct push` that waits there for its file."""

import contextlib
import os
from collections.abc import Generator

from dflash_ops.command import PCT, Command, Container, Host
from dflash_ops.conversation import Conversation
from dflash_ops.errors import BusyError, PreflightError
from dflash_ops.shell import Shell

_STAGES = "/var/tmp/dflash-ops-stage-"

# Makes a folder that lives as long as this command. Folders of earlier ones that nobody holds any more (the kernel
# frees a flock with its holder) are removed first; the lock keeps a folder from being taken between its making and its
# locking. Each user has a lock: the kernel lets nobody, not even root, create over another's file in a sticky folder.
# One line and no "!": root's login shell may be csh. systemd-tmpfiles leaves locked folders alone.
_MAKE = (
    'umask 077; me=$(id -u); exec 8>"/run/lock/dflash-ops-stage$([ "$me" = 0 ] || echo "-$me").lock" '
    "&& flock -w 30 8 || exit 7; "
    f"for old in {_STAGES}*; do "
    'if [ -L "$old" ] || [ -f "$old" ]; then :; '
    'elif [ -O "$old" ] && flock -n "$old" true; then rm -rf -- "$old"; fi; done; '
    f"stage=$(mktemp -d {_STAGES}XXXXXXXX) || exit 6; "
    'exec 9<"$stage" && flock -n 9 || exit 1; exec 8>&-; '
    "trap 'rm -rf -- \"$stage\"' EXIT; trap 'exit 1' HUP INT TERM; "
)
_STAGE_SCRIPT = _MAKE + 'echo "stage:$stage"; cat >/dev/null'

# Starts `pct push` at once, which reads what it pushes from its stdin. It gets the `archive` once we hear "go"; at any
# other word, none for 30 s, or our end it is killed: it holds the container's lock, which others wait for. The pipe has
# no name: pct opens /dev/stdin long after its start, perhaps when all has been written, and then waits for no writer.
_PUSH = 'echo $$ >"$0/pid"; echo "stage:$0"; exec "$@" >/dev/null 2>"$0/said" 9<&-'
_WAITING_PUSH_SCRIPT = _MAKE + (
    f'if [ "$me" = 0 ]; then set -- pct "$@"; else set -- sudo -n -- {PCT} "$@"; fi; '
    'if [ "$(timeout 30 head -n 1)" = go ]; then cat "$stage/archive"; else kill "$(cat "$stage/pid")"; fi '
    f"2>/dev/null | LC_ALL=C.UTF-8 sh -c '{_PUSH}' "
    '"$stage" "$@"; code=$?; sed "s/^/said:/" "$stage/said"; echo "pushed:$code"; cat >/dev/null'
)


@contextlib.contextmanager
def staging(shell: Shell, host: Host) -> Generator[str, None, None]:
    """A folder (0700) on the host that is gone when the block ends, also by a broken link; what killed clients have
    left there is removed first. Gives its path."""
    with _folder(shell, host, Command(("sh", "-c", _STAGE_SCRIPT))) as (folder, talk):
        yield folder
        talk.finish()


class WaitingPush:
    """A `pct push` that has begun, and waits for its file. archive: where on the host that file is to be written."""

    def __init__(self, folder: str, talk: Conversation) -> None:
        self.archive = f"{folder}/archive"
        self._talk = talk

    def go(self, *, timeout: float) -> tuple[int, bytes] | None:
        """Lets it have its file, and waits for its end: its exit code and its stderr. None when nobody knows."""
        self._talk.say(b"go\n")
        return self._end(timeout)

    def withdraw(self, *, timeout: float) -> None:
        """Ends it; nothing of it is under way afterwards."""
        self._talk.say(b"no\n")
        self._end(timeout)

    def _end(self, timeout: float) -> tuple[int, bytes] | None:
        said: list[bytes] = []
        while (line := self._talk.hear(timeout=timeout)) is not None:
            if line.startswith(b"said:"):
                said.append(line.removeprefix(b"said:"))
            elif line.startswith(b"pushed:"):
                self._talk.finish()
                return int(line.removeprefix(b"pushed:")), b"\n".join(said)
        return None


@contextlib.contextmanager
def waiting_push(shell: Shell, container: Container, part: str) -> Generator[WaitingPush, None, None]:
    """A `pct push` to `part` in the container that takes its 0.6 s while the file is still to come. Whoever leaves the
    block without `go` or `withdraw` has it killed."""
    words = ("push", str(container.vmid), "/dev/stdin", part)
    with _folder(shell, container.host, Command(("sh", "-c", _WAITING_PUSH_SCRIPT, "sh", *words))) as (folder, talk):
        yield WaitingPush(folder, talk)


@contextlib.contextmanager
def _folder(shell: Shell, host: Host, command: Command) -> Generator[tuple[str, Conversation], None, None]:
    with shell.converse(host, command) as talk:
        while (text := talk.hear()) is not None:
            if text.startswith(b"stage:"):
                break
        else:
            result = talk.finish()
            if result.code == 7:
                raise BusyError("the staging lock stayed taken", where=str(host), why="30 s", next="run it again later")
            raise PreflightError("no staging folder could be made", where=str(host), why=result.last_words)
        yield os.fsdecode(text.removeprefix(b"stage:")), talk
