"""Sends a run's log from a byte offset on, and goes on until the run has ended when asked to follow.

First one line of JSON (run id and offset). Then the log's bytes as they are; with `grep`, frames: a line with the
offset that comes next and a count, then as many bytes: the lines that matched. Ends by itself when its reader is gone:
over ssh nobody would tell it. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, logfile, processes, rundir

_POLL_MS = 200
_LONGEST_LINE = 1 << 20  # what is longer is matched in pieces: memory has an end


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    try:
        folder = rundir.find(path, parameters["run"])
    except answers.Fault as fault:
        return answers.refuse(fault)
    except OSError as error:
        return answers.refuse(answers.system_fault(path, error))
    asked, tail, grep = parameters["offset"], parameters["tail"], parameters.get("grep")
    offset, timed = asked, True
    if offset is None:
        offset = logfile.tail_offset(folder, None if grep is not None else tail)
        if parameters.get("since") is not None:
            found = logfile.since_offset(folder, _moment(parameters["since"]))
            timed = found is not None
            offset = max(offset, found or 0)
    reader = logfile.Reader(folder, offset)
    # Parts of the log that were given up since are told, not passed over in silence.
    header = {"ok": True, "run_id": folder.name, "offset": reader.offset, "gone": reader.offset - offset}
    matching = None
    if grep is not None:
        matching = _Matching(re.compile(grep), reader, tail if asked is None else None)
    try:
        document = {"schema_version": rundir.SCHEMA_VERSION, **header, "timed": timed}
        _send(json.dumps(document).encode() + b"\n")
        follow(folder, reader, matching, follow=parameters["follow"], quiet=parameters["quiet"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's own last flush must not complain
    return 0


def follow(
    folder: Path, reader: logfile.Reader, matching: _Matching | None = None, *, follow: bool, quiet: bool
) -> None:
    hang_up = select.poll()
    hang_up.register(1, 0)  # only POLLERR and POLLHUP, which need no asking: the reader is gone
    boot = processes.boot_id()
    while True:
        over = not follow or not rundir.lives(rundir.facts(folder, boot))
        # What was written before the run ended is there now: read after asking, to the end of the log.
        if matching is not None:
            while matching.turn():
                pass
            matching.at_the_end(over=over)
        else:
            while not quiet and (data := reader.read()):
                _send(data)
        if over or hang_up.poll(_POLL_MS):
            return


class _Matching:
    """Sends the lines in which the pattern is found. tail: of those that are there already, only the last so many."""

    def __init__(self, pattern: re.Pattern[str], reader: logfile.Reader, tail: int | None) -> None:
        self._pattern, self._reader = pattern, reader
        self._last: deque[bytes] | None = None if tail is None else deque(maxlen=tail)
        self._held = b""

    def turn(self) -> bool:
        """Takes the next bytes; whether there were any."""
        data = self._reader.read()
        if not data:
            return False
        *lines, self._held = (self._held + data).split(b"\n")
        found = [line + b"\n" for line in lines if self._matches(line)]
        if len(self._held) > _LONGEST_LINE:
            found += [self._held] if self._matches(self._held) else []
            self._held = b""
        if self._last is not None:
            self._last.extend(found)
        else:
            self._frame(found)
        return True

    def at_the_end(self, *, over: bool) -> None:
        """All that is there was taken. over: nothing will follow, a line without an end is whole."""
        found = list(self._last) if self._last is not None else []
        self._last = None
        if over and self._held:
            found += [self._held] if self._matches(self._held) else []
            self._held = b""
        if found:
            self._frame(found)

    def _matches(self, line: bytes) -> bool:
        return self._pattern.search(line.decode("utf-8", "replace")) is not None

    def _frame(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        _send(b"%d %d\n%b" % (self._reader.offset - len(self._held), len(data), data))


def _moment(since: dict[str, float]) -> float:
    """Seconds since the epoch, by the clock that the log's times are of."""
    return time.time() - since["ago_s"] if "ago_s" in since else since["at"]


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
