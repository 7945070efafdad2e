"""A program that runs as long as somebody waits for it: until it has ended, whatever becomes of its output."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stand_in import exists, retry_until

from dflash_ops.remote import attending

SCRIPT = """
import os, sys
from dflash_ops.remote import answers, attending
attending._SILENCE_SECONDS = float(os.environ.get("SILENCE_SECONDS", attending._SILENCE_SECONDS))
def writes():
    return int(open("/proc/self/io").read().split("syscw:")[1].split()[0])
def verb():
    before = writes()
    code, lines = attending.Attending().run(["sh", "-c", sys.argv[1]], os.environ)
    return {"code": code, "lines": lines, "writes": writes() - before}
sys.exit(answers.answer(None, verb))
"""


@contextmanager
def attended(program: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A remote script that runs `program` in a shell; its stdin is the link."""
    words = [sys.executable, "-c", SCRIPT, program]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env}
    ) as script:
        try:
            yield script
        finally:
            script.kill()


def answers_of(script: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """All that it says to its end, while the link is there."""
    assert script.stdout is not None
    said = [json.loads(line) for line in script.stdout]
    assert script.wait(60) == 0, said
    return said


def pid_in(file: Path) -> int:
    return int(retry_until(lambda: file.exists() and file.read_text().strip()))


def test_a_link_that_ends_ends_a_program_that_has_closed_its_output(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with attended(f"exec >&- 2>&-; echo $$ > {file}; exec sleep 1000") as script:
        pid = pid_in(file)
        out, _ = script.communicate(timeout=60)  # closes its stdin
        assert "the link broke" in json.loads(out)["what"] and script.returncode == 1
        assert not exists(pid)


def test_a_program_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with attended(f"echo one; printf two; exec >&- 2>&-; while [ ! -e {go} ]; do sleep 0.05; done; exit 3") as script:
        assert script.stdout is not None
        first = [json.loads(script.stdout.readline())["text"] for _ in range(2)]
        assert first == ["one", "two"] and script.poll() is None
        go.touch()
        last = answers_of(script)[-1]
    assert (last["code"], last["lines"]) == (3, ["one", "two"])


def test_a_child_that_talks_on_keeps_nobody(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    chatter = f"setsid sh -c 'echo $$ > {file}; while echo chatter; do :; done' & while [ ! -s {file} ]; do :; done"
    with attended(f"{chatter}; exit 4") as script:
        last = answers_of(script)[-1]
        pid = pid_in(file)
    assert last["code"] == 4
    retry_until(lambda: not exists(pid))  # nobody reads it any more


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    with attended(r"head -c 1000000 /dev/zero | tr '\0' x; echo; echo end") as script:
        said = [it["text"] for it in answers_of(script) if it.get("event") == "line"]
    assert said[-1] == "end" and "".join(said[:-1]) == "x" * 1_000_000
    assert max(map(len, said)) <= attending._LINE_BYTES + attending._READ_BYTES


@pytest.mark.parametrize("how", ["is silent", "ends", "takes nothing more"])
def test_a_link_ends_a_program_that_talks_while_nobody_reads(tmp_path: Path, how: str) -> None:
    file = tmp_path / "pid"
    limit = {"SILENCE_SECONDS": "1"} if how == "is silent" else {}
    with attended(f"echo $$ > {file}; exec yes", **limit) as script:
        pid = pid_in(file)
        assert script.stdin is not None and script.stdout is not None
        if how != "is silent":
            (script.stdin if how == "ends" else script.stdout).close()
        retry_until(lambda: not exists(pid))
        assert script.wait(60) == 1  # though nobody reads why


def test_who_reads_nothing_but_shows_signs_of_life_is_waited_for() -> None:
    with attended("yes | head -n 20000; exit 5", SILENCE_SECONDS="2") as script:
        assert script.stdin is not None
        end = time.monotonic() + 4
        while time.monotonic() < end:
            script.stdin.write(b"\n")
            script.stdin.flush()
            time.sleep(0.1)
        said = answers_of(script)
    assert said[-1]["code"] == 5 and [it["text"] for it in said[:-1] if it["event"] == "line"] == ["y"] * 20000


def test_many_short_lines_take_few_writes() -> None:
    with attended("yes | head -n 20000") as script:
        said = answers_of(script)
    assert sum(it.get("text") == "y" for it in said) == 20000 and set(said[-1]["lines"]) == {"y"}
    assert said[-1]["writes"] < 2000


def test_a_child_of_a_program_that_has_ended_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with attended(f"sleep 1000 >&- 2>&- & echo $! > {file}; exit 6") as script:
        assert answers_of(script)[-1]["code"] == 6
    pid = pid_in(file)
    retry_until(lambda: not exists(pid))
