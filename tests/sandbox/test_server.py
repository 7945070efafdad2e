"""The SSH server: sessions as sshd gives them."""

import os
import shlex
import socket
import subprocess
import threading
from pathlib import Path

import paramiko
import pytest
from sandbox_client import Client, connect, finish, read_until, retry_until

from dflash_ops.sandbox.server import MAX_SESSIONS
from dflash_ops.sandbox.state import SandboxState


def test_streams_and_status_are_kept_apart(client: Client) -> None:
    answer = client.run("cat; echo to-err >&2; exit 42", stdin=b"\x00\xff\r\n" * 50_000)
    assert (answer.code, answer.err) == (42, b"to-err\n")
    assert answer.out == b"\x00\xff\r\n" * 50_000


def test_a_session_starts_with_what_sshd_gives_and_no_more(client: Client) -> None:
    lines = client.run("env -u _ -u SHLVL -u PWD env; pwd").text.split("\n")
    names = {line.partition("=")[0] for line in lines[:-2]}
    assert names == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "SSH_CLIENT", "SSH_CONNECTION"}
    assert lines[-2] == "/root"
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in lines


def test_only_locale_variables_are_accepted(client: Client) -> None:
    channel = client.ssh.get_transport().open_session()
    channel.set_environment_variable("LC_ALL", "C.UTF-8")
    channel.set_environment_variable("DFLASH_SECRET", "x")
    channel.exec_command("echo $LC_ALL/$DFLASH_SECRET/")
    assert finish(channel).out == b"C.UTF-8//\n"


def test_a_shell_killed_by_a_signal_has_no_status(client: Client) -> None:
    assert client.run("kill -9 $$").code == -1


def test_a_child_killed_by_a_signal_is_128_and_the_signal(client: Client) -> None:
    assert client.run("sh -c 'kill -9 $$'; exit $?").code == 137


def test_the_status_comes_at_once_and_the_channel_stays_while_output_is_held(client: Client) -> None:
    channel = client.open("sleep 1000 & echo $!; exit 7")
    assert channel.recv_exit_status() == 7
    assert not channel.closed and not channel.eof_received
    client.run(f"kill {channel.recv(100).decode()}")
    assert finish(channel).code == 7


def test_a_client_that_leaves_breaks_the_pipe_and_kills_nothing(proxmox: SandboxState, client: Client) -> None:
    # Waits until nobody can read its stdout any more, then prints.
    script = """import os, select
print("ready", flush=True)
poll = select.poll()
poll.register(1, 0)
poll.poll()
try:
    os.write(1, b"x")
except BrokenPipeError:
    open("/tmp/why", "w").write("broken pipe")"""
    with Client(proxmox) as leaving:
        leaving.open(shlex.join([proxmox.python, "-c", script])).recv(6)
    retry_until(lambda: client.run("cat /tmp/why").text == "broken pipe")


def test_input_that_nobody_reads_does_not_block(client: Client) -> None:
    assert client.run("exec 0<&-; sleep 3; echo done", stdin=b"x" * 5_000_000).out == b"done\n"


def test_a_terminal_has_its_size_and_hears_of_changes(client: Client) -> None:
    channel = client.ssh.get_transport().open_session()
    channel.get_pty("xterm", width=91, height=17)
    channel.exec_command("stty size; trap 'stty size; exit 3' WINCH; echo $TERM $SSH_TTY; while :; do sleep 0.05; done")
    seen = read_until(channel, b"xterm /dev/pts/")
    channel.resize_pty(width=50, height=20)
    rest = finish(channel)
    assert b"17 91\r\n" in seen
    assert (rest.code, b"20 50\r\n" in rest.out) == (3, True)


def test_hanging_up_a_terminal_ends_its_session(client: Client) -> None:
    channel = client.ssh.get_transport().open_session()
    channel.get_pty()
    channel.exec_command("echo $$; exec sleep 1000")
    pid = channel.recv(100).decode().strip()
    assert client.run(f"kill -0 {pid}").code == 0
    channel.close()
    retry_until(lambda: client.run(f"kill -0 {pid}").code != 0)


def test_a_login_shell_reads_its_commands(client: Client) -> None:
    channel = client.ssh.get_transport().open_session()
    channel.get_pty()
    channel.invoke_shell()
    channel.sendall(b"echo $((6*7)); exit 5\n")
    answer = finish(channel)
    assert (answer.code, b"42\r\n" in answer.out) == (5, True)


@pytest.mark.parametrize("options", [{"username": "nobody"}, {"key_filename": None, "password": "root"}])
def test_only_the_key_and_only_root_get_in(proxmox: SandboxState, options: dict[str, object]) -> None:
    with pytest.raises(paramiko.SSHException):
        connect(proxmox, **options)


def test_another_key_is_refused(proxmox: SandboxState) -> None:
    other = paramiko.ECDSAKey.generate()
    with pytest.raises(paramiko.AuthenticationException):
        connect(proxmox, key_filename=None, pkey=other)


def test_as_many_sessions_at_once_as_sshd_allows(proxmox: SandboxState) -> None:
    with Client(proxmox) as client:
        channels = [client.open("cat") for _ in range(MAX_SESSIONS)]
        with pytest.raises(paramiko.ChannelException):
            client.open("true")
        for number, channel in enumerate(channels):
            channel.sendall(b"%d" % number)
            channel.shutdown_write()
        assert [finish(channel).out for channel in channels] == [b"%d" % number for number in range(MAX_SESSIONS)]
        for _ in range(2 * MAX_SESSIONS):
            client.ssh.open_sftp().close()
            assert client.run("true").code == 0


def test_a_jump_reaches_what_the_hypervisor_reaches(client: Client) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def shout() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(lines.read().upper())

    thread = threading.Thread(target=shout)
    thread.start()
    transport = client.ssh.get_transport()
    channel = transport.open_channel("direct-tcpip", listener.getsockname(), ("127.0.0.1", 1))
    channel.sendall(b"hello" * 10_000)
    channel.shutdown_write()
    got = b""
    while data := channel.recv(1 << 16):
        got += data
    thread.join()
    listener.close()
    assert got == b"HELLO" * 10_000
    with pytest.raises(paramiko.ChannelException):
        transport.open_channel("direct-tcpip", ("127.0.0.1", 1), ("127.0.0.1", 1))


def test_openssh_copies_a_file_there(proxmox: SandboxState, tmp_path: Path) -> None:
    """Its scp speaks SFTP, and wants an exit code at the end."""
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    options = ("-o", f"UserKnownHostsFile={proxmox.known_hosts}", "-i", str(proxmox.key), "-P", str(proxmox.port))
    there = f"root@{proxmox.host}:/tmp/of-scp"
    for words in ((str(tmp_path / "file"), there), (there, str(tmp_path / "back"))):
        done = subprocess.run(["scp", "-q", *options, *words], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "back").stat().st_size == 100_000


def test_sftp_sees_the_hypervisor(client: Client, tmp_path: os.PathLike[str]) -> None:
    (tmp_path / "of-the-machine").touch()
    with client.ssh.open_sftp() as sftp:
        sftp.mkdir("/tmp/staged", 0o700)
        with sftp.open("/tmp/staged/data", "wb") as file:
            file.set_pipelined(True)
            file.write(os.urandom(3_000_000))
        assert sftp.stat("/tmp/staged/data").st_size == 3_000_000
        assert sftp.stat("/tmp/staged").st_mode & 0o7777 == 0o700
        assert sftp.listdir("/tmp/staged") == ["data"]
        assert client.run("stat -c %s /tmp/staged/data").out == b"3000000\n"
        sftp.open("/tmp/staged/other", "wb").close()
        with pytest.raises(OSError):
            sftp.rename("/tmp/staged/data", "/tmp/staged/other")
        sftp.posix_rename("/tmp/staged/data", "/tmp/staged/other")
        sftp.remove("/tmp/staged/other")
        sftp.rmdir("/tmp/staged")
        for missing in (str(tmp_path), "/tmp/staged"):
            with pytest.raises(FileNotFoundError):
                sftp.stat(missing)
        assert sftp.normalize(".") == "/root"


def test_the_same_through_openssh(proxmox: SandboxState) -> None:
    """A client of another make agrees; where there is none, there is nothing to ask."""
    import shutil
    import subprocess

    if shutil.which("ssh") is None:
        pytest.skip("no OpenSSH client here")
    options = ["-F", "none", "-o", f"UserKnownHostsFile={proxmox.known_hosts}", "-o", "BatchMode=yes"]
    words = ["ssh", *options, "-i", proxmox.key, "-p", str(proxmox.port), "root@127.0.0.1"]
    done = subprocess.run([*words, "cat; exit 9"], input=b"hi", capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (9, b"hi")
