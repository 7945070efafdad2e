"""The drafter: its format, what it may and may not see, and training forward against cached decoding."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.blocks import Blocks, dense_mask, make_blocks
from trainer.data import Document, make_row
from trainer.draft import DraftCache, DraftModel
from trainer.draft_config import DraftConfig, default_target_layer_ids
from trainer.feed import row_batch

CONFIG = DraftConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=128,
    rms_norm_eps=1e-6,
    block_size=4,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    mask_token_id=127,
    max_position_embeddings=256,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def drafter(config: DraftConfig = CONFIG, dtype: torch.dtype = torch.float64) -> DraftModel:
    """Random weights, norms included, large enough that everything matters."""
    torch.manual_seed(0)
    model = DraftModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return model.to(dtype).requires_grad_(False)


class Given:
    """Rows of random documents with blocks at chosen anchors, random features and embeddings."""

    def __init__(self, lengths: Sequence[int], anchors: Sequence[int], row_tokens: int = 24) -> None:
        draw = torch.Generator().manual_seed(1)
        documents = [
            Document(torch.randint(0, 120, (n,), generator=draw).numpy(), torch.ones(n).bool().numpy()) for n in lengths
        ]
        rows = row_batch([make_row(0, documents, row_tokens)], len(anchors), seed=0)
        self.document_ids = rows.document_ids_BS
        self.positions = rows.positions_BS
        self.features = torch.randn(1, row_tokens, CONFIG.feature_size, generator=draw, dtype=torch.float64)
        self.table = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=draw, dtype=torch.float64)
        self.anchors = list(anchors)
        self.ids = rows.ids_BS
        self.loss_mask = rows.loss_mask_BS

    def blocks(self) -> Blocks:
        return make_blocks(
            self.ids,
            self.loss_mask,
            self.document_ids,
            self.positions,
            torch.tensor([self.anchors]),
            torch.ones(1, len(self.anchors), dtype=torch.bool),
            block_size=CONFIG.block_size,
            mask_token_id=CONFIG.mask_token_id,
        )

    def hidden(self, model: DraftModel) -> Tensor:
        """[N, T, H]"""
        blocks = self.blocks()
        mask = dense_mask(blocks, self.ids.shape[1])
        embeds = F.embedding(blocks.ids_BQ, self.table)
        hidden = model(self.features, embeds, self.positions, blocks.positions_BQ, (mask,))
        return hidden[0].unflatten(0, (len(self.anchors), -1))


# --- the format ---


@pytest.mark.parametrize("layers", [1, 5])
def test_the_tensors_are_the_formats_and_no_others(layers: int) -> None:
    names = set(DraftModel(replace(CONFIG, num_layers=layers, layer_types=())).state_dict())
    own = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm"]
    own += ["self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    own += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{i}.{name}.weight" for i in range(layers) for name in own}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 11 * layers + 3


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3])
def test_the_config_comes_back_from_json(scaling: dict[str, Any] | None) -> None:
    config = replace(CONFIG, rope_scaling=scaling, rope_theta=1e6)
    data = config.to_json()
    assert DraftConfig.from_json(data) == config
    assert data["block_size"] == data["dflash_config"]["block_size"] == 4
    assert data["layer_types"] == ["full_attention"] * 2 and data["is_causal"] is False


def test_a_config_of_another_trainer_is_read() -> None:
    data = CONFIG.to_json()
    del data["rope_parameters"], data["is_causal"], data["dflash_config"]["block_size"]
    assert DraftConfig.from_json(data) == CONFIG  # rope_theta at the top, block_size at the top
    data["rope_scaling"] = {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}
    assert DraftModel(DraftConfig.from_json(data)).rotary.scaling > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention without use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size '64' is no whole number"),
        ({"hidden_size": -64}, "hidden_size -64: it must be at least 1"),
        ({"num_key_value_heads": 0}, "num_kv_heads 0: it must be at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers True is no whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small' is no number"),
        ({"dflash_config": [4]}, "dflash_config is no JSON object"),
        ({"rope_parameters": 5}, "rope_parameters is no JSON object"),
        ({"dflash_config": {"block_size": 4, "target_layer_ids": [1, 3]}}, "mask_token_id is missing"),
        ({"dflash_config": {"block_size": 4, "target_layer_ids": [1, 6], "mask_token_id": 1}}, "layers 0..5"),
        ({"dflash_config": {"block_size": 4, "target_layer_ids": [1], "mask_token_id": 128}}, "vocabulary of 128"),
    ],
)
def test_a_config_that_means_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_json(CONFIG.to_json() | change)


@pytest.mark.parametrize("content", [[], 3, None])
def test_a_config_that_is_no_object_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="it is no JSON object"):
        DraftConfig.from_json(content)


def test_captured_layers_follow_the_published_rule() -> None:
    published = {24: (1, 6, 11, 16, 21), 28: (1, 7, 13, 19, 25), 32: (1, 8, 15, 22, 29), 36: (1, 9, 17, 25, 33)}
    published |= {40: (1, 10, 19, 28, 37), 64: (1, 16, 31, 46, 61), 30: (1, 8, 14, 20, 27)}
    for layers, ids in published.items():
        assert default_target_layer_ids(layers, 5) == ids
    assert default_target_layer_ids(24, 1) == (12,)
    with pytest.raises(ValueError, match="6 layers has no 5 layers"):
        default_target_layer_ids(6, 5)


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3])
def test_rotation_is_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 500.0}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            head_dim=8,
            max_position_embeddings=256,
            rope_parameters=parameters,  # pyright: ignore[reportArgumentType]
        )
    )
    positions = torch.tensor([[0, 1, 7, 200]])
    cos, sin = drafter(replace(CONFIG, rope_scaling=scaling, rope_theta=500.0)).rotary(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions)
    torch.testing.assert_close(cos[:, 0], their_cos)
    torch.testing.assert_close(sin[:, 0], their_sin)


def test_a_bfloat16_model_keeps_exact_rotation() -> None:
    positions = torch.tensor([[3001]])
    exact = drafter(dtype=torch.float32).rotary(positions)[0]
    assert (drafter(dtype=torch.bfloat16).rotary(positions)[0] == exact).all()


# --- what a block sees ---


def changed_blocks(given: Given, before: Tensor, model: DraftModel) -> list[bool]:
    after = given.hidden(model)
    return [bool((after[n] != before[n]).any()) for n in range(len(given.anchors))]


def test_a_block_sees_the_features_before_its_anchor_and_none_from_it_on() -> None:
    model = drafter()
    anchor = 7
    for position in range(24):
        given = Given([20], [anchor])
        before = given.hidden(model)
        given.features[0, position] += 1.0
        assert changed_blocks(given, before, model) == [position < anchor], position


def test_a_block_sees_no_other_document_and_no_other_block() -> None:
    model = drafter()
    anchors = [3, 12, 14]  # documents: 0..7, 8..17, padding
    for position in range(24):
        given = Given([8, 10], anchors)
        before = given.hidden(model)
        given.features[0, position] += 1.0
        expected = [position < 3, 8 <= position < 12, 8 <= position < 14]
        assert changed_blocks(given, before, model) == expected, position
    for token in range(18):
        given = Given([8, 10], anchors)
        before = given.hidden(model)
        given.ids[0, token] = (given.ids[0, token] + 1) % 120
        # Of the tokens it gets only its anchor's: all others are masks. The features stand for those before.
        assert changed_blocks(given, before, model) == [token == anchor for anchor in anchors], token


def test_positions_count_within_the_document() -> None:
    model = drafter()
    alone, packed = Given([10], [6]), Given([8, 10], [14])
    packed.features[0, 8:18] = alone.features[0, :10]
    packed.ids[0, 8:18] = alone.ids[0, :10]
    packed.table = alone.table
    torch.testing.assert_close(packed.hidden(model), alone.hidden(model), rtol=0, atol=1e-12)


def test_slots_of_a_block_see_each_other_both_ways() -> None:
    model, given = drafter(), Given([20], [7])
    blocks = given.blocks()
    embeds = F.embedding(blocks.ids_BQ, given.table)
    mask = dense_mask(blocks, 24)

    def run(embeds: Tensor) -> Tensor:
        return model(given.features, embeds, given.positions, blocks.positions_BQ, (mask,))[0]

    before = run(embeds)
    for slot in range(4):
        other = embeds.clone()
        other[0, slot] += 1.0
        assert (run(other) != before).any(-1).all()


# --- decoding ---


@pytest.mark.parametrize("accepted", [[], [3], [1, 4, 2, 1]])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_training_forward_equals_cached_decoding(accepted: list[int], scaling: dict[str, Any] | None) -> None:
    """A block at anchor a is a decoding cycle that starts at a, after any cycles before it."""
    config = replace(CONFIG, rope_scaling=scaling)
    model = drafter(config)
    starts = [5]
    for tokens in accepted:
        starts.append(starts[-1] + tokens)
    given = Given([22], starts)
    trained = given.hidden(model)

    cache, known = DraftCache(), 0
    for n, start in enumerate(starts):
        block = given.blocks().ids_BQ[:, n * 4 : n * 4 + 4]
        positions = torch.arange(known, start + 4)[None]
        hidden = model.forward_cached(given.features[:, known:start], F.embedding(block, given.table), positions, cache)
        torch.testing.assert_close(hidden[0], trained[n], rtol=0, atol=1e-10)
        known = start


def test_the_forward_is_the_specification_in_plain_steps() -> None:
    """One block, written a second time from the specification, without any of the model's modules."""
    model, given = drafter(), Given([20], [7])
    w = dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def turned(x: Tensor, positions: Tensor) -> Tensor:  # [tokens, heads, 8]
        angles = positions[:, None].double() / 10_000 ** (torch.arange(0, 8, 2).double() / 8)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., :4], x[..., 4:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    context = norm(given.features[0, :7] @ w["fc.weight"].T, "hidden_norm.weight")
    x = F.embedding(given.blocks().ids_BQ[0], given.table)
    positions = torch.arange(11)
    for i in range(2):
        p = f"layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        both = torch.cat((context, h))
        q = norm((h @ w[p + "self_attn.q_proj.weight"].T).view(4, 4, 8), p + "self_attn.q_norm.weight")
        k = norm((both @ w[p + "self_attn.k_proj.weight"].T).view(11, 2, 8), p + "self_attn.k_norm.weight")
        v = (both @ w[p + "self_attn.v_proj.weight"].T).view(11, 2, 8)
        q, k = turned(q, positions[7:]), turned(k, positions)
        heads = [(q[:, a] @ k[:, a // 2].T / 8**0.5).softmax(-1) @ v[:, a // 2] for a in range(4)]
        x = x + torch.cat(heads, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    # The model turns in float32.
    torch.testing.assert_close(given.hidden(model)[0], norm(x, "norm.weight"), rtol=0, atol=1e-5)


def test_a_drafter_folder_is_replaced_whole(tmp_path: Path) -> None:
    from trainer.checkpoint import load_drafter, save_drafter

    folder = tmp_path / "drafter"
    save_drafter(folder, drafter(dtype=torch.float32), CONFIG)
    old = (folder / "model.safetensors").stat().st_ino
    save_drafter(folder, drafter(dtype=torch.float32), CONFIG, torch.bfloat16)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter"]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").stat().st_ino != old
    model, config = load_drafter(folder, "cpu", torch.float32)
    assert config == CONFIG
    for name, tensor in drafter(dtype=torch.bfloat16).state_dict().items():
        assert (model.state_dict()[name] == tensor.float()).all()


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=lambda scaling: scaling["rope_type"])
def test_a_rope_rule_without_its_factor_is_told(scaling: dict[str, Any]) -> None:
    without = {key: value for key, value in scaling.items() if key != "factor"}
    with pytest.raises(ValueError, match=f"rope scaling '{scaling['rope_type']}' needs 'factor'"):
        DraftModel(replace(CONFIG, rope_scaling=without))
