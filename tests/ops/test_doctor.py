"""doctor: each trap is found, with its evidence and what mends it; on made-up facts, and for real in the sandbox."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_scenes
import pytest
from conftest import Box, write_inventory
from in_container import folder_of, folder_of_host
from in_process import InProcess
from test_gpus import UUIDS, full_line

from dflash_ops import checks, doctor, gpu_join, status
from dflash_ops.checks import Check, Facts
from dflash_ops.command import Command, Container, Host
from dflash_ops.remote import doctor as remote_doctor
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

LAB = Container(Host("lab", "lab"), 200, gpus=(0,))
CONF = "memory: 65536\ndev0: /dev/nvidia0,mode=0666\ndev1: /dev/nvidiactl,mode=0666\ndev2: /dev/nvidia-uvm,mode=0666\n"
DISK = {"folder": "/opt", "free": 100 << 30, "size": 200 << 30, "inodes_free": 10**6, "inodes": 10**7}
SMI = {"code": 0, "out": "NVIDIA-SMI version  : 580.1.2\nDRIVER version      : 580.1.2\n", "why": ""}
NODES: dict[str, dict[str, Any]] = {
    "nvidia0": {"major": 195, "minor": 0, "refused": ""},
    "nvidiactl": {"major": 195, "minor": 255, "refused": ""},
    "nvidia-uvm": {"major": 511, "minor": 0, "refused": ""},
}


def found(out: str) -> dict[str, Any]:
    return {"code": 0, "out": out, "why": ""}


def facts() -> dict[str, Any]:
    """All is well."""
    programs = dict.fromkeys(("pct", "lxc-attach", "flock", "tmux", "tar"), "/usr/bin/it")
    both = {"now": 0.0, "kernel": "6.14", "python": "3.11.2", "programs": programs, "devices": NODES, "stale": []}
    host = {
        **both,
        "asked": {"smi": SMI, "packages": found("pve-container 6.1.10\nlxc-pve 6.0.5-1\n")},
        "majors": {"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": 239},
        "driver": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1.2  Release Build\n",
        "config": CONF,
        "nouveau": False,
        "disk": DISK,
    }
    inside = {
        **both,
        "asked": {"smi": SMI, "charmap": found("UTF-8\n")},
        "driver": None,
        "libcuda": ["580.1.2"],
        "disk": DISK,
        "shm": {**DISK, "free": 8 << 30},
        "memory": 64 << 30,
        "orphans": {},
        "encoding": "utf-8",
    }
    told = {"host": host, "inside": inside, "skew": 0.0, "smi": {}, "order": f"0, {UUIDS[0]}\n"}
    return json.loads(json.dumps(told))  # nothing is shared between its parts


def judged(told: dict[str, Any], container: Container = LAB) -> list[Check]:
    def answer(out: str, **more: Any) -> dict[str, Any]:
        return {"code": 0, "out": out, "why": "", **more}

    smi = {"gpus": answer(full_line(**told["smi"])), "apps": answer("")}
    view = {"pid_namespace": "a", "smi": smi, "minors": {}, "holders": [], "runs": [], "xids": [], "now": 1.0}
    within = {"pid_namespace": "b", "smi": {"gpus": answer(told["order"])}, "minors": {}, "holders": [], "runs": []}
    gpus = gpu_join.join("lab", view, {200: within}, 200)
    return checks.judge(container, Facts(told["host"], told["inside"], gpus, told["skew"], "container 200 is stopped"))


def test_all_is_well() -> None:
    assert {(check.name, check.level) for check in judged(facts()) if check.level != "ok"} == set()


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one fact: `host.programs.pct`."""

    def change(told: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            told = told[name]
        told[last] = value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            told = told[name]
        del told[last]

    return change


BY_HAND = "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c {}:* rwm\n"
TRAPS: list[tuple[Callable[[dict[str, Any]], None], str, str, str]] = [
    (put("skew", -120.0), "clock", "warning", "chronyc"),
    (put("host/asked/packages", found("pve-container 4.1\nlxc-pve 4.0.9-4\n")), "pct", "warning", "upgrade"),
    (put("host/programs/pct", None), "pct", "failure", "address"),
    (put("host/programs/lxc-attach", None), "lxc-attach", "note", "lxc-pve"),
    (put("host/programs/flock", None), "flock", "failure", "util-linux"),
    (put("host/disk/free", 1 << 20), "staging disk", "failure", "df -h"),
    (put("host/stale", [{"file": "/var/tmp/x", "age_s": 1e6}]), "stale staging", "note", "--fix"),
    (put("host/nouveau", True), "nouveau", "failure", "blacklist nouveau"),
    (drop("host/devices/nvidia-uvm"), "nvidia-uvm", "failure", "nvidia-modprobe -c0 -u"),
    (put("inside/libcuda", []), "user libraries", "ok", ""),  # nvidia-smi has the version too
    (put("inside/libcuda", ["570.9.9"]), "user libraries", "failure", "580.1.2.run --no-kernel-module"),
    (
        put("inside/asked/smi/out", "Failed to initialize NVML: Driver/library version mismatch\n"),
        "user libraries",
        "failure",
        "580.1.2.run",
    ),
    (drop("inside/devices/nvidia-uvm"), "nvidia-uvm", "failure", "--dev3 /dev/nvidia-uvm"),
    (put("inside/devices/nvidia-uvm/major", 508), "stale node", "failure", "pct reboot 200"),
    (put("inside/devices/nvidia0/major", 511), "stale node", "failure", "pct reboot 200"),
    (put("inside/devices/nvidia0/refused", "Operation not permitted"), "node", "failure", "mode=0666"),
    (put("host/config", BY_HAND.format(508)), "container config", "failure", "c 511:* rwm"),
    (put("host/config", BY_HAND.format(511)), "container config", "note", "dev0"),
    (put("host/config", BY_HAND.format(511).replace("cgroup2", "cgroup")), "container config", "warning", "cgroup2"),
    (drop("inside/devices/nvidia0"), "GPU count", "failure", "`gpus` in the inventory"),
    (put("order", ""), "GPU order", "failure", "nvidia-smi -L"),
    (put("smi", {"index": "1"}), "GPU order", "warning", "gpus = [1]"),
    (put("inside/shm/free", 1 << 20), "/dev/shm", "failure", "remount"),
    (put("inside/shm/free", 512 << 20), "/dev/shm", "warning", "remount"),
    (put("inside/memory", 1 << 30), "memory limit", "failure", "pct set 200 --memory"),
    (put("inside/memory", 4 << 30), "memory limit", "warning", "pct set 200 --memory"),
    (put("inside/disk/free", 1 << 20), "disk", "failure", "prune"),
    (put("host/user", "ops"), "sudo", "note", "ops ALL=(root) NOPASSWD: ALL"),
    (put("host/lacks_pvesh", "ops"), "pvesh", "note", "ops ALL=(root) NOPASSWD: /usr/bin/pvesh"),
    (put("inside/disk/free", 5 << 30), "disk", "warning", "dflash-ops prune --keep 3, or a larger disk (df"),
    (
        put("inside/disk", {"folder": "/", "free": 11 << 30, "size": 12 << 30, "inodes_free": 10**6}),
        "disk",
        "warning",
        "a larger disk (df",
    ),
    (put("inside/disk/inodes_free", 5), "disk inodes", "failure", "df -i"),
    (put("inside/python", "3.8.10"), "python", "failure", "3.9"),
    (put("inside/programs/tmux", None), "tmux", "failure", "apt-get install tmux"),
    (put("inside/programs/tar", None), "tar", "warning", "apt-get install tar"),
    (put("inside/orphans", {"a-20261129-120000-abcd": [7]}), "orphaned run", "warning", "train stop a-20261129"),
    (put("inside", None), "container", "failure", "pct start 200"),
    (put("smi", {"persistence_mode": "Disabled"}), "persistence", "warning", "nvidia-persistenced"),
    (put("smi", {"power.limit": "300", "power.default_limit": "700"}), "power cap", "warning", "-pl 700"),
    (put("smi", {"pcie.link.width.current": "4", "pcie.link.width.max": "16"}), "PCIe width", "warning", "lspci"),
    (put("smi", {"gpu_recovery_action": "Reset"}), "health", "failure", "gpu-status"),
    (
        put("inside/asked/smi", {"code": None, "out": "", "why": "nvidia-smi gave no answer in 8 s"}),
        "nvidia-smi",
        "failure",
        "restart the host",
    ),
    (put("inside/devices/nvidia0/refused", "no answer in 15 s"), "node", "failure", "restart the host"),
]


@pytest.mark.parametrize(("trap", "name", "level", "fix"), TRAPS, ids=lambda it: it if isinstance(it, str) else "")
def test_each_trap_is_found_and_nothing_else(
    trap: Callable[[dict[str, Any]], None], name: str, level: str, fix: str
) -> None:
    told = facts()
    trap(told)
    wrong = [check for check in judged(told) if check.level != "ok"]
    assert [(check.name, check.level) for check in wrong] == ([(name, level)] if level != "ok" else [])
    assert all(fix in (check.fix or "") and check.evidence for check in wrong)


def test_no_driver_and_an_encoding_without_utf8() -> None:
    told = facts()
    told["host"]["driver"], told["host"]["asked"]["smi"] = None, {"code": 9, "out": "", "why": ""}
    told["inside"]["encoding"], told["inside"]["asked"]["charmap"] = "ascii", found("ANSI_X3.4-1968\n")
    wrong = {check.name: check.level for check in judged(told) if check.level != "ok"}
    assert wrong == {"driver": "failure", "locale": "warning"}


def test_where_no_gpus_are_declared_nothing_is_locked() -> None:
    (check,) = (check for check in judged(facts(), Container(LAB.host, 200)) if check.level != "ok")
    assert (check.name, check.level, check.fix) == ("GPU locks", "note", "in the inventory: gpus = [0]")


def test_without_gpus_nothing_is_asked_of_them() -> None:
    told = facts()
    told["host"].update(config="memory: 1\n", driver=None, nouveau=True, devices={})
    told["inside"].update(devices={}, libcuda=[], asked={"smi": found(""), "charmap": found("UTF-8")})
    assert [check.name for check in judged(told, Container(LAB.host, 200)) if check.level != "ok"] == []


# -- for real

HOLD = f"""
import sys
exec({Path(gpu_scenes.__file__).read_text()!r}.partition('if __name__')[0])
if os.fork() == 0:
    open_gpu(0, 200)
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
open_gpu(0, 300)
print("held", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_deploy_left_is_found_and_removed(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    box = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox)
    cli, path = InProcess(box.inventory), box.container.path
    incoming = folder_of(box.container) / "incoming"
    stage = folder_of_host(box.host) / "var" / "tmp" / "dflash-ops-stage-old"
    for folder in (incoming, incoming.with_name("runs"), stage):
        folder.mkdir(parents=True)
    for file in (incoming / "new", incoming / "old"):
        file.touch()
    for old in (incoming / "old", stage):
        os.utime(old, (time.time() - 3 * 86400,) * 2)
    done = cli("doctor", "--json")
    document = json.loads(done.stdout)
    by_name = {(check["name"], check["where"]): check for check in document["checks"]}
    assert document["ok"] == (done.returncode == 0)
    assert [check for check in document["checks"] if check["level"] == "failure"] == []
    left = by_name["stale staging", str(box.container)]
    assert left["level"] == "note" and f"{path}/incoming/old" in left["evidence"]
    assert "dflash-ops-stage-old" in by_name["stale staging", "box"]["evidence"]
    assert by_name["GPU order", str(box.container)]["level"] == "ok"

    fixed = cli("doctor", "--fix")
    text = fixed.stdout.decode()
    assert fixed.returncode == 0
    assert f"removed {path}/incoming/old" in text and "removed /var/tmp/dflash-ops-stage-old" in text
    assert "nothing would stop a run" in text and "stale staging (" not in text
    assert [it.name for it in incoming.iterdir()] == ["new"]


def test_a_stopped_container_is_a_failure(sandbox: SandboxState, tmp_path: Path) -> None:
    done = InProcess(write_inventory(tmp_path, sandbox.name, vmid=202))("doctor")
    assert done.returncode == 6
    told = done.stdout.decode()
    assert "pct start 202" in told and "a run would not work" in told
    assert told.count("is stopped") == 1  # and not again by what asked for GPUs


def test_as_a_user_who_may_do_little_on_the_host(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    """pct is found and asked for the config; what of GPUs can't be seen is said, and no living process called dead."""
    own = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox).container
    ours = replace(own, host=replace(own.host, user="ops", api=None))
    hold = Command((own.python, "-IS", "-c", HOLD))
    with shell.converse(own, hold) as talk:
        assert talk.hear() == b"held"
        found = doctor.doctor(shell, ours)
        seen = status.gpu_status(shell, ours.host, [ours], ours)
        whole = status.gpu_status(shell, own.host, [own], own)
    by_name = {check.name: check for check in found.checks if check.level != "failure"}
    assert by_name["pct"].level == "ok" and by_name["sudo"].level == "note" and by_name["pvesh"].level == "note"
    assert "dev entries" in by_name["container config"].evidence
    (problem,) = (it for it in seen.problems if "can't be read by this user" in it)
    assert problem.startswith("box: what ")
    assert [replace(it, age_s=0) for it in seen.processes] == [replace(it, age_s=0) for it in whole.processes]
    rows = [(it.kind, it.owner, it.vmid, it.used_mib, bool(it.held_by)) for it in seen.processes]
    assert sorted(rows, key=str) == [
        ("container", "unknown", 200, 300.0, False),
        ("container", "unknown", 200, None, False),  # its parent is dead: that only the container can tell
        ("dead", "unknown", 200, 200.0, True),
    ]


def test_as_a_user_who_may_do_everything_by_sudo(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    own = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox).container
    ours = replace(own, host=replace(own.host, user="ops"))
    file = "/etc/sudoers.d/ops"
    before = shell.run(own.host, Command(("cat", file)), check=True).out
    try:
        shell.run(own.host, Command(("tee", file), b"ops ALL=(ALL) NOPASSWD: ALL\n"), check=True)
        with Shell() as another:
            assert status.gpu_status(another, ours.host, [ours], ours).problems == ()
            stage = "/var/tmp/dflash-ops-stage-of-ops"
            make = f"mkdir {stage} && touch -d '3 days ago' {stage}"
            another.run(ours.host, Command(("sh", "-c", make)), check=True)
            found = doctor.doctor(another, ours, fix=True)
            assert found.fixed == (f"box: removed {stage}",)
            assert not {"sudo", "pvesh"} & {check.name for check in found.checks}
    finally:
        shell.run(own.host, Command(("tee", file), before), check=True)


def test_what_somebody_holds_is_not_stale(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    held, link = tmp_path / "incoming" / "held", tmp_path / "incoming" / "link"
    held.touch()
    link.symlink_to("/nowhere")
    old = time.time() - 3 * 86400
    os.utime(held, (old, old))
    os.utime(link, (old, old), follow_symlinks=False)
    with held.open() as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        assert remote_doctor.stale_files(tmp_path) == [str(link)]
    assert remote_doctor.stale_files(tmp_path) == [str(held), str(link)]


def test_a_gpu_that_the_container_lacks_is_a_failure() -> None:
    told = facts()
    two = replace(LAB, gpus=(0, 1))
    told["inside"]["devices"]["nvidia1"] = {"major": 195, "minor": 1, "refused": ""}
    wrong = [check for check in judged(told, two) if check.level != "ok"]
    assert [(check.name, check.level) for check in wrong] == [("GPU order", "failure")]
    assert "None" not in wrong[0].evidence + (wrong[0].fix or "")


def test_a_device_that_holds_who_opens_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, gone = tmp_path / "nvidia0", tmp_path / "nvidia1"
    file.touch()
    state = file.stat()
    opening = remote_doctor.Opening({str(file): state, str(gone): state})
    assert opening.refused() == {str(file): "", str(gone): "No such file or directory"}
    whole = os.open

    def hangs(path: str, *words: Any, **more: Any) -> int:
        if path == str(file):
            signal.pause()
        return whole(path, *words, **more)

    monkeypatch.setattr(os, "open", hangs)
    opening = remote_doctor.Opening({str(file): state}, 0.1)
    assert opening.refused() == {str(file): "no answer in 0 s"}
    (child,) = opening._children.values()
    os.waitpid(child, 0)  # it was killed
