"""The commands that messages offer go where the command that failed went."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import hints
from dflash_ops.cli_many import error_document
from dflash_ops.errors import OpsError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("stopped. Next: dflash-ops ct start", "stopped. Next: dflash-ops ct start -t b --inventory 'a b'"),
        (
            "follow it: dflash-ops train logs -f x-1",
            "follow it: dflash-ops train logs -t b --inventory 'a b' -f x-1",
        ),
        ("dflash-ops exec -- bash, which", "dflash-ops exec -t b --inventory 'a b' -- bash, which"),
        ("`dflash-ops gpu-status`", "`dflash-ops gpu-status -t b --inventory 'a b'`"),
        ("dflash-ops gpu free -t NAME", "dflash-ops gpu free --inventory 'a b' -t NAME"),
        ("dflash-ops put --inventory c X Y", "dflash-ops put -t b --inventory c X Y"),
        (
            "dflash-ops prune --keep 3, or tmux attach -t =x",
            "dflash-ops prune -t b --inventory 'a b' --keep 3, or tmux attach -t =x",
        ),
        (
            "dflash-ops doctor or dflash-ops deploy -t c",
            "dflash-ops doctor -t b --inventory 'a b' or dflash-ops deploy --inventory 'a b' -t c",
        ),
    ],
)
def test_a_command_in_a_message_says_where(text: str, meant: str) -> None:
    assert hints.addressed(text, "b", "a b") == meant
    assert hints.addressed(text, None, None) == text


@pytest.mark.parametrize(
    "text",
    [
        "dflash-ops inventory check --connect",
        "dflash-ops init",
        "dflash-ops sandbox up",
        "dflash-ops: left out x; --include names",
        "dflash-ops deployed it",
        "my-dflash-opsx deploy",
        "the same with `dflash-ops --debug ...`",
    ],
)
def test_what_takes_no_target_stays(text: str) -> None:
    assert hints.addressed(text, "b", "a") == text


_PIECES = st.sampled_from(
    ["dflash-ops ", "train ", "start ", "deploy", "exec", " -t x", " --inventory y", "; ", "\n", "(", "gpu-status", " "]
)


@given(
    st.lists(_PIECES | st.text(max_size=4), max_size=12).map("".join),
    st.none() | st.text("ab c'", min_size=1, max_size=4),
    st.none() | st.text("ab c'/", min_size=1, max_size=4),
)
def test_only_words_are_put_in_and_only_once(text: str, target: str | None, inventory: str | None) -> None:
    once = hints.addressed(text, target, inventory)
    rest = iter(once)
    assert all(char in rest for char in text)  # all of it, in its order
    assert "dflash-ops" in text or once == text
    assert hints.addressed(once, None, inventory) == hints.addressed(text, target, inventory)


def test_each_container_has_its_own() -> None:
    error = OpsError("no", next="dflash-ops ct start")
    with hints.at("second"):
        assert error_document(error)["next"] == "dflash-ops ct start -t second"
    assert error_document(error)["next"] == "dflash-ops ct start"


def test_what_the_command_line_says_is_in_its_errors() -> None:
    words = ["-c", "from dflash_ops.cli import main; main()", "shell", "-t", "second", "--inventory", "it.toml"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "Next: dflash-ops exec -t second --inventory it.toml -- bash" in done.stderr, done.stderr
