"""Tasks, snapshots and migrations of the sandbox's containers, by its API and by pct."""

import re
import urllib.parse

import pytest
from api_client import BOT, connect, done, log, raw, refusal, wrong
from hypothesis import given
from hypothesis import strategies as st
from proxmoxer import ProxmoxAPI
from sandbox_client import Client, retry_until

from dflash_ops.sandbox.state import SandboxState
from dflash_ops.sandbox.tasks import Task


@given(st.sampled_from(["pve", "pve2", "a-b"]), *[st.integers(0, 2**32 - 1)] * 3, st.sampled_from([BOT, "root@pam"]))
def test_an_upid_is_read_as_it_was_written(node: str, pid: int, pstart: int, began: int, user: str) -> None:
    task = Task(node, pid, pstart, began, "vzstart", "200", user)
    read = Task.parse(task.upid)
    assert read is not None and vars(read) == vars(task) and task.upid.split(":")[6:] == ["200", user, ""]
    assert Task.parse(task.upid[:-1]) is None and Task.parse(f" {task.upid}") is None


def test_a_container_is_started_and_stopped_by_tasks(bot: ProxmoxAPI, client: Client) -> None:
    ct = bot.nodes("pve").lxc(202)
    started = ct.status.start.post()
    assert re.fullmatch(rf"UPID:pve:[0-9A-F]{{8}}:[0-9A-F]{{8}}:[0-9A-F]{{8}}:vzstart:202:{BOT}:", started)
    status = done(bot, started)
    assert (status["exitstatus"], status["type"], status["id"], status["user"]) == ("OK", "vzstart", "202", "bot@pve")
    assert status["tokenid"] == "dflash"
    assert client.text(202, "hostname") == "train202" and ct.status.current.get()["status"] == "running"
    first = ct.status.current.get()["pid"]
    assert done(bot, ct.status.reboot.post(timeout=20))["exitstatus"] == "OK"
    assert ct.status.current.get()["pid"] != first
    assert done(bot, ct.status.shutdown.post(timeout=20, forceStop=1))["exitstatus"] == "OK"
    assert client.run("pct status 202").out == b"status: stopped\n"
    assert log(bot, started)[-1] == "TASK OK"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("lock: backup", "CT is locked (backup)"),
        ("dev0: /dev/nvidia-none,mode=0666", "Device /dev/nvidia-none does not exist"),
    ],
)
def test_a_task_fails_after_a_200(bot: ProxmoxAPI, client: Client, line: str, why: str) -> None:
    client.run(f"cp /etc/pve/lxc/202.conf /root/kept; echo '{line}' >> /etc/pve/lxc/202.conf")
    upid = bot.nodes("pve").lxc(202).status.start.post()
    status = done(bot, upid)
    unlocked = client.run("pct unlock 202; pct config 202 | grep lock")
    client.run("mv /root/kept /etc/pve/lxc/202.conf")
    assert (unlocked.out, unlocked.err) == (b"", b"")
    assert status["exitstatus"] == why and log(bot, upid)[-1] == f"TASK ERROR: {why}"
    listed = bot.nodes("pve").tasks.get(vmid=202, typefilter="vzstart", errors=1)
    assert listed[0]["upid"] == upid and listed[0]["status"] == why


def test_a_running_task_tells_so_and_waits_for_the_containers_lock(bot: ProxmoxAPI, client: Client) -> None:
    lock = "/run/lock/lxc/pve-config-202.lock"
    holder = client.open(f"mkdir -p /run/lock/lxc; flock {lock} sh -c 'echo held; read _'")
    assert holder.recv(100) == b"held\n"
    upid = bot.nodes("pve").lxc(202).status.start.post()
    task = bot.nodes("pve").tasks(upid)
    retry_until(lambda: log(bot, upid) == ["trying to acquire lock..."])
    status = task.status.get()
    assert status["status"] == "running" and "exitstatus" not in status
    assert upid in [row["upid"] for row in bot.nodes("pve").tasks.get(source="active")]
    assert upid not in [row["upid"] for row in bot.nodes("pve").tasks.get(source="archive")]
    holder.shutdown_write()
    assert done(bot, upid)["exitstatus"] == "OK"
    assert log(bot, upid) == ["trying to acquire lock... OK", "TASK OK"]
    assert upid not in [row["upid"] for row in bot.nodes("pve").tasks.get(source="active")]
    assert task.log.get(start=1, limit=1) == [{"n": 2, "t": "TASK OK"}]
    client.run("pct stop 202")


def test_a_task_hangs_is_killed_or_warns(proxmox: SandboxState, bot: ProxmoxAPI, client: Client) -> None:
    ct = bot.nodes("pve").lxc(202)
    with wrong(proxmox, hangs="vzstart 202", warns="vzstop 202"):
        upid = ct.status.start.post()
        retry_until(lambda: log(bot, upid) == ["hanging, as it was told to"])
        assert bot.nodes("pve").tasks(upid).status.get()["status"] == "running"
        client.run(f"kill -9 $((16#{upid.split(':')[2]}))")
        assert done(bot, upid)["exitstatus"] == "unexpected status"
        client.run("pct start 202")
        upid = ct.status.stop.post()
        assert done(bot, upid)["exitstatus"] == "WARNINGS: 1"
    assert [line.split(":")[0] for line in log(bot, upid)] == ["WARN", "TASK WARNINGS"]
    page = f"/api2/json/nodes/pve/tasks/{urllib.parse.quote(upid)}/log?limit=1"
    told = raw(proxmox, "GET", page).json
    assert (told["total"], len(told["data"])) == (2, 1)


def test_tasks_are_their_owners_and_auditors(proxmox: SandboxState, bot: ProxmoxAPI, client: Client) -> None:
    client.run("pct start 202; pct stop 202")
    upid = bot.nodes("pve").tasks.get(vmid=202, userfilter="root@pam")[0]["upid"]  # an auditor of the node
    assert ":vzstop:202:root@pam:" in upid
    viewer = connect(proxmox, "viewer@pve!audit").nodes("pve")
    assert viewer.tasks.get() == []
    assert refusal(viewer.tasks(upid).status.get) == (403, "Permission check failed (/nodes/pve, Sys.Audit)", None)


def test_a_push_leaves_a_task(bot: ProxmoxAPI, client: Client) -> None:
    client.run("pct push 200 /etc/hosts /root/hosts; pct push 200 /etc/hosts /no/such/place")
    rows = bot.nodes("pve").tasks.get(vmid=200, typefilter="push_file")
    assert [row["status"] == "OK" for row in rows[:2]] == [False, True] and "No such file" in rows[0]["status"]


# Snapshots and migrations


def test_a_snapshot_is_gone_back_to(bot: ProxmoxAPI, client: Client) -> None:
    ct = bot.nodes("pve").lxc(201)
    client.text(201, "mkdir /opt/s; cd /opt/s; echo old > a; ln -s a l; mkfifo f; chmod 600 a; chown 7:8 a")
    assert done(bot, ct.snapshot.post(snapname="before", description="first\nline"))["exitstatus"] == "OK"
    client.text(201, "cd /opt/s; echo new > a; rm l; mkdir d; touch d/x /stray")
    assert client.run("pct snapshot 201 second").code == 0
    rows = {row["name"]: row for row in ct.snapshot.get()}
    assert set(rows) == {"before", "second", "current"} and rows["second"]["parent"] == "before"
    assert (rows["before"]["description"], rows["current"]["parent"]) == ("first\nline\n", "second")
    assert rows["current"]["running"] == 1 and rows["before"]["snaptime"] <= rows["second"]["snaptime"]
    # A running container is killed by it, and stays so.
    upid = ct.snapshot("before").rollback.post()
    assert done(bot, upid)["exitstatus"] == "OK" and upid.split(":")[5] == "vzrollback"
    assert ct.status.current.get()["status"] == "stopped"
    assert client.run("pct start 201").code == 0
    told = client.text(201, 'cd /opt/s; cat a; readlink l; test -p f; ls; stat -c "%a %u %g" a; ls -d /str* || true')
    assert told == "old\na\na\nf\nl\n600 7 8"
    assert [row["parent"] for row in ct.snapshot.get() if row["name"] == "current"] == ["before"]
    # Or started again.
    assert done(bot, ct.snapshot("second").rollback.post(start=1))["exitstatus"] == "OK"
    assert client.text(201, "cat /opt/s/a; ls -A /opt/s/d") == "new\nx"
    assert ct.snapshot("before").config.get()["hostname"] == "train201"
    listed = client.run("pct listsnapshot 201").text.split("\n")
    assert re.match(r"`-> before +\d{4}-\d\d-\d\d [\d:]{8} +first$", listed[0])
    assert [line.split()[1] for line in listed[:3]] == ["before", "second", "current"]
    assert done(bot, ct.snapshot("before").delete())["exitstatus"] == "OK"
    assert client.run("pct delsnapshot 201 second").code == 0
    assert [row["name"] for row in ct.snapshot.get()] == ["current"]
    assert "[" not in client.run("cat /etc/pve/lxc/201.conf").text
    assert client.run("stat -c %a /etc/pve/lxc/201.conf").out == b"640\n"
    assert client.run("ls -A /var/lib/sandbox/snapshots/201").out == b""


def test_snapshots_that_fail(bot: ProxmoxAPI, client: Client) -> None:
    ct = bot.nodes("pve").lxc(202)
    assert done(bot, ct.snapshot("none").rollback.post())["exitstatus"] == "snapshot 'none' does not exist"
    assert done(bot, ct.snapshot("none").delete())["exitstatus"] == "snapshot 'none' does not exist"
    assert done(bot, ct.snapshot.post(snapname="once"))["exitstatus"] == "OK"
    assert done(bot, ct.snapshot.post(snapname="once"))["exitstatus"] == "snapshot name 'once' already used"
    failed = client.run("pct snapshot 202 once")
    assert (failed.code, failed.err) == (255, b"snapshot name 'once' already used\n")
    assert client.run("pct snapshot 202 1st").err.startswith(b"400 Parameter verification failed.\nsnapname: ")
    client.run("pct delsnapshot 202 once")
    full = "mount -t tmpfs -o size=64k none /var/lib/sandbox/snapshots"
    client.text(200, "head -c 200000 /dev/urandom > /opt/big")
    client.run(full)
    status = done(bot, bot.nodes("pve").lxc(200).snapshot.post(snapname="big"))
    client.run("umount /var/lib/sandbox/snapshots")
    client.text(200, "rm /opt/big")
    assert "No space left on device" in status["exitstatus"]
    assert [row["name"] for row in bot.nodes("pve").lxc(200).snapshot.get()] == ["current"]
    assert "lock" not in bot.nodes("pve").lxc(200).config.get()


def test_a_container_moves_to_another_node(proxmox: SandboxState, root: ProxmoxAPI, client: Client) -> None:
    pct = "pct status 202; pct list; lxc-attach -n 202 -- hostname"
    assert client.run("pct start 202").code == 0
    assert "live migration" in done(root, root.nodes("pve").lxc(202).migrate.post(target="pve2"))["exitstatus"]
    try:
        upid = root.nodes("pve").lxc(202).migrate.post(target="pve2", restart=1)
        assert done(root, upid)["exitstatus"] == "OK"
        here = client.run(pct)
        assert b"'nodes/pve/lxc/202.conf' does not exist" in here.err and "train202" not in here.text and here.code == 1
        rows = {row["id"]: row["node"] for row in root.cluster.resources.get(type="vm")}
        assert rows == {"lxc/200": "pve", "lxc/201": "pve", "lxc/202": "pve2"}
        assert root.nodes("pve2").lxc(202).status.current.get()["status"] == "running"
        for job in ("stop", "start"):  # by a process of that node
            assert done(root, root.nodes("pve2").lxc(202).status(job).post())["exitstatus"] == "OK"
        with Client(proxmox, node="pve2") as other:
            there = other.run(pct)
            assert there.text.startswith("status: running\n") and there.text.endswith("train202\n")
            assert other.run("hostname").out == b"pve2\n"
            back = other.run("pct migrate 202 pve --restart")
            assert back.code == 0 and back.text.endswith("migration finished successfully\n"), back
    finally:
        client.run("pct stop 202")
    assert client.run("pct status 202").out == b"status: stopped\n"


@pytest.mark.parametrize(
    ("target", "down", "code", "message"),
    [("pve", [], 400, "Parameter"), ("nix", [], 500, "no such cluster node"), ("pve2", ["pve2"], 500, "is not online")],
)
def test_migrations_that_are_refused(
    proxmox: SandboxState, root: ProxmoxAPI, target: str, down: list[str], code: int, message: str
) -> None:
    with wrong(proxmox, down=down):
        found = refusal(lambda: root.nodes("pve").lxc(202).migrate.post(target=target))
    assert found[0] == code and message in found[1]
