"""What is told when a training goes on with another config, and what is not."""

import pytest
import torch

from trainer.config import TrainConfig, as_mapping, load
from trainer.origin import Origin, changes_since, origin_of

TEXT = b'[target]\npath = "model"\n[data]\ntrain = "train.jsonl"\n[train]\nsteps = 100\n'


def before_layouts(config: TrainConfig) -> Origin:
    """As a checkpoint has it from before [layout], whose config is none any more."""
    mapping = {key: value for key, value in as_mapping(config).items() if key != "layout"}
    mapping["train"] = {**mapping["train"], "device": "cpu"}
    return origin_of(config, torch.device("cpu")).model_copy(update={"config": mapping})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([], "train.device is unknown, was cpu"),
        (["layout.drafters=cpu"], "layout.drafters is ['cpu'], was unknown, train.device is unknown, was cpu"),
        (["layout.depth=3", "layout.targets=auto"], "layout.depth is 3, was unknown, train.device is unknown, was cpu"),
        (["train.clip=2.0"], "train.clip is 2.0, was 1.0, train.device is unknown, was cpu"),
    ],
)
def test_keys_that_were_not_there_yet_are_told_only_where_they_are_set(sets: list[str], said: str) -> None:
    before, now = before_layouts(load(TEXT)), origin_of(load(TEXT, sets), torch.device("cpu"))
    assert changes_since(before, now) == [f"the config has changed since this checkpoint: {said}"]


def test_a_key_that_is_back_at_its_default_is_told() -> None:
    before, now = before_layouts(load(TEXT, ["train.clip=2.0"])), origin_of(load(TEXT), torch.device("cpu"))
    (line,) = changes_since(before, now)
    assert "train.clip is 1.0, was 2.0" in line
