"""The target: its hand-run layers against the model's own forward, documents, the cache, mask tokens, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_targets import document_features, real_target, tiny_target
from torch import nn

import dflash_ops
from trainer import sizes
from trainer.draft import DraftModel, RMSNorm
from trainer.masks import document_mask, step_mask
from trainer.target import TargetError, TargetModel, first_line, load_target

FAMILIES = ["llama", "qwen3"]


def save(target: TargetModel, folder: Path) -> None:
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tiny_target(), tmp_path / "target")
    return tmp_path / "target"


def random_ids(target: TargetModel, rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, target.config.vocab_size, (rows, size), generator=torch.Generator().manual_seed(seed))


def hidden_states(target: TargetModel, ids_BS: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """What transformers says: layer i's output is its hidden state i + 1."""
    with torch.no_grad():
        states = target.model(ids_BS, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer + 1] for layer in layer_ids], dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_after_the_layers(family: str) -> None:
    target = tiny_target(family)
    ids = random_ids(target, 3, 17)
    layer_ids = (3, 0, 4)  # in the order asked for, not sorted
    features = document_features(target, ids, layer_ids)
    torch.testing.assert_close(features, hidden_states(target, ids, layer_ids), rtol=1e-5, atol=1e-5)
    assert not features.requires_grad
    positions = torch.arange(17).expand_as(ids)
    both, final = target.features_and_final(ids, torch.zeros_like(ids), positions, layer_ids)
    assert torch.equal(both, features)
    with torch.no_grad():
        logits = target.model(ids, use_cache=False).logits
    torch.testing.assert_close(target.logits(final), logits, rtol=1e-4, atol=1e-4)
    assert (target.embedding_scale, target.logit_scale) == (1.0, 1.0)


def test_features_of_the_real_model() -> None:
    target = real_target()
    ids = torch.tensor([target.tokenizer.encode("The drafter proposes a block, the target checks it in one pass.")])
    layer_ids = (1, 8, 14, 20, 27)
    torch.testing.assert_close(
        document_features(target, ids, layer_ids), hidden_states(target, ids, layer_ids), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_in_a_row_do_not_see_each_other(family: str) -> None:
    target = tiny_target(family)
    lengths, layer_ids = [5, 1, 9, 4], (1, 4)
    ids = random_ids(target, 1, sum(lengths) + 3)
    documents = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * 3])
    positions = torch.tensor([[place for length in (*lengths, 3) for place in range(length)]])
    packed = target.features(ids, documents, positions, layer_ids)
    begin = 0
    for length in lengths:
        alone = document_features(target, ids[:, begin : begin + length], layer_ids)
        torch.testing.assert_close(packed[:, begin : begin + length], alone, rtol=1e-4, atol=1e-5)
        begin += length
    assert packed.isfinite().all()  # padding too: a NaN there would spread through a product with zero


def test_features_stop_after_the_last_captured_layer() -> None:
    target = tiny_target()
    wanted = document_features(target, random_ids(target, 1, 6), (1, 3))
    for later in (4, 5):
        target.model.model.layers[later] = nn.Identity()  # has none of a layer's parts: running it would raise
    torch.testing.assert_close(document_features(target, random_ids(target, 1, 6), (1, 3)), wanted, rtol=0, atol=0)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 4), st.none() | st.integers(1, 9))
def test_the_mask_stays_inside_the_documents(lengths: list[int], padding: int, window: int | None) -> None:
    documents = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    mask = document_mask(torch.tensor([documents]), window)[0, 0]
    for query, own in enumerate(documents):
        seen = [key for key in range(len(documents)) if mask[query, key]]
        first = 0 if window is None else query - window + 1
        assert seen == [key for key in range(query + 1) if documents[key] == own and key >= first]


@given(st.integers(0, 9), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_a_step_sees_what_the_same_tokens_see_in_one_pass(past: int, new: int, window: int | None) -> None:
    whole = document_mask(torch.zeros(1, past + new, dtype=torch.long), window)
    assert torch.equal(step_mask(past, new, torch.device("cpu"), window), whole[:, :, past:])


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_through_the_cache_give_the_logits_of_one_pass(family: str) -> None:
    target = tiny_target(family)
    ids = random_ids(target, 1, 20)[0]
    with torch.no_grad():
        wanted = target.model(ids[None], use_cache=False).logits[0]
    cache = target.new_cache(24)
    first = target.step(ids[:9], cache, (2,))
    target.step(torch.full((6,), 7), cache)  # a block that is not accepted
    cache.crop(9)
    rest = [target.step(ids[9:10], cache, (2,)), target.step(ids[10:], cache, (2,), last=1)]
    torch.testing.assert_close(first.logits_QV, wanted[:9], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rest[0].logits_QV, wanted[9:10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rest[1].logits_QV, wanted[19:], rtol=1e-4, atol=1e-4)
    features = torch.cat([step.features_BQF for step in (first, *rest)], dim=1)
    torch.testing.assert_close(features, document_features(target, ids[None], (2,)), rtol=1e-4, atol=1e-4)


def test_the_cache_refuses_what_it_has_no_room_for() -> None:
    target = tiny_target()
    cache = target.new_cache(4)
    target.step(torch.tensor([5, 6, 7]), cache)
    with pytest.raises(ValueError, match="holds 4 tokens, 5"):
        target.step(torch.tensor([5, 6]), cache)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(4)


def test_the_target_is_frozen_and_its_parts_are_its_own() -> None:
    target = tiny_target(tie_word_embeddings=True)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.head_weight.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(target.embedding(torch.tensor([[5]]))[0, 0], target.head_weight[5])


def test_mask_token_rules_in_their_order() -> None:
    target = tiny_target()
    assert target.mask_token(9) == 9
    with pytest.raises(TargetError, match="outside the vocabulary"):
        target.mask_token(target.config.vocab_size)
    # a reserved special token, neither used by the template nor bos, eos, pad or unk
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token()) == "<reserved>"
    padded = tiny_target(vocab_size=target.config.vocab_size + 8)
    assert padded.mask_token() == len(target.tokenizer)  # the first row that no token uses
    padded.tokenizer.mask_token = "~"
    assert padded.mask_token() == padded.tokenizer.convert_tokens_to_ids("~")
    target.tokenizer.chat_template += "<reserved>"
    with pytest.raises(TargetError, match=r"no unused token .*it has no reserved one.*give mask_token_id"):
        target.mask_token()


def test_a_mask_token_never_occurs_in_the_data() -> None:
    target = tiny_target(vocab_size=100 + 8)
    counts = np.zeros(108, dtype=np.int64)
    counts[[3, 9, 100]] = 5, 1234, 1
    assert target.mask_token(8, counts) == 8
    with pytest.raises(TargetError, match=r"mask_token_id 9 \('&'\) occurs 1,234 times in the data"):
        target.mask_token(9, counts)
    assert target.mask_token(counts=counts) == 101  # the first free row but one
    target.tokenizer.mask_token = "&"  # occurs
    assert target.mask_token(counts=counts) == 101
    full = tiny_target()
    with pytest.raises(TargetError, match="all 1 reserved tokens occur in the data"):
        full.mask_token(counts=counts[:100])
    assert full.mask_token(counts=np.zeros(100, dtype=np.int64)) == 3


def test_pad_and_end_tokens_are_no_mask_token() -> None:
    target = tiny_target()
    for end in target.end_tokens():
        with pytest.raises(TargetError, match="ends or fills the texts themselves"):
            target.mask_token(end)
    target.tokenizer.mask_token = target.tokenizer.pad_token  # as some tokenizers have it
    assert target.mask_token() == 3
    target.model.generation_config.eos_token_id = [2, 3]
    with pytest.raises(TargetError, match="no unused token"):
        target.mask_token()


def test_an_unused_row_may_lie_between_the_tokens() -> None:
    """Ids with a gap: as many tokens as the last id says are there, or fewer."""
    target = tiny_target(vocab_size=101)
    tokenizer = target.tokenizer
    vocabulary = {token: id + (id >= 50) for token, id in tokenizer.get_vocab().items()}
    tokenizer.get_vocab = lambda: vocabulary
    assert len(tokenizer) == 100 and target.mask_token() == 50


def test_the_real_model_s_mask_token_is_its_reserved_one() -> None:
    target = real_target()
    assert target.mask_token() == 16  # <empty_output>
    lines = (Path(dflash_ops.__file__).parent / "demo" / "heldout.jsonl").read_text().splitlines()
    counts = np.zeros(target.config.vocab_size, dtype=np.int64)
    for line in lines:
        text = target.tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        np.add.at(counts, target.tokenizer.encode(text), 1)
    assert counts.sum() > 1000 and counts[2] > len(lines)  # its end token
    assert target.mask_token(counts=counts) == 16 and counts[16] == 0
    counts[16] = 1
    other = target.mask_token(counts=counts)
    assert other < 16 and counts[other] == 0 and target.tokenizer.convert_ids_to_tokens(other).startswith("<")


def test_draft_config_takes_the_target_s_sizes() -> None:
    config = tiny_target("qwen3", layers=9).draft_config(2, 8, (1, 4))
    assert (config.num_layers, config.block_size, config.mask_token_id) == (2, 8, 3)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert config.target_layer_ids == (1, 4)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.layer_types, config.sliding_window, config.causal) == (("full_attention",) * 2, None, False)


def test_draft_config_slides_where_it_is_told() -> None:
    target = tiny_target()
    every = target.draft_config(2, 8, (1,), sliding_window=64, causal=True)
    assert (every.layer_types, every.sliding_window, every.causal) == (("sliding_attention",) * 2, 64, True)
    one = target.draft_config(3, 8, (1,), sliding_window=64, sliding_layers=[0, 2])
    assert one.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    with pytest.raises(ValueError, match=r"sliding_layers .0.: a sliding_window is needed"):
        target.draft_config(2, 8, (1,), sliding_layers=[0])
    with pytest.raises(ValueError, match=r"sliding_layers .2.: the drafter has layers 0\.\.1"):
        target.draft_config(2, 8, (1,), sliding_window=64, sliding_layers=[0, 2])


def test_wanted_layers_that_the_target_lacks_are_named() -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids .6.: the target has layers 0\.\.5"):
        tiny_target().draft_config(2, 8, (1, 6))


def config_of(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 64, "num_attention_heads": 4, **values})


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (config_of(), (10_000.0, None)),
        (config_of(rope_parameters=None, rope_theta=5e5), (5e5, None)),
        (config_of(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), (1e6, None)),
        # partial: the drafter turns its whole head
        (
            config_of(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
            (1e4, None),
        ),
        (
            config_of(rope_parameters={**YARN, "partial_rotary_factor": 0.5, "mrope_section": [1, 2]}),
            (1e6, {name: value for name, value in YARN.items() if name != "rope_theta"}),
        ),
        (
            config_of(
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            ),
            (1e6, {"rope_type": "linear", "factor": 8.0}),
        ),
        (config_of(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]}), (1e4, None)),
    ],
)
def test_rope_of_any_config(config: Any, wanted: tuple[float, dict[str, Any] | None]) -> None:
    assert sizes.rope(config) == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (config_of(intermediate_size=100), 100),
        (config_of(ffn_dim=96), 96),
        (config_of(n_inner=None), 256),
        (config_of(intermediate_size=48, num_experts=8), 192),  # one expert's alone
        (config_of(num_local_experts=8, intermediate_size=224), 224),
        (config_of(num_experts=8, moe_intermediate_size=16), 192),
        (config_of(intermediate_size=[64, 80]), 80),
    ],
)
def test_intermediate_size_of_any_config(config: Any, wanted: int) -> None:
    assert sizes.intermediate_size(config) == wanted


def test_other_sizes_of_any_config() -> None:
    assert sizes.num_kv_heads(config_of(num_key_value_heads=2)) == 2
    assert sizes.num_kv_heads(config_of(num_key_value_heads=3)) == 4  # not evenly: all heads
    assert sizes.num_kv_heads(config_of()) == 4
    assert (sizes.head_dim(config_of(head_dim=32)), sizes.head_dim(config_of())) == (32, 16)
    assert (sizes.norm_eps(config_of(layer_norm_epsilon=1e-3)), sizes.norm_eps(config_of())) == (1e-3, 1e-6)
    assert (sizes.max_positions(config_of(max_seq_len=99)), sizes.max_positions(config_of())) == (99, 2048)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert sizes.fixed_positions(config_of(rope_parameters=dynamic, max_position_embeddings=512)) == 512
    assert sizes.fixed_positions(config_of(rope_parameters=YARN)) is None


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no config\.json"):
        load_target(tmp_path / "nowhere")


@pytest.mark.parametrize("lost", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight"])
def test_a_target_with_missing_weights_is_refused(saved: Path, lost: str) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights[lost]
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=rf"no weights, .* for {lost}$"):
        load_target(saved)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    save(tiny_target(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_target(tmp_path)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_weights, "can't be loaded on cpu: .*(incomplete|header|file)"),
        (lose_tokenizer, "can't be loaded on cpu: .*token"),
        (lambda folder: change_config(folder, model_type="imaginary"), "can't be loaded on cpu: .*imaginary"),
        (lambda folder: change_config(folder, vocab_size=200), "can't be"),
        (
            lambda folder: change_config(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0}),
            "can't be loaded on cpu: .*spiral",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be loaded on cpu"),
    ],
)
def test_a_broken_target_is_one_line(saved: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(saved)
    with pytest.raises(TargetError, match=reason) as caught:
        load_target(saved)
    assert "\n" not in str(caught.value) and str(saved) in str(caught.value)


def test_a_target_below_the_home_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert load_target(f"~/{saved.name}").num_layers == 6


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (AssertionError(), "AssertionError"), (KeyError("spiral"), "KeyError 'spiral'")],
)
def test_an_error_s_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_a_saved_target_loads_as_it_was(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    save(target, tmp_path)
    loaded = load_target(tmp_path)
    ids = random_ids(target, 1, 5)
    torch.testing.assert_close(
        document_features(loaded, ids, (1,)), document_features(target, ids, (1,)), rtol=0, atol=0
    )
    assert loaded.end_tokens() == {2}
    assert loaded.tokenizer.encode("a b\n") == target.tokenizer.encode("a b\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] = value
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"its weights are not finite: model\.layers\.2\.mlp\.down_proj\.weight"):
        load_target(saved)


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_drafter_turns_positions_as_its_target_does(family: str, kind: str) -> None:
    """Theta, scaling, and with them the sizes that have no other test: norms' epsilon and the longest text."""
    rope = {**ROPES[kind], "rope_theta": 5e5}
    target = tiny_target(family, rope_parameters=rope, rms_norm_eps=3e-5, max_position_embeddings=777)
    config = target.draft_config(2, 8, (1, 2, 3))
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (5e5, 3e-5, 777)
    assert config.rope_scaling == (None if kind == "plain" else ROPES[kind])
    drafter = DraftModel(config)
    assert {module.eps for module in drafter.modules() if isinstance(module, RMSNorm)} == {3e-5}
    positions = torch.tensor([[0, 1, 2, 63, 200, 776]])
    wanted_cos, wanted_sin = target.model.model.rotary_emb(torch.zeros(1, 6, 32), positions)
    cos, sin = drafter.rotary(positions)
    torch.testing.assert_close(cos[:, 0], wanted_cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin[:, 0], wanted_sin, rtol=1e-6, atol=1e-6)
