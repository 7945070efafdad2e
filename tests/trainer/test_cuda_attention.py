"""On a GPU: the compiled drafter on flex attention against the same in float64 with the mask written out.

The float64 path is held to a plain second one in test_parity.py. Skipped without a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from tiny_drafters import CONFIG, Given, drafter
from torch import Tensor

from trainer.blocks import dense_mask, tile_mask, whole_tiles
from trainer.draft import DraftModel
from trainer.draft_config import FULL, SLIDING, DraftConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(600),  # the kernels are compiled
    # torch's compiler and its kernels warn about themselves.
    pytest.mark.filterwarnings("default"),
]

ROW = 512
ANCHORS = [0, 3, 60, 99, 100, 131, 200, 279, 280, 300, 383, 384, 420, 458, 459, 281, 101, 330, 7, 60]
"""In documents of 100, 30, 150 and 180 tokens: at borders, at tiles' borders, unsorted, one twice."""

LAYERS = replace(
    CONFIG,
    hidden_size=64,
    intermediate_size=96,
    head_dim=64,  # what the kernels are made for
    num_heads=4,
    num_kv_heads=2,
    layer_types=(SLIDING, FULL),
    sliding_window=96,
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Each case compiles its own shapes: the limit on recompilations is not theirs together."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def given_for(config: DraftConfig, dtype: torch.dtype) -> Given:
    """The row, its blocks filled up to whole tiles of queries."""
    kept = torch.tensor([[n != 4 for n in range(len(ANCHORS))]])
    anchors, keep = whole_tiles(torch.tensor([ANCHORS]), kept, config.block_size)
    return Given([100, 30, 150, 180], anchors[0].tolist(), ROW, config=config, dtype=dtype, keep=keep[0].tolist())


def run(model: Callable[..., Tensor], given: Given, device: str, *, flex: bool) -> Tensor:
    """The training forward on a device, [N, T, H]."""
    place = torch.device(device)
    blocks = given.blocks()
    embeds = given.embeds(blocks).to(place)
    blocks = blocks.to(place)
    make = tile_mask if flex else dense_mask
    masks = tuple(make(blocks, ROW, sight) for sight in given.config.sights)
    hidden = model(given.features.to(place), embeds, given.positions.to(place), blocks.positions_BQ, masks)
    return hidden[0].unflatten(0, (len(given.anchors), -1))


def backward(model: DraftModel, hidden: Tensor, given: Given) -> list[Tensor]:
    """The gradients of some function of the kept blocks that weighs every number differently."""
    kept = hidden[given.keep[0].to(hidden.device)].double()
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (kept * weights.to(kept.device)).sum().backward()
    return [cast(Tensor, parameter.grad).double().cpu() for parameter in model.parameters()]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("block", "causal", "dtype"),
    [
        (4, None, torch.float32),
        (10, None, torch.float32),
        (16, None, torch.float32),
        (16, False, torch.float32),
        (16, True, torch.float32),
        (16, None, torch.bfloat16),
    ],
    ids=str,
)
def test_flex_attention_on_the_gpu_is_the_dense_float64_path(
    block: int, causal: bool | None, dtype: torch.dtype
) -> None:
    """Forward and backward, then: what lies from an anchor on changes no bit of its block."""
    config = replace(LAYERS, block_size=block, causal=causal)
    exact_model = drafter(config).requires_grad_(True)
    exact_given = given_for(config, torch.float64)
    exact = run(exact_model, exact_given, "cpu", flex=False)
    exact_grads = backward(exact_model, exact, exact_given)

    model = drafter(config, torch.float32).cuda().requires_grad_(True)
    given = given_for(config, torch.float32)
    compiled = cast(Callable[..., Tensor], torch.compile(model, dynamic=False, fullgraph=True))
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = run(compiled, given, "cuda", flex=True)
    grads = backward(model, hidden, given)
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    assert torch.isfinite(hidden).all()
    assert error(hidden.detach(), exact.detach()) < allowed
    names = [name for name, _ in model.named_parameters()]
    for name, found, expected in zip(names, grads, exact_grads, strict=True):
        assert error(found, expected) < allowed, name

    kept = given.keep[0].tolist()
    for anchor in (60, 131, 384):
        given.features[0, anchor:] += 100.0
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            after = run(compiled, given, "cuda", flex=True)
        changed = (after != hidden).flatten(1).any(1).tolist()
        starts = [0, 100, 130, 280]
        for n, place in enumerate(given.anchors):
            start = max(start for start in starts if start <= place)
            # Its full layer sees all of its document: whatever changed before it, from `anchor` on, is seen.
            assert changed[n] == (kept[n] and max(anchor, start) < place), (anchor, place)
        given = given_for(config, torch.float32)
