"""What a stop leaves behind, with real processes on this machine: nothing, or a failure that names what is left."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stand_in
from stand_in import LocalBox, carriers, exists, retry_until

from dflash_ops import runs
from dflash_ops.remote import cgroups, gpuproof, processes, rundir
from dflash_ops.runs import RunState

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[LocalBox]:
    with stand_in.local_box(tmp_path, windows=False) as box:
        yield box


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[LocalBox]:
    """A box whose runs have their windows."""
    with stand_in.local_box(tmp_path) as box:
        yield box


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake GPU, and its nvidia-smi on the PATH."""
    card = stand_in.fake_gpu(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return card


def holders(card: Path) -> list[int]:
    found: list[int] = []
    for process in processes.table():
        if str(card) in processes.open_files(process.pid):
            found.append(process.pid)
    return found


# -- long counts

SHAPES = (
    "child = yes",
    "runaway = yes",
    "setsid = yes",
    "stranger = yes",
    "sigterm = ignored",
    "child = yes\nrunaway = yes\nstranger = yes\nsigterm = ignored",
    "sigterm = ignored\npause = 1000",
    "runaway = yes\nstranger = yes\nstop it",
    "child = yes\nsigterm = ignored\nstop it",
    "runaway = yes\nsigterm = ignored\nkill it",
)
ALONE = SHAPES[:2] + SHAPES[4:5]  # each is a part of others: with --soak


def test_stops_leave_nothing(windowed: LocalBox, card: Path, soak: bool) -> None:
    """With --soak 100 of them: trainers that fork, double-fork, run away without an environment, are deaf, asleep,
    stopped, whose supervisor was killed; each with a GPU that orphans inherit; beside a run that must not notice."""
    other = windowed.start("run-ab", "child = yes\nrunaway = yes\nstranger = yes")
    labels = ("trainer.pid", "child.pid", "runaway.pid", "stranger.pid")
    beside = [windowed.trainer(other, label) for label in labels]
    for turn in range(100 if soak else len(SHAPES)):
        shape = SHAPES[turn % len(SHAPES)]
        if not soak and shape in ALONE:
            continue
        folder = windowed.start("run-a", f"gpu = {card}\n{shape}", gpus=[0])
        trainer = windowed.trainer(folder)
        for label in ("child", "runaway", "stranger"):
            if label in shape:
                windowed.trainer(folder, f"{label}.pid")
        assert trainer in holders(card)
        if "stop it" in shape:
            os.kill(trainer, signal.SIGSTOP)
        if "kill it" in shape:
            os.kill(facts(folder)["state"]["supervisor"]["pid"], signal.SIGKILL)
        group = facts(folder)["state"]["cgroup"]
        code, reply = windowed.stop("run-a", grace=20 if shape in SHAPES[2:4] else 0.3)
        assert (code, reply["survivors"], reply["gpu"]["held"]) == (0, [], []), (shape, reply)
        assert reply["gpu"]["checked"] and reply["gpu"]["back"]
        assert carriers(folder.name) == holders(card) == [], shape
        assert group is None or not Path(group).exists()
        if (folder / "stranger.pid").exists():
            assert not exists(windowed.trainer(folder, "stranger.pid"))
        state = runs.run_of(reply["facts"]).state
        assert state is (RunState.LOST if "kill it" in shape else RunState.STOPPED), shape
    assert all(map(exists, beside))
    assert windowed.facts("run-ab")["supervisor_alive"]
    sessions = subprocess.run(["tmux", "-L", "dflash", "ls"], capture_output=True, check=True).stdout
    assert b"dflash-run-ab:" in sessions


def test_one_truth_each(box: LocalBox, soak: bool) -> None:
    """50 races of two starts, of a start against a stop, of a stop against a run that ends by itself."""
    dice = random.Random(7)
    races = (_two_starts, _start_against_stop, _stop_against_an_end)
    with ThreadPoolExecutor(2) as pool:
        for turn in range(150 if soak else 3):
            races[turn % 3](box, pool, dice)


def _two_starts(box: LocalBox, pool: ThreadPoolExecutor, _: random.Random) -> None:
    first, second = pool.map(lambda _: box.try_start("a"), range(2))
    assert sorted((first[0], second[0])) == [0, 7]
    won = next(reply["facts"]["run_id"] for code, reply in (first, second) if code == 0)
    lost = next(reply for code, reply in (first, second) if code == 7)
    assert won in lost["what"]
    assert [it["run_id"] for it in rundir.live_runs(box.path)] == [won]
    assert box.stop("a")[0] == 0


def _start_against_stop(box: LocalBox, pool: ThreadPoolExecutor, _: random.Random) -> None:
    starting = pool.submit(box.try_start, "b")
    stopping = pool.submit(box.stop, "b")
    started, stopped = starting.result(), stopping.result()
    assert started[0] == 0
    run = runs.run_of(facts(box.path / "runs" / started[1]["facts"]["run_id"]))
    if stopped[0] == 0:  # it came behind
        assert run.state is RunState.STOPPED and carriers(run.id) == []
    else:
        assert (stopped[0], run.state) == (8, RunState.RUNNING)
        assert box.stop("b")[0] == 0


def _stop_against_an_end(box: LocalBox, _: ThreadPoolExecutor, dice: random.Random) -> None:
    folder = box.start("c", f"records = yes\nsteps = {dice.randrange(1, 30)}\npause = 0.02")
    code, reply = box.stop("c")
    ended = box.ended(folder)
    run = runs.run_of(facts(folder))
    assert (code, run.code, ended["code"]) in ((0, 0, 0), (8, 0, 0), (0, 143, 143))
    # A trainer that SIGTERM reached may have ended before the supervisor saw that a stop was asked: then it says so.
    was_stopped = (ended["stopped"] and _said(folder) != "finished") or _said(folder) == "stopped"
    assert run.state is (RunState.STOPPED if was_stopped else RunState.FINISHED)
    if code == 0:
        assert runs.run_of(reply["facts"]).state is run.state
    assert carriers(folder.name) == []


def facts(folder: Path) -> dict[str, Any]:
    return rundir.facts(folder, processes.boot_id())


def _said(folder: Path) -> str | None:
    """What the trainer itself said at its end."""
    return (rundir.read_json(folder / "status.json") or {}).get("state")


# -- what can't be ended, and what is not ours


def test_what_the_kernel_will_not_let_die_is_named(box: LocalBox, card: Path) -> None:
    """A process of a frozen group of the old hierarchy is in state D, as in a driver that hangs."""
    group = FREEZER / f"dflash-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer of the old hierarchy")
    folder = box.start("a", f"gpu = {card}", gpus=[0])
    trainer = box.trainer(folder)
    supervisor = box.facts("a")["state"]["supervisor"]
    try:
        (group / "cgroup.procs").write_text(str(trainer))
        (group / "freezer.state").write_text("FROZEN")
        retry_until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        code, reply = box.stop("a", grace=0.1, kill_seconds=0.5)
        assert code == 0
        assert [(it["pid"], it["state"]) for it in reply["survivors"]] == [(trainer, "D")]
        assert not reply["gpu"]["back"]
        # The supervisor stays, with the GPU's lock, and the run is not told to have ended.
        assert processes.alive(supervisor)
        assert reply["facts"]["exit"] is None
        assert box.try_start("a")[0] == 7
    finally:
        (group / "freezer.state").write_text("THAWED")
        retry_until(lambda: not exists(trainer))
        group.rmdir()
    ended = box.ended(folder)
    assert (ended["stopped"], ended["signal"]) == (True, 9)


def test_a_gpu_that_a_stranger_holds_is_a_failure_and_the_stranger_lives(
    box: LocalBox, card: Path, tmp_path: Path
) -> None:
    folder = box.start("a", f"gpu = {card}", gpus=[0])
    box.trainer(folder)
    with card.open("rb"):  # as if the descriptor had been passed on through a socket
        code, reply = box.stop("a", memory_seconds=0.3)
        assert code == 0 and reply["survivors"] == []
        gpu = reply["gpu"]
        assert (gpu["checked"], gpu["back"]) == (True, False)
        assert [(it["index"], it["charged_mib"], it["used_mib"]) for it in gpu["held"]] == [(0, 1000.0, 1009.0)]
        # Asked again, it does not say that all is well: the run is over, its memory is not back.
        code, again = box.stop("a", memory_seconds=0.3)
        assert code == 0
        # (Who holds it may differ: other tests' processes come and go.)
        assert [it["used_mib"] for it in again["gpu"]["held"]] == [1009.0]
    assert box.stop("a")[0] == 8


def test_memory_that_nobody_is_charged_with_is_missed(box: LocalBox, card: Path) -> None:
    folder = box.start("a", f"gpu = {card}", gpus=[0])
    box.trainer(folder)
    Path(f"{card}.leaks").touch()
    _, reply = box.stop("a", memory_seconds=0.3)
    assert not reply["gpu"]["back"]
    assert [(it["index"], it["charged_mib"], it["used_mib"]) for it in reply["gpu"]["held"]] == [(0, None, 1009.0)]


def test_a_driver_that_hangs_is_no_proof(box: LocalBox, card: Path, tmp_path: Path) -> None:
    folder = box.start("a", f"gpu = {card}", gpus=[0])
    box.trainer(folder)
    with (tmp_path / "bin" / "nvidia-smi").open("w") as program:
        program.write("#!/bin/sh\necho Failed to initialize NVML: Unknown Error\nexit 255\n")
    _, reply = box.stop("a", memory_seconds=0.3)
    assert not reply["gpu"]["back"] and "NVML" in reply["gpu"]["why"]


def test_others_may_take_what_the_run_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def picture(used: float, *charges: tuple[str, int, float]) -> gpuproof.Picture:
        return gpuproof.Picture((gpuproof.Card(0, "GPU-1", "x", used, 24576.0),), charges)

    mine, dead = processes.read(os.getpid()), 2**22 + 5  # no pid is that large
    assert mine is not None
    pictures = [picture(2009, ("GPU-1", dead, 1000), ("GPU-1", mine.pid, 1000))]
    monkeypatch.setattr(gpuproof, "look", lambda: pictures[-1])
    proof = gpuproof.Proof([], {"pid": dead, "start": 1}, [0])
    pictures.append(picture(2009, ("GPU-1", mine.pid, 2000)))
    assert proof.back()  # another process of the container grew meanwhile
    pictures.append(picture(2009, ("GPU-1", mine.pid, 1000)))
    assert not proof.back()
    pictures.append(picture(1009, ("GPU-1", mine.pid, 1000)))
    assert proof.back()
    # A pid that has a new owner is not the run's.
    proof = gpuproof.Proof([], {"pid": mine.pid, "start": mine.start - 1}, [0])
    assert proof.back()
    assert not gpuproof.Proof([], {"pid": mine.pid, "start": mine.start}, [0]).back()


def test_only_the_runs_own_group_is_killed(box: LocalBox, tmp_path: Path) -> None:
    folder = box.start("a", "stranger = yes")
    group = box.facts("a")["state"]["cgroup"]
    if group is None:
        pytest.skip("no cgroup can be made here")
    stranger = box.trainer(folder, "stranger.pid")
    assert stranger in cgroups.pids(group, folder.name)
    above = str(Path(group).parent)
    for wrong in (above, None, "", "/etc", str(tmp_path), f"{group}/..", 3):
        assert cgroups.pids(wrong, folder.name) == set() and not cgroups.kill(wrong, folder.name)  # type: ignore[arg-type]
    assert not cgroups.kill(group, "run-ab-20261129-120000-abcd")
    # A forged record sends no signal to what is beside it.
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "cgroup": above}))
    assert {it.pid for it in rundir.members(rundir.facts(folder, processes.boot_id()))} == {
        box.trainer(folder),
        stranger,
    }
    (folder / "state.json").write_text(json.dumps(state))
    assert box.stop("a")[0] == 0
    assert not exists(stranger)


def test_pids_that_were_given_away_are_never_signalled(box: LocalBox, share: Callable[[list], list]) -> None:
    """Every record of a run names pids; each may be a stranger's by now."""
    folder = box.start("a")
    box.trainer(folder)
    box.stop()
    state = json.loads((folder / "state.json").read_text())
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        found = processes.read(stranger.pid)
        assert found is not None
        try:
            former = processes.Process(found.pid, found.start - 1, found.parent, found.group, found.state)
            assert not processes.send(former, signal.SIGKILL)
            for who in share([("supervisor",), ("child",), ("supervisor", "child")] * 5):
                forged: dict[str, Any] = {**state, "state": "running"}
                for name in who:
                    forged[name] = {
                        "pid": found.pid,
                        "start": found.start + random.choice([-1, 1, 100]),
                        "pgid": found.pid,
                    }
                (folder / "state.json").write_text(json.dumps(forged))
                (folder / "exit.json").unlink(missing_ok=True)
                assert box.stop("a", grace=0.1)[0] == 8
                code, reply = box.try_start("a", "steps = 1")
                assert code == 0 and reply["freed"] == []
                box.ended(box.path / "runs" / reply["facts"]["run_id"])
                assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_stop_asked_again_tells_what_the_first_one_did(box: LocalBox) -> None:
    folder = box.start("a")
    box.trainer(folder)
    box.stop("a")
    code, reply = box.stop(folder.name, again=True)
    assert (code, reply["facts"]["exit"]["stopped"], reply["survivors"], reply["was_lost"]) == (0, True, [], False)
    assert box.stop(folder.name)[0] == 8


def test_a_stop_says_each_second_what_it_waits_for(box: LocalBox) -> None:
    folder = box.start("a", "sigterm = ignored")
    box.trainer(folder)
    done = stand_in.call_bytes("stop", {"path": str(box.path), "run": "a", "grace": 1.9})
    beats = [json.loads(line) for line in done.stdout.strip().split(b"\n")[:-1]]
    saves = [beat["left_s"] for beat in beats if "saves" in beat["doing"]]
    assert len(saves) == 2 and 2 >= saves[0] > saves[1] >= 0
    assert all(folder.name in beat["doing"] for beat in beats)
