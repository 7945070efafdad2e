"""The remote scripts with real processes on this machine: start, supervise, stop, follow. Over ssh: test_train.py."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stand_in
from hypothesis import example, given
from hypothesis import strategies as st
from stand_in import LocalBox as Box
from stand_in import call, call_bytes, carriers, exists, retry_until

from dflash_ops import render_runs, runs
from dflash_ops.remote import answers, processes, rundir, start
from dflash_ops.remote.logfile import Log, tail_offset
from dflash_ops.remote.supervisor import parse_environment


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with stand_in.local_box(tmp_path, windows=False) as box:
        yield box


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Box]:
    """A box whose runs have their windows."""
    with stand_in.local_box(tmp_path) as box:
        yield box


# -- the course of a run


def test_a_run_ends_by_itself_and_its_exit_code_is_kept(box: Box) -> None:
    folder = box.start("a", "steps = 3\ncode = 7")
    ended = box.ended(folder)
    assert (ended["code"], ended["signal"], ended["stopped"]) == (7, None, False)
    assert [line.strip() for line in ended["last_lines"]] == ["step 1", "step 2", "step 3"]
    assert (folder / "log").read_bytes() == b"step 1 \nstep 2 \nstep 3 \n"
    retry_until(lambda: not (folder / ".room").exists())


def test_a_signal_is_told_as_a_shell_tells_it(box: Box) -> None:
    ended = box.ended(box.start("a", "steps = 1\nsignal = 11"))
    assert (ended["code"], ended["signal"]) == (128 + 11, 11)


def test_stop_lets_the_trainer_save(box: Box) -> None:
    folder = box.start("a")
    box.trainer(folder)
    code, reply = box.stop()
    assert code == 0
    assert reply["killed"] == reply["survivors"] == []
    assert reply["facts"]["exit"]["stopped"] is True
    assert reply["facts"]["exit"]["code"] == 0
    assert (folder / "log").read_bytes().endswith(b"saved\n")
    assert carriers(folder.name) == []


def test_resume_names_the_earlier_run(box: Box) -> None:
    first = box.start("a", "steps = 5")
    box.ended(first)
    code, reply = box.try_start("a", "steps = 7", resume="a")
    assert (code, reply["notes"]) == (0, [f"goes on from {first.name}, step 5"])
    second = box.path / "runs" / reply["facts"]["run_id"]
    box.ended(second)
    assert (second / "log").read_bytes().startswith(b"resumed at step 5\nstep 6 ")
    assert rundir.read_json(second / "run.json")["resumes"] == first.name  # type: ignore[index]


def test_the_environment_is_the_supervisors_own_making(box: Box) -> None:
    folder = box.start(
        "a",
        "environment = yes",
        env="SECRET=a b=c'\"$x\n# no\n\nDFLASH_RUN_ID=stolen\n",
        env_names=["SECRET"],
        gpus=[1, 0],
    )
    box.trainer(folder)
    environment = dict(
        entry.split(b"=", 1) for entry in (folder / "environment").read_bytes().split(b"\0") if b"=" in entry
    )
    assert environment[b"SECRET"] == b"a b=c'\"$x"
    assert environment[b"DFLASH_RUN_ID"] == folder.name.encode()
    assert environment[b"DFLASH_RUN_DIR"] == bytes(folder)
    assert environment[b"CUDA_VISIBLE_DEVICES"] == b"1,0"
    assert environment[b"CUDA_DEVICE_ORDER"] == b"PCI_BUS_ID"
    assert environment[b"PYTHONUNBUFFERED"] == b"1"
    assert environment[b"DFLASH_SHARED"] == os.fsencode(folder.parent.parent / "shared")
    # Nowhere else does the secret show: not in a command line, a record, the log, or another process's environment.
    assert (folder / "env").stat().st_mode & 0o777 == 0o600
    secret = b"a b=c'\"$x"
    for file in folder.rglob("*"):
        if file.is_file() and file.name not in ("env", "environment"):
            assert secret not in file.read_bytes(), file
    holders = [process.pid for process in processes.table() if secret in processes.environment(process.pid).values()]
    assert holders == [box.trainer(folder)]
    assert not any(secret.decode() in processes.command(process.pid) for process in processes.table())


@pytest.mark.parametrize(("gpus", "visible"), [([], b""), (None, None)])
def test_no_gpus_and_none_declared_are_two_things(box: Box, gpus: list[int] | None, visible: bytes | None) -> None:
    folder = box.start("a", "environment = yes", gpus=gpus)
    box.trainer(folder)
    entries = (folder / "environment").read_bytes().split(b"\0")
    found = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"CUDA_VISIBLE_DEVICES=")]
    assert found == ([] if visible is None else [visible])


# -- stop: more of it in test_stop.py


def test_a_stopped_process_is_no_obstacle(box: Box) -> None:
    folder = box.start("a")
    os.kill(box.trainer(folder), signal.SIGSTOP)
    code, reply = box.stop(grace=20)
    assert code == 0
    assert reply["facts"]["exit"]["code"] == 0  # woken, it saved
    supervised = box.start("a", "sigterm = ignored")
    box.trainer(supervised)
    os.kill(box.facts("a")["state"]["supervisor"]["pid"], signal.SIGSTOP)
    code, reply = box.stop(grace=0.3)
    assert code == 0
    assert (reply["facts"]["exit"]["code"], reply["facts"]["exit"]["stopped"]) == (137, True)


def test_a_run_is_over_when_all_of_it_is(box: Box) -> None:
    folder = box.start("a", "child = yes\nrunaway = yes\nsteps = 30")
    left = [box.trainer(folder, "child.pid"), box.trainer(folder, "runaway.pid")]
    assert box.ended(folder)["left"] == []
    assert not any(exists(pid) for pid in left)


def test_nothing_to_stop(box: Box) -> None:
    assert box.stop()[0] == 8
    folder = box.start("a", "steps = 1")
    box.ended(folder)
    retry_until(lambda: not rundir.facts(folder, processes.boot_id())["supervisor_alive"])
    code, reply = box.stop("a")
    assert (code, reply["kind"]) == (8, "not_found")
    assert "exit code 0" in reply["why"]
    assert box.stop("b")[0] == 8


def test_which_of_two(box: Box) -> None:
    for name in ("a", "b"):
        box.trainer(box.start(name))
    code, reply = box.stop()
    assert (code, reply["kind"]) == (7, "busy")
    assert "a-" in reply["why"] and "b-" in reply["why"]


# -- crashes


def test_a_killed_trainer_is_told(box: Box) -> None:
    folder = box.start("a", "child = yes")
    box.trainer(folder, "child.pid")
    os.kill(box.trainer(folder), signal.SIGKILL)
    ended = box.ended(folder)
    assert (ended["code"], ended["signal"], ended["stopped"]) == (137, 9, False)
    assert carriers(folder.name) == []


def test_a_killed_supervisor_is_lost_and_its_trainer_is_found_and_ended(box: Box, tmp_path: Path) -> None:
    folder = box.start("a", "sigterm = ignored\npause = 100\nrunaway = yes")
    box.trainer(folder)
    box.trainer(folder, "runaway.pid")
    lock = tmp_path / "dflash-ops-gpu-0.lock"
    os.kill(box.facts("a")["state"]["supervisor"]["pid"], signal.SIGKILL)
    facts = retry_until(lambda: (it := box.facts("a")) and not it["supervisor_alive"] and it)
    assert facts["exit"] is None
    assert {it["pid"] for it in facts["processes"]} == set(carriers(folder.name)) != set()
    assert not lock.exists()
    code, reply = box.stop("a", grace=0.2)
    assert code == 0
    assert reply["was_lost"] and reply["survivors"] == []
    assert carriers(folder.name) == []
    assert box.stop("a")[0] == 8


def test_the_trainer_of_a_killed_supervisor_saves_and_ends(box: Box) -> None:
    folder = box.start("a", "pause = 0.5")
    trainer = box.trainer(folder)
    os.kill(box.facts("a")["state"]["supervisor"]["pid"], signal.SIGKILL)
    retry_until(lambda: not exists(trainer))
    assert rundir.checkpoints(folder)


def test_a_start_ends_what_a_dead_run_of_the_same_name_left(box: Box) -> None:
    first = box.start("a", "sigterm = ignored\npause = 100")
    trainer = box.trainer(first)
    os.kill(box.facts("a")["state"]["supervisor"]["pid"], signal.SIGKILL)
    retry_until(lambda: not box.facts("a")["supervisor_alive"])
    code, reply = box.try_start("a")
    assert code == 0
    assert [it["pid"] for it in reply["freed"]] == [trainer]
    assert not exists(trainer)


# -- GPU locks


def _locked(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_the_lock_lives_as_long_as_the_supervisor_and_is_not_handed_on(box: Box, tmp_path: Path) -> None:
    lock = tmp_path / "dflash-ops-gpu-0.lock"
    prefix = ("flock", "-n", "-E", "7", "-F", str(lock))
    folder = box.start("a", "sigterm = ignored\npause = 100\nenvironment = yes", gpus=[0], prefix=prefix)
    trainer = box.trainer(folder)
    assert _locked(lock)
    assert str(lock) not in (folder / "descriptors").read_text()
    done = call_bytes("start", stand_in.start_parameters(box.path, "b", "", gpus=[0]), prefix=prefix)
    assert (done.returncode, done.stdout) == (7, b"")
    os.kill(box.facts("a")["state"]["supervisor"]["pid"], signal.SIGKILL)
    retry_until(lambda: not _locked(lock))
    assert exists(trainer)


# -- refusals, before anything has changed


def test_two_starts_at_once_one_wins_and_the_other_says_who(box: Box) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: box.try_start("a"), range(4)))
    won = [reply["facts"]["run_id"] for code, reply in answers if code == 0]
    assert len(won) == 1
    assert [(code, won[0] in reply["what"]) for code, reply in answers if code] == [(7, True)] * 3
    assert len(rundir.folders(box.path)) == 1


def test_a_gpu_in_use_is_refused_within_the_container_too(box: Box) -> None:
    folder = box.start("a", gpus=[0, 1])
    code, reply = box.try_start("b", gpus=[1])
    assert (code, reply["what"]) == (7, "GPU 1 is taken")
    assert folder.name in reply["why"]
    assert box.try_start("c", gpus=[2])[0] == 0


def test_the_same_run_id_starts_once(box: Box) -> None:
    parameters = stand_in.start_parameters(box.path, "a", "")
    first = call("start", parameters)[1]
    code, again = call("start", parameters)
    assert code == 0
    assert again["existing"] is True
    assert again["facts"]["state"] == first["facts"]["state"]


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ({"config": "steeps = 3"}, 3, "mine.toml: steeps: not known; did you mean steps?"),
        ({"release": "r9"}, 8, "there is no release 'r9'"),
        ({"resume": "nobody"}, 8, "there is no run nobody"),
        ({"init_from": "/nowhere"}, 8, "no drafter at /nowhere"),
    ],
)
def test_refused_before_anything_has_changed(box: Box, more: dict[str, Any], code: int, says: str) -> None:
    got, reply = box.try_start("a", more.pop("config", ""), **more)
    assert got == code
    assert says in reply["what"] + reply["why"]
    assert reply["next"] and "mine.toml" not in reply["where"]  # it stands in the reason already
    assert list((box.path / "runs").glob("*")) == []
    assert list((box.path / "runs").glob(".*")) == []


def test_a_supervisor_that_can_not_start_leaves_a_failed_run(box: Box, tmp_path: Path) -> None:
    python = tmp_path / "python"
    script = 'case "$*" in *"/ops supervisor"*) echo no memory >&2; exit 1;; esac'
    python.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, reply = box.try_start("a", python=str(python))
    assert (code, reply["what"], reply["why"]) == (1, "the supervisor did not start", "no memory")
    facts = box.facts("a")
    assert (facts["exit"]["code"], facts["exit"]["last_lines"]) == (126, ["no memory"])
    assert box.try_start("a")[0] == 0


def test_nothing_deployed(box: Box) -> None:
    (box.path / "current").unlink()
    code, reply = box.try_start("a")
    assert (code, reply["next"]) == (8, "dflash-ops deploy")


def test_no_tmux_is_said_first(box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "bin"))
        code, reply = box.try_start("a")
    assert (code, reply["kind"], reply["what"]) == (6, "preflight", "no tmux in the container")
    assert not (box.path / "runs").exists()


def test_half_a_request_starts_nothing(box: Box) -> None:
    from dflash_ops.remote import bundle

    command = bundle.command(sys.executable, "start", stand_in.start_parameters(box.path, "a", ""))
    done = subprocess.run(command.argv, input=command.stdin[:-20], capture_output=True, check=False)
    assert done.returncode != 0
    assert not (box.path / "runs").exists()


# -- the log


def test_the_last_words_of_a_sudden_end_are_kept(box: Box) -> None:
    folder = box.start("a", "burst = yes")
    box.ended(folder)
    assert (folder / "log").read_bytes() == b"0123456789abcde\n" * 300_000


def test_a_full_disk_costs_log_bytes_but_not_the_run(box: Box, tmp_path: Path) -> None:
    folder = box.path / "runs"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder]).returncode:
        pytest.skip("needs root to make a small disk")
    try:
        run = box.start("a", "width = 20000\npause = 0.01\nsteps = 200")
        ended = box.ended(run)
        assert ended["code"] == 0  # the trainer has noticed nothing, and the record found the room kept for it
        assert ended["log_lost_bytes"] > 1_000_000
        assert 0 < (run / "log").stat().st_size < 600_000
        retry_until(lambda: not box.facts("a")["supervisor_alive"])
    finally:
        subprocess.run(["tmux", "-L", "dflash", "kill-server"], capture_output=True, check=False)
        retry_until(lambda: subprocess.run(["umount", folder], capture_output=True).returncode == 0)


def test_the_log_says_what_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = Log(tmp_path / "log")
    log.write(b"before\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, hard))
    try:
        log.write(b"gone\n")
        log.write(b"gone too\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == (
        b"before\n\n[dflash-ops: 14 bytes of this log were lost here: File too large]\nafter\n"
    )
    assert log.lost == 14
    assert log.last_lines() == ["before", "gone", "gone too", "after"]


def test_a_binary_log_arrives_as_it_was_written(box: Box) -> None:
    folder = box.start("a", "binary = yes\nsteps = 2")
    box.ended(folder)
    done = call_bytes(
        "follow", {"path": str(box.path), "run": "a", "offset": 100, "tail": None, "follow": True, "quiet": False}
    )
    header, _, data = done.stdout.partition(b"\n")
    told = {"schema_version": 1, "ok": True, "run_id": folder.name, "offset": 100, "gone": 0, "timed": True}
    assert json.loads(header) == told
    assert data == (folder / "log").read_bytes()[100:]
    assert data.startswith(bytes(range(100, 256)))


def test_following_ends_with_the_run_and_with_its_reader(box: Box) -> None:
    from dflash_ops.remote import bundle

    folder = box.start("a")
    box.trainer(folder)
    parameters = {"path": str(box.path), "run": "a", "offset": None, "tail": 0, "follow": True, "quiet": True}
    command = bundle.command(sys.executable, "follow", parameters)
    with subprocess.Popen(command.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as follower:
        assert follower.stdin and follower.stdout
        follower.stdin.write(command.stdin)
        follower.stdin.close()
        follower.stdout.readline()
        follower.stdout.close()  # a reader that is gone, with nothing more to be written
        assert follower.wait(60) == 0
    command = bundle.command(sys.executable, "follow", {**parameters, "quiet": False})
    with subprocess.Popen(command.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as follower:
        assert follower.stdin and follower.stdout
        follower.stdin.write(command.stdin)
        follower.stdin.close()
        follower.stdout.readline()  # it follows, from the log's end at this moment on
        box.stop()
        assert follower.stdout.read().endswith(b"saved\n") and follower.wait(60) == 0


@pytest.mark.parametrize(
    ("text", "lines", "offset"),
    [
        (b"", 5, 0),
        (b"a\nb\nc\n", 1, 4),
        (b"a\nb\nc", 1, 4),
        (b"a\nb\nc\n", 2, 2),
        (b"a\nb\nc\n", 3, 0),
        (b"a\nb\nc\n", 9, 0),
        (b"a\nb\nc\n", 0, 6),
        (b"x" * 70_000 + b"\n" + b"y" * 70_000 + b"\n", 1, 70_001),
    ],
)
def test_tail_offset(tmp_path: Path, text: bytes, lines: int, offset: int) -> None:
    (tmp_path / "log").write_bytes(text)
    assert tail_offset(tmp_path, lines) == offset


# -- the window


def _pane() -> str:
    shown = subprocess.run(["tmux", "-L", "dflash", "capture-pane", "-p", "-t", "=dflash-a:"], capture_output=True)
    return shown.stdout.decode()


def test_ctrl_c_in_the_window_asks_before_it_stops(windowed: Box) -> None:
    def press(*keys: str) -> None:
        subprocess.run(["tmux", "-L", "dflash", "send-keys", "-t", "=dflash-a:", *keys], check=True)

    folder = windowed.start("a", "pause = 0.3")
    retry_until(lambda: "step 2" in _pane())
    press("C-c")
    retry_until(lambda: f"Stop run {folder.name}? [y/N]" in _pane())
    press("n", "Enter")
    retry_until(lambda: "it goes on" in _pane())
    assert windowed.facts("a")["supervisor_alive"]
    press("C-c")
    retry_until(lambda: _pane().count("[y/N]") == 2)
    press("y", "Enter")
    assert windowed.ended(folder)["stopped"] is True


def test_the_window_is_only_a_window(windowed: Box) -> None:
    folder = windowed.start("a")
    windowed.trainer(folder)
    subprocess.run(["tmux", "-L", "dflash", "kill-server"], check=True)
    assert windowed.facts("a")["supervisor_alive"]
    assert windowed.stop("a")[1]["facts"]["exit"]["code"] == 0


# -- small things


def test_parse_environment() -> None:
    text = b"A=1\n  B = x=y \n# C=3\n\nno sign\nD=\r\nE=\xff"
    assert parse_environment(text) == {b"A": b"1", b"B": b" x=y ", b"D": b"", b"E": b"\xff"}


def test_a_process_with_a_nasty_name_is_read(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "100"]) as sleeper:
        process = processes.read(sleeper.pid)
        assert process is not None
        assert (process.parent, process.state in "SRD", process.ended) == (os.getpid(), True, False)
        assert 0 <= processes.age_seconds(process) < 100
        sleeper.kill()
    assert processes.find(process.identity()) is None


def test_records_are_whole_or_not_there(tmp_path: Path) -> None:
    rundir.write_json(tmp_path / "x.json", {"a": 1})
    with contextlib.suppress(TypeError):
        rundir.write_json(tmp_path / "x.json", {"a": object()})
    assert rundir.read_json(tmp_path / "x.json") == {"a": 1}
    (tmp_path / "y.json").write_text("[1")
    assert rundir.read_json(tmp_path / "y.json") is None


# -- what does not belong there


@pytest.mark.parametrize("release", ["../current", "/tmp", "", ".", f"../releases/{stand_in.RELEASE}", "r1\n"])
def test_only_a_release_can_be_started(box: Box, release: str) -> None:
    code, reply = box.try_start("a", release=release)
    assert (code, reply["kind"]) == (8, "not_found")
    assert not rundir.folders(box.path)


def test_a_link_that_leaves_the_releases_starts_nothing(box: Box, tmp_path: Path) -> None:
    elsewhere = stand_in.make_release(tmp_path / "elsewhere")
    stranger = "20261129-120000-nogit-00000000"
    (box.path / "releases" / stranger).symlink_to(elsewhere)
    (box.path / "current").unlink()
    (box.path / "current").symlink_to(elsewhere)
    for release in (stranger, None):
        code, reply = box.try_start("a", release=release)
        assert (code, reply["kind"]) == (6, "preflight")
        assert str(elsewhere) in reply["why"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pid", "start", "x"]), inner),
    max_leaves=5,
)
_FIELDS = ["gpus", "release", "created_at", "resumes", "boot_id", "supervisor", "child", "code", "signal", "stopped"]
_RECORD = _JSON | st.dictionaries(
    st.sampled_from([*_FIELDS, "ended_at", "seconds", "last_lines", "log_lost_bytes"]), _JSON
)


@given(run=_RECORD, state=_RECORD, ended=_RECORD, status=_RECORD)
@example(run={"gpus": 5}, state={"supervisor": 3}, ended={}, status=[])
@example(run={"gpus": ["0"]}, state={"child": {"pid": 1}}, ended={"seconds": float("nan"), "last_lines": 3}, status=1)
def test_foreign_records_are_read_as_far_as_they_are_ours(run: Any, state: Any, ended: Any, status: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "runs", "a-20261129-120000-abcd")
        folder.mkdir(parents=True)
        if isinstance(state, dict):
            state["boot_id"] = processes.boot_id()
        for name, record in {"run": run, "state": state, "exit": ended, "status": status}.items():
            (folder / f"{name}.json").write_text(json.dumps(record))
        found = runs.run_of(rundir.facts(folder, processes.boot_id()))
        render_runs.show_runs([found])
        render_runs.show_run(found)
        assert found.verdict() and json.dumps(found.to_json())


def test_one_foreign_record_ends_no_listing_and_no_stop(box: Box) -> None:
    folder = box.path / "runs" / "b-20261129-120000-abcd"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"gpus": 5}')
    (folder / "state.json").write_text(json.dumps({"boot_id": processes.boot_id(), "supervisor": 3, "child": {}}))
    (folder / "exit.json").write_text("{}")
    folder.with_name("c-20261129-120000-abcd").symlink_to("nowhere")
    mine = box.start("a", gpus=[0])
    assert [it["run_id"] for it in box.all_facts()] == [folder.name, mine.name]
    code, reply = box.stop("b")
    assert (code, reply["why"]) == (8, "it has ended; its record does not say how")


def test_a_start_waits_for_another_as_long_as_that_may_take(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start.HOLD_SECONDS > 60  # the holder may be checking a config
    monkeypatch.setattr(start, "HOLD_SECONDS", 0.0)
    with rundir.start_lock(box.path), pytest.raises(answers.Fault) as caught:
        start.start(stand_in.start_parameters(box.path, "a", ""))
    assert caught.value.kind == "busy" and "held for 0 s" in caught.value.parts["why"]


_NO_FOLDER: list[tuple[str, dict[str, Any]]] = [
    ("start", stand_in.start_parameters(Path(), "a", "")),
    ("stop", {"run": None, "grace": 1}),
    ("report", {"run": None}),
    ("follow", {"run": "a", "offset": None, "tail": None, "follow": False, "quiet": False}),
    ("gpuview", {"fields": ["index"], "apps": ["pid"], "seconds": 1}),
]


@pytest.mark.parametrize(("verb", "parameters"), _NO_FOLDER, ids=[verb for verb, _ in _NO_FOLDER])
def test_a_path_that_can_be_no_folder_is_the_inventorys_fault(verb: str, parameters: dict[str, Any]) -> None:
    code, reply = call(verb, {**parameters, "path": "/etc/passwd"})
    assert (code, reply["kind"], reply["next"]) == (6, "preflight", "correct `path` in the inventory")
    assert "/etc/passwd" in reply["where"]
