"""forked.py's processes against real ones."""

import os
import subprocess
from pathlib import Path

import forked
import pytest
from conftest import Cli, write_inventory

from dflash_ops.sandbox.state import SandboxState

WORDS: list[tuple[str | bytes, ...]] = [
    ("--version",),
    ("--help",),
    ("nonsense",),
    ("train", "start"),
    ("inventory", "list", "--inventory", b"\xff\xe9.toml"),
    ("releases", "-t", "nobody"),
    ("exec", "--", "sh", "-c", b"cat; pwd; printf '\xff' >&2; exit 7"),
    ("exec", "--", "sh", "-c", "kill -9 $$"),
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: str(words[0]) + "-" + str(len(words)))
def test_a_forked_command_is_a_real_one(words: tuple[str | bytes, ...], cli: Cli, tmp_path: Path) -> None:
    environment, stdin = cli.environment(), bytes(range(256)) * 1000
    real = subprocess.run(
        cli.words(*words), input=stdin, capture_output=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert forked.can_be(environment)
    done = forked.run(words, stdin=stdin, cwd=tmp_path, environment=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (real.returncode, real.stdout, real.stderr)


def test_what_takes_too_long_is_killed(cli: Cli) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        forked.run(
            ("exec", "--", "sh", "-c", "echo begun; sleep 60"),
            stdin=b"",
            cwd=None,
            environment=cli.environment(),
            timeout=3,
        )
    assert caught.value.stdout in (b"begun\n", b"")  # it may have been busy until then


def test_its_folder_and_environment_are_what_it_was_given(sandbox: SandboxState, tmp_path: Path) -> None:
    write_inventory(tmp_path, sandbox.name)
    nothing = {name: value for name, value in os.environ.items() if name != "DFLASH_OPS_INVENTORY"}
    done = forked.run(("inventory", "list"), stdin=b"", cwd=tmp_path, environment=nothing, timeout=60)
    assert (done.returncode, b"trainer" in done.stdout) == (0, True), done.stderr
    nowhere = forked.run(("inventory", "list"), stdin=b"", cwd=Path("/"), environment=nothing, timeout=60)
    assert nowhere.returncode == 3, nowhere


def test_another_locale_wants_a_process_of_its_own(cli: Cli) -> None:
    assert not forked.can_be({**cli.environment(), "LC_ALL": "C"})
