"""On a GPU: a training that is killed and resumed ends with the uninterrupted one's weights, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_toml
from tiny_runs import assert_same_weights, figures, metrics_of

from trainer.draft import DraftModel
from trainer.models import MODEL, is_whole, models_folder
from trainer.optim import make_optimizer
from trainer.snapshot import HostCopy, Trained

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(1200),  # each start compiles, or reads what was compiled
    pytest.mark.filterwarnings("default"),
]

STEPS = 60


@pytest.mark.parametrize("model", ["tiny", "real"])
def test_five_kills_on_a_gpu_change_no_bit(model: str, tiny_folder: Path, tmp_path: Path) -> None:
    if model == "real" and not is_whole(models_folder() / MODEL):
        pytest.skip("the real model is not here: python -m trainer import-gguf")
    target = tiny_folder / "target" if model == "tiny" else models_folder() / MODEL
    changes = {
        "train__steps": STEPS,
        "train__checkpoint_every": 4,
        "train__eval_every": 20,
        "layout__targets": ["cuda:0"],
        "layout__drafters": ["cuda:0"],
    }
    changes |= {"data__row_tokens": 256, "draft__layers": 2, "train__rows_per_step": 4, "train__anchors": 32}
    config = tmp_path / "config.toml"
    data = tiny_folder / "train.jsonl", tiny_folder / "heldout.jsonl"
    config.write_text(tiny_toml(target, *data, **changes))
    whole = start(config, tmp_path / "whole")
    assert whole.wait(600) == 0, log_of(tmp_path / "whole")
    moments, kills, run = random.Random(5), 0, tmp_path / "killed"
    while True:
        process = start(config, run)
        if kills == 5:
            assert process.wait(600) == 0, log_of(run)
            break
        reached = steps_of(run)
        aim = min(STEPS - 2, reached + moments.randint(3, 9))
        while steps_of(run) < aim and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))  # the random moment; nothing is waited for
        process.kill()
        assert process.wait(60) == -signal.SIGKILL, log_of(run)
        kills += 1
    assert_same_weights(run, tmp_path / "whole", STEPS)
    assert figures(metrics_of(run)) == figures(metrics_of(tmp_path / "whole"))
    state = json.loads((run / f"checkpoints/step-{STEPS:08d}/state.json").read_bytes())
    assert state["origin"]["machine"]["cublas_workspace"] == ":4096:8"
    random_states = json.loads((run / f"checkpoints/step-{STEPS:08d}/random.json").read_bytes())
    assert "0" in random_states["cuda"]


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer", "train", str(config), str(run)]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "4"})


def log_of(run: Path) -> str:
    return (run.parent / f"{run.name}.log").read_text()[-3000:]


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_snapshot_is_of_its_moment_and_the_host_does_not_wait() -> None:
    from tiny_drafters import CONFIG

    model = DraftModel(CONFIG).to("cuda")
    optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.1)

    def learn() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    learn()
    copy = HostCopy()
    copy.take(Trained.alone(model, optimizer)).arrived()  # the buffers are made
    then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):  # some seconds of work before the copies' turn comes
        busy = (busy @ busy).tanh()
    ended = torch.cuda.Event()
    ended.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        snapshot = copy.take(Trained.alone(model, optimizer))
        learn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not ended.query()  # the host is back before the device has begun to copy
    for name, tensor in snapshot.arrived().weights.items():
        assert tensor.is_pinned() and torch.equal(tensor, then[name].cpu()), name
