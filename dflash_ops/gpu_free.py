"""gpu free: what in a container holds its GPUs, which of it may be ended, and the proof that the memory is back.

Two commands in the container: a look, and the freeing of what was chosen from it, by pid and start time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dflash_ops import stops
from dflash_ops.answers import answer
from dflash_ops.command import Command, Container, Query
from dflash_ops.errors import BusyError, NotFoundError
from dflash_ops.remote import bundle, processes
from dflash_ops.runs import SCHEMA_VERSION, RunProcess, read_processes
from dflash_ops.shell import Shell
from dflash_ops.stops import GpuProof

_LOOK_SECONDS = 15.0


@dataclass(frozen=True)
class Holder:
    """A process of the container that holds GPUs, or lives on of a run that does.

    start: its raw start time, which with the pid names it; parent: a pid; gpus: N of each /dev/nvidiaN that it has
    open; used_mib: what nvidia-smi charges it with, None for nothing; owner: "run" (goes on), "earlier" (a run of ours
    that is over), "unknown".
    """

    pid: int
    start: int
    parent: int
    state: str
    wchan: str | None
    user: str | None
    command: str
    age_s: float
    gpus: tuple[int, ...]
    used_mib: float | None
    owner: Literal["run", "earlier", "unknown"]
    run_id: str | None


@dataclass(frozen=True)
class Look:
    """What holds the container's GPUs. gone: pids that nvidia-smi charges though they are dead, with the living that
    may hold their memory; others_mib: by GPU, what no process here is charged with; why: nvidia-smi could not tell;
    files: by run that is over, what its freeing removes."""

    container: str
    boot_id: str
    holders: tuple[Holder, ...]
    gone: Mapping[int, tuple[int, ...]]
    others_mib: Mapping[int, float]
    why: str
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True)
class Freed:
    """freed: all that were ended (of them, `killed` did not in the grace), or with dry_run would be; left: holders that
    were not to be ended; removed: files of freed runs, or with dry_run those that would be."""

    container: str
    dry_run: bool
    freed: tuple[RunProcess, ...]
    killed: tuple[RunProcess, ...]
    removed: tuple[str, ...]
    left: tuple[Holder, ...]
    others_mib: Mapping[int, float]
    seconds: float
    gpu: GpuProof

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def look(shell: Shell, container: Container) -> Look:
    """What holds the container's GPUs, and whose it is."""
    return shell.ask(container, look_query(container), timeout=_LOOK_SECONDS)


def choose(found: Look, pids: Sequence[int], unknown: bool) -> list[Holder]:
    """What is to be ended: earlier runs' processes; with `unknown` all that are of no run; each of `pids`, and what it
    has started that holds a GPU. BusyError for a living run's, NotFoundError for one that holds nothing. Pure."""
    by_pid = {holder.pid: holder for holder in found.holders}
    chosen = {it.pid for it in found.holders if it.owner == "earlier" or (unknown and it.owner == "unknown")}
    for pid in pids:
        if pid not in by_pid:
            heirs = ", ".join(f"--pid {heir}" for heir in found.gone.get(pid, ()))
            raise NotFoundError(
                f"process {pid} holds no GPU",
                where=found.container,
                why="it is gone, and a child of it holds its memory" if heirs else "in the container it has none open",
                next=heirs or "dflash-ops gpu-status; --pid wants the pid of PID THERE",
            )
        if by_pid[pid].owner == "run":
            raise BusyError(
                f"process {pid} is of run {by_pid[pid].run_id}, which goes on",
                where=found.container,
                next=f"dflash-ops train stop {by_pid[pid].run_id}",
            )
        chosen |= {pid, *_below(pid, found.holders)}
    return [holder for holder in found.holders if holder.pid in chosen]


def _below(pid: int, holders: Sequence[Holder]) -> set[int]:
    """The holders that this one has started, by whatever way over holders; none of a living run."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        children = {it.pid for it in holders if it.parent == parent and it.owner != "run"} - found
        found |= children
        waiting += children
    return found


def free(shell: Shell, container: Container, found: Look, chosen: Sequence[Holder], *, grace: float) -> Freed:
    """Ends these holders. OpsError names what would not die, with what it waits in, or memory that is not back."""
    reply = shell.ask(container, free_query(container, found, chosen, grace), timeout=grace + 60.0)
    gone = {holder.pid for holder in chosen}
    done = Freed(
        container=found.container,
        dry_run=False,
        freed=_named(read_processes(reply["freed"]), chosen),
        killed=_named(read_processes(reply["killed"]), chosen),
        removed=tuple(reply["removed"]),
        left=tuple(it for it in found.holders if it.pid not in gone),
        others_mib=found.others_mib,
        seconds=reply["seconds"],
        gpu=stops.proof_of(reply["gpu"]),
    )
    stops.prove("what was to be freed", read_processes(reply["survivors"]), done.gpu, str(container))
    return done


def _named(ended: Sequence[RunProcess], chosen: Sequence[Holder]) -> tuple[RunProcess, ...]:
    """With the command of the look where the process had gone before the freeing could look at it."""
    known = {it.pid: it.command for it in chosen}
    return tuple(
        replace(it, command=known.get(it.pid, it.command)) if it.command == processes.GONE else it for it in ended
    )


def nothing_done(found: Look, chosen: Sequence[Holder], dry_run: bool) -> Freed:
    """The answer of a dry run, or when there is nothing to free."""
    pids = {holder.pid for holder in chosen}
    return Freed(
        container=found.container,
        dry_run=dry_run,
        freed=tuple(RunProcess(it.pid, it.state, it.wchan, it.command) for it in chosen),
        killed=(),
        removed=tuple(sorted({file for it in chosen if it.owner == "earlier" for file in _files(found, it)})),
        left=tuple(it for it in found.holders if it.pid not in pids),
        others_mib=found.others_mib,
        seconds=0.0,
        gpu=GpuProof(checked=False, back=True, why=found.why, held=()),
    )


def _files(found: Look, holder: Holder) -> tuple[str, ...]:
    """What the freeing of this holder's run removes."""
    return found.files.get(holder.run_id or "", ())


# -- questions


def look_query(container: Container) -> Query[Look]:
    def parse(reply: Mapping[str, Any]) -> Look:
        return Look(
            container=str(container),
            boot_id=reply["boot_id"],
            holders=tuple(map(_holder, reply["processes"])),
            gone={it["pid"]: tuple(it["held_by"]) for it in reply["gone"]},
            others_mib={it["index"]: it["mib"] for it in reply["others"]},
            why=reply["why"],
            files={run: tuple(files) for run, files in reply["files"].items()},
        )

    return Query(_command(container, {"wanted": None}), lambda result: parse(answer(result)))


def free_query(container: Container, found: Look, chosen: Sequence[Holder], grace: float) -> Query[dict[str, Any]]:
    wanted = [{"pid": it.pid, "start": it.start, "owner": it.owner, "run_id": it.run_id} for it in chosen]
    return Query(_command(container, {"wanted": wanted, "boot_id": found.boot_id, "grace": grace}), answer)


def _command(container: Container, parameters: Mapping[str, Any]) -> Command:
    return bundle.command(container.python, "free", {"path": container.path, **parameters})


def _holder(record: Mapping[str, Any]) -> Holder:
    return Holder(
        pid=record["pid"],
        start=record["start"],
        parent=record["parent"],
        state=record["state"],
        wchan=record["wchan"],
        user=record["user"],
        command=record["command"],
        age_s=record["age_s"],
        gpus=tuple(record["minors"]),
        used_mib=record["used_mib"],
        owner=record["owner"],
        run_id=record["run_id"],
    )
