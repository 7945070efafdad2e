"""Which processes belong together: those below one, those that live in a tmux server, those of a run.

Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from dflash_ops.remote import processes
from dflash_ops.remote.processes import Process


def descendants(root: Process, table: list[Process]) -> set[int]:
    """The pids below root. With a root that is a subreaper these are all that it ever started, orphans included."""
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [root.pid]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def is_tmux_server(pid: int) -> bool:
    """By its program, which no process can make up; its own name only tells a client from a server."""
    return processes.program(pid).startswith("tmux") and not processes.comm(pid).startswith("tmux: client")


def lives_in_tmux(servers: Iterable[int], table: list[Process]) -> set[int]:
    """The servers, what descends from them, and what was started in one of their panes and ran away from it."""
    servers = set(servers)
    if not servers:
        return set()
    found = set(servers)
    for process in table:
        if process.pid in servers:
            found |= descendants(process, table)
    # TMUX=socket,server's pid,session
    marks = {str(pid).encode() for pid in servers}
    for process in table:
        words = processes.environment(process.pid).get(b"TMUX", b"").rsplit(b",", 2)
        if len(words) == 3 and words[1] in marks:
            found.add(process.pid)
    return found


def of_run_and_spared(
    run_id: str,
    supervisor: dict[str, Any] | None,
    child: dict[str, Any] | None,
    group: Callable[[], set[int]] = set,
) -> tuple[list[Process], list[Process]]:
    """Every living process of the run but its supervisor, who tells of the run; and a tmux server that the run began,
    with all that lives in it: people may have sessions there, so no end of a run ends it.

    Evidence, each sound by itself: it descends from the supervisor or from the trainer, it is in the trainer's process
    group while the trainer exists (later the number may be somebody else's), it was started with the run's id, or it is
    among `group`, the pids in the run's own control group.
    """
    table = processes.table()
    # Asked after the table: a pid that changed hands between has the old one's start time, and is spared.
    pids = group()
    for identity in (supervisor, child):
        root = processes.find(identity)
        if root is not None:
            pids |= descendants(root, table)
    trainer = processes.find(child)
    if trainer is not None:
        pids |= {process.pid for process in table if process.group == trainer.pid}
    wanted = run_id.encode()
    above = supervisor["pid"] if supervisor else None
    found = [
        process
        for process in table
        if not process.ended
        and process.pid != above
        and process.pid != os.getpid()
        and not (process.parent == above and is_messenger(process.pid))
        and (process.pid in pids or processes.environment(process.pid).get(processes.RUN_ID) == wanted)
    ]
    homes = lives_in_tmux((process.pid for process in found if is_tmux_server(process.pid)), table)
    return (
        [process for process in found if process.pid not in homes],
        [process for process in table if process.pid in homes and not process.ended and process.pid != os.getpid()],
    )


def is_messenger(pid: int) -> bool:
    """Whether a supervisor's child is the one that notifies somebody, and not of the run."""
    its = processes.environment(pid)
    return processes.MESSENGER in its and processes.RUN_ID not in its
