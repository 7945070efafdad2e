"""Who runs where: words for devices, and what is refused before anything is loaded."""

import pytest
import torch

from trainer import devices
from trainer.config import ConfigFault, LayoutSection, TrainConfig, load
from trainer.layout import Layout, parse

BASE = b'[target]\npath = "model"\n[data]\ntrain = "train.jsonl"\n[train]\nsteps = 100\n'


def config_of(*sets: str) -> TrainConfig:
    return load(BASE, sets)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["cpu"], [("cpu",)]),
        (["auto"], [("auto",)]),
        (["cuda"], [("cuda:0",)]),
        (["cuda:3"], [("cuda:3",)]),
        (["cuda:0-2"], [("cuda:0",), ("cuda:1",), ("cuda:2",)]),
        (["cuda:7-7"], [("cuda:7",)]),
        (["cuda:0+1"], [("cuda:0", "cuda:1")]),
        (["cuda:5+3+4"], [("cuda:5", "cuda:3", "cuda:4")]),
        (["cuda:0-1", "cuda:3+4", "cpu"], [("cuda:0",), ("cuda:1",), ("cuda:3", "cuda:4"), ("cpu",)]),
        (["cuda:1", "cuda:1"], [("cuda:1",), ("cuda:1",)]),
    ],
)
def test_words_are_workers_in_their_order(words: list[str], meant: list[tuple[str, ...]]) -> None:
    assert list(devices.all_workers(words)) == meant


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("gpu", "'gpu' is none of auto, cpu, cuda:N"),
        ("", "'' is none of"),
        ("cuda:", "'cuda:' is none of"),
        ("cuda:-1", "is none of"),
        ("cuda:0-1+2", "is none of"),
        ("cuda:0+1-2", "is none of"),
        ("cpu:0", "is none of"),
        ("cuda:\u0663", "is none of"),
        ("cuda:0 ", "is none of"),
        ("cuda:4-2", "is no range: write the lower number first"),
        ("cuda:0-5000000000", "at most 1024"),
        ("cuda:2+3+2", "names a GPU twice"),
    ],
)
def test_other_words_are_refused_with_their_key(word: str, why: str) -> None:
    for key in ("targets", "drafters"):
        with pytest.raises(ConfigFault) as caught:
            load(BASE + f"[layout]\n{key} = ['{word}']\n".encode())
        assert caught.value.key == "layout" and str(caught.value).startswith(f"config: layout: {key}: ")
        assert why in str(caught.value)


def test_a_drafter_is_on_one_device() -> None:
    with pytest.raises(ConfigFault, match=r"drafters: 'cuda:0\+1': a drafter is not spread"):
        config_of('layout.drafters=["cuda:0+1"]')
    with pytest.raises(ConfigFault, match=r"layout.drafters: .*at least 1 item"):
        config_of("layout.drafters=[]")


def test_auto_is_the_first_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda:0"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert parse(LayoutSection()) == Layout(targets=((name,),), drafters=(name,))
    section = LayoutSection(targets=("cuda:0-1", "cuda:2+3"), drafters=("cuda:4", "auto"))
    assert parse(section) == Layout((("cuda:0",), ("cuda:1",), ("cuda:2", "cuda:3")), ("cuda:4", "cpu"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["cpu"], "cpu"),
        (["cuda:5", "cuda:6", "cuda:7"], "cuda:5-7"),
        (["cuda:0", "cuda:1", "cuda:4", "cpu", "cuda:2"], "cuda:0-1, cuda:4, cpu, cuda:2"),
        (["cuda:0+1", "cuda:3", "cuda:3"], "cuda:0+1, cuda:3, cuda:3"),
    ],
)
def test_devices_are_said_in_short(names: list[str], said: str) -> None:
    assert devices.listed(names) == said


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (
            ['layout.drafters=["cpu", "cpu"]'],
            "puts 2 drafters on cpu, where one alone is faster and takes less memory: name it once, or set "
            "layout.allow_shared_device = true",
        ),
        (['layout.drafters=["cuda:0-2"]', "train.rows_per_step=2"], "3 drafters, but a step has 2 rows"),
        (["layout.reduce=nccl"], "joins two drafters or more"),
        (["layout.reduce=nccl", 'layout.drafters=["cuda:0", "cpu"]'], "is for GPUs, and a drafter is on the CPU"),
        (
            ["layout.reduce=nccl", 'layout.drafters=["cuda:0", "cuda:0"]', "layout.allow_shared_device=true"],
            "needs a GPU for each drafter, and cuda:0 has more",
        ),
    ],
)
def test_drafters_that_cannot_share_a_step_are_refused_by_the_file_alone(sets: list[str], why: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        config_of(*sets)
    assert why in str(caught.value)


def test_drafters_that_can_are_not() -> None:
    config_of('layout.drafters=["cpu", "cpu"]', "layout.allow_shared_device=true")
    config_of('layout.drafters=["cuda:0-1"]', "layout.reduce=nccl", "train.rows_per_step=2")
    config_of('layout.targets=["cpu", "cpu", "cuda:3+4"]', 'layout.drafters=["cuda:5-7"]')
