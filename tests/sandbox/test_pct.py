"""`pct` with its faults, as shared facts tell them: each test names what a real one was seen to do."""

import os
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client import Client, finish, quote, retry_until

from dflash_ops.sandbox.perl import through_perl
from dflash_ops.sandbox.state import SandboxState

NO_CONFIG = b"Configuration file 'nodes/pve/lxc/999.conf' does not exist\n"


@pytest.fixture
def folder(client: Client) -> str:
    """An empty folder, of this name on the hypervisor and in containers 200 and 201."""
    name = f"/var/tmp/t{os.urandom(4).hex()}"
    assert client.run(f"mkdir {name}").code == 0
    for vmid in (200, 201):
        client.text(vmid, 'mkdir "$1"', name)
    return name


def test_list_has_fixed_columns_and_a_blank_lock(client: Client) -> None:
    client.run("echo 'lock: backup' >> /etc/pve/lxc/200.conf")
    answer = client.run("pct list")
    client.run("sed -i /^lock:/d /etc/pve/lxc/200.conf")
    assert answer.text == (
        "VMID       Status     Lock         Name                \n"
        "200        running    backup       train200            \n"
        "201        running                 train201            \n"
        "202        stopped                 train202            \n"
    )


def test_list_without_containers_has_not_even_a_header(client: Client) -> None:
    client.run("mkdir /tmp/aside; mv /etc/pve/lxc/*.conf /tmp/aside")
    answer = client.run("pct list")
    client.run("mv /tmp/aside/*.conf /etc/pve/lxc/; rmdir /tmp/aside")
    assert (answer.code, answer.out, answer.err) == (0, b"", b"")


def test_status_and_config(client: Client) -> None:
    assert client.run("pct status 200").out == b"status: running\n"
    assert client.run("pct stat 202").out == b"status: stopped\n"
    verbose = dict(line.split(": ") for line in client.run("pct status 200 --verbose").text.strip().split("\n"))
    assert (verbose["name"], verbose["status"], verbose["type"]) == ("train200", "running", "lxc")
    keys = [line.partition(":")[0] for line in client.run("pct config 201").text.strip().split("\n")]
    assert client.run("stat -c %a /etc/pve/lxc/*.conf").text.split() == ["640"] * 3
    raw = [key for key in keys if key.startswith("lxc.")]  # last, in the file's order
    assert keys == sorted(keys[: len(keys) - len(raw)]) + raw and raw and "unprivileged" in keys
    assert "unprivileged" not in client.run("pct config 200").text


@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("pct status 999", 2, NO_CONFIG),
        ("pct config 999", 2, NO_CONFIG),
        ("pct exec 999 -- true", 2, NO_CONFIG),
        ("pct start 999", 255, NO_CONFIG),
        ("pct stop 999", 255, NO_CONFIG),
        ("pct push 999 /etc/hosts /x", 255, b"can only push files to a running CT\n"),
        ("pct push 202 /etc/hosts /x", 255, b"can only push files to a running CT\n"),
        ("pct pull 202 /x /tmp/x", 255, b"can only pull files from a running CT\n"),
        ("pct exec 202 -- true", 255, b"container '202' not running!\n"),
        ("pct start 200", 255, b"CT 200 already running\n"),
        ("pct stop 202", 255, b"CT 202 not running\n"),
        ("pct shutdown 202", 255, b"CT 202 not running\n"),
        ("pct exec 200", 255, b"missing command at /usr/share/perl5/PVE/CLI/pct.pm line 271.\n"),
    ],
)
def test_accidental_exit_codes(client: Client, command: str, code: int, err: bytes) -> None:
    answer = client.run(command)
    assert (answer.code, answer.err) == (code, err)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pct exec 200 ls -la", [b"Unknown option: la", b"400 unable to parse option"]),
        ("pct status abc", [b"400 Parameter verification failed.", b"vmid: "]),
        ("pct status 99", [b"400 Parameter verification failed.", b"vmid: "]),
        ("pct s 200", [b"unknown command", b"USAGE"]),
        ("pct", [b"USAGE"]),
        ("pct list --output-format json", [b"Unknown option: output-format"]),
    ],
)
def test_words_it_does_not_take(client: Client, command: str, words: list[bytes]) -> None:
    answer = client.run(command)
    assert answer.code in (2, 255) and not answer.out
    assert [word for word in words if word not in answer.err] == []


def test_another_user_may_not(client: Client) -> None:
    # The sandbox's Python may lie below /root.
    answer = client.run("chmod 711 /root; setpriv --reuid 65534 --clear-groups pct list; echo $?; chmod 700 /root")
    assert answer.out == b"255\n" and b"ipcc_send_rec[3] failed: Unknown error -1" in answer.err


def test_without_the_cluster_file_system_nothing_works(client: Client) -> None:
    client.run("mv /etc/pve /etc/pve.away")
    answer = client.run("pct exec 200 -- true")
    client.run("mv /etc/pve.away /etc/pve")
    assert answer.code == 111 and b"Unable to load access control list: Connection refused" in answer.err


# exec


def test_exec_passes_words_input_streams_and_status(client: Client) -> None:
    words = ["a b", "", "$HOME", "*", "'", "x\ny", "--", "-la"]
    script = 'printf "<%s>" "$@"; cat; echo err >&2; exit 42'
    answer = client.run(shlex.join(["pct", "exec", "200", "--", "sh", "-c", script, "sh", *words]), stdin=b"\0\xff\n")
    assert answer.out == "".join(f"<{word}>" for word in words).encode() + b"\0\xff\n"
    assert (answer.code, answer.err) == (42, b"err\n")


@pytest.mark.parametrize("attach", ["pct exec 200 --", "lxc-attach -n 201 --"])
def test_exit_codes_of_what_does_not_run(client: Client, attach: str) -> None:
    assert client.run(f"{attach} sh -c 'kill -9 $$'").code == 137
    missing = client.run(f"{attach} no-such-program")
    assert missing.code == 127 and b'No such file or directory - Failed to exec "no-such-program"\n' in missing.err
    nothing = client.run(f"{attach} ''")
    assert nothing.code == 127 and b'No such file or directory - Failed to exec ""\n' in nothing.err
    refused = client.run(f"{attach} /etc/hosts")
    assert refused.code == 126 and b'Permission denied - Failed to exec "/etc/hosts"\n' in refused.err


@given(st.lists(st.binary(max_size=30).map(lambda word: word.replace(b"\0", b"")), max_size=4))
def test_exec_loses_bytes_by_locale(client: Client, words: list[bytes]) -> None:
    for locale, loses in (
        (b"C", through_perl(words, {})),
        (b"C.UTF-8", through_perl(words, {b"LANG": b"utf8"})),
    ):
        line = b" ".join([b"LC_ALL=" + locale, b"pct exec 200 -- printf '%s\\0' .", *map(quote, words)])
        assert client.run(line).out.split(b"\0")[1:-1] == loses


@pytest.mark.parametrize(
    ("locale", "word", "arrives"),
    [
        ("C", b"\xc3\xa9", "\ufffd\ufffd"),
        ("C.UTF-8", b"\xc3\xa9", "é"),
        ("C.UTF-8", b"\xff\x80", "\ufffd"),
        ("C.UTF-8", b"a\xc3", "a\ufffd"),
        ("C.UTF-8", b"\x80\x80", "\ufffd\ufffd"),
        ("C.UTF-8", "\U0001f600".encode(), "\U0001f600"),
    ],
)
def test_bytes_as_perl_reads_them(locale: str, word: bytes, arrives: str) -> None:
    assert through_perl([word], {b"LC_ALL": locale.encode()}) == [arrives.encode()]


def test_the_sessions_environment_leaks_in_with_a_short_path(client: Client) -> None:
    lines = client.run("cd /var/tmp; LEAK=1 pct exec 200 -- sh -c 'env; pwd'").text.split("\n")
    assert {"LEAK=1", "PATH=/sbin:/bin:/usr/sbin:/usr/bin", "HOME=/root", "container=lxc", "TERM=linux"} <= set(lines)
    assert lines[-2] == "/var/tmp"


def test_without_keep_env_there_is_no_home(client: Client) -> None:
    lines = client.run("mkdir -p /tmp/host-only; cd /tmp/host-only; pct exec 200 --keep-env 0 -- env").text
    assert sorted(lines.split()) == ["PATH=/sbin:/bin:/usr/sbin:/usr/bin", "TERM=linux", "container=lxc"]
    assert client.run("cd /tmp/host-only; pct exec 200 -- pwd").out == b"/\n"


def test_exec_goes_on_when_ssh_drops(proxmox: SandboxState, client: Client, folder: str) -> None:
    with Client(proxmox) as leaving:
        script = (
            f'echo ready; while [ ! -e "{folder}/go" ]; do echo x; sleep 0.05; done; echo "$?" > "{folder}/went-on"'
        )
        channel = leaving.open(shlex.join(["pct", "exec", "200", "--", "sh", "-c", script]))
        channel.recv(6)
    client.text(200, 'touch "$1/go"', folder)
    retry_until(lambda: client.inside(200, 'cat "$1/went-on"', folder).code == 0)


@pytest.mark.parametrize(("attach", "ignored"), [("pct exec 200 --", True), ("lxc-attach -n 200 --", False)])
def test_sigpipe_is_ignored_below_pct_alone(client: Client, attach: str, ignored: bool) -> None:
    mask = int(client.run(f"{attach} grep SigIgn /proc/self/status").text.split()[1], 16)
    assert bool(mask & (1 << 12)) is ignored


def test_killing_it_on_the_host_does_not_stop_the_command(client: Client, folder: str) -> None:
    channel = client.open(
        f"lxc-attach -n 200 -- sh -c 'sleep 0.5; echo done > {folder}/done' & sleep 0.3; kill %1; wait %1"
    )
    assert finish(channel).code == 143
    retry_until(lambda: client.inside(200, 'cat "$1/done"', folder).text == "done\n")


# push and pull


def test_push_keeps_neither_mode_nor_time(client: Client, folder: str) -> None:
    client.run(f"cd {folder}; echo hi > a; chmod 755 a; touch -d 2001-01-01 a")
    assert client.run(f"pct push 200 {folder}/a {folder}/a").out == b""
    mode, seconds = client.text(200, 'cat "$1/a"; stat -c "%a %Y" "$1/a"', folder).split()[1:]
    assert mode == "644" and int(seconds) > 1_700_000_000


def test_push_writes_in_place_through_links(client: Client, folder: str) -> None:
    client.run(f"echo longer > {folder}/long; echo s > {folder}/short")
    client.text(200, 'cd "$1"; printf 0123456789 > real; chmod 600 real; ln real hard; ln -s "$1/real" link', folder)
    assert client.run(f"pct push 200 {folder}/short {folder}/link").code == 0
    assert client.text(200, 'cd "$1"; cat hard; stat -c %a real; test -L link', folder).split() == ["s", "600"]


def test_push_to_an_unprivileged_container_is_its_root(client: Client, folder: str) -> None:
    client.run(f"echo hi > {folder}/a; chmod 600 {folder}/a")
    assert client.run(f"pct push 201 {folder}/a {folder}/a --perms 0640 --user nobody").code == 0
    assert client.run(f"pct push 201 {folder}/a {folder}/b").code == 0
    assert client.text(201, 'cd "$1"; stat -c "%a %u %g" a b', folder).split("\n") == ["640 65534 0", "644 0 0"]
    assert client.run(f"stat -c %u /var/lib/lxc/201/rootfs{folder}/b").text == "100000\n"


@pytest.mark.parametrize(
    ("words", "err"),
    [
        ("{}/missing {}/x", b"No such file or directory"),
        ("{}/a /no/such/folder/x", b"No such file or directory"),
        ("{}/a /usr/x", b"Read-only file system"),
        ("{}/a {}", b"Is a directory"),
        ("{}/a {}/busy", b"Text file busy"),
        ("{}/a {}/x --perms u+x", b"invalid mode"),
        ("{}/a {}/x --user nobody-of-that-name", b"not found"),
        ("{}/a {}/x --user 70000", b"Invalid argument"),
        ("{} {}/x", b""),
    ],
)
def test_push_exits_0_when_it_failed(client: Client, folder: str, words: str, err: bytes) -> None:
    client.run(f"echo hi > {folder}/a")
    client.text(201, 'cp /bin/sleep "$1/busy"; "$1/busy" 1000 >/dev/null 2>&1 & echo', folder)
    answer = client.run(f"pct push 201 {words.replace('{}', folder)}")
    client.inside(201, 'pkill -f "$1/busy"', folder)
    assert answer.code == 0 and err in answer.err and bool(err) == bool(answer.err)


def test_a_full_disk_is_silent(client: Client, folder: str) -> None:
    client.text(200, 'mount -t tmpfs -o size=64k tmpfs "$1"', folder)
    client.run(f"head -c 5000000 /dev/urandom > {folder}/big")
    answer = client.run(f"pct push 200 {folder}/big {folder}/big")
    assert (answer.code, answer.out, answer.err) == (0, b"", b"")
    assert client.text(200, 'stat -c %s "$1/big"; umount "$1"', folder) == "65536"


def test_pull_of_a_missing_file_truncates_ours(client: Client, folder: str) -> None:
    client.run(f"echo precious > {folder}/mine")
    answer = client.run(f"pct pull 200 {folder}/missing {folder}/mine")
    assert answer.code == 0 and b"No such file" in answer.err
    assert client.run(f"stat -c %s {folder}/mine").out == b"0\n"


def test_pull_brings_the_bytes(client: Client, folder: str) -> None:
    client.inside(201, 'cat > "$1/data"', folder, stdin=b"\0\xff" * 100_000)
    assert client.run(f"pct pull 201 {folder}/data {folder}/data; cat {folder}/data").out == b"\0\xff" * 100_000


def test_push_waits_for_the_lock_and_says_so(client: Client, folder: str) -> None:
    lock = "/run/lock/lxc/pve-config-200.lock"
    holder = client.open(f"mkdir -p /run/lock/lxc; flock {lock} sh -c 'echo held; read _'")
    assert holder.recv(100) == b"held\n"
    waiting = client.open(f"pct push 200 /etc/hosts {folder}/x")
    retry_until(waiting.recv_stderr_ready)
    assert client.run("pct exec 200 -- true").code == 0  # takes no lock
    holder.shutdown_write()
    answer = finish(waiting)
    assert (answer.code, answer.err) == (0, b"trying to acquire lock... OK\n")


@pytest.mark.soak
def test_the_lock_is_waited_for_ten_seconds(client: Client, soak: bool) -> None:
    if not soak:
        pytest.skip("waits ten seconds")
    lock = "/run/lock/lxc/pve-config-201.lock"
    holder = client.open(f"mkdir -p /run/lock/lxc; flock {lock} sh -c 'echo held; read _'")
    assert holder.recv(100) == b"held\n"
    answer = client.run("pct push 201 /etc/hosts /tmp/x")
    holder.close()
    assert answer.code == 4
    assert answer.err == f"trying to acquire lock...can't lock file '{lock}' - got timeout\n".encode()


def test_a_config_lock_stops_start_but_not_push(client: Client, folder: str) -> None:
    client.run("echo 'lock: backup' >> /etc/pve/lxc/202.conf; echo 'lock: backup' >> /etc/pve/lxc/200.conf")
    started = client.run("pct start 202")
    pushed = client.run(f"pct push 200 /etc/hosts {folder}/x")
    client.run("sed -i /^lock:/d /etc/pve/lxc/*.conf")
    assert (started.code, started.err) == (255, b"CT is locked (backup)\n")
    assert (pushed.code, client.text(200, 'test -s "$1/x"', folder)) == (0, "")


# start and stop


def test_a_stopped_container_keeps_its_disk_and_loses_its_processes(client: Client) -> None:
    assert client.run("pct start 202").code == 0
    client.text(202, "echo kept > /root/kept; touch /run/lost /dev/shm/lost; sleep 1000 >/dev/null 2>&1 &")
    assert client.run("pct stop 202; pct status 202").out == b"status: stopped\n"
    assert client.run("pgrep -f 'sleep 1000'").code == 1
    assert client.run("pct start 202").code == 0
    assert client.text(202, "cat /root/kept; ls -A /run /dev/shm") == "kept\n/dev/shm:\n\n/run:\nlock"
    assert client.run("pct shutdown 202 --timeout 20; pct status 202").out == b"status: stopped\n"


def test_killing_the_init_inside_stops_the_container(client: Client) -> None:
    client.run("pct start 202; kill -9 $(cut -d' ' -f1 /run/lxc/202.init)")
    retry_until(lambda: client.run("pct status 202").out == b"status: stopped\n")
    assert client.run("pct exec 202 -- true").code == 255
