"""Runs as values: what the container's facts mean, the commands that ask for them, and the reading of the answers.

A run is a folder in its container; whoever asks gets the same truth. `Run.state` is judged here, and
an end by remote/rundir.py.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from dflash_ops import gpu_locks
from dflash_ops.answers import answer, raise_fault
from dflash_ops.command import Command, Container, Query, Result
from dflash_ops.errors import CancelledError, ConfigError, OpsError, RunFailedError, StillRunningError, UsageFault
from dflash_ops.remote import bundle, rundir
from trainer.records import Status

SCHEMA_VERSION = 1

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STALLED_CODE = 14
STALL_MINUTES = 30.0


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
class StartRequest:
    """What `train start` was asked for. gpus: container indices; None: all that the inventory declares, or what the
    container has when it declares none."""

    name: str
    config: str | None
    """None with `like`: that run's own."""
    config_name: str
    """The config's file name on this machine, for its errors."""
    gpus: tuple[int, ...] | None = None
    settings: tuple[str, ...] = ()
    env: str | None = field(default=None, repr=False)
    """The env file's text."""
    resume: str | None = None
    init_from: str | None = None
    release: str | None = None
    client: str = ""
    like: str | None = None
    """A run to repeat: config, settings, secrets and the rest are its own, where this request does not say."""
    restart: int | None = None
    """How often the trainer is started again after an end that can heal."""
    restart_wait: float | None = None
    """Seconds before the first of these starts, doubled each time; None: 10."""
    stall_minutes: float | None = None
    """Without a new step for so long the run is stalled; 0 or None: it never is."""
    notify: tuple[str, ...] | None = field(default=None, repr=False)
    """URLs to tell of its end: webhooks, or what apprise knows."""
    share_gpus: bool = False
    """Whether it starts though others use its GPUs."""


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


# -- names and settings, checked before anything is sent


def check_name(name: str) -> str:
    """The name; UsageFault when it can't be one."""
    if not _NAME.fullmatch(name):
        raise UsageFault(
            f"a run can't be called {name!r}",
            why="a name has lower-case letters, digits and inner dashes, at most 40",
            next="--name with such a name",
        )
    return name


def new_run_id(name: str, now: datetime | None = None) -> str:
    """`<name>-YYYYMMDD-HHMMSS-<4 hex>`, UTC. Chosen by the client, so that a retry can't start a second trainer."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_url(url: str) -> str:
    """A URL to notify; UsageFault, which doesn't show it, when it can't be one."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", url):
        raise UsageFault(
            "--notify needs a URL", why="what was given has no scheme, or spaces", next="--notify https://..."
        )
    try:
        parts = urlsplit(url)
        named = parts.scheme not in ("http", "https") or (parts.hostname and (parts.port is None or parts.port))
    except ValueError:
        parts, named = None, False
    if parts is None or not named:
        raise UsageFault(
            "--notify needs a URL", why="what was given names no host or a bad port", next="--notify https://..."
        )
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        raise UsageFault(
            "a webhook takes no user and password in its URL",
            why="they would not be sent",
            next="apprise sends them, with them percent-encoded: --notify jsons://USER:PASSWORD@HOST/PATH",
        )
    return url


def parse_gpus(text: str, container: Container) -> tuple[int, ...] | None:
    """`all`, `none` or container indices such as `0,2`; None means all that are declared."""
    if text == "all":
        return None
    if text == "none":
        return ()
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageFault(f"--gpus {text!r} is not a list of GPUs", next="--gpus 0,1 or all or none")
    gpus = tuple(int(word) for word in words)
    if len(set(gpus)) != len(gpus):
        raise UsageFault(f"--gpus {text} names a GPU twice", next="name each once")
    known = len(container.gpus)
    if known and max(gpus) >= known:
        raise UsageFault(
            f"--gpus {text} names a GPU that the container does not have",
            where=str(container),
            why=f"the inventory gives it {known}, numbered from 0",
            next=f"--gpus {','.join(map(str, range(known)))}",
        )
    return gpus


def env_names(text: str, file: str) -> list[str]:
    """The names that an env file sets; ConfigError with file and line for what is no KEY=VALUE line.

    Values are taken to the end of the line as they are: no quotes, no expansion. They never appear in an error.
    """
    names: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if "\0" in line:
            raise ConfigError(
                "the env file has a NUL byte, which no environment can hold",
                where=f"{file}:{number}",
                next="remove it; the file is text",
            )
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, _ = line.partition("=")
        if not sign or not _ENV_NAME.fullmatch(name.strip()):
            raise ConfigError(
                "the env file has a line that sets nothing", where=f"{file}:{number}", next="write it as KEY=VALUE"
            )
        names.append(name.strip())
    return names


# -- questions


def start_command(
    container: Container,
    request: StartRequest,
    run_id: str,
    *,
    check_instead_of: str | None = None,
    uuids: Sequence[str] | None = None,
) -> Command:
    """The one command of a start: GPU locks on the host, the start script in the container. check_instead_of: a run
    that goes on and whose place this one shall take: then nothing is started, locked or changed, but all is checked.
    uuids: of the GPUs to lock, where they are known; else the inventory's indices say which."""
    declared = tuple(range(len(container.gpus))) or None
    gpus = declared if request.gpus is None else request.gpus
    parameters = {
        "path": container.path,
        "python": container.python,
        "run_id": run_id,
        "name": request.name,
        "release": request.release,
        "gpus": gpus,
        "config": request.config,
        "config_name": request.config_name,
        "env": request.env,
        "env_names": env_names(request.env, "env file") if request.env is not None else [],
        "set": list(request.settings),
        "resume": request.resume,
        "init_from": request.init_from,
        "client": request.client,
        "like": request.like,
        "restart": request.restart,
        "restart_wait": request.restart_wait,
        "stall_minutes": request.stall_minutes,
        "notify": request.notify,
        "share_gpus": request.share_gpus,
        "check_only": check_instead_of is not None,
        "instead_of": check_instead_of,
        "locks": None
        if check_instead_of is not None or not (container.gpus and gpus)
        else "told"
        if uuids
        else "meant",
        # As environment.wanted, which is above this file.
        "environment": {
            "pins": asdict(container.pins),
            "check": container.env_check,
            "gpus": bool(container.gpus),
        },
    }
    if check_instead_of is not None:
        return bundle.command(container.python, "start", parameters)
    return bundle.command(
        container.python, "start", parameters, mark=run_id, host_prefix=gpu_locks.words(container, gpus or (), uuids)
    )


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


def checked(result: Result) -> tuple[str, ...]:
    """What a start that only checked could not check; OpsError for what is in its way."""
    return tuple(answer(result)["notes"])


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
