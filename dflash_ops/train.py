"""The verbs of `train`: start, stop, logs, list, status, wait. Each is one command in the container.

A broken link is no end: start asks again with the same run id, logs goes on at its byte offset.
"""

import time
from collections.abc import Callable

from dflash_ops import gpus, runs
from dflash_ops.command import Container, Result
from dflash_ops.errors import BusyError, LinkLostError, NotFoundError, OpsError, StillRunningError, UnreachableError
from dflash_ops.remote.start import HOLD_SECONDS
from dflash_ops.runs import Run, RunState, Started, StartRequest, Stopped
from dflash_ops.shell import Shell

_START_SECONDS = 2 * HOLD_SECONDS + 20.0  # the start script waits for another start, and then for its own steps
_STOP_SECONDS = 90.0  # beyond the grace: a start that is going on, killing, the supervisor's end
_START_TRIES = 3
_RECONNECT_SECONDS = 600.0  # how long `logs -f` tries to come back

OnBytes = Callable[[bytes], None]
OnWords = Callable[[str], None]


def start(shell: Shell, container: Container, request: StartRequest) -> Started:
    """Starts a run. BusyError names who has the name or a GPU; ConfigError what the release's trainer refuses."""
    runs.check_name(request.name)
    run_id = runs.new_run_id(request.name)
    command = runs.start_command(container, request, run_id)
    for tries_left in reversed(range(_START_TRIES)):
        try:
            result = shell.run(container, command, timeout=_START_SECONDS)
        except LinkLostError:
            if not tries_left:
                raise
            shell.close()  # the next command connects anew
            time.sleep(1.0)
            continue
        if result.code == runs.LOCK_TAKEN and not result.out.strip():
            return _behind_the_lock(shell, container, request, run_id, result)
        return runs.started(result)
    raise AssertionError("unreachable")


def _behind_the_lock(shell: Shell, container: Container, request: StartRequest, run_id: str, result: Result) -> Started:
    """flock refused on the host: says who holds the GPU, unless that is our own start, whose answer was lost."""
    wanted = {container.gpus[gpu] for gpu in request.gpus} if request.gpus is not None else set(container.gpus)
    holders = [it for it in gpus.lock_holders(shell.ask(container.host, gpus.host_query())) if it.index in wanted]
    if any(holder.run_id == run_id for holder in holders):
        return Started(_started_before(shell, container, run_id), window=None, freed=(), existing=True)
    if not holders:
        raise BusyError(
            "a GPU was taken a moment ago", where=str(container), why=result.last_words, next="start it again"
        )
    first = next((holder for holder in holders if holder.run_id), holders[0])
    place = f" in container {first.vmid}" if first.vmid else ""
    who = f"run {first.run_id}{place}" if first.run_id else f"process {first.pid} of the host{place}"
    stop_it = f"dflash-ops train stop {first.run_id}"
    if first.vmid not in (None, container.vmid):
        stop_it += f" -t NAME, which the inventory gives container {first.vmid}"
    raise BusyError(
        f"GPU {first.index} of {container.host} is taken",
        where=str(container),
        why=f"{who} holds it",
        next=stop_it if first.run_id else "dflash-ops gpu-status",
    )


def _started_before(shell: Shell, container: Container, run_id: str) -> Run:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            found = status(shell, container, run_id)
            if found.state is not RunState.STARTING or time.monotonic() > deadline:
                return found
        except NotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def stop(shell: Shell, container: Container, run: str | None = None, *, grace: float = 60.0) -> Stopped:
    """Stops a run, or the only one. OpsError names what could not be ended; NotFoundError says that nothing runs."""
    query = runs.stop_query(container, run, grace)
    stopped = shell.ask(container, query, timeout=grace + _STOP_SECONDS)
    if stopped.survivors:
        names = "; ".join(f"{it.pid} ({it.command[:60]}), state {it.state} in {it.wchan}" for it in stopped.survivors)
        raise OpsError(
            f"run {stopped.run.id} is not wholly stopped",
            where=str(container),
            why=f"these would not die: {names}",
            next="dflash-ops gpu-status; state D is the driver: only a restart of the host ends it",
        )
    return stopped


def list_runs(shell: Shell, container: Container) -> list[Run]:
    """Every run of the container, oldest first."""
    return shell.ask(container, runs.list_query(container))


def status(shell: Shell, container: Container, run: str) -> Run:
    """One run with its living processes; `run` is its id, or a name for the newest of that name."""
    return shell.ask(container, runs.run_query(container, run))


def newest(shell: Shell, container: Container) -> Run:
    """The run meant when none is named: the newest that lives, else the newest."""
    every = list_runs(shell, container)
    if not every:
        raise NotFoundError("there are no runs yet", where=str(container), next="dflash-ops train start CONFIG")
    return next((run for run in reversed(every) if run.state.live), every[-1])


def logs(
    shell: Shell,
    container: Container,
    run: str,
    *,
    on_out: OnBytes,
    follow: bool = False,
    tail: int | None = None,
    on_break: OnWords = lambda words: None,
    quiet: bool = False,
) -> Run:
    """Hands on the log's bytes; with `follow` until the run has ended. Returns the run as it then is.

    After a broken link it goes on at the byte it had come to; `on_break` is told. tail: only the last lines, None: all.
    """
    reader = _LogReader(str(container), on_out)
    broken_at: float | None = None
    pause = 0.5
    while True:
        had = reader.offset
        command = runs.follow_command(
            container, reader.run_id or run, offset=reader.offset, tail=tail, follow=follow, quiet=quiet
        )
        reader.expect_header()
        try:
            code = shell.stream(container, command, on_out=reader)
            found = status(shell, container, reader.run_id or run)
        except UnreachableError as error:
            if reader.run_id is None:
                raise  # it never worked
            if broken_at is None or reader.offset != had:
                broken_at, pause = time.monotonic(), 0.5
            if time.monotonic() - broken_at > _RECONNECT_SECONDS:
                raise
            on_break(error.line())
            shell.close()  # the next command connects anew
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
            continue
        if code != 0 and reader.run_id is None:
            raise OpsError("the log can't be read", where=str(container), why=f"exit code {code}")
        if not follow or not found.state.live:
            return found


def wait(shell: Shell, container: Container, run: str, *, timeout: float | None = None) -> Run:
    """Waits for the end of a run, across broken links. StillRunningError after `timeout` seconds."""
    if timeout is None:
        return logs(shell, container, run, on_out=lambda data: None, follow=True, quiet=True)
    deadline = time.monotonic() + timeout
    found: Run | None = None
    while True:
        try:
            found = status(shell, container, run if found is None else found.id)
        except UnreachableError as error:
            never_worked = found is None and not isinstance(error, LinkLostError)
            if never_worked or time.monotonic() >= deadline:
                raise
            shell.close()  # the next question connects anew
        else:
            if not found.state.live:
                return found
            if time.monotonic() >= deadline:
                follow_it = f"dflash-ops train logs -f {found.id}"
                raise StillRunningError(found.verdict(), where=str(container), next=follow_it)
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


class _LogReader:
    """Takes the first line off, hands on the rest, and knows the byte offset that comes next."""

    def __init__(self, place: str, on_out: OnBytes) -> None:
        self._place, self._on_out = place, on_out
        self._head: bytes | None = b""
        self.run_id: str | None = None
        self.offset: int | None = None

    def expect_header(self) -> None:
        self._head = b""

    def __call__(self, data: bytes) -> None:
        if self._head is not None:
            line, end, data = (self._head + data).partition(b"\n")
            if not end:
                self._head = line
                return
            self._head = None
            self.run_id, self.offset = runs.log_header(line, self._place)
        if data:
            assert self.offset is not None
            self.offset += len(data)
            self._on_out(data)
