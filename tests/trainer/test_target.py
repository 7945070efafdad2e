"""The target: its hand-run layers against the model's own forward, documents, the cache, mask tokens, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_targets import document_features, real_model_folder, tiny_target
from torch import nn

from trainer.masks import document_mask
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


def test_features_of_the_real_model() -> None:
    target = load_target(real_model_folder())
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


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 4))
def test_the_mask_stays_inside_the_documents(lengths: list[int], padding: int) -> None:
    documents = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    mask = document_mask(torch.tensor([documents]))[0, 0]
    for query, own in enumerate(documents):
        seen = [key for key in range(len(documents)) if mask[query, key]]
        assert seen == [key for key in range(query + 1) if documents[key] == own]


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
    with pytest.raises(TargetError, match="give mask_token_id"):
        target.mask_token()


def test_the_real_model_s_mask_token_is_its_reserved_one() -> None:
    assert load_target(real_model_folder()).mask_token() == 16  # <empty_output>


def test_draft_config_takes_the_target_s_sizes() -> None:
    config = tiny_target("qwen3", layers=9).draft_config(2, 8, (1, 4))
    assert (config.num_layers, config.block_size, config.mask_token_id) == (2, 8, 3)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert config.target_layer_ids == (1, 4)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


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
