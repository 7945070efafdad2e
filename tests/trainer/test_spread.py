"""A target that is spread over several devices. The device "meta" stands for a second GPU where there is none: it has
shapes alone, takes no part in what another device computes, and gives nothing back.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import tiny_model
from tiny_targets import tiny_target
from torch import Tensor

from trainer import target as module
from trainer.byhand import runs_by_hand
from trainer.hooked import Parts
from trainer.spread import plan, shares, spread
from trainer.target import TargetError, TargetModel, load_target

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = (0, 2, 3)


@pytest.mark.parametrize(
    ("layers", "devices", "expected"),
    [
        (4, 1, [0] * 4),
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]),
        (3, 3, [0, 1, 2]),
    ],
)
def test_layers_are_shared_out_evenly(layers: int, devices: int, expected: list[int]) -> None:
    assert shares(layers, devices) == expected


def test_there_is_a_layer_for_each_device() -> None:
    with pytest.raises(TargetError, match="it has 4 layers, which can't be spread over 5 devices"):
        spread(tiny_model("qwen2"), [CPU] * 5)


def test_the_embedding_is_first_and_norm_and_head_are_last() -> None:
    devices = [torch.device("cuda", place) for place in (3, 1)]
    placed = plan(Parts(tiny_model("mistral")), devices)
    names = {"": 0, "lm_head": 1, "model.norm": 1, **{f"model.layers.{layer}": layer // 2 for layer in range(4)}}
    assert placed == {name: devices[place] for name, place in names.items()}


def documents_of(target: TargetModel) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(12)[None] % 7 + 3
    return ids, torch.tensor([[0] * 5 + [1] * 6 + [-1]]), torch.tensor([[*range(5), *range(6), 0]])


def tiny(family: str) -> Any:
    """Models by hand and others, not yet targets."""
    return tiny_target(family, layers=4).model if family == "llama" else tiny_model(family)


BOTH_WAYS = ["llama", "mistral", "gemma3_text", "gpt2"]


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_what_a_layer_needs_is_brought_to_its_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prove", lambda *_: None)  # which reads numbers, and here are none
    model = tiny(family)
    spread(model, [CPU, META])
    target = TargetModel(model)
    assert target.device == META and runs_by_hand(model.config) == (family == "llama")
    where = documents_of(target)
    hidden = target.config.hidden_size
    features, final = target.features_and_final(*where, LAYERS)
    assert (features.device, final.device) == (META, META)
    assert (features.shape, final.shape) == ((1, 12, 3 * hidden), (1, 12, hidden))
    assert target.features(*where, (0, 1)).device == META
    cache = target.new_cache(12)
    step = target.step(where[0][0, :5], cache, LAYERS, last=1)
    step = target.step(where[0][0, 5:6], cache, LAYERS)
    assert (step.logits_QV.device, step.features_BQF.device, cache.length) == (META, META, 6)
    assert target.embedding(where[0]).device == CPU


def test_what_stands_on_the_first_device_is_brought_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last norm of an OPT is named before its layers. From a GPU a tensor comes back; from "meta" none can."""
    monkeypatch.setattr(module, "prove", lambda *_: None)
    model = tiny("opt")
    spread(model, [CPU, META])
    target = TargetModel(model)
    assert target.features(*documents_of(target), (0, 1)).device == META  # all on the first, then brought to the last
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        target.features_and_final(*documents_of(target), (3,))


@pytest.mark.parametrize("family", [*BOTH_WAYS, "opt", "deepseek_v3"])
def test_a_spread_target_is_proved_and_gives_the_same(family: str) -> None:
    """Over one device twice: hooks, copies of the trunk and an untied head, with numbers."""
    whole = TargetModel(tiny(family))
    model = tiny(family)
    spread(model, [CPU, CPU])
    target = TargetModel(model, proved=True)
    where = documents_of(target)
    for ours, theirs in zip(
        target.features_and_final(*where, LAYERS), whole.features_and_final(*where, LAYERS), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(target.features(*where, (0, 1)), whole.features(*where, (0, 1)))
    steps = [one.step(where[0][0, :5], one.new_cache(5), LAYERS) for one in (target, whole)]
    assert torch.equal(steps[0].logits_QV, steps[1].logits_QV)


def test_a_tied_head_gets_weights_of_its_own() -> None:
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wanted = model.lm_head.weight.detach().clone()
    spread(model, [META, CPU])
    assert model.model.embed_tokens.weight.device == META
    assert torch.equal(model.lm_head.weight, wanted) and not model.lm_head.weight.requires_grad


def test_layers_that_share_weights_are_not_spread() -> None:
    model = tiny("llama")
    layers = model.model.layers
    layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(TargetError, match="its layers share weights"):
        spread(model, [CPU, META])


# --- on GPUs ---


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", [*BOTH_WAYS, "opt", "deepseek_v3"])
def test_over_gpus_it_gives_what_a_whole_one_gives(family: str) -> None:
    """Over two, or over the CPU and one. In float32: the kernels of CPU and GPU differ by rounding."""
    first = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    whole, model = TargetModel(tiny(family)), tiny(family)
    spread(model, [torch.device(first), torch.device("cuda:0")])
    target = TargetModel(model, proved=True)
    assert target.device == torch.device("cuda:0")
    where = documents_of(whole)
    for device in ("cpu", "cuda:0"):  # where what it is given lies
        given = tuple(tensor.to(device) for tensor in where)
        assert target.embedding(given[0]).device == torch.device(device)
        caches = target.new_cache(12), whole.new_cache(12)
        pairs = [
            *zip(target.features_and_final(*given, LAYERS), whole.features_and_final(*where, LAYERS), strict=True),
            (target.features(*given, (0, 1)), whole.features(*where, (0, 1))),
        ]
        for begin, end in ((0, 5), (5, 9), (9, 10)):
            ours = target.step(given[0][0, begin:end], caches[0], LAYERS)
            theirs = whole.step(where[0][0, begin:end], caches[1], LAYERS)
            pairs += [(ours.logits_QV, theirs.logits_QV), (ours.features_BQF, theirs.features_BQF)]
        for mine, other in pairs:
            assert mine.device == torch.device("cuda:0")
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.filterwarnings("default")
def test_a_saved_target_is_loaded_over_gpus(tiny_folder: Path) -> None:
    first = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    target = load_target(tiny_folder / "target", [torch.device(first), torch.device("cuda:0")], torch.bfloat16)
    assert {str(weight.device) for weight in target.model.parameters()} == {first, "cuda:0"}
    ids = torch.randint(4, 250, (2, 128))
    positions = torch.arange(128).expand_as(ids)
    whole = load_target(tiny_folder / "target", "cuda:0", torch.bfloat16)
    ours, theirs = (one.features(ids, torch.zeros_like(ids), positions, (1, 3)) for one in (target, whole))
    assert (ours - theirs).float().norm() < 0.05 * theirs.float().norm()
