"""What a training says of its held-out data, computed once more by hand: one block at a time, as a decoder would."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import conversations, tiny_toml, write_jsonl
from tiny_runs import config_of, figures, metrics_of, silent, status_of
from torch import Tensor

from trainer.checkpoint import load_drafter
from trainer.config import load
from trainer.draft import DraftCache, DraftModel
from trainer.prepared import open_prepared
from trainer.records import RunDir, checkpoint_name
from trainer.state import damage
from trainer.target import TargetModel, load_target
from trainer.train import train

BLOCK, GAMMA = 4, 2.0


def block_logits(target: TargetModel, drafter: DraftModel, ids: list[int], anchor: int) -> Tensor:
    """The drafter's logits for the slots behind an anchor, with all that lies before as context. [P, V]"""
    config = drafter.config
    tokens = torch.tensor([ids[:anchor]])
    positions = torch.arange(anchor + BLOCK)[None]
    features = target.features(tokens, torch.zeros_like(tokens), positions[:, :anchor], config.target_layer_ids)
    block = torch.tensor([[ids[anchor], *[config.mask_token_id] * (BLOCK - 1)]])
    hidden = drafter.forward_cached(features, target.embedding(block), positions, DraftCache())
    return hidden[0, 1:] @ target.head_weight.T


def by_hand(
    target: TargetModel, drafter: DraftModel, documents: list[tuple[list[int], list[bool]]]
) -> tuple[float, ...]:
    """Loss (exp-decay), acceptance over all anchors, and tokens a cycle, mean over answers."""
    loss_sum = weights = 0.0
    lengths: list[int] = []
    means: list[float] = []
    for ids, mask in documents:
        answer = [i for i, supervised in enumerate(mask) if supervised]
        first, end = answer[0], answer[-1] + 1
        assert answer == list(range(first, end))  # one answer each
        accepted: dict[int, int] = {}
        for anchor in range(first, end - 1):
            logits_PV = block_logits(target, drafter, ids, anchor)
            right = [
                bool(logits_PV[k].argmax() == ids[anchor + 1 + k]) for k in range(min(BLOCK - 1, end - 1 - anchor))
            ]
            for slot in range(len(right)):
                weight = math.exp(-slot / GAMMA)
                loss_sum -= weight * float(logits_PV[slot].log_softmax(-1)[ids[anchor + 1 + slot]])
                weights += weight
            accepted[anchor] = next((k for k, it in enumerate(right) if not it), len(right))
            lengths.append(1 + accepted[anchor])
        at, cycles = first, list[int]()
        while at < end - 1:
            cycles.append(min(accepted[at] + 1, end - 1 - at))
            at += cycles[-1]
        means.append(sum(cycles) / len(cycles))
    return loss_sum / weights, sum(lengths) / len(lengths), sum(means) / len(means)


@torch.no_grad()
def test_held_out_figures_are_those_of_every_block_by_itself(tiny_folder: Path, tmp_path: Path) -> None:
    """Six conversations in rows of two and of one, so that a batch has a row of padding, and more anchors than one
    forward takes."""
    data = write_jsonl(tmp_path / "train.jsonl", conversations(8, words=4))
    held = write_jsonl(tmp_path / "held.jsonl", conversations(5, words=4) + conversations(1, seed=9, words=2))
    changes = {
        "train__steps": 50,
        "train__lr": 1e-2,
        "train__anchors": 16,
        "train__rows_per_step": 4,
        "train__micro_rows": 2,
    }
    changes |= {"train__loss": "exp-decay", "train__gamma": GAMMA, "data__row_tokens": 128}
    text = tiny_toml(tiny_folder / "target", data, held, **changes)
    lines: list[str] = []
    with torch.enable_grad():
        train(load(text.encode()), tmp_path / "run", say=lines.append)
    record = metrics_of(tmp_path / "run")[-1]

    target = load_target(tiny_folder / "target")
    drafter, _ = load_drafter(tmp_path / "run/checkpoints/step-00000050", "cpu", torch.float32)
    prepared = open_prepared(tmp_path / "run/prepared/heldout")
    documents = [prepared.document(index, 128) for index in range(len(prepared))]
    assert len(documents) == 6
    loss, accept, cycles = by_hand(target, drafter, [(d.ids.tolist(), d.loss_mask.tolist()) for d in documents])
    assert 1.4 < cycles < BLOCK and cycles != pytest.approx(accept, rel=1e-3)  # it has learned, and they differ
    assert record.heldout_loss == pytest.approx(loss, rel=1e-4)
    assert record.heldout_accept == pytest.approx(accept, rel=1e-6)
    assert record.heldout_cycle_accept == pytest.approx(cycles, rel=1e-6)
    status = status_of(tmp_path / "run")
    assert (status.heldout_loss, status.heldout_accept) == (record.heldout_loss, record.heldout_accept)
    assert status.heldout_cycle_accept == record.heldout_cycle_accept
    told = f"| held-out loss {loss:.4f} accept {accept:.2f}, {cycles:.2f} a cycle"
    assert [line for line in lines if line.startswith("step 50/50") and line.endswith(told)]


@pytest.mark.parametrize("at", [4, 8])
def test_a_measurement_that_a_stop_has_cut_comes_first_when_the_run_goes_on(
    at: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, best.json and the end are those of a run that was not stopped. Step 8 is the last."""
    from trainer import course as module
    from trainer.checkpoint import judge, read_state

    changes = {"train__steps": 8, "train__eval_every": 4, "train__checkpoint_every": 4, "train__keep": 9}
    config = config_of(tiny_folder, **changes, train__decode_every=4, train__decode_prompts=1, train__decode_tokens=3)
    train(config, tmp_path / "whole", say=silent)
    measure, stop, steps = module.heldout_figures, threading.Event(), iter([4, 8])

    def stopped(*given: Any, **named: Any) -> Any:
        if next(steps) == at:
            stop.set()
        return measure(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "heldout_figures", stopped)
        assert train(config, tmp_path / "cut", stop=stop, say=silent) == "stopped"
    status = status_of(tmp_path / "cut")
    assert (status.state, status.step) == ("stopped", at)
    assert read_state(RunDir(tmp_path / "cut").checkpoints / checkpoint_name(at)).progress.unmeasured
    assert metrics_of(tmp_path / "cut")[-1].heldout_loss is None
    # A stop before anything is measured changes nothing; then it is.
    stop.set()
    assert train(config, tmp_path / "cut", stop=stop, say=silent) == "stopped"
    lines: list[str] = []
    assert train(config, tmp_path / "cut", say=lines.append) == "finished"
    assert figures(metrics_of(tmp_path / "cut")) == figures(metrics_of(tmp_path / "whole"))
    assert judge(RunDir(tmp_path / "cut").checkpoints).best == judge(RunDir(tmp_path / "whole").checkpoints).best
    for step in (4, 8):
        states = [read_state(RunDir(tmp_path / run).checkpoints / checkpoint_name(step)) for run in ("cut", "whole")]
        assert states[0].score == states[1].score and not states[0].progress.unmeasured
        assert damage(RunDir(tmp_path / "cut").checkpoints / checkpoint_name(step)) is None
    assert status_of(tmp_path / "cut").heldout_loss == status_of(tmp_path / "whole").heldout_loss
    assert len([line for line in lines if line.startswith(f"step {at}/8 ")]) == 1
