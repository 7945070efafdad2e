"""pvesh and pveum in the sandbox's hypervisor: the same answers as the API's, and PVE's own words for what is wrong."""

import json

import pytest
from api_client import BOT, connect, wrong
from sandbox_client import Client

from dflash_ops.sandbox.state import SandboxState

NO_CONFIG = "Configuration file 'nodes/pve/lxc/999.conf' does not exist\n"
USAGE = "pvesh {} <api_path> [OPTIONS] [FORMAT_OPTIONS]\n"
AS_JSON = "--output-format json"


@pytest.mark.parametrize(
    "path", ["/version", "nodes/pve/lxc/200/config", "/access/permissions", "/nodes/localhost/lxc/"]
)
def test_it_says_what_the_api_says(proxmox: SandboxState, client: Client, path: str) -> None:
    answer = client.run(f"pvesh get {path} --output-format=json")
    assert (answer.code, answer.err, answer.out.count(b"\n")) == (0, b"", 1)
    known = connect(proxmox, "root@pam!full")(path.strip("/")).get()
    told = json.loads(answer.out)
    for row in told + known if isinstance(told, list) else []:
        for moving in ("mem", "disk", "uptime"):
            row.pop(moving)
    assert told == known


@pytest.mark.parametrize(
    ("words", "code", "err"),
    [
        ("get /nodes/pve/lxc/999/config", 2, NO_CONFIG),
        ("create /nodes/pve/lxc/999/status/start", 255, NO_CONFIG),
        ("create /nodes/pve/lxc/200/status/start", 255, "CT 200 already running\n"),
        ("create /nodes/pve/lxc/202/status/stop", 255, "CT 202 not running\n"),
        ("create /nodes/pve/lxc/200/exec", 255, "no 'create' handler for '/nodes/pve/lxc/200/exec'\n"),
        (
            "get /nodes/nix/lxc",
            255,
            "hostname lookup 'nix' failed - failed to get address info for: nix: Name or service",
        ),
        ("get /nodes/pve/lxc --foo 1", 255, "Unknown option: foo\n400 unable to parse option\n" + USAGE.format("get")),
        (
            "get /version --output-format",
            255,
            "Option output-format requires an argument\n400 unable to parse option\n",
        ),
        ("get /version --output-format xml", 255, "400 Parameter verification failed.\noutput-format: value 'xml'"),
        (
            "get /nodes/pve/lxc/abc/config",
            255,
            "400 Parameter verification failed.\nvmid: type check ('integer') failed",
        ),
        (
            "create /nodes/pve/lxc/200/snapshot",
            255,
            "400 Parameter verification failed.\nsnapname: property is missing",
        ),
        ("get", 255, "400 not enough arguments\n"),
        ("fetch /version", 255, "ERROR: unknown command 'pvesh fetch'\n"),
        ("", 255, "ERROR: no command specified\n"),
    ],
)
def test_its_errors(client: Client, words: str, code: int, err: str) -> None:
    answer = client.run(f"pvesh {words}")
    assert (answer.code, answer.out) == (code, b"") and answer.err.decode().startswith(err), answer


def test_it_is_for_root_alone(client: Client) -> None:
    answer = client.run(
        "chmod 711 /root; setpriv --reuid 65534 --clear-groups pvesh get /nodes; echo $?; chmod 700 /root"
    )
    assert answer.out == b"255\n" and b"Unable to load access control list: Unknown error -1" in answer.err


def test_tasks_run_in_the_foreground_and_their_failure_is_not_in_the_exit_code(client: Client) -> None:
    good = client.run(f"pvesh create /nodes/pve/lxc/202/status/start {AS_JSON}; pct status 202; pct stop 202")
    upid, status = good.text.strip().split("\n")
    assert json.loads(upid).startswith("UPID:pve:") and status == "status: running"
    client.run("cp /etc/pve/lxc/202.conf /root/kept; echo 'lock: backup' >> /etc/pve/lxc/202.conf")
    bad = client.run(f"pvesh create /nodes/pve/lxc/202/status/start {AS_JSON}")
    client.run("mv /root/kept /etc/pve/lxc/202.conf")
    assert (bad.code, bad.err) == (0, b"CT is locked (backup)\n")
    task = client.run(f"pvesh get /nodes/pve/tasks/{json.loads(bad.out)}/status {AS_JSON}")
    assert json.loads(task.out)["exitstatus"] == "CT is locked (backup)"


def test_a_snapshots_task_speaks_before_its_id(client: Client) -> None:
    path = "/nodes/pve/lxc/202/snapshot"
    answer = client.run(f"pvesh create {path} -snapname one --description 'a b' {AS_JSON}")
    first, upid = answer.text.strip().split("\n")
    assert "vm-202-disk-0" in first and ":vzsnapshot:202:root@pam:" in upid
    rows = json.loads(client.run(f"pvesh get {path} {AS_JSON}").out)
    assert [(row["name"], row["description"]) for row in rows] == [("one", "a b\n"), ("current", "You are here!")]
    assert client.run(f"pvesh create {path}/one/rollback --start 0 && pct rollback 202 one").code == 0
    assert client.run("pct rollback 202 two").err == b"snapshot 'two' does not exist\n"
    assert client.run(f"pvesh delete {path}/one").code == 0
    assert client.run("pct listsnapshot 202").text.split() == ["`->", "current", "You", "are", "here!"]


def test_another_node_that_is_dead_is_asked_by_ssh(proxmox: SandboxState, client: Client) -> None:
    with wrong(proxmox, down=["pve2"]):
        answer = client.run("pvesh get /nodes/pve2/lxc")
    assert (answer.code, answer.err.split(b": ")[0]) == (255, b"ssh")
    assert b"proxy handler failed: command 'ssh -o BatchMode=yes root@127.0.0.1 pvesh --noproxy get" in answer.err


def test_the_text_is_a_table(client: Client) -> None:
    lines = client.run("pvesh get /version").text.split("\n")
    assert lines[1].split() == ["│", "key", "│", "value", "│"] and lines[-2].startswith("└")
    rows = client.run("pvesh get /nodes/pve/lxc").text
    assert "train201" in rows and "╞" in rows
    assert client.run("pvesh get /version --quiet").out == b""


def test_rights_are_given_by_pveum(proxmox: SandboxState, client: Client) -> None:
    lines = [
        "pveum role add Watcher --privs 'VM.Audit Sys.Audit'",
        "pveum user add eve@pve",
        "pveum acl modify /vms/202 --users eve@pve --roles Watcher",
        "pveum user token add eve@pve t --privsep=0 --output-format json",
    ]
    answer = client.run(" && ".join(lines))
    made = json.loads(answer.text.split("\n")[-2])
    eve = connect(proxmox, made["full-tokenid"], made["value"])
    assert [row["vmid"] for row in eve.nodes("pve").lxc.get()] == [202]
    assert client.run("pveum user token modify eve@pve t --privsep 1").code == 0
    assert eve.nodes("pve").lxc.get() == []
    assert client.run("pveum acl modify /vms/202 --token 'eve@pve!t' --role Watcher").code == 0
    assert [row["vmid"] for row in eve.nodes("pve").lxc.get()] == [202]
    assert json.loads(client.run(f"pveum user token permissions eve@pve t {AS_JSON}").out) == {
        "/vms/202": {"Sys.Audit": 1, "VM.Audit": 1}
    }
    client.run("pveum user token remove eve@pve t; pveum acl delete /vms/202 --users eve@pve --roles Watcher")
    assert "eve@pve!t" not in client.run("cat /etc/pve/user.cfg /etc/pve/priv/token.cfg").text


@pytest.mark.parametrize(
    ("words", "err"),
    [
        ("acl modify / --tokens 'bot@pve!none' --roles PVEAuditor", "no such token 'none' for user 'bot@pve'\n"),
        ("acl modify / --users bot@pve --roles None", "role 'None' does not exist\n"),
        ("role add Bad --privs VM.Fly", "invalid privilege 'VM.Fly'\n"),
        ("user add bot@pve", "create user failed: user 'bot@pve' already exists\n"),
        ("fly", "ERROR: unknown command 'pveum fly'\n"),
    ],
)
def test_pveum_refuses(client: Client, words: str, err: str) -> None:
    answer = client.run(f"pveum {words}")
    assert (answer.code, answer.err.decode()) == (255, err)


def test_the_secret_is_in_no_output_of_the_sandbox(proxmox: SandboxState, client: Client) -> None:
    value = (proxmox.api_tokens / BOT).read_text()
    shown = client.run("pvesh get /access/permissions; pveum user token list bot@pve; cat /etc/pve/user.cfg").text
    assert value not in shown
