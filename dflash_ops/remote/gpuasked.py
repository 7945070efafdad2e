"""Programs that are asked for `gpu-status` and its kin, nvidia-smi first of all, and their words as they are.

Light, so that they can be started before the modules that look around meanwhile are even read. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import Any

# In the environment of our own nvidia-smi: it holds the devices while it asks, and is no user of a GPU.
PROBE = b"DFLASH_OPS_PROBE"
_REAP_SECONDS = 0.5


def ask_smi(queries: dict[str, list[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """nvidia-smi with each query's words; see `ask`."""
    return ask({name: ["nvidia-smi", *words] for name, words in queries.items()}, seconds)


def ask(programs: dict[str, list[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """By name: exit code (None: not there, or no answer in time), stdout, and why there is none. All are asked at once
    and get `seconds` together, for a sick driver hangs."""
    return Asked(programs, seconds).answers()


class Asked:
    """Programs that have been started; one may do something else before reading their answers, and calls `end` in any
    case: a program that hangs would outlive us. `answers` does so itself.

    Each leads a session of its own, so that what it has started (a wrapper's real program) ends with it. It inherits no
    descriptor of ours, for that could be a GPU lock. A signal that ends us does not reach it there: SIGHUP and SIGTERM,
    until `end`, are a SystemExit, on whose way out it is ended.
    """

    def __init__(self, programs: dict[str, list[str]], seconds: float) -> None:
        self._programs, self._seconds = programs, seconds
        self._deadline = time.monotonic() + seconds
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._caught: list[int] = []
        self._signal, self._may_leave = 0, False
        try:
            self._catch()
            for name, words in programs.items():
                self._start(name, words)
            self._may_leave = True
            self._leave_if_told()
        except BaseException:
            self.end()
            raise

    def _catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # it hears of no signal
        for number in (signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup's word holds
                self._caught.append(number)
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self._signal = self._signal or number
        if self._may_leave:  # not between a start and the note of it, nor in the middle of `end`
            self._leave_if_told()

    def _leave_if_told(self) -> None:
        if self._signal:
            self._may_leave = False
            raise SystemExit(128 + self._signal)

    def _start(self, name: str, words: list[str]) -> None:
        try:
            self._started[name] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environb, PROBE: b"1"},
                close_fds=True,
                start_new_session=True,
            )
        except OSError as error:
            self._told[name] = {"code": None, "out": "", "why": f"{words[0]}: {error.strerror}"}

    def answers(self) -> dict[str, dict[str, Any]]:
        try:
            for name, asked in self._started.items():
                try:
                    out, _ = asked.communicate(timeout=max(0.1, self._deadline - time.monotonic()))
                    self._told[name] = {"code": asked.returncode, "out": out.decode("utf-8", "replace"), "why": ""}
                except subprocess.TimeoutExpired:
                    why = f"{self._programs[name][0]} gave no answer in {self._seconds:.0f} s"
                    self._told[name] = {"code": None, "out": "", "why": why}
        finally:
            self.end()
        return self._told

    def end(self) -> None:
        """Kills what still runs, with what it has started, and reaps it. What the driver keeps in state D dies once the
        driver lets go; we wait half a second for all of them."""
        self._may_leave = False
        started, self._started = self._started, {}
        # Only who is not reaped yet: another's group could have the number of one that is.
        left = [asked for asked in started.values() if asked.returncode is None]
        for asked in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(asked.pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_SECONDS
        for asked in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                asked.wait(max(0.0, until - time.monotonic()))
            if asked.stdout is not None:
                asked.stdout.close()
        while self._caught:
            signal.signal(self._caught.pop(), signal.SIG_DFL)
        self._leave_if_told()
