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

from dflash_ops.remote import answers, logfile, processes, rundir

_POLL_MS = 200


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
        offset = logfile.tail_offset(folder, parameters["tail"])
    reader = logfile.Reader(folder, offset)
    # Parts of the log that were given up since are told, not passed over in silence.
    header = {"ok": True, "run_id": folder.name, "offset": reader.offset, "gone": reader.offset - offset}
    try:
        _send(json.dumps({"schema_version": rundir.SCHEMA_VERSION, **header}).encode() + b"\n")
        follow(folder, reader, follow=parameters["follow"], quiet=parameters["quiet"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own last flush must not complain
    return 0


def follow(folder: Path, reader: logfile.Reader, *, follow: bool, quiet: bool) -> None:
    hang_up = select.poll()
    hang_up.register(1, 0)  # only POLLERR and POLLHUP, which need no asking: the reader is gone
    boot = processes.boot_id()
    while True:
        over = not follow or not rundir.lives(rundir.facts(folder, boot))
        # What was written before the run ended is there now: read after asking, to the end of the log.
        while not quiet and (data := reader.read()):
            _send(data)
        if over or hang_up.poll(_POLL_MS):
            return


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
