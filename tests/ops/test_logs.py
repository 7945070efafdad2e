"""The log of a run as its user sees it, whatever breaks on the way."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from hypothesis import given
from hypothesis import strategies as st
from in_container import run_folder, stand_in_at
from proxy import Proxy
from stand_in import retry_until
from test_runs import ended, facts

from dflash_ops import cli_runs, logs, runs, train
from dflash_ops.command import Command, Container
from dflash_ops.errors import UsageFault
from dflash_ops.remote import bundle, logfile
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.shell import Shell


@pytest.fixture
def place(box: Box) -> Iterator[Container]:
    with stand_in_at(box.container) as place:
        yield place


def begin(shell: Shell, container: Container, config: str = "", name: str = "a") -> runs.Run:
    return train.start(shell, container, StartRequest(name, config, "mine.toml", gpus=())).run


def proxied(container: Container, proxy: Proxy, folder: Path) -> Path:
    """An inventory whose host is behind the proxy."""
    host, file = proxy.host, folder / "proxied.toml"
    file.write_text(
        f'[hosts.box]\naddress = "{host.address}"\nport = {host.port}\nuser = "{host.user}"\n'
        f'key = "{host.key}"\nknown_hosts = "{host.known_hosts}"\n'
        f'[containers.trainer]\nhost = "box"\nvmid = {container.vmid}\npath = "{container.path}"\n'
        f'python = "{container.python}"\n'
    )
    return file


def far_start(far: Cli, out: Path, *words: str) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(far.words(*words), stdout=file, stderr=subprocess.PIPE, env=far.environment())


def test_links_cut_again_and_again_cost_no_byte(
    place: Container, shell: Shell, tmp_path: Path, soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that grows all the time and is rotated meanwhile; one reader wants all, one only some lines."""
    pack = bundle.command

    def with_small_parts(python: str, verb: str, parameters: dict[str, Any], **more: Any) -> Command:
        small = {"log_part_bytes": 60_000} if verb == "start" else {}
        return pack(python, verb, {**parameters, **small}, **more)

    monkeypatch.setattr(bundle, "command", with_small_parts)
    run = begin(shell, place, "pause = 0.005\nwidth = 300")
    everything, some = tmp_path / "everything", tmp_path / "some"
    with Proxy(place.host, tmp_path) as proxy:
        far = Cli(proxied(place, proxy, tmp_path))
        followers = [
            far_start(far, everything, "train", "logs", "-f", run.id),
            far_start(far, some, "train", "logs", "-f", run.id, "--grep", "^step [0-9]*[05] "),
        ]
        for _ in range(50 if soak else 5):
            had = [file.stat().st_size for file in (everything, some)]
            retry_until(lambda had=had: everything.stat().st_size > had[0] and some.stat().st_size > had[1])
            proxy.cut()
        had = [file.stat().st_size for file in (everything, some)]
        retry_until(lambda: everything.stat().st_size > had[0] and some.stat().st_size > had[1])
        train.stop(shell, place, run.id)
        for follower in followers:
            told = follower.communicate(timeout=60)[1]
            assert follower.returncode == 103
            assert told.count(b"going on") >= 5 and b"stopped" in told
    shown = everything.read_bytes()
    last = shown.count(b"\n") - 1
    assert shown == b"".join(b"step %d %b\n" % (step, b"x" * 300) for step in range(1, last + 1)) + b"saved\n"
    kept = bytearray()
    train.logs(shell, place, run.id, on_out=kept.extend)
    assert shown.endswith(kept) and len(shown) == train.status(shell, place, run.id).log_bytes
    found = [line for line in shown.splitlines(keepends=True) if re.match(rb"step \d*[05] ", line)]
    assert some.read_bytes() == b"".join(found)
    assert [*run_folder(place, run.id).glob("log.0000*")]  # it was rotated


def test_a_restart_of_the_container_ends_with_the_verdict(place: Container, shell: Shell, tmp_path: Path) -> None:
    run = begin(shell, place, "pause = 0.01")
    got, breaks = bytearray(), list[str]()
    with Shell() as other, ThreadPoolExecutor(1) as pool:
        following = pool.submit(train.logs, other, place, "a", on_out=got.extend, follow=True, on_break=breaks.append)
        retry_until(lambda: b"step 3" in got)
        shell.run(place.host, Command(("pct", "stop", "200")), check=True)
        try:
            retry_until(lambda: any("container 200 is stopped" in words for words in breaks))
        finally:
            shell.run(place.host, Command(("pct", "start", "200")), check=True)
        ended = following.result(60)
    assert ended.state is RunState.LOST and ended.exit_code == 100
    assert got and bytes(got) == (run_folder(place, run.id) / "log").read_bytes()


def test_a_reader_that_dies_at_the_end_has_not_said_all(box: Box) -> None:
    said = [
        (137, b'{"ok": true, "run_id": "a", "offset": 0}\none\n'),
        (0, b'{"ok": true, "run_id": "a", "offset": 4}\ntwo\n'),
    ]
    asked: list[int | None] = []

    class Dying(Shell):
        def stream(self, place: Any, command: Command, *, on_out: Any, **more: Any) -> int:
            asked.append(json.loads(command.stdin)["parameters"]["offset"])
            code, data = said[len(asked) - 1]
            on_out(data)
            return code

        def ask(self, place: Any, query: Any, *, timeout: float | None = None) -> Any:
            return runs.run_of(facts(exit=ended(0)))

    got = bytearray()
    assert logs.logs(Dying(), box.container, "a", on_out=got.extend).state is RunState.FINISHED
    assert (bytes(got), asked) == (b"one\ntwo\n", [None, 4])


def test_words_that_choose_lines(place: Container, cli: Cli, shell: Shell) -> None:
    run = begin(shell, place, "steps = 16\npause = 0.1")
    followed = bytearray()
    train.logs(shell, place, run.id, on_out=followed.extend, follow=True, grep="step", tail=2)
    assert followed.endswith(b"step 15 \nstep 16 \n")
    folder = run_folder(place, run.id)
    whole = (folder / "log").read_bytes()

    def shown(**choice: Any) -> bytes:
        got = bytearray()
        train.logs(shell, place, run.id, on_out=got.extend, **choice)
        return bytes(got)

    assert shown(grep="step 1?0 ") == b"step 10 \n"
    assert shown(grep="step", tail=2) == b"step 15 \nstep 16 \n"
    assert shown(grep="step", tail=0) == b""
    assert shown(since=logs.parse_since("1h"), tail=17) == whole
    assert shown(since=logs.parse_since("2030-01-01T00:00:00Z")) == b""
    # A record a second at most: what was written in the second before comes with it.
    times = (folder / "log.times").read_bytes().split(b"\n")
    moment, offset = map(int, times[1].split())
    since = datetime.fromtimestamp((moment + 10) / 1000, UTC).isoformat()
    lines = [json.loads(line) for line in cli("train", "logs", "--json", "--since", since).stdout.splitlines()]
    assert [it["line"] for it in lines[:-1]] == whole[offset:].decode().split("\n")[:-1]
    assert 0 < offset < len(whole)
    with pytest.raises(UsageFault, match="regular expression"):
        logs.check_pattern("(")
    (folder / "log.times").unlink()
    notes: list[str] = []
    assert shown(since=logs.parse_since("1s"), on_break=notes.append) == whole and "has no times" in notes[0]


def test_times_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(logfile.time, "time_ns", lambda: int(now * 1e9))
    log = logfile.Log(tmp_path / "log", 30)
    text = b""
    for number in range(20):
        now += 0.5
        if number == 10:
            now += 100
            with (tmp_path / "log.times").open("ab") as torn:
                torn.write(b"000")
        line = b"%03d begins" % number
        log.write(line)
        log.write(b" and ends\n")
        text += line + b" and ends\n"
    log.close()

    def since(moment: float) -> bytes:
        offset = logfile.since_offset(tmp_path, moment)
        assert offset is not None
        return text[offset:]

    assert since(0) == text and since(2000) == b""
    for number in range(20):
        moment = 1000.5 + 0.5 * number + (100 if number >= 10 else 0)
        first = int(since(moment)[:3])
        assert number - 2 <= first <= number, (number, first)
    assert since(1050).startswith(b"010 begins")  # the silence in the middle
    assert logfile.since_offset(tmp_path / "none", 0) is None


@given(cuts=st.lists(st.integers(0, 60), max_size=5))
def test_frames_come_in_any_pieces(cuts: list[int]) -> None:
    stream = b'{"ok": true, "run_id": "a", "offset": 5}\n' + b"20 0\n" + b"30 6\n1\n2 3\n" + b"41 2\nx\n"
    got: list[bytes] = []
    taker = logs._Taker("here", got.append, lambda words: None, framed=True)
    ends = sorted({0, *cuts, len(stream)})
    for begin, end in pairwise(ends):
        taker(stream[begin:end])
    assert (b"".join(got), taker.offset, taker.run_id) == (b"1\n2 3\nx\n", 41, "a")
    taker(b"50 9\nhalf")
    taker.expect_header()
    taker(b'{"ok": true, "run_id": "a", "offset": 41}\n50 2\ny\n')
    assert (got[-1], taker.offset) == (b"y\n", 50)


def test_bytes_of_a_log_that_are_gone_are_told() -> None:
    got, told = bytearray(), list[str]()
    taker = logs._Taker("lab", got.extend, told.append, framed=False)
    taker(b'{"schema_version": 1, "ok": true, "run_id": "a", "off')
    taker(b'set": 700, "gone": 500}\nline\n')
    assert (taker.offset, bytes(got)) == (705, b"line\n")
    assert told == ["500 bytes of the log before this are gone: it was rotated"]


def test_what_since_understands() -> None:
    assert logs.parse_since("1h30m") == {"ago_s": 5400.0}
    assert logs.parse_since("2026-11-29T12:00:00Z") == {"at": 1795953600.0}
    assert logs.parse_since("2026-11-29T13:00:00+01:00") == {"at": 1795953600.0}
    for text in ("", "10", "m", "-5m", "tomorrow", "0001-01-01T00:00:00"):
        with pytest.raises(UsageFault):
            logs.parse_since(text)


def test_json_lines_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    write = cli_runs.JsonLines()
    for piece in (b"a\nb", b"c\n\xff", b"no end"):
        write(piece)
    write.close()
    write.close()
    assert [json.loads(line)["line"] for line in out.getvalue().splitlines()] == ["a", "bc", "�no end"]
    endless = b"x" * (cli_runs._LONGEST_LINE + 1)
    write(endless)
    assert write._held == b"" and endless.decode() in out.getvalue()
