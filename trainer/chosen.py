"""Which drafter is meant by a folder: of a run's, its best checkpoint."""

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import CONFIG_FILE, MODEL_FILE, CheckpointError, damage, judge, newest_good_checkpoint
from trainer.records import RunDir
from trainer.scores import Best


def chosen_drafter(folder: Path, say: Callable[[str], None]) -> Path:
    """The folder itself, or of a run's its best checkpoint, else the newest good one; which and why is said.

    Raises CheckpointError when there is no drafter, or when a run has no good checkpoint; OSError.
    """
    checkpoints = RunDir(folder).checkpoints
    if not checkpoints.is_dir():
        for name in (CONFIG_FILE, MODEL_FILE):
            if not (folder / name).exists():
                raise CheckpointError(f"no drafter in {folder}: it has no {name} and is no run with checkpoints")
        return folder
    judged = judge(checkpoints)
    for note in judged.notes:
        if not note.endswith("it is made anew"):  # which only a training does
            say(note)
    told = judged.hint if isinstance(judged.hint, Best) else None
    if told and (judged.best is None or judged.best.name != told.name):
        why = damage(checkpoints / told.name)
        say(
            f"best.json names {told.name}: " + (f"it is damaged ({why})" if why else "by the scores it is not the best")
        )
    if judged.best:
        say(f"taking {judged.best.name}, the run's best: {judged.score}")
        return checkpoints / judged.best.name
    newest = newest_good_checkpoint(checkpoints, say)
    if newest is None:
        raise CheckpointError(f"no drafter in {folder}: the run has no checkpoint yet")
    say(f"taking {newest.name}, the run's newest: none was measured on held-out data")
    return newest
