"""The verbs of `train`: start, stop, restart, logs, list, status, wait. Each is one command in the container.

A broken link is no end: start asks again with the same run id, stop and logs go on where they were. Nothing is waited
for in silence: a script that works says so each second, and one that says nothing for 15 s is given up.
"""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from dflash_ops import gpu_locks, gpus, run_request, runs, stops
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import (
    BusyError,
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    StillRunningError,
    TimedOutError,
    UnreachableError,
)
from dflash_ops.logs import logs
from dflash_ops.remote.start import HOLD_SECONDS
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import Run, RunState, Started
from dflash_ops.shell import Shell
from dflash_ops.stops import Listing, SessionStopped, Stopped

CALL_SECONDS = 15.0  # the longest silence of a command in the container
_START_SECONDS = 2 * HOLD_SECONDS + 20.0  # the start script waits for another start, and then for its own steps
_TRIES = 3
_OTHER_GPUS = "the inventory's `gpus` are not what the container has: dflash-ops doctor says what to write there"

OnWait = Callable[[str, int], None]


def start(shell: Shell, container: Container, request: StartRequest, *, on_wait: OnWait | None = None) -> Started:
    """Starts a run. BusyError names who has the name or a GPU; ConfigError what the release's trainer refuses.
    on_wait: told what is waited for, and for how many seconds more."""
    run_request.check_name(request.name)
    run_id = run_request.new_run_id(request.name)
    uuids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tries_left = _TRIES
    while True:
        command = run_request.start_command(container, request, run_id, uuids=uuids)
        try:
            result = _hear(shell, container, command, on_wait)
        except UnreachableError as error:
            if tries_left == _TRIES and not isinstance(error, LinkLostError):
                raise  # nothing was sent
            tries_left -= 1
            if not tries_left or not isinstance(error, LinkLostError):
                raise _unheard(error, run_id) from error
            shell.again(error)
            time.sleep(1.0)
            continue
        except TimedOutError as error:
            raise TimedOutError(
                "the start gives no sign of life",
                where=str(container),
                why=error.why,
                next=f"it may have happened: dflash-ops train status {run_id}",
            ) from error
        if result.code == gpu_locks.TAKEN and not result.out.strip():
            found = _behind_the_lock(shell, container, request, run_id, uuids, result)
            if isinstance(found, Started):
                return found
            uuids, notes = found, (_OTHER_GPUS,)
        elif not uuids and (instead := gpu_locks.instead(result)):
            uuids, notes = instead.uuids, (_OTHER_GPUS,) if instead.held else ()
        else:
            started = runs.started(result)
            return replace(started, notes=(*started.notes, *notes))


def _behind_the_lock(
    shell: Shell, container: Container, request: StartRequest, run_id: str, uuids: Sequence[str], result: Result
) -> Started | tuple[str, ...]:
    """flock refused: the run, when it was our own start, whose answer was lost; or the UUIDs of the GPUs that the
    container really has, when what is taken is none of them. BusyError says who holds which."""
    wanted = range(len(container.gpus)) if request.gpus is None else request.gpus
    holders = _lock_holders(shell, container, [container.gpus[gpu] for gpu in wanted], uuids)
    if any(holder.run_id == run_id for holder in holders):
        return Started(_started_before(shell, container, run_id), window=None, freed=(), existing=True)
    if not holders:
        raise BusyError(
            "a GPU was taken a moment ago", where=str(container), why=result.last_words, next="start it again"
        )
    real = () if uuids else _real_gpus(shell, container, wanted)
    if real and not any(holder.uuid in real for holder in holders):
        return real
    raise _taken(container, holders)


def _real_gpus(shell: Shell, container: Container, numbers: Collection[int]) -> tuple[str, ...]:
    """The UUIDs of the GPUs that have these numbers in the container."""
    inside = shell.ask(container, gpus.container_query(container), timeout=CALL_SECONDS)
    own = gpus.parse_indices(inside["smi"]["gpus"]["out"])
    return tuple(uuid for uuid, index in own.items() if index in numbers)


def _lock_holders(
    shell: Shell, container: Container, indices: Sequence[int], uuids: Sequence[str]
) -> list[gpu_locks.LockHolder]:
    """Who holds the locks of these GPUs: on the host; or in the container, where a login user who may do little on the
    host takes them."""
    held = gpu_locks.holders(shell.ask(container.host, gpus.host_query()))
    found = gpu_locks.of(held, indices, uuids)
    if found:
        return found
    held = gpu_locks.holders(shell.ask(container, gpus.container_query(container), timeout=CALL_SECONDS))
    return [replace(it, vmid=container.vmid) for it in gpu_locks.of(held, indices, uuids)]


def _taken(container: Container, holders: list[gpu_locks.LockHolder]) -> BusyError:
    """Who holds one of the GPUs' locks."""
    # A lock without a run: a start that goes on, or another program's; who is in a container says more than lxc-attach.
    first = next((it for it in holders if it.run_id), next((it for it in holders if it.vmid), holders[0]))
    place = f" in container {first.vmid}" if first.vmid else ""
    who = f"run {first.run_id}{place}" if first.run_id else f"process {first.pid} of the host{place}"
    since = f" since {first.since[:16].replace('T', ' ')} UTC" if first.since else ""
    stop_it = f"dflash-ops train stop {first.run_id}"
    if first.vmid not in (None, container.vmid):
        stop_it += f" -t NAME, which the inventory gives container {first.vmid}"
    return BusyError(
        f"GPU {first.uuid if first.index is None else first.index} of {container.host} is taken",
        where=str(container),
        why=f"{who} holds it{since}",
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


def stop(
    shell: Shell, container: Container, run: str | None = None, *, grace: float = 60.0, on_wait: OnWait | None = None
) -> Stopped:
    """Stops a run, or the only one. OpsError names what could not be ended, or what GPU memory is not back;
    NotFoundError says that nothing runs. on_wait: told what is waited for, and for how many seconds more."""
    again = False
    for tries_left in reversed(range(_TRIES)):
        try:
            return stops.stopped(
                _hear(shell, container, stops.stop_command(container, run, grace, again=again), on_wait)
            )
        except UnreachableError as error:
            lost = isinstance(error, LinkLostError)
            if not again and not lost:
                raise  # nothing was sent
            if run is None:  # which one was meant may be another one by now
                shell.close()
                raise
            if not tries_left or not lost:
                raise _unheard(error, run) from error
            shell.again(error)
            again = True
            time.sleep(1.0)
    raise AssertionError("unreachable")


def _unheard(error: UnreachableError, run: str) -> UnreachableError:
    """That nobody knows what became of it: an answer was lost, and the host can't be asked again."""
    return type(error)(
        error.what,
        where=error.where,
        why=error.why,
        next=f"it may have happened: once the host answers, dflash-ops train status {run}",
    )


def stop_session(
    shell: Shell, container: Container, name: str, *, grace: float = 60.0, on_wait: OnWait | None = None
) -> SessionStopped:
    """Ends a tmux session that was started by hand, and all of its processes, with the same proof as `stop`."""
    return stops.session_stopped(_hear(shell, container, stops.session_stop_command(container, name, grace), on_wait))


def restart(
    shell: Shell,
    container: Container,
    run: str | None = None,
    *,
    changes: Callable[[StartRequest], StartRequest] = lambda request: request,
    grace: float = 60.0,
    on_wait: OnWait | None = None,
    on_stopped: Callable[[Stopped], None] = lambda stopped: None,
) -> Started:
    """Stops a run, if it goes on, and starts it again from its newest checkpoint: the same config, settings, secrets
    and GPUs, in the current release. changes: what of the request shall be otherwise. What would be in the way of the
    start is found before anything is stopped; where it still fails, its error says that the run is stopped."""
    found = status(shell, container, run) if run is not None else newest(shell, container)
    request = StartRequest(found.name, None, "", gpus=found.gpus if found.gpus_known else None, like=found.id)
    request = changes(request)
    stopped = False
    if found.state.live or status(shell, container, found.id).processes:
        _check_start(shell, container, request, found, on_wait)
        with contextlib.suppress(NotFoundError):  # it has ended meanwhile
            on_stopped(stop(shell, container, found.id, grace=grace, on_wait=on_wait))
            stopped = True
    try:
        return start(shell, container, request, on_wait=on_wait)
    except OpsError as error:
        if stopped:
            advice = f"run {found.id} is stopped; go on: dflash-ops train restart {found.id}"
            error.next = f"{error.next}; {advice}" if error.next else advice
            error.args = (error.line(),)
        raise


def _check_start(
    shell: Shell, container: Container, request: StartRequest, instead_of: Run, on_wait: OnWait | None
) -> None:
    """OpsError when this start could not take the place of a run that goes on."""
    known = len(container.gpus)
    wanted = range(known) if request.gpus is None else request.gpus
    if known and any(gpu >= known for gpu in wanted):
        raise PreflightError(
            f"run {instead_of.id} had GPU {max(wanted)}",
            where=str(container),
            why=f"the inventory gives the container {known} now, numbered from 0",
            next="--gpus with others",
        )
    if known and wanted:
        holders = _lock_holders(shell, container, [container.gpus[gpu] for gpu in wanted], ())
        holders = [it for it in holders if it.run_id != instead_of.id]
        real = _real_gpus(shell, container, wanted) if holders else ()
        if holders and (not real or any(it.uuid in real for it in holders)):
            raise _taken(container, holders)
    command = run_request.start_command(
        container, request, run_request.new_run_id(request.name), check_instead_of=instead_of.id
    )
    run_request.checked(_hear(shell, container, command, on_wait))


def list_runs(shell: Shell, container: Container) -> list[Run]:
    """Every run of the container, oldest first."""
    return shell.ask(container, runs.list_query(container), timeout=CALL_SECONDS)


def list_all(shell: Shell, container: Container) -> Listing:
    """Every run, the tmux sessions that were started by hand, and the processes with a GPU that are of neither."""
    return stops.listing(shell.run(container, stops.listing_command(container), timeout=2 * CALL_SECONDS))


def status(shell: Shell, container: Container, run: str) -> Run:
    """One run with its living processes; `run` is its id, or a name for the newest of that name."""
    return shell.ask(container, runs.run_query(container, run), timeout=CALL_SECONDS)


def newest(shell: Shell, container: Container) -> Run:
    """The run meant when none is named: the newest that lives, else the newest."""
    every = list_runs(shell, container)
    if not every:
        raise NotFoundError("there are no runs yet", where=str(container), next="dflash-ops train start CONFIG")
    return next((run for run in reversed(every) if run.state.live), every[-1])


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
            shell.again(error)
        else:
            if not found.state.live:
                return found
            if time.monotonic() >= deadline:
                follow_it = f"dflash-ops train logs -f {found.id}"
                raise StillRunningError(found.verdict(), where=str(container), next=follow_it)
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def _hear(shell: Shell, container: Container, command: Command, on_wait: OnWait | None) -> Result:
    """Runs a script that tells what it waits for. TimedOutError after 15 s of silence."""
    out, err = bytearray(), bytearray()
    told = 0

    def hear(data: bytes) -> None:
        nonlocal told
        out.extend(data)
        if on_wait is None:
            return
        end = out.rfind(b"\n")
        for line in bytes(out[told : max(end, told)]).split(b"\n"):
            beat = _beat(line)
            if beat is not None:
                on_wait(*beat)
        told = max(end + 1, told)

    code = shell.stream(container, command, on_out=hear, on_err=err.extend, timeout=CALL_SECONDS)
    return Result(container, command, code, bytes(out), bytes(err))


def _beat(line: bytes) -> tuple[str, int] | None:
    try:
        record: Any = json.loads(line)
        return str(record["doing"]), int(record["left_s"])
    except (ValueError, KeyError, TypeError):
        return None
