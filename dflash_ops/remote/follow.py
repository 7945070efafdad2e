"""Sends a run's log from a byte offset on, and goes on until the run has ended when asked to follow.

First one line of JSON (run id and offset), then the log's bytes as they are. Ends by itself when its reader is gone:
over ssh nobody would tell it. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, processes, rundir

_CHUNK = 256 * 1024
_POLL_MS = 200
_BLOCK = 64 * 1024


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    try:
        folder = rundir.find(path, parameters["run"])
    except answers.Fault as fault:
        return answers.refuse(fault)
    except OSError as error:
        return answers.refuse(answers.system_fault(path, error))
    offset = parameters["offset"]
    if offset is None:
        offset = tail_offset(folder / "log", parameters["tail"])
    header = {"schema_version": rundir.SCHEMA_VERSION, "ok": True, "run_id": folder.name, "offset": offset}
    try:
        _send(json.dumps(header).encode() + b"\n")
        follow(folder, offset, follow=parameters["follow"], quiet=parameters["quiet"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own last flush must not complain
    return 0


def follow(folder: Path, offset: int, *, follow: bool, quiet: bool) -> None:
    hang_up = select.poll()
    hang_up.register(1, 0)  # only POLLERR and POLLHUP, which need no asking: the reader is gone
    boot = processes.boot_id()
    while True:
        over = not follow or not rundir.lives(rundir.facts(folder, boot))
        # What was written before the run ended is there now: read after asking, to the end of the file.
        if not quiet:
            offset = _send_rest(folder / "log", offset)
        if over or hang_up.poll(_POLL_MS):
            return


def tail_offset(log: Path, lines: int | None) -> int:
    """Where the last `lines` lines begin; 0 for None. Reads from the end, however long the log is."""
    if lines is None:
        return 0
    if lines == 0:
        return log.stat().st_size if log.exists() else 0
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            position, found = end, 0
            while position > 0:
                begin = max(0, position - _BLOCK)
                file.seek(begin)
                block = file.read(position - begin)
                at = len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    # The line feed that ends the file ends its last line: it begins no other.
                    if begin + at != end - 1:
                        found += 1
                    if found == lines:
                        return begin + at + 1
                position = begin
            return 0
    except OSError:
        return 0


def _send_rest(log: Path, offset: int) -> int:
    try:
        file = open(log, "rb")  # noqa: SIM115 # a missing log is no fault here, a broken pipe below is
    except FileNotFoundError:
        return offset
    with file:
        file.seek(offset)
        while data := file.read(_CHUNK):
            _send(data)
            offset += len(data)
    return offset


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
