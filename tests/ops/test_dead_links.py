"""A link that carries nothing any more ends whatever was going on over it. (The kinds of links, and the real intervals,
are in test_ssh_links.py.)"""

import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Box
from proxy import Proxy

from dflash_ops import ssh, terminal
from dflash_ops.command import Command, Container
from dflash_ops.errors import LinkLostError, OpsError, TimedOutError, UnreachableError
from dflash_ops.shell import Shell

BEGUN = Command(("sh", "-c", "echo begun; sleep 1000"))


@dataclass
class Frozen:
    """Something that goes on over a link, and the end of the link."""

    shell: Shell
    far: Container
    proxy: Proxy

    def run(self) -> None:
        threading.Timer(0.3, self.proxy.silence).start()
        self.shell.run(self.far, BEGUN)

    def a_question_to_the_host(self) -> None:
        self.proxy.silence()
        self.shell.run(self.far.host, Command(("true",)))

    def stream(self) -> None:
        self.shell.stream(self.far, BEGUN, on_out=lambda _: self.proxy.silence())

    def stream_with_input(self) -> None:
        """From a pipe that nobody ever writes to."""
        reading, writing = os.pipe()
        self.shell.stream(self.far, BEGUN, on_out=lambda _: self.proxy.silence(), stdin=reading)
        os.close(reading)
        os.close(writing)

    def stream_with_little_patience(self) -> None:
        """Whose time is up before the link is known to be dead."""
        self.shell.stream(self.far, BEGUN, on_out=lambda _: self.proxy.silence(), timeout=2.5)

    def hearing(self) -> None:
        with self.shell.converse(self.far, BEGUN) as talk:
            assert talk.hear() == b"begun"
            self.proxy.silence()
            assert talk.hear() is None  # as after any end, which `finish` tells
            talk.finish()

    def saying(self) -> None:
        with self.shell.converse(self.far, Command(("sh", "-c", "echo begun; cat >/dev/null"))) as talk:
            assert talk.hear() == b"begun"
            self.proxy.silence()
            for _ in range(64):
                talk.say(bytes(1 << 20))
            talk.finish()

    def taking_leave(self) -> None:
        with self.shell.converse(self.far, Command(("sh", "-c", "echo begun; cat; sleep 1000"))) as talk:
            self.proxy.silence()
            talk.finish()

    def waiting_for_a_lock(self) -> None:
        lock = f"/run/lock/test-{secrets.token_hex(4)}"
        prefix = ("flock", "-w", "1000", "-F", lock)
        with self.shell.converse(self.far, Command(BEGUN.argv, host_prefix=prefix)):
            threading.Timer(0.3, self.proxy.silence).start()
            self.shell.run(self.far, Command(("true",), host_prefix=prefix))

    def sending(self) -> None:
        self.proxy.silence()
        self.shell.send(self.far.host, bytes(32 << 20), "/tmp/never")

    def sending_through_cat(self) -> None:
        self.shell._known(self.far.host).without_sftp = True
        threading.Timer(0.3, self.proxy.silence).start()
        self.shell.send(self.far.host, bytes(256 << 20), "/dev/null")

    def asking_why(self) -> None:
        """A container that can't be entered, and no pct any more to say why."""
        result = self.shell.run(self.far.host, Command(("false",)))
        self.proxy.silence()
        self.shell.explain(self.far, result)


DOINGS = [name for name in vars(Frozen) if not name.startswith("_") and callable(getattr(Frozen, name))]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 s and 15 s become these; long enough for a machine that is busy."""
    monkeypatch.setattr(ssh, "KEEPALIVE_SECONDS", 0.3)
    monkeypatch.setattr(ssh, "DEAD_AFTER_SECONDS", 3.0)


def end_of(name: str, container: Container, folder: Path) -> str:
    """What it ended with."""
    folder.mkdir()
    with Proxy(container.host, folder) as proxy, Shell() as shell:
        far = proxy.before(container)
        assert shell.run(far, Command(("true",))).code == 0
        try:
            getattr(Frozen(shell, far, proxy), name)()
        except OpsError as error:
            return f"{type(error).__name__}: {error.what}"
        return "nothing"


@pytest.mark.usefixtures("quick")
def test_a_silent_link_is_noticed_whatever_goes_on(box: Box, tmp_path: Path) -> None:
    """A pulled cable: nothing closes, nothing comes."""
    ended: dict[str, str] = {}

    def end(name: str) -> None:
        ended[name] = end_of(name, box.container, tmp_path / name)

    threads = [threading.Thread(target=end, args=(name,), daemon=True) for name in DOINGS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # what hangs is missing
    assert ended == dict.fromkeys(DOINGS, "LinkLostError: the connection broke")


@pytest.mark.usefixtures("quick")
def test_a_person_at_a_terminal_gets_it_back(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    attributes = terminal.termios.tcgetattr(theirs)
    keys = os.fdopen(theirs, "r")
    monkeypatch.setattr("sys.stdin", keys)
    with Proxy(box.container.host, tmp_path) as proxy, Shell() as shell:
        far = proxy.before(box.container)
        assert shell.run(far, Command(("true",))).code == 0
        threading.Timer(0.5, proxy.silence).start()
        with pytest.raises(LinkLostError):
            shell.interactive(far, Command(("sh", "-c", "cat; sleep 1000")))
    assert terminal.termios.tcgetattr(theirs) == attributes
    keys.close()
    os.close(ours)


def test_a_host_that_falls_silent_while_we_connect(box: Box, tmp_path: Path) -> None:
    with Proxy(box.container.host, tmp_path) as proxy, Shell(connect_timeout=0.5) as shell:
        proxy.silence()
        with pytest.raises(UnreachableError):
            shell.run(proxy.host, Command(("true",)))


def test_a_command_that_reads_nothing_while_its_host_lives(box: Box, shell: Shell) -> None:
    """A program that hangs on its disk: what is said to it is not waited for without end."""
    with (
        pytest.raises(TimedOutError, match=r"no answer within 0\.5 s"),
        shell.converse(box.container, BEGUN, timeout=0.5) as talk,
    ):
        for _ in range(64):
            talk.say(bytes(1 << 20))
