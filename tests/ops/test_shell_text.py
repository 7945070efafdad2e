"""One line of text is read alike by every login shell."""

import subprocess

import pytest
from openssh import need
from words import Canary, as_words, batch

from dflash_ops.shell_text import mark, text


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "fish", "tcsh", "zsh"])
def test_every_shell_gives_back_every_word(shell: str, soak: bool) -> None:
    need(shell)
    canary = Canary()
    for number in range(210 if soak else 21):
        raw = batch(number, canary)
        line = text(("printf", "[%s]", *as_words(raw)), "1f")  # nothing of ours needs packing
        done = subprocess.run([shell, "-c", line], capture_output=True)
        out = mark("1f") + b"".join(b"[%s]" % word for word in raw)
        assert (done.stdout, done.stderr, done.returncode) == (out, mark("1f"), 0)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "fish", "tcsh", "zsh"])
def test_a_program_that_is_not_there_and_one_that_is_killed(shell: str) -> None:
    """The code is the same in every shell (csh's own for a missing program is 1)."""
    need(shell)
    done = subprocess.run([shell, "-c", text(("no-such-program",), "1f")], capture_output=True)
    assert done.returncode == 127 and b"no-such-program" in done.stderr
    for words in (("sh", "-c", "kill -9 $$"), ("sh", "-c", "kill -9 $$ # \\")):
        assert subprocess.run([shell, "-c", text(words, "1f")]).returncode == -9


def test_what_needs_no_packing_stays_readable() -> None:
    assert text(("env", "A=b", "a b", "it's", "=ls")) == b"""exec env A=b 'a b' 'it'"'"'s' '=ls'"""
    assert text(("echo", "a!")).endswith(b"sh 'echo \\0047a\\0041\\0047'")
    assert b"printf" not in text(("echo", '$(a) `b` "c" * ~ ; %'), "1f")
