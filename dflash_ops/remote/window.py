"""The tmux session that shows a run: found, or opened again for a run that goes on; and how to attach to it from the
terminal that asks. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import curses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, processes, rundir

_SECONDS = 10.0
_TMUX = ("tmux", "-L", "dflash")
# For a terminal that the container's terminfo does not know (kitty, ghostty and other young ones): the next of kin.
_KNOWN_TERMINALS = ("xterm-256color", "screen-256color", "xterm", "screen", "vt100")


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: window(path, parameters))


def window(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """run: id or name; python: what the window is run by; term, colours: of the terminal that will be attached."""
    folder = rundir.find(path, parameters["run"])
    session = f"dflash-{rundir.name_of(folder.name)}"
    if not _shows(session, folder):
        if not rundir.lives(rundir.facts(folder, processes.boot_id())):
            why = "its run has ended"
            raise answers.Fault(
                "not_found", f"run {folder.name} has no window", why, f"dflash-ops train logs {folder.name}"
            )
        _open(session, folder, parameters["python"])
    term = _terminal(parameters["term"])
    colours = ["-2"] if re.search("256|direct|truecolor", parameters["term"]) else []
    if parameters["colours"] in ("truecolor", "24bit") and _version() >= (3, 2):
        colours = ["-T", "256,RGB"]
    words = [*_TMUX, "-u", *colours, "attach-session", "-t", f"={session}"]
    return {"run_id": folder.name, "words": words, "term": term}


def _shows(session: str, folder: Path) -> bool:
    """Whether the session is there and shows this run, not another one of its name."""
    listed = _tmux("list-panes", "-s", "-t", f"={session}", "-F", "#{pane_start_command}")
    return listed.returncode == 0 and folder.name in listed.stdout.decode("utf-8", "replace")


def _open(session: str, folder: Path, python: str) -> None:
    _tmux("kill-session", "-t", f"={session}")  # of an earlier run of the name, which has ended
    viewer = (python, "-B", str(folder / "ops"), "view", str(folder))
    made = _tmux("new-session", "-d", "-s", session, "-x", "200", "-y", "50", *viewer)
    if made.returncode != 0:
        why = made.stderr.decode("utf-8", "replace").strip()
        raise answers.Fault("failed", "no tmux window", why, f"dflash-ops train logs -f {folder.name}")


def _terminal(term: str) -> str:
    for name in (term, *_KNOWN_TERMINALS):
        try:
            with open(os.devnull, "wb") as nowhere:
                curses.setupterm(name, nowhere.fileno())
        except (curses.error, ValueError):
            continue
        return name
    return "dumb"


def _version() -> tuple[int, int]:
    found = re.search(rb"(\d+)\.(\d+)", _tmux("-V").stdout)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def _tmux(*words: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run((*_TMUX, *words), stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise answers.Fault("preflight", "no tmux in the container", "", "apt-get install tmux") from None
    except subprocess.TimeoutExpired:
        why = f"no answer in {_SECONDS:.0f} s"
        raise answers.Fault("failed", "tmux hangs", why, "dflash-ops train logs -f") from None
