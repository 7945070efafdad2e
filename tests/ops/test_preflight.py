"""What a start refuses for lack of: GPUs, disk, shared memory. And what it keeps of where the code came from."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in
from stand_in import LocalBox

import trainer
from dflash_ops.remote import answers, environment, gpuproof, preflight, processes, rundir
from dflash_ops.remote.gpuproof import Card, Picture
from trainer.__main__ import check

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[LocalBox]:
    with stand_in.local_box(tmp_path, windows=False) as box:
        yield box


def refused(path: Path, resumed: Path | None = None, **more: Any) -> answers.Fault:
    with pytest.raises(answers.Fault) as caught:
        preflight.check(path, {**stand_in.start_parameters(path, "a", ""), **more}, resumed)
    assert caught.value.parts["next"]
    return caught.value


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_FREE_SECONDS", 0.0)


def cards(monkeypatch: pytest.MonkeyPatch, *used: float, charges: tuple[tuple[str, int, float], ...] = ()) -> None:
    every = tuple(Card(index, f"GPU-{index}", "x", mib, 24576.0) for index, mib in enumerate(used))
    monkeypatch.setattr(gpuproof, "look", lambda: Picture(every, charges))


def test_gpus_must_be_there_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**more: Any) -> list[str]:
        return preflight.check(tmp_path, stand_in.start_parameters(tmp_path, "a", "", **more), None)

    cards(monkeypatch, 9.0, 9.0)
    assert check(gpus=[0, 1]) == check(gpus=[]) == check(gpus=None) == []
    fault = refused(tmp_path, gpus=[1, 3])
    assert (fault.kind, fault.parts["what"], "0, 1" in fault.parts["why"]) == ("preflight", "there is no GPU 3", True)
    # A process of this container that is in no run: also where no list of GPUs is given.
    cards(monkeypatch, 9.0, 1009.0, charges=(("GPU-1", os.getpid(), 1000.0),))
    assert check(gpus=[0]) == []
    for gpus in ([1], None):
        fault = refused(tmp_path, gpus=gpus)
        assert fault.kind == "busy" and f"process {os.getpid()} (" in fault.parts["why"]
    assert check(gpus=[1], share_gpus=True) == []
    # A dead one, whose child keeps the memory.
    cards(monkeypatch, 1009.0, charges=(("GPU-0", 2**22 + 5, 1000.0),))
    assert "gone" in refused(tmp_path, gpus=[0]).parts["why"]
    # What was freed a moment ago is waited for.
    monkeypatch.setattr(preflight, "_FREE_SECONDS", 5.0)
    pictures = [Picture((Card(0, "GPU-0", "x", mib, 24576.0),), ()) for mib in (0.0, 9000.0, 9000.0)]
    monkeypatch.setattr(gpuproof, "look", pictures.pop)
    assert check(gpus=[0]) == [] and not pictures
    monkeypatch.setattr(preflight, "_FREE_SECONDS", 0.0)
    # Somebody out of sight.
    cards(monkeypatch, 20000.0)
    fault = refused(tmp_path, gpus=[0])
    assert fault.kind == "busy" and "by nobody in this container" in fault.parts["why"]
    assert check(gpus=None) == check(gpus=[0], share_gpus=True) == []


def test_a_sick_nvidia_smi_is_said_and_a_missing_one_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = stand_in.start_parameters(tmp_path, "a", "", gpus=[0])
    monkeypatch.setattr(gpuproof, "look", lambda: Picture(why="Failed to initialize NVML"))
    assert "NVML" in refused(tmp_path, gpus=[0]).parts["why"]
    monkeypatch.setattr(gpuproof, "look", lambda: Picture(why="nvidia-smi: not there", missing=True))
    assert preflight.check(tmp_path, parameters, None) == ["GPUs were not checked: nvidia-smi: not there"]


def test_the_runs_own_processes_are_no_strangers(
    box: LocalBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = stand_in.fake_gpu(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = box.start("a", f"gpu = {card}")
    trainer = box.trainer(folder)
    assert gpuproof.look().charges == (("GPU-1", trainer, 1000.0),)
    assert box.try_start("b")[0] == 0  # without a list of GPUs nothing is claimed
    code, reply = box.try_start("c", gpus=[5])
    assert (code, reply["what"]) == (6, "there is no GPU 5")
    assert [rundir.name_of(it.name) for it in rundir.folders(box.path)] == ["a", "b"]


def test_room_for_two_checkpoints_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 << 30

    def usage(path: object) -> Usage:
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    parameters = stand_in.start_parameters(tmp_path, "a", "", gpus=[])
    del parameters["room_bytes"]
    assert preflight.check(tmp_path, parameters, None) == []
    free = 1 << 29
    fault = refused(tmp_path, gpus=[], room_bytes=preflight.ROOM_BYTES)
    assert (fault.kind, fault.parts["why"]) == ("preflight", "512 MiB are free, 1024 needed")
    # As large as those of the run that is gone on from, or of the last of the name.
    earlier = tmp_path / "runs" / "a-20261129-120000-abcd"
    checkpoint = earlier / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    (earlier / "run.json").write_text("{}")
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(300 << 20)
    assert "two checkpoints of 300 MiB" in refused(tmp_path, gpus=[]).parts["why"]
    assert "two checkpoints of 300 MiB" in refused(tmp_path, earlier, name="b", gpus=[]).parts["why"]
    assert preflight.check(tmp_path, stand_in.start_parameters(tmp_path, "b", "", gpus=[]), None) == []


def test_shared_memory_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 0.0, 0.0)

    def usage(path: object) -> Usage:
        return Usage(0, 0, 64 << 20 if path == preflight._SHM else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    fault = refused(tmp_path, gpus=[0, 1])
    assert (fault.parts["what"], fault.parts["why"]) == (
        "/dev/shm is too small",
        "64 MiB are free, 128 needed for 2 GPUs",
    )
    for gpus in ([0], []):
        assert preflight.check(tmp_path, stand_in.start_parameters(tmp_path, "a", "", gpus=gpus), None) == []


def test_a_run_keeps_where_its_code_came_from(box: LocalBox) -> None:
    manifest = {"commit": "0123456789abcdef", "dirty": True, "files": []}
    (box.path / "releases" / stand_in.RELEASE / ".dflash-manifest.json").write_text(json.dumps(manifest))
    folder = box.start("a", "steps = 1", set=["a=1"], env="TOKEN=hush\n", env_names=["TOKEN"])
    run = rundir.read_json(folder / "run.json")
    assert run is not None
    assert run["git"] == {"commit": "0123456789abcdef", "dirty": True}
    assert (run["settings"], run["env_names"], run["release"]) == (["a=1"], ["TOKEN"], stand_in.RELEASE)
    assert (folder / "config.toml").read_text() == "steps = 1"
    box.ended(folder)


def test_a_repeated_run_is_the_earlier_one_but_for_what_is_said(box: LocalBox) -> None:
    first = box.start(
        "a",
        "steps = 3",
        set=["x=1"],
        env="TOKEN=hush\n",
        env_names=["TOKEN"],
        restart=2,
        stall_minutes=7,
        notify=["http://127.0.0.1:9/"],
    )
    box.ended(first)
    again = box.start("a", None, like=first.name, set=["x=2"])  # type: ignore[arg-type]
    box.ended(again)
    run = rundir.read_json(again / "run.json")
    assert run is not None
    assert (run["settings"], run["env_names"], run["resumes"]) == (["x=1", "x=2"], ["TOKEN"], first.name)
    assert (run["restart"], run["stall_minutes"], run["notified"], run["like"]) == (2, 7, 1, first.name)
    for name in ("config.toml", "env", "notify"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    assert (again / "log").read_text().startswith("resumed at step 3\n")
    # The record of an earlier version has the settings in its command alone.
    old = {name: value for name, value in run.items() if name in ("run_id", "command", "gpus", "env_names", "resumes")}
    (again / "run.json").write_text(json.dumps(old))
    third = box.start("a", None, like="a")  # type: ignore[arg-type]
    box.ended(third)
    assert (rundir.read_json(third / "run.json") or {})["settings"] == ["x=1", "x=2"]
    assert box.try_start("a", None, like="nobody")[0] == 8  # type: ignore[arg-type]
    assert not [it for it in processes.table() if b"hush" in processes.environment(it.pid).values()]


def config_text(target: str, train: str, more: str = "") -> str:
    return f'{more}[target]\npath = "{target}"\n[data]\ntrain = "{train}"\n[train]\nsteps = 5\n'


@pytest.fixture
def real(box: LocalBox) -> LocalBox:
    """With the real trainer in the release, which alone knows what a config says."""
    package = box.path / "releases" / stand_in.RELEASE / "trainer"
    shutil.rmtree(package)
    package.symlink_to(Path(trainer.__file__).parent)
    return box


def test_a_start_refuses_paths_that_are_not_there(real: LocalBox) -> None:
    """Before anything has changed; --set and a relative path count as for the trainer."""
    release = real.path / "releases" / stand_in.RELEASE
    text = config_text("./models/none", "/home/me/chats.jsonl")
    code, reply = real.try_start("a", text, set=["data.heldout=data/none.jsonl", f"init_from={real.path}/shared/d/no"])
    assert (code, reply["what"]) == (6, "mine.toml names what the container lacks")
    for key, place in (
        ("target.path", f"{release}/./models/none"),
        ("data.train", "/home/me/chats.jsonl"),
        ("data.heldout", f"{release}/data/none.jsonl"),
        ("init_from", f"{real.path}/shared/d/no"),
    ):
        assert f"{key}: no {place}" in reply["why"]
    chats = (
        f"dflash-ops put /home/me/chats.jsonl shared/data/, then --set data.train={real.path}/shared/data/chats.jsonl"
    )
    assert chats in reply["next"] and "dflash-ops put no shared/d/, or correct init_from" in reply["next"]
    assert list((real.path / "runs").iterdir()) == []
    # What --set says goes before the file.
    (release / "here.jsonl").touch()
    code, reply = real.try_start("a", text, set=["data.train=here.jsonl"])
    assert (code, reply["why"]) == (6, f"target.path: no {release}/./models/none")


def as_the_check_tells(file: Path) -> dict[str, Any]:
    """The config as the real trainer's check tells it, without a process for it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert check(file, [], as_json=True) == 0
    return json.loads(said.getvalue())


def test_what_is_there_or_may_be_a_hub_name_is_not_refused(real: LocalBox, tmp_path: Path) -> None:
    release = real.path / "releases" / stand_in.RELEASE
    model, file = release / "models" / "mine", tmp_path / "c.toml"
    (release / "data").mkdir()
    (release / "data" / "x.jsonl").touch()

    def lacks(target: str, train: str = "data/x.jsonl", top: str = "", resumed: Path | None = None, **more: Any) -> str:
        file.write_text(config_text(target, train, top))
        parameters = stand_in.start_parameters(real.path, "a", "", **more)
        try:
            preflight.check_named(as_the_check_tells(file), release, parameters, resumed)
        except answers.Fault as fault:
            return fault.parts["why"]
        return ""

    file.write_text(config_text("gpt2", "data/x.jsonl", 'init_from = "drafter"\n'))
    told = preflight.checked_config(file, release, sys.executable, stand_in.start_parameters(real.path, "a", ""))
    assert told == as_the_check_tells(file)
    assert lacks("Qwen/Qwen3-4B") == lacks("gpt2") == lacks("models/mine") == ""
    assert lacks("a/b/c") == f"target.path: no {release}/a/b/c"
    model.mkdir(parents=True)
    assert lacks("models/mine") == f"target.path: no config.json in {model}"
    (model / "config.json").touch()
    assert lacks("models/mine") == lacks("./models/mine") == lacks(str(model), "data") == ""
    assert "data.train: no " in lacks("gpt2", "data/y.jsonl")
    # Another home is in the trainer's environment alone.
    assert "target.path: no " in lacks("~/no-such-model")
    assert lacks("~/no-such-model", env_names=["HOME"]) == ""
    # A drafter to begin with, where nothing goes before it.
    assert lacks("gpt2", top='init_from = "drafter"\n') == f"init_from: no {release}/drafter"
    assert lacks("gpt2", top='init_from = "drafter"\n', init_from="x") == ""
    assert lacks("gpt2", top='init_from = "drafter"\n', resumed=tmp_path) == ""


def test_a_trainer_that_tells_nothing_of_its_config_starts(box: LocalBox) -> None:
    """With a note of it; and --init-from is looked for where the trainer looks."""
    (box.path / "releases" / stand_in.RELEASE / "drafter").mkdir()
    code, reply = box.try_start("a", "steps = 1\ncheck_says = [1]", init_from="drafter")
    assert (code, reply["notes"]) == (0, [preflight._NOT_CHECKED])
    assert "not checked" in reply["notes"][0]
    box.ended(box.path / "runs" / reply["facts"]["run_id"])


@pytest.mark.parametrize(
    ("layout", "cuda", "gpus", "why"),
    [
        ({"targets": ["auto"], "drafters": ["auto"]}, "none", [0, 1], "torch of python3 is built for the CPU alone"),
        ({"targets": ["cpu"], "drafters": ["cpu"]}, "13.0", [0, 1], "the config's layout says so"),
        ({"targets": ["auto"], "drafters": ["auto"]}, "13.0", [0, 1], ""),
        ({"targets": ["auto"], "drafters": ["auto"]}, None, [0, 1], ""),  # no torch that we know
        ({"targets": ["auto"], "drafters": ["auto"]}, "none", [], ""),
        ({"targets": ["auto"], "drafters": ["auto"]}, "none", None, ""),
        ({"targets": ["cuda:0"], "drafters": ["auto"]}, "none", [0, 1], ""),
        ({}, "none", [0, 1], ""),
        (None, "none", [0, 1], ""),
    ],
)
def test_gpus_for_a_training_on_the_cpu_are_a_note(
    monkeypatch: pytest.MonkeyPatch, layout: Any, cuda: str | None, gpus: list[int] | None, why: str
) -> None:
    monkeypatch.setattr(environment, "look", lambda _: {"torch_cuda": cuda})
    notes = preflight.on_cpu_all_the_same({"layout": layout}, "python3", gpus)
    assert len(notes) == bool(why)
    assert all("it trains on the CPU, and only keeps GPU 0, 1 from others" in it and why in it for it in notes)


def test_a_start_says_that_it_trains_on_the_cpu(box: LocalBox) -> None:
    layout = '{"layout": {"targets": ["cpu"], "drafters": ["cpu"]}}'
    code, reply = box.try_start("a", f"steps = 1\ncheck_says = {layout}", gpus=[0], share_gpus=True)
    assert code == 0 and [it for it in reply["notes"] if it.startswith("warning: it trains on the CPU")]
    box.ended(box.path / "runs" / reply["facts"]["run_id"])


def told_by(release: Path, code: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """What the check of a trainer that is this code gives."""
    (release / "trainer").mkdir(parents=True, exist_ok=True)
    (release / "trainer" / "__init__.py").touch()
    (release / "trainer" / "__main__.py").write_text(f"import sys, os, json, time\n{code}\n")
    return preflight.checked_config(release / "config.toml", release, sys.executable, parameters)


NAMES = '{"data": {"train": "/none.jsonl"}}'
NO_ANSWERS = (
    "b''",
    "b'[1, 2]'",
    "b'3'",
    "b'{'",
    "b'{\\xff'",
    'b\'{"a": "\\xff"}\'',
    "b'{\"a\":' * 100_000",
    "b'{\\n' * 100",
)


def test_what_is_said_around_the_checks_answer_is_passed_over(tmp_path: Path) -> None:
    """A line of a library's before it must not turn off the check of model and data."""
    parameters = stand_in.start_parameters(tmp_path, "a", "")
    for words in (NAMES, f"warning: old driver\n{NAMES}", f"\n{{not JSON}}\n{NAMES}\nbye", f"\udcff\n{NAMES}"):
        data = words.encode("utf-8", "surrogateescape")
        config = told_by(tmp_path, f"sys.stdout.buffer.write({data!r})", parameters)
        with pytest.raises(answers.Fault) as caught:
            preflight.check_named(config, tmp_path, parameters, None)
        assert caught.value.parts["why"] == "data.train: no /none.jsonl"
        assert preflight.check(tmp_path, {**parameters, "gpus": []}, None) == []


@pytest.mark.parametrize("words", NO_ANSWERS)
def test_a_check_without_an_answer_is_a_note(tmp_path: Path, words: str) -> None:
    parameters = stand_in.start_parameters(tmp_path, "a", "", gpus=[])
    assert told_by(tmp_path, f"sys.stdout.buffer.write({words})", parameters) == {}
    notes = preflight.check(tmp_path, parameters, None)
    assert notes == ["models and data were not checked: the release's check gave no answer"]


def test_a_check_that_hangs_is_said_and_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until = processes.wait_until

    def till_limit(*_: Any, **__: Any) -> bool:
        assert wait_until((tmp_path / "child").exists, 30.0)
        return False  # the time is over

    monkeypatch.setattr(processes, "wait_until", till_limit)
    code = """
if not os.fork():
    open("draft", "w").write(str(os.getpid()))
    os.rename("draft", "child")
time.sleep(1000)"""
    with pytest.raises(answers.Fault) as caught:
        told_by(tmp_path, code, stand_in.start_parameters(tmp_path, "a", ""))
    child = processes.read(int((tmp_path / "child").read_text()))
    try:
        assert child is None or wait_until(lambda: not processes.alive(child.identity()), 5.0)
    finally:
        if child is not None:
            processes.send(child, signal.SIGKILL)
    parts = caught.value.parts
    assert (caught.value.kind, parts["why"]) == ("preflight", "no answer in 60 s")
    assert f"cd {tmp_path} && {sys.executable} -v -m trainer check --help" in parts["next"]


def test_a_refusal_shows_names_short_and_on_one_line(tmp_path: Path) -> None:
    """And tells no command that would be about another file."""
    parameters = stand_in.start_parameters(tmp_path, "a", "")

    def refusal(train: str) -> tuple[str, str]:
        with pytest.raises(answers.Fault) as caught:
            preflight.check_named({"data": {"train": train}}, tmp_path, parameters, None)
        return caught.value.parts["why"], caught.value.parts["next"]

    why, advice = refusal("/begin/" + "x" * 3_000_000 + "/end.jsonl")
    assert why.startswith("data.train: no /begin/xxx") and why.endswith("xxx/end.jsonl") and "…" in why
    assert len(why) < 230 and advice == "correct data.train"
    for name, shown in (
        ("/a\nb", "/a\\nb"),
        ("/a\x1b[2J", "/a\\x1b[2J"),
        ("/a\0b", "/a\\x00b"),
        ("/\udcff", "/\\udcff"),
    ):
        assert refusal(name) == (f"data.train: no {shown}", "correct data.train")
    assert refusal("~a\0b/c") == (f"data.train: no {tmp_path}/~a\\x00b/c", "correct data.train")
    why, advice = refusal("/my données.jsonl")
    assert why.endswith("no /my données.jsonl") and "put '/my données.jsonl' shared/data/" in advice
