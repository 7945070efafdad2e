"""The drafter: its tensors, its rotation, and its folder on disk. What it sees: test_leaks.py, test_parity.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafters import CONFIG, LLAMA3, YARN, drafter
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig


@pytest.mark.parametrize("layers", [1, 5])
def test_the_tensors_are_the_formats_and_no_others(layers: int) -> None:
    names = set(DraftModel(replace(CONFIG, num_layers=layers, layer_types=())).state_dict())
    own = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm"]
    own += ["self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    own += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{i}.{name}.weight" for i in range(layers) for name in own}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 11 * layers + 3


def rotations(config: DraftConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of the drafter and of transformers' Qwen3 at some positions, each [2, positions, D]."""
    parameters = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    sizes: dict[str, Any] = {"head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings}
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**sizes, hidden_size=32, rope_parameters=parameters))
    positions = torch.tensor([[0, 1, 7, 63, 64, 200, 30_000]])
    cos, sin = DraftModel(config).rotary(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions)
    return torch.cat((cos[0], sin[0])), torch.cat((their_cos, their_sin))


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3])
def test_rotation_is_that_of_transformers(scaling: dict[str, Any] | None) -> None:
    ours, theirs = rotations(replace(CONFIG, rope_scaling=scaling, rope_theta=500.0))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@given(
    head_dim=st.sampled_from([2, 8, 64, 128]),
    theta=st.sampled_from([500.0, 1e4, 1e6, 1e7]),
    scaling=st.fixed_dictionaries(
        {"factor": st.floats(1.0, 32.0)},
        optional={
            "original_max_position_embeddings": st.sampled_from([32, 256, 4096]),
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.floats(16.0, 64.0),
            "beta_slow": st.floats(0.5, 2.0),
            "mscale": st.floats(0.5, 2.0),
            "mscale_all_dim": st.floats(0.5, 2.0),
            "truncate": st.booleans(),
        },
    ),
)
def test_yarn_is_that_of_transformers_whatever_its_parameters(
    head_dim: int, theta: float, scaling: dict[str, Any]
) -> None:
    config = replace(CONFIG, head_dim=head_dim, rope_theta=theta, rope_scaling={"rope_type": "yarn", **scaling})
    ours, theirs = rotations(config)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_bfloat16_model_keeps_exact_rotation() -> None:
    positions = torch.tensor([[3001]])
    exact = drafter(dtype=torch.float32).rotary(positions)[0]
    assert (drafter(dtype=torch.bfloat16).rotary(positions)[0] == exact).all()


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=lambda scaling: scaling["rope_type"])
def test_a_rope_rule_without_its_factor_is_told(scaling: dict[str, Any]) -> None:
    without = {key: value for key, value in scaling.items() if key != "factor"}
    with pytest.raises(ValueError, match=f"rope scaling '{scaling['rope_type']}' needs 'factor'"):
        DraftModel(replace(CONFIG, rope_scaling=without))
