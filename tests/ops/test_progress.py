"""What is shown while a verb works: on a terminal bytes, speed and time left; elsewhere nothing."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli

from dflash_ops import progress

SHOW = """
from dflash_ops import progress
way = progress.shown(debug={debug})
way.step("asking [lab] \\x1b[31m")
with way.bytes("sending big", 4 << 20, 1 << 20) as advance:
    for _ in range(3):
        advance(1 << 20)
with way.bytes("sending small", 1000) as advance:
    advance(1000)
with way.bytes("sending more", 4 << 20) as advance:
    advance(2 << 20)
print("the value")
"""


def on_a_terminal(words: list, **rest) -> tuple[bytes, str]:
    """Runs it with a terminal of 100 columns as its stderr; gives stdout, and what the terminal got."""
    ours, theirs = pty.openpty()
    rest["env"] = {**rest.get("env", os.environ), "COLUMNS": "100", "TERM": "xterm-256color"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, **rest)
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last one has closed it
            break
        shown += part
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0, shown
    return out, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_on_a_terminal() -> None:
    out, shown = on_a_terminal([sys.executable, "-W", "error", "-c", SHOW.format(debug=False)])
    assert out == b"the value\n"
    assert "asking [lab] \\x1b[31m\r\n" in shown  # nothing that the terminal would obey
    last = shown.split("sending big")[-1].split("sending more")[0]
    assert "4.0/4.0 MiB" in last and re.search(r"\d+:\d\d|--:--", last)  # all of it, and the time left
    assert "sending more" in shown and "sending small" not in shown  # over before anybody has read it


@pytest.mark.parametrize(("debug", "err"), [(False, b""), (True, b"asking [lab] \\x1b[31m\n")])
def test_elsewhere_nothing_or_the_steps(debug: bool, err: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", SHOW.format(debug=debug)], capture_output=True)
    assert (done.stdout, done.stderr) == (b"the value\n", err)


def test_json_on_stdout_and_bytes_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "big"
    file.write_bytes(os.urandom(3 << 20))
    out, shown = on_a_terminal(cli.words("put", str(file), "shared/data/", "--json"), env=cli.environment())
    assert json.loads(out)["sent"] == 3 << 20 and out.count(b"\n") == 1
    assert "asking box / container 200" in shown and "sending big" in shown and "/3.0 MiB" in shown


def test_one_that_says_nothing_takes_every_call(capfd: pytest.CaptureFixture[str]) -> None:
    """A verb's default."""
    with progress.Progress().bytes("sending", 10, done=5) as advance:
        advance(5)
    progress.Progress().step("asking")
    assert capfd.readouterr() == ("", "")
