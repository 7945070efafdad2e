"""Nobody waits for ever and nobody is left in the dark: an attempt to connect that many wait for, a board that can't
speak, a terminal that changes, a link that is silent, an answer that is lost."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Cli

from dflash_ops import data, many, ssh, ssh_link, terminal, train
from dflash_ops.command import Container, Host
from dflash_ops.errors import LinkLostError, OpsError, UnreachableError
from dflash_ops.progress import Progress
from dflash_ops.run_request import StartRequest
from dflash_ops.shell import Shell

HOST = Host("h", "localhost")
PLACE = Container(HOST, 200)


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- connecting


class Connecting:
    """Takes the place of ssh.connect: nobody is let in before `go`, and then nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries, self.go = 0, threading.Event()
        monkeypatch.setattr(ssh, "connect", self)

    def __call__(self, host: Host, *, timeout: float) -> ssh.Link:
        self.tries += 1
        assert self.go.wait(30)
        raise UnreachableError("the host can't be reached", where=str(host))


def waiters(shell: Shell, count: int) -> tuple[list[OpsError], list[threading.Thread]]:
    """Threads that wait for the host's link, and what they hear."""
    heard: list[OpsError] = []

    def wait() -> None:
        try:
            shell._link(HOST)
        except OpsError as error:
            heard.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    known = shell._known(HOST)
    until(lambda: known.coming is not None and len(known.coming._condition._waiters) == count)  # pyright: ignore
    return heard, threads


def test_all_who_wait_for_a_host_hear_of_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch)
    with Shell() as shell:
        heard, threads = waiters(shell, 5)
        connecting.go.set()
        for thread in threads:
            thread.join(30)
        assert len(heard) == len({id(error) for error in heard}) == 5 and connecting.tries == 1
        assert {error.line() for error in heard} == {"the host can't be reached (h)"}
        with pytest.raises(UnreachableError):
            shell._link(HOST)
        assert connecting.tries == 2


def test_who_waits_for_a_host_does_not_wait_for_it_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch)
    with Shell() as shell:
        heard, threads = waiters(shell, 3)
    for thread in threads:
        thread.join(30)
    assert [error.what for error in heard] == ["the connection was closed"] * 3
    connecting.go.set()


# -- boards


class Mute(many.Board):
    """Where stderr can't be written."""

    def __init__(self, number: int) -> None:
        self._error = OSError(number, os.strerror(number))  # a BrokenPipeError for EPIPE

    def begin(self, name: str) -> None:
        raise self._error

    def end(self, name: str, error: OpsError | None, seconds: float) -> None:
        raise self._error


def came_of(board: many.Board) -> Any:
    """What comes of two places, one of which leads nowhere, and one where all is well."""
    places: dict[str, Container | OpsError] = {"gone": OpsError("gone"), "here": PLACE}
    came: list[Any] = []

    def work() -> None:
        try:
            came.append([it.value for it in many.each(Shell(), places, lambda at: 1, board=board)])
        except BaseException as error:
            came.append(type(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    return came[0]  # nothing when it hangs


def test_a_board_that_can_not_speak_stops_nothing() -> None:
    assert came_of(Mute(errno.ENOSPC)) == [None, 1]
    assert came_of(Mute(errno.EPIPE)) is BrokenPipeError  # nobody listens any more


def python(program: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=False, **more)


def test_a_full_disk_behind_stderr_is_no_failure() -> None:
    with Path("/dev/full").open("w") as full:
        done = python("from dflash_ops import render; render.note('a'); render.note('b'); print('on')", stderr=full)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_the_cursor_is_there_after_ctrl_c_while_rows_begin() -> None:
    done = python(
        """
from dflash_ops import cli, render_many
rows = render_many.Rows(["a"])
def start():
    raise KeyboardInterrupt
rows._live.start = start
try:
    rows.__enter__()
except KeyboardInterrupt:
    cli._leave(130)
""",
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (130, b"\x1b[?25h")


def test_ctrl_c_while_modules_load() -> None:
    done = python(
        """
from dflash_ops import cli
def build(first):
    raise KeyboardInterrupt
cli.build = build
cli.main()
""",
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_ctrl_c_ends_a_command_whose_reader_reads_no_more() -> None:
    """It keeps its end open, so that a write never ends; and some of what was said waits in a buffer still."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * select.PIPE_BUF)
    os.set_blocking(writing, True)
    words = [sys.executable, "-m", "dflash_ops", "--help"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(words, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        where = Path(f"/proc/{process.pid}/wchan")
        until(lambda: "pipe_write" in where.read_text())
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    os.close(reading)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.parametrize("flood", ["stdout, with stderr", "stderr"])
def test_ctrl_c_ends_it_where_nobody_reads_its_last_words_either(cli: Cli, flood: str) -> None:
    """`2>&1 | less`, and a command that fills stderr itself: the note of what is left goes there too."""
    reading, writing = os.pipe()
    words = cli.words("exec", "--", "sh", "-c", "yes" if flood.startswith("stdout") else "yes >&2")
    out = writing if flood.startswith("stdout") else subprocess.DEVNULL
    with subprocess.Popen(words, env=cli.environment(), stdout=out, stderr=writing) as process:
        os.close(writing)
        where = Path(f"/proc/{process.pid}/wchan")
        until(lambda: "pipe_write" in where.read_text())
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()
    os.close(reading)


def test_after_ctrl_c_who_reads_gets_all_however_long_it_takes() -> None:
    """A second is for streams that take nothing, not for what there is to tidy up."""
    program = """
import os, signal, time
from dflash_ops import leaving
leaving._UNREAD_SECONDS = 0.05
signal.signal(signal.SIGINT, leaving.by_ctrl_c)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("tidied up")
"""
    done = python(program, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"tidied up\n", b"")


# -- a terminal


def test_a_new_size_is_told_between_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in the middle of what is done with the connection, where the signal comes."""
    ours, theirs = os.openpty()
    reading, writing = os.pipe()
    os.write(writing, b".")  # there is always something to read
    did: list[str] = []

    class Far:
        def read(self, seconds: float) -> tuple[bytes, bytes, bool]:
            did.append("read")
            os.kill(os.getpid(), signal.SIGWINCH)
            did.append("done")
            return b"", b"", did.count("resize") > 4

        def write(self, data: bytes) -> None: ...
        def close_stdin(self) -> None: ...

        def resize(self, columns: int, rows: int) -> None:
            did.append("resize")

        def fileno(self) -> int:
            return reading

    before = signal.getsignal(signal.SIGWINCH)
    with os.fdopen(theirs) as keys:
        monkeypatch.setattr("sys.stdin", keys)
        terminal.attach(Far())
    for descriptor in (ours, reading, writing):
        os.close(descriptor)
    assert signal.getsignal(signal.SIGWINCH) == before
    assert {did[at + 1] for at, what in enumerate(did) if what == "read"} == {"done"}


# -- links


class Clock:
    """Seconds that pass when a test says so; counts how often it is looked at."""

    def __init__(self) -> None:
        self.now, self.looks = 1000.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_link_does_not_die_of_our_own_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and fg half a minute later; and then it is silent but for one word that answers no question of ours."""
    clock, ended = Clock(), threading.Event()
    monkeypatch.setattr(ssh_link, "time", clock)
    transport = SimpleNamespace(
        get_username=lambda: "root",
        packetizer=SimpleNamespace(read_message=lambda: None),
        global_request=lambda *_, wait: ended.wait(60),
        is_active=lambda: not ended.is_set(),
    )
    hop: Any = SimpleNamespace(transport=transport, close=ended.set)
    link = ssh.Link(HOST, [hop], lambda: [], keepalive_s=0.05, dead_after_s=15.0)

    def pass_by(seconds: float) -> None:
        clock.now += seconds
        looks = clock.looks
        until(lambda: clock.looks > looks + 3 or not link.is_open)

    pass_by(1.0)
    pass_by(30.0)
    assert link.is_open
    for _ in range(2):
        for _ in range(7):
            pass_by(2.0)
        assert link.is_open
        transport.packetizer.read_message()
    for _ in range(8):
        pass_by(2.0)
    until(lambda: not link.is_open)
    with pytest.raises(LinkLostError, match="no sign of life for 16 s"):
        link.confirm()


# -- answers that are lost


@pytest.mark.parametrize("then", [LinkLostError, UnreachableError])
def test_a_start_or_stop_whose_answer_is_lost_says_what_may_be(
    monkeypatch: pytest.MonkeyPatch, then: type[UnreachableError]
) -> None:
    monkeypatch.setattr(train, "time", Clock())

    def start(shell: Shell) -> object:
        return train.start(shell, PLACE, StartRequest("a", None, ""))

    def stop(shell: Shell) -> object:
        return train.stop(shell, PLACE, "a-1")

    for verb in (start, stop):
        said: list[str] = []
        errors = [LinkLostError("the connection broke", where="h"), then("gone", where="h"), then("gone", where="h")]

        def hear(*_: Any, errors: list[UnreachableError] = errors) -> None:
            raise errors.pop(0)

        monkeypatch.setattr(train, "_hear", hear)
        with pytest.raises(then, match=r"gone \(h\)\. Next: it may have happened: .*dflash-ops train status a-"):
            verb(Shell(on_break=said.append))
        assert set(said) == {"the connection broke (h); trying again"}
        errors[:] = [UnreachableError("gone", where="h")]
        with pytest.raises(UnreachableError, match=r"^gone \(h\)$"):  # nothing was sent
            verb(Shell())


@pytest.mark.parametrize(("seconds", "tries"), [(0.0, 5), (15.0, 2)], ids=["refused", "silent"])
def test_a_host_that_is_gone_is_given_up_soon(monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int) -> None:
    """seconds: that it takes to hear that there is no connection."""
    clock, said, tried = Clock(), list[str](), list[float]()
    monkeypatch.setattr(data, "time", clock)

    def once(patience: float) -> None:
        tried.append(patience)
        if len(tried) == 1:
            raise LinkLostError("the connection broke", where="h")
        clock.now += seconds
        raise UnreachableError("gone", where="h")

    with pytest.raises(LinkLostError, match=r"0 bytes went; .*Next: the same command goes on from there"):
        data.with_reconnects(Shell(on_break=said.append), once, data.Tally(), Progress())
    assert (len(tried), said) == (tries, ["the connection broke (h); trying again"])


# -- exec without a terminal


def test_ctrl_c_says_that_the_command_may_go_on(cli: Cli) -> None:
    with cli.start("exec", "--", "sh", "-c", "echo begun; exec sleep 20") as process:
        assert process.stdout is not None and select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith(b"dflash-ops: left sh -c 'echo begun; exec sleep 20' (") and b"may go on in there" in err


def test_a_command_that_is_silent_is_named_as_it_was_said(cli: Cli) -> None:
    done = cli("exec", "--timeout", "0.3", "--", "sleep", "20")
    assert done.returncode == 124 and b": sleep 20. Next:" in done.stderr
