"""tmux servers and sessions that an end must not take along: of other people, of other names, shown in two places."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in
from stand_in import LocalBox, exists, retry_until

from dflash_ops import stops
from dflash_ops.command import Command, Container, Host, Result
from dflash_ops.errors import OpsError
from dflash_ops.remote import kin, owners, processes, view

PLACE = Container(Host("lab", "192.0.2.1"), 200)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[LocalBox]:
    with stand_in.local_box(tmp_path) as box:
        yield box


def tmux(*words: str) -> str:
    done = subprocess.run(["tmux", "-L", "default", *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def names() -> set[str]:
    done = subprocess.run(["tmux", "-L", "default", "ls", "-F", "#{session_name}"], capture_output=True, text=True)
    return set(done.stdout.split())


def pane(session: str) -> int:
    return int(tmux("list-panes", "-t", f"={session}:", "-F", "#{pane_pid}"))


def end(box: LocalBox, session: str, grace: float = 5.0) -> dict[str, Any]:
    code, reply = stand_in.call("sessions", {"path": str(box.path), "stop": session, "grace": grace})
    assert code == 0, reply
    return reply


def listed(box: LocalBox) -> dict[str, int]:
    code, reply = stand_in.call("sessions", {"path": str(box.path)})
    assert code == 0
    return {it["name"]: len(it["processes"]) for it in reply["sessions"]}


def test_a_name_like_an_id_is_a_name(box: LocalBox) -> None:
    tmux("new-session", "-d", "-s", "first", "sleep 1000")
    tmux("new-session", "-d", "-s", "$0", "sleep 1000")
    assert tmux("display-message", "-p", "-t", "=first:", "#{session_id}") == "$0"
    reply = end(box, "$0")
    assert (names(), reply["session_left"], reply["survivors"]) == ({"first"}, False, [])


def test_panes_that_another_session_shows_too_go_on(box: LocalBox) -> None:
    tmux("new-session", "-d", "-s", "one", "sleep 1000")
    tmux("new-session", "-d", "-s", "two", "-t", "one")
    tmux("new-session", "-d", "-s", "three", "sleep 1000")
    own, both = pane("three"), pane("one")
    tmux("link-window", "-s", "=one:0", "-t", "=three:7")
    reply = end(box, "three")
    assert (reply["also_in"], [it["pid"] for it in reply["ended"]]) == (["one", "two"], [own])
    reply = end(box, "two")
    assert (reply["also_in"], reply["ended"], names(), exists(both)) == (["one"], [], {"one"}, True)


def test_who_only_calls_itself_a_tmux_server_is_ended(box: LocalBox) -> None:
    program = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'tmux: server', 0, 0, 0); time.sleep(999)"
    tmux("new-session", "-d", "-s", "hand", f'{sys.executable} -c "{program}"')
    pid = pane("hand")
    retry_until(lambda: processes.comm(pid) == "tmux: server")
    assert [it["pid"] for it in end(box, "hand")["ended"]] == [pid] and not exists(pid)


def test_a_server_in_a_pane_lives_on_and_is_named(box: LocalBox) -> None:
    tmux("new-session", "-d", "-s", "hand", "sleep 1000")
    tmux("new-window", "-d", "-t", "=hand:", "tmux -L inner new-session -d -s deep 'sleep 1000'; sleep 1000")
    inner = ["tmux", "-L", "inner"]
    try:
        ask = [*inner, "display-message", "-p", "-t", "=deep:", "#{pid}"]
        server = int(retry_until(lambda: subprocess.run(ask, capture_output=True, text=True).stdout.strip()))
        reply = end(box, "hand")
        assert [it["pid"] for it in reply["spared"]] == [server] and exists(server)
        subprocess.run([*inner, "has-session", "-t", "=deep"], check=True)
    finally:
        subprocess.run([*inner, "kill-server"], check=False)


@pytest.mark.parametrize("more", ["", "\nsigterm = ignored\nrunaway = yes"])
def test_a_server_that_the_trainer_began_survives_its_stop(box: LocalBox, more: str) -> None:
    folder = box.start("a", f"tmux = sleep 1000{more}")
    trainer, theirs = box.trainer(folder), pane("theirs")
    server = int(tmux("display-message", "-p", "-t", "=theirs:", "#{pid}"))
    tmux("new-session", "-d", "-s", "mine", "sleep 1000")
    mine = pane("mine")
    retry_until(lambda: processes.environment(mine).get(b"DFLASH_RUN_ID") == folder.name.encode())  # once it is sleep
    assert listed(box) == {"theirs": 1, "mine": 1}
    code, reply = box.stop("a", grace=0.3 if more else 20)
    assert (code, reply["survivors"], exists(trainer)) == (0, [], False)
    assert {it["pid"] for it in reply["spared"]} == {server, theirs, mine}
    assert box.ended(folder)["left"] == [] and names() == {"theirs", "mine"}
    stopped = stops.stopped(answer_of(reply))
    assert {it.pid for it in stopped.spared} == {server, theirs, mine}
    found = owners.Owners(box.path)
    assert {found.of(it).kind for it in map(processes.read, (server, theirs, mine)) if it} == {"unknown"}
    # Nor is it a rest of the run, whose name is free again; it is somebody's sessions, which can be ended as such.
    code, again = box.try_start("a")
    assert (code, again["freed"], exists(mine)) == (0, [], True)
    assert [it["pid"] for it in end(box, "theirs")["ended"]] == [theirs] and names() == {"mine"}
    assert listed(box) == {"mine": 1}


def test_what_a_trainer_that_ends_leaves_is_killed_but_not_its_server(box: LocalBox, soak: bool) -> None:
    if not soak:
        pytest.skip("waits for the grace of what is left: with --soak")
    folder = box.start("a", "tmux = sleep 1000\nrunaway = yes\nsigterm = ignored\nsteps = 20")
    runaway = box.trainer(folder, "runaway.pid")
    ended = box.ended(folder)
    assert (ended["code"], ended["left"], exists(runaway), names()) == (0, [], False, {"theirs"})


def test_what_the_run_left_in_its_server_is_a_failure_that_names_it(box: LocalBox) -> None:
    folder = box.start("a", "tmux = sleep 1000")
    box.trainer(folder)
    tmux("new-session", "-d", "-s", "mine", f"exec 7<{folder}/config.toml; exec sleep 1000")
    mine = pane("mine")
    retry_until(lambda: f"{folder}/config.toml" in processes.open_files(mine))
    code, reply = box.stop("a")
    assert code == 0
    with pytest.raises(OpsError, match=f"{mine} .*config.toml.*no stop ends it") as caught:
        stops.stopped(answer_of(reply))
    assert str(mine) in caught.value.next and exists(mine)


def test_the_window_says_what_its_stop_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spared = [{"pid": 7, "holds": ""}, {"pid": 8, "holds": "GPU 1"}]

    def stop_folder(*_: object) -> dict[str, Any]:
        return {"survivors": [], "gpu": {"held": []}, "spared": spared}

    monkeypatch.setattr(view.stop, "stop_folder", stop_folder)

    def answer(_: str) -> str:
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    view._ask(tmp_path)  # pyright: ignore[reportPrivateUsage]
    shown = capsys.readouterr().out
    assert "process 7 lives in a tmux server that the run began]" in shown and "began, and holds GPU 1]" in shown


def answer_of(reply: dict[str, Any]) -> Result:
    return Result(PLACE, Command(("x",)), 0, json.dumps(reply).encode() + b"\n", b"")


def test_it_is_the_program_that_makes_a_server(box: LocalBox) -> None:
    tmux("new-session", "-d", "-s", "hand", "sleep 1000")
    server = int(tmux("display-message", "-p", "-t", "=hand:", "#{pid}"))
    assert kin.is_tmux_server(server)
    assert not kin.is_tmux_server(os.getpid()) and not kin.is_tmux_server(2**22 + 5)
