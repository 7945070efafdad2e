"""On a GPU: threads that train beside each other after a warm-up, and what happens without one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from tiny import conversations, tiny_toml, write_jsonl
from tiny_drafters import CONFIG
from tiny_runs import config_of, metrics_of, silent
from torch import Tensor
from torch._dynamo.utils import counters

from trainer import train as module
from trainer.compile_cache import INDUCTOR, TRITON
from trainer.config import TrainConfig, load
from trainer.data import make_row
from trainer.documents import Document
from trainer.draft import DraftModel
from trainer.feed import all_anchors_batch, row_batch
from trainer.fx_faults import in_threads
from trainer.learner import Learner, features_of
from trainer.streams import Streams
from trainer.target import TargetModel
from trainer.threads import make_compiler_thread_safe, make_torch_thread_safe, nothing_compiles
from trainer.train import train
from trainer.warm import BatchShape, Warmed, compile_all, make_learner

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(1200),  # the kernels are compiled, some of them often
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
# Of a device: the drafter's forward, its backward, its forward alone; whole and last chunk, twice each; then the masks'
# lists and the update of each kind of weight.
GRAPHS = 7
DRAFT = replace(CONFIG, hidden_size=64, intermediate_size=96, head_dim=64, block_size=16)
SHAPE = BatchShape(rows=2, row_tokens=256, anchors=24, dtype=torch.bfloat16, teacher=False)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphs() -> tuple[int, int]:
    """How many dynamo has made, and how many of the compiler's breaks there were."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def small_learner(device: torch.device) -> Learner:
    torch.manual_seed(0)
    head = torch.randn(DRAFT.vocab_size, DRAFT.hidden_size, dtype=torch.bfloat16, device=device)
    text = tiny_toml("target", "train.jsonl", train__chunk_blocks=20)  # of 48 blocks: the last chunk has 8
    return make_learner(load(text.encode()), DraftModel(DRAFT).to(device), head)


class Target:
    """What a target gives, drawn anew each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def embedding(self, ids: Tensor) -> Tensor:
        return torch.randn(*ids.shape, DRAFT.hidden_size, dtype=torch.bfloat16, device=self.device)

    def features(self, ids: Tensor, *_: object) -> Tensor:
        return torch.cat([self.embedding(ids) for _ in DRAFT.target_layer_ids], dim=-1)


def trains(learner: Learner, steps: int = 20) -> None:
    """Steps, and measurements at all anchors, of documents of many lengths and rows of padding."""

    def document(length: int) -> Document:
        return Document(torch.randint(0, 120, (length,)).numpy(), torch.ones(length, dtype=torch.bool).numpy())

    device = learner.device
    target = cast(Any, Target(device))
    for step in range(steps):
        rows = [make_row(step, [document(5 * step + 3), document(120)], 256), make_row(0, [], 256)]
        learner.learn(features_of(target, row_batch(rows, 24, step), DRAFT, device, anchors=24))
        assert learner.update(1e-3).read().finite
        everywhere = features_of(target, all_anchors_batch(rows, 24), DRAFT, device, anchors=24)
        assert everywhere.forwards() > 3 and learner.measure_all(everywhere).answers()


@pytest.mark.parametrize("names", [("cuda:0",) * 3, ("cuda:0", "cuda:1")], ids=["three on one", "one on each of two"])
def test_the_warm_up_is_all_that_compiles(names: Sequence[str]) -> None:
    """No thread falls back to eager code either: a function that dynamo gives up would be an error."""
    devices = [torch.device(name) for name in names]
    if torch.cuda.device_count() < len(set(names)):
        pytest.skip("no second GPU here")
    make_torch_thread_safe()
    make_compiler_thread_safe()  # compiles something itself
    streams, learners = Streams(devices), [small_learner(device) for device in devices]
    torch.cuda.synchronize()
    started = graphs()

    def work(learner: Learner) -> None:
        with streams.current(learner.device):
            trains(learner)

    with streams.current():
        warmed = compile_all(learners, SHAPE, say=silent)
        before = graphs()
        assert [one.device for one in warmed] == list(dict.fromkeys(names))
        # Learners that share a device share what is compiled for it.
        each = {one.compiled + one.found for one in warmed}
        assert len(each) == 1 and min(each) > GRAPHS
        assert before == (started[0] + (min(each) - 1) * len(warmed), started[1])  # a backward is no graph of dynamo's
        with nothing_compiles(devices):
            for error in in_threads(*(lambda learner=learner: work(learner) for learner in learners)):
                if error is not None:
                    raise error
    assert graphs() == before


# Without a warm-up.


BESIDE = """
import faulthandler, os, sys, threading, time, traceback, torch
from dataclasses import replace
sys.path[:0] = ["tests", "tests/trainer"]
from test_cuda_threads import DRAFT, SHAPE, small_learner
from torch._dynamo import convert_frame
from trainer.threads import make_torch_thread_safe, nothing_compiles
from trainer.warm import made_up_batch
import contextlib

make_torch_thread_safe()
gpu = torch.device("cuda:0")
learner = small_learner(gpu)
first, second = (made_up_batch(DRAFT, replace(SHAPE, row_tokens=tokens), gpu) for tokens in (256, 384))
loss = learner.terms(first).loss_sum  # its forward is compiled, its backward not: it will be when it is used

errors = {}

def compiles_forward():
    try:
        learner.terms(second)
    except Exception as error:
        errors["forward"] = error

def runs_backward():
    try:
        for _ in range(2000):
            if forward.is_alive() and "owner=0" not in repr(convert_frame.compile_lock):
                break  # it compiles now
            if not forward.is_alive():
                break
            time.sleep(0.005)
        loss.backward()
    except Exception as error:
        errors["backward"] = error

def inside_backward(thread):
    # Whether it waits, in Python's eyes, for autograd: to trace a backward, or to run one.
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and any(
        entry.name in ("_engine_run_backward", "run_backward") for entry in traceback.extract_stack(frame)[-3:]
    )

forward = threading.Thread(target=compiles_forward, name="forward", daemon=True)
backward = threading.Thread(target=runs_backward, name="backward", daemon=True)
with nothing_compiles(gpu) if sys.argv[1] == "refused" else contextlib.nullcontext():
    forward.start()
    backward.start()
    both_since = None
    while forward.is_alive() or backward.is_alive():
        backward.join(0.2) if backward.is_alive() else forward.join(0.2)
        both = forward.is_alive() and backward.is_alive() and inside_backward(forward) and inside_backward(backward)
        both_since = (both_since or time.monotonic()) if both else None
        if both_since and time.monotonic() - both_since > 30:
            print("HUNG", flush=True)
            faulthandler.dump_traceback()
            os._exit(14)
for name, error in errors.items():
    print(name, type(error).__name__, error, flush=True)
print("DONE", flush=True)
os._exit(0)
"""


def beside(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A backward that isn't compiled yet, in one thread, beside a compilation in another, on one device."""
    env = cold(folder) | {INDUCTOR: str(folder / "inductor"), TRITON: str(folder / "triton")}
    return subprocess.run(
        [sys.executable, "-c", BESIDE, how], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


def cold(folder: Path) -> dict[str, str]:
    """The environment of a process that finds nothing compiled."""
    env = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    # Each process compiles in many of its own; here several run at a time.
    return env | {"DFLASH_SHARED": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "4"}


def test_compiling_beside_a_backward_hangs(tmp_path: Path) -> None:
    """The backward waits, in autograd's thread, for dynamo's lock; who holds that waits for autograd's thread."""
    done = beside("hang", tmp_path)
    if done.returncode == 0 and "DONE" in done.stdout and "Error" not in done.stdout:
        pytest.skip(f"torch {torch.__version__} no longer hangs")
    assert done.returncode == 14 and "HUNG" in done.stdout, done.stdout + done.stderr
    assert "compile_fx" in done.stderr and "_engine_run_backward" in done.stderr, done.stderr


def test_after_the_warm_up_it_is_refused_instead(tmp_path: Path) -> None:
    done = beside("refused", tmp_path)
    assert done.returncode == 0 and "DONE" in done.stdout, done.stdout + done.stderr
    errors = done.stdout.splitlines()
    assert errors[0].startswith("forward RuntimeError Detected recompile when torch.compile stance is")
    assert "guard failure" in errors[1], done.stdout  # and then which
    assert "backward" not in done.stdout


# Whole trainings.


def runs_without_compiling(config: TrainConfig, run: Path, monkeypatch: pytest.MonkeyPatch) -> list[Warmed]:
    """Trains; what compiles after the warm-up is an error anyway, and is counted here besides."""
    warm_up = module.warm_up
    warmed: list[Warmed] = []
    before: list[tuple[int, int]] = []

    def counted(*given: Any, **named: Any) -> list[Warmed]:
        warmed.extend(warm_up(*given, **named))
        before.append(graphs())
        return warmed

    monkeypatch.setattr(module, "warm_up", counted)
    assert train(config, run, say=silent) == "finished"
    assert before == [graphs()]
    records = metrics_of(run)
    assert records[-1].step == config.train.steps and all(record.loss is not None for record in records)
    assert records[-1].heldout_loss is not None  # it was measured too
    return warmed


def on_one_gpu(drafters: int, **more: Any) -> dict[str, Any]:
    return {
        "layout__targets": ["cuda:0"],
        "layout__drafters": ["cuda:0"] * drafters,
        "layout__allow_shared_device": drafters > 1,
        "layout__check_every": 50,
        "layout__stall_seconds": 0,  # it would end the tests
        "train__rows_per_step": 2 * drafters - 1,  # one of them has rows of padding
        "train__micro_rows": 1,
        "train__steps": 500,
        "train__checkpoint_every": 1000,
        **more,
    }


@pytest.mark.parametrize("drafters", [1, 3])
def test_500_steps_in_threads(
    drafters: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_folder, **on_one_gpu(drafters, data__row_tokens=128, train__eval_every=100))
    (warmed,) = runs_without_compiling(config, tmp_path, monkeypatch)
    assert warmed.device == "cuda:0" and warmed.compiled + warmed.found > 4


QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


@pytest.mark.soak
@pytest.mark.parametrize("drafters", [1, 3])
def test_500_steps_in_threads_at_the_shapes_of_qwen3_4b(
    drafters: int, tmp_path: Path, tokenizer: Any, soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of that shape with random weights, on the GPU from the first: it is never saved."""
    if not soak:
        pytest.skip("only with --soak")
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = Qwen3Config(**QWEN3_4B)
    shape.save_pretrained(tmp_path / "target")
    with torch.device("cuda:0"):
        target = TargetModel(AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16), tokenizer)
    monkeypatch.setattr(module, "load_targets", lambda config, layout: [target])
    data = write_jsonl(tmp_path / "train.jsonl", conversations(300, words=120))
    heldout = write_jsonl(tmp_path / "heldout.jsonl", conversations(8, seed=1, words=120))
    changes = on_one_gpu(
        drafters, data__row_tokens=4096, train__anchors=512, train__eval_every=250, train__log_every=50
    )
    changes |= {"draft__layers": 5, "draft__block": 16, "draft__captured": 5, "draft__mask_token_id": 151669}
    changes |= {"train__rows_per_step": drafters}
    config = load(tiny_toml(tmp_path / "target", data, heldout, **changes).encode())
    (warmed,) = runs_without_compiling(config, tmp_path / "run", monkeypatch)
    assert warmed.compiled + warmed.found > 4


# Processes that start.


def started(words: Sequence[str], folder: Path) -> str:
    """Runs the trainer in a process that has only what is kept below `folder`; its log."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words], cwd=ROOT, env=cold(folder), capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def config_file(tiny_folder: Path, folder: Path, **changes: Any) -> str:
    text = tiny_toml(
        tiny_folder / "target",
        tiny_folder / "train.jsonl",
        tiny_folder / "heldout.jsonl",
        **on_one_gpu(3, data__row_tokens=128, train__steps=10, layout__stall_seconds=300, **changes),
    )
    (folder / "config.toml").write_text(text)
    return str(folder / "config.toml")


def test_cold_starts(tiny_folder: Path, tmp_path: Path, soak: bool) -> None:
    """Three drafters on one GPU, nothing compiled before; several at a time, each with a cache of its own."""

    def start(number: int) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        return started(["train", config_file(tiny_folder, folder), str(folder / "run")], folder)

    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 4)) as pool:
        logs = list(pool.map(start, range(20 if soak else 3)))
    for log in logs:
        assert "cuda:0 warmed up in" in log and "s, cold: " in log and ", 0 from the compile cache" in log
        assert "finished at step 10/10" in log


def test_the_command_warms_up_for_a_training_and_again_finds_all(tiny_folder: Path, tmp_path: Path) -> None:
    config = config_file(tiny_folder, tmp_path)
    cold_one, again = (json.loads(started(["warm", config, "--json"], tmp_path)) for _ in range(2))
    assert [one["device"] for one in cold_one["devices"]] == ["the target on cuda:0", "cuda:0"]
    for first, second in zip(cold_one["devices"], again["devices"], strict=True):
        assert (first["state"], first["found"], second["state"], second["compiled"]) == ("cold", 0, "warm", 0)
        assert first["compiled"] == second["found"] > 2
    assert cold_one["cache"] == again["cache"] and Path(again["cache"]).parent == tmp_path / "compile-cache"
    log = started(["train", config, str(tmp_path / "run")], tmp_path)
    for second in again["devices"]:
        assert f"s, warm: 0 graphs compiled, {second['found']} from the compile cache" in log
