"""What a container sees, and what it does not."""

import os
import sys
import time
from pathlib import Path

import pytest
from sandbox_client import Client, retry_until

from dflash_ops.sandbox.session import HOME
from dflash_ops.sandbox.state import SandboxState

BOTH = pytest.mark.parametrize("vmid", [200, 201])


def test_200_is_privileged_and_201_is_mapped(client: Client) -> None:
    assert client.text(200, "cat /proc/self/uid_map").split() == ["0", "0", "4294967295"]
    for table in ("uid_map", "gid_map"):
        assert client.text(201, f"cat /proc/self/{table}").split() == ["0", "100000", "65536"]
    assert client.text(201, "id -u; hostname") == "0\ntrain201"
    client.text(201, "sleep 1000 >/dev/null 2>&1 &")
    assert client.run("ps -o uid= -C sleep").text.split() == ["100000"]
    client.text(201, "pkill sleep")


@BOTH
def test_private_folders_are_private_and_writable(client: Client, vmid: int) -> None:
    folders = ["/root", "/tmp", "/run", "/opt", "/dev/shm", "/var/tmp", "/etc", "/home"]
    mine = [f"{folder}/of-{vmid}" for folder in folders]
    client.text(vmid, 'touch "$@"', *mine)
    seen = 'for file; do test -e "$file" && echo "$file"; done; :'
    assert client.text(vmid, seen, *mine).split() == mine
    assert client.text(401 - vmid, seen, *mine) == ""
    assert client.run(f"ls {' '.join(mine)}").out == b""
    assert [file for file in mine if Path(file).exists()] == []
    client.text(vmid, 'rm "$@"', *mine)


@BOTH
def test_what_shows_of_the_machine_is_read_only_down_to_the_last_mount(client: Client, vmid: int) -> None:
    private = {"tmpfs", "proc", "devpts", "cgroup2", "mqueue"}
    writable: list[str] = []
    for row in client.text(vmid, "cat /proc/self/mountinfo").split("\n"):
        fields, _, kind = row.partition(" - ")
        point, options = fields.split()[4:6]
        if kind.split()[0] not in private and "ro" not in options.split(","):
            writable.append(point)
    assert writable == []
    files = [f"{folder}/x" for folder in ("/usr", "/usr/bin", sys.prefix, sys.base_prefix, "/etc/ssl/certs", "/sys")]
    for file in (*files, "/proc/sys/vm/swappiness", "/proc/uptime"):
        assert b"Read-only file system" in client.inside(vmid, 'echo 1 > "$1"', file).err


@BOTH
def test_no_secret_of_the_machine_shows(client: Client, vmid: int, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    hidden = ["/etc/shadow", "/etc/ssh", "/etc/ssl/private", "/etc/environment", "/etc/pip.conf", "/etc/pve", "/boot"]
    hidden += [f"{HOME}/.ssh", f"{HOME}/.local", str(tmp_path), str(Path(__file__).parent), "/var/lib/sandbox"]
    assert client.text(vmid, 'for file; do test -e "$file" && echo "$file"; done; :', *hidden) == ""
    assert client.run(f"test -e {tmp_path} || test -e /etc/shadow || test -e {Path(__file__).parent}").code == 1
    environment = client.inside(vmid, "tr '\\0' '\\n' < /proc/1/environ").text
    assert {line.partition("=")[0] for line in environment.split("\n")} <= {"PATH", "LANG", "PYTHONPATH", ""}
    assert os.environ["HOME"] not in environment.replace(sys.prefix, "").replace(sys.base_prefix, "")


@BOTH
def test_only_its_own_processes_show(client: Client, vmid: int) -> None:
    assert client.text(vmid, "ls -d /proc/[0-9]* | wc -l; cat /proc/1/comm").split() <= ["9", "init"]
    assert str(os.getpid()) not in client.text(vmid, "ps -e -o pid=").split()


@BOTH
def test_devices_are_few_and_work(client: Client, vmid: int) -> None:
    script = """set -e
        echo x > /dev/null; test "$(head -c 3 /dev/zero | wc -c)" = 3; head -c 3 /dev/urandom > /dev/null
        if echo x > /dev/full; then exit 8; fi; test -c /dev/tty; test -c /dev/ptmx
        if mknod /tmp/disk b 254 0; then exit 9; fi; ls /dev"""
    answer = client.inside(vmid, script)
    names = set(answer.text.split())
    assert answer.code == 0, answer
    plain = {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "ptmx",
        "pts",
        "shm",
        "fd",
        "stdin",
        "stdout",
        "stderr",
    }
    assert {name for name in names if not name.startswith("nvidia")} == plain


def test_pipes_of_the_host_cannot_be_opened_anew_by_a_mapped_root(client: Client) -> None:
    """As in a real unprivileged container: the pipe belongs to the host's root."""
    assert client.inside(200, "echo out > /dev/stdout").out == b"out\n"
    assert b"Permission denied" in client.inside(201, "echo out > /dev/stdout").err


def test_uptime_counts_from_the_containers_start(client: Client) -> None:
    client.run("pct stop 202; pct start 202")
    machine = float(Path("/proc/uptime").read_text().split()[0])
    before = float(client.text(202, "cat /proc/uptime").split()[0])
    assert before < machine - 1
    retry_until(lambda: float(client.text(202, "cat /proc/uptime").split()[0]) > before)
    # Start times count from the machine's boot all the same: age by uptime is nonsense.
    start = int(client.text(202, "cut -d' ' -f22 /proc/self/stat")) / os.sysconf("SC_CLK_TCK")
    assert abs(start - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    assert start > float(client.text(202, "cat /proc/uptime").split()[0])
    client.run("pct stop 202")


@BOTH
def test_init_reaps_orphans(client: Client, vmid: int) -> None:
    client.text(vmid, "(sleep 0.1 &) >/dev/null 2>&1; (exit 3 &)")
    retry_until(lambda: client.inside(vmid, "ps -e -o stat= | grep -q Z; pgrep -x sleep").out == b"")


@BOTH
def test_the_trainers_python_works_and_brings_no_trainer(client: Client, proxmox: SandboxState, vmid: int) -> None:
    script = "import importlib.util as u, ssl; print([u.find_spec(n) is not None for n in ('pydantic', 'trainer')])"
    assert client.text(vmid, 'cd /tmp && "$1" -c "$2"', proxmox.python, script) == "[True, False]"


def test_a_user_of_the_container_can_be_taken(client: Client) -> None:
    assert client.text(201, "runuser -u nobody -- id -u") == "65534"


def test_stray_signals_do_not_stop_an_init(client: Client) -> None:
    client.text(200, "kill -TERM 1; kill -INT 1; kill -HUP 1; kill -KILL 1; sleep 0.1")
    assert client.run("pct status 200").out == b"status: running\n"
