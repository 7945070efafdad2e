"""The process above one trainer: owns its process group and its log, and writes what became of it.

Started by start.py as the leader of a session of its own; ssh, tmux and laptop may come and go. Its inherited
descriptors hold the GPU locks of the hypervisor: it keeps them open as long as anything of the run may hold a GPU, and
never hands them on, so the kernel frees them when it ends, however it ends. A trainer that fails in a way that can heal
is started again, as often as the run allows, and goes on from its own last checkpoint. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.remote import cgroups, kin, notify, processes, rundir, watch
from dflash_ops.remote.logfile import PART_BYTES, Log

STALLED_CODE = 14  # the trainer's own watchdog ends it with this; ours gives it to what it had to kill
_RESERVE_BYTES = 16 * 1024
_LEFTOVER_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for what the trainer left running
_LEFTOVER_LIMIT = 30.0
_RECORD_LIMIT = 60.0  # seconds of trying to write exit.json on a full disk
_STALL_GRACE = 10.0  # for a trainer that hangs, between SIGTERM, SIGABRT (which shows Python's stacks) and SIGKILL
_OOM_SECONDS = 10.0  # a death by SIGKILL this soon after the kernel's own kill is taken for it
_RESTART_WAIT = 10.0
_LONGEST_WAIT = 600.0
# 2: its command line, 3: its config; 126 and 127: it can't be executed. None of them heals by itself.
_HOPELESS = (2, 3, 126, 127)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended. code: as a shell tells it. stopped: a stop had been asked for before. progressed: it did a
    step. left: what would not die. stalled: it was being ended since it hung."""

    code: int
    signal: int | None = None
    stopped: bool = False
    oom: bool = False
    progressed: bool = False
    left: tuple[dict[str, Any], ...] = ()
    stalled: bool = False

    @property
    def can_heal(self) -> bool:
        """Whether the same command may fare better the next time."""
        if self.left or self.code in (0, *_HOPELESS):
            return False
        # 1 and the like before the first step: what can't start now can't start later.
        return self.code > 128 or self.code == STALLED_CODE or self.progressed


def supervise(folder: Path) -> None:
    """Runs the trainer of this run folder to its end and records it."""
    # The trainer's orphans become our children, so that none of them can be missed.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _Supervisor(folder).run()


class _Supervisor:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = rundir.read_run(folder)
        self._reserve = _make_reserve(folder)
        self._log = Log(folder / "log", self._run.get("log_part_bytes") or PART_BYTES)
        reader, self._writer = os.pipe()
        os.set_blocking(reader, False)
        self._pump = _Pump(reader, _catch_signals(), self._log)
        self._memory = cgroups.OutOfMemory()
        self._minutes = float(self._run.get("stall_minutes") or 0)
        self._restarts: list[dict[str, Any]] = []
        self._told = True
        self._state: dict[str, Any] = {
            "schema_version": rundir.SCHEMA_VERSION,
            "run_id": self._run["run_id"],
            "state": "running",
            "boot_id": processes.boot_id(),
            "supervisor": _myself().identity(),
            "child": None,
            "cgroup": cgroups.create(self._run["run_id"]),
            "started_at": rundir.now(),
            "attempt": 1,
            "restarts": self._restarts,
        }

    def run(self) -> None:
        began = time.monotonic()
        outcome = self._attempt()
        while self._may_restart and outcome.can_heal and not outcome.stopped:
            if not self._wait(outcome):
                outcome = None  # stopped between two attempts: there was no trainer to end
                break
            outcome = self._attempt()
        record = rundir.exit_record(
            self._run["run_id"],
            outcome and outcome.code,
            signal=outcome and outcome.signal,
            seconds=round(time.monotonic() - began, 3),
            stopped=outcome is None or outcome.stopped,
            left=list(outcome.left) if outcome else [],
            oom=bool(outcome and outcome.oom),
            stalled=bool(outcome and outcome.stalled),
            restarts=self._restarts,
        )
        cgroups.remove(self._state["cgroup"], self._run["run_id"])
        _record(self._folder, self._reserve, self._log, record)
        if (self._folder / "state.json").exists():
            self._tell(state="exited")
        tell_end(self._folder, record)

    @property
    def _may_restart(self) -> bool:
        return len(self._restarts) < (self._run.get("restart") or 0)

    def _attempt(self) -> Outcome:
        """One trainer, from its start until nothing of it is left."""
        began = rundir.now()
        try:
            trainer = _launch(self._folder, self._run, self._writer, self._state["cgroup"])
        except OSError as error:
            self._log.note(f"can't start {self._run['command'][0]}: {error.strerror}")
            return Outcome(127 if isinstance(error, FileNotFoundError) else 126)
        child = processes.read(trainer.pid)
        assert child is not None  # it is our child and not reaped yet
        identity = {**child.identity(), "pgid": child.pid}
        self._tell(state="running", child=identity, attempt=len(self._restarts) + 1)
        dog = watch.Watchdog(self._folder, self._minutes)
        ending: _Ending | None = None
        forwarded = False
        while (status := _reap(trainer)) is None:
            if _Signals.stop_asked and not forwarded:
                forwarded = processes.send(child, signal.SIGTERM)
            if not self._told:
                self._tell()
            self._memory.look()
            if dog.look(self._log.end):
                self._tell_stall(dog, child)
            if dog.stalled and ending is None and self._may_restart and not _Signals.stop_asked:
                ending = _Ending(child, min(_STALL_GRACE, 60 * self._minutes))
            if ending is not None and not _Signals.stop_asked:  # the rest is for whoever stops it
                ending.go_on()
            self._pump.turn(dog.every if ending is None else 0.1)
        stopped = _Signals.stop_asked  # a stop that comes now comes too late: it has ended by itself
        oom = not stopped and ending is None and self._memory.within(_OOM_SECONDS)
        left = _clear(self._pump, self._state["cgroup"], self._run["run_id"])
        self._pump.drain()
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else None
        stalled = ending is not None
        code = STALLED_CODE if stalled and not stopped else 128 + number if number else code
        progressed = watch.did_a_step_since(self._folder, began)
        oom = oom and code == 128 + signal.SIGKILL
        if oom:
            self._log.note("the kernel killed the trainer: the container's memory was full (OOM)")
        return Outcome(code, number, stopped, oom, progressed, tuple(left), stalled)

    def _wait(self, outcome: Outcome) -> bool:
        """Waits before the next attempt, longer each time; whether there shall be one."""
        number = len(self._restarts)
        seconds = wait_before(number, self._run.get("restart_wait"))
        record = {
            "attempt": number + 1,
            "code": outcome.code,
            "signal": outcome.signal,
            "oom": outcome.oom,
            "step": watch.step_of(self._folder),
            "ended_at": rundir.now(),
            "wait_s": seconds,
        }
        self._restarts.append(record)
        most = self._run.get("restart")
        self._log.note(f"exit code {outcome.code}; restart {number + 1} of {most} in {seconds:g} s")
        self._tell(state="waiting", child=None)
        notify.tell(self._folder, sys.executable, "restarting")
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not _Signals.stop_asked:
            _reap(None)
            self._pump.turn(min(left, 1.0))
        return not _Signals.stop_asked

    def _tell_stall(self, dog: watch.Watchdog, child: processes.Process) -> None:
        if not dog.stalled:
            self._log.note("a new step: the run goes on")
            self._tell(state="running")
            return
        self._log.note(
            f"no new step in {dog.quiet_seconds / 60:.1f} minutes; {watch.stacks(child, self._run['command'][0])}"
        )
        dog.forgive(self._log.end)
        self._tell(state="stalled")
        notify.tell(self._folder, sys.executable, "stalled")

    def _tell(self, **changes: Any) -> None:
        """Writes state.json; on a full disk it is tried again, and the run goes on."""
        self._state.update(changes)
        try:
            rundir.write_json(self._folder / "state.json", self._state)
        except OSError:
            self._told = False
        else:
            self._told = True


def wait_before(number: int, first: float | None) -> float:
    """Seconds before restart `number`, counted from 0; first: of the first one."""
    return min((_RESTART_WAIT if first is None else first) * 2 ** min(number, 20), _LONGEST_WAIT)


def tell_end(folder: Path, record: dict[str, Any]) -> None:
    """Notifies of the end that exit.json tells of; the record itself, as the disk may not have taken it."""
    status = rundir.read_json(folder / "status.json")
    notify.tell(folder, sys.executable, rundir.how_it_ended(record, status))


class _Ending:
    """Ends a trainer that hangs: it may still save, then it shows its Python stacks as it dies, then it just dies."""

    def __init__(self, child: processes.Process, grace: float) -> None:
        self._child, self._grace = child, grace
        self._due: list[tuple[float, int]] = []
        moment = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL):
            self._due.append((moment, number))
            moment += grace

    def go_on(self) -> None:
        while self._due and time.monotonic() >= self._due[0][0]:
            _, number = self._due.pop(0)
            if number != signal.SIGABRT or watch.dumps_no_core(self._child):
                processes.send(self._child, number)
                processes.send(self._child, signal.SIGCONT)


class _Signals:
    stop_asked = False


def _catch_signals() -> int:
    """Installs the handlers; returns a descriptor that becomes readable at each signal."""

    def ask_stop(_number: int, _frame: Any) -> None:
        _Signals.stop_asked = True

    def note(_number: int, _frame: Any) -> None:
        pass

    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, ask_stop)
    # Handlers rather than SIG_IGN: exec sets them back to the default in the trainer, ignored signals would stay so.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, note)
    return reading.detach()


def _launch(folder: Path, run: dict[str, Any], writer: int, group: str | None) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        # Should the supervisor be killed, the trainer is asked to save and end: nobody would hold its GPU lock then.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if group is not None:  # before it can fork: nothing of it is ever outside
            with contextlib.suppress(OSError), open(f"{group}/cgroup.procs", "w") as members:
                members.write("0")

    return subprocess.Popen(
        run["command"],
        cwd=run["cwd"],
        env=trainer_environment(folder, run),
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
        close_fds=True,
        preexec_fn=in_child,
    )


def trainer_environment(folder: Path, run: dict[str, Any]) -> dict[bytes, bytes]:
    """The environment of the trainer; what dflash-ops itself sets wins over the run's env file."""
    environment = dict(os.environb)
    with contextlib.suppress(FileNotFoundError):
        environment.update(parse_environment((folder / "env").read_bytes()))
    environment.setdefault(b"DFLASH_SHARED", os.fsencode(folder.parent.parent / "shared"))
    environment.setdefault(b"PYTHONFAULTHANDLER", b"1")  # a crash leaves Python's stacks in the log
    environment.update(
        {
            processes.RUN_ID: run["run_id"].encode(),
            processes.RUN_DIR: os.fsencode(folder),
            b"CUDA_DEVICE_ORDER": b"PCI_BUS_ID",
            b"PYTHONUNBUFFERED": b"1",
        }
    )
    if run["gpus"] is not None:
        environment[b"CUDA_VISIBLE_DEVICES"] = ",".join(map(str, run["gpus"])).encode()
    return environment


def parse_environment(data: bytes) -> dict[bytes, bytes]:
    """KEY=VALUE lines, the value to the end of its line as it is; blank lines and lines that begin with # are not."""
    lines = (line for line in data.split(b"\n") if b"=" in line and not line.lstrip().startswith(b"#"))
    pairs = (line.partition(b"=") for line in lines)
    return {key.strip(): value.rstrip(b"\r") for key, _, value in pairs}


class _Pump:
    """Moves the trainer's output into the log, and wakes at signals."""

    def __init__(self, reader: int, wakeups: int, log: Log) -> None:
        self._reader, self._wakeups, self._log = reader, wakeups, log
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)
        self._selector.register(wakeups, selectors.EVENT_READ)

    def turn(self, seconds: float) -> None:
        """One wait for output or a signal, and what it brought."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self._wakeups:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeups, 4096)
            else:
                self._log.write(os.read(self._reader, 64 * 1024))

    def drain(self) -> None:
        """Everything that is in the pipe now. It has no end: we hold its other side, for the next attempt."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._log.write(os.read(self._reader, 64 * 1024))


def _reap(trainer: subprocess.Popen[bytes] | None) -> int | None:
    """Buries every dead child; the trainer's wait status once it is among them."""
    status = None
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if trainer is not None and pid == trainer.pid:
            trainer.returncode = os.waitstatus_to_exitcode(found)
            status = found


def _clear(pump: _Pump, group: str | None, run_id: str) -> list[dict[str, Any]]:
    """Ends what the trainer left running, for a run is over when all of it is; returns what would not go.

    As subreaper we are the parent of every orphan: no child of ours left means nothing of the run left. Messengers are
    left alone, and a tmux server that the run began with all that lives in it: with one of them about, two scans in a
    row must find nothing else.
    """
    began = time.monotonic()
    asked, scans = False, 0
    while scans < 2:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        everything = processes.table()
        below = kin.descendants(_myself(), everything)
        left = [process for process in everything if process.pid in below and not process.ended]
        servers = [process.pid for process in left if kin.is_tmux_server(process.pid)]
        homes = kin.lives_in_tmux(servers, everything)
        left = [it for it in left if it.pid not in homes and not kin.is_messenger(it.pid)]
        scans = 0 if left else scans + 1
        waited = time.monotonic() - began
        if waited > _LEFTOVER_LIMIT:
            return [processes.describe(process) for process in left]
        if waited > _LEFTOVER_GRACE or not asked:
            if asked and not homes:
                cgroups.kill(group, run_id)
            for process in left:
                processes.send(process, signal.SIGKILL if asked else signal.SIGTERM)
                processes.send(process, signal.SIGCONT)
            asked = True
        pump.turn(0.05)
    return []


def _record(folder: Path, reserve: Path, log: Log, record: dict[str, Any]) -> None:
    """Writes exit.json, on a full disk into the room that was kept for it. Where nothing can be written the run is
    lost, but no more than that: who is to be told of its end is told."""
    log.close()
    record.update(last_lines=log.last_lines(), log_lost_bytes=log.lost)

    def written() -> bool:
        try:
            rundir.write_json(folder / "exit.json", record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                sys.stderr.write(f"dflash-ops: exit.json can't be written: {error}\n")  # a read-only disk, say
                return True
            with contextlib.suppress(OSError):
                reserve.unlink()
            record["last_lines"] = [line[-200:] for line in record["last_lines"]]
            return False
        return True

    processes.wait_until(written, _RECORD_LIMIT, every=0.5)
    with contextlib.suppress(OSError):
        reserve.unlink()


def _make_reserve(folder: Path) -> Path:
    """Room on the disk that exit.json can have when everything else is full."""
    path = folder / ".room"
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(b"\0" * _RESERVE_BYTES)
    return path


def _myself() -> processes.Process:
    process = processes.read(os.getpid())
    assert process is not None
    return process


def main(words: list[str]) -> int:
    supervise(Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
