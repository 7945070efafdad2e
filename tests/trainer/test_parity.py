"""The drafter written a second time, plainly, in float64; and training, decoding and flex attention held to each other.

`reference` takes one block at a time and knows masks only as the list of keys that a slot may look at, from the
specification's own words. It uses none of the model's modules and none of blocks.py.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafters import CONFIG, KINDS, LLAMA3, YARN, Given, drafter
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from trainer.blocks import Sight, cached_mask, dense_mask, tile_mask
from trainer.draft import DraftCache, DraftLayer, DraftModel
from trainer.draft_config import FULL, SLIDING, DraftConfig

each_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


# --- the reference ---


def keys_of(config: DraftConfig, layer: int, slot: int, anchor: int, start: int) -> tuple[list[int], list[int]]:
    """The context tokens and the slots of its own block that a slot looks at in a layer."""
    slides = config.layer_types[layer] == "sliding_attention"
    causal = slides if config.causal is None else config.causal
    context = list(range(start, anchor))
    if slides:
        assert config.sliding_window is not None
        # A window of W tokens ends with the slot's own, at anchor + slot.
        context = [token for token in context if anchor + slot - token < config.sliding_window]
    return context, list(range(slot + 1 if causal else config.block_size))


def turned(x: Tensor, positions: Sequence[int], config: DraftConfig) -> Tensor:
    """x [tokens, heads, D], each half-split pair turned by its token's angle, which is a float32 as everywhere."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(half).float() * 2 / config.head_dim)
    scale = 1.0
    if config.rope_scaling is not None:
        parameters = {**config.rope_scaling, "rope_theta": config.rope_theta}
        sizes: dict[str, Any] = {"head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings}
        theirs = Qwen3RotaryEmbedding(Qwen3Config(**sizes, hidden_size=32, rope_parameters=parameters))
        frequencies, scale = theirs.inv_freq, theirs.attention_scaling
    angles = torch.tensor(positions).float()[:, None] * frequencies
    cos, sin = (angles.cos() * scale)[:, None].double(), (angles.sin() * scale)[:, None].double()
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def reference(
    config: DraftConfig, weights: dict[str, Tensor], features: Tensor, embeds: Tensor, anchor: int, start: int
) -> Tensor:
    """One block's hidden states [T, H]. features [S, F] of the row, embeds [T, H] of the block."""

    def weight(name: str) -> Tensor:
        return weights[f"{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight(name)

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weight(name).T).reshape(len(x), -1, config.head_dim)

    size, group = config.block_size, config.num_heads // config.num_kv_heads
    context = norm(features[start:anchor] @ weight("fc").T, "hidden_norm")
    positions = list(range(anchor - start + size))  # in the document: context first, then the block
    x = embeds
    for i in range(config.num_layers):
        own = f"layers.{i}."
        h = norm(x, own + "input_layernorm")
        both = torch.cat((context, h))
        q = norm(heads(h, own + "self_attn.q_proj"), own + "self_attn.q_norm")
        k = norm(heads(both, own + "self_attn.k_proj"), own + "self_attn.k_norm")
        v = heads(both, own + "self_attn.v_proj")
        q, k = turned(q, positions[-size:], config), turned(k, positions, config)
        rows: list[Tensor] = []
        for slot in range(size):
            tokens, slots = keys_of(config, i, slot, anchor, start)
            seen = [token - start for token in tokens] + [anchor - start + other for other in slots]
            for head in range(config.num_heads):
                scores = k[seen, head // group] @ q[slot, head] / config.head_dim**0.5
                rows.append(scores.softmax(0) @ v[seen, head // group])
        x = x + torch.cat(rows).view(size, -1) @ weight(own + "self_attn.o_proj").T
        h = norm(x, own + "post_attention_layernorm")
        gate, up = h @ weight(own + "mlp.gate_proj").T, h @ weight(own + "mlp.up_proj").T
        x = x + (gate * gate.sigmoid() * up) @ weight(own + "mlp.down_proj").T
    return norm(x, "norm")


def reference_blocks(given: Given, weights: dict[str, Tensor]) -> Tensor:
    """All blocks of a row, [N, T, H], in float64."""
    embeds = given.embeds(given.blocks())[0].double().unflatten(0, (len(given.anchors), -1))
    starts = [anchor - int(given.positions[0, anchor]) for anchor in given.anchors]
    features = given.features[0].double()
    return torch.stack(
        [
            reference(given.config, weights, features, embeds[n], anchor, starts[n])
            for n, anchor in enumerate(given.anchors)
        ]
    )


SHAPES = {
    "one captured layer": replace(CONFIG, target_layer_ids=(2,)),
    "six captured layers": replace(CONFIG, target_layer_ids=(0, 1, 2, 3, 4, 5)),
    "a key head for each head": replace(CONFIG, num_kv_heads=4),
    "one key head": replace(CONFIG, num_kv_heads=1),
    "yarn": replace(CONFIG, rope_scaling=YARN),
    "llama3": replace(CONFIG, rope_scaling=LLAMA3),
    "blocks of 2": replace(CONFIG, block_size=2),
    "three layers": replace(CONFIG, num_layers=3, layer_types=(SLIDING, FULL, SLIDING), sliding_window=7, causal=None),
    "a window as wide as the block": replace(CONFIG, layer_types=(SLIDING, SLIDING), sliding_window=4),
    "a window wider than the row": replace(CONFIG, layer_types=(SLIDING, SLIDING), sliding_window=100),
}


@pytest.mark.parametrize("config", [*KINDS.values(), *SHAPES.values()], ids=[*KINDS, *SHAPES])
def test_the_training_forward_and_its_gradients_are_the_specification(config: DraftConfig) -> None:
    given = Given([3, 14, 5], [0, 2, 3, 9, 14, 16, 18], config=config)
    results: list[list[Tensor]] = []
    for plain in (False, True):
        model = drafter(config).requires_grad_(True)
        given.features = given.features.detach().requires_grad_(True)
        hidden = reference_blocks(given, dict(model.named_parameters())) if plain else given.hidden(model)
        (hidden @ given.head.T).sin().sum().backward()  # any function that weighs every number differently
        grads = [parameter.grad for parameter in (*model.parameters(), given.features)]
        results.append([hidden.detach(), *(grad for grad in grads if grad is not None)])
    ours, plainly = results
    assert len(ours) == len(plainly) == 2 + 11 * config.num_layers + 3
    for one, other in zip(ours, plainly, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11 * scale)
    with torch.no_grad():
        single = drafter(config, torch.float32)
        narrow = Given([3, 14, 5], given.anchors, config=config, dtype=torch.float32)
        scale = float(plainly[0].abs().max())
        torch.testing.assert_close(narrow.hidden(single).double(), plainly[0], rtol=0, atol=2e-4 * scale)


@given(
    lengths=st.lists(st.integers(1, 12), max_size=5),
    spare=st.integers(0, 5),
    kind=st.sampled_from(list(KINDS)),
    data=st.data(),
)
def test_rows_of_any_documents_are_the_specification(
    lengths: list[int], spare: int, kind: str, data: st.DataObject
) -> None:
    """Documents of one token, rows of padding alone, anchors anywhere, in any order and twice, blocks that run out."""
    config, row_tokens = KINDS[kind], max(1, sum(lengths) + spare)
    places = st.integers(0, max(0, sum(lengths) - 1))
    anchors = data.draw(st.lists(places, min_size=1, max_size=6))
    keep = [data.draw(st.booleans()) and bool(lengths) for _ in anchors]
    given = Given(lengths, anchors, row_tokens, config=config, keep=keep)
    model = drafter(config)
    hidden = given.hidden(model)
    assert torch.isfinite(hidden).all()
    given.anchors = [anchor if kept else 0 for anchor, kept in zip(anchors, keep, strict=True)]
    expected = reference_blocks(given, dict(model.named_parameters()))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


# --- transformers' own layer ---


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_a_causal_layer_without_context_is_a_qwen3_layer(scaling: dict[str, Any] | None) -> None:
    config = replace(CONFIG, num_layers=1, layer_types=(FULL,), causal=True, rope_scaling=scaling)
    model, tokens = drafter(config), 12
    layer = model.layers[0]
    assert isinstance(layer, DraftLayer)
    qwen = Qwen3Config(**config.to_json(), attn_implementation="eager")
    theirs = Qwen3DecoderLayer(qwen, 0).double()
    theirs.load_state_dict(layer.state_dict())
    draw = torch.Generator().manual_seed(0)
    x, places = torch.randn(1, tokens, 32, dtype=torch.float64, generator=draw), torch.arange(5, 5 + tokens)[None]
    nothing = torch.zeros(1, 2, 0, 8, dtype=torch.float64)
    ours = layer(x, model.rotary(places), (nothing, nothing), cached_mask(0, tokens, Sight(causal=True), x.device))
    cos, sin = Qwen3RotaryEmbedding(qwen)(torch.zeros(1), places)
    before = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, attention_mask=before, position_embeddings=(cos.double(), sin.double()))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)  # their norms are float32


# --- decoding ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("accepted", [[], [3], [1, 4, 2, 1], [4, 4, 4]], ids=str)
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@each_kind
def test_training_forward_equals_cached_decoding(
    config: DraftConfig, scaling: dict[str, Any] | None, accepted: list[int], dtype: torch.dtype
) -> None:
    """A block at anchor a is a decoding cycle that starts at a, after any cycles before it."""
    config = replace(config, rope_scaling=scaling)
    starts = [5]
    for tokens in accepted:
        starts.append(starts[-1] + tokens)
    decoded = decode(drafter(config, dtype), Given([22], starts, config=config, dtype=dtype))
    trained = Given([22], starts, config=config, dtype=dtype).hidden(drafter(config, dtype))
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(decoded, trained, rtol=0, atol=tolerance * float(trained.abs().max()))


@each_kind
def test_decoding_begins_with_a_prompt_of_any_length_and_may_repeat_a_start(config: DraftConfig) -> None:
    """No context at all, one token, and a second block at the same start: nothing new to see."""
    model = drafter(config)
    for starts in ([0, 0, 1, 1, 3], [1, 2, 3, 19]):
        given = Given([22], starts, config=config)
        torch.testing.assert_close(decode(model, given), given.hidden(model), rtol=0, atol=1e-10)


def decode(model: DraftModel, given: Given) -> Tensor:
    """The blocks one after the other, each cycle adding the context up to its start, [N, T, H]."""
    size, cache, known = given.config.block_size, DraftCache(), 0
    blocks = given.blocks()
    cycles: list[Tensor] = []
    for n, start in enumerate(given.anchors):
        assert cache.length == known
        embeds = given.embeds(blocks)[:, n * size : (n + 1) * size]
        positions = torch.arange(known, start + size)[None]
        cycles.append(model.forward_cached(given.features[:, known:start], embeds, positions, cache)[0])
        known = start
    return torch.stack(cycles)


# --- flex attention ---


def flex_given(config: DraftConfig, dtype: torch.dtype) -> Given:
    """Several documents over several tiles of keys and queries, a slot without an anchor, unsorted anchors."""
    anchors = [0, 1, 60, 99, 100, 131, 170, 215, 216, 250, 380, 300, 301, 377, 260, 0, *range(132, 210, 3)]
    keep = [n != 15 for n in range(len(anchors))]
    return Given([100, 30, 85, 169], anchors, 384, config=config, dtype=dtype, keep=keep)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_kind
def test_flex_attention_is_the_dense_path(config: DraftConfig) -> None:
    """Not compiled: flex attention then reads the predicate. The tiles: below, and test_blocks.py."""
    model, given = drafter(config), flex_given(config, torch.float64)
    dense = given.hidden(model)
    torch.testing.assert_close(with_flex(model, given), dense, rtol=0, atol=1e-11 * float(dense.abs().max()))


def with_flex(model: Callable[..., Tensor], given: Given) -> Tensor:
    """The training forward as a GPU runs it, [N, T, H]."""
    blocks = given.blocks()
    masks = tuple(tile_mask(blocks, given.row_tokens, sight) for sight in given.config.sights)
    hidden = model(given.features, given.embeds(blocks), given.positions, blocks.positions_BQ, masks)
    return hidden[0].unflatten(0, (len(given.anchors), -1))


def test_a_drafter_of_several_sights_is_traced_whole_and_once_for_all_batches() -> None:
    """As the compiler of a GPU traces it, without making kernels: batches of the same shapes are one graph."""
    config = KINDS["mixed"]
    model, graphs = drafter(config, torch.float32), 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)
    for shift in range(3):
        given = flex_given(config, torch.float32)
        given.anchors = [anchor + shift if anchor < 370 else anchor for anchor in given.anchors]
        dense = given.hidden(model)
        torch.testing.assert_close(with_flex(compiled, given), dense, rtol=0, atol=1e-4 * float(dense.abs().max()))
    assert graphs == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@pytest.mark.filterwarnings("default")  # torch's compiler warns about itself
def test_compiled_flex_attention_visits_the_tiles_that_it_has_to(soak: bool) -> None:
    """The kernel for the CPU goes by the lists of tiles, as the GPU's does; forward only."""
    if not soak:
        pytest.skip("compiles for some seconds: with --soak")
    config = replace(KINDS["sliding causal"], sliding_window=70, num_heads=2, num_kv_heads=1)
    given = flex_given(config, torch.float32)
    blocks, [sight] = given.blocks(), config.sights
    draw = torch.Generator().manual_seed(0)
    keys = given.row_tokens + blocks.ids_BQ.shape[1]
    q = torch.randn(1, 2, blocks.ids_BQ.shape[1], 8, generator=draw)
    k, v = (torch.randn(1, 1, keys, 8, generator=draw) for _ in range(2))
    mask = tile_mask(blocks, given.row_tokens, sight)
    assert mask.full_kv_num_blocks is not None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    with torch.no_grad():
        flex = compiled(q, k, v, block_mask=mask, enable_gqa=True)
    dense = F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(blocks, given.row_tokens, sight), enable_gqa=True
    )
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-5)
