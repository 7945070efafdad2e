"""A folder on the host for what is on its way into a container."""

import contextlib
import os
from collections.abc import Generator

from dflash_ops.command import Command, Host
from dflash_ops.errors import BusyError, PreflightError
from dflash_ops.shell import Shell

_STAGES = "/var/tmp/dflash-ops-stage-"

# Makes a folder that lives as long as this command's stdin. Folders of earlier ones that nobody holds any more (the
# kernel frees a flock with its holder) are removed first; the lock keeps a folder from being taken between its making
# and its locking. One line and no "!": root's login shell may be csh. systemd-tmpfiles leaves locked folders alone.
_STAGE_SCRIPT = (
    "umask 077; exec 8>/run/lock/dflash-ops-stage.lock && flock -w 30 8 || exit 7; "
    f"for old in {_STAGES}*; do "
    'if [ -L "$old" ] || [ -f "$old" ]; then :; '
    'elif [ -O "$old" ] && flock -n "$old" true; then rm -rf -- "$old"; fi; done; '
    f"stage=$(mktemp -d {_STAGES}XXXXXXXX) || exit 6; "
    'exec 9<"$stage" && flock -n 9 || exit 1; exec 8>&-; '
    "trap 'rm -rf -- \"$stage\"' EXIT; trap 'exit 1' HUP INT TERM; "
    'echo "stage:$stage"; cat >/dev/null'
)


@contextlib.contextmanager
def staging(shell: Shell, host: Host) -> Generator[str, None, None]:
    """A folder (0700) on the host that is gone when the block ends, also by a broken link; what killed clients have
    left there is removed first. Gives its path."""
    command = Command(("sh", "-c", _STAGE_SCRIPT))
    with shell.converse(host, command) as talk:
        while (text := talk.hear()) is not None:
            if text.startswith(b"stage:"):
                break
        else:
            result = talk.finish()
            if result.code == 7:
                raise BusyError("the staging lock stayed taken", where=str(host), why="30 s", next="run it again later")
            raise PreflightError("no staging folder could be made", where=str(host), why=result.last_words)
        yield os.fsdecode(text.removeprefix(b"stage:"))
        talk.finish()
