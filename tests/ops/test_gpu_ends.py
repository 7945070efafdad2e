"""Ends that are none, and what is told of them: threads that are stuck in the driver, processes that are gone before
they were looked at, files with odd names. Real processes where one can be had."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import retry_until

from dflash_ops import gpu_free
from dflash_ops.command import Container, Host
from dflash_ops.remote import free, gpuproof, owners, probe, processes

RUN = "a-20261129-120000-abcd"
FREEZER = Path("/sys/fs/cgroup/freezer")
# Its main thread sleeps, or ends by itself; another one sleeps, or waits in the kernel for a child that never goes on.
PROGRAM = """
import ctypes, sys, threading, time
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15)
CLONE_VFORK, SIGCHLD, SYS_EXIT = 0x4000, 17, {"x86_64": 60}.get(__import__("os").uname().machine, 93)
wait = lambda: libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, CLONE_VFORK | SIGCHLD, None)
body = wait if "stuck" in sys.argv else lambda: time.sleep(1000)
threading.Thread(target=body, daemon=True).start()
time.sleep(0.1)
libc.syscall(SYS_EXIT, 0) if "headless" in sys.argv else time.sleep(1000)
"""
Begin = Callable[..., processes.Process]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that is over."""
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "exit.json").write_text('{"code": 1}')
    return folder


@pytest.fixture
def begin(run: Path) -> Iterator[Begin]:
    """Begins PROGRAM with this word or none, as a process of the run, and waits until it is what they say."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(*words: str) -> processes.Process:
        environment = {**os.environ, "DFLASH_RUN_ID": RUN, "DFLASH_RUN_DIR": str(run)}
        begun.append(subprocess.Popen([sys.executable, "-IS", "-c", PROGRAM, *words], env=environment))
        pid = begun[-1].pid
        states = {"": "SS", "stuck": "SD", "headless": "ZS"}["".join(words)]
        retry_until(lambda: state_letters(pid) == states)
        found = processes.read(pid)
        assert found
        return found

    yield begin
    for it in begun:
        for child in Path(f"/proc/{it.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in child.read_text().split():
                    os.kill(int(pid), 9)
        it.kill()
        it.wait()


def state_letters(pid: int) -> str:
    """The state of each thread, the main one first."""
    found: list[str] = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda it: int(it.name)):
        with contextlib.suppress(OSError):
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return "".join(found)


def end(path: Path, *wanted: processes.Process, grace: float = 0.1) -> dict[str, Any]:
    asked = [{**it.identity(), "owner": "earlier", "run_id": RUN} for it in wanted]
    boot = processes.boot_id()
    return free.free(path, {"wanted": asked, "boot_id": boot, "grace": grace, "kill_seconds": 0.5})


# -- threads


def test_a_process_with_a_stuck_thread_is_in_state_d(begin: Begin) -> None:
    told = processes.describe(begin("stuck"))
    assert told["state"] == "D" and told["wchan"] not in (None, "hrtimer_nanosleep")
    assert processes.describe(begin())["state"] == "S"


def test_a_thread_that_waits_for_a_disk_now_and_then_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(10))
    monkeypatch.setattr(processes, "threads", lambda _: [(7, "D")])
    monkeypatch.setattr(processes, "_stat", lambda _: [b"D"])
    monkeypatch.setattr(processes, "_switches", lambda *_: [next(counts)])
    assert processes.stuck_thread(7) is None
    monkeypatch.setattr(processes, "_switches", lambda *_: [b"5"])
    assert processes.stuck_thread(7) == 7


def test_a_process_whose_main_thread_alone_has_ended_lives(begin: Begin, tmp_path: Path) -> None:
    process = begin("headless")
    assert not process.ended and processes.alive(process.identity())
    assert processes.environment(process.pid)[processes.RUN_ID] == RUN.encode()
    assert "-IS" in processes.command(process.pid) and processes.open_files(process.pid)
    assert owners.Owners(tmp_path).of(process).kind == "earlier"
    done = end(tmp_path, process)
    assert [it["pid"] for it in done["freed"]] == [process.pid] and done["survivors"] == []
    assert not processes.alive(process.identity())


def test_a_process_with_a_thread_that_can_not_be_killed_is_not_called_killed(
    begin: Begin, run: Path, tmp_path: Path
) -> None:
    """One thread is in a frozen group of the old hierarchy, which lets it die as little as a driver that hangs."""
    process = begin()
    (thread,) = [tid for tid, _ in processes.threads(process.pid) if tid != process.pid]
    group = FREEZER / f"dflash-test-{os.getpid()}-thread"
    try:
        group.mkdir()
        (group / "tasks").write_text(str(thread))
    except OSError:
        pytest.skip("no freezer of the old hierarchy")
    try:
        (group / "freezer.state").write_text("FROZEN")
        retry_until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        done = end(tmp_path, process)
        assert [(it["pid"], it["state"]) for it in done["survivors"]] == [(process.pid, "D")]
        assert done["survivors"][0]["wchan"]
        assert (done["freed"], done["killed"], done["removed"], done["gpu"]["back"]) == ([], [], [], False)
    finally:
        (group / "freezer.state").write_text("THAWED")
        retry_until(lambda: not processes.alive(process.identity()))
        group.rmdir()


def test_what_has_lost_its_environment_is_whose_it_was(
    begin: Begin, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs on its way out has no memory any more; one that says something else is somebody else's."""
    process = begin()
    ours = owners.Owners(tmp_path)
    assert ours.of(process).kind == "earlier"
    monkeypatch.setattr(processes, "environment", lambda _: {})
    assert ours.of(process) == owners.Owner("earlier", RUN)
    assert ours.of(process._replace(start=process.start + 1)) == owners.UNKNOWN
    assert owners.Owners(tmp_path).of(process) == owners.UNKNOWN
    monkeypatch.setattr(processes, "environment", lambda _: {b"A": b"1"})
    assert ours.of(process) == owners.UNKNOWN
    monkeypatch.setattr(processes, "environment", lambda _: {})
    assert ours.of(process) == owners.UNKNOWN


# -- what is gone


def test_what_was_gone_before_the_freeing_is_told_by_its_command(
    begin: Begin, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two free at once: the other one ends it while this one asks nvidia-smi."""
    process = begin()
    asked: list[int] = []

    def look(*_: Any) -> gpuproof.Picture:
        if not asked:
            processes.send(process, 9)
            os.waitpid(process.pid, 0)
        asked.append(1)
        return gpuproof.Picture(missing=True)

    monkeypatch.setattr(gpuproof, "look", look)
    monkeypatch.setattr(probe, "minors", lambda _: [0])
    (told,) = end(tmp_path, process)["freed"]
    assert told["pid"] == process.pid and "-IS" in told["command"]
    assert processes.describe(process)["command"] == processes.GONE  # never empty


def test_what_nobody_could_look_at_any_more_has_the_command_of_the_look() -> None:
    gone = {"pid": 5, "start": 1, "state": "S", "wchan": None, "command": processes.GONE}
    proof = {"checked": False, "back": True, "why": "", "held": []}
    reply = {"freed": [gone, {**gone, "pid": 6}], "killed": [], "removed": [], "seconds": 1.0, "survivors": []}

    class Stub:
        def ask(self, *_: object, **__: object) -> dict[str, Any]:
            return {**reply, "gpu": proof}

    holder = gpu_free.Holder(5, 1, 1, "S", None, "root", "python x", 1.0, (0,), None, "earlier", RUN)
    found = gpu_free.Look("lab / container 200", "boot", (holder,), {}, {}, "")
    container = Container(Host("h", "h"), 200)
    done = gpu_free.free(Stub(), container, found, [holder], grace=0.0)  # pyright: ignore[reportArgumentType]
    assert [(it.pid, it.command) for it in done.freed] == [(5, "python x"), (6, processes.GONE)]


def test_odd_names_of_files_are_told_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_TEMPORARY", (str(tmp_path),))
    for name in (f"{RUN} a\nb\x1b[2J".encode(), f"{RUN} b\xff".encode("latin-1")):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert len(owners.files({RUN})) == 2
    assert owners.remove_files({RUN}) == [f"{tmp_path}/{RUN} a\\nb\\x1b[2J", f"{tmp_path}/{RUN} b\\xff"]
    assert not list(tmp_path.iterdir())
