"""What status.json says of a training that ended in the middle of something."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiny_runs import config_of, silent, status_of

from trainer import workers
from trainer.journal import Journal
from trainer.records import RunDir, checkpoint_name
from trainer.train import stalled, train


@pytest.mark.parametrize(
    ("raised", "said"),
    [(SystemExit("no licence"), "SystemExit: no licence"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_worker_that_ends_with_what_is_no_error_is_recorded_too(
    raised: BaseException, said: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*given: Any, **named: Any) -> NoReturn:
        raise raised

    monkeypatch.setattr(workers, "features_of", ends)
    with pytest.raises(type(raised)):
        train(config_of(tiny_folder, train__steps=2), tmp_path, say=silent)
    status = status_of(tmp_path)
    assert (status.state, status.error) == ("failed", said)


@pytest.mark.parametrize(
    ("told", "there", "said"),
    [
        (None, [2, 4], "step-00000004"),  # the hang came before it was told of
        ("step-00000002", [2, 4], "step-00000004"),
        ("step-00000002", [2, 4, 9], "step-00000004"),  # 9: damaged, and passed over
        ("step-00000002", [], "step-00000002"),
        (None, [], None),
    ],
)
def test_the_record_of_a_stalled_training_names_what_is_on_the_disk(
    told: str | None, there: list[int], said: str | None, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    journal = Journal(run, 10, silent)
    journal.update(state="training", step=4, checkpoint=told)
    for step in there:
        (run.checkpoints / checkpoint_name(step)).mkdir(parents=True)
        (run.checkpoints / f".{checkpoint_name(step + 1)}.tmp").mkdir()
    stalled(journal, run, "the training stands still\nthread ...\n")
    status = status_of(tmp_path)
    assert (status.state, status.error, status.checkpoint) == ("failed", "the training stands still", said)


def test_a_disk_that_cannot_be_looked_at_does_not_keep_a_stall_from_being_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    journal = Journal(run, 10, silent)
    run.checkpoints.write_text("no folder")
    with pytest.raises(OSError):
        stalled(journal, run, "the training stands still\n")
    assert status_of(tmp_path).state == "failed"
