"""One verb in many places at once: the threads, what Ctrl-C leaves, what is shown; and --on through the whole way."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import stand_in
import typer
from conftest import Box, Cli, write_inventory
from in_container import put_stand_in
from in_process import InProcess
from test_progress import on_a_terminal

from dflash_ops import cli_deploy, cli_many, deploy, gpus, many, render_many, status
from dflash_ops import source as sources
from dflash_ops.command import Container, Host
from dflash_ops.errors import BusyError, NotFoundError, OpsError, UnreachableError
from dflash_ops.inventory import load
from dflash_ops.many import At, Outcome, each, worst
from dflash_ops.release import Manifest
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell


def on_hosts(count: int) -> dict[str, Container | OpsError]:
    """A container on each of so many hosts."""
    return {f"c{number}": Container(Host(f"h{number}", "localhost"), 200) for number in range(count)}


# -- the threads


def test_outcomes_come_in_order_and_no_failure_hides_another(shell: Shell) -> None:
    places = {"gone": NotFoundError("no sandbox"), **on_hosts(4)}
    others_done = threading.Event()
    done: list[str] = []

    def verb(at: At[Container]) -> str:
        if at.name == "c0":
            assert others_done.wait(20)  # the first is the last to end
        if at.name == "c1":
            raise BusyError("taken", where=str(at.place))
        if at.name == "c2":
            raise ZeroDivisionError("a fault of ours")
        done.append(at.name)
        if at.name == "c3":
            others_done.set()
        return at.name.upper()

    found = each(shell, places, verb)
    assert [it.name for it in found] == list(places) and done == ["c3", "c0"]
    assert [it.value for it in found] == [None, "C0", None, None, "C3"]
    assert [type(it.error) for it in found] == [NotFoundError, type(None), BusyError, OpsError, type(None)]
    assert found[3].error is not None and "ZeroDivisionError: a fault of ours" in found[3].error.line()
    assert found[1].result() == "C0"
    with pytest.raises(BusyError, match="taken"):
        found[2].result()
    assert each(shell, {}, verb) == []


@pytest.mark.parametrize("away", [False, True])
def test_sixteen_hosts_are_asked_at_once(away: bool) -> None:
    """Each of 16 hosts and its container answers only when all have been asked: together they take as long as one."""
    places = on_hosts(16)
    hosts = {it.host.name: it.host for it in places.values() if isinstance(it, Container)}
    together = threading.Barrier(32, timeout=20)
    smi = {"code": 0, "out": "", "why": "", "fields": list(gpus.GPU_FIELDS)}
    view = {"pid_namespace": "", "smi": {"gpus": smi, "apps": smi}, "minors": {}, "holders": [], "runs": [], "xids": []}

    class Slow(Shell):
        def ask(self, place: Any, query: Any, *, timeout: float | None = None) -> Any:
            together.wait()
            if away and place == hosts["h3"]:
                raise UnreachableError("no answer", where="h3")
            return view

    slow = Slow()

    def verb(at: At[Host]) -> gpus.GpuStatus:
        return status.gpu_status(slow, at.place, [it for it in places.values() if isinstance(it, Container)])

    found = each(slow, hosts, verb)
    assert [it.name for it in found] == list(hosts)
    assert [it.error is not None for it in found] == [away and number == 3 for number in range(16)]


def test_so_many_at_once_and_no_more(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "AT_ONCE", 5)
    monkeypatch.setattr(many, "AT_ONCE_OF_A_HOST", 2)
    host = Host("one", "localhost")
    places = {f"s{number}": Container(host, 200 + number) for number in range(6)} | on_hosts(12)
    go_on = threading.Event()
    work = many._Work(shell, places, lambda at: go_on.wait(20), many.Board(), False, "")
    for task in work._tasks:
        work._begin(task)
    assert [task.name for task in work._tasks if task.works] == ["s0", "s1", "c0", "c1", "c2"]
    go_on.set()
    assert all(it.value for it in work.outcomes()) and len(work.outcomes()) == 18


def test_what_lasts_waits_for_no_turn(shell: Shell) -> None:
    """Forty logs of one host are followed at once."""
    host = Host("one", "localhost")
    together = threading.Barrier(40, timeout=20)
    places = {f"s{number}": Container(host, 200 + number) for number in range(40)}
    assert all(it.error is None for it in each(shell, places, lambda at: together.wait(), lasting=True))


def test_a_verb_that_connects_anew_leaves_the_others_connected(shell: Shell) -> None:
    first, second = (shell._known(place.host) for place in on_hosts(2).values() if isinstance(place, Container))

    class Link:
        is_open = True

        def close(self) -> None:
            self.is_open = False

    first.link, second.link = Link(), Link()  # pyright: ignore[reportAttributeAccessIssue]

    def verb(at: At[Container]) -> bool:
        at.shell.close()
        return at.shell._link(at.place.host) is shell._known(at.place.host).link

    assert [it.value for it in each(shell, on_hosts(2), verb)] == [True, True]
    assert first.link.is_open and second.link.is_open  # pyright: ignore[reportOptionalMemberAccess]


def test_a_reader_of_our_output_that_has_gone_ends_all(shell: Shell) -> None:
    never = threading.Event()

    def verb(at: At[Container]) -> None:
        if at.name == "c1":
            raise BrokenPipeError
        never.wait(20)

    with pytest.raises(BrokenPipeError):
        each(shell, on_hosts(2), verb)
    never.set()


def test_bytes_are_told_by_percent() -> None:
    said: list[str] = []
    with many._Row(said.append).bytes("sending", 1000, 500) as advance:
        for _ in range(10):
            advance(50)
    assert said == [f"sending {percent}%" for percent in range(55, 105, 5)]
    with many._Row(said.append).bytes("sending", 100_000) as advance:
        for _ in range(100_000):
            advance(1)
    assert len(said) == 10 + 101


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 101], 101),
        ([103, 101], 103),
        ([103, 100], 100),
        ([14, 103, 0], 14),  # a run's own code
        ([100, 8], 8),
        ([8, 6, 7], 6),
        ([6, 124], 124),
        ([4, 124, 6], 4),
        ([4, 1], 1),
        ([1, 9], 9),
        ([9, 130, 0], 130),
    ],
)
def test_the_worst_exit_code(codes: list[int], expected: int) -> None:
    assert worst(codes) == worst(codes[::-1]) == expected


# -- Ctrl-C

BREAK_OFF = """
import os, signal, sys, threading
from dflash_ops import many, render_many
from dflash_ops.command import Container, Host
from dflash_ops.errors import LinkLostError
from dflash_ops.shell import Shell

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
cut, waiting = threading.Event(), threading.Barrier(2)

class Box(Shell):
    def close(self):
        cut.set()

def verb(at):
    if at.name == "quick":
        return 1
    at.way.step("asking " + at.name)
    waiting.wait(20)
    if at.name == "last":
        # To a thread that is not the main one: that one waits already, and does not end by it.
        while sys._current_frames()[threading.main_thread().ident].f_back.f_code.co_name != "outcomes":
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    assert cut.wait(20)
    at.note("the link broke")
    if at.name == "tidy":
        return 2  # it ended all the same
    at.shell.run(at.place, None)

box = Box()
places = dict((name, Container(Host(name, "localhost"), 200)) for name in ("quick", "tidy", "last", "never"))
quick = many.each(box, {"quick": places.pop("quick")}, verb)
many.AT_ONCE = 2
many._TIDY_SECONDS = 60
found = quick + many.each(box, places, verb, board=render_many.Lines(), left="it goes on there")
for it in found:
    print(it.name, it.value, it.error and it.error.line(), it.error and it.error.exit_code)
"""


def test_ctrl_c_says_what_was_done_where() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", BREAK_OFF], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "quick 1 None None",
        "tidy 2 None None",
        "last None interrupted (last / container 200): it was at: asking last; it goes on there 130",
        "never None not begun: Ctrl-C came before (never / container 200) 130",
    ]
    assert re.fullmatch(r"last: interrupted, \d+\.\d s\n", done.stderr)  # nothing of the link that we cut


def test_after_ctrl_c_nothing_is_asked_or_begun(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    there = cli_many.There(shell, None, None, ["all"], False, True, False)
    there.__dict__["containers"] = on_hosts(1)
    broken_off = [Outcome("c0", None, None, many.Interrupted("interrupted"), 0.0)]
    monkeypatch.setattr(many, "each", lambda *_, **__: broken_off)
    with pytest.raises(typer.Exit) as ended:
        there.look(lambda at: None)
    assert ended.value.exit_code == 130


# -- what is shown


def test_rows_on_a_terminal() -> None:
    program = """
import sys
from dflash_ops import render_many, ssh_ask
from dflash_ops.errors import BusyError
names = [f"c{number}" for number in range(60)] + ["bad", "at-work"]
with render_many.Rows(names) as rows:
    for name in names[:50]:
        rows.begin(name)
        rows.end(name, None, 1.25)
    rows.begin("bad")
    rows.step("bad", "asking")
    rows.end("bad", BusyError("a [red]GPU\\x1b is taken"), 2.0)
    rows.begin("at-work")
    rows.step("at-work", "sending 40%")
    rows.note("c1", "a line that stays")
    with ssh_ask.around():
        print("WHO GOES THERE?", file=sys.stderr)
        assert not rows._live.is_started
        print("A FRIEND", file=sys.stderr)
"""
    _, shown = on_a_terminal([sys.executable, "-W", "error", "-c", program], env={**os.environ, "LINES": "24"})
    last = shown.split("WHERE")[-1]
    assert re.search(r"bad +a \[red\]GPU\\x1b is taken +2\.0 +failed \(7\)", last)
    assert re.search(r"at-work +sending 40% +\d+\.\d +…", last)
    assert "of 62: 51 done, 10 waiting" in last and last.count("1.2") >= 10
    assert "c1: a line that stays" in shown
    assert "WHO GOES THERE?\r\nA FRIEND\r\n" in shown  # nothing was drawn meanwhile


def test_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    for lines, steps, done in (
        (render_many.Lines(), False, False),
        (render_many.Lines(done=True, steps=True), True, True),
    ):
        lines.begin("a")
        lines.step("a", "asking")
        lines.end("a", None, 1.0)
        lines.end("b", BusyError("taken"), 2.0)
        lines.note("a", "a warning")
        err = capsys.readouterr().err
        assert ("a: asking\n" in err, "a: done, 1.0 s\n" in err) == (steps, done)
        assert "b: failed (7), 2.0 s\na: a warning\n" in err


# -- a deploy to many reads its source once


def test_the_source_is_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    readings = [sources.Reading(None, Manifest(())) for _ in range(2)]
    left = list(readings)
    monkeypatch.setattr(sources, "read", lambda *_: left.pop(0))
    shared, source = cli_deploy._Readings(), sources.Source(Path("/"))
    first, second, third = (shared.of_one() for _ in range(3))
    assert first(shell, source) is second(shell, source) is readings[0]
    assert first(shell, source) is second(shell, source) is third(shell, source) is readings[1] and not left


# -- through the whole way

MORE = """gpus = [0, 1]
[containers.other]
host = "box"
vmid = 201
python = "sandbox"
path = "/opt/{name}"
gpus = [0, 1]
[containers.stopped]
host = "box"
vmid = 202
python = "sandbox"
[hosts.down]
sandbox = "no-such-one"
[containers.gone]
host = "down"
vmid = 200
python = "sandbox"
[groups]
both = ["trainer", "other"]
"""


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    return Box(write_inventory(tmp_path, sandbox.name, more=MORE.format(name=tmp_path.name)), sandbox)


@pytest.fixture
def cli(box: Box) -> InProcess:
    return InProcess(box.inventory)


def results(done: subprocess.CompletedProcess[bytes]) -> dict[str, dict[str, Any]]:
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    return {it["container"]: it for it in document["results"]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return stand_in.make_release(tmp_path / "stand-in")


def test_a_day_with_many(cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=10)  # an id of one's own moment would be another in each
    monkeypatch.setattr(deploy, "now", lambda: datetime.now(UTC) + timedelta(seconds=next(seconds)))
    done = cli("deploy", str(source), "--on", "both,stopped", "--on", "gone,trainer", "--json")
    found = results(done)
    assert list(found) == ["trainer", "other", "stopped", "gone"]
    assert done.returncode == 6 and [it["exit_code"] for it in found.values()] == [0, 0, 6, 8]
    assert [it["ok"] for it in found.values()] == [True, True, False, False]
    ids = {found[name]["value"]["release"] for name in ("trainer", "other")}
    assert len(ids) == 1 and found["other"]["error"] is None and found["other"]["host"] == "box"
    stopped, gone = found["stopped"], found["gone"]
    assert stopped["value"] is None and stopped["error"]["what"] == "container 202 is stopped"
    assert stopped["error"]["next"].endswith("on the host: pct start 202") and gone["host"] is None
    text = cli("releases", "--on", "all")
    shown, said = text.stdout.decode(), text.stderr.decode()
    assert shown.index("trainer:\n") < shown.index("other:\n") and shown.count(ids.pop()) == 2
    assert "dflash-ops: stopped: container 202 is stopped (box)" in said
    assert said.endswith("2 of 4 done; not: stopped (6), gone (8)\n") and text.returncode == 6

    config = tmp_path / "c.toml"
    config.write_text("steps = 3\n")
    done = cli("train", "start", str(config), "--name", "a", "--gpus", "none", "--follow", "--on", "both")
    assert done.returncode == 0, done
    for name in ("trainer", "other"):
        assert f"\n{name} | step 3 \n" in done.stdout.decode()
        assert re.search(rf"^{name}: run a-\S+ finished", done.stderr.decode(), re.MULTILINE)
    lines = [json.loads(line) for line in cli("train", "logs", "a", "--on", "both", "--json").stdout.splitlines()]
    assert {line["container"] for line in lines if line.get("line") == "saved"} == {"trainer", "other"}
    assert [line["container"] for line in lines[-2:]] == ["trainer", "other"]
    assert lines[-1]["run"]["state"] == "finished"
    done = cli("get", "runs", str(tmp_path / "here"), "--on", "both")
    assert done.returncode == 0, done
    assert len(list((tmp_path / "here").glob("*/runs/a-*/log"))) == 2
    asked = cli("train", "rm", "a", "--on", "both")
    assert asked.returncode == 2 and b"rm asks before it removes" in asked.stderr
    removed = results(cli("train", "rm", "a", "--yes", "--on", "both", "--json"))
    assert [len(it["value"]["removed"]) for it in removed.values()] == [1, 1]


def test_runs_of_many_are_waited_for_and_stopped(cli: Cli, box: Box, tmp_path: Path) -> None:
    for name in ("trainer", "other"):
        put_stand_in(load(box.inventory).container(name))
    config = tmp_path / "c.toml"
    config.write_text("pause = 0.05\n")
    start = ["train", "start", str(config), "--name", "b", "--gpus", "none", "--json"]
    assert cli(*start, "--on", "both").returncode == 0
    waiting = cli.start("train", "logs", "-f", "b", "--on", "both")
    assert waiting.stdout
    try:
        seen: set[bytes] = set()
        for line in iter(waiting.stdout.readline, b""):
            seen.add(line.split(b" | ")[0])
            if len(seen) == 2:
                break
        assert seen == {b"trainer", b"other"}
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=30)
        assert waiting.returncode == 130
        assert (
            err.count(b"interrupted (box") == 2 and b"left it; the run goes on" in err and b"the connection" not in err
        )
        taken = results(cli(*start, "--on", "all"))
        assert [it["exit_code"] for it in taken.values()] == [7, 7, 6, 8]
        stopped = cli("train", "stop", "--on", "both", "--json")
        assert [it["value"]["run"]["state"] for it in results(stopped).values()] == ["stopped"] * 2
    finally:
        waiting.kill()
        waiting.communicate()
        cli("train", "stop", "--grace", "0", "--on", "both")
    waited = cli("train", "wait", "b", "--on", "both")
    assert waited.returncode == 103 and waited.stderr.endswith(b"0 of 2 done; not: trainer (103), other (103)\n")


def test_what_is_asked_of_hosts(cli: Cli) -> None:
    done = cli("gpu-status", "--on", "both,gone", "--json")
    (host, gone) = json.loads(done.stdout)["results"]
    assert (host["host"], host["container"], len(host["value"]["gpus"])) == ("box", None, 2)
    assert gone["error"]["what"].startswith("no sandbox") and done.returncode == 8
    checked = results(cli("doctor", "--on", "both", "--json"))
    assert [it["value"]["container"] for it in checked.values()] == ["box / container 200", "box / container 201"]


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (2, "-t and --on both say where", ["releases", "-t", "trainer", "--on", "both"]),
        (2, "--all and --on both say where", ["gpu-status", "--all", "--on", "both"]),
        (2, "a pid is of one container", ["gpu", "free", "--pid", "5", "--on", "both"]),
        (2, "no container is named", ["releases", "--on", ""]),
        (8, "nearest: both", ["releases", "--on", "bth"]),
    ],
)
def test_words_that_do_not_fit(
    cli: Cli, code: int, says: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(*words)
    assert done.returncode == code and says in done.stderr.decode(), done


def test_where_the_environment_says_one_on_says_many(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_OPS_TARGET", "trainer")
    assert list(results(cli("releases", "--on", "other", "--json"))) == ["other"]
