"""What was made in the container since a moment: all that going back to a snapshot of that moment would lose.

By the times of files, which are the container's own clock's, as the snapshot's is.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, environment, releases, rundir


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: since(path, parameters["since"]))


def since(path: Path, moment: float) -> dict[str, Any]:
    """moment: seconds since 1970. live: the runs that go on; checkpoints: of older runs, as RUN/NAME."""
    runs: list[str] = []
    saved: list[str] = []
    for folder in rundir.folders(path):
        if _made_at(folder) >= moment:
            runs.append(folder.name)
            continue
        for name in rundir.checkpoints(folder):
            if _changed_at(folder / "checkpoints" / name) >= moment:
                saved.append(f"{folder.name}/{name}")
    return {
        "live": [run["run_id"] for run in rundir.live_runs(path)],
        "runs": runs,
        "checkpoints": saved,
        "releases": [
            name for name in releases.names(path) if _changed_at(path / "releases" / name / releases.MANIFEST) >= moment
        ],
        "environments": [
            name for name in environment.names(path) if _changed_at(path / "env" / name / "pyvenv.cfg") >= moment
        ],
    }


def _made_at(folder: Path) -> float:
    """When a run was made, as its record says; else when its record, or its folder, was last written."""
    try:
        text = str(rundir.read_run(folder).get("created_at"))
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return _changed_at(folder / "run.json") or _changed_at(folder)


def _changed_at(path: Path) -> float:
    """0 for what is not there: it can't be lost."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
