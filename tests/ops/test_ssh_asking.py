"""Keys with a passphrase, asked for on a real terminal; and ~/.ssh as people have it, without any setting of ours."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openssh import Agent, Sshd, make_key, need
from ssh_world import World

SECRET = "sesame"
PROMPT = "Enter passphrase for key"

long = pytest.mark.soak  # a bcrypt and a Python each: with --soak

# Connects to each of the names, one Shell for all, and says who it is there.
PROGRAM = """
import sys
from pathlib import Path
from dflash_ops.command import Command, Host
from dflash_ops.errors import OpsError
from dflash_ops.shell import Shell
file, *names = sys.argv[1:]
try:
    with Shell() as shell:
        for name in names:
            host = Host(name, name, ssh_config=Path(file) if file else None)
            shell.begin(host)
            print("I am", shell.run(host, Command(("id", "-un"))).out.decode().strip(), flush=True)
except OpsError as error:
    print(error.line())
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Only a locked key opens the target and the gate."""
    need("ssh", "setsid")
    folder = tmp_path_factory.mktemp("asking")
    key = make_key(folder / "locked", passphrase=SECRET)
    servers = [Sshd(folder / name).authorize(key) for name in ("target", "gate", "outer")]
    (folder / "known_hosts").write_text("".join(server.known() for server in servers))
    yield World(folder, *servers)
    for server in servers:
        server.end()


@pytest.fixture
def soaked(soak: bool) -> None:
    if not soak:
        pytest.skip("with --soak")


class Typed:
    """The program on a terminal of its own, with somebody who types."""

    def __init__(self, file: Path | None, *names: str, prefix: tuple[str, ...] = (), program: str = PROGRAM) -> None:
        self._ours, theirs = pty.openpty()
        words = ("setsid", "--ctty", "--wait", *prefix, sys.executable, "-c", program, str(file or ""), *names)
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs)
        self.echoed = termios.tcgetattr(theirs)
        self._theirs = theirs
        self._shown = bytearray()

    @property
    def screen(self) -> str:
        """All that it was shown so far; a character of which only a part has come is replaced."""
        return self._shown.decode(errors="replace")

    def see(self, words: str, count: int = 1, seconds: float = 60) -> None:
        """Waits until the words stand there so many times."""
        deadline = time.monotonic() + seconds
        while self.screen.count(words) < count:
            assert time.monotonic() < deadline, self.screen
            if select.select([self._ours], [], [], 0.1)[0]:
                self._shown += os.read(self._ours, 4096)

    def type(self, words: str) -> None:
        os.write(self._ours, words.encode())

    def ends(self) -> int:
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen
            self._drain(0.05)
        self._drain(0.0)
        assert SECRET not in self.screen
        assert termios.tcgetattr(self._theirs)[3] & termios.ECHO
        return self.process.returncode

    def _drain(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while select.select([self._ours], [], [], seconds)[0]:
                self._shown += os.read(self._ours, 4096)

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


def config(world: World, more: str = "") -> Path:
    host = world.alias(f"{more}IdentityFile {{dir}}/locked; Host box; ProxyJump outer,gate")
    assert host.ssh_config is not None
    return host.ssh_config


def test_a_passphrase_is_asked_once_for_all_hops_and_hosts(world: World) -> None:
    with Typed(config(world), "box", "gate") as typed:
        typed.see(PROMPT)
        assert not termios.tcgetattr(typed._theirs)[3] & termios.ECHO
        typed.type(f"{SECRET}\n")
        typed.see("I am root", 2)
        assert typed.ends() == 0
        assert typed.screen.count(PROMPT) == 1


def test_a_wrong_one_is_asked_for_again_three_times_in_all(world: World) -> None:
    with Typed(config(world), "gate") as typed:
        for count in (1, 2, 3):
            typed.see(PROMPT, count)
            typed.type("open " if count == 1 else f"{count}\n")
            if count == 1:
                typed.type("wrong\n")
        assert typed.ends() == 4
        assert f"locked by a passphrase (gate, root@127.0.0.1:{world.gate.port})" in typed.screen.replace("\r\n", "")
        assert "open wrong" not in typed.screen


@long
def test_after_a_wrong_one_the_right_one_is_good(world: World, soaked: None) -> None:
    with Typed(config(world), "gate") as typed:
        typed.see(PROMPT)
        typed.type("wrong\n")
        typed.see(PROMPT, 2)
        typed.type("sesX\x7fame\n")  # as on any terminal, a letter can be taken back
        typed.see("I am root")
        assert typed.ends() == 0


def test_ctrl_c_ends_the_program_with_its_echo_back(world: World) -> None:
    with Typed(config(world), "gate") as typed:
        typed.see(PROMPT)
        typed.type("ses\x03")
        typed.see("KeyboardInterrupt")
        assert typed.ends() in (1, 128 + signal.SIGINT, -signal.SIGINT)


# The command line itself, behind its process id.
COMMANDS = """
import os, sys
from dflash_ops.cli import main
print("I am", os.getpid(), flush=True)
del sys.argv[1]
main()
"""


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM], ids=["key", "int", "term"])
def test_a_question_of_many_that_is_cancelled_is_not_asked_again(
    world: World, tmp_path: Path, number: signal.Signals | None
) -> None:
    """By Ctrl-C, or by a signal from elsewhere; the echo is back."""
    file = tmp_path / "dflash-ops.toml"
    file.write_text(
        "".join(
            f'[hosts.{name}]\naddress = "{name}"\nssh_config = "{config(world)}"\n'
            f'[containers.c{name}]\nhost = "{name}"\nvmid = 200\n'
            for name in ("gate", "outer")
        )
    )
    with Typed(None, "releases", "--on", "all", "--inventory", str(file), program=COMMANDS) as typed:
        typed.see(PROMPT)
        if number is None:
            typed.type("ses\x03")
        else:
            os.kill(int(typed.screen.split("I am ")[1].split()[0]), number)
        assert typed.ends() == (-signal.SIGTERM if number is signal.SIGTERM else 128 + signal.SIGINT)
        assert typed.screen.count(PROMPT) == 1 and "Traceback" not in typed.screen


@long
def test_an_empty_one_passes_over_the_key(world: World, soaked: None) -> None:
    key = make_key(world.folder / "open")
    world.gate.authorize(key)
    file = config(world, "IdentityFile {dir}/locked; IdentityFile {dir}/open; ")
    with Typed(file, "gate") as typed:  # a key that needs none is tried first
        typed.see("I am root")
        assert typed.ends() == 0 and PROMPT not in typed.screen
    with Typed(config(world), "gate") as typed:
        typed.see(PROMPT)
        typed.type("\n")
        assert typed.ends() == 4 and typed.screen.count(PROMPT) == 1


@pytest.mark.parametrize("more", ["BatchMode yes; ", ""], ids=["batch-mode", "no-terminal"])
def test_nobody_is_asked_where_nobody_is(world: World, more: str) -> None:
    file = config(world, more)
    if more:
        with Typed(file, "gate") as typed:
            assert typed.ends() == 4
            said = typed.screen
    else:
        words = (sys.executable, "-c", PROGRAM, str(file), "gate")
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
        assert done.returncode == 4
        said = done.stdout + done.stderr
    assert PROMPT not in said and f"ssh-add {world.folder}/locked" in said.replace("\r\n", "")


@long
def test_the_agent_has_it_and_nobody_is_asked(world: World, monkeypatch: pytest.MonkeyPatch, soaked: None) -> None:
    with Agent(world.folder) as agent:
        agent.add(world.key("locked"), passphrase=SECRET)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
        with Typed(config(world, "IdentityAgent SSH_AUTH_SOCK; "), "box") as typed:
            typed.see("I am root")
            assert typed.ends() == 0 and PROMPT not in typed.screen


# -- ~/.ssh


def test_the_ssh_folder_as_people_have_it(world: World, tmp_path: Path) -> None:
    """No setting of ours: an Include relative to it, known_hosts that is hashed, a key under its usual name."""
    folder = tmp_path / "home" / ".ssh"
    (folder / "conf.d").mkdir(parents=True)
    key = make_key(folder / "id_ed25519")
    world.gate.authorize(key)
    (folder / "known_hosts").write_text(world.gate.known())
    subprocess.run(("ssh-keygen", "-q", "-H", "-f", str(folder / "known_hosts")), check=True, capture_output=True)
    (folder / "config").write_text("Include conf.d/*\nHost *\n IdentityAgent none\n")
    (folder / "conf.d" / "one").write_text(f"Host near\n HostName 127.0.0.1\n Port {world.gate.port}\n User root\n")
    for file in (folder, *folder.rglob("*")):
        file.chmod(0o700 if file.is_dir() else 0o600)
    passwd = tmp_path / "passwd"
    passwd.write_text(f"root:x:0:0:root:{tmp_path}/home:/bin/sh\n")
    enter = f'mount --bind {passwd} /etc/passwd && exec "$@"'
    words = ("unshare", "--mount", "sh", "-c", enter, "sh", sys.executable, "-c", PROGRAM, "", "near")
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "HOME": f"{tmp_path}/home"}, timeout=60
    )
    assert (done.stdout, done.stderr) == ("I am root\n", "")


# -- what it costs


def test_what_paramiko_needs_for_little_is_not_loaded() -> None:
    program = (
        "import sys, dflash_ops.ssh; light = set(sys.modules); dflash_ops.ssh.load(); loaded = set(sys.modules); "
        "print({'paramiko', 'cryptography'} & light, 'paramiko' in loaded, {'fabric', 'invoke', 'asyncio'} & loaded)"
    )
    need("ssh")
    done = subprocess.run((sys.executable, "-c", program), check=True, capture_output=True, text=True)
    assert done.stdout == "set() True set()\n"
