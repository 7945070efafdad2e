"""Runs as values: what the container's facts mean, the commands that ask for them, and the reading of the answers.

A run is a folder in its container; whoever asks gets the same truth. `Run.state` is judged here, and
an end by remote/rundir.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from dflash_ops.answers import answer, raise_fault
from dflash_ops.command import Command, Container, Query, Result
from dflash_ops.errors import CancelledError, OpsError, RunFailedError, StillRunningError
from dflash_ops.remote import bundle, rundir
from trainer.records import Status

SCHEMA_VERSION = 1

STALLED_CODE = 14


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    """It lives and does no new step, for longer than --stall-minutes."""
    WAITING = "waiting"
    """Its trainer failed in a way that can heal, and will be started again (--restart)."""
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    """Its supervisor is gone (killed, or the box restarted) and left no exit code; processes of it may live."""

    @property
    def live(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STALLED, RunState.WAITING)


@dataclass(frozen=True)
class RunProcess:
    """A living process of a run, by its pid in the container. `state` as in /proc/PID/stat; `wchan`: what it waits for
    in the kernel."""

    pid: int
    state: str
    wchan: str | None
    command: str


@dataclass(frozen=True)
class Run:
    """One run, as its container tells."""

    id: str
    name: str
    state: RunState
    release: str | None
    gpus: tuple[int, ...]
    """Indices as the container sees its GPUs."""
    created_at: str | None
    ended_at: str | None
    seconds: float | None
    """From the trainer's start to its end; None while it runs."""
    code: int | None
    """Exit code as a shell tells it: 128+n for signal n."""
    signal: int | None
    status: Status | None
    """What the trainer wrote of its progress, if anything."""
    checkpoints: tuple[str, ...]
    last_lines: tuple[str, ...]
    log_bytes: int
    log_lost_bytes: int
    resumes: str | None
    restarts: int = 0
    """How often its supervisor started the trainer again."""
    gpus_known: bool = True
    """False: the run was given no list of GPUs, not even an empty one, and sees all that there are."""
    oom: bool = False
    """Whether the kernel killed the trainer because the container's memory was full."""
    processes: tuple[RunProcess, ...] = ()
    """Filled when asked about this one run."""

    @property
    def exit_code(self) -> int:
        """What `logs -f` and `status` exit with: the state of the run in the design's table."""
        match self.state:
            case RunState.STARTING | RunState.RUNNING | RunState.STALLED | RunState.WAITING:
                return StillRunningError.exit_code
            case RunState.FINISHED:
                return 0
            case RunState.STOPPED:
                return CancelledError.exit_code
            case RunState.FAILED | RunState.LOST:
                return RunFailedError.exit_code

    @property
    def own_code(self) -> int:
        """What `wait` exits with: the trainer's own code; 100 for a failed run without one."""
        if self.state is RunState.FAILED and self.code:
            return self.code
        return self.exit_code

    @property
    def progress(self) -> str | None:
        """Steps done of all, and how many of them changed nothing."""
        if self.status is None:
            return None
        skipped = f" ({self.status.skipped} skipped)" if self.status.skipped else ""
        return f"{self.status.step}/{self.status.total_steps}{skipped}"

    def verdict(self) -> str:
        """One line on how the run stands."""
        step = f" at step {self.progress}" if self.status else ""
        again = (
            f", restarted {self.restarts} times" if self.restarts > 1 else ", restarted once" if self.restarts else ""
        )
        match self.state:
            case RunState.STARTING | RunState.RUNNING | RunState.STALLED:
                return f"run {self.id} is {self.state}{step}{again}"
            case RunState.WAITING:
                return f"run {self.id} is waiting{step}: its trainer failed and will be started again ({self.restarts})"
            case RunState.LOST:
                living = f"; {len(self.processes)} of its processes live" if self.processes else ""
                return f"run {self.id} is lost{step}: its supervisor is gone and left no exit code{living}"
            case _:
                how = "without an exit code" if self.code is None else f"exit code {self.code}"
                if self.signal:
                    how = f"signal {self.signal}, {how}"
                if self.oom:
                    how += ", out of memory"
                elif self.code == STALLED_CODE:
                    how += ", stalled"
                lost = f"; {self.log_lost_bytes} bytes of its log were lost" if self.log_lost_bytes else ""
                return f"run {self.id} {self.state}{step} ({how}){again}{lost}"

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["status"] = self.status.model_dump() if self.status else None
        return {"schema_version": SCHEMA_VERSION, **record, "verdict": self.verdict(), "exit_code": self.exit_code}


@dataclass(frozen=True)
class Started:
    run: Run
    window: str | None
    """The tmux session that shows it; None when there is none."""
    freed: tuple[RunProcess, ...]
    """What earlier runs had left behind and was ended first."""
    existing: bool
    """Whether an earlier try, whose answer was lost, had started it."""
    notes: tuple[str, ...] = ()
    """What could not be checked before the start."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run.to_json(),
            "window": self.window,
            "freed": [asdict(process) for process in self.freed],
            "existing": self.existing,
            "notes": list(self.notes),
        }


# -- questions


def list_query(container: Container) -> Query[list[Run]]:
    """Every run of the container, oldest first."""
    command = bundle.command(container.python, "report", {"path": container.path, "run": None})
    return Query(command, lambda result: [run_of(facts) for facts in answer(result)["runs"]])


def run_query(container: Container, run: str) -> Query[Run]:
    """One run, with its living processes."""
    command = bundle.command(container.python, "report", {"path": container.path, "run": run})
    return Query(command, lambda result: run_of(answer(result)["runs"][0]))


def follow_command(
    container: Container,
    run: str,
    *,
    offset: int | None,
    tail: int | None,
    follow: bool,
    quiet: bool = False,
    since: Mapping[str, float] | None = None,
    grep: str | None = None,
) -> Command:
    """The log from a byte offset, or its last `tail` lines, or all of it; first a line of JSON (see `log_header`).
    since: {"ago_s"} or {"at"}; grep: the answer has frames, see remote/follow.py."""
    parameters = {
        "path": container.path,
        "run": run,
        "offset": offset,
        "tail": tail,
        "follow": follow,
        "quiet": quiet,
        "since": since,
        "grep": grep,
    }
    return bundle.command(container.python, "follow", parameters)


# -- answers


def started(result: Result) -> Started:
    reply = answer(result)
    freed, notes = read_processes(reply["freed"]), tuple(reply.get("notes", ()))
    return Started(run_of(reply["facts"]), reply["window"], freed, reply["existing"], notes)


def run_of(facts: Mapping[str, Any]) -> Run:
    """The run that these facts (see remote/rundir.py) are about. Missing records make fields None, never an error."""
    record: Mapping[str, Any] = facts["run"]
    ended: Mapping[str, Any] | None = facts["exit"]
    status = _status(facts["status"])
    run_id: str = facts["run_id"]
    end: Mapping[str, Any] = ended or {}
    return Run(
        id=run_id,
        name=run_id[:-21],
        state=judge(facts),
        release=record.get("release"),
        gpus=tuple(record.get("gpus") or ()),
        created_at=record.get("created_at"),
        ended_at=end.get("ended_at"),
        seconds=end.get("seconds"),
        code=end.get("code"),
        signal=end.get("signal"),
        status=status,
        checkpoints=tuple(facts["checkpoints"]),
        last_lines=tuple(end.get("last_lines") or ()),
        log_bytes=facts["log_bytes"],
        log_lost_bytes=end.get("log_lost_bytes") or 0,
        resumes=record.get("resumes"),
        restarts=len((end if ended is not None else facts["state"]).get("restarts") or ()),
        gpus_known=record.get("gpus") is not None,
        oom=end.get("oom") is True,
        processes=read_processes(facts.get("processes", ())),
    )


def judge(facts: Mapping[str, Any]) -> RunState:
    """The state of a run; how one has ended is judged by remote/rundir.py, for its window and its webhooks too."""
    ended: dict[str, Any] | None = facts["exit"]
    if ended is None:
        if facts["supervisor_alive"]:
            return {"stalled": RunState.STALLED, "waiting": RunState.WAITING}.get(
                facts["state"].get("state"), RunState.RUNNING
            )
        return RunState.STARTING if facts["starting"] else RunState.LOST
    return RunState(rundir.how_it_ended(ended, facts["status"]))


def log_header(line: bytes, place: str) -> tuple[str, int, int, bool]:
    """Run id and first byte offset of a log that is being sent, how many bytes before it are gone for good, and
    whether the log's times are known."""
    try:
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise_fault(reply, place)
        return reply["run_id"], reply["offset"], reply.get("gone", 0), reply.get("timed", True)
    except (ValueError, KeyError, TypeError):
        why = line[:200].decode("utf-8", "replace")
        raise OpsError("the log can't be read", where=place, why=why) from None


def _status(record: Mapping[str, Any] | None) -> Status | None:
    try:
        return Status.model_validate(record) if record is not None else None
    except ValidationError:
        return None


def read_processes(records: Sequence[Mapping[str, Any]]) -> tuple[RunProcess, ...]:
    """Processes as remote scripts describe them."""
    return tuple(RunProcess(it["pid"], it["state"], it.get("wchan"), it["command"]) for it in records)
