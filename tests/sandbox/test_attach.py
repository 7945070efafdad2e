"""`lxc-attach`: bytes, descriptors, terminals and the cgroup that everything attached shares."""

import os
import shlex

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client import Client, finish, quote, read_until, retry_until

WORDS = st.lists(st.binary(max_size=40).map(lambda word: word.replace(b"\0", b"")), max_size=5)


@given(WORDS)
def test_words_of_any_bytes_arrive_unchanged(client: Client, words: list[bytes]) -> None:
    for locale in (b"C", b"C.UTF-8"):
        line = b" ".join(
            [b"LC_ALL=" + locale, b"lxc-attach -n 200 --clear-env -- printf '%s\\0' .", *map(quote, words)]
        )
        assert client.run(line).out.split(b"\0")[1:-1] == words


def test_environment_of_any_bytes_arrives_unchanged(client: Client) -> None:
    line = b"env -i PATH=/usr/bin ODD=$'\\xff=\\n' lxc-attach -n 200 -- env -0"
    assert set(client.run(line).out.split(b"\0")) == {
        b"PATH=/usr/bin",
        b"ODD=\xff=\n",
        b"container=lxc",
        b"TERM=linux",
        b"",
    }


@pytest.mark.parametrize("vmid", ["202", "999", "no-such"])
def test_stopped_and_missing_are_told_alike(client: Client, vmid: str) -> None:
    answer = client.run(f"lxc-attach -n {vmid} -- true")
    assert answer.code == 1 and b"Failed to get init pid" in answer.err


def test_set_var_and_the_containers_own_shell(client: Client) -> None:
    assert client.run("echo 'echo $A $0' | lxc-attach --name=200 --clear-env -v A=b").out == b"b /bin/bash\n"


@pytest.mark.parametrize("vmid", [200, 201])
def test_a_lock_of_the_host_is_inherited_and_outlives_ssh(client: Client, vmid: int) -> None:
    lock = f"/run/lock/gpu-{vmid}"
    program = f"lxc-attach -n {vmid} --clear-env -- setsid sh -c 'echo $$ > /run/holder; exec sleep 1000'"
    assert client.run(f"flock -n -E 7 {lock} {program} >/dev/null 2>&1 </dev/null &").code == 0
    pid = retry_until(lambda: client.inside(vmid, "cat /run/holder").text.strip())
    assert client.run(f"flock -n -E 7 {lock} true").code == 7
    # Neither flock nor lxc-attach itself holds it then: the program alone. ([l] so that no pattern finds itself.)
    client.run("pkill -9 -f '[l]xc-attach -n'; pkill -9 -x flock")
    retry_until(lambda: client.run("pgrep -f '[l]xc-attach -n' || pgrep -x flock").code == 1)
    assert client.run(f"flock -n -E 7 {lock} true").code == 7
    client.text(vmid, 'kill -9 "$1"; rm /run/holder', str(pid))
    retry_until(lambda: client.run(f"flock -n -E 7 {lock} true").code == 0)


def test_everything_attached_shares_a_cgroup(client: Client) -> None:
    groups = {client.inside(201, "grep ^0:: /proc/self/cgroup").out for _ in range(3)}
    assert len(groups) == 1
    if client.run("test -d /sys/fs/cgroup/lxc").code:
        pytest.skip("no cgroup could be made here")
    assert groups == {b"0::/.lxc\n"}
    assert client.text(201, "grep ^0:: /proc/1/cgroup") == "0::/"


def open_terminal(client: Client, command: str) -> paramiko.Channel:
    channel = client.ssh.get_transport().open_session()
    channel.settimeout(30)
    channel.get_pty("xterm", width=70, height=22)
    channel.exec_command(command)
    return channel


@pytest.mark.parametrize("attach", ["lxc-attach -n 201 --", "pct exec 200 --"])
def test_a_terminal_of_the_containers_own(client: Client, attach: str) -> None:
    script = "tty; stty size; trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.05; done"
    channel = open_terminal(client, f"{attach} sh -c {shlex.quote(script)}")
    seen = read_until(channel, b"ready")
    channel.resize_pty(width=33, height=11)
    rest = finish(channel)
    assert seen.startswith(b"/dev/pts/") and b"22 70\r\n" in seen
    assert (rest.code, b"11 33\r\n" in rest.out) == (4, True)


def test_typed_words_and_ctrl_c_reach_the_container(client: Client) -> None:
    # sed itself, not the shell: a shell between two programs may take the signal and start the next one all the same.
    channel = open_terminal(client, "lxc-attach -n 200 -- sh -c 'echo ready; exec sed -u s/^/seen:/'")
    read_until(channel, b"ready")  # what is typed before is flushed, as by LXC
    channel.sendall(b"hello\r")
    read_until(channel, b"seen:hello")
    channel.sendall(b"\x03")
    assert finish(channel).code == 130


def test_data_stays_clean_beside_a_terminal(client: Client) -> None:
    channel = open_terminal(client, "printf 'a\\nb\\n' | lxc-attach -n 200 -- cat | od -An -c")
    assert finish(channel).out.split() == [b"a", b"\\n", b"b", b"\\n"]


def test_hanging_up_ends_the_session_inside(client: Client) -> None:
    channel = open_terminal(client, "lxc-attach -n 200 -- sh -c 'echo $$; exec sleep 1000'")
    pid = channel.recv(100).decode().strip()
    assert client.inside(200, 'kill -0 "$1"', pid).code == 0
    channel.close()
    retry_until(lambda: client.inside(200, 'kill -0 "$1"', pid).code != 0)


def test_tmux_runs_inside(client: Client) -> None:
    if client.run("command -v tmux").code:
        pytest.skip("no tmux here")
    name = f"t{os.getpid()}"
    client.text(201, 'tmux -L "$1" new-session -d "echo in tmux; sleep 1000"', name)
    channel = open_terminal(
        client, f"lxc-attach -n 201 --clear-env -- env TERM=xterm LANG=C.UTF-8 tmux -L {name} attach"
    )
    read_until(channel, b"in tmux")
    channel.close()
    client.text(201, 'tmux -L "$1" kill-server', name)
