"""The sandbox's Proxmox API, asked through proxmoxer as users ask it: each row of what a real one was seen to say."""

import hashlib
import json
import re
import socket
import ssl
from collections.abc import Callable

import pytest
import requests
from api_client import BOT, connect, raw, refusal, secret, wrong
from proxmoxer import ProxmoxAPI
from sandbox_client import Client

from dflash_ops.sandbox.state import SandboxState

NO_CONFIG = "Configuration file 'nodes/pve/lxc/999.conf' does not exist"
UNKNOWN = "property is not defined in schema and the schema does not allow additional properties"
EMPTY = {"errors": b""}


# What it tells


def test_the_version_is_told_to_any_token(proxmox: SandboxState) -> None:
    version = connect(proxmox, "bot@pve!bare").version.get()
    assert set(version) == {"release", "version", "repoid"} and version["version"].startswith(version["release"])


def test_nodes_name_their_certificates_fingerprint(proxmox: SandboxState, bot: ProxmoxAPI) -> None:
    rows = {row["node"]: row for row in bot.nodes.get()}
    assert {name: row["status"] for name, row in rows.items()} == {"pve": "online", "pve2": "online"}
    served = ssl.get_server_certificate(("127.0.0.1", proxmox.api_port))
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(served)).hexdigest().upper()
    assert rows["pve"]["ssl_fingerprint"] == ":".join(re.findall("..", digest))
    assert rows["pve2"]["ssl_fingerprint"] != rows["pve"]["ssl_fingerprint"]
    # How loaded they are is for auditors.
    assert "mem" in rows["pve"] and "mem" not in connect(proxmox, "viewer@pve!audit").nodes.get()[0]


def test_containers_with_their_fields(bot: ProxmoxAPI) -> None:
    rows = {row["vmid"]: row for row in bot.nodes("pve").lxc.get()}
    assert {vmid: row["status"] for vmid, row in rows.items()} == {200: "running", 201: "running", 202: "stopped"}
    fields = {
        *("vmid", "status", "name", "cpus", "cpu", "mem", "maxmem", "swap", "maxswap", "disk", "maxdisk", "diskread"),
        *("diskwrite", "netin", "netout", "uptime", "type"),
    }
    assert set(rows[202]) == fields
    pressure = {name for name in rows[200] if name.startswith("pressure")}
    assert set(rows[200]) == fields | {"pid"} | pressure and pressure
    assert (rows[200]["name"], rows[200]["type"], rows[200]["maxmem"]) == ("train200", "lxc", 8192 << 20)
    current = bot.nodes("localhost").lxc(200).status.current.get()
    assert current["ha"] == {"managed": 0} and current["pid"] == rows[200]["pid"]


def test_a_config_has_numbers_raw_lines_and_a_digest(bot: ProxmoxAPI, client: Client) -> None:
    lines = ["#100%25 mine%3A", "lxc.mount.entry: /a b none bind", "lxc.cgroup2.devices.allow: c 195:* rwm"]
    client.run("cp /etc/pve/lxc/202.conf /root/kept")
    before = bot.nodes("pve").lxc(202).config.get()
    client.run(f"printf '%s\\n' '{lines[0]}' '{lines[1]}' '{lines[2]}' >> /etc/pve/lxc/202.conf")
    config = bot.nodes("pve").lxc(202).config.get()
    client.run("mv /root/kept /etc/pve/lxc/202.conf")
    assert (config["memory"], config["hostname"], config["rootfs"]) == (8192, "train202", before["rootfs"])
    assert config["lxc"] == [line.split(": ", 1) for line in lines[1:]]
    assert config["description"] == "100% mine:\n"
    assert re.fullmatch("[0-9a-f]{40}", config["digest"]) and config["digest"] != before["digest"]


def test_a_config_alone_makes_a_container_that_is_stopped(bot: ProxmoxAPI, client: Client) -> None:
    client.run("printf 'memory: 16\nlock: migrate\n' > /etc/pve/lxc/300.conf")
    rows = {row["vmid"]: row for row in bot.nodes("pve").lxc.get()}
    client.run("rm /etc/pve/lxc/300.conf")
    assert {name: rows[300][name] for name in ("name", "status", "lock", "maxmem", "maxdisk", "disk")} == {
        **{"name": "CT300", "status": "stopped", "lock": "migrate", "maxmem": 16 << 20, "maxdisk": 0, "disk": 0}
    }


def test_gpus_stand_in_configs_in_both_ways(bot: ProxmoxAPI) -> None:
    entries, by_hand = (bot.nodes("pve").lxc(vmid).config.get() for vmid in (200, 201))
    assert re.fullmatch(r"/dev/nvidia0,mode=0666", entries["dev0"]) and by_hand["unprivileged"] == 1
    assert ["lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file"] in by_hand["lxc"]
    assert "nvidia" not in json.dumps(bot.nodes("pve").lxc(202).config.get())


def test_the_cluster_says_which_node_has_a_container(proxmox: SandboxState, bot: ProxmoxAPI) -> None:
    rows = {row["id"]: row for row in bot.cluster.resources.get(type="vm")}
    assert set(rows) == {"lxc/200", "lxc/201", "lxc/202"} and {row["node"] for row in rows.values()} == {"pve"}
    assert {row["type"] for row in bot.cluster.resources.get()} == {"lxc", "node"}
    seen = connect(proxmox, "viewer@pve!audit").cluster.resources.get(type="vm")
    assert [row["id"] for row in seen] == ["lxc/200"]


def test_the_cluster_status_is_for_auditors_of_all(root: ProxmoxAPI, bot: ProxmoxAPI) -> None:
    rows = root.cluster.status.get()
    assert {row["name"]: row["online"] for row in rows if row["type"] == "node"} == {"pve": 1, "pve2": 1}
    assert refusal(bot.cluster.status.get) == (403, "Permission check failed (/, Sys.Audit)", None)


# Who may


def test_rights_are_told(proxmox: SandboxState, bot: ProxmoxAPI) -> None:
    held = bot.access.permissions.get()
    assert held["/vms"] == dict.fromkeys(("VM.Audit", "VM.PowerMgmt", "VM.Snapshot", "VM.Snapshot.Rollback"), 1)
    assert bot.access.permissions.get(path="/vms/201") == {"/vms/201": held["/vms"]}
    assert connect(proxmox, "viewer@pve!audit").access.permissions.get() == {"/vms/200": {"VM.Audit": 1}}
    assert connect(proxmox, "bot@pve!bare").access.permissions.get() == {}
    assert "VM.Allocate" in connect(proxmox, "root@pam!full").access.permissions.get()["/"]


def test_what_may_not_be_seen_is_left_out_silently(proxmox: SandboxState) -> None:
    bare, viewer = connect(proxmox, "bot@pve!bare"), connect(proxmox, "viewer@pve!audit")
    assert bare.nodes("pve").lxc.get() == [] and bare.cluster.resources.get(type="vm") == []
    assert [row["vmid"] for row in viewer.nodes("pve").lxc.get()] == [200]


def test_a_separated_token_needs_its_own_grant_and_its_users(proxmox: SandboxState, client: Client) -> None:
    made = client.run("pveum user token add bot@pve fresh --privsep 1 --output-format json")
    value = json.loads(made.text)["value"]
    fresh = connect(proxmox, "bot@pve!fresh", value)
    try:
        assert fresh.nodes("pve").lxc.get() == []
        grant = "pveum acl modify /vms/201 --tokens 'bot@pve!fresh' --roles Administrator"
        assert client.run(grant).code == 0
        assert [row["vmid"] for row in fresh.nodes("pve").lxc.get()] == [201]
        # What the user lacks the token lacks, whatever it was granted.
        assert set(fresh.access.permissions.get(path="/vms/201")["/vms/201"]) == {
            *("VM.Audit", "VM.PowerMgmt", "VM.Snapshot", "VM.Snapshot.Rollback")
        }
        # The nearest entry counts: none for the user below this path.
        assert client.run("pveum acl modify /vms/201 --users bot@pve --roles NoAccess").code == 0
        assert fresh.nodes("pve").lxc.get() == []
    finally:
        client.run("pveum acl delete /vms/201 --users bot@pve --roles NoAccess; pveum user token remove bot@pve fresh")
    with wrong(proxmox, unauthorized_delay=0.0):
        assert refusal(fresh.version.get)[1] == "no such token 'fresh' for user 'bot@pve'"


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda ct: ct(201).status.current.get(), "/vms/201, VM.Audit"),
        (lambda ct: ct(201).config.get(), "/vms/201, VM.Audit"),
        (lambda ct: ct(200).status.start.post(), "/vms/200, VM.PowerMgmt"),
        (lambda ct: ct(200).status.stop.post(), "/vms/200, VM.PowerMgmt"),
        (lambda ct: ct(200).snapshot.post(snapname="s1"), "/vms/200, VM.Snapshot"),
        (lambda ct: ct(200).snapshot("s1").rollback.post(), "/vms/200, VM.Snapshot|VM.Snapshot.Rollback"),
        (lambda ct: ct(200).snapshot("s1").delete(), "/vms/200, VM.Snapshot"),
        (lambda ct: ct(200).migrate.post(target="pve2"), "/vms/200, VM.Migrate"),
        # Indistinguishable from what is forbidden.
        (lambda ct: ct(999).status.current.get(), "/vms/999, VM.Audit"),
    ],
)
def test_a_missing_right_is_named_with_its_path(
    proxmox: SandboxState, call: Callable[[object], object], right: str
) -> None:
    viewer = connect(proxmox, "viewer@pve!audit")
    assert refusal(lambda: call(viewer.nodes("pve").lxc)) == (403, f"Permission check failed ({right})", None)


@pytest.mark.parametrize(
    ("token", "value", "reason"),
    [
        (BOT, "00000000-0000-0000-0000-000000000000", "invalid token value!"),
        ("bot@pve!nobody", "x", "no such token 'nobody' for user 'bot@pve'"),
        ("none@pve!dflash", "x", "no such user ('none@pve')"),
        ("bot!dflash", "x", "invalid token"),
    ],
)
def test_a_bad_token_is_401_without_a_body(proxmox: SandboxState, token: str, value: str, reason: str) -> None:
    with wrong(proxmox, unauthorized_delay=0.0):
        assert refusal(connect(proxmox, token, value).version.get) == (401, reason, EMPTY)


def test_no_token_is_401_and_not_json(proxmox: SandboxState) -> None:
    with wrong(proxmox, unauthorized_delay=0.0):
        answer = raw(proxmox, "GET", "/api2/json/version", None)
    assert (answer.code, answer.reason, answer.body) == (401, "No ticket", b"")


def test_a_401_comes_late(proxmox: SandboxState) -> None:
    # The delay is what a client's time-out of less than that runs into.
    with wrong(proxmox, unauthorized_delay=60.0), pytest.raises(requests.exceptions.Timeout):
        connect(proxmox, BOT, "wrong", timeout=0.5).version.get()
    with wrong(proxmox, unauthorized_delay=60.0):
        connect(proxmox).version.get()  # for strangers only


# Faults


def test_the_reason_phrase_carries_the_message(proxmox: SandboxState) -> None:
    answer = raw(proxmox, "GET", "/api2/json/nodes/pve/lxc/999/config")
    assert (answer.code, answer.reason, answer.json) == (500, NO_CONFIG, {"data": None, "message": f"{NO_CONFIG}\n"})
    assert answer.headers["Content-Type"] == "application/json;charset=UTF-8"
    assert answer.headers["Server"].startswith("pve-api-daemon/")


def bad(**errors: str) -> tuple[int, str, dict[str, str]]:
    return 400, "Parameter verification failed.", errors


NOWHERE = "hostname lookup 'nix' failed - failed to get address info for: nix: Name or service not known"
NO_TASK = "UPID:pve:00000001:00000001:00000001:vzstart:200:root@pam:"
NO_TYPE = "value 'ct' does not have a value in the enumeration 'vm, storage, node, sdn'"
CASES = [
    ("GET", "nodes/pve/lxc/999/config", {}, (500, NO_CONFIG, None)),
    ("POST", "nodes/pve/lxc/999/status/start", {}, (500, NO_CONFIG, None)),
    (
        "GET",
        "nodes/pve2/lxc/200/config",
        {},
        (500, "Configuration file 'nodes/pve2/lxc/200.conf' does not exist", None),
    ),
    ("POST", "nodes/pve/lxc/200/status/start", {}, (500, "CT 200 already running", None)),
    ("POST", "nodes/pve/lxc/202/status/stop", {}, (500, "CT 202 not running", None)),
    ("POST", "nodes/pve/lxc/202/status/shutdown", {}, (500, "CT 202 not running", None)),
    ("POST", "nodes/pve/lxc/202/status/reboot", {}, (500, "VM 202 not running", None)),
    ("GET", "nodes/pve/lxc", {"foo": 1}, bad(foo=UNKNOWN)),
    ("POST", "nodes/pve/lxc/202/status/start", {"foo": 1}, bad(foo=UNKNOWN)),
    ("GET", "nodes/pve/lxc/abc/config", {}, bad(vmid="type check ('integer') failed - got 'abc'")),
    ("GET", "nodes/pve/lxc/99/config", {}, bad(vmid="value must have a minimum value of 100")),
    (
        "POST",
        "nodes/pve/lxc/200/status/shutdown",
        {"forceStop": "maybe"},
        bad(forceStop="type check ('boolean') failed - got 'maybe'"),
    ),
    ("GET", "cluster/resources", {"type": "ct"}, bad(type=NO_TYPE)),
    ("POST", "nodes/pve/lxc/200/snapshot", {"snapname": "1st"}, bad(snapname="invalid configuration ID '1st'")),
    ("POST", "nodes/pve/lxc/200/snapshot", {}, bad(snapname="property is missing and it is not optional")),
    (
        "POST",
        "nodes/pve/lxc/200/snapshot",
        {"snapname": "current"},
        (500, "unable to use snapshot name 'current' (reserved name)", None),
    ),
    ("GET", "nodes/pve/tasks/UPID:x/status", {}, bad(upid="unable to parse worker upid")),
    ("GET", f"nodes/pve/tasks/{NO_TASK}/log", {}, bad(upid="no such task")),
    ("POST", "nodes/pve/lxc/200/exec", {}, (501, "Method 'POST /nodes/pve/lxc/200/exec' not implemented", None)),
    ("GET", "nodes/pve/lxcs", {}, (501, "Method 'GET /nodes/pve/lxcs' not implemented", None)),
    ("GET", "nodes/nix/lxc", {}, (500, NOWHERE, None)),
]


@pytest.mark.parametrize(("method", "path", "given", "fault"), CASES)
def test_faults_of_a_request(root: ProxmoxAPI, method: str, path: str, given: dict[str, object], fault: tuple) -> None:
    verb = getattr(root(path), method.lower())
    assert refusal(lambda: verb(**given)) == fault


def test_bodies_may_be_json(proxmox: SandboxState) -> None:
    path = "/api2/json/nodes/pve/lxc/202/status/shutdown"
    answer = raw(proxmox, "POST", path, body='{"timeout": 5, "forceStop": true}', kind="application/json")
    assert (answer.code, answer.reason) == (500, "CT 202 not running")
    assert raw(proxmox, "POST", path, body='{"timeout": ', kind="application/json").code == 400


def test_every_fault_has_the_same_form(proxmox: SandboxState) -> None:
    answer = raw(proxmox, "POST", "/api2/json/nodes/pve/lxc/200/status/shutdown", body="foo=1&forceStop=x")
    assert answer.code == 400
    errors = {"foo": UNKNOWN, "forceStop": "type check ('boolean') failed - got 'x'"}
    assert answer.json == {"data": None, "message": "Parameter verification failed.\n", "errors": errors}
    assert raw(proxmox, "PATCH", "/api2/json/version").code == 501
    assert raw(proxmox, "GET", "/nothing").code == 404


def test_a_dead_node_is_595_without_a_body(proxmox: SandboxState, bot: ProxmoxAPI, client: Client) -> None:
    with wrong(proxmox, down=["pve2"]):
        assert refusal(bot.nodes("pve2").lxc.get) == (595, "No route to host", EMPTY)
        assert {row["node"]: row["status"] for row in bot.nodes.get()} == {"pve": "online", "pve2": "offline"}
        assert raw(proxmox, "GET", "/api2/json/nodes/pve2/status").body == b""
    with wrong(proxmox, down=["pve2"], down_code=596):
        assert refusal(bot.nodes("pve2").lxc.get) == (596, "Connection timed out", EMPTY)
    with wrong(proxmox, down=["pve"]):  # its pvedaemon
        assert refusal(bot.nodes("pve").lxc.get) == (595, "Connection refused", EMPTY)
        assert {row["status"] for row in bot.cluster.resources.get(type="vm")} == {"unknown"}
        assert client.run("pvesh get /nodes/pve/lxc --output-format json").code == 0  # needs no daemon


def test_a_certificate_of_somebody_else(proxmox: SandboxState) -> None:
    address = ("127.0.0.1", proxmox.api_port)
    usual = ssl.get_server_certificate(address)
    with wrong(proxmox, certificate="other"):
        assert ssl.get_server_certificate(address) != usual
        with pytest.raises(requests.exceptions.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(proxmox).version.get()
    assert ssl.get_server_certificate(address) == usual


def test_the_authority_lies_where_pve_keeps_it(proxmox: SandboxState, client: Client) -> None:
    assert client.run("cat /etc/pve/pve-root-ca.pem").text == proxmox.api_ca.read_text()
    context = ssl.create_default_context(cafile=proxmox.api_ca)
    for name in ("127.0.0.1", "localhost", "pve", "pve.sandbox.test", "::1"):
        with socket.create_connection(("127.0.0.1", proxmox.api_port), 10) as plain:
            context.wrap_socket(plain, server_hostname=name).close()
    with socket.create_connection(("127.0.0.1", proxmox.api_port), 10) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="pve9")


def test_plain_http_is_sent_to_https(proxmox: SandboxState) -> None:
    answer = requests.get(f"http://127.0.0.1:{proxmox.api_port}/api2/json/version", allow_redirects=False, timeout=10)
    assert answer.status_code == 301
    assert answer.headers["Location"] == f"https://127.0.0.1:{proxmox.api_port}/api2/json/version"


def test_a_slow_one(proxmox: SandboxState) -> None:
    with wrong(proxmox, delay=60.0, slow="GET /nodes$"):
        connect(proxmox).version.get()
        with pytest.raises(requests.exceptions.Timeout):
            connect(proxmox, timeout=0.5).nodes.get()


def test_one_that_dies_in_the_middle(proxmox: SandboxState, bot: ProxmoxAPI) -> None:
    with wrong(proxmox, dies="GET /version"), pytest.raises(requests.exceptions.RequestException):
        connect(proxmox).version.get()
    bot.version.get()


def test_one_that_is_no_api(proxmox: SandboxState) -> None:
    with wrong(proxmox, garbage="GET /version"):
        assert raw(proxmox, "GET", "/api2/json/version").body.startswith(b"<html>")


def test_secrets_lie_in_files_of_their_own(proxmox: SandboxState, client: Client) -> None:
    assert {path.name for path in proxmox.api_tokens.iterdir()} >= {BOT, "root@pam!full"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in proxmox.api_tokens.iterdir())
    value = secret(proxmox, BOT)
    assert value not in (proxmox.folder / "state.json").read_text() + (proxmox.folder / "log").read_text()
    assert client.run("stat -c %a /etc/pve/priv/token.cfg").out == b"600\n"
