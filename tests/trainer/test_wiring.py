"""Each key of a config reaches what it is for: one step of training, and what its parts were given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import config_of, silent
from torch import Tensor

from trainer import start as start_module
from trainer import train as module
from trainer import warm, workers
from trainer.draft import DraftModel
from trainer.features import FeatureBatch, RowBatch
from trainer.learner import Learner
from trainer.loss import Weighting
from trainer.prepared import Prepared
from trainer.start import fresh_drafter
from trainer.tally import Step, Tally
from trainer.target import TargetModel
from trainer.train import train


class Given:
    """What the parts of a training were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weighting = Weighting("d-pace")
        self.learner: dict[str, Any] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.target: TargetModel | None = None
        self.first: dict[str, Tensor] = {}
        self.prepared: list[dict[str, Any]] = []
        self.seeds: list[int] = []
        self.steps: list[Step] = []
        self.model: DraftModel | None = None
        given, features_of, add = self, workers.features_of, Tally.add
        prepared_data = start_module.prepared_data

        class Watched(Learner):
            def __init__(
                self,
                model: DraftModel,
                head_VH: Tensor,
                optimizer: torch.optim.Optimizer,
                weighting: Weighting,
                **more: Any,
            ) -> None:
                given.weighting, given.optimizer, given.learner = weighting, optimizer, more
                given.model = model
                super().__init__(model, head_VH, optimizer, weighting, **more)

            def learn(self, batch: FeatureBatch) -> None:
                if not given.first:
                    given.first = {name: weight.clone() for name, weight in self.model.state_dict().items()}
                super().learn(batch)

        def watched_features(target: TargetModel, rows: RowBatch, *more: Any, **named: Any) -> FeatureBatch:
            given.target = target
            return features_of(target, rows, *more, **named)

        def watched_data(*more: Any, **named: Any) -> Prepared:
            given.prepared.append(named)
            return prepared_data(*more, **named)

        def watched_draw(draft: Any, seed: int) -> DraftModel:
            given.seeds.append(seed)
            return fresh_drafter(draft, seed)

        def watched_add(tally: Tally, step: Step) -> None:
            given.steps.append(step)
            add(tally, step)

        monkeypatch.setattr(warm, "Learner", Watched)
        monkeypatch.setattr(workers, "features_of", watched_features)
        monkeypatch.setattr(module, "fresh_drafter", watched_draw)
        monkeypatch.setattr(start_module, "prepared_data", watched_data)
        monkeypatch.setattr(Tally, "add", watched_add)


CHANGES: dict[str, Any] = {
    "train__loss": "d-pace", "train__alpha": 0.25, "train__weight_decay": 0.125, "train__clip": 0.375,
    "train__chunk_blocks": 7, "train__lr": 3e-3, "train__warmup_ratio": 0.5, "train__seed": 11, "train__steps": 2,
    "target__dtype": "bfloat16", "data__last_turn_only": True, "data__shuffle": False,
}  # fmt: skip


def test_keys_reach_what_they_are_for(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch)
    train(config_of(tiny_folder, **CHANGES), tmp_path, say=silent)
    assert given.weighting == Weighting("d-pace", gamma=4.0, alpha=0.25)
    assert (given.learner["clip"], given.learner["chunk_blocks"]) == (0.375, 7)
    assert given.optimizer is not None and given.target is not None
    groups = given.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.125, 0.0]
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.9, 0.999), 1e-8)}
    assert given.target.dtype == torch.bfloat16
    assert [named["last_turn_only"] for named in given.prepared] == [True, True]
    assert given.seeds == [11]
    # One of two steps rises to the highest rate.
    assert [step.lr for step in given.steps] == [3e-3, 3e-3]
    assert given.steps[0].source.rows == (0, 1)
    assert given.steps[0].source.lines[0][0] == 1  # not shuffled: the first row begins with the first line


def test_gamma_reaches_the_loss_and_is_the_block_s_without(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, gamma in (("own", 2.5), ("default", None)):
        own = {} if gamma is None else {"train__gamma": gamma}
        config = config_of(tiny_folder, train__loss="exp-decay", train__steps=1, draft__block=10, **own)
        with monkeypatch.context() as patch:
            given = Given(patch)
            train(config, tmp_path / name, say=silent)
        assert given.weighting == Weighting("exp-decay", gamma=gamma or 5.0, alpha=0.5)


def test_the_first_weights_are_the_seed_s_or_those_of_the_drafter_that_is_named(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: list[dict[str, Tensor]] = []
    learned: dict[str, Tensor] = {}
    for run, (seed, init_from) in enumerate([(1, None), (2, None), (1, tmp_path / "0/checkpoints/step-00000001")]):
        with monkeypatch.context() as patch:
            given = Given(patch)
            config = config_of(tiny_folder, train__steps=1, train__seed=seed)
            if init_from:
                config = config.model_copy(update={"init_from": str(init_from)})
            train(config, tmp_path / str(run), say=silent)
        firsts.append(given.first)
        assert given.model is not None
        learned = learned or dict(given.model.state_dict())

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    assert not same(firsts[0], firsts[1])
    assert same(firsts[2], learned) and not same(firsts[2], firsts[0])


def test_held_out_data_is_measured_as_often_as_it_says(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(monkeypatch)
    config = config_of(tiny_folder, train__steps=5, train__eval_every=2, train__objective="tv")
    train(config, tmp_path, say=silent)
    assert [step.heldout is not None for step in given.steps] == [False, True, False, True, True]
    assert given.learner["objective"] == "tv"
