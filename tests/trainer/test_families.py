"""Targets that are run by their own forward: many families, each against what transformers itself says of it."""

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_families import POSITIONS_ADDED, SUPPORTED, tiny_config, tiny_model
from tiny_targets import document_features, drafter_for, real_target, tiny_target, tiny_tokenizer
from torch import Tensor, nn
from transformers import masking_utils

from trainer import regenerate
from trainer.byhand import ByHand
from trainer.caches import DynamicTargetCache
from trainer.generate import generate
from trainer.hooked import Hooked, Parts
from trainer.refused import check_config
from trainer.speculate import compare, decode_plain, decode_speculative
from trainer.target import TargetError, TargetModel, load_target

LAYERS = (2, 0)
"""Captured, in this order."""


@cache
def target_of(family: str) -> TargetModel:
    """Shared by the tests, which change nothing of it."""
    return TargetModel(tiny_model(family))


def random_ids(rows: int, size: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 100, (rows, size), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own(target: TargetModel, ids_BS: Tensor) -> Any:
    return target.model(ids_BS, output_hidden_states=True, use_cache=False)


def packed_row(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Document ids and positions of a row with these documents, and padding of three."""
    documents = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * 3
    return torch.tensor([documents]), torch.tensor([[place for length in (*lengths, 3) for place in range(length)]])


@pytest.mark.parametrize("family", SUPPORTED)
def test_features_logits_and_embeddings_are_the_model_s_own(family: str) -> None:
    target, ids = target_of(family), random_ids(2, 13)
    assert isinstance(target._runner, Hooked)
    wanted = own(target, ids)
    features = document_features(target, ids, LAYERS)
    expected = torch.cat([wanted.hidden_states[layer + 1] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    assert not features.requires_grad

    positions = torch.arange(13).expand_as(ids)
    both, final = target.features_and_final(ids, torch.zeros_like(ids), positions, LAYERS)
    torch.testing.assert_close(both, features, rtol=1e-4, atol=1e-4)
    logits = torch.nn.functional.linear(final, target.head_weight) * target.logit_scale
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target.logits(final), wanted.logits, rtol=1e-3, atol=1e-3)

    entered, rows = wanted.hidden_states[0], target.embedding(ids)
    if family in POSITIONS_ADDED:  # the same in both rows
        entered, rows = entered[0] - entered[1], rows[0] - rows[1]
    torch.testing.assert_close(rows, entered, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SUPPORTED)
def test_packed_documents_are_as_each_alone(family: str) -> None:
    target, lengths = target_of(family), [9, 1, 6]
    documents, positions = packed_row(lengths)
    ids = random_ids(1, documents.shape[1])
    packed, final = target.features_and_final(ids, documents, positions, LAYERS)
    begin = 0
    for length in lengths:
        alone = own(target, ids[:, begin : begin + length])
        expected = torch.cat([alone.hidden_states[layer + 1] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(packed[:, begin : begin + length], expected, rtol=1e-4, atol=1e-4)
        logits = target.logits(final[:, begin : begin + length])
        torch.testing.assert_close(logits, alone.logits, rtol=1e-3, atol=1e-3)
        begin += length
    assert packed.isfinite().all() and final.isfinite().all()


@pytest.mark.parametrize("family", SUPPORTED)
def test_steps_through_the_cache_are_one_pass(family: str) -> None:
    target, ids = target_of(family), random_ids(1, 20)[0]
    wanted = own(target, ids[None])
    cache = target.new_cache(24)
    steps = [target.step(ids[:9], cache, LAYERS)]
    target.step(torch.full((6,), 7), cache)  # a block that is not accepted
    cache.crop(11)
    cache.crop(9)
    cache.crop(9)
    steps += [target.step(ids[9:10], cache, LAYERS), target.step(ids[10:], cache, LAYERS)]
    torch.testing.assert_close(torch.cat([s.logits_QV for s in steps]), wanted.logits[0], rtol=1e-3, atol=1e-3)
    expected = torch.cat([wanted.hidden_states[layer + 1] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(torch.cat([s.features_BQF for s in steps], 1), expected, rtol=1e-4, atol=1e-4)
    cache.crop(3)
    last = target.step(ids[3:7], cache, last=1)
    assert last.logits_QV.shape == (1, 100) and last.features_BQF.shape == (1, 4, 0)
    torch.testing.assert_close(last.logits_QV[0], wanted.logits[0, 6], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="holds 24 tokens, 25"):
        target.step(ids[:18], cache)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "granite", "cohere2", "gpt_oss", "qwen3_moe", "gpt2"])
def test_decoding_through_a_drafter_equals_plain_decoding(family: str) -> None:
    target = target_of(family)
    torch.manual_seed(1)
    drafter = drafter_for(target, block=5, mask_token_id=99)
    for seed in range(3):
        prompt = random_ids(1, 5 + 6 * seed, seed)[0].tolist()
        plain = decode_plain(target, prompt, 16, frozenset())
        ours = decode_speculative(target, drafter, prompt, 16, frozenset())
        result = compare(
            ours, plain, lambda tokens, prompt=prompt: decode_plain(target, prompt + tokens, 16 - len(tokens))
        )
        assert not result.wrong and result.equal + result.near_ties == len(ours.tokens) == 16


SCALES = {
    "gemma": (32**0.5, 1.0), "gemma2": (32**0.5, 1.0), "gemma3_text": (32**0.5, 1.0), "vaultgemma": (32**0.5, 1.0),
    "granite": (12.0, 1 / 8), "granitemoe": (12.0, 1 / 4), "cohere": (1.0, 0.25), "cohere2": (1.0, 0.25),
    "biogpt": (32**0.5, 1.0), "xglm": (32**0.5, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("family", SUPPORTED)
def test_scales_are_measured_and_reach_the_drafter(family: str) -> None:
    target = target_of(family)
    scales = SCALES.get(family, (1.0, 1.0))
    assert (target.embedding_scale, target.logit_scale) == scales  # exact: a scale that has a name is that
    config = target.draft_config(1, 4, (1,), 99)
    assert (config.embedding_scale, config.logit_scale) == scales


@pytest.mark.parametrize("family", ["granite", "gemma3_text", "cohere2", "mixtral", "qwen2", "gpt_oss"])
def test_half_precision_is_proved_too_and_has_the_same_scales(family: str) -> None:
    target = TargetModel(tiny_model(family).to(torch.bfloat16))
    exact = target_of(family)
    assert (target.embedding_scale, target.logit_scale) == (exact.embedding_scale, exact.logit_scale)
    ids = random_ids(1, 6)
    entered = own(target, ids).hidden_states[0]
    torch.testing.assert_close(target.embedding(ids), entered, rtol=0, atol=0)
    assert document_features(target, ids, LAYERS).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_near_1_is_the_config_s(dtype: torch.dtype) -> None:
    """In half precision it can't be told from 1 by measuring."""
    assert TargetModel(tiny_model("cohere", logit_scale=1.015).to(dtype)).logit_scale == 1.015
    assert TargetModel(tiny_model("cohere", logit_scale=1.0).to(dtype)).logit_scale == 1.0


def test_a_model_that_also_sees_is_taken_by_its_language_model() -> None:
    text = tiny_config("gemma3_text").to_dict()
    eye = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
    model = tiny_model("gemma3", text_config=text, vision_config=eye)
    target = TargetModel(model)
    ids = random_ids(1, 9)
    expected = own(target, ids).hidden_states[3]
    torch.testing.assert_close(document_features(target, ids, (2,)), expected, rtol=1e-4, atol=1e-4)
    assert (target.num_layers, target.config.model_type) == (4, "gemma3_text")


def test_both_ways_are_the_same_on_the_real_model() -> None:
    by_hand = real_target()
    hooked = Hooked(Parts(by_hand.model))
    text = "The drafter proposes a block, the target checks it in one pass."
    ids = torch.tensor([by_hand.tokenizer.encode(text) * 2])
    half = ids.shape[1] // 2
    documents = torch.arange(2).repeat_interleave(half)[None]
    positions = torch.arange(half).repeat(2)[None]
    wanted, final = by_hand.features_and_final(ids, documents, positions, (1, 14, 27))
    with torch.no_grad():
        features, last = hooked.documents(ids, documents, positions, (1, 14, 27), final=True)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(last, final, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(features[:, :half], features[:, half:], rtol=1e-4, atol=1e-2)  # the same text twice


def test_documents_may_come_from_the_host() -> None:
    """As batches have them: who needs their lengths there would wait for the GPU. "meta" stands for a GPU."""
    target = TargetModel(tiny_model("qwen2"))
    target.model.to("meta")
    documents, positions = packed_row([5, 4])
    features, final = target.features_and_final(
        torch.zeros_like(documents).to("meta"), documents, positions.to("meta"), (1, 2)
    )
    assert (features.device.type, final.device.type) == ("meta", "meta")


# --- what a pass leaves alone ---


def test_transformers_builds_no_mask_and_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3_text")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    target = TargetModel(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers builds a mask")

    for name in ("sdpa", "eager"):
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    ids = random_ids(1, 9)
    document_features(target, ids, (1,))
    target.step(ids[0], target.new_cache(16), (1,))
    with pytest.raises(AssertionError, match="builds a mask"):
        model(ids, use_cache=False)
    assert model.config.sliding_window == 4 and len(model.model.layers) == 4
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt2"])
def test_a_pass_stops_after_the_last_captured_layer(family: str) -> None:
    target = TargetModel(tiny_model(family))
    layers = target._runner.parts.layers
    ran: list[int] = []
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    document_features(target, random_ids(1, 5), (1, 0))
    assert ran == [0, 1]
    document_features(target, random_ids(1, 5), (3,))
    assert ran == [0, 1, 0, 1, 2, 3]


def test_threads_do_not_hear_each_other() -> None:
    target = target_of("mistral")
    rows = [random_ids(1, 40, seed) for seed in range(4)]
    wanted = [document_features(target, ids, (seed % 3, 3)) for seed, ids in enumerate(rows)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(12):
            if not torch.equal(document_features(target, rows[seed], (seed % 3, 3)), wanted[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- refused ---


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("t5", {}, "have an encoder"),
        ("bart", {}, "have an encoder"),
        ("mamba", {}, "layers of kind (linear_attention|mamba); only full"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "layers of kind conv; only full and sliding"),
        ("qwen3_next", {}, "layers of kind linear_attention"),
        ("llama4_text", {}, "layers of kind chunked_attention"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "bounds its logits"),
        ("doge", {}, r"that a rule of its own picks \(keep_window_size\)"),
    ],
)
def test_a_config_that_says_so_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        check_config(tiny_config(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, "bounds its logits"),
        ("phi", {}, "head has a bias"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}, "embedding is 16 wide, its hidden states are 32"),
        ("bloom", {}, "what enters its first layer is not a token's embedding times a constant"),
        ("falcon", {"alibi": True, "new_decoder_architecture": False}, "does not take our attention mask: ValueError"),
        ("rwkv", {}, "a row packed from two documents gives other features"),
        ("bert", {"is_decoder": True}, "no list of 4 decoder layers"),
    ],
)
def test_a_model_that_shows_so_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TargetError, match=reason) as caught:
        TargetModel(tiny_model(family, **changes))
    assert "\n" not in str(caught.value)


class Leaking(nn.Module):
    """A sublayer with a short convolution: each token takes something of the one before it in the row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def leaks(model: Any) -> None:
    model.model.layers[2].mlp = Leaking(model.model.layers[2].mlp)


def doubles(model: Any) -> None:
    """Its logits are scaled for some tokens alone."""
    model.lm_head.register_forward_hook(lambda _module, _given, logits: logits * (1 + (logits > 0)))


def shifts(model: Any) -> None:
    """Its embeddings get something that each token has for itself."""
    model.model.layers[0].register_forward_pre_hook(lambda _module, given: (given[0] + given[0].pow(2), *given[1:]))


class InPlace(nn.Module):
    """A layer that writes into the states it is given: what a hook before it has kept is then its own output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        output = self.inner(hidden, *given, **named)
        return hidden.copy_(output[0] if isinstance(output, tuple) else output)


def writes_over(model: Any) -> None:
    model.model.layers[3] = InPlace(model.model.layers[3])


def sees_all(model: Any) -> None:
    """A layer lets its tokens see everything before them, whatever the mask."""
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *given, **named: plain(*given, **{**named, "attention_mask": None})


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (leaks, "a row packed from two documents gives other features"),
        (sees_all, "a row packed from two documents gives other features"),
        (doubles, "its logits are not"),
        (shifts, "what enters its first layer"),
        (writes_over, "its first layers alone give other features than the whole of it"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_not_what_it_says_is_refused(
    break_it: Callable[[Any], None], reason: str, dtype: torch.dtype
) -> None:
    model = tiny_model("mistral", sliding_window=None).to(dtype)
    TargetModel(model)
    break_it(model)
    with pytest.raises(TargetError, match=reason):
        TargetModel(model)


@pytest.mark.parametrize("break_it", [leaks, doubles, shifts])
def test_what_is_run_by_hand_is_proved_as_well(break_it: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    assert isinstance(TargetModel(model, proved=True)._runner, ByHand)
    break_it(model)
    with pytest.raises(TargetError):
        TargetModel(model, proved=True)


def test_every_target_that_is_loaded_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TargetError("not proved")

    monkeypatch.setattr("trainer.target.prove", refuse)
    for family in ("llama", "qwen3", "mistral"):
        changes: dict[str, Any] = {} if family == "mistral" else {"layer_types": ["full_attention"] * 4}
        with pytest.raises(TargetError, match="not proved"):
            load_target(saved(family, tmp_path / family, **changes))


def test_nothing_to_forget_is_not_asked_for() -> None:
    """transformers 5.8 would take it for: keep nothing."""
    cache = DynamicTargetCache(4)
    cache.commit(3)
    asked: list[int] = []
    cache.inner = SimpleNamespace(crop=asked.append)
    cache.crop(3)
    cache.crop(1)
    assert asked == [-2] and cache.length == 1


def test_a_window_that_no_layer_uses_is_none() -> None:
    """Some configs carry one along. What counts is what the model does."""
    model = tiny_model("llama", layer_types=["sliding_attention"] * 4, sliding_window=4)
    target = TargetModel(model)  # Llama has no windows: its own forward sees everything
    assert isinstance(target._runner, Hooked) and target._runner.window is None
    ids = random_ids(1, 13)
    expected = own(target, ids).hidden_states[3]
    torch.testing.assert_close(document_features(target, ids, (2,)), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_can_not_be_decoded_step_by_step_still_gives_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, count: int) -> None:
        """Forgets nothing."""

    monkeypatch.setattr("trainer.caches.DynamicTargetCache.forget", broken)
    target = TargetModel(tiny_model("mistral"))
    document_features(target, random_ids(1, 5), (1,))
    with pytest.raises(TargetError, match="mistral models can't be decoded step by step: "):
        target.new_cache(9)


def test_rows_beyond_where_rope_changes_are_refused() -> None:
    """longrope takes other angles for a whole row as soon as one of its documents is long."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    target = TargetModel(tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=16))
    assert target.longest == 16
    document_features(target, random_ids(1, 16), (1,))
    with pytest.raises(TargetError, match=r"rows of 17 tokens: beyond 16 .*data\.row_tokens"):
        document_features(target, random_ids(1, 17), (1,))
    with pytest.raises(ValueError, match="the target has 16"):
        decode_plain(target, [5] * 10, 8)
    assert target.draft_config(1, 4, (1,), 99).rope_scaling is None


def test_many_at_once_are_decoded_by_hand_alone() -> None:
    with pytest.raises(TargetError, match="mistral models can't be run by hand; only llama and qwen3 can"):
        next(generate(target_of("mistral"), [[5]], 2, frozenset(), slots=1))


def test_regenerate_refuses_them_before_the_weights(tmp_path: Path) -> None:
    tiny_config("mistral").save_pretrained(tmp_path / "target")
    with pytest.raises(TargetError, match="only llama and qwen3 models can do this, and it is a mistral"):
        regenerate.main(f"--target {tmp_path}/target --self-prompts 1 --out {tmp_path}/out.jsonl".split())
    assert [file.name for file in tmp_path.iterdir()] == ["target"]


# --- loading ---


def saved(family: str, folder: Path, **changes: Any) -> Path:
    tokenizer = tiny_tokenizer()
    tiny_model(family, vocab_size=len(tokenizer) + 4, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_saved_target_loads_and_is_proved(family: str, tmp_path: Path) -> None:
    target = load_target(saved(family, tmp_path))
    ids = random_ids(1, 9)
    torch.testing.assert_close(
        document_features(target, ids, (2,)), own(target, ids).hidden_states[3], rtol=1e-4, atol=1e-4
    )
    assert target.mask_token() == len(target.tokenizer) and target.end_tokens() == {2}


@pytest.mark.parametrize(
    ("family", "by_hand", "reason"),
    [
        ("mistral", True, "only llama and qwen3 models can do this, and it is a mistral"),
        ("mamba", False, "layers of kind"),
        ("t5", False, "have an encoder"),
        ("clip_text_model", False, "no causal language model of the family clip_text_model"),
    ],
)
def test_what_the_config_tells_is_refused_before_the_weights(
    family: str, by_hand: bool, reason: str, tmp_path: Path
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=reason) as caught:
        load_target(tmp_path, by_hand=by_hand)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model, tokenizer = tiny_model("mistral"), tiny_tokenizer()
    assert len(tokenizer) == 100
    TargetModel(model, tokenizer)
    gapped = tiny_tokenizer()
    gapped.get_vocab = lambda: {"far": 100}
    with pytest.raises(TargetError, match=r"tokenizer gives the id 100, its embedding has only 100 rows"):
        TargetModel(model, gapped)
    tokenizer.add_tokens(["more"])
    with pytest.raises(TargetError, match=r"tokenizer has 101 tokens, its embedding only 100 rows"):
        TargetModel(model, tokenizer)


def test_a_vocabulary_of_several_sizes_is_refused() -> None:
    target = tiny_target()
    target.model.config.vocab_size += 1
    with pytest.raises(TargetError, match="the config says 101, the embedding has 100 rows, the head 100"):
        TargetModel(target.model)
