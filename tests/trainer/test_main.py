"""The trainer's command line: exit codes, and errors in one line."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from nursery import Nursery

from trainer.__main__ import OTHERS, imported, main
from trainer.config import TrainConfig


def test_check_says_what_is_wrong_with_code_3(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_folder / "config.toml"
    assert main(["check", str(config)]) == 0
    assert main(["check", str(config), "--set", "train.stepz=4"]) == 3
    captured = capsys.readouterr()
    assert captured.out == f"{config}: good, 20 steps\n"
    assert captured.err == f"{config}: train.stepz: unknown key; did you mean train.steps?\n"


def test_check_prints_everything_as_json(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tiny_folder / "config.toml"), "--set", "train.steps=4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["train"]["steps"], shown["train"]["clip"], shown["draft"]["block"]) == (4, 1.0, 4)


def test_cublas_is_told_to_repeat_itself_unless_the_user_says_otherwise(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for expected in (":16:8", ":4096:8"):
        main(["check", str(tiny_folder / "config.toml")])
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_check_imports_no_torch(tiny_folder: Path) -> None:
    code = "import sys; from trainer.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "check", str(tiny_folder / "config.toml")]
    assert subprocess.check_output(command, text=True).endswith("False\n")


def test_what_is_imported_is_not_looked_through_for_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy.py").write_text("import gc\nlooks = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")  # so that this is the process's first import
    gc.unfreeze()
    try:
        heavy = imported("heavy")
    finally:
        sys.modules.pop("heavy", None)
    assert not heavy.looks and gc.isenabled() and gc.get_freeze_count() == 0
    (tmp_path / "broken.py").write_text("raise ValueError")
    with pytest.raises(ValueError):
        imported("broken")
    assert gc.isenabled()


def test_train_refuses_a_wrong_config_before_it_makes_anything(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tiny_folder / "config.toml"), str(tmp_path / "run"), "--set", "train.lr=0"]) == 3
    assert "train.lr: should be greater than 0, got 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_config_of_a_newer_trainer_is_refused_and_the_run_stays(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text("{}")
    config = tiny_folder / "config.toml"
    assert main(["train", str(config), str(tmp_path), "--set", "schema_version=2"]) == 3
    why = "schema_version: 2 is newer than this trainer, which knows 1"
    assert capsys.readouterr().err == f"{config}: {why}\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_a_failed_training_is_one_line_and_code_1(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", "train", str(tiny_folder / "config.toml"), str(tmp_path / "run")]
    ended = subprocess.run([*command, "--set", "data.train=none.jsonl"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "DataError: data none.jsonl can't be read: No such file or directory\n"


def test_a_dry_run_prints_what_it_would_take_and_makes_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[TrainConfig] = []

    def estimated(config: TrainConfig) -> str:
        seen.append(config)
        if config.train.steps == 5:
            raise RuntimeError("no such\nGPU")
        return "5 layers"

    # The estimate has tests of its own.
    monkeypatch.setitem(sys.modules, "trainer.estimate", cast(ModuleType, SimpleNamespace(dry_run=estimated)))
    config = str(tiny_folder / "config.toml")
    run = tmp_path / "run"
    assert main(["train", config, str(run), "--dry-run", "--set", "train.steps=4"]) == 0
    assert main(["train", "--dry-run", config]) == 0
    assert [c.train.steps for c in seen] == [4, 20]
    assert capsys.readouterr().out == "5 layers\n5 layers\n"
    assert main(["train", "--dry-run", config, "--set", "train.steps=5"]) == 1
    assert capsys.readouterr().err == "RuntimeError: no such; GPU\n"
    assert main(["train", "--dry-run", config, "--set", "train.lr=0"]) == 3
    for key in ("train", "heldout"):
        capsys.readouterr()
        assert main(["train", "--dry-run", config, "--set", f"data.{key}=none.jsonl"]) == 1
        told = capsys.readouterr()
        assert (told.out, told.err) == ("", "DataError: data none.jsonl can't be read: No such file or directory\n")
    assert not run.exists()


def test_commands_with_words_of_their_own_are_told_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, (module, what) in OTHERS.items():
        assert f"{name} {what}" in shown.replace("- ", "-"), module


FAILS = """
import runpy, sys, threading, types

def main(words):
    import torch
    from trainer.pipeline import Worker

    busy = threading.Event()

    def works(worker, of):
        x = torch.ones(700, 700)
        while True:
            x = torch.tanh(x @ x)
            busy.set()

    Worker("drafter", 0, works, None).start()
    busy.wait()
    error = RuntimeError("shapes differ")
    error.add_note("raised in the worker drafter")
    raise error

sys.modules["trainer.selftest"] = types.SimpleNamespace(main=main)
sys.argv = ["trainer", "selftest"]
runpy.run_module("trainer", run_name="__main__")
"""


def test_an_error_with_a_thread_left_behind_ends_with_its_traceback_and_code_1(nursery: Nursery) -> None:
    """And not with an abort, since the thread can't be in torch while Python takes itself down."""
    ended = nursery.start(code=FAILS)
    assert ended.wait() == 1, ended.said()
    assert ended.said().startswith("Traceback (most recent call last):\n")
    assert ended.said().endswith("\nRuntimeError: shapes differ\nraised in the worker drafter\n")


@pytest.mark.parametrize("words", [[], ["fly"], ["train"], ["train", "config.toml"], ["train", "--dry-run"]])
def test_wrong_words_are_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
