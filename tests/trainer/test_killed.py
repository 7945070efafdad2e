"""Trainings that are killed at any moment, again and again, end as if nothing had been."""

import random
import signal
import time
from pathlib import Path

import pytest
from nursery import Child, Nursery, retry_until
from tiny import tiny_toml
from tiny_runs import assert_same_weights, figures, metrics_of, status_of


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_training_killed_at_random_moments_ends_with_the_same_weights(
    tiny_folder: Path, tmp_path: Path, nursery: Nursery, soak: bool
) -> None:
    """30 kills with --soak, 3 without; checkpoints come so often that many a kill falls into the writing of one."""
    steps = 80 if soak else 40
    data, heldout = tiny_folder / "train.jsonl", tiny_folder / "heldout.jsonl"
    changes = {"train__steps": steps, "train__checkpoint_every": 2, "train__eval_every": 2, "train__keep": 1}
    changes |= {"train__decode_every": 6, "train__decode_prompts": 2, "train__decode_tokens": 4}
    config = tmp_path / "config.toml"
    config.write_text(tiny_toml(tiny_folder / "target", data, heldout, **changes))
    moments = random.Random(20261130)
    kills, resumed, cut, run = 0, 0, 0, 0
    whole = nursery.start("train", config, tmp_path / "whole")
    assert whole.wait() == 0, whole.said()
    while kills < (30 if soak else 3) or run == 0:
        run += 1
        folder = tmp_path / f"run-{run}"
        while True:
            child = nursery.start("train", config, folder)
            enough = kills >= (30 if soak else 3)
            code = child.wait() if enough else killed(child, moments)
            resumed += "resuming from" in child.said()
            if code == 0:
                break
            assert code == -signal.SIGKILL, child.said()
            kills += 1
            cut += bool(list((folder / "checkpoints").glob(".*")))
        assert status_of(folder).state == "finished"
        assert_same_weights(folder, tmp_path / "whole", steps)
        assert figures(metrics_of(folder)) == figures(metrics_of(tmp_path / "whole"))
        assert records(folder) == records(tmp_path / "whole")
    assert resumed >= kills // 3  # the others began anew: they were killed before their first checkpoint
    print(f"{kills} kills, {resumed} resumes, {cut} kills in the writing of a checkpoint, {run} trainings")


def records(run: Path) -> dict[str, bytes | None]:
    """What is left in the folder of checkpoints, and which of them is the best, and the random generators' states."""
    folder = run / "checkpoints"
    told = {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}
    return told | {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/random.json")}


def killed(child: Child, moments: random.Random) -> int:
    """Kills it while it starts, one time in five, or after some steps, however long they take here."""
    if moments.random() < 0.2:
        time.sleep(moments.uniform(0, 0.7))  # the random moment; nothing is waited for
    else:
        steps = moments.randint(0, 12)
        retry_until(lambda: child.ended() or child.said().count("\nstep ") >= steps)
        time.sleep(moments.uniform(0, 0.1))
    return child.kill()
