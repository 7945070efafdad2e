"""Which drafter is meant by a folder: of a run's, its best checkpoint."""

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import CONFIG_FILE, MODEL_FILE, CheckpointError, newest_good_checkpoint, read_best
from trainer.records import RunDir


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
    if best := read_best(checkpoints):
        how = "decoded" if best.measured == "decoded" else "by a walk through the held-out answers"
        say(f"taking {best.name}, the run's best: {best.score:.2f} tokens a cycle, {how}")
        return checkpoints / best.name
    newest = newest_good_checkpoint(checkpoints, say)
    if newest is None:
        raise CheckpointError(f"no drafter in {folder}: the run has no checkpoint yet")
    say(f"taking {newest.name}, the run's newest: none was measured on held-out data")
    return newest
