"""Decoding with the drafter under training: true figures, on a schedule, and a training that does not notice."""

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import write_jsonl
from tiny_families import tiny_model
from tiny_runs import StopAfter, assert_same_weights, config_of, figures, metrics_of, silent, status_of
from tiny_targets import document_features, drafter_for, tiny_target

from trainer.acceptance import CycleFigures, summarise
from trainer.chat import prompt_tokens
from trainer.checkpoint import Score, load_drafter, read_state
from trainer.config import ConfigFault, load
from trainer.heldout import HeldoutFigures
from trainer.live import HeldoutDecoder, Measuring, heldout_prompts
from trainer.prepared import open_prepared
from trainer.records import StepRecord
from trainer.speculate import decode_plain, decode_speculative
from trainer.start import TrainingError
from trainer.target import TargetModel, load_target
from trainer.train import train

CPU = torch.device("cpu")
STEPS = {"train__steps": 30, "train__checkpoint_every": 10, "train__keep": 9, "train__lr": 1e-2, "train__anchors": 16}
DECODING = {"train__decode_every": 10, "train__decode_prompts": 3, "train__decode_tokens": 24}
FIELDS = {"decoded_accept", "decoded_accept_micro", "decoded_histogram"}


@pytest.fixture(scope="module")
def own_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and conversations whose answers are its own: what a drafter can learn by heart and is then accepted."""
    folder, target = tmp_path_factory.mktemp("own"), tiny_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    rows: list[dict[str, Any]] = []
    for number in range(40):
        if len(rows) == 4:
            break
        messages = [{"role": "user", "content": f"say {number * number}"}]
        answer = decode_plain(target, prompt_tokens(target.tokenizer, messages), 32).tokens
        if min(answer) > 3:  # no special token, which would not be text
            messages.append({"role": "assistant", "content": target.tokenizer.decode(answer)})
            rows.append({"messages": messages})
    assert len(rows) == 4
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "heldout.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def decoded_run(own_answers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A training that decodes after steps 10, 20 and 30; tests only read it."""
    run, lines = tmp_path_factory.mktemp("decoded"), list[str]()
    train(config_of(own_answers, **STEPS, **DECODING), run, say=lines.append)
    return run, lines


def without_decoding(records: list[StepRecord]) -> list[dict[str, object]]:
    return [{key: value for key, value in record.items() if key not in FIELDS} for record in figures(records)]


def test_a_training_that_decodes_is_the_same_training(
    decoded_run: tuple[Path, list[str]], own_answers: Path, tmp_path: Path
) -> None:
    run, _ = decoded_run
    train(config_of(own_answers, **STEPS), tmp_path, say=silent)
    assert [r.step for r in metrics_of(run) if r.decoded_accept is not None] == [10, 20, 30]
    assert without_decoding(metrics_of(run)) == without_decoding(metrics_of(tmp_path))
    for step in (10, 20, 30):
        assert_same_weights(run, tmp_path, step)


def test_a_resumed_training_decodes_the_same(
    decoded_run: tuple[Path, list[str]], own_answers: Path, tmp_path: Path
) -> None:
    run, _ = decoded_run
    config, part = config_of(own_answers, **STEPS, **DECODING), StopAfter(23)
    assert train(config, tmp_path, stop=part.event, say=part) == "stopped"
    assert train(config, tmp_path, say=silent) == "finished"
    assert figures(metrics_of(tmp_path)) == figures(metrics_of(run))
    assert_same_weights(run, tmp_path, 30)


def test_what_is_recorded_is_what_the_checkpoint_s_drafter_does(
    decoded_run: tuple[Path, list[str]], own_answers: Path
) -> None:
    run, lines = decoded_run
    target = load_target(own_answers / "target")
    rows = [json.loads(line) for line in (own_answers / "heldout.jsonl").read_text().splitlines()[:3]]
    for record in (record for record in metrics_of(run) if record.step in (10, 20, 30)):
        drafter, _ = load_drafter(run / f"checkpoints/step-{record.step:08d}", "cpu", torch.float32)
        answers: list[list[int]] = []
        for row in rows:
            said = f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
            prompt = target.tokenizer.encode(said, add_special_tokens=False)
            answers.append(decode_speculative(target, drafter, prompt, 24).accepted)
        wanted = summarise(answers)
        assert wanted.cycles >= 9 and len(wanted.histogram) > 1 and wanted.macro != wanted.micro
        assert record.decoded_accept == pytest.approx(wanted.macro)
        assert record.decoded_accept_micro == pytest.approx(wanted.micro)
        assert record.decoded_histogram == wanted.histogram
    last = metrics_of(run)[-1]
    assert status_of(run).decoded_accept == last.decoded_accept
    bars = " ".join(f"{tau}:{count}" for tau, count in (last.decoded_histogram or {}).items())
    told = f" | decoded {last.decoded_accept:.2f} a cycle, micro {last.decoded_accept_micro:.2f} ({bars})"
    assert [line for line in lines if line.startswith("step 30/30") and line.endswith(told)]


def test_the_best_checkpoint_is_the_one_that_decodes_best(decoded_run: tuple[Path, list[str]]) -> None:
    run, _ = decoded_run
    scores = {r.step: r.decoded_accept for r in metrics_of(run) if r.decoded_accept is not None}
    assert len(set(scores.values())) > 1
    step = max(scores, key=lambda each: (scores[each], -each))
    best = json.loads((run / "checkpoints/best.json").read_text())
    assert (best["name"], best["score"], best["measured"]) == (f"step-{step:08d}", scores[step], "decoded")


def test_tensorboard_draws_what_was_decoded(decoded_run: tuple[Path, list[str]]) -> None:
    from test_events import read_back

    run, _ = decoded_run
    shown, records = read_back(run / "events"), [r for r in metrics_of(run) if r.decoded_accept is not None]
    assert shown["decoded/acceptance"] == [(r.step, pytest.approx(r.decoded_accept)) for r in records]
    assert shown["decoded/acceptance_micro"] == [(r.step, pytest.approx(r.decoded_accept_micro)) for r in records]
    shares = {tag: dict(values) for tag, values in shown.items() if tag.startswith("decoded_cycles/")}
    assert sum(values.get(30, 0.0) for values in shares.values()) == pytest.approx(1.0)


def test_a_score_is_what_was_decoded_before_what_was_walked() -> None:
    walked, decoded = HeldoutFigures(1.0, 2.0, 3.0), CycleFigures(2.5, 2.0, {1: 1}, 1, 1)
    score = Measuring("data", "3 prompts", "rows of 64").score
    assert score(walked, decoded) == Score(2.5, "decoded", "data", "3 prompts")
    assert score(walked, None) == Score(3.0, "cycle", "data", "rows of 64")
    assert score(HeldoutFigures(1.0, 2.0, float("nan")), None) is score(None, None) is None
    assert score(walked, summarise([[]])) == Score(3.0, "cycle", "data", "rows of 64")  # each answer was one token


def test_what_is_decoded_is_saved_with_its_score_though_no_checkpoint_is_due(own_answers: Path, tmp_path: Path) -> None:
    changes = {**DECODING, "train__decode_every": 3, "train__decode_tokens": 6, "train__checkpoint_every": 5}
    train(config_of(own_answers, train__steps=7, train__keep=9, **changes), tmp_path, say=silent)
    decoded = {r.step: r.decoded_accept for r in metrics_of(tmp_path) if r.decoded_accept is not None}
    assert list(decoded) == [3, 6, 7]
    scores = {step: read_state(tmp_path / f"checkpoints/step-{step:08d}").score for step in (3, 5, 6, 7)}
    assert {step: score.value for step, score in scores.items() if score} == decoded
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 4


def test_it_is_said_when_scores_can_not_be_compared(
    decoded_run: tuple[Path, list[str]], own_answers: Path, tmp_path: Path
) -> None:
    run, _ = decoded_run
    rows = (own_answers / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(rows[:3]))
    other = {"data__heldout": str(tmp_path / "other.jsonl")}
    anew = "the first one measured anew takes its place; copy it elsewhere to keep it"
    for name, changes, said in (
        ("same", {**DECODING}, None),
        ("other", {**DECODING, **other}, f"measured, on other held-out data: {anew}"),
        ("fewer", {**DECODING, "train__decode_prompts": 2}, f"measured, which is 2 prompts, 24 tokens: {anew}"),
        ("none", {}, "measured, as nothing is decoded now: it stays the best one; set train.decode_every to compare"),
    ):
        shutil.copytree(run / "checkpoints", tmp_path / name / "checkpoints")
        lines: list[str] = []
        train(config_of(own_answers, **STEPS, **changes), tmp_path / name, say=lines.append)
        found = [line for line in lines if "can't be compared" in line]
        assert len(found) == (said is not None)
        assert not said or found[0].endswith(said)


def test_a_stop_cuts_a_measurement() -> None:
    target = tiny_target()
    decoder = HeldoutDecoder(target, drafter_for(target, block=4), CPU, [[5, 6, 7]], 40)
    stop = threading.Event()
    assert decoder.measure(stop) is not None
    stop.set()
    assert decoder.measure(stop) is None


def test_a_measurement_draws_nothing_and_leaves_the_drafter_as_it_is() -> None:
    target = tiny_target()
    model = drafter_for(target, block=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    HeldoutDecoder(target, model, CPU, [[5, 6, 7]], 12).measure(threading.Event())
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert after == states
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_prompts_without_room_for_an_answer_are_passed_over(
    decoded_run: tuple[Path, list[str]], own_answers: Path
) -> None:
    run, _ = decoded_run
    prepared, target = open_prepared(run / "prepared/heldout"), load_target(own_answers / "target")
    prompts = heldout_prompts(prepared, target, 99, 12, block=4)
    assert len(prompts) == 4 and heldout_prompts(prepared, target, 2, 12, block=4) == prompts[:2]
    lengths = sorted({len(prompt) for prompt in prompts})
    assert len(lengths) > 1
    tokens = target.longest - 4 - lengths[0]
    assert all(len(prompt) == lengths[0] for prompt in heldout_prompts(prepared, target, 99, tokens, block=4))
    with pytest.raises(TrainingError, match="none of the 4 held-out conversations leaves room for an answer of"):
        heldout_prompts(prepared, target, 99, tokens + 1, block=4)


def test_a_schedule_needs_held_out_data(own_answers: Path) -> None:
    from tiny import tiny_toml

    text = tiny_toml(own_answers / "target", own_answers / "train.jsonl", train__decode_every=5)
    with pytest.raises(ConfigFault, match=r"train.decode_every needs data.heldout"):
        load(text.encode())


def test_nothing_is_compiled_by_decoding() -> None:
    """With the drafter compiled for training, and a compilation an error."""
    from torch._dynamo.utils import counters

    target = tiny_target()
    model = drafter_for(target, block=4)
    compiled: Any = torch.compile(model, backend="eager", dynamic=False)
    decoder = HeldoutDecoder(target, model, CPU, [[5, 6, 7], [8, 9]], 12)
    features, embeds = torch.zeros(1, 6, model.config.feature_size), torch.zeros(1, 4, 32)
    compiled(features, embeds, torch.arange(6)[None], torch.arange(4)[None], (None,))
    with torch.compiler.set_stance("fail_on_recompile"):
        before = counters["frames"]["total"]
        with pytest.raises(RuntimeError):  # the guard is on
            compiled(features[:, :5], embeds, torch.arange(5)[None], torch.arange(4)[None], (None,))
        assert decoder.measure(threading.Event()) is not None
        assert counters["frames"]["total"] == before > 0


def test_a_target_in_half_precision_gets_a_drafter_in_full_on_the_cpu() -> None:
    model = tiny_target().model.to(torch.bfloat16)
    target = TargetModel(model, None)
    drafter = drafter_for(target, block=4, mask_token_id=3)
    found = HeldoutDecoder(target, drafter, CPU, [[5, 6, 7]], 12).measure(threading.Event())
    assert found is not None and found.cycles > 0 and next(drafter.parameters()).dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_two_threads_may_run_the_target_at_once(family: str, soak: bool) -> None:
    """One decodes while the other runs rows: both get, to the bit, what each gets alone."""
    by_hand = family == "qwen3"
    target = tiny_target(family) if by_hand else TargetModel(tiny_model(family))
    drafter = drafter_for(target, block=4, mask_token_id=3)
    prompts = [[5, 6, 7], [9, 8, 10, 11, 12], [20]]
    decoder = HeldoutDecoder(target, drafter, CPU, prompts, 10)
    ids = torch.randint(4, 90, (3, 24), generator=torch.Generator().manual_seed(0))
    wanted_features, wanted = document_features(target, ids, (1, 2, 3)), decoder.measure(threading.Event())
    answers = [decode_speculative(target, drafter, prompt, 10).tokens for prompt in prompts]

    done, wrong, passes = threading.Event(), list[int](), 0

    def rows() -> None:
        nonlocal passes
        while not done.is_set():
            if not torch.equal(document_features(target, ids, (1, 2, 3)), wanted_features):
                wrong.append(passes)
            passes += 1

    beside = threading.Thread(target=rows)
    beside.start()
    try:
        while passes == 0:
            assert beside.is_alive()
        for _ in range(60 if soak else 1):
            assert decoder.measure(threading.Event()) == wanted
            assert [decode_speculative(target, drafter, prompt, 10).tokens for prompt in prompts] == answers
    finally:
        done.set()
        beside.join()
    assert not wrong and passes > 4
