"""How a run stands, again and again: a line of JSON each time something has changed, the first with all there is.

Ends with the run, or by itself when its reader is gone. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, curves, logfile, processes, rundir

_SMI = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
_SMI_SECONDS = 10.0
_LOG_BYTES = 32 * 1024
_ALIVE_SECONDS = 10.0  # a line at least so often, changed or not


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    try:
        folder = rundir.find(path, parameters["run"])
        page(folder, parameters)
    except answers.Fault as fault:
        return answers.refuse(fault)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own last flush must not complain
    except OSError as error:
        return answers.refuse(answers.system_fault(path, error))
    return 0


def page(folder: Path, parameters: dict[str, Any]) -> None:
    """follow: until the run has ended; interval: seconds between two looks; points: the most of a curve; lines: of the
    log."""
    metrics = curves.Metrics(folder / "metrics.jsonl", parameters["points"])
    follow: bool = parameters["follow"]
    smi = _Smi() if follow else None
    hang_up = select.poll()
    hang_up.register(1, 0)  # POLLERR and POLLHUP: the reader is gone
    boot = processes.boot_id()
    before: dict[str, Any] = {}
    told_at = 0.0
    while True:
        facts = rundir.facts(folder, boot)
        over = not follow or not rundir.lives(facts)
        if facts["exit"] is None and not rundir.lives(facts):
            facts["processes"] = [processes.describe(process) for process in rundir.members(facts)]
        now: dict[str, Any] = {"facts": facts, "gpus": smi.rows if smi is not None else []}
        if facts["log_bytes"] != before.get("facts", {}).get("log_bytes"):
            now["log"] = _last_lines(folder, parameters["lines"])
        changed = {name: value for name, value in now.items() if before.get(name) != value}
        new = metrics.read()
        if new is not None:
            changed["metrics"] = new
        before.update(now)
        if changed or over or time.monotonic() - told_at > _ALIVE_SECONDS:
            told_at = time.monotonic()
            answers.say({**changed, "over": over, "time": rundir.now()})
        if over or hang_up.poll(parameters["interval"] * 1000):
            return


def _last_lines(folder: Path, count: int) -> list[str]:
    end = logfile.end(folder)
    reader = logfile.Reader(folder, max(logfile.tail_offset(folder, count), end - _LOG_BYTES))
    with contextlib.closing(reader):
        text = reader.read(_LOG_BYTES).decode("utf-8", "replace")
    return [line[:400] for line in text.split("\n") if line][-count:]


class _Smi:
    """nvidia-smi, asked in a thread of its own: it may take seconds, and hangs with a sick driver."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        words = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
        # As in probe.py: this one holds the devices while it asks, and is no user of a GPU.
        environment = {**os.environb, b"DFLASH_OPS_PROBE": b"1"}
        while True:
            try:
                asked = subprocess.run(words, capture_output=True, timeout=_SMI_SECONDS, env=environment)
            except FileNotFoundError:
                return
            except (OSError, subprocess.TimeoutExpired):
                self.rows = []
            else:
                text = asked.stdout.decode("utf-8", "replace") if asked.returncode == 0 else ""
                self.rows = [[cell.strip() for cell in line.split(",")] for line in text.split("\n") if line.strip()]
            time.sleep(2.0)
