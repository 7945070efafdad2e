"""The door, over real ssh to a real server: bytes, codes, time-outs, keys, and why a container can't be entered."""

import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Box
from proxy import Proxy

from dflash_ops import ssh
from dflash_ops.command import Command, Container, Host, Local, Query
from dflash_ops.errors import (
    ConfigError,
    HostKeyError,
    NotFoundError,
    OpsError,
    PreflightError,
    TimedOutError,
    UnreachableError,
)
from dflash_ops.sandbox.session import HOME
from dflash_ops.shell import Shell
from dflash_ops.staging import staging

DIGEST = ("python3", "-c", "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())")
EVERY_BYTE = bytes(range(256)) * 16


@pytest.fixture
def container(box: Box) -> Container:
    return box.container


# -- bytes and codes


def test_bytes_and_exit_codes_pass_everywhere(shell: Shell, container: Container) -> None:
    for place in (Local(), container.host, container, replace(container, via="pct")):
        result = shell.run(place, Command(("sh", "-c", "cat; echo oops >&2; exit 42"), stdin=EVERY_BYTE))
        assert (result.out, result.err, result.code) == (EVERY_BYTE, b"oops\n", 42)
        killed = shell.run(place, Command(("sh", "-c", "kill -9 $$"))).code
        assert killed == (255 if isinstance(place, Host) else 137)
        assert shell.run(place, Command(("no-such-program",))).code == 127
        assert shell.run(place, Command(("sh", "-c", "echo $A"), env={"A": "b; c"})).out == b"b; c\n"


def test_input_always_ends(shell: Shell, container: Container) -> None:
    for place in (Local(), container.host, container):
        assert shell.run(place, Command(("cat",)), timeout=60).out == b""


def test_much_input_and_much_output_at_once_do_not_block_each_other(shell: Shell, container: Container) -> None:
    big = os.urandom(1 << 20) * 16
    for place in (Local(), container):
        result = shell.run(place, Command(("sh", "-c", "tee /dev/stderr"), stdin=big))
        assert hashlib.sha256(result.out).digest() == hashlib.sha256(big).digest()
        assert hashlib.sha256(result.err).digest() == hashlib.sha256(big).digest()


def test_a_command_that_does_not_read_its_input_ends_all_the_same(shell: Shell, container: Container) -> None:
    for place in (Local(), container):
        assert shell.run(place, Command(("true",), stdin=bytes(8 << 20)), timeout=60).code == 0


def test_the_environment_inside_is_said_and_nothing_leaks(shell: Shell, container: Container) -> None:
    out = shell.run(container, Command(("env",))).out.decode().split("\n")
    assert sorted(line.partition("=")[0] for line in out if line) == ["HOME", "LANG", "PATH"]


def test_a_query_reads_its_own_answer(shell: Shell, container: Container) -> None:
    query = Query(Command(("id", "-u")), lambda result: int(result.out))
    assert shell.ask(container, query) == 0


def test_check_raises_with_the_last_words(shell: Shell, container: Container) -> None:
    with pytest.raises(OpsError, match=r"sh -c .* failed \(box / container 200\): the last"):
        shell.run(container, Command(("sh", "-c", "echo first >&2; echo the last >&2; exit 3")), check=True)


def test_a_word_too_long_for_one_line_arrives(shell: Shell, container: Container) -> None:
    big = "x" * 130_000
    program = "import sys; print([len(word) for word in sys.argv[1:]])"
    result = shell.run(container, Command((container.python, "-c", program, big[:100_000], big[:100_000])))
    assert result.out == b"[100000, 100000]\n"


# -- streams and conversations


def test_output_comes_while_the_command_runs(shell: Shell, container: Container) -> None:
    """The command goes on only once its first words have been answered: nothing is kept back till the end."""
    read_end, write_end = os.pipe()
    heard = bytearray()

    def on_out(data: bytes) -> None:
        heard.extend(data)
        if heard == b"ready\n":
            os.write(write_end, b"go\n")
            os.close(write_end)

    command = Command(("sh", "-c", "echo ready; read word; echo $word; cat; exit 5"))
    assert shell.stream(container, command, on_out=on_out, stdin=read_end) == 5
    assert heard == b"ready\ngo\n"
    os.close(read_end)


def test_a_stream_gives_up_after_silence_only(shell: Shell, container: Container) -> None:
    command = Command(("sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.3; done; sleep 30"))
    heard = bytearray()
    with pytest.raises(TimedOutError, match=r"no answer within 2 s"):
        shell.stream(container, command, on_out=heard.extend, timeout=2.0)  # less than all its words take
    assert heard == b"1\n2\n3\n4\n5\n6\n7\n8\n"


def test_a_conversation(shell: Shell, container: Container) -> None:
    command = Command(("sh", "-c", "echo hello; while read word; do echo you said $word; done; echo bye; exit 3"))
    for place in (Local(), container):
        with shell.converse(place, command) as talk:
            assert talk.hear() == b"hello"
            talk.say(b"this\n")
            assert talk.hear() == b"you said this"
            talk.say(b"that\n")
            assert talk.hear() == b"you said that"
            result = talk.finish()
            assert (result.code, result.out) == (3, b"bye\n")


def test_a_conversation_waits_within_bounds(shell: Shell, container: Container) -> None:
    with (
        pytest.raises(TimedOutError),
        shell.converse(container, Command(("sh", "-c", "echo hello; sleep 30"))) as talk,
    ):
        assert talk.hear() == b"hello"
        talk.hear(timeout=0.3)


def test_a_connection_that_was_begun_is_the_one_that_is_used(container: Container, monkeypatch) -> None:
    """Or says why there is none, once; one that nobody used is closed when it comes."""
    made: list[ssh.Link] = []
    connect, may_go = ssh.connect, threading.Event()

    def noted(host: Host, *, timeout: float) -> ssh.Link:
        assert may_go.wait(60)
        made.append(connect(host, timeout=timeout))
        return made[-1]

    monkeypatch.setattr(ssh, "connect", noted)
    with Shell() as shell:
        shell.begin(container.host)
        shell.begin(container.host)
        may_go.set()
        assert shell.run(container.host, Command(("true",))).code == 0 and len(made) == 1
        sock = made[0]._transport.sock  # small words are not held back for 40 ms
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        nobody = replace(container.host, port=1)
        shell.begin(nobody)
        with pytest.raises(UnreachableError):
            shell.run(nobody, Command(("true",)))
    may_go.clear()
    with Shell() as shell:
        shell.begin(container.host)
    may_go.set()
    until(lambda: len(made) == 2 and not made[1].is_open)


def test_many_threads_share_one_connection(shell: Shell, container: Container) -> None:
    results: list[bytes] = []

    def work(number: int) -> None:
        results.append(shell.run(container, Command(("sh", "-c", "sleep 0.1; cat"), stdin=b"%d" % number)).out)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [b"%d" % number for number in range(8)]
    connections = shell.run(container.host, Command(("sh", "-c", "echo $SSH_CONNECTION"))).out
    assert shell.run(container.host, Command(("sh", "-c", "echo $SSH_CONNECTION"))).out == connections


# -- containers that can't be entered


@pytest.mark.parametrize("via", ["lxc-attach", "pct"])
def test_stopped_and_missing_are_told_apart(shell: Shell, container: Container, via: str) -> None:
    stopped, missing = replace(container, vmid=202, via=via), replace(container, vmid=999, via=via)
    for enter in (
        lambda place: shell.run(place, Command(("true",))),
        lambda place: shell.stream(place, Command(("true",)), on_out=print),
        lambda place: shell.converse(place, Command(("true",))).__enter__(),
    ):
        with pytest.raises(
            PreflightError, match=r"container 202 is stopped \(box\)\. Next: .*on the host: pct start 202"
        ):
            enter(stopped)
        with pytest.raises(NotFoundError, match=r"there is no container 999 \(box\)"):
            enter(missing)


def test_a_host_that_is_no_proxmox_host(shell: Shell, container: Container) -> None:
    """Neither lxc-attach nor pct on its PATH."""
    host = container.host
    shell.run(host, Command(("sh", "-c", "mkdir /root/few && ln -s /usr/bin/env /usr/bin/sh /root/few")), check=True)
    shell.send(host, b"PATH=/root/few\n", f"{HOME}/.bashrc")
    try:
        with pytest.raises(PreflightError, match="the host has no pct"):
            shell.run(container, Command(("true",)))
    finally:
        shell.run(host, Command(("/usr/bin/rm", "-r", "/root/few", f"{HOME}/.bashrc")), check=True)


def test_the_words_of_a_failed_entry_stay_with_us(shell: Shell, container: Container) -> None:
    heard = bytearray()
    with pytest.raises(PreflightError):
        shell.stream(replace(container, vmid=202), Command(("true",)), on_out=heard.extend, on_err=heard.extend)
    assert heard == b""
    words = Command(("sh", "-c", "echo 'lxc-attach: my own words' >&2; exit 1"))
    assert shell.stream(container, words, on_out=heard.extend, on_err=heard.extend) == 1
    assert heard == b"lxc-attach: my own words\n"


@pytest.mark.parametrize("words", ["lxc-attach: my own words\\n", "container 'mine' " + "x" * 200])
def test_words_like_those_of_a_failed_entry_are_not_kept_back(shell: Shell, container: Container, words: str) -> None:
    """The command goes on only once they have been heard."""
    read_end, write_end = os.pipe()
    heard = bytearray()

    def on_err(data: bytes) -> None:
        heard.extend(data)
        os.write(write_end, b"go\n")

    command = Command(("sh", "-c", 'printf "$1" >&2; read word; exit 5', "sh", words))
    assert shell.stream(container, command, on_out=print, on_err=on_err, stdin=read_end, timeout=60) == 5
    assert bytes(heard) == words.replace("\\n", "\n").encode()
    os.close(write_end)
    os.close(read_end)


def test_without_lxc_attach_pct_is_used(tmp_path: Path, shell: Shell, box: Box) -> None:
    """Of a host that turns out not to have it, whatever is asked first; a code 127 from inside is no such sign."""
    from dflash_ops.sandbox import down, up

    name = f"test-{os.getpid()}-pct"
    state = up(name=name, owner=os.getpid(), lxc_attach=False)
    try:
        host = Host("bare", state.host, state.port, state.user, state.key, state.known_hosts)
        bare = Container(host, 200, python=state.python)
        for ask in (
            lambda shell: shell.run(bare, Command(("cat",), stdin=b"a")).out == b"a",
            lambda shell: shell.stream(bare, Command(("true",)), on_out=print) == 0,
            lambda shell: shell.run(bare, Command(("true",), host_prefix=("flock", "/run/lock/x"))).code == 0,
        ):
            with Shell() as fresh:
                assert ask(fresh)
        with Shell() as fresh, fresh.converse(bare, Command(("sh", "-c", "read x; echo $x"), stdin=b"b\n")) as talk:
            assert talk.hear() == b"b"
        with Shell() as fresh:
            assert fresh.run(bare, Command(("no-such-program",))).code == 127
            ops = replace(bare, host=replace(host, user="ops"))
            assert fresh.run(ops, Command(("cat",), stdin=b"a")).out == b"a"
    finally:
        down(name)


# -- files


def test_send_and_staging(shell: Shell, container: Container, tmp_path: Path) -> None:
    host = container.host
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 << 20))
    with staging(shell, host) as folder:
        assert shell.run(host, Command(("stat", "-c", "%a %U", folder))).out == b"700 root\n"
        with file.open("rb") as content:
            assert shell.send(host, content, f"{folder}/a") == 3 << 20
        assert shell.send(host, b"", f"{folder}/empty") == 0
        sums = shell.run(host, Command(("sha256sum", f"{folder}/a"))).out
        assert sums.split()[0].decode() == hashlib.sha256(file.read_bytes()).hexdigest()
    assert shell.run(host, Command(("ls", folder))).code == 2
    with pytest.raises(OpsError, match="the upload failed"):
        shell.send(host, b"x", "/no/such/folder/x")


def test_a_staging_folder_left_by_a_dead_client_goes_with_the_next_one(shell: Shell, container: Container) -> None:
    host = container.host
    left, foreign = "/var/tmp/dflash-ops-stage-deadbeef", "/var/tmp/dflash-ops-stage-link"
    shell.run(host, Command(("mkdir", left)), check=True)
    shell.run(host, Command(("ln", "-s", "/etc", foreign)), check=True)
    with staging(shell, host) as one, staging(shell, host) as other:
        listed = shell.run(host, Command(("sh", "-c", "ls -d /var/tmp/dflash-ops-stage-*"))).out.decode().split()
        assert sorted(listed) == sorted([one, other, foreign])
    shell.run(host, Command(("rm", foreign)), check=True)


def test_a_staging_folder_goes_when_the_link_breaks(shell: Shell, container: Container, tmp_path: Path) -> None:
    with (
        Proxy(container.host, tmp_path) as proxy,
        Shell() as behind,
        pytest.raises(UnreachableError),
        staging(behind, proxy.host) as folder,
    ):
        assert shell.run(container.host, Command(("ls", folder))).code == 0
        proxy.cut()
        behind.run(proxy.host, Command(("true",)))
    until(lambda: shell.run(container.host, Command(("ls", folder))).code == 2)


def until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


# -- reaching a host


def test_nobody_there(shell: Shell, container: Container) -> None:
    with socket.socket() as taken:  # nobody else gets the port, and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UnreachableError, match=f"the host can't be reached .*:{port}") as caught:
            shell.run(replace(container.host, port=port), Command(("true",)))
    assert "Errno" not in caught.value.line()
    with pytest.raises(UnreachableError, match="no such host"):
        shell.run(replace(container.host, address="no-such-host.invalid"), Command(("true",)))


@pytest.mark.parametrize("address", ["é..x", "x" * 70])
def test_an_address_that_can_be_no_name(shell: Shell, container: Container, address: str) -> None:
    with pytest.raises(UnreachableError, match=r"no such host .*Next: correct `address`"):
        shell.run(replace(container.host, address=address), Command(("true",)))


def test_a_server_that_never_speaks(container: Container) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Shell(connect_timeout=0.5) as shell:
        mute = replace(container.host, port=listener.getsockname()[1])
        with pytest.raises(UnreachableError, match="the host can't be reached"):
            shell.run(mute, Command(("true",)))


def test_ctrl_c_ends_the_wait_for_a_connection(container: Container) -> None:
    """Also where it comes to another thread, which leaves the main one's wait as it is."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Shell(connect_timeout=60) as shell:

        def break_off() -> None:
            with listener.accept()[0]:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                heard.append(over.wait(20))

        over, heard = threading.Event(), list[bool]()
        server = threading.Thread(target=break_off)
        server.start()
        with pytest.raises(KeyboardInterrupt):
            shell.run(replace(container.host, port=listener.getsockname()[1]), Command(("true",)))
        over.set()
        server.join()
        assert heard == [True]


def test_a_refused_key(shell: Shell, container: Container, tmp_path: Path) -> None:
    key = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with pytest.raises(UnreachableError, match=f"the host refused our key .*tried: {key}"):
        shell.run(replace(container.host, key=key), Command(("true",)))
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    with pytest.raises(UnreachableError, match=f"locked by a passphrase .*Next: ssh-add {locked}"):
        shell.run(replace(container.host, key=locked), Command(("true",)))
    for content in (b"no key\n", b"\xff\xfe", b""):
        garbage = tmp_path / "garbage"
        garbage.write_bytes(content)
        with pytest.raises(ConfigError, match=r"no private key in the file .*garbage\. Next: correct `key`"):
            shell.run(replace(container.host, key=garbage), Command(("true",)))
    with pytest.raises(ConfigError, match="no such key file"):
        shell.run(replace(container.host, key=tmp_path / "gone"), Command(("true",)))


def test_an_unknown_host_key_is_not_accepted_and_the_printed_command_adds_it(
    container: Container, tmp_path: Path
) -> None:
    host = container.host
    assert host.known_hosts is not None
    kind, key = host.known_hosts.read_text().split()[1:3]
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", host.known_hosts], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    stranger = replace(host, known_hosts=tmp_path / "known_hosts")
    for _ in range(2):
        with Shell() as shell, pytest.raises(HostKeyError) as caught:
            shell.run(stranger, Command(("true",)))
        assert f"{kind} {fingerprint} is not in {stranger.known_hosts}" in caught.value.why
        assert not (tmp_path / "known_hosts").exists()
    command = caught.value.next.rpartition("then: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert key in (tmp_path / "known_hosts").read_text()
    with Shell() as shell:
        assert shell.run(stranger, Command(("true",))).code == 0


def test_a_known_hosts_file_that_is_no_text(shell: Shell, container: Container, tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_bytes(b"host ssh-ed25519 \xff\n")
    with pytest.raises(ConfigError, match=rf"known_hosts file can't be read \({file}\).*Next: "):
        shell.run(replace(container.host, known_hosts=file), Command(("true",)))


def test_a_changed_host_key_stops_with_both_fingerprints(shell: Shell, container: Container, tmp_path: Path) -> None:
    host = container.host
    assert host.known_hosts is not None
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    name = host.known_hosts.read_text().split()[0]
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(f"{name} {(tmp_path / 'other.pub').read_text()}")
    prints = [
        subprocess.run(["ssh-keygen", "-lf", file], check=True, capture_output=True, text=True).stdout.split()[1]
        for file in (known_hosts, host.known_hosts)
    ]
    with pytest.raises(HostKeyError, match="has changed") as caught:
        shell.run(replace(host, known_hosts=known_hosts), Command(("true",)))
    assert [each for each in prints if each not in caught.value.why] == []
    assert f"ssh-keygen -f {known_hosts} -R" in caught.value.next


# -- links that break


def test_a_cut_link_is_noticed_at_once(container: Container, tmp_path: Path) -> None:
    with Proxy(container.host, tmp_path) as proxy, Shell() as shell:
        far = proxy.before(container)
        assert shell.run(far, Command(("true",))).code == 0
        command = Command(("sh", "-c", "echo here; sleep 30"))
        with pytest.raises(UnreachableError, match="the connection broke"):
            shell.stream(far, command, on_out=lambda _: proxy.cut())
        assert shell.run(far, Command(("true",))).code == 0


def test_time_is_up(shell: Shell, container: Container) -> None:
    for place in (Local(), container.host, container):
        with pytest.raises(TimedOutError, match=r"no answer within 0\.3 s .*: sleep 30"):
            shell.run(place, Command(("sleep", "30")), timeout=0.3)
        assert shell.run(place, Command(("true",))).code == 0
