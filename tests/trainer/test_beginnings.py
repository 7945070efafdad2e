"""How a training begins: mistakes are told before hours of work, a stop is heeded, and nobody else is in the folder."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import conversations, tiny_toml, write_jsonl
from tiny_data import counted, write_prepared
from tiny_runs import StopAfter, config_of, silent, status_of

from trainer.checkpoint import CheckpointError, Progress, load_drafter
from trainer.config import TrainConfig, load
from trainer.data import Cursor, Rows
from trainer.locks import Locked, locked
from trainer.overlap import overlap
from trainer.prepared import DataError, open_prepared
from trainer.records import RunDir
from trainer.start import place_after
from trainer.train import TrainingError, train


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it came too late")


@pytest.fixture(scope="module")
def done(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A finished training of two steps."""
    config, folder = config_of(tiny_folder, train__steps=2), tmp_path_factory.mktemp("done")
    train(config, folder, say=silent)
    return config, folder


@pytest.mark.parametrize("key", ["data__train", "data__heldout"])
@pytest.mark.parametrize("content", [None, "folder"])
def test_missing_data_is_told_before_the_target_is_loaded(
    key: str, content: str | None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.load_targets", never)
    path = tmp_path / "data"
    if content:
        path.mkdir()
    config = config_of(tiny_folder, **{key: str(path)})
    with pytest.raises(DataError, match=r"no \.jsonl" if content else "No such file"):
        train(config, tmp_path / "run", say=silent)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"draft__target_layer_ids": [1, 9]}, TrainingError, "the target has layers 0..5"),
        ({"draft__mask_token_id": 9999}, TrainingError, "outside the vocabulary of 512"),
        ({"draft__block": 8}, CheckpointError, "its block_size is 4, wanted 8"),
        ({"train__steps": 1}, TrainingError, r"train\.steps is 1, but step 2 is done already"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_prepared(
    changes: dict[str, Any],
    error: type[Exception],
    why: str,
    done: tuple[TrainConfig, Path],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.start.prepared_data", never)
    with pytest.raises(error, match=why):
        train(config_of(tiny_folder, **{"train__steps": 2, **changes}), tmp_path, resume=done[1], say=silent)


def test_a_stop_while_data_is_prepared_ends_the_training_soon(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.sources import Source

    stop, read = threading.Event(), list[int]()
    records: Callable[[Source], Iterator[Any]] = Source.records

    def stopping(source: Source) -> Iterator[Any]:
        for number, record in records(source):
            read.append(number)
            if len(read) == 70:
                stop.set()
            yield number, record

    monkeypatch.setattr(Source, "records", stopping)
    data = write_jsonl(tmp_path / "data.jsonl", conversations(500))
    config = config_of(tiny_folder, data__train=str(data), data__heldout=str(data))
    lines: list[str] = []
    assert train(config, tmp_path / "run", stop=stop, say=lines.append) == "stopped"
    assert len(read) == 128  # the chunk under way
    assert (status_of(tmp_path / "run").state, lines[-1]) == ("stopped", "stopped at step 0/20")
    assert not list((tmp_path / "run" / "prepared").iterdir())


def test_a_resumed_run_that_is_stopped_at_once_tells_the_step_it_stands_at(
    done: tuple[TrainConfig, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    stop, lines, run = threading.Event(), list[str](), tmp_path / "run"
    stop.set()
    config = config_of(tiny_folder, train__steps=20)
    assert train(config, run, resume=done[1], stop=stop, say=lines.append) == "stopped"
    status = status_of(run)
    assert (status.state, status.step, status.checkpoint, lines[-1]) == ("stopped", 2, None, "stopped at step 2/20")
    # What is told may be of steps that were done after the checkpoint: it stays.
    told = RunDir(run).status.read_text().replace('"step": 2,', '"step": 5,')
    RunDir(run).status.write_text(told)
    assert train(config, run, resume=done[1], stop=stop, say=silent) == "stopped"
    assert status_of(run).step == 5


def test_two_trainings_in_one_folder_do_not_meet(done: tuple[TrainConfig, Path]) -> None:
    config, folder = done
    before = RunDir(folder).status.read_bytes()
    with (
        locked(folder / ".lock", "x"),
        pytest.raises(Locked, match=r"the run .* is in use by process \d+ on .*: wait for it, or end it first"),
    ):
        train(config, folder, say=silent)
    assert RunDir(folder).status.read_bytes() == before
    assert train(config, folder, say=silent) == "finished"
    assert not (folder / ".lock").exists()


def test_a_folder_that_can_t_be_made_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"the run's folder .*/file can't be made: File exists"):
        train(config_of(tiny_folder), tmp_path / "file", say=silent)


# --- going on ---


def test_what_does_nothing_beside_a_checkpoint_is_said(done: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    config, folder = done
    lines: list[str] = []
    train(config, folder, init_from=tmp_path / "x", resume=tmp_path / "other", say=lines.append)
    assert f"--init-from {tmp_path / 'x'} does nothing: the training goes on from {folder}/checkpoints/" in "\n".join(
        lines
    )
    assert f"--resume {tmp_path / 'other'} is not needed: {folder} has checkpoints of its own" in "\n".join(lines)
    lines.clear()
    train(config, folder, resume=folder, say=lines.append)
    assert not [line for line in lines if "not needed" in line or "does nothing" in line]


def test_changed_settings_are_said_and_the_data_goes_on_at_the_next_epoch(tiny_folder: Path, tmp_path: Path) -> None:
    part = StopAfter(2)
    train(config_of(tiny_folder, train__steps=4), tmp_path, stop=part.event, say=part)
    changes = {"train__seed": 5, "data__row_tokens": 64, "train__rows_per_step": 4, "train__objective": "kl"}
    lines: list[str] = []
    train(config_of(tiny_folder, train__steps=4, data__shuffle=False, **changes), tmp_path, say=lines.append)
    (told,) = [line for line in lines if line.startswith("the config has changed since this checkpoint: ")]
    for change in (
        "train.seed is 5, was 0", "data.row_tokens is 64, was 96", "train.rows_per_step is 4, was 2",
        "train.objective is kl, was cross-entropy", "data.shuffle is False, was True",
    ):  # fmt: skip
        assert change in told
    (place,) = [line for line in lines if "going on with row" in line]
    assert place.startswith(
        "the data is in rows of 64 tokens, in their own order now, then it was in rows of 96 tokens, shuffled by seed 0"
    )


def test_a_cursor_of_another_packing_is_no_place(tmp_path: Path) -> None:
    prepared, other = counted(tmp_path / "p", [9] * 5), counted(tmp_path / "q", [9] * 6)

    def rows(of: Any = prepared, row_tokens: int = 16, seed: int = 1, *, shuffle: bool = True) -> Rows:
        return Rows(of, row_tokens=row_tokens, seed=seed, shuffle=shuffle)

    cursor = Cursor(row=13, epoch=2, group=0, index=3)
    progress = Progress(step=6, row=13, cursor=cursor, data_digest=prepared.digest, packing=rows().packing)
    lines: list[str] = []
    assert place_after(progress, rows(), lines.append) == cursor and not lines
    older = progress.model_copy(update={"packing": None})
    assert place_after(older, rows(seed=2), lines.append) == cursor and not lines
    for changed in (rows(other), rows(row_tokens=17), rows(seed=2), rows(shuffle=False)):
        assert place_after(progress, changed, lines.append) == Cursor(row=13, epoch=3)
    assert len(lines) == 4 and all("going on with row 13, at the begin of epoch 4" in line for line in lines)
    # Without shuffling the seed decides nothing.
    unshuffled = progress.model_copy(update={"packing": rows(shuffle=False).packing})
    assert place_after(unshuffled, rows(seed=9, shuffle=False), silent) == cursor


def test_the_mask_token_of_a_checkpoint_stays_or_is_told(
    done: tuple[TrainConfig, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    _, shape = load_drafter(done[1] / "checkpoints" / "step-00000002", "cpu", torch.float32)
    assert shape.mask_token_id == 258
    text = tiny_toml(tiny_folder / "target", tiny_folder / "train.jsonl", train__steps=3, draft__mask_token_id=300)
    train(load(text.encode()), tmp_path, say=silent)
    text = tiny_toml(tiny_folder / "target", tiny_folder / "train.jsonl", train__steps=4)
    assert train(load(text.encode()), tmp_path, say=silent) == "finished"
    _, shape = load_drafter(tmp_path / "checkpoints" / "step-00000004", "cpu", torch.float32)
    assert shape.mask_token_id == 300


def test_a_run_is_no_drafter_and_names_its_checkpoints(done: tuple[TrainConfig, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"it is a run; name one of its checkpoints: .*/step-00000002"):
        load_drafter(done[1], "cpu", torch.float32)


# --- held-out data that isn't ---


def test_held_out_conversations_that_are_learned_from_are_named(tmp_path: Path) -> None:
    def made(name: str, *documents: list[int]) -> Any:
        return write_prepared(tmp_path / name, [(ids, [1] * len(ids)) for ids in documents])

    train_data = made("train", [1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 2, 3], [1, 2, 4])
    assert overlap(train_data, made("apart", [1, 2, 5], [8, 8], [9, 8], [4, 5, 6, 7, 8])) == ()
    (line,) = overlap(train_data, made("both", [1, 1, 3], [8, 9], [1, 2, 3]))
    assert line.startswith(
        "2 of 3 held-out conversations are learned from, too (made.jsonl:2 is made.jsonl:3, made.jsonl:3 is "
        "made.jsonl:1): what is measured"
    )


def test_data_that_is_both_is_said_when_training(
    done: tuple[TrainConfig, Path], tiny_folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    config = config_of(tiny_folder, train__steps=1, data__heldout=str(tiny_folder / "train.jsonl"))
    train(config, tmp_path, say=lines.append)
    assert [line for line in lines if line.startswith("12 of 12 held-out conversations are learned from, too")]
    assert len(open_prepared(tmp_path / "prepared" / "heldout")) == 12
