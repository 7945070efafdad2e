"""exec as somebody, and shell: on a real terminal, in the container, with what the trainer sees."""

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory

from dflash_ops.command import Command
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

WHO = ("sh", "-c", 'echo $(id -un) $(id -gn) $(id -G) "$HOME" "$USER" "$LOGNAME"; printf "[%s]" "$@" >&2; exit 7', "sh")


def test_exec_as_another_user(box: Box, cli: Cli, shell: Shell) -> None:
    """With that user's groups and home, the words and the exit code as they are."""
    line = (
        "id daemon >/dev/null && printf 'two:x:4242:daemon\\n' >> /etc/group"  # a group that has the user as a member
    )
    shell.run(box.container, Command(("sh", "-c", line)), check=True)
    done = cli("exec", "--user", "daemon", "--", *WHO, "$(id)", "", b"\xff")
    words = done.stdout.decode().split()
    assert (done.returncode, words[:2], words[-3:]) == (7, ["daemon", "daemon"], ["/usr/sbin", "daemon", "daemon"])
    assert "4242" in words and "0" not in words and done.stderr == b"[$(id)][][\xff]"
    killed = cli("exec", "--user", "daemon", "--", "sh", "-c", "kill -9 $$")
    assert (killed.returncode, killed.stderr) == (137, b"")


def test_who_runs_the_trainer_runs_exec_unless_told_otherwise(tmp_path: Path, sandbox: SandboxState) -> None:
    cli = Cli(write_inventory(tmp_path, sandbox.name, more='user = "daemon"\n'))
    assert cli("exec", "--", "id", "-un").stdout == b"daemon\n"
    assert cli("exec", "--user", "root", "--", "id", "-un").stdout == b"root\n"


def test_a_user_that_the_container_does_not_have(cli: Cli) -> None:
    done = cli("exec", "--user", "no-such-user", "--", "true")
    told = "there is no user no-such-user (box / container 200). Next: name another, or make one: dflash-ops exec"
    assert done.returncode == 8 and done.stderr.decode().startswith(f"dflash-ops: {told}")


def test_a_shell_needs_a_terminal(cli: Cli) -> None:
    done = cli("shell")
    assert done.returncode == 2 and b"needs a terminal. Next: dflash-ops exec -- bash" in done.stderr


SIZES = """
printf %s "$1" | od -An -tx1; stty size
trap 'stty size' WINCH
trap 'echo interrupted; exit 7' INT
echo rea''dy
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("via", ["lxc-attach", "pct"])
def test_a_terminal_through_sudo(via: str, sandbox: SandboxState, tmp_path: Path) -> None:
    """Words of any bytes, its size, a new size, Ctrl-C and the exit code pass."""
    file = tmp_path / "dflash-ops.toml"
    file.write_text(
        f'[hosts.box]\naddress = "{sandbox.host}"\nport = {sandbox.port}\nuser = "ops"\nkey = "{sandbox.key}"\n'
        f'known_hosts = "{sandbox.known_hosts}"\n'
        f'[containers.trainer]\nhost = "box"\nvmid = 200\nvia = "{via}"\npython = "{sandbox.python}"\n'
    )
    person = Person(Cli(file), "exec", "--", "sh", "-c", SIZES, "sh", b"\xc3\xa9\xff;")
    assert b"c3 a9 ff 3b\r\n24 80\r\n" in person.hear(b"ready")
    fcntl.ioctl(person.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    person.hear(b"33 99")
    os.write(person.terminal, b"\x03")
    person.hear(b"interrupted")
    assert person.code() == 7


class Person:
    """Somebody before a terminal of 24 x 80."""

    def __init__(self, cli: Cli, *words: str | bytes) -> None:
        self.heard = bytearray()
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            os.execvpe(sys.executable, [os.fsencode(word) for word in cli.words(*words)], cli.environment())

    def hear(self, words: bytes) -> bytes:
        """Reads until it has heard them; everything up to them."""
        while words not in self.heard:
            assert select.select([self.terminal], [], [], 60)[0], bytes(self.heard)
            self.heard += os.read(self.terminal, 1000)
        before, _, rest = bytes(self.heard).partition(words)
        self.heard = bytearray(rest)
        return before

    def type(self, line: str) -> None:
        os.write(self.terminal, f"{line}\n".encode())

    def code(self) -> int:
        """Its exit code; the rest of what it says is thrown away."""
        try:
            while os.read(self.terminal, 1000):
                pass
        except OSError:  # EIO: the other side is closed
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("via", ["lxc-attach", "pct"])
def test_a_terminal_and_a_container_that_is_stopped(via: str, sandbox: SandboxState, tmp_path: Path) -> None:
    person = Person(Cli(write_inventory(tmp_path, sandbox.name, vmid=202, more=f'via = "{via}"\n')), "exec", "--", "id")
    person.hear(b"dflash-ops: container 202 is stopped (box). Next: ")
    assert person.code() == 6


def test_words_too_long_for_a_terminal(cli: Cli) -> None:
    person = Person(cli, "exec", "--", "true", "x" * 70_000, "x" * 70_000)
    person.hear(b"dflash-ops: the words are too long for a terminal (box / container 200): ")
    assert person.code() == 2


@pytest.mark.parametrize("profile", ["", "export PATH=/bin MINE=yes; cd /"])
def test_a_shell(box: Box, cli: Cli, shell: Shell, profile: str) -> None:
    """In the current release, with the environment's Python first whatever a profile does; its code is ours."""
    at = box.container.path
    line = (
        f"mkdir -p {at}/releases/r {at}/env/e/bin && ln -sfn releases/r {at}/current && ln -sfn e {at}/env/current && "
        f'cp /bin/true {at}/env/e/bin/python && printf "%s\\n" "$1" > ~/.profile'
    )
    shell.run(box.container, Command(("sh", "-c", line, "sh", profile)), check=True)
    try:
        person = Person(cli, "shell")
        person.hear(b"# ")
        person.type(
            'echo "<$PWD>" "<$(command -v python)>" "<$HOME>" "<$LANG>" "<$TERM>" '
            '"<$SHELL>" "<$MINE>" "<$PATH>" go$((1+1))'
        )
        said = person.hear(b"go2\r\n").rpartition(b"\n")[2].decode()
        where, python, home, lang, term, program, mine, path = re.findall("<(.*?)>", said)
        assert (where, python) == (f"{at}/current", f"{at}/env/e/bin/python")
        assert (home, lang, program, mine) == ("/root", "C.UTF-8", "/bin/bash", "yes" if profile else "")
        folders = path.split(":")
        assert folders[0] == f"{at}/env/e/bin" and len(folders) == len(set(folders))
        assert term == os.environ.get("TERM", "xterm-256color")
        person.type("exit 7")
        assert person.code() == 7
    finally:
        shell.run(box.container, Command(("sh", "-c", "rm ~/.profile")))


def test_a_shell_as_another_user(cli: Cli) -> None:
    """Whose own shell is nologin: then it is bash."""
    person = Person(cli, "shell", "--user", "daemon")
    person.hear(b"$ ")
    person.type("echo $(id -un) $SHELL go$((1+1))")
    assert person.hear(b"go2\r\n").rpartition(b"\n")[2].endswith(b"daemon /usr/bin/bash ")
    person.type("exit 3")
    assert person.code() == 3
