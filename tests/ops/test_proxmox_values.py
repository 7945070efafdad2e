"""What Proxmox VE says, read as values: ids of tasks, GPUs of configurations, tokens, refusals as sentences."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import proxmox_faults, proxmox_values
from dflash_ops.command import Api
from dflash_ops.errors import BusyError, ConfigError, NotFoundError, OpsError, PreflightError, UnreachableError
from dflash_ops.proxmox_faults import Asked
from dflash_ops.proxmox_gpus import index_of_minors, passed_gpus
from dflash_ops.proxmox_token import read_token
from dflash_ops.proxmox_values import Call, Upid

SECRET = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
TOKEN = Asked("https://lab:8006", "bot@pve!dflash")
ROOT = Asked("lab, by pvesh", None)
SAMPLES = Path(__file__).parents[1] / "samples"


# -- ids of tasks


names = st.from_regex(r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?", fullmatch=True)
fields = st.text(st.characters(exclude_characters=":", exclude_categories=["Z", "C"]), min_size=1, max_size=20)


@given(names, st.integers(0, 2**32 - 1), st.integers(0, 2**36 - 1), st.integers(0, 2**32 - 1), fields, fields, fields)
def test_an_id_of_a_task_is_taken_apart(
    node: str, pid: int, pstart: int, start: int, kind: str, vmid: str, user: str
) -> None:
    text = f"UPID:{node}:{pid:08X}:{pstart:08X}:{start:08X}:{kind}:{vmid}:{user}:"
    assert Upid.parse(text) == Upid(text, node, kind, vmid, user, start)
    for broken in (text[:-1], text + "x", text[1:], text.replace(":", ";"), " " + text, text + "\n"):
        with pytest.raises(ValueError):
            Upid.parse(broken)


@given(st.text())
def test_other_text_is_no_id_of_a_task(text: str) -> None:
    with pytest.raises(ValueError):
        Upid.parse(text)


def test_a_tokens_task_says_whose_it_is() -> None:
    upid = Upid.parse("UPID:pve:0003F1A2:01C3B8F0:674A5E10:vzstart:200:bot@pve!dflash:")
    assert (upid.type, upid.id, upid.user) == ("vzstart", "200", "bot@pve!dflash")


# -- what pvesh prints


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('[{"vmid":200}]\n', [{"vmid": 200}]),
        ('Welcome to lab!\n[not json\n[{"vmid":200}]\n', [{"vmid": 200}]),
        ('starting CT 200\n"UPID:pve:0:"\n', "UPID:pve:0:"),
        ('{\n  "a": 1\n}\n', {"a": 1}),
        ("null\n", None),
        ("", None),
    ],
)
def test_pveshs_json_is_found_behind_other_words(text: str, data: object) -> None:
    assert proxmox_values.printed_json(text) == data


def test_what_is_no_json_is_said() -> None:
    with pytest.raises(ValueError, match="no JSON"):
        proxmox_values.printed_json("┌─────┐\n│ key │\n")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda it: st.lists(it) | st.dictionaries(st.text(), it)
    )
)
def test_no_answer_of_another_shape_ends_in_a_traceback(answer: Any) -> None:
    proxmox_values.containers(answer)
    proxmox_values.snapshots(answer)
    proxmox_values.log_lines(answer)
    proxmox_values.rights_on_containers(answer)


def test_numbers_may_be_text_and_rows_without_one_are_none() -> None:
    rows = [{"type": "lxc", "vmid": vmid, "node": "pve"} for vmid in ("200", "abc", None, [], "9" * 5000)]
    assert [it.vmid for it in proxmox_values.containers(rows)] == [200]
    assert proxmox_values.log_lines([{"n": "x", "t": "a"}, {"n": "2", "t": "b"}]) == [(2, "b")]
    with pytest.raises(ValueError, match="no JSON"):
        proxmox_values.printed_json("[" * 100_000)


def test_snapshots_come_oldest_first_with_their_time() -> None:
    listed = [
        {"name": "current", "description": "You are here!", "parent": "b"},
        {"name": "b", "snaptime": 1796002553, "description": "x\n", "parent": "a"},
        {"name": "a", "snaptime": 1796002552},
        {"name": "odd", "snaptime": "soon"},
    ]
    found = proxmox_values.snapshots(listed)
    assert [(it.name, it.created_at, it.moment) for it in found] == [
        ("odd", None, 0), ("a", "2026-11-30T01:35:52Z", 1796002552), ("b", "2026-11-30T01:35:53Z", 1796002553),
    ]  # fmt: skip
    assert (found[2].description, found[2].parent, found[1].parent) == ("x", "a", None)


# -- GPUs


@pytest.mark.parametrize("file", sorted((SAMPLES / "proxmox_gpus.config").glob("*.json")), ids=lambda file: file.stem)
def test_the_gpus_of_a_configuration(file: Path) -> None:
    sample = json.loads(file.read_text())
    found = passed_gpus(sample["config"])
    assert {
        "minors": list(found.minors),
        "caps": list(found.caps),
        "mig": found.mig,
        "hook": found.hook,
        "problems": list(found.problems),
    } == sample["found"]


def test_a_cards_index_counts_by_its_place_on_the_bus() -> None:
    text = (
        "Model: \t\t NVIDIA H200\nBus Location: \t 0000:c1:00.0\nDevice Minor: \t 0\n"
        "Model: \t\t NVIDIA H200\nBus Location: \t 0000:0A:00.0\nDevice Minor: \t 1\n"
    )
    assert index_of_minors(text) == {1: 0, 0: 1}
    assert index_of_minors("") == {}


# -- tokens


def api(**keys: Any) -> Api:
    return Api(**{"user": "bot@pve", "token_name": "dflash", "token_env": "P_TOKEN", **keys})


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[[str, int], Path]:
    def write(text: str, mode: int = 0o600) -> Path:
        file = tmp_path / "token"
        file.write_text(text)
        file.chmod(mode)
        return file

    return write


@pytest.mark.parametrize(
    "whole", [SECRET, "\ufeff" + SECRET, f"bot@pve!dflash={SECRET}", f"PVEAPIToken=bot@pve!dflash={SECRET}\n"]
)
def test_a_token_comes_from_its_file_else_from_its_variable(
    whole: str, token_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P_TOKEN", "\ufeff" + SECRET.upper())
    found = read_token(api(token_file=token_file(whole)), "lab")
    assert found is not None and (found.id, found.secret) == ("bot@pve!dflash", SECRET)
    assert SECRET not in repr(found)
    other = read_token(api(), "lab")
    assert other is not None and other.secret == SECRET.upper()
    monkeypatch.setenv("P_TOKEN", f"ldap.user@corp@ad.lan!t2={SECRET}")
    other = read_token(api(user=None, token_name=None), "lab")
    assert other is not None and (other.user, other.name) == ("ldap.user@corp@ad.lan", "t2")


def test_no_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_token(api(), "lab") is None
    monkeypatch.setenv("P_TOKEN", " ")
    assert read_token(api(), "lab") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no token"),
        ("x" * 36, "no token"),
        (SECRET + "\nX-Evil: 1", "no token"),
        (SECRET[:-1] + "é", "no token"),
        (f"bot={SECRET}", "no token"),
        (f"bot@pve!a b={SECRET}", "no token"),
        (f"eve@pve!dflash={SECRET}", "user"),
        (f"bot@pve!other={SECRET}", "token_name"),
    ],
)
def test_what_is_no_token_is_refused_without_a_word_of_it(
    text: str, what: str, token_file: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        read_token(api(token_file=token_file(text)), "lab")
    for part in re.findall(r"[0-9a-f]{8,}|x{36}", text):
        assert part not in str(caught.value)


def test_a_secret_alone_needs_a_name(token_file: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"`user` and `token_name` in \[hosts.lab.api\]"):
        read_token(api(user=None, token_file=token_file(SECRET)), "lab")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_read_is_refused(mode: int, token_file: Callable[..., Path]) -> None:
    file = token_file(SECRET, mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        read_token(api(token_file=file), "lab")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, what in (("fifo", "no file"), ("", "no file"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=what):
            read_token(api(token_file=tmp_path / name), "lab")


# -- refusals


def call(*path: str, method: proxmox_values.Method = "get") -> Call:
    return Call(method, path)


STATUS = call("nodes", "pve", "lxc", "201", "status", "current")


@pytest.mark.parametrize(
    ("status", "message", "kind", "words"),
    [
        (401, "", UnreachableError, "does not know the token bot@pve!dflash.*pveum user token list bot@pve"),
        (403, "Permission check failed (/vms/201, VM.Audit)", PreflightError,
         "lacks VM.Audit on /vms/201.*no container 201.*pveum acl modify /vms/201 --users bot@pve .*"
         "pveum acl modify /vms/201 --tokens 'bot@pve!dflash'"),
        (403, "Permission check failed (/nodes/pve, Sys.Audit)", PreflightError,
         r"lacks Sys.Audit on /nodes/pve .*--privs 'Sys.Audit' \|\| pveum role modify .*--append 1"
         r".*acl modify /nodes/pve"),
        (403, "Permission check failed (/vms/201, VM.Snapshot|VM.Snapshot.Rollback)", PreflightError,
         r"lacks VM.Snapshot or VM.Snapshot.Rollback on /vms/201"),
        (403, "Permission check failed (user != root@pam)", PreflightError, "may not GET /nodes/pve.*root@pam.*pvesh"),
        (500, "Configuration file 'nodes/pve/lxc/201.conf' does not exist", NotFoundError,
         "no container 201 on node pve"),
        (500, "hostname lookup 'pv' failed - failed to get address info for: pv: Name or service not known",
         NotFoundError, "no node pv .*`node`"),
        (501, "Method 'GET /nodes/pve/lxc/201/exec' not implemented", OpsError, "no such call: GET /nodes/pve"),
        (595, "No route to host", UnreachableError, "node pve does not answer.*595 No route to host"),
        (596, "Broken pipe", UnreachableError, "node pve does not answer"),
        (599, "Too many redirections", UnreachableError, "node pve does not answer"),
        (400, "Parameter verification failed.", OpsError, "foo: property is not defined in schema"),
        (500, "CT is locked (backup)", BusyError, r"container 201 is locked \(backup\).*pct unlock 201"),
        (500, "can't lock file '/run/lock/lxc/pve-config-201.lock' - got timeout", BusyError, "another command holds"),
        (502, "Bad Gateway", UnreachableError, "something between us"),
        (500, "boom", OpsError, "failed .*: boom"),
    ],
)  # fmt: skip
def test_each_refusal_is_a_sentence(status: int, message: str, kind: type[OpsError], words: str) -> None:
    errors = {"foo": "property is not defined in schema"} if status == 400 else {"errors": b""}
    error = proxmox_faults.refused(TOKEN, STATUS, status, message + "\n", errors)
    assert type(error) is kind and re.search(words, str(error)), str(error)
    assert "\n" not in error.line()


@pytest.mark.parametrize(
    ("code", "err", "kind", "words"),
    [
        (2, "Configuration file 'nodes/pve/lxc/201.conf' does not exist\n", NotFoundError, "no container 201 on node"),
        (255, "No 'get' handler defined for '/nodes/pve/lxc/201/exec'\n", OpsError, "no such call"),
        (2, "400 Parameter verification failed.\nfoo: property is not defined\npvesh get <api_path> [OPTIONS]\n",
         OpsError,
         "Parameter verification failed.; foo: property is not defined$"),
        (255, "proxy handler failed: command 'ssh -T pve' failed: exit code 255\n", UnreachableError, "node pve does"),
        (255, "hostname lookup 'pv' failed - failed to get address info\n", NotFoundError, "no node pv"),
        (127, "bash: line 1: pvesh: command not found\n", PreflightError, "the host has no pvesh"),
        (255, "please run as root\n", PreflightError, "pvesh needs root"),
        (1, "sudo: a password is required\n", PreflightError, "sudo does not let us.*visudo.*NOPASSWD: /usr/bin/pvesh"),
        (111, "ipcc_send_rec[1] failed: Connection refused\nUnable to load access control list: Connection refused\n",
         PreflightError, "cluster file system does not run"),
        (255, "perl: warning: Setting locale failed.\nCT is locked (snapshot)\n", BusyError, r"locked \(snapshot\)"),
        (1, "", OpsError, "exit code 1, no output"),
    ],
)  # fmt: skip
def test_pveshs_refusals_are_the_same_sentences(code: int, err: str, kind: type[OpsError], words: str) -> None:
    error = proxmox_faults.pvesh_refused(ROOT, STATUS, code, err)
    assert type(error) is kind and re.search(words, str(error)), str(error)


@pytest.mark.parametrize(
    ("permissions", "sees"),
    [
        ({"/vms/200": {"VM.Audit": 1}}, True),
        ({"/": {"VM.Audit": 0}}, True),
        ({}, False),
        ({"/nodes": {"Sys.Audit": 1}, "/vms/200": {"VM.PowerMgmt": 1}}, False),
    ],
)
def test_why_a_list_is_empty(permissions: dict[str, dict[str, int]], sees: bool) -> None:
    error = proxmox_faults.sees_nothing(TOKEN, permissions)
    assert (error is None) == sees
    if error is not None:
        assert "VM.Audit on no path" in str(error) and "--tokens 'bot@pve!dflash'" in str(error)
    assert proxmox_faults.sees_nothing(ROOT, permissions) is None


def test_a_failed_task_tells_its_last_lines_and_what_to_do() -> None:
    upid = Upid.parse("UPID:pve:0003F1A2:01C3B8F0:674A5E10:vzstart:200:root@pam:")
    why = "startup for container '200' failed"
    log = ["one", "two", "lxc_init: 845 Failed", "cgroups", why, f"TASK ERROR: {why}"]
    error = proxmox_faults.task_failed(TOKEN, "starting container 200", upid, why, log)
    assert "its log ends: two / lxc_init: 845 Failed / cgroups" in str(error)
    assert "pvesh get /nodes/pve/tasks/UPID:pve" in str(error)
    no_uvm = proxmox_faults.task_failed(TOKEN, "x", upid, "Device /dev/nvidia-uvm does not exist", [])
    assert "nvidia-modprobe -c0 -u" in str(no_uvm)
    assert isinstance(proxmox_faults.task_failed(TOKEN, "x", upid, "CT is locked (backup)", []), BusyError)
    reboot = Upid.parse(upid.text.replace("vzstart", "vzreboot"))
    assert "or dflash-ops ct stop --kill" in str(proxmox_faults.task_failed(TOKEN, "x", reboot, "did not stop", []))
