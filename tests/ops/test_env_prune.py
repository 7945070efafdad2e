"""env prune: what goes, what stays, and a prune that is killed half way."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from in_container import folder_of
from in_process import InProcess
from receiving import KILLER

from dflash_ops import environment as verbs
from dflash_ops.command import Command, Local
from dflash_ops.remote import bundle, environment
from dflash_ops.shell import Shell

NAMES = [f"{number:x}" * 12 for number in range(1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five environments: the third unfinished, the second current, the first used by a run."""
    path = tmp_path / "box"
    for number, name in enumerate(NAMES):
        folder = path / "env" / name
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / "big").write_bytes(bytes(10_000))
        (folder / "pyvenv.cfg").touch()
        os.utime(folder / "pyvenv.cfg", (number, number))
        if number != 2:
            (folder / environment.RECORD).write_text(json.dumps({"schema_version": 1, "bytes": 10_000}))
    (path / "env" / "current").symlink_to(NAMES[1])
    run = path / "runs" / "run-20261130-000000-aaaa"
    run.mkdir(parents=True)
    command = [str(path / "env" / NAMES[0] / "bin" / "python"), "-m", "trainer"]
    (run / "run.json").write_text(json.dumps({"schema_version": 1, "release": "r", "command": command}))
    return path


def prune(shell: Shell, path: Path, kill_at: int | None = None, **more: Any) -> tuple[int, dict[str, Any], list[str]]:
    """The exit code, the answer, and what was done to the disk."""
    parameters = {"path": str(path), "client": "tester", "patience": 0.3, "do": "prune", "keep": 1, "dry_run": False}
    command = bundle.command(sys.executable, "venv", {**parameters, **more})
    if kill_at is not None:
        python, isolated, option, boot, *rest = command.argv
        words = (python, isolated, option, KILLER + boot, *rest, str(kill_at), str(path / "env"))
        command = Command(words, command.stdin)
    result = shell.run(Local(), command)
    return result.code, json.loads(result.out or b"{}"), result.err.decode().split()


def test_what_goes_and_what_stays(shell: Shell, path: Path) -> None:
    code, planned, _ = prune(shell, path, dry_run=True)
    assert (code, planned["removed"], planned["freed_bytes"]) == (0, [NAMES[2], NAMES[3]], 0)
    assert environment.names(path) == NAMES
    code, done, _ = prune(shell, path)
    assert code == 0 and done["removed"] == planned["removed"] and 20_000 <= done["freed_bytes"] < 21_000
    assert {item["id"]: item["why"] for item in done["kept"]} == {
        NAMES[0]: "run run-20261130-000000-aaaa uses it",
        NAMES[1]: "current",
        NAMES[4]: "among the newest",
    }
    assert sorted(entry.name for entry in (path / "env").iterdir()) == [NAMES[0], NAMES[1], NAMES[4], "current"]
    assert prune(shell, path, keep=0)[1]["removed"] == [NAMES[4]]


def test_none_is_left_half(shell: Shell, path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "before", symlinks=True)
    _, _, steps = prune(shell, path, 10_000)
    removals = [at for at, step in enumerate(steps) if step in ("os.rename", "os.remove", "os.rmdir")]
    assert len(removals) > 6
    for at in (removals[0], removals[1], removals[3], removals[-1]):
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "before", path, symlinks=True)
        assert prune(shell, path, at)[0] == 137
        for name in environment.names(path):
            assert (path / "env" / name / "big").is_file() and (path / "env" / name / "bin" / "python").is_symlink()
        assert prune(shell, path)[0] == 0
        assert sorted(entry.name for entry in (path / "env").iterdir()) == [NAMES[0], NAMES[1], NAMES[4], "current"]


@pytest.mark.parametrize("link", ["the folder", "env in it"])
def test_a_run_is_seen_through_links(shell: Shell, path: Path, tmp_path: Path, link: str) -> None:
    """A run knows its Python by the real path; the inventory may name the folder by a link."""
    (path / "env" / "current").unlink()
    (path / "env" / "current").symlink_to(NAMES[0])
    real = tmp_path / "disk"
    if link == "the folder":
        path.rename(real)
        path.symlink_to(real)
    else:
        (path / "env").rename(real)
        (path / "env").symlink_to(real)
    run = path / "runs" / "run-20261130-000000-aaaa" / "run.json"
    command = [environment.python_of(path, "python3"), "-m", "trainer"]
    assert command[0].startswith(str(real))
    run.write_text(json.dumps({"schema_version": 1, "release": "r", "command": command}))
    (path / "env" / "current").unlink()
    (path / "env" / "current").symlink_to(NAMES[1])
    for seen_from in {path, path.resolve()}:
        kept = prune(shell, seen_from, dry_run=True)[1]["kept"]
        assert kept[0] == {"id": NAMES[0], "why": "run run-20261130-000000-aaaa uses it"}


def test_what_a_warm_up_uses_stays(shell: Shell, path: Path) -> None:
    (path / "env" / "current").unlink()
    (path / "env" / "current").symlink_to(NAMES[3])
    with environment.python_kept(path, "python3") as python:
        assert python == str(path / "env" / NAMES[3] / "bin" / "python")
        (path / "env" / "current").unlink()
        (path / "env" / "current").symlink_to(NAMES[1])
        done = prune(shell, path)[1]
        assert done["removed"] == [NAMES[2]] and {"id": NAMES[3], "why": "env warm uses it"} in done["kept"]
    assert prune(shell, path)[1]["removed"] == [NAMES[3]]
    with environment.python_kept(path / "nothing", "python3") as python:
        assert python == "python3"


def test_a_warm_up_says_what_it_uses(shell: Shell, path: Path) -> None:
    trainer = path / "releases" / "20261130-000000-nogit-aaaaaaaa" / "trainer"
    trainer.mkdir(parents=True)
    (path / "current").symlink_to(trainer.parent)
    held = f"subprocess.run(['flock', '-n', {str(path / 'env' / NAMES[1])!r}, 'true']).returncode"
    (trainer / "__main__.py").write_text(
        f"import json, subprocess; print(json.dumps({{'devices': [], 'held': {held}}}))"
    )
    parameters = {"release": None, "python": "python3", "check": False, "gpus_chosen": None, "config": "", "set": []}
    command = bundle.command(sys.executable, "warm", {"path": str(path), "config_name": "config.toml", **parameters})
    with shell.converse(Local(), command) as talk:
        said: list[dict[str, Any]] = []
        while (line := talk.hear()) is not None:
            said.append(json.loads(line))
    assert said[-1].get("event") == "done" and said[-1]["first"]["held"] == 1, said


def test_an_environment_that_was_made_again_after_a_killed_prune(shell: Shell, path: Path) -> None:
    """Its name is the same: what it is made from gives it."""
    shutil.copytree(path / "env" / NAMES[3], path / "env" / f"{environment.DOOMED}{NAMES[3]}", symlinks=True)
    wheels = path / "env" / f".wheels-{NAMES[4]}"
    wheels.mkdir()
    (wheels / "one.whl").write_bytes(bytes(5_000))
    code, done, _ = prune(shell, path)
    assert (code, done["removed"]) == (0, [NAMES[2], NAMES[3]]) and 35_000 <= done["freed_bytes"] < 36_000
    assert sorted(entry.name for entry in (path / "env").iterdir()) == [NAMES[0], NAMES[1], NAMES[4], "current"]


def test_not_beside_a_sync(shell: Shell, path: Path) -> None:
    (path / "locks").mkdir()
    lock = path / "locks" / "env.lock"
    with shell.converse(Local(), Command(("flock", str(lock), "sh", "-c", "echo held; cat"))) as talk:
        assert talk.hear() == b"held"
        code, answer, _ = prune(shell, path)
        assert (code, answer["kind"]) == (7, "busy")
    assert prune(shell, path)[0] == 0


def test_by_the_command_line(cli: Cli, box: Box, shell: Shell) -> None:
    assert verbs.prune(shell, box.container, 3).removed == ()  # nothing is there yet
    made = folder_of(box.container) / "env" / "0123456789ab"
    made.mkdir(parents=True)
    (made / "pyvenv.cfg").touch()
    cli = InProcess(cli.inventory)
    assert (
        b"would remove 0123456789ab\nwould remove 1 of 1 environment "
        in cli("env", "prune", "--keep", "1", "--dry-run").stdout
    )
    done = json.loads(cli("env", "prune", "--keep", "1", "--json").stdout)
    assert (done["removed"], done["kept"], made.exists()) == (["0123456789ab"], [], False)
