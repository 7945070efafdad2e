"""Words and the one line of shell text they become."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.command import MAX_LINE_BYTES, Command, Container, Host, Local, Result, line

HOST = Host("lab", "lab.example")
ATTACH = Container(HOST, 200)
PCT = Container(HOST, 200, via="pct")

# Any bytes but NUL, as they reach Python from a command line.
raw_words = st.lists(st.binary(max_size=40).filter(lambda raw: b"\0" not in raw), min_size=1, max_size=8)
PRINT_WORDS = (sys.executable, "-c", "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])")


def as_words(raw: list[bytes]) -> list[str]:
    return [word.decode("utf-8", "surrogateescape") for word in raw]


@given(raw_words)
def test_words_that_go_by_stdin_arrive_with_the_input_behind_them(raw: list[bytes]) -> None:
    program = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]], sys.stdin.buffer.read())"
    odd = Container(HOST, 200, python=sys.executable, via="pct")
    made = line(odd, Command((sys.executable, "-c", program, *as_words(raw), "\udcff")))
    assert made.stdin_head
    # What pct would run in the container.
    text = made.text.replace(b"env LC_ALL=C.UTF-8 pct exec 200 -- ", b"")
    done = subprocess.run(["sh", "-c", text], input=made.stdin_head + b"the input", capture_output=True, check=True)
    assert done.stdout.decode().strip() == repr([*raw, b"\xff"]) + " b'the input'"


def test_a_container_command_is_entered_with_a_clean_environment() -> None:
    text = line(ATTACH, Command(("nvidia-smi", "-L"), env={"A": "b c"})).text.decode()
    assert text == (
        "exec lxc-attach -n 200 --clear-env -- env -i "
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "
        "'A=b c' nvidia-smi -L"
    )
    assert line(PCT, Command(("true",))).text.startswith(b"exec env LC_ALL=C.UTF-8 pct exec 200 -- env -i PATH=")


def test_a_prefix_goes_round_the_entry_into_the_container() -> None:
    text = line(ATTACH, Command(("true",), host_prefix=("flock", "-n", "/run/lock/x"))).text
    assert text.startswith(b"exec flock -n /run/lock/x lxc-attach -n 200 ")


def test_utf8_words_go_through_pct_as_words_and_others_by_stdin() -> None:
    assert line(PCT, Command(("echo", "naïve ✓"))).stdin_head == b""
    assert line(PCT, Command(("echo", "\udcff"))).stdin_head
    assert line(ATTACH, Command(("echo", "\udcff"))).stdin_head == b""


def test_a_line_too_long_for_one_argument_goes_by_stdin_or_is_refused() -> None:
    long = Command(("echo", "x" * MAX_LINE_BYTES))
    made = line(ATTACH, long)
    assert len(made.text) < MAX_LINE_BYTES and len(made.stdin_head) > MAX_LINE_BYTES
    with pytest.raises(ValueError, match="bytes long"):
        line(HOST, long)


def test_a_command_is_at_least_one_word_without_nul() -> None:
    with pytest.raises(ValueError, match="at least one word"):
        Command(())
    with pytest.raises(ValueError, match="NUL"):
        Command(("echo", "a\0b"))


@pytest.mark.parametrize(
    ("code", "out", "err", "words"),
    [
        (1, b"", b"first\nlast \n\n", "last"),
        (1, b"said\n", b"  \n", "said"),
        (3, b"", b"", "exit code 3, no output"),
        (1, b"", b"a\x1eb\n", "a\x1eb"),
    ],
)
def test_last_words(code: int, out: bytes, err: bytes, words: str) -> None:
    assert Result(Local(), Command(("x",)), code, out, err).last_words == words


def test_the_containers_python_comes_first_on_its_path() -> None:
    container = Container(Host("lab", "lab"), 200, python="/opt/venv/bin/python")
    assert b"PATH=/opt/venv/bin:/usr/local/sbin:" in line(container, Command(("python", "-V"))).text
    assert b"PATH=/usr/local/sbin:" in line(replace(container, python="python3"), Command(("python", "-V"))).text
