"""Who runs where: words for devices, and what is refused before anything is loaded."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_toml

from trainer import devices
from trainer.config import ConfigFault, LayoutSection, TrainConfig, load
from trainer.layout import Layout, check_layout, parse
from trainer.memory import MIB
from trainer.start import TrainingError
from trainer.target import TargetError

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
        assert caught.value.key == f"layout.{key}" and str(caught.value).startswith(f"config: layout.{key}: ")
        assert why in str(caught.value)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [("0", "0"), ("true", "True"), ("[1, 2]", "1"), ("['cpu', 1]", "1"), ("[]", "[]"), ("{a = 1}", "{'a': 1}")],
)
def test_what_is_no_word_is_refused_with_the_words_there_are(value: str, wrong: str) -> None:
    for key in ("targets", "drafters"):
        with pytest.raises(ConfigFault) as caught:
            config_of(f"layout.{key}={value}")
        words = "auto, cpu, cuda:N, cuda:0-4 (a worker on each), cuda:0+1 (one on both)"
        assert str(caught.value) == f"config: layout.{key}: {wrong} is none of {words}"


def test_a_drafter_is_on_one_device() -> None:
    with pytest.raises(ConfigFault, match=r"layout\.drafters: 'cuda:0\+1': a drafter is not spread"):
        config_of('layout.drafters=["cuda:0+1"]')


def test_one_word_needs_no_list() -> None:
    layout = config_of("layout.targets=cuda:0-4", "layout.drafters=cuda:5").layout
    assert (layout.targets, layout.drafters) == (("cuda:0-4",), ("cuda:5",))


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
        (["layout.reduce=nccl", 'layout.drafters=["cpu"]'], "is for GPUs, and a drafter is on the CPU"),
        (['layout.drafters=["cuda:0", "cpu"]'], "layout.drafters mixes CPU and GPUs, whose results differ by rounding"),
        (['layout.targets=["cpu", "cuda:1"]'], "layout.targets mixes CPU and GPUs"),
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
    config_of('layout.targets=["cuda:0", "cuda:0", "cuda:3+4"]', 'layout.drafters=["cuda:5-7"]')
    config_of('layout.targets=["cpu", "cpu"]', 'layout.drafters=["cuda:0"]')


# --- on a machine ---


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with GPUs, so many MiB free on each."""

    def made(*free: int, kept: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index] * MIB, 10**12))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept * MIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    return made


def checked(folder: Path, *sets: str) -> list[str]:
    text = tiny_toml(folder / "target", "none.jsonl", data__row_tokens=128, layout__targets=["auto"])
    config = load(text.encode(), ['layout.drafters=["auto"]', *sets])
    return check_layout(config, parse(config.layout))


@pytest.mark.parametrize(
    ("gpus", "sets", "why"),
    [
        (4, ['layout.targets=["cuda:3-5"]'], "layout.targets names cuda:4: torch sees 4 GPUs, cuda:0 to cuda:3"),
        (1, ['layout.targets=["cuda:0+1"]'], "layout.targets names cuda:1: torch sees cuda:0 alone"),
        (0, ['layout.drafters=["cuda:77"]'], "layout.drafters names cuda:77: torch sees no GPU"),
        (2, ['layout.drafters=["auto", "cuda:0"]'], "puts 2 drafters on cuda:0"),
        (0, ['layout.drafters=["auto", "cpu"]'], "puts 2 drafters on cpu"),
        (2, ['layout.targets=["auto", "cpu"]'], "layout.targets mixes CPU and GPUs"),
        (1, ["data.row_tokens=96"], "data.row_tokens 96: on a GPU it must be a multiple of 128"),
        (
            8,
            ['layout.targets=["cuda:0+1+2+3+4+5+6"]', 'layout.drafters=["cuda:7"]'],
            "it has 6 layers, which can't be spread over 7 devices",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_refused(
    gpus: int, sets: list[str], why: str, tiny_folder: Path, machine: Callable[..., None]
) -> None:
    machine(*[20_000] * gpus)
    with pytest.raises((TrainingError, TargetError), match=re.escape(why)):
        checked(tiny_folder, *sets)


def test_too_little_memory_is_refused_part_by_part(tiny_folder: Path, machine: Callable[..., None]) -> None:
    split = [
        'layout.targets=["cuda:0"]',
        'layout.drafters=["cuda:1"]',
        "train.anchors=65536",
        "train.chunk_blocks=8192",
    ]
    machine(20_000, 200)
    with pytest.raises(TrainingError) as caught:
        checked(tiny_folder, *split)
    told = re.fullmatch(
        r"cuda:1 has 200 MiB free and by estimate ([\d,]+) are needed there \((.*)\): lower train.micro_rows, "
        r"train.chunk_blocks, train.anchors or layout.depth; layout.check_memory = false tries all the same",
        str(caught.value),
    )
    assert told is not None and "target's head 0, drafter's weights, float32 0, AdamW's moments" in told[2]
    parts = [int(number.replace(",", "")) for number in re.findall(r" ([\d,]*\d)(?=, |$)", told[2])]
    assert sum(parts) == pytest.approx(int(told[1].replace(",", "")), abs=len(parts))
    assert checked(tiny_folder, *split, "layout.check_memory=false") == []
    machine(20_000, 200, kept=20_000)  # torch's own, which it would give out again
    assert checked(tiny_folder, *split) == []
    needs = int(told[1].replace(",", ""))
    machine(20_000, needs - 10)
    with pytest.raises(TrainingError):
        checked(tiny_folder, *split)
    machine(20_000, needs + 10)
    (line,) = checked(tiny_folder, *split)
    assert line.startswith(
        f"cuda:1 will be almost full: {needs:,} MiB of {needs + 10:,} by estimate; if not enough: lower"
    )


def test_gpus_that_do_nothing_are_said(tiny_folder: Path, machine: Callable[..., None]) -> None:
    machine(*[20_000] * 4)
    where = "layout.targets and layout.drafters say who runs where"
    assert checked(tiny_folder) == [f"3 of 4 GPUs do nothing (cuda:1-3): {where}"]
    assert checked(tiny_folder, 'layout.targets=["cuda:0-2"]', 'layout.drafters=["cuda:3"]') == []
    assert checked(tiny_folder, 'layout.targets=["cuda:0+2"]', 'layout.drafters=["cuda:3"]') == [
        f"1 of 4 GPUs do nothing (cuda:1): {where}"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.filterwarnings("default")
def test_what_others_have_of_a_gpu_counts(tiny_folder: Path) -> None:
    """As another process would, and torch's unused memory is its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("it fills the GPU, which other processes' tests need: pytest -n 0")
    sets = ["train.anchors=131072", "train.chunk_blocks=65536"]
    assert not [line for line in checked(tiny_folder, *sets) if "cuda:0 will" in line]
    free = torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)
    taken = torch.empty(free - 2**30, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(TrainingError, match=r"cuda:0 has [\d,]+ MiB free and by estimate [\d,]+ are needed there"):
        checked(tiny_folder, *sets)
    del taken
    checked(tiny_folder, *sets)


def test_on_the_cpu_nothing_is_counted(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine()
    assert checked(tmp_path) == []  # where there is no target to read
