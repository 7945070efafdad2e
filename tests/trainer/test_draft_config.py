"""A drafter's config: its file in the z-lab format, other stacks' files, layer ids, and what its layers see."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafters import CONFIG, LLAMA3, YARN
from transformers import Qwen3Config

from trainer.blocks import Sight
from trainer.draft import DraftModel
from trainer.draft_config import (
    FULL,
    SLIDING,
    DraftConfig,
    LayerType,
    default_target_layer_ids,
    from_speculators_layer_ids,
    speculators_layer_ids,
)


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    """Any drafter that the format can describe."""
    kv_heads, layers, target_layers = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 64))
    vocab, block = draw(st.integers(1, 200_000)), draw(st.integers(2, 128))
    kinds = draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers))
    scales = st.one_of(st.just(1.0), st.floats(1e-3, 1e3))
    return DraftConfig(
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=draw(st.integers(1, 32_768)),
        num_layers=layers,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 128)),
        vocab_size=vocab,
        rms_norm_eps=draw(st.floats(1e-9, 1e-3)),
        block_size=block,
        target_layer_ids=tuple(draw(st.lists(st.integers(0, target_layers - 1), min_size=1, max_size=9))),
        num_target_layers=target_layers,
        mask_token_id=draw(st.integers(0, vocab - 1)),
        max_position_embeddings=draw(st.integers(1, 1_000_000)),
        rope_theta=draw(st.floats(1.0, 1e8)),
        rope_scaling=draw(st.sampled_from([None, YARN, LLAMA3, {"type": "linear", "factor": 2.0}])),
        layer_types=tuple(kinds),
        sliding_window=draw(st.integers(block, 10_000)) if SLIDING in kinds else None,
        causal=draw(st.sampled_from([False, True, None])),
        embedding_scale=draw(scales),
        logit_scale=draw(scales),
    )


@given(configs())
def test_any_config_comes_back_from_its_file(config: DraftConfig) -> None:
    data = json.loads(json.dumps(config.to_json()))
    assert DraftConfig.from_json(data) == config
    assert data["block_size"] == data["dflash_config"]["block_size"] == config.block_size
    assert len(data["layer_types"]) == data["num_hidden_layers"] == config.num_layers
    assert data["use_sliding_window"] == (SLIDING in data["layer_types"])
    mixed = len({(sight.window is None, sight.causal) for sight in config.sights}) == 2 and config.causal is None
    assert ("is_causal" in data) == (not mixed)
    # A loader that knows dflash_config's causal alone, and otherwise goes by the kinds, sees the same.
    told = data["dflash_config"].get("causal")
    read = [slides if told is None else told for slides in (kind == SLIDING for kind in config.layer_types)]
    assert read == [config.sights[own].causal for own in config.layer_sights]
    for key, scale in (("input_embedding_scale", config.embedding_scale), ("output_multiplier", config.logit_scale)):
        assert data["dflash_config"].get(key, 1.0) == scale and (key in data["dflash_config"]) == (scale != 1)


@given(configs())
def test_transformers_reads_the_file_as_we_do(config: DraftConfig) -> None:
    config = replace(config, hidden_size=config.num_heads * 4)  # transformers refuses others
    theirs: Any = Qwen3Config(**json.loads(json.dumps(config.to_json())))
    assert tuple(theirs.layer_types) == config.layer_types and theirs.sliding_window == config.sliding_window
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == (config.rope_scaling or {}).get("rope_type", "default")
    assert (theirs.num_hidden_layers, theirs.head_dim) == (config.num_layers, config.head_dim)


def test_the_portable_choice_is_what_a_plain_config_writes() -> None:
    data = CONFIG.to_json()
    assert data["layer_types"] == ["full_attention"] * 2 and data["is_causal"] is False
    assert data["sliding_window"] is None and data["use_sliding_window"] is False
    assert data["dflash_config"].keys() == {"mask_token_id", "target_layer_ids", "block_size"}


def test_a_config_of_another_trainer_is_read() -> None:
    data = CONFIG.to_json()
    del data["rope_parameters"], data["is_causal"], data["dflash_config"]["block_size"]
    assert DraftConfig.from_json(data) == CONFIG  # rope_theta at the top, block_size at the top
    data["rope_scaling"] = {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}
    read = DraftConfig.from_json(data)
    assert DraftModel(read).rotary.scaling > 1
    assert DraftConfig.from_json(read.to_json()) == read == replace(CONFIG, rope_scaling=YARN)
    del data["layer_types"], data["rope_scaling"]
    data["dflash_config"] |= {"mask_token": "<mask>", "attention_value_scale": 1.0, "final_logit_softcapping": None}
    data["dflash_config"] |= {"use_swa": False, "use_aux_hidden_state": True, "projector_type": None}
    data |= {"hidden_act": "silu", "is_neox_style": True, "draft_vocab_size": 128, "target_hidden_size": 32}
    assert DraftConfig.from_json(data) == CONFIG


S, C = Sight(window=64), Sight(causal=True)
SC = Sight(window=64, causal=True)


@pytest.mark.parametrize(
    ("kinds", "said", "sights"),
    [
        # is_causal goes before dflash_config's causal, that before the layers' kinds.
        ([FULL, FULL], {}, [Sight()] * 2),
        ([SLIDING, SLIDING], {}, [SC, SC]),
        ([SLIDING, FULL], {}, [SC, Sight()]),
        ([SLIDING, FULL], {"is_causal": None}, [SC, Sight()]),
        ([SLIDING, FULL], {"is_causal": False}, [S, Sight()]),
        ([SLIDING, FULL], {"is_causal": True}, [SC, C]),
        ([FULL, FULL], {"is_causal": True}, [C, C]),
        ([SLIDING, SLIDING], {"is_causal": False}, [S, S]),
        ([SLIDING, FULL], {"causal": False}, [S, Sight()]),
        ([SLIDING, FULL], {"causal": True}, [SC, C]),
        ([SLIDING, SLIDING], {"is_causal": False, "causal": True}, [S, S]),
    ],
)
def test_what_layers_see_is_read_as_servers_read_it(
    kinds: list[LayerType], said: dict[str, Any], sights: list[Sight]
) -> None:
    data = CONFIG.to_json() | {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 64}
    del data["is_causal"]
    if "is_causal" in said:
        data["is_causal"] = said["is_causal"]
    if "causal" in said:
        data["dflash_config"]["causal"] = said["causal"]
    config = DraftConfig.from_json(data)
    assert [config.sights[own] for own in config.layer_sights] == sights
    assert list(config.sights) == list(dict.fromkeys(sights))
    assert DraftConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, (FULL, FULL)),
        ({"use_sliding_window": True}, (FULL, SLIDING)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (SLIDING, SLIDING)),
        ({"use_sliding_window": True, "sliding_window": None}, (FULL, FULL)),
    ],
)
def test_without_layer_types_the_layers_are_those_of_transformers(
    change: dict[str, Any], kinds: tuple[LayerType, ...]
) -> None:
    data = CONFIG.to_json() | {"sliding_window": 64, "max_window_layers": 1} | change
    del data["layer_types"]
    assert DraftConfig.from_json(data).layer_types == kinds
    assert tuple(Qwen3Config(**data).layer_types or ()) == kinds


SLIDES = {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 64}
NAMES = {
    "output_multiplier": "output_multiplier|logit_scale",
    "input_embedding_scale": "embedding_scale -1.0",
}  # what the drafter calls it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention without use_sliding_window"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types 'chunked_attention' is not supported"),
        ({"layer_types": [FULL]}, "1 layer_types: the drafter has 2 layers"),
        ({"layer_types": "full"}, "layer_types 'full' is no list"),
        (SLIDES | {"sliding_window": 3}, "sliding_window 3: sliding layers need one of at least 4 tokens"),
        (SLIDES | {"sliding_window": "64"}, "sliding_window '64' is no whole number"),
        (SLIDES | {"use_sliding_window": False}, "sliding_attention without use_sliding_window"),
        ({"is_causal": "yes"}, "is_causal 'yes' is neither true nor false"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"draft_vocab_size": 64}, "draft_vocab_size 64 other than vocab_size is not supported"),
        ({"target_hidden_size": 64}, "target_hidden_size 64 other than hidden_size is not supported"),
        ({"is_neox_style": False}, "is_neox_style False"),
        ({"sample_from_anchor": True}, "sample_from_anchor True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"block_size": 8}, "block_size is 8, but 4 in dflash_config"),
        ({"head_dim": 7}, "head_dim 7: it must be even"),
        ({"rope_scaling": YARN}, "rope_parameters and rope_scaling contradict each other"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differ from layer to layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in rope_parameters"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic' is not supported: yarn, llama3"),
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("projector_type", "domino"),
        ("shift_label", True),
        ("pure_draft_prefix_len", 2),
        ("conv_kernel_size", 2),
        ("selector_top_k", 16),
        ("attention_sink_bias", True),
        ("attention_value_scale", 0.5),
        ("use_swa", True),
        ("use_aux_hidden_state", False),
        ("sample_from_anchor", True),
        ("something_new", "x"),
        ("input_embedding_scale", -1.0),
        ("output_multiplier", "2"),
        ("output_multiplier", 0),
    ],
)
def test_a_key_of_another_stack_is_refused_by_name(key: str, value: object) -> None:
    data = CONFIG.to_json()
    data["dflash_config"][key] = value
    with pytest.raises(ValueError, match=NAMES.get(key, key)):
        DraftConfig.from_json(data)


def test_a_window_without_a_sliding_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window 64: no layer of the drafter slides"):
        replace(CONFIG, sliding_window=64)


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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_layer_ids_go_to_speculators_and_back(ids: list[int]) -> None:
    theirs = speculators_layer_ids(ids)
    assert theirs == tuple(id + 1 for id in ids)
    assert from_speculators_layer_ids(theirs, 42) == tuple(ids)


def test_layer_ids_of_speculators_count_the_embedding() -> None:
    # Qwen3-8B of 36 layers: z-lab's published ids, and speculators' default ones.
    assert speculators_layer_ids((1, 9, 17, 25, 33)) == (2, 10, 18, 26, 34)
    assert from_speculators_layer_ids([2, 18, 33], 36) == (1, 17, 32)


@pytest.mark.parametrize(("id", "why"), [(0, "the embedding"), (36, "normed output"), (37, "36 layers"), (-1, "36")])
def test_a_speculators_id_that_is_no_layers_output_is_refused(id: int, why: str) -> None:
    with pytest.raises(ValueError, match=f"layer id {id} of speculators.*{why}"):
        from_speculators_layer_ids([2, id], 36)
