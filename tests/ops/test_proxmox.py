"""Proxmox VE's answers and refusals, row by row, through proxmoxer and through pvesh."""

import contextlib
import json
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_in import retry_until
from tls_server import Identity, data, identity, said, serve

from dflash_ops import proxmox, proxmox_https
from dflash_ops.command import Api, Command, Host
from dflash_ops.errors import (
    BusyError,
    HostKeyError,
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    TimedOutError,
    UnreachableError,
)
from dflash_ops.proxmox import Proxmox, post
from dflash_ops.proxmox_https import Https
from dflash_ops.proxmox_token import Token
from dflash_ops.proxmox_values import Call
from dflash_ops.sandbox.faults import set_faults
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

BOT = "bot@pve!dflash"
UPID = "UPID:pve:0003F1A2:01C3B8F0:674A5E10:vzstart:202:bot@pve!dflash:"


def by_api(state: SandboxState, token: str = BOT, **keys: Any) -> Host:
    """The sandbox's host, asked over HTTPS with one of its tokens."""
    user, _, name = token.partition("!")
    given = {"ca": state.api_ca, "token_file": state.api_tokens / token, **keys}
    api = Api("127.0.0.1", state.api_port, user, name, **given)
    return replace(by_ssh(state), api=api)


def by_ssh(state: SandboxState) -> Host:
    return Host("box", state.host, state.port, state.user, state.key, state.known_hosts)


@contextlib.contextmanager
def wrong(state: SandboxState, **faults: Any) -> Generator[None, None, None]:
    set_faults(state.init_pid, **faults)
    try:
        yield
    finally:
        set_faults(state.init_pid)


@pytest.fixture(params=["https", "pvesh"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def api(way: str, sandbox: SandboxState, shell: Shell) -> Generator[Proxmox, None, None]:
    host = by_ssh(sandbox) if way == "pvesh" else by_api(sandbox, "root@pam!full")
    with proxmox.connect(shell, host) as it:
        assert it.by_pvesh == (way == "pvesh")
        yield it


QUESTIONS: list[tuple[tuple[str | int, ...], dict[str, str | int]]] = [
    (("version",), {}),
    (("nodes",), {}),
    (("nodes", "pve", "lxc"), {}),
    (("nodes", "localhost", "lxc", 200, "status", "current"), {}),
    (("nodes", "pve", "lxc", 200, "config"), {}),
    (("nodes", "pve", "lxc", 200, "snapshot"), {}),
    (("nodes", "pve", "tasks"), {"vmid": 299}),
    (("cluster", "resources"), {"type": "vm"}),
    (("access", "permissions"), {"path": "/vms/200"}),
]


def test_both_ways_give_the_same_answers(sandbox: SandboxState, shell: Shell) -> None:
    with (
        proxmox.connect(shell, by_api(sandbox, "root@pam!full")) as https,
        proxmox.connect(shell, by_ssh(sandbox)) as pvesh,
    ):
        for path, parameters in QUESTIONS:
            one, other = (_lasting(it.get(*path, **parameters)) for it in (https, pvesh))
            assert one == other, path
            assert one or path[-1] == "tasks", path
        assert {it["vmid"] for it in https.get("nodes", "pve", "lxc")} == {200, 201, 202}
        assert https.get("nodes", "pve", "lxc", 200, "status", "current")["ha"] == {"managed": 0}
        assert "VM.Audit" in https.get("access", "permissions")["/vms/200"]


def _lasting(answer: Any) -> Any:
    """Without what changes from one moment to the next, and in one order."""
    if isinstance(answer, dict):
        moving = {"uptime", "cpu", "mem", "disk", "netin", "netout", "diskread", "diskwrite", "loadavg", "running"}
        return {key: _lasting(it) for key, it in answer.items() if key not in moving and "pressure" not in key}
    return sorted((_lasting(it) for it in answer), key=json.dumps) if isinstance(answer, list) else answer


CT = ("nodes", "pve", "lxc")
REFUSED: list[tuple[Call, type[OpsError], str]] = [
    (Call("get", (*CT, "999", "config")), NotFoundError, "there is no container 999 on node pve"),
    (Call("post", (*CT, "200", "status", "start")), OpsError, "CT 200 already running"),
    (Call("post", (*CT, "202", "status", "shutdown")), OpsError, "CT 202 not running"),
    (Call("post", (*CT, "202", "status", "reboot")), OpsError, "VM 202 not running"),
    (Call("get", CT, {"foo": 1}), OpsError, "refuses GET /nodes/pve/lxc.*foo"),
    (Call("get", (*CT, "99", "config")), OpsError, "vmid: value must have a minimum value of 100"),
    (Call("post", (*CT, "200", "exec")), OpsError, "no such call: POST /nodes/pve/lxc/200/exec"),
    (Call("get", ("nodes", "nix", "lxc")), NotFoundError, "there is no node nix"),
    (Call("get", ("nodes", "pve", "tasks", UPID, "status")), OpsError, "no such task"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_each_refusal_is_the_same_sentence_both_ways(
    api: Proxmox, call: Call, kind: type[OpsError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        api.get(*call.path, **call.parameters) if call.method == "get" else api.run(call, "it")
    assert type(caught.value) is kind


def test_a_node_that_does_not_answer(api: Proxmox, sandbox: SandboxState) -> None:
    with (
        wrong(sandbox, down=["pve2"]),
        pytest.raises(UnreachableError, match=r"node pve2 does not answer the one we asked.*No route to host"),
    ):
        api.get("nodes", "pve2", "lxc")


@pytest.mark.parametrize("code", [596, 599])
def test_a_node_that_breaks_off(sandbox: SandboxState, shell: Shell, code: int) -> None:
    with (
        wrong(sandbox, down=["pve2"], down_code=code),
        proxmox.connect(shell, by_api(sandbox)) as https,
        pytest.raises(UnreachableError, match=rf"node pve2 does not answer the one we asked .*{code}"),
    ):
        https.get("nodes", "pve2", "lxc")


def test_the_asked_nodes_own_daemon_is_down(sandbox: SandboxState, shell: Shell) -> None:
    with (
        wrong(sandbox, down=["pve"]),
        proxmox.connect(shell, by_api(sandbox)) as https,
        pytest.raises(UnreachableError, match=r"the node that we ask does not .*595 Connection refused.*pvedaemon"),
    ):
        https.get("nodes", "localhost", "lxc")


# -- tasks


def test_a_task_is_waited_for_and_its_log_is_heard(api: Proxmox) -> None:
    heard: list[str] = []
    made = post("nodes", "pve", "lxc", 202, "snapshot", snapname="heard")
    task = api.run(made, "the snapshot", on_log=heard.append)
    assert heard == list(task.log)[: len(heard)] and any("snapshot of" in line for line in heard)
    assert not any(line.startswith(("TASK", "UPID", '"UPID')) for line in heard)
    assert (task.upid.type, task.upid.id, task.warnings) == ("vzsnapshot", "202", 0)
    api.run(proxmox.delete("nodes", "pve", "lxc", 202, "snapshot", "heard"), "removing it")


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("lock: backup", BusyError, r"container 202 is locked \(backup\).*pct unlock 202"),
        ("dev0: /dev/nvidia-uvm-none", OpsError, "starting it failed .*Device /dev/nvidia-uvm-none does not exist"),
    ],
)
def test_a_task_that_fails_after_a_200(
    api: Proxmox, sandbox: SandboxState, shell: Shell, line: str, kind: type[OpsError], words: str
) -> None:
    with changed_config(sandbox, 202, line), pytest.raises(kind, match=words) as caught:
        api.run(post("nodes", "pve", "lxc", 202, "status", "start"), "starting it")
    assert type(caught.value) is kind


def test_a_task_that_never_ends_and_one_that_is_killed(sandbox: SandboxState, shell: Shell) -> None:
    with proxmox.connect(shell, by_api(sandbox)) as api, wrong(sandbox, hangs="vzstart 202"):
        with pytest.raises(TimedOutError, match="its task goes on there") as caught:
            api.run(START, "starting it", seconds=0.4)
        upid = re.findall(r"UPID:\S+:", str(caught.value))[0]
        (hung,) = [it for it in api.get("nodes", "pve", "tasks", source="active") if it["upid"] == upid]
        shell.run(by_ssh(sandbox), Command(("kill", "-9", str(hung["pid"]))), check=True)
        status = ("nodes", "pve", "tasks", upid, "status")
        assert retry_until(lambda: api.get(*status).get("exitstatus")) == "unexpected status"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimedOutError("no answer"), "starting it has said nothing for 600 s"),
        (LinkLostError("the connection broke"), "whether starting it has begun is not known"),
        (KeyboardInterrupt("Ctrl-C"), "Ctrl-C"),
    ],
    ids=["silence", "a broken link", "Ctrl-C"],
)
def test_a_task_that_pvesh_runs_and_we_lose(error: BaseException, words: str) -> None:
    class Broken(Shell):
        def stream(self, *_: Any, **__: Any) -> int:
            raise error

    heard: list[str] = []
    api = Proxmox(proxmox.Pvesh(Broken(), Host("lab", "lab")), Host("lab", "lab"))
    with pytest.raises(type(error), match=words) as caught:
        api.run(START, "starting it", on_log=heard.append)
    told = "".join(heard) or str(caught.value)
    assert "on the host: pvesh get /nodes/pve/tasks --vmid 202 --source active" in told


@contextlib.contextmanager
def changed_config(state: SandboxState, vmid: int, line: str) -> Generator[None, None, None]:
    """A line more in a container's configuration."""
    file = Path(f"/proc/{state.init_pid}/root/etc/pve/nodes/pve/lxc/{vmid}.conf")
    before = file.read_text()
    file.write_text(before + line + "\n")
    try:
        yield
    finally:
        file.write_text(before)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity(tmp_path_factory.mktemp("tls"), "node")


@contextlib.contextmanager
def scripted(node: Identity, *answers: Any) -> Generator[Proxmox, None, None]:
    """An API that answers these in turn."""
    with serve(list(answers), node) as server:
        asked = Https(Api(port=server.port, ca=node.certificate), "127.0.0.1", Token("bot@pve", "dflash", "0" * 36))
        try:
            yield Proxmox(asked, Host("lab", "127.0.0.1"))
        finally:
            asked.close()


def ended(how: str) -> Any:
    return data({"status": "stopped", "exitstatus": how})


def lines(*texts: str, first: int = 1) -> Any:
    return data([{"n": number, "t": text} for number, text in enumerate(texts, first)])


RUNNING, NO_LOG = data({"status": "running"}), lines("no content")
START = post("nodes", "pve", "lxc", 202, "status", "start")


def gone(connection: Any, _: Any) -> None:
    connection.close()


def test_a_tasks_log_grows_while_it_is_waited_for(node: Identity) -> None:
    heard: list[str] = []
    with scripted(
        node, data(UPID), RUNNING, NO_LOG, RUNNING, lines("one"), RUNNING, lines("one", "two"), ended("WARNINGS: 2"),
        lines("three", "TASK WARNINGS: 2", first=3),
    ) as api:  # fmt: skip
        task = api.run(START, "starting it", on_log=heard.append)
    assert heard == ["one", "two", "three"] and task.warnings == 2


def test_a_break_of_the_link_is_no_end_of_a_task(node: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(node, data(UPID), gone, gone, RUNNING, said(b"<html>"), gone, gone, ended("OK"), NO_LOG) as api:
        assert api.run(START, "starting it").upid.text == UPID
    monkeypatch.setattr(proxmox, "_SILENT_SECONDS", 0.05)
    with scripted(node, data(UPID), gone) as api, pytest.raises(LinkLostError) as caught:
        api.run(START, "starting it")
    assert re.search("what becomes of starting it is not known .*broke off.*its task goes on there", str(caught.value))


def test_a_task_without_an_end_is_left_after_a_while(node: Identity) -> None:
    with scripted(node, data(UPID), *[RUNNING, NO_LOG] * 100) as api, pytest.raises(TimedOutError) as caught:
        api.run(START, "starting it", seconds=0.1)
    assert re.search(f"starting it takes longer than .* its task goes on there: {UPID}", str(caught.value))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([data(None)], "whether starting it has begun is not known .*no id of a task: 'None'.*--source active"),
        ([said(b"<html>")], "whether starting it has begun is not known .*no JSON.*--source active"),
        ([data(UPID), said(b"<html>")], f"what becomes of starting it is not known .*no JSON.*{UPID}/status"),
        (
            [data(UPID), said(b"", "403 Permission check failed (/nodes/pve, Sys.Audit)")],
            f"what becomes of starting it is not known .*lacks Sys.Audit.*{UPID}/status",
        ),
    ],
    ids=["null", "garbage", "garbage later", "a right that is gone"],
)
def test_a_task_that_we_lose_is_told_of(
    answers: list[Any], words: str, node: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxmox, "_SILENT_SECONDS", 0.1)
    with scripted(node, *answers) as api, pytest.raises(LinkLostError, match=words):
        api.run(START, "starting it")


def test_a_failed_task_says_its_last_lines(node: Identity) -> None:
    log = lines("lxc_start: 1 Oh", "no cgroup", "TASK ERROR: startup failed")
    with scripted(node, data(UPID), ended("startup failed"), log) as api, pytest.raises(OpsError) as caught:
        api.run(START, "starting it")
    assert "starting it failed" in str(
        caught.value
    ) and "startup failed; its log ends: lxc_start: 1 Oh / no cgroup" in str(caught.value)


# -- tokens and certificates of a real one


def test_a_token_that_is_not_known(
    sandbox: SandboxState, shell: Shell, soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P_TOKEN", "00000000-0000-0000-0000-000000000000")
    host = by_api(sandbox, token_file=None, token_env="P_TOKEN")
    with (
        # A real one takes 3 s; proxmoxer's own time-out would end it at 5.
        wrong(sandbox, unauthorized_delay=6.0 if soak else 0.1),
        proxmox.connect(shell, host) as https,
        pytest.raises(
            UnreachableError,
            match=rf"does not know the token {BOT} .*401 invalid token value!: .*pveum user token list bot@pve",
        ),
    ):
        https.get("version")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("get", (*CT, "201", "status", "current")), "lacks VM.Audit on /vms/201.*or there is no container 201"),
        (Call("get", (*CT, "999", "config")), "lacks VM.Audit on /vms/999.*or there is no container 999"),
        (Call("post", (*CT, "200", "status", "stop")), "lacks VM.PowerMgmt on /vms/200"),
        (Call("post", (*CT, "200", "snapshot"), {"snapname": "s1"}), "lacks VM.Snapshot on /vms/200"),
        (Call("post", (*CT, "200", "snapshot", "s1", "rollback")), "lacks VM.Snapshot or VM.Snapshot.Rollback on"),
        (Call("get", ("nodes", "pve", "status")), "lacks Sys.Audit on /nodes/pve"),
    ],
)
def test_a_missing_right_is_named_with_the_commands_that_give_it(
    sandbox: SandboxState, shell: Shell, call: Call, words: str
) -> None:
    with (
        proxmox.connect(shell, by_api(sandbox, "viewer@pve!audit")) as https,
        pytest.raises(PreflightError, match=words) as caught,
    ):
        https.get(*call.path) if call.method == "get" else https.run(call, "it")
    assert "--users viewer@pve --roles" in str(caught.value) and "--tokens 'viewer@pve!audit'" in str(caught.value)


def test_somebody_elses_task_needs_a_right_on_the_node(sandbox: SandboxState, shell: Shell) -> None:
    with proxmox.connect(shell, by_api(sandbox, "root@pam!full")) as root:
        made = post("nodes", "pve", "lxc", 202, "snapshot", snapname="theirs")
        upid = root.run(made, "the snapshot").upid.text
        root.run(proxmox.delete("nodes", "pve", "lxc", 202, "snapshot", "theirs"), "removing it")
    with proxmox.connect(shell, by_api(sandbox, "viewer@pve!audit")) as https:
        for word in ("status", "log"):
            with pytest.raises(PreflightError, match=r"lacks Sys.Audit on /nodes/pve"):
                https.get("nodes", "pve", "tasks", upid, word)


def test_the_commands_that_are_named_do_mend_it(sandbox: SandboxState, shell: Shell) -> None:
    from dflash_ops import containers
    from dflash_ops.command import Command, Container

    bare = Container(by_api(sandbox, "bot@pve!bare"), 200)
    with pytest.raises(PreflightError, match=r"the token bot@pve!bare may see no container") as caught:
        containers.status(shell, bare)
    commands = caught.value.next.removeprefix("on the host, as root: ").replace("/vms ", "/vms/200 ")
    try:
        shell.run(by_ssh(sandbox), Command(("sh", "-c", f"set -e; {commands}")), check=True)
        assert containers.status(shell, bare).status == "running"
    finally:
        undo = commands.split("; ")[1:]
        for line in undo:
            shell.run(by_ssh(sandbox), Command(("sh", "-c", line.replace("acl modify", "acl delete"))))


def test_another_certificate_is_refused_with_both_fingerprints(sandbox: SandboxState, shell: Shell) -> None:
    ca = proxmox_https._fingerprints(sandbox.api_ca)[0]
    with proxmox.connect(shell, by_api(sandbox)) as https:
        (own,) = {it["ssl_fingerprint"] for it in https.get("nodes") if it["node"] == "pve"}
    with proxmox.connect(shell, by_api(sandbox, ca=None, fingerprint=own)) as pinned:
        assert pinned.get("version")
    for keys, expected in (({}, ca), ({"ca": None, "fingerprint": own}, own)):
        with (
            wrong(sandbox, certificate="other"),
            proxmox.connect(shell, by_api(sandbox, **keys)) as https,
            pytest.raises(HostKeyError) as caught,
        ):
            https.get("version")
        found = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", str(caught.value))
        assert found[0] == expected and len(set(found)) == 2


# -- slow, dying, something else


def test_a_slow_api_is_waited_for_and_given_up_in_time(sandbox: SandboxState, shell: Shell, soak: bool) -> None:
    with wrong(sandbox, delay=4.0 if soak else 0.4), proxmox.connect(shell, by_api(sandbox)) as https:
        assert https.get("version")["release"]
        https._way._seconds = 0.2  # type: ignore[attr-defined]
        https._way.close()
        with pytest.raises(TimedOutError, match=r"no answer to GET /version in 0.2 s.*pveproxy"):
            https.get("version")


def test_a_dying_api_and_a_proxy_in_between(sandbox: SandboxState, shell: Shell) -> None:
    with proxmox.connect(shell, by_api(sandbox)) as https:
        with (
            wrong(sandbox, dies="GET /nodes"),
            pytest.raises(LinkLostError, match="broke off while it answered GET /nod"),
        ):
            https.get("nodes")
        with (
            wrong(sandbox, garbage="GET /version"),
            pytest.raises(OpsError, match="what answers is not the Proxmox VE API"),
        ):
            https.get("version")
        with wrong(sandbox, dies="POST .*"), pytest.raises(LinkLostError, match="it may have happened"):
            https.run(post("nodes", "pve", "lxc", 299, "status", "start"), "starting it")


def test_without_a_token_pvesh_is_asked(sandbox: SandboxState, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P_TOKEN", raising=False)
    with proxmox.connect(shell, by_api(sandbox, token_file=None, token_env="P_TOKEN")) as it:
        assert it.by_pvesh and it.get("version")["release"]


def test_the_ssh_configurations_address_is_the_apis(sandbox: SandboxState, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host lab\n  HostName 127.0.0.1\n")
    host = by_api(sandbox)
    assert host.api is not None
    alias = replace(host, address="lab", ssh_config=tmp_path / "config", api=replace(host.api, address=None))
    with proxmox.connect(shell, alias) as https:
        assert https.get("version")["release"] and https.asked.where == f"https://127.0.0.1:{sandbox.api_port}"


def test_ctrl_c_ends_the_waiting_and_says_that_the_task_goes_on(node: Identity) -> None:
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        if line == "one":
            raise KeyboardInterrupt

    with scripted(node, data(UPID), RUNNING, lines("one")) as api, pytest.raises(KeyboardInterrupt):
        api.run(START, "starting it", on_log=hear)
    assert heard == ["one", f"its task goes on there; on the host: pvesh get /nodes/pve/tasks/{UPID}/log"]


def test_pvesh_by_sudo(sandbox: SandboxState, shell: Shell) -> None:
    ops = replace(by_ssh(sandbox), name="ops", user="ops")
    rules = Path(f"/proc/{sandbox.init_pid}/root/etc/sudoers.d/ops")
    before = rules.read_text()
    with proxmox.connect(shell, ops) as it, pytest.raises(PreflightError, match="sudo does not let us ask pvesh"):
        it.get("version")
    try:
        for allowed in ("ALL", "/usr/bin/pvesh"):
            rules.write_text(f"ops ALL=(root) NOPASSWD: {allowed}\n")
            with Shell() as fresh, proxmox.connect(fresh, ops) as it:
                assert it.get("version")["release"]
                with pytest.raises(OpsError, match="CT 200 already running"):
                    it.run(post("nodes", "pve", "lxc", 200, "status", "start"), "starting it")
    finally:
        rules.write_text(before)
