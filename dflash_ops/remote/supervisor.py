"""The process above one trainer: owns its process group and its log, and writes what became of it.

Started by start.py as the leader of a session of its own; ssh, tmux and laptop may come and go. Its inherited
descriptors hold the GPU locks of the hypervisor: it keeps them open as long as anything of the run may hold a GPU, and
never hands them on, so the kernel frees them when it ends, however it ends. Standard library only, Python >= 3.9.
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
from pathlib import Path
from typing import Any

from dflash_ops.remote import processes, rundir

LAST_LINES = 50
_TAIL_BYTES = 64 * 1024
_RESERVE_BYTES = 16 * 1024
_LEFTOVER_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for what the trainer left running
_LEFTOVER_LIMIT = 30.0
_RECORD_LIMIT = 60.0  # seconds of trying to write exit.json on a full disk
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


class Log:
    """Appends to the run's log, byte for byte; a full disk costs bytes, never the trainer.

    What could not be written is counted, and said in the log as soon as there is room again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._missing = 0
        self._why = ""
        self.lost = 0
        self.tail = b""

    def write(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._missing:
            notice = f"\n[dflash-ops: {self._missing} bytes of this log were lost here: {self._why}]\n".encode()
            if self._append(notice) < len(notice):
                self._lose(len(data))
                return
            self._missing = 0
        written = self._append(data)
        if written < len(data):
            self._lose(len(data) - written)

    def last_lines(self) -> list[str]:
        lines = self.tail.decode("utf-8", "replace").split("\n")
        if lines and not lines[-1]:
            lines.pop()
        return [line[-2000:] for line in lines[-LAST_LINES:]]

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, data: bytes) -> int:
        """How many of the bytes are in the file now."""
        done = 0
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self._why = error.strerror or str(error)
        return done

    def _lose(self, count: int) -> None:
        self._missing += count
        self.lost += count


def supervise(folder: Path) -> None:
    """Runs the trainer of this run folder to its end and records it."""
    # The trainer's orphans become our children, so that none of them can be missed.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = rundir.read_json(folder / "run.json") or {}
    reserve = _make_reserve(folder)
    wakeups = _catch_signals()
    log = Log(folder / "log")
    began = time.monotonic()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        trainer = _launch(folder, run, writer)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        log.write(f"dflash-ops: can't start {run['command'][0]}: {error.strerror}\n".encode())
        _record(folder, reserve, log, rundir.exit_record(run["run_id"], code, seconds=0.0))
        return
    os.close(writer)
    child = processes.read(trainer.pid)
    state = {
        "schema_version": rundir.SCHEMA_VERSION,
        "run_id": run["run_id"],
        "state": "running",
        "boot_id": processes.boot_id(),
        "supervisor": _myself().identity(),
        "child": {**child.identity(), "pgid": child.pid} if child else None,
        "started_at": rundir.now(),
    }
    told = _write_state(folder, state)
    pump = _Pump(reader, wakeups, log)
    forwarded = False
    while (status := _reap(trainer)) is None:
        if _Signals.stop_asked and not forwarded and child is not None:
            forwarded = processes.send(child, signal.SIGTERM)
        told = told or _write_state(folder, state)
        pump.turn(1.0)
    stopped = _Signals.stop_asked  # a stop that comes now comes too late: the run has ended by itself
    seconds = round(time.monotonic() - began, 3)
    left = _clear(pump)
    pump.drain()
    exit_code = os.waitstatus_to_exitcode(status)
    number = -exit_code if exit_code < 0 else None
    code = 128 + number if number else exit_code
    record = rundir.exit_record(run["run_id"], code, signal=number, seconds=seconds, stopped=stopped, left=left)
    _record(folder, reserve, log, record)
    _write_state(folder, {**state, "state": "exited"})


def _write_state(folder: Path, state: dict[str, Any]) -> bool:
    """Whether state.json could be written; on a full disk it is tried again, and the run goes on."""
    try:
        rundir.write_json(folder / "state.json", state)
    except OSError:
        return False
    return True


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


def _launch(folder: Path, run: dict[str, Any], writer: int) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        # Should the supervisor be killed, the trainer is asked to save and end: nobody would hold its GPU lock then.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

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
            elif not self._read():
                self._selector.unregister(self._reader)  # every writer has closed it; the trainer may live on

    def drain(self) -> None:
        """Everything that is in the pipe now."""
        with contextlib.suppress(BlockingIOError):
            while self._read():
                pass

    def _read(self) -> bool:
        data = os.read(self._reader, 64 * 1024)
        if data:
            self._log.write(data)
        return bool(data)


def _reap(trainer: subprocess.Popen[bytes]) -> int | None:
    """Buries every dead child; the trainer's wait status once it is among them."""
    status = None
    while True:
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == trainer.pid:
            trainer.returncode = os.waitstatus_to_exitcode(found)
            status = found


def _clear(pump: _Pump) -> list[dict[str, Any]]:
    """Ends what the trainer left running, for a run is over when all of it is; returns what would not go.

    As subreaper we are the parent of every orphan: no child of ours left means nothing of the run left.
    """
    began = time.monotonic()
    asked = False
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        everything = processes.table()
        below = processes.descendants(_myself(), everything)
        left = [process for process in everything if process.pid in below and not process.ended]
        waited = time.monotonic() - began
        if waited > _LEFTOVER_LIMIT:
            return [processes.describe(process) for process in left]
        if waited > _LEFTOVER_GRACE or not asked:
            for process in left:
                processes.send(process, signal.SIGKILL if asked else signal.SIGTERM)
                processes.send(process, signal.SIGCONT)
            asked = True
        pump.turn(0.05)


def _record(folder: Path, reserve: Path, log: Log, record: dict[str, Any]) -> None:
    """Writes exit.json, on a full disk into the room that was kept for it."""
    log.close()
    record.update(last_lines=log.last_lines(), log_lost_bytes=log.lost)

    def written() -> bool:
        try:
            rundir.write_json(folder / "exit.json", record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
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
