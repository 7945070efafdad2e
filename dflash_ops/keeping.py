"""What is kept of runs: fetched to this machine, removed from the container; and the window that shows one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ops import data, runs, train
from dflash_ops.answers import answer
from dflash_ops.command import Command, Container
from dflash_ops.data import Moved
from dflash_ops.errors import NotFoundError
from dflash_ops.progress import Progress
from dflash_ops.remote import bundle
from dflash_ops.runs import Run
from dflash_ops.shell import Shell

_REMOVE_SECONDS = 600.0  # a disk may take minutes for terabytes of checkpoints
# Not what may hold secrets (env, notify), nor prepared data, which lies in shared/ too.
_RECORDS = ("run.json", "state.json", "exit.json", "status.json", "config.toml", "notify.log", "metrics.jsonl")
_LOGS = ("log", "log.*")
EVENTS = ("events/*",)


@dataclass(frozen=True)
class Removed:
    """A run that was removed, or would be. size: bytes of its files."""

    run_id: str
    size: int
    checkpoints: int


def fetch(
    shell: Shell, container: Container, run: Run, target: Path, *, checkpoints: str, progress: Progress | None = None
) -> Moved:
    """Copies a run into the folder `target`/<run id>: metrics, TensorBoard's events, logs, records and checkpoints.

    checkpoints: newest, all, none, or a name. What is there already does not travel; see `data.get` for errors.
    """
    return fetch_only(
        shell,
        container,
        run,
        target,
        (*_RECORDS, *_LOGS, *EVENTS, *_checkpoints(container, run, checkpoints)),
        progress=progress,
    )


def fetch_only(
    shell: Shell,
    container: Container,
    run: Run,
    target: Path,
    only: Sequence[str],
    *,
    progress: Progress | None = None,
) -> Moved:
    """As `fetch`, of the files that match one of the patterns."""
    target.mkdir(parents=True, exist_ok=True)
    return data.get(shell, container, f"runs/{run.id}", target, only=only, progress=progress)


def _checkpoints(container: Container, run: Run, which: str) -> tuple[str, ...]:
    if which == "none" or (which in ("newest", "all") and not run.checkpoints):
        return ()
    if which == "all":
        return ("checkpoints/*",)
    name = run.checkpoints[-1] if which == "newest" else which
    if name not in run.checkpoints:
        raise NotFoundError(
            f"run {run.id} has no checkpoint {name}",
            where=str(container),
            why=f"it has: {', '.join(run.checkpoints[-5:]) or 'none'}",
            next="--checkpoints newest, all, none, or one of these",
        )
    return (f"checkpoints/{name}/*",)


def remove(shell: Shell, container: Container, names: Sequence[str], *, dry_run: bool = False) -> list[Removed]:
    """Removes runs that are over: all of these or none. BusyError for one that goes on, has living processes, or that a
    living one began from. dry_run: says what would go."""
    parameters = {"path": container.path, "runs": list(names), "dry_run": dry_run}
    command = bundle.command(container.python, "remove", parameters)
    reply = answer(shell.run(container, command, timeout=_REMOVE_SECONDS))
    return [Removed(it["run_id"], it["size"], it["checkpoints"]) for it in reply["removed"]]


def attach(shell: Shell, container: Container, run: str) -> Run:
    """Puts the run's tmux window on this terminal, until it is left or closed; gives the run as it then is.

    NotFoundError when its run has ended and its window is closed; LinkLostError when the link broke.
    """
    parameters = {
        "path": container.path,
        "run": run,
        "python": container.python,
        "term": os.environ.get("TERM", "xterm-256color"),
        "colours": os.environ.get("COLORTERM", ""),
    }
    command = bundle.command(container.python, "window", parameters)
    reply = answer(shell.run(container, command, timeout=train.CALL_SECONDS * 2))
    shell.interactive(container, Command(tuple(reply["words"]), env={"TERM": reply["term"]}))
    return shell.ask(container, runs.run_query(container, reply["run_id"]), timeout=train.CALL_SECONDS)
