"""The end of runs and of sessions as values: the questions, the answers, and why an end was no whole one. Pure.

Sessions are tmux sessions that somebody started by hand, outside of dflash-ops.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflash_ops.answers import answer
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import OpsError
from dflash_ops.remote import bundle
from dflash_ops.runs import SCHEMA_VERSION, Run, RunProcess, read_processes, run_of


@dataclass(frozen=True)
class HeldGpu:
    """A GPU whose memory is not back. index: as the container numbers it; holders: who has it open there."""

    index: int
    used_mib: float | None
    charged_mib: float | None
    holders: tuple[RunProcess, ...]


@dataclass(frozen=True)
class GpuProof:
    """Whether the GPU memory is back. checked: nvidia-smi was asked; why: it could not tell."""

    checked: bool
    back: bool
    why: str
    held: tuple[HeldGpu, ...]


@dataclass(frozen=True)
class Stopped:
    run: Run
    seconds: float
    killed: tuple[RunProcess, ...]
    """What did not end by itself in the grace."""
    survivors: tuple[RunProcess, ...]
    was_lost: bool
    gpu: GpuProof
    spared: tuple[RunProcess, ...] = ()
    """What lives in a tmux server that the run began: people may have sessions there."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run.to_json(),
            "seconds": self.seconds,
            "killed": [asdict(process) for process in self.killed],
            "survivors": [asdict(process) for process in self.survivors],
            "was_lost": self.was_lost,
            "gpu": asdict(self.gpu),
            "spared": [asdict(process) for process in self.spared],
        }


@dataclass(frozen=True)
class HandProcess:
    """A process that no run owns. gpus: N of each /dev/nvidiaN that it has open; used_mib: over all of them."""

    pid: int
    state: str
    command: str
    age_s: float
    gpus: tuple[int, ...]
    used_mib: float | None


@dataclass(frozen=True)
class Session:
    """A tmux session of the container's default server. created_at: RFC 3339, UTC."""

    name: str
    created_at: str | None
    attached: bool
    processes: tuple[HandProcess, ...]


@dataclass(frozen=True)
class Listing:
    """Everything that runs in a container: runs, sessions, and processes with a GPU that are of neither."""

    runs: tuple[Run, ...]
    sessions: tuple[Session, ...]
    gpu_processes: tuple[HandProcess, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [run.to_json() for run in self.runs],
            "sessions": [asdict(session) for session in self.sessions],
            "gpu_processes": [asdict(process) for process in self.gpu_processes],
        }


@dataclass(frozen=True)
class SessionStopped:
    session: str
    seconds: float
    ended: tuple[RunProcess, ...]
    """Every process that the session had."""
    killed: tuple[RunProcess, ...]
    survivors: tuple[RunProcess, ...]
    session_left: bool
    gpu: GpuProof
    spared: tuple[RunProcess, ...] = ()
    """What of it was left alone: tmux servers with their sessions, and what is of a run."""
    also_in: tuple[str, ...] = ()
    """Sessions that show panes of it too: these panes go on there."""

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


# -- questions


def stop_command(container: Container, run: str | None, grace: float, *, again: bool) -> Command:
    """again: an earlier try, whose answer was lost, may have ended the run."""
    return bundle.command(
        container.python, "stop", {"path": container.path, "run": run, "grace": grace, "again": again}
    )


def session_stop_command(container: Container, name: str, grace: float) -> Command:
    return bundle.command(container.python, "sessions", {"path": container.path, "stop": name, "grace": grace})


def listing_command(container: Container) -> Command:
    return bundle.command(container.python, "sessions", {"path": container.path})


# -- answers


def stopped(result: Result) -> Stopped:
    """What a stop said; OpsError when something of the run is left, or of the GPU memory."""
    reply = answer(result)
    done = Stopped(
        run=run_of(reply["facts"]),
        seconds=reply["seconds"],
        killed=read_processes(reply["killed"]),
        survivors=read_processes(reply["survivors"]),
        was_lost=reply["was_lost"],
        gpu=proof_of(reply["gpu"]),
        spared=read_processes(reply["spared"]),
    )
    prove(f"run {done.run.id}", done.survivors, done.gpu, str(result.place))
    holders = [it for it in reply["spared"] if it["holds"]]
    if holders:
        names = "; ".join(f"{it['pid']} ({it['command'][:60]}) holds {it['holds']}" for it in holders)
        raise OpsError(
            f"run {done.run.id} has ended, but for what it began in a tmux server",
            where=str(result.place),
            why=f"{names}; people may have sessions there, so no stop ends it",
            next=f"in the container: kill {' '.join(str(it['pid']) for it in holders)}",
        )
    return done


def session_stopped(result: Result) -> SessionStopped:
    """What the end of a session said; OpsError when something of it is left."""
    reply = answer(result)
    done = SessionStopped(
        session=reply["session"],
        seconds=reply["seconds"],
        ended=read_processes(reply["ended"]),
        killed=read_processes(reply["killed"]),
        survivors=read_processes(reply["survivors"]),
        session_left=reply["session_left"],
        gpu=proof_of(reply["gpu"]),
        spared=read_processes(reply["spared"]),
        also_in=tuple(reply["also_in"]),
    )
    prove(f"session {done.session}", done.survivors, done.gpu, str(result.place))
    if done.session_left:
        raise OpsError(
            f"session {done.session} is still there",
            where=str(result.place),
            why="tmux kill-session did not end it",
            next="in the container: tmux -L default ls",
        )
    return done


def listing(result: Result) -> Listing:
    reply = answer(result)
    sessions = (
        Session(it["name"], it["created_at"], it["attached"], tuple(map(_by_hand, it["processes"])))
        for it in reply["sessions"]
    )
    return Listing(tuple(map(run_of, reply["runs"])), tuple(sessions), tuple(map(_by_hand, reply["gpu_processes"])))


def _by_hand(record: Mapping[str, Any]) -> HandProcess:
    return HandProcess(
        pid=record["pid"],
        state=record["state"],
        command=record["command"],
        age_s=record["age_s"],
        gpus=tuple(record["gpus"]),
        used_mib=record["used_mib"],
    )


def proof_of(record: Mapping[str, Any]) -> GpuProof:
    held = tuple(
        HeldGpu(it["index"], it["used_mib"], it["charged_mib"], read_processes(it["holders"])) for it in record["held"]
    )
    return GpuProof(record["checked"], record["back"], record["why"], held)


def prove(what: str, survivors: tuple[RunProcess, ...], gpu: GpuProof, where: str) -> None:
    """OpsError that names what is left, and why it can't be ended."""
    if survivors:
        names = "; ".join(f"{it.pid} ({it.command[:60]}), state {it.state} in {it.wchan}" for it in survivors)
        advice = "dflash-ops gpu-status; then stop it again"
        if any(it.state == "D" for it in survivors):
            advice = "dflash-ops gpu-status; state D is the driver: only a restart of the host ends it"
        raise OpsError(f"{what} is not wholly stopped", where=where, why=f"these would not die: {names}", next=advice)
    if gpu.back:
        return
    if gpu.why:
        raise OpsError(
            f"{what} has ended, but the GPU memory can't be told to be back",
            where=where,
            why=gpu.why,
            next="in the container: nvidia-smi; a driver that hangs needs a restart of the host",
        )
    cards = "; ".join(map(_held, gpu.held)) or "nvidia-smi still charges it"
    raise OpsError(
        f"{what} has ended, but GPU memory is not back", where=where, why=cards, next="dflash-ops gpu-status"
    )


def _held(gpu: HeldGpu) -> str:
    used = "unknown" if gpu.used_mib is None else f"{gpu.used_mib:.0f} MiB"
    who = ", ".join(f"{it.pid} ({it.command[:60]})" for it in gpu.holders)
    return f"GPU {gpu.index}: {used} in use, " + (f"held by {who}" if who else "by no process of this container")
