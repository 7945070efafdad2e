"""The command line of the sandbox: thin, so one walk through it."""

import json
import os
from pathlib import Path

import documented
import pytest
from typer.testing import CliRunner

from dflash_ops.errors import NotFoundError, UsageFault
from dflash_ops.sandbox import lifecycle, state
from dflash_ops.sandbox.cli import app

NAME = f"cli-{os.getpid()}"


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    documented.confirm(["sandbox", *words], result.stdout_bytes)
    return result.stdout


def test_up_status_down() -> None:
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    options = ["--disk", "200:64M", "--without", "200:tar", "--without", "200:tmux", "--no-lxc-attach"]
    up = json.loads(invoke("up", "--name", NAME, "--owner", str(os.getpid()), *options, "--json"))
    try:
        assert up["port"] == state.read(NAME).port and up["schema_version"] == 1
        assert json.loads(invoke("status", "--name", NAME, "--json")) == up
        text = invoke("status", "--name", NAME)
        assert f"ssh -p {up['port']}" in text and "container 202: train202, privileged, stopped" in text
    finally:
        invoke("down", "--name", NAME)
    for verb in ("down", "status"):
        with pytest.raises(NotFoundError, match=f"Next: .*dflash-ops sandbox up --name {NAME}$"):
            invoke(verb, "--name", NAME)


def test_up_says_when_there_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts nothing here: what it says of the models is all."""
    there = state.SandboxState(NAME, 1, 1, 1, 1, "", "127.0.0.1", 22, "root", Path("k"), Path("h"), tmp_path, "python3")

    def up(name: str, **_: object) -> state.SandboxState:
        return there

    monkeypatch.setattr(lifecycle, "up", up)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = "-m trainer import-gguf && dflash-ops sandbox down --name"
    assert f"{command} {NAME} && dflash-ops sandbox up --name {NAME}\n" in invoke("up", "--name", NAME)
    (tmp_path / "dflash-ops" / "models").mkdir(parents=True)
    assert command in invoke("up", "--name", NAME) and "import-gguf" not in invoke("up", "--name", NAME, "--json")
    (tmp_path / "dflash-ops" / "models" / "mine").mkdir()
    (tmp_path / "dflash-ops" / "models" / "mine" / "config.json").touch()
    assert "import-gguf" not in invoke("up", "--name", NAME)


@pytest.mark.parametrize("option", ["--disk=200", "--without=:tar", "--without=200:"])
def test_a_pair_needs_both_sides(option: str) -> None:
    with pytest.raises(UsageFault):
        invoke("up", "--name", NAME, option)
