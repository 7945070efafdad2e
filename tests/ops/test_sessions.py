"""Sessions and GPU processes that were started by hand in the container: seen, and ended as a run is."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory
from in_container import folder_of, processes_of, stand_in_at
from in_process import InProcess
from stand_in import retry_until

from dflash_ops import progress, render_runs, stops, train
from dflash_ops.command import Command, Container
from dflash_ops.errors import BusyError, NotFoundError, OpsError
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunProcess
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

# Forks a child that stays, and one that leaves session, group and parent; each hears no SIGTERM when told so.
BY_HAND = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
for runs_away in (False, True):
    if os.fork() == 0:
        if runs_away:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(1000)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    return Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox)


@pytest.fixture
def place(box: Box, shell: Shell) -> Iterator[Container]:
    """The container with the stand-in trainer, and a script for sessions; at the end its tmux server is gone."""
    with stand_in_at(box.container) as place:
        (folder_of(place) / "by_hand.py").write_text(BY_HAND)
        yield place
        shell.run(place, Command(("tmux", "-L", "default", "kill-server")))


def inside(shell: Shell, place: Container, *words: str) -> bytes:
    return shell.run(place, Command(words), check=True).out


def begin(shell: Shell, place: Container, name: str, *words: str, env: str = "") -> None:
    """A session with a shell, into which the program is typed."""
    before = by_hand(place)
    inside(shell, place, "tmux", "-L", "default", "new-session", "-d", "-s", name, "sh")
    line = f"{env} {place.python} {place.path}/by_hand.py {' '.join(words)}"
    inside(shell, place, "tmux", "-L", "default", "send-keys", "-t", f"={name}:", line, "Enter")
    retry_until(lambda: by_hand(place) >= before + 3)  # with those that it forks; then it says so
    retry_until(
        lambda: b"ready" in inside(shell, place, "tmux", "-L", "default", "capture-pane", "-p", "-t", f"={name}:"),
        every=0.2,
    )


def by_hand(place: Container) -> int:
    """How many processes of the script live."""
    return sum(f"{place.path}/by_hand.py".encode() in words for words in processes_of(place))


def end_gpu_processes(shell: Shell, place: Container) -> None:
    def none_left() -> bool:
        left = train.list_all(shell, place).gpu_processes
        for process in left:
            shell.run(place, Command(("kill", "-9", str(process.pid))))
        return not left

    retry_until(none_left, every=0.2)


def test_a_session_is_listed_and_ended_with_all_that_it_started(place: Container, cli: Cli, shell: Shell) -> None:
    begin(shell, place, "hand", "deaf")
    begin(shell, place, "hand-2")
    run = train.start(shell, place, StartRequest("a", "", "c.toml", gpus=(1,))).run
    listed = json.loads(InProcess(cli.inventory)("train", "list", "--all", "--json").stdout)
    assert [it["id"] for it in listed["runs"]] == [run.id]
    assert {it["name"]: len(it["processes"]) for it in listed["sessions"]} == {"hand": 4, "hand-2": 4}
    before = by_hand(place)
    done = cli("train", "stop", "--session", "hand", "--grace", "0.3", "--json")
    ended = json.loads(done.stdout)
    assert (done.returncode, ended["session"], ended["survivors"], ended["session_left"]) == (0, "hand", [], False)
    assert len(ended["ended"]) == 4 and len(ended["killed"]) == 3
    # Its three processes and no other's; the server, the other session and the run go on.
    assert by_hand(place) == before - 3
    after = train.list_all(shell, place)
    assert [(it.name, len(it.processes)) for it in after.sessions] == [("hand-2", 4)]
    assert train.status(shell, place, run.id).state.live
    missing = InProcess(cli.inventory)("train", "stop", "--session", "han")
    assert missing.returncode == 8 and b"tmux has: hand-2" in missing.stderr
    # Its processes hear SIGTERM: nothing has to be killed, and the prompt goes with the session.
    last = train.stop_session(shell, place, "hand-2", grace=20)
    assert (last.killed, len(last.ended)) == ((), 4)
    assert by_hand(place) == 0
    with pytest.raises(NotFoundError, match="tmux has: none"):
        train.stop_session(shell, place, "hand-2")


def test_a_run_that_somebody_began_in_a_session_is_spared(place: Container, shell: Shell) -> None:
    begin(shell, place, "hand", "deaf", env="DFLASH_RUN_ID=other-20261129-120000-abcd")
    done = train.stop_session(shell, place, "hand", grace=0.1)
    assert (len(done.ended), done.session_left, by_hand(place)) == (1, False, 3)
    # The sandbox gives such processes its GPUs. The first is charged with them; when it is dead, its heirs are shown.
    first = train.list_all(shell, place).gpu_processes
    inside(shell, place, "kill", "-9", *(str(it.pid) for it in first))
    heirs = train.list_all(shell, place).gpu_processes
    assert (len(first), len(heirs), {it.used_mib for it in heirs}) == (1, 2, {None})
    end_gpu_processes(shell, place)
    assert by_hand(place) == 0


def test_a_tmux_server_that_was_started_in_a_session_lives_on(place: Container, shell: Shell) -> None:
    """It carries the session's mark in its environment, and holds other sessions."""
    begin(shell, place, "hand")
    line = "tmux -L other new-session -d -s inner sleep 1000"
    inside(shell, place, "tmux", "-L", "default", "new-window", "-t", "=hand:", f"{line}; sleep 1000")
    listed = retry_until(lambda: shell.run(place, Command(("tmux", "-L", "other", "ls"))).out, every=0.2)
    try:
        train.stop_session(shell, place, "hand", grace=0.3)
        assert inside(shell, place, "tmux", "-L", "other", "ls") == listed
    finally:
        shell.run(place, Command(("tmux", "-L", "other", "kill-server")))


def test_a_gpu_process_of_no_run_is_shown_and_no_start_takes_its_gpu(place: Container, shell: Shell) -> None:
    # The sandbox gives a GPU to whoever has a run's id; this one's is of no run of this folder, as from another tool.
    held = ("setsid", "env", "DFLASH_RUN_ID=x", "CUDA_VISIBLE_DEVICES=1", place.python, f"{place.path}/by_hand.py")
    words = f"{' '.join(held)} >/dev/null 2>&1 </dev/null &"
    inside(shell, place, "sh", "-c", words)
    found = retry_until(lambda: train.list_all(shell, place).gpu_processes, every=0.2)
    assert {it.gpus for it in found} == {(1,)} and sum(it.used_mib or 0 for it in found) == 1542.0
    with pytest.raises(BusyError, match=r"GPU 1 is taken.*of no run uses 1542 MiB"):
        train.start(shell, place, StartRequest("a", "", "c.toml", gpus=(1,)))
    end_gpu_processes(shell, place)


def test_the_table_of_what_runs_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    render_runs.show_by_hand(stops.Listing((), (), ()))
    assert "no tmux session of the default server" in capsys.readouterr().out
    trainer = stops.HandProcess(7, "S", "/opt/venv/bin/python train.py", 90.0, (1,), 1542.0)
    prompt = stops.HandProcess(6, "S", "bash", 95.0, (), None)
    hand = stops.Session("hand", "2026-11-29T12:00:00Z", True, (prompt, trainer))
    render_runs.show_by_hand(stops.Listing((), (hand,), (trainer,)))
    shown = capsys.readouterr().out
    assert "python train.py" in shown and "--session NAME" in shown and "1542" in shown and "1 m 30 s" in shown


SURVIVOR = RunProcess(7, "D", "nvidia_ioctl", "python train.py")


@pytest.mark.parametrize(
    ("survivors", "gpu", "says"),
    [
        ((SURVIVOR,), stops.GpuProof(True, False, "", ()), r"7 \(python train.py\), state D in nvidia_ioctl.*driver"),
        (
            (),
            stops.GpuProof(True, False, "", (stops.HeldGpu(1, 900.4, None, (SURVIVOR,)),)),
            r"GPU 1: 900 MiB in use, held by 7 \(python train.py\)",
        ),
        (
            (),
            stops.GpuProof(True, False, "", (stops.HeldGpu(1, None, 5.0, ()),)),
            "GPU 1: unknown in use, by no process of this container",
        ),
        ((), stops.GpuProof(True, False, "no answer in 5 s", ()), "can't be told to be back.*no answer in 5 s"),
    ],
)
def test_what_is_left_is_an_error_that_names_it(
    survivors: tuple[RunProcess, ...], gpu: stops.GpuProof, says: str
) -> None:
    with pytest.raises(OpsError, match=says) as caught:
        stops.prove("run a", survivors, gpu, "lab / container 200")
    assert caught.value.exit_code == 1 and caught.value.next
    stops.prove("run a", (), stops.GpuProof(True, True, "", ()), "lab")


def test_the_countdown_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = progress.Countdown()
    quiet("it saves", 5)
    quiet.close()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    shown = progress.Countdown()
    shown("it saves\x1b", 5)
    shown.close()
    assert capsys.readouterr().err == "\r\x1b[Kit saves\\x1b (5 s)\r\x1b[K"
