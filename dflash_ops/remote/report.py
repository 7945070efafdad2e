"""What the runs of this container are: their folders' facts, read from the process table where it must be.

With a run: its facts and the processes of it that live. Without: the facts of all, but for the last lines of their
logs. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, processes, rundir


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    return answers.answer(path, lambda: report(path, parameters["run"]))


def report(path: Path, run: str | None) -> dict[str, Any]:
    boot = processes.boot_id()
    if run is None:
        every = [rundir.facts(folder, boot) for folder in rundir.folders(path)]
        for facts in every:
            if facts["exit"] is not None:
                facts["exit"].pop("last_lines", None)  # of a thousand runs these are megabytes
        return {"runs": every}
    facts = rundir.facts(rundir.find(path, run), boot)
    facts["processes"] = [processes.describe(process) for process in rundir.members(facts)]
    return {"runs": [facts]}
