"""What the supervisor does for a run while nobody looks: restarts, the hang watchdog, notifications, lack of memory."""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import stand_in
from stand_in import LocalBox, carriers, exists, retry_until

from dflash_ops import runs
from dflash_ops.remote import answers, cgroups, notify, processes, rundir, supervisor, view, watch
from dflash_ops.remote.supervisor import Outcome
from dflash_ops.runs import RunState

MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[LocalBox]:
    with stand_in.local_box(tmp_path, windows=False) as box:
        yield box


def run_of(box: LocalBox, name: str) -> runs.Run:
    return runs.run_of(rundir.facts(rundir.find(box.path, name), processes.boot_id()))


# -- restarts


def test_a_trainer_that_can_heal_is_started_again_and_goes_on(box: LocalBox) -> None:
    config = "records = yes\nsteps = 3\nheals_after = 2\nsignal = 11"
    folder = box.start("a", config, restart=3, restart_wait=0.05)
    ended = box.ended(folder)
    assert (ended["code"], ended["signal"]) == (0, None)
    told = [(it["attempt"], it["code"], it["signal"], it["step"], it["wait_s"]) for it in ended["restarts"]]
    assert told == [(1, 139, 11, 3, 0.05), (2, 139, 11, 3, 0.1)]
    log = (folder / "log").read_text()
    assert log.count("step 3") == 3 and "restart 2 of 3 in 0.1 s" in log
    run = run_of(box, "a")
    assert (run.state, run.restarts) == (RunState.FINISHED, 2) and "restarted 2 times" in run.verdict()


@pytest.mark.parametrize(
    ("outcome", "heals"),
    [
        (Outcome(0), False),
        (Outcome(2, progressed=True), False),
        (Outcome(3, progressed=True), False),
        (Outcome(126), False),
        (Outcome(127), False),
        (Outcome(1), False),
        (Outcome(1, progressed=True), True),
        (Outcome(14), True),
        (Outcome(137, 9), True),
        (Outcome(139, 11), True),
        (Outcome(137, 9, left=({"pid": 1},)), False),
    ],
)
def test_what_can_heal(outcome: Outcome, heals: bool) -> None:
    assert outcome.can_heal is heals


def test_what_can_not_start_is_not_tried_again(box: LocalBox) -> None:
    early = box.ended(box.start("early", "steps = 1\ncode = 1", restart=5, restart_wait=0.01))
    assert (early["code"], early["restarts"]) == (1, []) and run_of(box, "early").state is RunState.FAILED
    folder = box.start("late", "records = yes\nsteps = 2\ncode = 1", restart=1, restart_wait=0.01)
    ended = box.ended(folder)
    assert (ended["code"], len(ended["restarts"])) == (1, 1)


def test_a_stop_between_two_attempts(box: LocalBox) -> None:
    folder = box.start("a", "steps = 1\nsignal = 9", restart=5, restart_wait=1000)
    retry_until(lambda: run_of(box, "a").state is RunState.WAITING)
    assert run_of(box, "a").exit_code == 101
    assert box.try_start("a")[0] == 7  # it still is the run of this name
    code, reply = box.stop("a")
    run = runs.run_of(reply["facts"])
    assert (code, run.state, run.code, run.restarts) == (0, RunState.STOPPED, None, 1)
    assert carriers(folder.name) == []


def test_a_stop_reaches_the_second_attempt(box: LocalBox) -> None:
    folder = box.start("a", "records = yes\nheals_after = 1\nsignal = 9\nsteps = 10000", restart=1, restart_wait=0.01)
    first = box.trainer(folder)
    os.kill(first, signal.SIGKILL)
    retry_until(lambda: box.trainer(folder) != first)
    code, reply = box.stop("a")
    run = runs.run_of(reply["facts"])
    assert (code, run.state, run.code, run.restarts) == (0, RunState.STOPPED, 0, 1)


def test_a_log_in_parts_is_followed_whole(box: LocalBox) -> None:
    folder = box.start("a", "steps = 300\npause = 0.001\nwidth = 90", log_part_bytes=1500)
    parameters = {"path": str(box.path), "run": "a", "offset": None, "tail": None, "follow": True, "quiet": False}
    header, _, followed = stand_in.call_bytes("follow", parameters).stdout.partition(b"\n")
    gone = json.loads(header)["offset"]
    every = b"".join(b"step %d " % step + b"x" * 90 + b"\n" for step in range(1, 301)) + b"saved\n"
    assert followed == every[gone:] and len(followed) > 10_000
    assert len(list(folder.glob("log.*"))) > 5
    assert run_of(box, "a").log_bytes == len(every)
    # Who comes back for what has been given up is told how much is missing.
    header = json.loads(stand_in.call_bytes("follow", {**parameters, "offset": 5}).stdout.partition(b"\n")[0])
    assert header["offset"] - header["gone"] == 5 and header["gone"] > 1000


# -- hangs


def test_a_run_without_new_steps_is_stalled_until_it_goes_on(box: LocalBox) -> None:
    folder = box.start("a", "records = yes\nhangs_at = 3\nstacks = yes", stall_minutes=0.005)
    retry_until(lambda: run_of(box, "a").state is RunState.STALLED)
    run = run_of(box, "a")
    assert (run.exit_code, run.verdict().split(" at ")[0]) == (101, f"run {run.id} is stalled")
    trainer = box.trainer(folder)
    # Its threads by the kernel, then Python's own stacks.
    log = retry_until(lambda: "Current thread" in (text := (folder / "log").read_text()) and text)
    assert "no new step in" in log and f"  {trainer} python" in log and "__main__.py" in log
    assert exists(trainer)  # nobody is killed for it without --restart
    (folder / "wake").touch()
    retry_until(lambda: run_of(box, "a").state is RunState.RUNNING)
    assert "the run goes on" in (folder / "log").read_text()
    assert box.stop("a")[0] == 0


def test_a_trainer_that_hangs_is_ended_and_started_again(box: LocalBox) -> None:
    config = "records = yes\nhangs_at = 2\nheals_after = 1\nsteps = 4\nsigterm = ignored"
    folder = box.start("a", config, restart=1, restart_wait=0.01, stall_minutes=0.005)
    ended = box.ended(folder)
    assert ended["code"] == 0
    assert [(it["code"], it["step"]) for it in ended["restarts"]] == [(14, 2)]
    assert "Fatal Python error: Aborted" in (folder / "log").read_text()  # as it died it showed where it was


def test_the_trainers_own_watchdog_is_told_as_what_it_is(box: LocalBox) -> None:
    folder = box.start("a", "records = yes\nsteps = 2\ncode = 14")
    box.ended(folder)
    run = run_of(box, "a")
    assert (run.state, run.own_code) == (RunState.FAILED, 14) and "exit code 14, stalled" in run.verdict()


def test_progress_before_the_first_step_is_anything_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: moment)

    def after(seconds: float, log_end: int, **status: Any) -> tuple[bool, bool]:
        nonlocal moment
        if status:
            (tmp_path / "status.json").write_text(json.dumps(status))
        changes = 0
        for _ in range(int(seconds)):
            moment += 1.0
            changes += dog.look(log_end)
        return changes == 1, dog.stalled

    dog = watch.Watchdog(tmp_path, 1.0)
    assert after(59, 0) == (False, False)
    assert after(59, 7) == (False, False)  # the log grew
    assert after(59, 7, state="starting", step=0, updated_at="1") == (False, False)
    assert after(61, 7) == (True, True)
    dog.forgive(99)
    assert after(5, 99) == (False, True)  # our own note of it
    assert after(1, 100) == (True, False)
    assert after(30, 100, state="training", step=1, updated_at="2") == (False, False)
    assert after(29, 1000, state="training", step=1, updated_at="3") == (False, False)
    assert after(11, 2000, state="training", step=1, updated_at="4") == (True, True)  # words are no step
    assert after(1, 2000, state="training", step=2, updated_at="5") == (True, False)
    # Two minutes in which we were frozen ourselves: two looks' time of them counts.
    assert after(59, 2000, state="training", step=3, updated_at="6") == (False, False)
    moment += 120.0
    dog.look(2000)
    assert dog.quiet_seconds == 60.0
    never = watch.Watchdog(tmp_path, 0)
    moment += 1e6
    assert not never.look(0) and not never.stalled


def test_a_signal_is_sent_only_where_it_is_caught() -> None:
    me = processes.read(os.getpid())
    assert me is not None
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert watch.catches(me, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not watch.catches(me, signal.SIGUSR1) and not watch.catches(me, signal.SIGKILL)


def test_a_stop_of_a_trainer_that_is_being_ended_is_a_stop(box: LocalBox) -> None:
    config = "records = yes\nhangs_at = 2\nsigterm = ignored"
    folder = box.start("a", config, restart=1, restart_wait=0.01, stall_minutes=0.003)
    trainer = box.trainer(folder)
    retry_until(lambda: run_of(box, "a").state is RunState.STALLED)
    code, reply = box.stop("a", grace=0.3)
    run = runs.run_of(reply["facts"])
    if run.restarts:  # the machine was slow: it was another attempt already
        assert exists(trainer) is False
        return
    assert (code, run.state) == (0, RunState.STOPPED) and run.code in (134, 137), run
    assert reply["facts"]["exit"]["stalled"] is True and "stalled" not in run.verdict()


def test_many_restarts_do_not_overflow() -> None:
    assert [supervisor.wait_before(number, None) for number in (0, 1, 5, 6, 5000)] == [10.0, 20.0, 320.0, 600.0, 600.0]
    assert supervisor.wait_before(5000, 0.0) == 0.0


# -- how it ended, for everybody


@pytest.mark.parametrize(
    ("ended", "said", "word"),
    [
        ({"code": 0}, "finished", "finished"),
        ({"code": 0}, "stopped", "stopped"),
        ({"code": 0, "stopped": True}, "finished", "finished"),  # it finished while it was being stopped
        ({"code": 0, "stopped": True}, "stopped", "stopped"),
        ({"code": 1, "stopped": True}, "training", "failed"),  # its own answer to SIGTERM
        ({"code": 143, "stopped": True}, "training", "stopped"),
        ({"code": None, "stopped": True}, None, "stopped"),
        ({"code": 134, "stopped": True}, "training", "failed"),
        ({"code": 134, "stopped": True, "stalled": True}, "training", "stopped"),
        ({"code": 7}, "training", "failed"),
        ({}, None, "failed"),
    ],
)
def test_status_window_and_webhook_tell_the_same(
    ended: dict[str, Any], said: str | None, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "a-20261129-120000-abcd"
    folder.mkdir(parents=True)
    (folder / "exit.json").write_text(json.dumps(ended))
    if said is not None:
        (folder / "status.json").write_text(json.dumps({"state": said, "step": 1, "total_steps": 2}))
    run = runs.run_of(rundir.facts(folder, processes.boot_id()))
    assert (run.state.value, f"{folder.name} {word}, " in view._verdict(folder)) == (word, True)  # pyright: ignore[reportPrivateUsage]
    assert "None" not in run.verdict() + view._verdict(folder)  # pyright: ignore[reportPrivateUsage]
    told: list[str] = []

    def tell(folder: Path, python: str, event: str) -> None:
        told.append(event)

    monkeypatch.setattr(notify, "tell", tell)
    supervisor.tell_end(folder, ended)
    assert told == [word]


@pytest.mark.parametrize(
    "damaged",
    [{"code": 256}, {"code": -1}, {"stopped": 1}, {"left": 3}, {"oom": "no"}, {"signal": 1000}, {"log_lost_bytes": -1}],
)
def test_a_field_that_can_not_be_is_none(tmp_path: Path, damaged: dict[str, Any]) -> None:
    folder = tmp_path / "a-20261129-120000-abcd"
    folder.mkdir()
    (folder / "exit.json").write_text(json.dumps({"code": 1, **damaged}))
    ended = rundir.read_exit(folder)
    assert ended is not None and not ended.keys() & damaged.keys()


# -- a disk that has become read-only


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file system, and what makes it read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place, lambda: subprocess.run(["mount", "-o", "remount,ro", place], check=True) and None
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("with_lock", [True, False])
def test_a_disk_that_became_read_only_hinders_no_stop(
    frozen: tuple[Path, Callable[[], None]], with_lock: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    place, freeze = frozen
    stand_in.make_release(place)
    folder = place / "runs" / "a-20261129-120000-abcd"
    folder.mkdir(parents=True)
    if with_lock:
        with rundir.start_lock(place):
            pass
    freeze()
    with rundir.start_lock(place):
        if with_lock:
            with pytest.raises(answers.Fault, match="another start"), rundir.start_lock(place, 0.1):
                pass
    code, reply = stand_in.call("stop", {"path": str(place), "run": folder.name, "grace": 1})
    assert (code, reply["kind"]) == (8, "not_found")  # it is judged, and not refused for the disk
    code, reply = stand_in.call("start", stand_in.start_parameters(place, "b", ""))
    assert (code, "read-only" in reply["what"], "findmnt" in reply["next"]) == (6, True, True)
    log = supervisor.Log(folder / "log")
    supervisor._record(folder, folder / ".room", log, rundir.exit_record(folder.name, 0))  # pyright: ignore[reportPrivateUsage]
    assert "can't be written" in capsys.readouterr().err and not (folder / "exit.json").exists()


# -- memory


def test_a_kill_by_the_kernel_for_lack_of_memory_is_told(box: LocalBox) -> None:
    group = MEMORY / f"dflash-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError:
        pytest.skip("no memory group of the old hierarchy can be made here")
    try:
        prefix = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        folder = box.start("a", "oom = yes", prefix=prefix)
        ended = box.ended(folder)
        assert (ended["code"], ended["signal"], ended["oom"]) == (137, 9, True)
        assert "exit code 137, out of memory" in run_of(box, "a").verdict()
        assert any("memory was full" in line for line in ended["last_lines"])
        # Another death by SIGKILL is another thing.
        other = box.start("b", "", prefix=prefix)
        os.kill(box.trainer(other), signal.SIGKILL)
        assert box.ended(other)["oom"] is False
    finally:
        stand_in.subprocess.run(["tmux", "-L", "dflash", "kill-server"], capture_output=True, check=False)
        retry_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_count_of_the_unified_hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.procs").touch()
    inner = tmp_path / ".lxc"
    inner.mkdir()
    (inner / "cgroup.procs").touch()
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    monkeypatch.setattr(cgroups, "_own_folder", lambda kind: inner if kind == "cgroup2" else None)
    memory = cgroups.OutOfMemory()
    assert not memory.within(10)
    events.write_text("oom_kill 4\n")
    assert memory.within(10) and not memory.within(0)
    monkeypatch.setattr(cgroups, "_own_folder", lambda kind: None)
    assert not cgroups.OutOfMemory().within(10)


# -- notifications


class Hook:
    """A webhook on loopback: what it got, and what it answers first."""

    def __init__(self, *codes: int) -> None:
        self.got: list[dict[str, Any]] = []
        answers = list(codes)
        got = self.got
        self.location = ""
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = answers.pop(0) if answers else 200
                if code == 200:
                    got.append(json.loads(body))
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", hook.location)
                self.end_headers()

            def do_GET(self) -> None:  # what a redirected POST must not become
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hush-token"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> "Hook":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def test_a_webhook_is_told_of_failure_stall_restart_and_end(box: LocalBox) -> None:
    with Hook() as hook:
        config = "records = yes\nsteps = 2\nheals_after = 1\nsignal = 11"
        folder = box.start("a", config, restart=1, restart_wait=0.01, notify=[hook.url])
        box.ended(folder)
        retry_until(lambda: len(hook.got) == 2)
        assert sorted(it["event"] for it in hook.got) == ["finished", "restarting"]
        box.ended(box.start("bad", "records = yes\nsteps = 2\ncode = 7", notify=[hook.url]))
        retry_until(lambda: len(hook.got) == 3)
        bad = hook.got[-1]
        assert (bad["event"], bad["code"], bad["step"], bad["total_steps"], bad["name"]) == ("failed", 7, 2, 100, "bad")
        assert "failed at step 2/100 (exit code 7)" in bad["text"] and bad["last_lines"][-1].startswith("step 2")
        stalling = box.start("s", "records = yes\nhangs_at = 2", stall_minutes=0.005, notify=[hook.url])
        retry_until(lambda: len(hook.got) == 4)
        assert (hook.got[-1]["event"], hook.got[-1]["run_id"]) == ("stalled", stalling.name)
        box.stop("s", grace=0.1)
        retry_until(lambda: len(hook.got) == 5)
        assert (hook.got[-1]["event"], hook.got[-1]["code"]) == ("stopped", 137)
    # The URL holds a token: it is in one file that only root reads.
    assert (folder / "notify").stat().st_mode & 0o777 == 0o600
    for file in folder.rglob("*"):
        assert file.name == "notify" or not file.is_file() or b"hush-token" not in file.read_bytes(), file


def test_a_dead_webhook_delays_nothing_and_shows_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a-20261129-120000-abcd"
    folder.mkdir()
    (folder / "notify").write_text("http://127.0.0.1:9/hush-token\nhttp://hush.invalid/\n")
    monkeypatch.setattr(notify.time, "sleep", lambda seconds: None)
    assert notify.main([str(folder), "finished"]) == 1
    said = (folder / "notify.log").read_text()
    assert said.count("finished: notification ") == said.count(" failed: ") == 2 and "hush" not in said


def test_a_webhook_is_tried_again_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify.time, "sleep", lambda seconds: None)
    with Hook(503, 429) as hook:
        assert notify.send(hook.url, {"a": 1}) == "" and hook.got == [{"a": 1}]
    with Hook(404) as hook:
        assert notify.send(hook.url, {}) == "failed: HTTP 404" and hook.got == []


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_no_success_but_where_it_stays_on_the_host(code: int) -> None:
    with Hook() as elsewhere, Hook(code) as hook:
        hook.location = elsewhere.url
        told = notify.send(hook.url, {"a": 1})
        assert f"HTTP {code} leads to another place" in told and "hush" not in told
        assert elsewhere.got == hook.got == []
    with Hook(code) as hook:
        hook.location = "/other"
        assert notify.send(hook.url, {"a": 1}) == "" and hook.got == [{"a": 1}]
    with Hook(*[code] * 10) as hook:
        hook.location = "/round"
        assert "circle" in notify.send(hook.url, {})


def test_a_webhook_that_hangs_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a-20261129-120000-abcd"
    folder.mkdir()
    asked, sent = threading.Event(), threading.Event()

    def send(url: str, message: dict[str, Any]) -> str:
        (asked if url == "http://hangs" else sent).wait(20)
        sent.set()
        return ""

    (folder / "notify").write_text("http://hangs\nhttp://good\n")
    monkeypatch.setattr(notify, "send", send)
    monkeypatch.setattr(notify, "_DEADLINE", 0.2)
    sent.set()
    assert notify.main([str(folder), "failed"]) == 1
    asked.set()
    said = (folder / "notify.log").read_text()
    assert "notification 2 sent" in said and "notification 1 failed: no answer" in said


def test_other_urls_go_through_apprise(box: LocalBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("apprise") is not None:
        pytest.skip("apprise is installed")
    code, reply = box.try_start("a", notify=["slack://hush-token"])
    assert (code, reply["kind"]) == (6, "preflight") and "apprise" in reply["next"]
    assert "hush" not in json.dumps(reply) and rundir.folders(box.path) == []
    (tmp_path / "apprise.py").write_text(
        "class Apprise:\n"
        "    def add(self, url):\n        self.url = url\n        return not url.startswith('bad')\n"
        "    def notify(self, title, body):\n"
        "        if 'boom' in self.url: raise OSError(self.url)\n"
        f"        import pathlib; pathlib.Path('{tmp_path / 'sent'}').write_text(title + '|' + body)\n"
        "        return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    message = {"event": "failed", "text": "run a failed"}
    assert notify.send("slack://token", message) == ""
    assert (tmp_path / "sent").read_text() == "dflash-ops: failed|run a failed"
    assert notify.send("bad://x", message) == "failed: apprise does not know such a URL"
    assert notify.send("slack://boom", message) == "failed: OSError"
