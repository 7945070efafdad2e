"""What the tmux session of a run shows: its log, and on Ctrl-C the question whether to stop it.

Only a window: closing it, or the death of the tmux server, changes nothing for the run. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from dflash_ops.remote import answers, logfile, processes, rundir, stop

_BACKLOG_BYTES = 64 * 1024
_STOP_GRACE = 60.0
# Control characters but tab, line feed, carriage return and escape; a binary log must not upset the terminal.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
_ESCAPE = re.compile(rb"\x1b(?!\[[0-9;]*m)")


def main(words: list[str]) -> int:
    folder = Path(words[0])
    _say(f"run {folder.name}: Ctrl-C asks whether to stop it; C-b d leaves this window")
    reader = logfile.Reader(folder, max(0, logfile.end(folder) - _BACKLOG_BYTES))
    while True:
        try:
            if _turn(folder, reader):
                break
            time.sleep(0.2)
        except KeyboardInterrupt:
            _ask(folder)
    _say(_verdict(folder))
    if _watched():
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            input("Enter closes this window. ")
    return 0


def _turn(folder: Path, reader: logfile.Reader) -> bool:
    """Shows what is new in the log; whether the run is over and all of its log shown."""
    boot = processes.boot_id()
    over = not rundir.lives(rundir.facts(folder, boot))
    while data := reader.read():
        sys.stdout.buffer.write(_ESCAPE.sub(b"?", _CONTROL.sub(b"?", data)))
        sys.stdout.buffer.flush()
    return over


def _ask(folder: Path) -> None:
    try:
        reply = input(f"\nStop run {folder.name}? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        reply = ""
    if reply.strip().lower() not in ("y", "yes"):
        _say("it goes on")
        return
    _say(f"stopping: the trainer saves a checkpoint; killed after {_STOP_GRACE:.0f} s")
    try:
        done = stop.stop_folder(folder, stop.Limits(_STOP_GRACE))
    except answers.Fault as fault:
        _say(f"{fault.parts['what']}: {fault.parts['why']}")
        return
    except KeyboardInterrupt:
        _say("still stopping; another Ctrl-C, then y, tries again")
        return
    for survivor in done["survivors"]:
        _say(f"process {survivor['pid']} would not end: state {survivor['state']} in {survivor['wchan']}")
    for spared in done["spared"]:
        holds = f", and holds {spared['holds']}" if spared["holds"] else ""
        _say(f"left alone: process {spared['pid']} lives in a tmux server that the run began{holds}")
    for held in done["gpu"]["held"]:
        _say(f"GPU {held['index']} still has {held['used_mib']} MiB in use")


def _verdict(folder: Path) -> str:
    ended = rundir.read_exit(folder)
    if ended is None:
        return f"run {folder.name} is lost: its supervisor is gone and left no exit code"
    word = rundir.how_it_ended(ended, rundir.read_json(folder / "status.json"))
    code = ended.get("code")
    return f"run {folder.name} {word}, {'without an exit code' if code is None else f'exit code {code}'}"


def _watched() -> bool:
    """Whether somebody looks at this window; without tmux, a terminal is enough."""
    if "TMUX" not in os.environ:
        return sys.stdin.isatty()
    try:
        words = ["tmux", "display-message", "-p", "-t", os.environ.get("TMUX_PANE", ""), "#{session_attached}"]
        shown = subprocess.run(words, capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.stdout.strip() not in (b"", b"0")


def _say(text: str) -> None:
    sys.stdout.write(f"[{text}]\n")
    sys.stdout.flush()
