"""The command line of the sandbox: thin, so one walk through it."""

import json
import os

import pytest
from typer.testing import CliRunner

from dflash_ops.errors import NotFoundError, UsageFault
from dflash_ops.sandbox import state
from dflash_ops.sandbox.cli import app

NAME = f"cli-{os.getpid()}"


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
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


@pytest.mark.parametrize("option", ["--disk=200", "--without=:tar", "--without=200:"])
def test_a_pair_needs_both_sides(option: str) -> None:
    with pytest.raises(UsageFault):
        invoke("up", "--name", NAME, option)
