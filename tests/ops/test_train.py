"""Runs through the whole way: the command line, real ssh, containers, tmux, the supervisor, and the real trainer on a
tiny target. What happens to processes alone is in test_supervisor.py."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli, write_inventory
from in_container import folder_of, processes_of, record_of, run_folder, stand_in_at, wait_for_log
from in_process import InProcess
from proxy import Proxy
from stand_in import retry_until

from dflash_ops import gpus, run_request, runs, status, stops, train
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import BusyError, NotFoundError, OpsError, TimedOutError
from dflash_ops.remote import bundle
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

GPUS = "gpus = [0, 1]\n"


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    """Container 200 with its two GPUs declared."""
    return Box(write_inventory(tmp_path, sandbox.name, more=GPUS), sandbox)


@pytest.fixture
def place(box: Box) -> Iterator[Container]:
    with stand_in_at(box.container) as place:
        yield place


def begin(shell: Shell, container: Container, name: str = "a", config: str = "", **more: Any) -> runs.Run:
    """Starts a stand-in run and waits for its first step."""
    started = train.start(shell, container, StartRequest(name, config, "mine.toml", **more))
    wait_for_log(container, started.run.id)
    return started.run


def inside(shell: Shell, container: Container, *words: str) -> bytes:
    return shell.run(container, Command(words), check=True).out


def kill(shell: Shell, container: Container, run: str, who: str) -> None:
    """SIGKILL to the run's "supervisor" or "child"."""
    pid = record_of(container, run, "state.json")[who]["pid"]
    inside(shell, container, "kill", "-9", str(pid))


# -- the real trainer


@pytest.fixture
def config(box: Box, cli: Cli, tmp_path: Path) -> Path:
    """The real trainer deployed; returns a config for it, of a target that `tiny` puts there."""
    from tiny import tiny_toml

    shutil.copytree(Path(__file__).parents[2] / "trainer", tmp_path / "src" / "trainer")
    assert InProcess(cli.inventory)("deploy", str(tmp_path / "src")).returncode == 0
    there = f"{box.container.path}/shared/tiny"
    config = tmp_path / "tiny.toml"
    config.write_text(tiny_toml(there, f"{there}/train.jsonl", f"{there}/heldout.jsonl", train__steps=100_000))
    return config


@pytest.fixture
def tiny(config: Path, cli: Cli, tmp_path: Path) -> Path:
    """The config, with a tiny target and its data put into the container."""
    from tiny import tiny_training

    tiny_training(tmp_path / "tiny")
    files = sorted(str(file) for file in (tmp_path / "tiny").rglob("*") if file.is_file() and file.suffix != ".toml")
    done = InProcess(cli.inventory)("put", *files, "shared/tiny/")
    assert done.returncode == 0, done.stderr
    return config


@pytest.mark.timeout(300)  # on a busy machine: torch is loaded seven times
def test_start_to_first_step_stop_resume_kill_resume_finish(tiny: Path, cli: Cli, box: Box, shell: Shell) -> None:
    here = InProcess(cli.inventory)

    def step_of(run: str) -> int:
        file = run_folder(box.container, run) / "status.json"
        return json.loads(file.read_bytes())["step"] if file.exists() else 0

    began = cli("train", "start", str(tiny), "--json")
    assert began.returncode == 0, began.stderr
    first = json.loads(began.stdout)["run"]["id"]
    retry_until(lambda: step_of(first) >= 1)
    found = here("gpu-status", "--json")
    mine = [it for it in json.loads(found.stdout)["processes"] if it["run_id"] == first]
    assert [(it["vmid"], it["kind"], it["stale"], it["used_mib"]) for it in mine] == [(200, "run", False, 1542.0)] * 2
    assert cli("train", "stop", first).returncode == 0
    stopped = json.loads(here("train", "status", first, "--json").stdout)
    assert (stopped["state"], stopped["code"]) == ("stopped", 0)
    assert stopped["checkpoints"]

    resumed = cli("train", "start", str(tiny), "--resume", first)
    assert resumed.returncode == 0
    assert f"goes on from {first}, step {stopped['status']['step']}\n" in resumed.stderr.decode()
    second = train.newest(shell, box.container).id
    retry_until(lambda: [*(run_folder(box.container, second) / "checkpoints").glob("step-*")])
    retry_until(lambda: train.status(shell, box.container, second).checkpoints, every=0.5)
    kill(shell, box.container, second, "child")
    followed = cli("train", "logs", "-f", second)
    assert followed.returncode == 100
    assert b"failed" in followed.stderr and b"signal 9, exit code 137" in followed.stderr
    assert here("train", "wait", second).returncode == 137

    killed_at = step_of(second)
    assert killed_at > stopped["status"]["step"]
    more = [f"--set=train.steps={killed_at + 5}", "--resume", second, "--follow"]
    ended = cli("train", "start", str(tiny), *more, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert f"step {killed_at + 5}/{killed_at + 5}".encode() in ended.stdout
    assert b"finished" in ended.stderr
    assert [run.state for run in train.list_runs(shell, box.container)] == ["stopped", "failed", "finished"]


def test_a_config_that_is_refused(config: Path, cli: Cli, box: Box, shell: Shell) -> None:
    there = f"{box.container.path}/shared/tiny"
    here = InProcess(cli.inventory)
    lacking = here("train", "start", str(config))
    line = lacking.stderr.decode()
    assert (lacking.returncode, line.count("\n")) == (6, 1), line
    assert f"{config} names what the container lacks (" in line and f"target.path: no {there}; data.train: no " in line
    assert "Next: dflash-ops put tiny shared/, or correct target.path; " in line and f"{there}/heldout.jsonl" in line
    config.write_text(config.read_text().replace("steps =", "steeps ="))
    refused = here("train", "start", str(config))
    assert refused.returncode == 3
    line = refused.stderr.decode()
    assert line.count("\n") == 1
    assert str(config) in line and "train.steeps" in line and "did you mean" in line and "/runs/" not in line
    assert train.list_runs(shell, box.container) == []


# -- who may start


def test_two_starts_at_once_one_wins_the_other_says_who(
    place: Container, cli: Cli, tmp_path: Path, shell: Shell
) -> None:
    (tmp_path / "c.toml").write_text("")
    with ThreadPoolExecutor(2) as pool:
        words = ("train", "start", str(tmp_path / "c.toml"))
        done = list(pool.map(lambda name: cli(*words, "--name", name), ("a", "b")))
    assert sorted(it.returncode for it in done) == [0, 7]
    (winner,) = train.list_runs(shell, place)
    loser = next(it for it in done if it.returncode == 7)
    assert winner.id in loser.stderr.decode()
    assert winner.state is RunState.RUNNING


def test_containers_that_share_a_gpu_exclude_each_other(
    place: Container, sandbox: SandboxState, tmp_path: Path, shell: Shell
) -> None:
    (tmp_path / "other").mkdir()
    unprivileged = Box(write_inventory(tmp_path / "other", sandbox.name, vmid=201, more=GPUS), sandbox)
    with stand_in_at(unprivileged.container) as other:
        run = begin(shell, place, gpus=(1,))
        with pytest.raises(BusyError, match=rf"GPU 1 of box is taken.*{run.id} in container 200"):
            begin(shell, other, gpus=(1,))
        train.stop(shell, place)
        begin(shell, other, gpus=(1,), config="child = yes\nrunaway = yes\nsigterm = ignored")
        with pytest.raises(BusyError, match=r"in container 201.*-t NAME.*container 201"):
            begin(shell, replace(place, via="pct"), gpus=(0, 1))
        stopped = train.stop(shell, other, grace=0.3)
        assert len(stopped.killed) == 3
        begin(shell, replace(place, via="pct"), gpus=(0, 1))
        with pytest.raises(BusyError, match="in container 200"):
            begin(shell, other, gpus=(1,))


def test_words_that_can_not_be(place: Container, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "bad.env").write_text("A=1\nhush hush\n")
    here = InProcess(cli.inventory)
    for words, code, says in (
        (("c.toml", "--name", "Run_1"), 2, "a run can't be called 'Run_1'"),
        (("c.toml", "--gpus", "0,2"), 2, "numbered from 0"),
        (("none.toml",), 3, "none.toml"),
        (("c.toml", "--env-file", "bad.env"), 3, "bad.env:2"),
        (("c.toml", "--resume", "nobody"), 8, "there is no run nobody"),
    ):
        done = here("train", "start", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr.count(b"\n")) == (code, 1), done.stderr
        assert says in done.stderr.decode()
        assert b"hush" not in done.stderr
    assert here("train", "stop").returncode == 8
    assert here("train", "logs").returncode == 8


def test_a_secret_goes_nowhere_but_to_the_trainer(place: Container, cli: Cli, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "c.toml").write_text("environment = yes")
    (tmp_path / "secrets.env").write_text("TOKEN=hushhush\n")
    started = cli("--debug", "train", "start", str(tmp_path / "c.toml"), "--env-file", str(tmp_path / "secrets.env"))
    assert started.returncode == 0
    assert b"hushhush" not in started.stdout + started.stderr
    (run,) = train.list_runs(shell, place)
    wait_for_log(place, run.id)
    script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /var/log/* 2>/dev/null; true"
    assert b"hushhush" not in shell.run(place.host, Command(("sh", "-c", script))).out
    found = inside(shell, place, "grep", "-rl", "hushhush", place.path).decode().split()
    assert {Path(file).name for file in found} == {"env", "environment"}
    assert record_of(place, run.id)["env_names"] == ["TOKEN"]


def test_no_tmux(sandbox: SandboxState, place: Container, shell: Shell) -> None:
    # `which` finds tmux by PATH, which the start command says itself: a container without it is one with another PATH.
    command = run_request.start_command(place, StartRequest("a", "", "mine.toml"), run_request.new_run_id("a"))
    result = shell.run(place, replace(command, env={"PATH": "/nowhere"}))
    assert result.code == 6
    assert b"no tmux" in result.out
    assert train.list_runs(shell, place) == []


# -- crashes


def test_a_killed_supervisor_is_lost_never_running(place: Container, cli: Cli, shell: Shell) -> None:
    run = begin(shell, place, config="sigterm = ignored\npause = 0.02\nchild = yes")
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(cli, "train", "logs", "-f", run.id)
        time.sleep(0.5)
        kill(shell, place, run.id, "supervisor")
        told = InProcess(cli.inventory)("train", "status", run.id)
        assert b"is lost" in told.stdout and b"running" not in told.stdout
        assert following.result().returncode == 100
    assert b"still alive" in told.stdout
    assert [it.state for it in train.list_runs(shell, place)] == [RunState.LOST]
    done = InProcess(cli.inventory)("train", "stop", run.id, "--grace", "0.2")
    assert done.returncode == 0, done.stderr
    assert train.status(shell, place, run.id).processes == ()


def test_a_dead_parents_living_child_is_found_and_freed_by_the_next_start(place: Container, shell: Shell) -> None:
    run = begin(shell, place, config="child = yes\nsigterm = ignored\npause = 100", gpus=(0,))
    for who in ("supervisor", "child"):
        kill(shell, place, run.id, who)

    def seen() -> gpus.GpuStatus:
        return status.gpu_status(shell, place.host, [place])

    found = retry_until(lambda: (it := seen()) and any(p.kind == "dead" for p in it.processes) and it, every=0.3)
    dead = next(it for it in found.processes if it.kind == "dead")
    heir = next(it for it in found.processes if it.kind == "stale")
    assert dead.held_by == (heir.pid,)
    assert (dead.run_id, dead.used_mib, heir.run_id, heir.vmid, heir.used_mib) == (run.id, 1542.0, run.id, 200, None)
    assert heir.age_s is not None and heir.age_s >= 0 and heir.container_pid is not None
    files = [f"/dev/shm/torch_{run.id}_0", f"/dev/shm/torch_{run.id}0", f"/tmp/{run.id}"]
    inside(shell, place, "touch", *files)
    started = train.start(shell, place, StartRequest("b", "", "mine.toml", gpus=(0,)))
    assert [it.pid for it in started.freed] == [heir.container_pid]
    removed, left = {files[0], files[2]}, files[1]
    assert {file for file in files if any(file in note.split(",")[0].split() for note in started.notes)} == removed
    assert inside(shell, place, "sh", "-c", 'ls -d "$@" 2>/dev/null; true', "sh", *files).decode().split() == [left]
    retry_until(lambda: not [it for it in seen().processes if it.run_id == run.id], every=0.3)
    used = {gpu.in_container[200]: gpu.used_mib for gpu in seen().gpus}
    assert (used[0], used[1]) == (1551.0, 0.0)


# -- links that break


@pytest.mark.parametrize("on", [(0,), ()], ids=["behind the lock of its GPU", "without a GPU"])
def test_a_start_whose_answer_is_lost_starts_one_trainer(
    place: Container, shell: Shell, tmp_path: Path, on: tuple[int, ...]
) -> None:
    with Proxy(place.host, tmp_path) as proxy, Shell() as other:

        def cut_when_it_is_under_way() -> None:
            retry_until(lambda: [*(folder_of(place) / "runs").glob(".a-*")])
            proxy.cut()

        cutter = threading.Thread(target=cut_when_it_is_under_way)
        cutter.start()
        request = StartRequest("a", "check_seconds = 1.5", "mine.toml", gpus=on)
        started = train.start(other, proxy.before(place), request)
        cutter.join()
    assert started.existing
    assert [run.id for run in train.list_runs(shell, place)] == [started.run.id]
    assert started.run.state is RunState.RUNNING


def test_a_wait_with_a_timeout_goes_on_after_a_broken_link(place: Container, shell: Shell, tmp_path: Path) -> None:
    run = begin(shell, place)
    with Proxy(place.host, tmp_path) as proxy, Shell() as other, ThreadPoolExecutor(1) as pool:
        far = proxy.before(place)
        train.status(other, far, run.id)
        proxy.cut_after = proxy.sent + 2000  # within the next question
        waiting = pool.submit(train.wait, other, far, run.id, timeout=60)
        retry_until(lambda: proxy.sent >= (proxy.cut_after or 0))
        proxy.cut_after = None
        train.stop(shell, place, run.id)
        assert waiting.result(60).state is RunState.STOPPED


# -- the log, the window, verdicts


def test_verdicts_and_exit_codes(place: Container, cli: Cli, shell: Shell, soak: bool) -> None:
    def ran(name: str, config: str) -> None:
        train.start(shell, place, StartRequest(name, config, "mine.toml"))

    here = InProcess(cli.inventory)
    ran("good", "steps = 2")
    assert here("train", "logs", "-f", "good").returncode == 0
    ran("bad", "steps = 2\ncode = 42")
    assert (cli("train", "logs", "-f", "bad").returncode, cli("train", "wait", "bad").returncode) == (100, 42)
    shown = here("train", "status", "bad").stdout.decode()
    assert "exit code 42" in shown and "| step 2" in shown
    ran("long", "")
    assert here("train", "wait", "--timeout", "0.1").returncode == 101
    train.stop(shell, place)
    assert (here("train", "logs", "-f", "long").returncode, here("train", "wait", "long").returncode) == (103, 103)
    # The verdict is known before it is shown, and stays where it can't be.
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("wb") as full:
        every = [(output, more) for output in (writing, full) for more in ((), ("--json",))]
        for output, more in every if soak else (every[0], every[3]):
            words = cli.words("train", "wait", "long", *more)
            done = subprocess.run(words, env=cli.environment(), stdout=output, stderr=output, timeout=60)
            assert done.returncode == 103, (output, more)
    os.close(writing)
    with pytest.raises(NotFoundError):
        train.stop(shell, place, "good")


def test_restart_goes_on_with_all_that_the_run_had(place: Container, cli: Cli, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "c.toml").write_text("steps = 100000\nenvironment = yes")
    (tmp_path / "secrets.env").write_text("TOKEN=hushhush\n")
    words = ("--set", "a=1", "--env-file", str(tmp_path / "secrets.env"), "--gpus", "1", "--stall-minutes", "9")
    here = InProcess(cli.inventory)
    assert here("train", "start", str(tmp_path / "c.toml"), "--name", "r", *words).returncode == 0
    first = train.newest(shell, place)
    wait_for_log(place, first.id, b"step 3")
    done = here("train", "restart", "r", "--set", "b=2", "--json")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)["run"]
    assert (second["name"], second["resumes"], second["gpus"], second["state"]) == ("r", first.id, [1], "running")
    assert train.status(shell, place, first.id).state is RunState.STOPPED
    record = record_of(place, second["id"])
    assert (record["settings"], record["env_names"], record["stall_minutes"]) == (["a=1", "b=2"], ["TOKEN"], 9)
    wait_for_log(place, second["id"], b"resumed at step")
    environment = run_folder(place, second["id"]) / "environment"
    assert b"TOKEN=hushhush" in retry_until(lambda: environment.exists() and environment.read_bytes())
    # Of a run that has ended nothing is stopped; what is left of its config may be changed.
    train.stop(shell, place)
    assert here("train", "restart", "--gpus", "none", "--restart", "1").returncode == 0
    last = train.newest(shell, place)
    assert (last.resumes, last.gpus, last.gpus_known) == (second["id"], (), True)


def test_a_restart_checks_all_before_it_stops(
    place: Container, cli: Cli, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = begin(shell, place, "r", gpus=(0,)), begin(shell, place, "other", gpus=(1,))
    for words, code, says in (
        (("--release", "20200101-000000-nogit-00000000"), 8, "there is no release"),
        (("--gpus", "1"), 7, f"run {other.id}"),
        (("--gpus", "7"), 2, "does not have"),
        (("--set", "steeps=1"), 3, "steeps: not known"),
    ):
        done = InProcess(cli.inventory)("train", "restart", "r", *words)
        assert (done.returncode, says in done.stderr.decode()) == (code, True), done.stderr
        assert not (run_folder(place, run.id) / "exit.json").exists(), words
    assert train.status(shell, place, run.id).state is RunState.RUNNING
    assert not [*(folder_of(place) / "runs").glob(".*.tmp")]

    def fails(*_: object, **__: object) -> None:
        raise OpsError("the supervisor did not start", next="x")

    with monkeypatch.context() as patch, pytest.raises(OpsError, match=f"stopped; go on.*restart {run.id}") as caught:
        patch.setattr(train, "start", fails)
        train.restart(shell, place, "r")
    assert str(caught.value) == caught.value.line()
    assert train.status(shell, place, run.id).state is RunState.STOPPED
    again = train.restart(shell, place, run.id).run
    assert again.state is RunState.RUNNING and again.gpus == (0,)


def test_start_and_wait_end_with_the_runs_own_code(place: Container, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("steps = 2\ncode = 42")
    waited = cli("train", "start", str(tmp_path / "c.toml"), "--wait", "--json")
    ended = json.loads(waited.stdout)
    assert (waited.returncode, ended["run"]["state"], ended["run"]["code"]) == (42, "failed", 42)
    lines = [json.loads(line) for line in InProcess(cli.inventory)("train", "logs", "--json").stdout.splitlines()]
    assert [it["line"] for it in lines[:-1]] == ["step 1 ", "step 2 "]
    assert {it["schema_version"] for it in lines} == {1} and lines[-1]["run"]["exit_code"] == 100


def test_a_broken_link_does_not_hide_what_a_stop_did(place: Container, shell: Shell, tmp_path: Path) -> None:
    run = begin(shell, place, config="sigterm = ignored")
    with Proxy(place.host, tmp_path) as proxy, Shell() as other, ThreadPoolExecutor(1) as pool:
        heard: list[tuple[str, int]] = []
        far = proxy.before(place)

        def hear(doing: str, left: int) -> None:
            heard.append((doing, left))

        stopping = pool.submit(train.stop, other, far, run.id, grace=0.4, on_wait=hear)
        retry_until(lambda: heard)
        proxy.cut()
        stopped = stopping.result(60)
    assert (stopped.run.state, stopped.survivors, stopped.gpu.back) == (RunState.STOPPED, (), True)
    assert run.id in heard[0][0] and heard[0][1] <= 1


def test_silence_is_given_up(place: Container, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"{place.path}/silent"
    inside(shell, place, "sh", "-c", f"printf '#!/bin/sh\nexec sleep 5\n' > {script}; chmod +x {script}")
    silent = replace(place, python=script)
    for ask in (
        lambda: train.status(shell, silent, "a"),
        lambda: train.list_runs(shell, silent),
        lambda: train.list_all(shell, silent),
        lambda: train.stop(shell, silent, "a"),
        lambda: train.stop_session(shell, silent, "a"),
        lambda: train.start(shell, silent, StartRequest("a", "", "c.toml", gpus=())),
    ):
        with monkeypatch.context() as impatient:  # who clears up afterwards is as patient as ever
            impatient.setattr(train, "CALL_SECONDS", 0.5)
            with pytest.raises(TimedOutError) as caught:
                ask()
        assert caught.value.exit_code == 124


def test_questions_beside_are_bounded_too(place: Container) -> None:
    asked: list[tuple[str, float | None]] = []

    class Spy(Shell):
        def run(self, place: Any, command: Command, *, timeout: float | None = None, check: bool = False) -> Result:
            asked.append((command.argv[0], timeout))
            return Result(place, command, 0, b"status: stopped\n", b"")

    spy = Spy()
    assert "is stopped" in str(spy.explain(place, Result(place, Command(("x",)), 255, b"", b"")))
    spy._settle(place)
    assert asked == [("pct", 15.0), ("sh", 15.0)]


def test_a_stop_touches_no_other_container_and_not_the_host(
    place: Container, sandbox: SandboxState, tmp_path: Path, shell: Shell
) -> None:
    (tmp_path / "other").mkdir()
    elsewhere = Box(write_inventory(tmp_path / "other", sandbox.name, vmid=201), sandbox)
    with stand_in_at(elsewhere.container) as other:
        theirs = begin(shell, other, config="child = yes\nstranger = yes", gpus=())
        run = begin(shell, place, config="child = yes\nstranger = yes\nsigterm = ignored", gpus=())
        # On the host, with the very mark of the run.
        words = f"DFLASH_RUN_ID={run.id} setsid sleep 100 >/dev/null 2>&1 </dev/null & echo $!"
        pid = shell.run(place.host, Command(("sh", "-c", words))).out.decode().strip()
        assert len(train.stop(shell, place, run.id, grace=0.2).killed) == 3
        assert shell.run(place.host, Command(("kill", pid))).code == 0  # it was there to be killed
        assert len(train.status(shell, other, theirs.id).processes) == 3


def test_gpu_memory_that_a_stop_can_not_get_back_is_a_failure(place: Container, shell: Shell) -> None:
    """Trainer and supervisor are killed; who holds the GPU has nothing that tells of the run, not even a group."""
    run = begin(shell, place, config="sigterm = ignored\npause = 100\nstranger = yes", gpus=(0,))
    written = run_folder(place, run.id) / "stranger.pid"  # by a process of its own
    stranger = retry_until(lambda: written.exists() and written.read_text()).strip()
    state = record_of(place, run.id, "state.json")
    if state["cgroup"]:
        inside(shell, place, "sh", "-c", f"echo {stranger} > {Path(state['cgroup']).parent}/cgroup.procs")
    kill(shell, place, run.id, "supervisor")
    kill(shell, place, run.id, "child")
    retry_until(lambda: not train.status(shell, place, run.id).processes, every=0.3)
    parameters = {"path": place.path, "run": run.id, "grace": 0, "memory_seconds": 0.3}
    with pytest.raises(
        OpsError, match=rf"GPU memory is not back.*GPU 0: 1551 MiB in use, held by {stranger} \(sleep 1000"
    ):
        stops.stopped(shell.run(place, bundle.command(place.python, "stop", parameters)))
    with pytest.raises(BusyError, match=r"which is gone; a child of it keeps the memory\) of no run uses 1542 MiB"):
        train.start(shell, place, StartRequest("b", "", "c.toml", gpus=(0,)))
    inside(shell, place, "kill", "-9", stranger)
    with pytest.raises(NotFoundError):
        train.stop(shell, place, run.id)


def test_ctrl_c_leaves_the_log_and_the_run_goes_on(place: Container, cli: Cli, shell: Shell) -> None:
    begin(shell, place)

    def readers() -> list[list[bytes]]:
        return [words for words in processes_of(place) if b"follow" in words]

    with cli.start("train", "logs", "-f") as follower:
        assert follower.stdout and follower.stderr
        follower.stdout.readline()
        assert readers()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130
        assert b"the run goes on" in follower.stderr.read()
    assert train.newest(shell, place).state is RunState.RUNNING
    retry_until(lambda: not readers())


def test_a_binary_log_arrives_byte_for_byte(place: Container, cli: Cli, shell: Shell) -> None:
    run = begin(shell, place, config="binary = yes\nsteps = 3")
    shown = cli("train", "logs", "-f").stdout
    assert shown == (run_folder(place, run.id) / "log").read_bytes()
    assert bytes(range(256)) * 1000 in shown
    assert InProcess(cli.inventory)("train", "logs", "-n", "2").stdout == b"step 3 \nsaved\n"
    with Path("/dev/full").open("wb") as full:
        failed = subprocess.run(cli.words("train", "logs"), stdout=full, stderr=subprocess.PIPE, env=cli.environment())
    text = failed.stderr.decode()
    assert (failed.returncode, text.count("\n")) == (1, 1) and "the output can't be written: No space left" in text


def test_the_window_in_the_container(place: Container, shell: Shell) -> None:
    run = begin(shell, place, name="w")

    def pane() -> bytes:
        return inside(shell, place, "tmux", "-L", "dflash", "capture-pane", "-p", "-t", "=dflash-w:")

    def press(*keys: str) -> None:
        inside(shell, place, "tmux", "-L", "dflash", "send-keys", "-t", "=dflash-w:", *keys)

    retry_until(lambda: b"step 2" in pane(), every=0.2)
    press("C-c")
    retry_until(lambda: b"[y/N]" in pane(), every=0.2)
    press("y", "Enter")
    retry_until(lambda: train.status(shell, place, run.id).state is RunState.STOPPED, every=0.3)


def test_a_pretty_terminal(place: Container, cli: Cli, shell: Shell) -> None:
    """On a terminal a binary log can't send escape sequences."""
    begin(shell, place, config="binary = yes\nsteps = 3")
    reading, writing = os.openpty()
    with subprocess.Popen(
        cli.words("train", "logs", "-f"), stdout=writing, stderr=writing, env=cli.environment()
    ) as it:
        os.close(writing)
        got = bytearray()
        try:
            while data := os.read(reading, 65536):
                got += data
        except OSError:  # a pseudo terminal's end
            pass
        assert it.wait() == 0
    os.close(reading)
    assert b"step 3" in got and b"finished" in got
    assert not set(got) & set(range(8)) and b"\x1b" not in got
