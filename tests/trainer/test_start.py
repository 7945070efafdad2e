"""What a training starts with."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tiny import tiny_toml
from tiny_targets import tiny_target

from trainer.config import load
from trainer.prepared import Prepared
from trainer.start import TrainingError, draft_config

RESERVED = 3  # the one token of the tiny target that texts have no use for


def data(**counts: int) -> Prepared:
    """Data with tokens t3=5: five times token 3."""
    found = np.zeros(98, dtype=np.int64)
    for name, times in counts.items():
        found[int(name[1:])] = times
    return cast(Prepared, SimpleNamespace(counts=found, first_place_of=lambda token: f"data.jsonl:{token}"))  # pyright: ignore[reportUnknownLambdaType]


def test_the_mask_token_is_one_that_neither_data_has() -> None:
    config, target = load(tiny_toml("x", "y").encode()), tiny_target()
    assert target.config.vocab_size == 100
    assert draft_config(config, target).mask_token_id == RESERVED
    assert draft_config(config, target, [data(t7=5), data(t8=1)]).mask_token_id == RESERVED
    for held in ([data(t3=5), data()], [data(), data(t3=1)]):
        with pytest.raises(TrainingError, match=r"\[draft\] does not fit the target x: .* 1 reserved tokens occur in"):
            draft_config(config, target, held)


@pytest.mark.parametrize("place", [0, 1])
def test_a_mask_token_that_is_wanted_and_occurs_is_refused_with_its_place(place: int) -> None:
    changes: dict[str, Any] = {"draft__mask_token_id": 7}
    config, target = load(tiny_toml("x", "y", **changes).encode()), tiny_target()
    assert draft_config(config, target, [data(t8=2)]).mask_token_id == 7
    held = [data(), data()]
    held[place] = data(t7=1234)
    with pytest.raises(TrainingError, match=r"mask_token_id 7 \('.'\) occurs 1,234 times in the data, first in data"):
        draft_config(config, target, held)
