"""Links that stall, while they are made and afterwards: nothing waits without a bound, and what was started ends."""

import base64
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from openssh import Sshd, make_key, need, public
from paramiko.buffered_pipe import BufferedPipe
from paramiko.common import MSG_CHANNEL_SUCCESS
from ssh_world import RELAY, World, who

from dflash_ops import ssh, ssh_hop
from dflash_ops.command import Command, Host
from dflash_ops.errors import ConfigError, LinkLostError, OpsError, TimedOutError, UnreachableError
from dflash_ops.shell import Shell
from dflash_ops.ssh_link import News
from dflash_ops.ssh_local import Question
from dflash_ops.ssh_opening import Opening


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A target that allows two sessions on a connection, and gates of which the outer one forwards nothing."""
    need("ssh")
    folder = tmp_path_factory.mktemp("links")
    key = make_key(folder / "id")
    target = Sshd(folder / "target", config="MaxSessions 2")
    gate, outer = Sshd(folder / "gate"), Sshd(folder / "outer", config="AllowTcpForwarding no")
    for server in (target, gate, outer):
        server.authorize(key)
    (folder / "known_hosts").write_text("".join(server.known() for server in (target, gate, outer)))
    (folder / "relay.py").write_bytes(RELAY.read_bytes())
    yield World(folder, target, gate, outer)
    for server in (target, gate, outer):
        server.end()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- while connecting


class Mute:
    """Accepts connections on a port, or at a path; says `words`, and then nothing."""

    def __init__(self, words: bytes, path: Path | None = None) -> None:
        if path is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.port: int = self.listener.getsockname()[1]
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(path))
            self.listener.listen()
        self._words, self._open = words, list[socket.socket]()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = self.listener.accept()
                self._open.append(connection)
                with suppress(OSError):  # it has gone away already
                    connection.sendall(self._words)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.listener.close()
        for connection in self._open:
            connection.close()


def hurry(
    monkeypatch: pytest.MonkeyPatch, stage: str, begun: Callable[[], bool] = lambda: True, left: float = 0.5
) -> None:
    """From the begin of a stage of opening a hop, when it is so far, so many seconds are left."""
    real: Callable[..., None] = getattr(ssh_hop, stage)

    def hurried(opening: Opening, *rest: object) -> None:
        until(begun)
        opening.clock.give_back(left - opening.clock.left())
        real(opening, *rest)

    monkeypatch.setattr(ssh_hop, stage, hurried)


@pytest.mark.parametrize(
    ("words", "says", "left"),
    [
        (b"", "it never said that it speaks SSH within 30 s", 0.4),
        (b"welcome to this fine host\r\n", "it never said that it speaks SSH within 30 s", 0.4),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no keys were agreed on within 30 s", 2.0),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200, "can't be reached", 10.0),
    ],
    ids=["says-nothing", "greets-only", "stalls-after-its-version", "speaks-something-else"],
)
def test_a_server_that_stalls(
    servers: World, words: bytes, says: str, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "_greet", left=left)
    with closing(Mute(words)) as mute, pytest.raises(UnreachableError) as caught:
        who(servers.alias(f"Host box; Port {mute.port}"), timeout=30)
    assert says in caught.value.line()


def test_a_gate_that_stalls(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, "_greet")
    with closing(Mute(b"")) as mute, pytest.raises(UnreachableError, match=r"jump gate.* within 30 s") as caught:
        who(servers.alias(f"Host gate; Port {mute.port}; Host box; ProxyJump gate"), timeout=30)
    assert caught.value.next.endswith("gate true")


def test_a_connect_timeout_of_the_configuration_wins(servers: World) -> None:
    with closing(Mute(b"")) as mute, pytest.raises(UnreachableError, match="within 1 s"):
        who(servers.alias(f"ConnectTimeout 1; Host box; Port {mute.port}"), timeout=60)


def test_a_name_server_that_hangs(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: forever.wait(60))
    with pytest.raises(UnreachableError, match=r"its name was not resolved within 0\.3 s"):
        who(servers.alias(""), timeout=0.3)
    forever.set()


def test_a_host_that_takes_long_to_let_us_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, "log_in")
    key = make_key(tmp_path / "id")
    slow = "AuthorizedKeysFile none\nAuthorizedKeysCommand /bin/sleep 600\nAuthorizedKeysCommandUser root"
    with Sshd(tmp_path / "sshd", config=slow) as server, pytest.raises(UnreachableError) as caught:
        who(server.host(key), timeout=30)
    assert f"no answer to {key} within 30 s" in caught.value.why


def test_an_agent_that_hangs_is_passed_over(servers: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dflash_ops.ssh_keys._AGENT_SECONDS", 0.2)
    path = Path("/tmp") / f"dflash-agent-{os.getpid()}"
    try:
        with closing(Mute(b"", path)):
            assert who(servers.alias(f"IdentityAgent {path}")) == "root"
            with pytest.raises(UnreachableError, match=f"the agent at {path} gave no answer"):
                who(servers.alias(f"IdentityAgent {path}; IdentityFile none"))
    finally:
        path.unlink()


def test_an_agent_that_never_signs(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a touch, say, that nobody gives."""
    hurry(monkeypatch, "log_in")
    blob = base64.b64decode(public(servers.key("id")).split()[1])
    listed = b"\x0c" + struct.pack(">II", 1, len(blob)) + blob + struct.pack(">I", 2) + b"me"
    path = Path("/tmp") / f"dflash-signs-{os.getpid()}"
    before = set(threading.enumerate())
    try:
        with closing(Mute(struct.pack(">I", len(listed)) + listed, path)):
            with pytest.raises(UnreachableError, match=r"no answer to me \(in the agent\) within 30 s"):
                who(servers.alias(f"IdentityAgent {path}; IdentityFile none"), timeout=30)
            # Nobody is left behind in its wait.
            until(lambda: not any(isinstance(each, paramiko.Transport) for each in set(threading.enumerate()) - before))
    finally:
        path.unlink()


def test_a_match_exec_that_hangs(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file, real = servers.folder / "exec.pid", Question.answer

    def answer(question: Question, seconds: float) -> str | None:
        assert seconds == ssh.CONFIG_SECONDS
        until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        return real(question, 0.3)

    monkeypatch.setattr(Question, "answer", answer)
    with pytest.raises(ConfigError, match=r"`ssh -G` gave no answer within 0\.3 s.*Match exec"):
        who(servers.alias(f'Match exec "echo $$ >{pid_file} && exec sleep 600"; User joe'))
    until(lambda: not lives(int(pid_file.read_text())))


def test_a_proxy_command_that_hangs_is_ended(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has started; one that has been told to go away and does not, too."""
    pids = servers.folder / "pids"
    script = servers.folder / "hangs.sh"
    script.write_text(f"trap '' TERM HUP\necho $$ >{pids}\nsleep 600 &\necho $! >>{pids}\nwait\nwait\nsleep 600\n")
    hurry(monkeypatch, "_greet", lambda: pids.exists() and pids.read_text().count("\n") == 2)
    with pytest.raises(UnreachableError, match="it never said that it speaks SSH within 30 s"):
        who(servers.alias(f"Host box; ProxyCommand sh {script}"), timeout=30)
    until(lambda: not any(lives(int(pid)) for pid in pids.read_text().split()))


def test_a_gate_that_forwards_nothing(servers: World) -> None:
    with pytest.raises(UnreachableError, match="the jump before it can't connect: it forbids that"):
        who(servers.alias("Host box; ProxyJump outer"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("PubkeyAuthentication no\nPasswordAuthentication yes", "it takes no keys, only password"),
        (
            "AuthenticationMethods publickey,password\nPasswordAuthentication yes",
            r"after the key \S+/id it wants password, which we can't give",
        ),
        ("AuthorizedKeysFile none", "the host refused our key .*tried: "),
        ("MaxAuthTries 1\nAuthorizedKeysFile none", "it hung up: too many keys"),
    ],
    ids=["passwords-only", "a-password-as-well", "no-key", "one-try"],
)
def test_a_host_that_wants_something_else(tmp_path: Path, config: str, says: str) -> None:
    key = make_key(tmp_path / "id")
    with (
        Sshd(tmp_path / "sshd", config=config).authorize(key) as server,
        pytest.raises(UnreachableError, match=says),
    ):
        who(server.host(key))


# -- afterwards


@contextmanager
def quick(dead_after_s: float) -> Iterator[None]:
    """Links that are begun in here notice silence sooner than within 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssh, "KEEPALIVE_SECONDS", 0.1)
        patch.setattr(ssh, "DEAD_AFTER_SECONDS", dead_after_s)
        yield


def test_silence_is_noticed_within_20_s_with_the_real_intervals(servers: World, soak: bool) -> None:
    """The last answer may have come just before, and who watches looks once in a fifth of the interval."""
    assert ssh.DEAD_AFTER_SECONDS + ssh.KEEPALIVE_SECONDS / 5 < 20 - ssh.KEEPALIVE_SECONDS / 2
    if not soak:
        return
    link = ssh.connect(servers.alias("Host box; ProxyJump gate"), timeout=10)
    servers.gate.freeze()
    until(lambda: not link.is_open, seconds=20)
    servers.gate.cut()
    link.close()


RELAYED = "Host box; ProxyCommand {python} {dir}/relay.py %h %p {dir}/relay.log"
BREAKS: dict[str, tuple[str, Callable[[World], None]]] = {
    "target-cut": ("", lambda world: world.target.cut()),
    "target-frozen": ("", lambda world: world.target.freeze()),
    "gate-cut": ("Host box; ProxyJump gate", lambda world: world.gate.cut()),
    "gate-frozen": ("Host box; ProxyJump gate", lambda world: world.gate.freeze()),
    "proxy-command-killed": (RELAYED, lambda world: os.kill(relay_pid(world), signal.SIGKILL)),
    "proxy-command-frozen": (RELAYED, lambda world: os.kill(relay_pid(world), signal.SIGSTOP)),
}


def relays(world: World) -> list[int]:
    return [int(pid) for pid in (world.folder / "relay.log").read_text().split()]


def relay_pid(world: World) -> int:
    return relays(world)[-1]


@pytest.mark.parametrize("name", BREAKS)
def test_a_link_that_dies_is_noticed(servers: World, name: str) -> None:
    """Whoever waits hears of it, a new connection is made when one is asked for, and no ProxyCommand stays."""
    config, breaks = BREAKS[name]
    started = threading.Event()

    def broken() -> None:
        started.wait(20)
        breaks(servers)

    thread = threading.Thread(target=broken)
    thread.start()
    try:
        with Shell(connect_timeout=10) as shell:
            host = servers.alias(config)
            with quick(0.8), pytest.raises(LinkLostError, match="the connection broke"):
                shell.stream(host, Command(("sh", "-c", "echo here; exec sleep 600")), on_out=lambda _: started.set())
            started.set()
            thread.join()
            for server in (servers.target, servers.gate):
                server.cut()
            assert shell.run(host, Command(("echo", "again")), timeout=20).out == b"again\n"
        if "proxy" in name:
            until(lambda: not any(map(lives, relays(servers))))
    finally:
        started.set()
        for server in (servers.target, servers.gate):
            server.cut()


def test_the_processes_of_a_link_end_with_it(servers: World) -> None:
    link = ssh.connect(servers.alias(RELAYED), timeout=10)
    pid = relay_pid(servers)
    assert lives(pid) and link.user == "root"
    link.close()
    assert not lives(pid)


def test_a_command_that_the_host_does_not_start(servers: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every keepalive, but not the request."""
    with quick(2.0):
        link = ssh.connect(servers.alias(""), timeout=10)
    monkeypatch.setitem(paramiko.Transport._channel_handler_table, MSG_CHANNEL_SUCCESS, lambda *_: None)
    with pytest.raises(TimedOutError, match=r"no answer within 2 s .*starts no command"):
        link.start(b"sleep 600")
    monkeypatch.undo()
    assert link.is_open
    link.close()


def test_more_sessions_than_the_server_allows_on_a_connection(servers: World) -> None:
    """Two on each; further connections are made, used again, and closed with the first."""
    before = servers.target.connections
    link = ssh.connect(servers.alias(""), timeout=10)
    held = [link.start(b"cat") for _ in range(5)]
    assert servers.target.connections - before == 3
    with link.sftp() as sftp:
        assert sftp.normalize("/tmp") == "/tmp"
    again = link.start(b"echo more")
    assert again.code(20) == 0
    for process in held:
        process.end()
    assert servers.target.connections - before <= 4  # the server may still count the session of SFTP
    link.close()
    until(lambda: not link.is_open and all(not process._link.is_open for process in held))


def test_sessions_that_are_opened_at_once_where_one_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before the first is known to be there: another connection takes it."""
    key = make_key(tmp_path / "id")
    with Sshd(tmp_path / "sshd", config="MaxSessions 1").authorize(key) as server:
        link = ssh.connect(server.host(key), timeout=10)
        opened, refused = link._transport.open_session, threading.Event()

        def first(**rest: object) -> object:
            monkeypatch.setattr(link._transport, "open_session", second)
            channel = opened(**rest)
            asks.set()
            assert refused.wait(20)
            return channel

        def second(**rest: object) -> object:
            try:
                return opened(**rest)
            finally:
                refused.set()

        asks = threading.Event()
        monkeypatch.setattr(link._transport, "open_session", first)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(link.start, b"cat")
            assert asks.wait(20)
            other = link.start(b"exit 3")
            one = coming.result()
        assert other.code(20) == 3 and server.connections == 2
        one.close_stdin()
        assert one.code(20) == 0
        link.close()


def test_two_sessions_that_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key(tmp_path / "id")
    with Sshd(tmp_path / "sshd", config="MaxSessions 1").authorize(key) as server:
        link = ssh.connect(server.host(key), timeout=10)
        held = link.start(b"cat")
        both, kept = threading.Barrier(2, timeout=20), link._transport.get_exception
        monkeypatch.setattr(link._transport, "get_exception", lambda: (both.wait(), kept())[1])
        with ThreadPoolExecutor(2) as pool:
            codes = [process.code(20) for process in pool.map(link.start, (b"exit 3", b"exit 4"))]
        assert codes == [3, 4] and 2 <= server.connections <= 3
        held.end()
        link.close()


def test_a_host_that_allows_no_session_at_all(tmp_path: Path) -> None:
    key = make_key(tmp_path / "id")
    with Sshd(tmp_path / "sshd", config="MaxSessions 0").authorize(key) as server:
        with pytest.raises(OpsError, match="the host refused a session"):
            who(server.host(key))
        assert server.connections == 1


@pytest.mark.parametrize("config", ["Subsystem sftp /bin/false", "Subsystem sftp /bin/cat /etc/passwd"])
def test_a_host_without_sftp(tmp_path: Path, config: str) -> None:
    key = make_key(tmp_path / "id")
    with Sshd(tmp_path / "sshd", config=config).authorize(key) as server:
        link = ssh.connect(server.host(key), timeout=10)
        with pytest.raises(ssh.NoSftpError, match="the host gives no SFTP session"), link.sftp():
            pass
        assert link.is_open
        link.close()


# -- without an ssh client


def test_without_an_ssh_client_paramiko_reads_the_configuration(
    servers: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = servers.counts()
    for config, name in (
        ("", "box"),
        ("Host box; User joe", "root@box"),
        ("Host box; ProxyJump gate", "box"),
        (RELAYED, "box"),
    ):
        assert who(servers.alias(config, name)) == "root"
    assert tuple(now - then for now, then in zip(servers.counts(), before, strict=True)) == (4, 1, 0)
    assert who(replace(servers.alias("Host box; Port 1"), port=servers.target.port)) == "root"
    with pytest.raises(ConfigError, match=r"Include can't be honoured without an ssh client .*install openssh-client"):
        who(servers.alias("Include {dir}/more"))
    with pytest.raises(ConfigError, match="there is no such ssh configuration"):
        who(Host("box", "box", ssh_config=tmp_path / "not-there"))


def test_output_that_comes_while_its_command_is_ended_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to a closed descriptor, which would end the connection, nor to whoever has it by then."""
    news, buffer = News(), BufferedPipe()
    buffer.set_event(news)  # pyright: ignore[reportArgumentType]
    ender = threading.Thread(target=news.close)
    write = os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        ender.start()
        ender.join(0.2)  # it has to wait for this write
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted)
    buffer.feed(b"one")
    ender.join(20)
    descriptors = os.pipe()  # most likely the same numbers
    news.heard()
    buffer.read(3)
    buffer.feed(b"two")
    assert not select.select([descriptors[0]], [], [], 0)[0]
    for descriptor in descriptors:
        os.close(descriptor)
