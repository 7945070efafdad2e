"""What a sandbox leaves when its guard is killed, and its removal: processes that still live, a cgroup, its folder."""

import contextlib
import shutil
import signal
import time
from pathlib import Path

from dflash_ops.sandbox import cgroups
from dflash_ops.sandbox.processes import ProcessId, boot_id

PROCESSES = "processes"  # boot id, then the guard and the init, one a line
CGROUP = "cgroup"


def note_processes(folder: Path, *identities: ProcessId) -> None:
    """Write down who runs the sandbox, from the first moment on: `up` may be killed before there is a state file."""
    draft = folder / f"{PROCESSES}.new"
    draft.write_text("".join(f"{line}\n" for line in (boot_id(), *identities)))
    draft.replace(folder / PROCESSES)


def end(folder: Path) -> bool:
    """End the processes that the folder names: the guard by SIGTERM, so that it clears up, and what is left of them by
    SIGKILL. False when one does not die."""
    noted = _noted(folder)
    if not noted:
        return True
    guard = noted[0]
    guard.signal(signal.SIGTERM)
    guard.wait(10)
    guard.kill()
    # Once more: it may have started the init since.
    return all([identity.kill() for identity in {*noted, *_noted(folder)}])


def _noted(folder: Path) -> list[ProcessId]:
    """The guard and the init, as far as they are written down and of this boot."""
    try:
        boot, *rows = (folder / PROCESSES).read_text().split("\n")
    except FileNotFoundError:
        return []
    return [identity for identity in map(ProcessId.parse, rows) if identity is not None] if boot == boot_id() else []


def clear(folder: Path) -> None:
    """Remove the cgroup and the folder of a sandbox whose processes are gone."""
    try:
        path = (folder / CGROUP).read_text()
    except FileNotFoundError:
        path = ""
    for _ in range(100):
        if not path or not Path(path).exists():
            break
        cgroups.remove(path)
        time.sleep(0.01)  # the kernel takes a moment to forget the dead
    # First out of the way, in one step: `up` may make the folder anew while a guard that ended by itself clears up.
    away = folder.with_name(f".{folder.name}.ended")
    shutil.rmtree(away, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)
