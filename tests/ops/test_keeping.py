"""What is kept of runs: attached to, fetched, removed."""

import fcntl
import hashlib
import io
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from in_container import folder_of, record_of, run_folder, stand_in_at
from stand_in import retry_until
from typer.testing import CliRunner

from dflash_ops import cli_keep, data, keeping, render_runs, runs, train
from dflash_ops.cli import app
from dflash_ops.command import Command, Container
from dflash_ops.errors import BusyError, CancelledError, NotFoundError, OpsError, UsageFault
from dflash_ops.remote import bundle, processes, remove, rundir
from dflash_ops.remote.answers import Fault
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.shell import Shell


@pytest.fixture
def place(box: Box) -> Iterator[Container]:
    with stand_in_at(box.container) as place:
        yield place


def begin(shell: Shell, container: Container, name: str, config: str = "", **more: object) -> runs.Run:
    return train.start(shell, container, StartRequest(name, config, "mine.toml", gpus=(), **more)).run  # type: ignore[arg-type]


def inside(shell: Shell, container: Container, *words: str) -> bytes:
    return shell.run(container, Command(words), check=True).out


class Terminal:
    """A command of ours on a terminal of its own."""

    def __init__(self, words: list[str | bytes], environment: dict[str, str], columns: int, rows: int) -> None:
        self._ours, theirs = os.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.shown = bytearray()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read(self) -> bytes:
        """All that was shown so far."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # its end
                break
            if not data:
                break
            self.shown += data
        return bytes(self.shown)

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
            time.sleep(0.02)
        self.read()
        if self.process.poll() is None:
            self.process.kill()
        os.close(self._ours)
        return self.process.wait()


def in_process(cli: Cli, *words: str) -> BaseException | None:
    """How a command line ends that needs no process of its own."""
    return CliRunner().invoke(app, words, env={"DFLASH_OPS_INVENTORY": str(cli.inventory)}).exception


@pytest.mark.parametrize("said", ["n", "", "maybe"])
def test_rm_wants_a_yes(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{said}\n"))
    with pytest.raises(CancelledError, match="nothing was removed"):
        cli_keep._ask({"": [keeping.Removed("a", 10, 2)]})


def test_attach_is_the_real_window_in_size_and_colours(place: Container, cli: Cli, shell: Shell) -> None:
    run = begin(shell, place, "w")
    inside(shell, place, "tmux", "-L", "dflash", "kill-session", "-t", "=dflash-w")  # it is opened again

    def clients() -> bytes:
        form = "#{client_width}x#{client_height} #{client_termname} #{client_utf8} #{client_session}"
        return shell.run(place, Command(("tmux", "-L", "dflash", "list-clients", "-F", form))).out

    # A terminal that no container's terminfo knows.
    young = {**cli.environment(), "TERM": "xterm-of-tomorrow", "COLORTERM": "truecolor"}
    terminal = Terminal(cli.words("train", "attach", "w"), young, 100, 30)
    retry_until(lambda: b"step" in terminal.read())
    assert clients() == b"100x30 xterm-256color 1 dflash-w\n"
    features = inside(shell, place, "tmux", "-L", "dflash", "list-clients", "-F", "#{client_termfeatures}")
    assert b"RGB" in features and b"256" in features
    terminal.resize(80, 24)
    retry_until(lambda: terminal.read() and clients().startswith(b"80x24 "), every=0.2)
    terminal.press(b"\x02d")
    assert terminal.end() == 0 and b"goes on" in terminal.shown
    assert train.status(shell, place, run.id).state.live
    again = Terminal(cli.words("train", "attach"), young, 80, 24)
    retry_until(lambda: b"step" in again.read())
    again.press(b"\x03")
    retry_until(lambda: b"[y/N]" in again.read())
    again.press(b"y\r")
    retry_until(lambda: b"Enter closes" in again.read())
    again.press(b"\r")
    assert again.end() == 103
    with pytest.raises(NotFoundError, match=r"has no window.*its run has ended"):
        keeping.attach(shell, place, "w")
    assert isinstance(in_process(cli, "train", "attach"), UsageFault)


def test_a_run_is_fetched_without_its_secrets(place: Container, cli: Cli, shell: Shell, tmp_path: Path) -> None:
    more = {"env": "TOKEN=hushhush\n", "notify": ("http://127.0.0.1:9/hushhush",)}
    run = begin(shell, place, "a", "steps = 5\nrecords = yes\nenvironment = yes", **more)
    train.wait(shell, place, run.id)
    folder = run_folder(place, run.id)
    retry_until(lambda: (folder / "notify.log").exists() and (folder / "notify.log").read_bytes())  # its last file
    for name, text in (
        ("checkpoints/step-00000005/model", "new"), ("checkpoints/step-00000003/model", "old"), ("events/tf", "e"),
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    done = cli("train", "fetch", "a", "-o", str(tmp_path / "here"), "--json")
    assert done.returncode == 0, done.stderr
    here = tmp_path / "here" / run.id
    assert json.loads(done.stdout)["paths"] == [str(here)]
    names = {str(file.relative_to(here)) for file in here.rglob("*") if file.is_file()}
    assert {"log", "log.times", "metrics.jsonl", "status.json", "exit.json", "notify.log", "events/tf"} < names
    assert {name for name in names if name.startswith("checkpoints")} == {"checkpoints/step-00000005/model"}
    assert not [file for file in here.rglob("*") if file.is_file() and b"hushhush" in file.read_bytes()]
    assert (here / "log").read_bytes() == (folder / "log").read_bytes()
    ended = train.status(shell, place, run.id)
    assert keeping.fetch(shell, place, ended, tmp_path / "here", checkpoints="newest").sent == 0
    assert keeping.fetch(shell, place, ended, tmp_path / "here", checkpoints="all").sent == 4
    keeping.fetch(shell, place, ended, tmp_path / "bare", checkpoints="none")
    assert not (tmp_path / "bare" / run.id / "checkpoints").exists()
    with pytest.raises(NotFoundError, match=r"has no checkpoint step-4.*step-00000005"):
        keeping.fetch(shell, place, ended, tmp_path, checkpoints="step-4")


def test_a_run_that_goes_on_is_fetched_as_it_stands(place: Container, shell: Shell, tmp_path: Path, soak: bool) -> None:
    run = begin(shell, place, "a", "pause = 0.002\nrecords = yes")  # a new status.json each step, too
    log = run_folder(place, run.id) / "log"
    retry_until(lambda: log.exists() and log.stat().st_size > 1000)
    for _ in range(20 if soak else 2):
        keeping.fetch(shell, place, run, tmp_path, checkpoints="newest")
        text = (tmp_path / run.id / "log").read_bytes()
        assert log.read_bytes().startswith(text) and text


def test_what_is_written_anew_rotated_or_removed_meanwhile_is_fetched(tmp_path: Path) -> None:
    """Between the listing and the reading of a run that goes on."""
    run = tmp_path / "runs" / "a-20261129-120000-abcd"
    run.mkdir(parents=True)
    for name in ("status.json", "log", "gone", "metrics.jsonl"):
        (run / name).write_text(f"old {name}\n")
    words = bundle.command(sys.executable, "transfer", {"path": str(tmp_path), "do": "get", "name": f"runs/{run.name}"})
    with subprocess.Popen(words.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as script:
        assert script.stdin is not None and script.stdout is not None and words.stdin is not None

        def say(data: bytes) -> None:
            assert script.stdin is not None
            script.stdin.write(data)
            script.stdin.flush()

        say(words.stdin)
        tree = json.loads(script.stdout.readline())
        for name, text in (("status.json", "a new, longer status\n"), ("metrics.jsonl", "old metrics.jsonl\nnew\n")):
            (tmp_path / "part").write_text(text)
            (tmp_path / "part").rename(run / name)
        (run / "log").rename(run / "log.000000000000-000000000008")
        (run / "log").write_text("young\n")
        (run / "gone").unlink()

        def read(name: str, has: bytes) -> tuple[bytes, dict[str, Any]]:
            assert script.stdout is not None
            number = [file[0] for file in tree["files"]].index(name)
            sha256 = hashlib.sha256(has).hexdigest()
            say(json.dumps({"file": number, "from": len(has), "sha256": sha256, "whole": bool(has)}).encode() + b"\n")
            content = b""
            while True:
                line = script.stdout.readline().strip()
                if line.isdigit():
                    content += script.stdout.read(int(line))
                elif json.loads(line)["event"] == "end":
                    return content, json.loads(line)

        for name, has, content in (
            ("status.json", b"", b"a new, longer status\n"),
            ("metrics.jsonl", b"old metrics.jsonl\n", b"old metrics.jsonl\nnew\n"),  # a whole file here begins like it
            ("log", b"", b"old log\n"),  # by its new name
        ):
            got, end = read(name, has)
            assert (got, end["sha256"]) == (content, hashlib.sha256(content).hexdigest())
        end = read("gone", b"")[1]
        assert (end["sha256"], end["gone"]) == (None, True)
        say(b'{"done": 1}\n')
        assert json.loads(script.stdout.readline())["event"] == "done"


def test_get_keeps_secrets_and_what_lies_outside_of_a_run(box: Box, cli: Cli, shell: Shell, tmp_path: Path) -> None:
    place = box.container
    run = "runs/a-20261129-120000-abcd"
    script = f"""set -e; mkdir -p {place.path}; cd {place.path}
        mkdir -p shared {run}/checkpoints/step-1 {run}/events; cd {run}
        for name in env notify .env.part env.put-part ../../shared/secret; do echo hushhush > $name; done
        ln -s ../../env checkpoints/step-1/x; ln -s nowhere log.x; ln -s /etc/passwd log.y; ln -s ../log events/log
        echo line > log; echo sent > notify.log; ln -s ../{run}/notify ../../shared/x"""
    inside(shell, place, "sh", "-c", script)
    for name in (f"{run}/env", f"{run}/notify", f"{run}/env.put-part", f"{run}/checkpoints/step-1/x", "shared/x"):
        with pytest.raises(OpsError, match=r"is not read .*secrets"):
            data.get(shell, place, name, tmp_path / "x")
    with pytest.raises(OpsError, match="out of its run"):
        data.get(shell, place, f"{run}/log.y", tmp_path / "x")
    done = CliRunner().invoke(app, ["get", run, str(tmp_path)], env={"DFLASH_OPS_INVENTORY": str(cli.inventory)})
    here = tmp_path / Path(run).name
    names = sorted(str(file.relative_to(here)) for file in here.rglob("*") if file.is_file())
    assert names == ["events/log", "log", "notify.log"], done.exception
    left_out = re.findall(r"left out \S+/(\S+): it (.*)", done.stderr)
    secret = "holds secrets of a run, or a part of them"
    assert sorted(left_out) == [
        (".env.part", secret), ("env", secret), ("env.put-part", secret), ("log.x", "is a link that leads nowhere"),
        ("log.y", "is a link that leads out of its run"), ("notify", secret), ("x", secret),
    ]  # fmt: skip


def test_rm_never_takes_what_lives_and_asks(place: Container, cli: Cli, shell: Shell) -> None:
    first = begin(shell, place, "a", "steps = 2")
    train.wait(shell, place, first.id)
    second = begin(shell, place, "b", "", resume=first.id)
    other = begin(shell, place, "c", "steps = 1")
    train.wait(shell, place, other.id)
    with pytest.raises(BusyError, match=r"run b-.* goes on"):
        keeping.remove(shell, place, ["c", "b"])
    with pytest.raises(BusyError, match=rf"run {first.id} is needed.*{second.id} goes on"):
        keeping.remove(shell, place, ["a"])
    with pytest.raises(NotFoundError):
        keeping.remove(shell, place, ["c", "nobody"])
    kept = sorted((folder_of(place) / "runs").iterdir())
    assert len(kept) == 3
    train.stop(shell, place, second.id)
    refused = in_process(cli, "train", "rm", "a")
    assert isinstance(refused, UsageFault) and "--yes" in str(refused)
    assert sorted((folder_of(place) / "runs").iterdir()) == kept
    terminal = Terminal(cli.words("train", "rm", "a"), cli.environment(), 80, 24)
    retry_until(lambda: b"[y/N]" in terminal.read())
    assert f"{first.id}: 1 checkpoint".encode() in terminal.shown
    terminal.press(b"y\r")
    assert terminal.end() == 0
    assert len(train.list_runs(shell, place)) == 2
    (folder_of(place) / "runs" / ".x.removed").mkdir()  # an earlier one was killed half way
    assert in_process(cli, "train", "rm", "-y", "b", "c") is None
    assert [*(folder_of(place) / "runs").iterdir()] == []


def test_rm_says_what_stays_and_takes_no_link_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, precious = tmp_path / "runs", tmp_path / "precious"
    (runs / "a-20261129-120000-abcd").mkdir(parents=True)
    precious.mkdir()
    (runs / ".q.removed").symlink_to(precious)
    (runs / "b-20261129-120000-abcd").symlink_to(precious)
    for folder in (runs / "a-20261129-120000-abcd", precious):
        os.utime(folder, (0, 0))  # not just being started
    remove.remove(tmp_path, ["b"], dry_run=False)
    assert [it.name for it in runs.iterdir()] == ["a-20261129-120000-abcd"] and precious.is_dir()

    def refused(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "Operation not permitted", "log")

    monkeypatch.setattr("shutil.rmtree", refused)
    with pytest.raises(Fault) as told:
        remove.remove(tmp_path, ["a"], dry_run=False)
    assert "files of them stay" in str(vars(told.value)) and "log: Operation not permitted" in str(vars(told.value))
    monkeypatch.undo()
    (runs / "c-20261129-120000-abcd").mkdir()
    os.utime(runs / "c-20261129-120000-abcd", (0, 0))
    remove.remove(tmp_path, ["c"], dry_run=False)
    assert list(runs.iterdir()) == []


def test_rm_spares_what_a_living_one_began_from_and_what_has_only_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "a-20261129-120000-abcd"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "state.json").write_text("{")
    os.utime(folder, (0, 0))
    other = {"run_id": "b", "run": {"init_from": str(folder / "checkpoints" / "step-1")}}
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "live_runs", lambda path: [other])  # pyright: ignore
        with pytest.raises(Fault, match="is needed"):
            remove.remove(tmp_path, ["a"], dry_run=True)
    words = [sys.executable, "-c", "input()", f"{folder}/ops", "supervisor", str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as supervisor:
        retry_until(lambda: "supervisor" in processes.command(supervisor.pid))
        with pytest.raises(Fault, match="a living supervisor"):
            remove.remove(tmp_path, ["a"], dry_run=True)
        supervisor.kill()
    assert remove.remove(tmp_path, ["a"], dry_run=True)["removed"]


def test_a_lost_run_with_living_processes_stays(place: Container, shell: Shell) -> None:
    run = begin(shell, place, "a", "child = yes\nsigterm = ignored")
    retry_until(lambda: (run_folder(place, run.id) / "child.pid").exists())
    inside(shell, place, "kill", "-9", str(record_of(place, run.id, "state.json")["supervisor"]["pid"]))
    retry_until(lambda: train.status(shell, place, run.id).state is RunState.LOST, every=0.3)
    with pytest.raises(BusyError, match="has living processes"):
        keeping.remove(shell, place, ["a"])
    train.stop(shell, place, run.id, grace=0.1)
    assert [it.run_id for it in keeping.remove(shell, place, ["a"])] == [run.id]


def test_a_list_of_a_thousand_runs_is_one_command(
    box: Box, shell: Shell, soak: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 1000 if soak else 120
    for number in range(1000, 1000 + count):
        run_folder(box.container, f"run-20261129-120000-{number}").mkdir(parents=True)
    asked: list[Command] = []
    run = Shell.run

    def counted(shell: Shell, place: Container, command: Command, **more: Any) -> Any:
        asked.append(command)
        return run(shell, place, command, **more)

    monkeypatch.setattr(Shell, "run", counted)
    listed = train.list_runs(shell, box.container)
    assert (len(listed), len(asked)) == (count, 1)
    render_runs.show_runs(listed)
    assert capsys.readouterr().out.count("run-20261129-120000-1") == count
