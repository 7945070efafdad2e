"""A training on a GPU: its host never waits for it but for a step that is over."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import config_of, metrics_of, silent

from trainer.tally import Step, Tally
from trainer.train import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def _waits_are_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("objective", ["cross-entropy", "kl"])
def test_no_thread_waits_for_the_device_between_two_steps(
    objective: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses whatever waits for all that is queued; to wait for the event of one step is none of that."""
    add, strict = Tally.add, list[int]()

    def strictly(tally: Tally, step: Step) -> None:
        add(tally, step)
        if 3 <= step.source.step < 18:
            strict.append(step.source.step)
        torch.cuda.set_sync_debug_mode("error" if 3 <= step.source.step < 18 else "default")

    monkeypatch.setattr(Tally, "add", strictly)
    changes = {
        "layout__targets": ["cuda:0"],
        "layout__drafters": ["cuda:0"],
        "train__steps": 20,
        "train__eval_every": 0,
        "train__checkpoint_every": 100,
    }
    config = config_of(tiny_folder, data__row_tokens=128, train__objective=objective, **changes)
    assert train(config, tmp_path, say=silent) == "finished"
    assert strict == list(range(3, 18))
    records = metrics_of(tmp_path)
    assert [record.step for record in records] == list(range(1, 21))
    assert all(record.memory_mib is not None and record.memory_mib > 1 for record in records)


def test_five_steps_that_are_not_finite_end_a_training_on_the_gpu_too(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_skipping import Poison

    from trainer.start import TrainingError

    Poison(monkeypatch).steps = range(4, 99)
    changes = {
        "layout__targets": ["cuda:0"],
        "layout__drafters": ["cuda:0"],
        "train__checkpoint_every": 1,
        "train__keep": 1,
    }
    with pytest.raises(TrainingError, match=r"step 4: .*step 8: "):
        train(config_of(tiny_folder, data__row_tokens=128, **changes), tmp_path, say=silent)
    assert [record.loss is None for record in metrics_of(tmp_path)] == [False] * 3 + [True] * 5
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_decoding_between_steps_compiles_nothing_and_changes_nothing_on_the_gpu_either(
    tiny_folder: Path, tmp_path: Path
) -> None:
    changes = {
        "layout__targets": ["cuda:0"],
        "layout__drafters": ["cuda:0"],
        "train__steps": 6,
        "data__row_tokens": 128,
    }
    decoding = {"train__decode_every": 3, "train__decode_prompts": 2, "train__decode_tokens": 12}
    train(config_of(tiny_folder, **changes), tmp_path / "plain", say=silent)
    train(config_of(tiny_folder, **changes, **decoding), tmp_path / "decoding", say=silent)
    plain, decoded = (metrics_of(tmp_path / name) for name in ("plain", "decoding"))
    assert [record.step for record in decoded if record.decoded_accept is not None] == [3, 6]
    assert all((record.decoded_accept or 1) >= 1 for record in decoded)
    assert [record.loss for record in plain] == [record.loss for record in decoded]
