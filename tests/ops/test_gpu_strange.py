"""Machines that behave badly, seen by gpu-status, doctor and a start: lost and divided GPUs, many of them, stuck
processes, containers without Python, inventories that are wrong."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_in
from conftest import Box, write_inventory
from stand_in import exists, retry_until
from test_gpus import UUIDS, container_view, full_line, holder, host_view

from dflash_ops import doctor, gpu_join, gpus, render_gpus, status
from dflash_ops.command import Command
from dflash_ops.remote import bundle, gpuasked, gpuproof, gpuview, preflight, probe, processes
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

LOST = "Unable to determine the device handle for GPU1: 0000:02:00.0: GPU is lost.  Reboot the system"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, code: int, gpu_rows: str, app_rows: str = "") -> None:
    """An nvidia-smi that says these rows and ends so."""
    program = folder / "nvidia-smi"
    rows = f'case "$1" in --query-gpu*) printf "%s" "{gpu_rows}";; *) printf "%s" "{app_rows}";; esac'
    program.write_text(f"#!/bin/sh\n{rows}\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# -- a start


def test_a_lost_gpu_does_not_keep_a_run_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = f"0, {UUIDS[0]}, 00000000:01:00.0, 9, 24576\n"
    apps = f"{UUIDS[0]}, {2**22 + 5}, 4\n"
    smi(tmp_path, monkeypatch, code=15, gpu_rows=f"{row}{LOST}\n", app_rows=f"{LOST}\n{apps}")
    picture = gpuproof.look()
    assert [card.index for card in picture.cards] == [0] and picture.why == ""
    assert picture.charges == ((UUIDS[0], 2**22 + 5, 4.0),)
    parameters = {"gpus": [1], "locks": "meant", "python": "python3"}
    assert preflight.unlocked(parameters, picture) == {}
    with pytest.raises(preflight.Fault) as caught:
        preflight.check(tmp_path, {**parameters, "name": "a", "room_bytes": 0}, None, picture=picture)
    assert caught.value.parts["what"] == "there is no GPU 1"
    # With no row at all, and where the processes can't be told, nothing is known.
    smi(tmp_path, monkeypatch, code=9, gpu_rows="NVIDIA-SMI has failed because it couldn't communicate\n")
    assert "has failed" in gpuproof.look().why
    program = (
        (tmp_path / "nvidia-smi").read_text().replace("exit 9", 'case "$1" in --query-gpu*) exit 0;; esac; exit 9')
    )
    (tmp_path / "nvidia-smi").write_text(program.replace("NVIDIA-SMI has failed because it couldn't communicate", row))
    assert gpuproof.look().why == "nvidia-smi ended with 9"


# -- gpu-status


CARDS = [
    {"bus": f"0000:0{at + 1}:00.0", "minor": at, "uuid": uuid, "name": "NVIDIA X"} for at, uuid in enumerate(UUIDS[:2])
]
MINORS = {"0000:01:00.0": 0, "0000:02:00.0": 1}
HUNG = {"code": None, "out": "", "why": "nvidia-smi gave no answer in 10 s"}


def test_who_holds_the_gpus_of_a_driver_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    view = {**host_view(holders=(holder(2000, minors=[0, 1]),), minors=MINORS), "cards": CARDS}
    view["smi"] = {"gpus": HUNG, "apps": HUNG}
    told = gpu_join.join("lab", view, {200: container_view()})
    assert [(gpu.uuid, gpu.index, gpu.health) for gpu in told.gpus] == [(uuid, None, "sick") for uuid in UUIDS[:2]]
    assert [(it.pid, it.gpu_uuid, it.used_mib) for it in told.processes] == [(2000, uuid, None) for uuid in UUIDS[:2]]
    render_gpus.show_gpus(told)
    shown = capsys.readouterr().out
    assert f"GPU {UUIDS[0]}: nvidia-smi does not tell of it" in shown
    assert len([line for line in shown.split("\n") if line.strip().startswith(f"{UUIDS[0][:12]} ")]) == 2
    # Where the driver has no table either, its node stands for the GPU.
    told = gpu_join.join("lab", {**view, "cards": []}, {200: container_view()})
    assert [(it.pid, it.gpu_uuid) for it in told.processes] == [(2000, "/dev/nvidia0"), (2000, "/dev/nvidia1")]
    # Without an nvidia-smi nothing is known of them, and nothing bad either.
    view["smi"]["gpus"] = {"code": None, "out": "", "why": "nvidia-smi: No such file or directory"}
    assert gpu_join.join("lab", view, {}).gpus == ()


def test_a_gpu_without_a_uuid_is_lost_and_not_forgotten() -> None:
    view = {**host_view(minors=MINORS), "cards": CARDS}
    rows = view["smi"]["gpus"]["out"].replace(f"0, {UUIDS[0]}", "[Unknown Error], [Unknown Error]")
    view["smi"]["gpus"]["out"] = rows + rows.split("\n")[1] + "\n"  # and the other one twice
    told = gpu_join.join("lab", view, {})
    assert [(gpu.uuid, gpu.index, gpu.health) for gpu in told.gpus] == [(UUIDS[1], 1, "ok"), (UUIDS[0], None, "sick")]
    assert [it for it in told.problems if "[Unknown Error]" in it]


def test_a_name_with_commas_is_a_name() -> None:
    view = host_view()
    view["smi"]["gpus"]["out"] = view["smi"]["gpus"]["out"].replace("NVIDIA X", "NVIDIA, Odd,  X")
    told = gpu_join.join("lab", view, {})
    assert [(gpu.name, gpu.used_mib, gpu.health) for gpu in told.gpus] == [("NVIDIA, Odd, X", 0.0, "ok")] * 2
    assert told.problems == ()


def test_garbage_is_told_in_a_few_short_lines() -> None:
    view = host_view()
    view["smi"]["gpus"]["out"] = "".join(f"{'x' * 1000} {at}\n" for at in range(1000))
    problems = gpu_join.join("lab", view, {}).problems
    assert len(problems) <= 7 and max(map(len, problems)) < 300 and "995 lines more" in problems[-1]


def test_the_pid_there_is_the_containers_also_for_what_has_a_namespace_of_its_own() -> None:
    nested = holder(2000, namespace_pids=[2000, 70, 1], pid_namespace="pid:[9]", vmid=200)
    inside = container_view()
    inside["holders"] = [{"pid": 70, "start": 1, "owner": "earlier", "run_id": "a-20261129-120000-abcd"}]
    (told,) = gpu_join.join("lab", host_view(holders=(nested,)), {200: inside}).processes
    assert (told.container_pid, told.owner) == (70, "earlier")


def test_a_monitor_holds_no_memory_of_the_dead() -> None:
    words = "/usr/bin/nvidia-persistenced --user nvpd"
    monitor = holder(9, pid_namespace="pid:[1]", namespace_pids=[9], command=words)
    view = host_view(holders=(monitor,), apps=f"{UUIDS[0]}, 77, 1542, [Not Found]\n")
    (dead,) = gpu_join.join("lab", view, {}).processes
    assert (dead.kind, dead.held_by, dead.owner) == ("dead", (), "nobody")


def test_who_took_a_gpu_while_we_looked_around_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "holder", lambda process: {"pid": process.pid})
    out = f"GPU-1, {os.getpid()}, 5, python\nGPU-1, {2**22 + 5}, 5, x\nGPU-1, \u00b2, 5, x\n"
    assert gpuview._charged_and_unseen(out, 1, set()) == [{"pid": os.getpid()}]
    assert gpuview._charged_and_unseen(out, 1, {os.getpid()}) == []


def test_cards_by_the_drivers_table(tmp_path: Path) -> None:
    table, nodes = tmp_path / "gpus", tmp_path / "dev"
    nodes.mkdir()
    rows = [(UUIDS[0], "No"), ("GPU-????????-????-????-????-????????????", "No"), (UUIDS[1], "Yes"), (UUIDS[1], "No")]
    for at, (uuid, excluded) in enumerate(rows):
        folder = table / f"0000:0{at}:00.0"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA X\nGPU UUID: \t {uuid}\nDevice Minor: \t {at}\nGPU Excluded:\t {excluded}\n"
        (folder / "information").write_text(text)
    (nodes / "nvidia0").touch()  # the last one has no node here: it is not ours
    expected = {"bus": "0000:00:00.0", "minor": 0, "uuid": UUIDS[0], "name": "NVIDIA X"}
    assert probe.cards(table, nodes) == [expected]


def test_what_mig_instances_use_is_their_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    cut = full_line(**{"mig.mode.current": "Enabled", "utilization.gpu": "[N/A]"})
    whole = full_line(**{"index": "1", "uuid": UUIDS[1], "pci.bus_id": "00000000:02:00.0"})
    apps = "MIG-aaaa, 70, 100, python\nMIG-bbbb, 70, 50, python\nMIG-cccc, 80, 25, python\n"
    apps += f"{UUIDS[1]}, 90, 7, python\n"
    view = {**host_view(holders=(holder(70, minors=[0]), holder(90, minors=[1]))), "minors": {}}
    view["smi"]["gpus"] = {"code": 0, "out": cut + whole, "why": "", "fields": list(gpus.GPU_FIELDS)}
    view["smi"]["apps"] = {"code": 0, "out": apps, "why": ""}
    found = gpu_join.join("lab", view, {})
    assert {(it.gpu_uuid, it.pid, it.used_mib, it.kind) for it in found.processes} == {
        (UUIDS[0], 70, 150.0, "container"),
        (UUIDS[0], 80, 25.0, "dead"),
        (UUIDS[1], 90, 7.0, "container"),
    }
    assert [gpu.other_mib for gpu in found.gpus] == [850.0, 993.0]
    render_gpus.show_gpus(found)
    assert "Enabled" in json.dumps(found.to_json()) and capsys.readouterr().out


def test_sixty_four_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    uuids = [f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(64)]
    rows = "".join(
        full_line(**{"index": str(number), "uuid": uuid, "pci.bus_id": f"00000000:{number:02X}:00.0"})
        for number, uuid in enumerate(uuids)
    )
    everything = holder(70, minors=list(range(64)))
    view = {**host_view(holders=(everything,)), "minors": {f"0000:{at:02x}:00.0": 63 - at for at in range(64)}}
    view["smi"]["gpus"] = {"code": 0, "out": rows, "why": "", "fields": list(gpus.GPU_FIELDS)}
    apps = "".join(f"{uuid}, 70, {number}, python\n" for number, uuid in enumerate(uuids))
    view["smi"]["apps"] = {"code": 0, "out": apps, "why": ""}
    found = gpu_join.join("lab", view, {})
    assert {(it.gpu_uuid, it.used_mib) for it in found.processes} == {(it, float(at)) for at, it in enumerate(uuids)}
    render_gpus.show_gpus(found)
    assert len(capsys.readouterr().out.split("\n")) > 64


def test_a_process_that_is_stuck_in_the_driver_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its memory would wait for what it holds: here, for a pipe that nobody writes to."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    line = "{} (python) {} 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 55 0"
    for pid, state in ((7, "D"), (8, "S")):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(line.format(pid, state))
        (folder / "comm").write_text("python\n")
        for name in ("environ", "cmdline", "maps"):
            os.mkfifo(folder / name) if state == "D" else (folder / name).write_text("A=1\0")
    assert [(it.pid, it.state) for it in sorted(processes.table(), key=lambda it: it.pid)] == [(7, "D"), (8, "S")]
    assert (processes.environment(7), processes.environment(8)) == ({}, {b"A": b"1"})
    assert (processes.command(7), processes.command(8)) == ("[python]", "A=1")
    assert processes._hung == {7}
    # It goes on: its memory can be read again.
    (tmp_path / "7" / "stat").write_text(line.format(7, "R"))
    for name in ("environ", "cmdline", "maps"):
        (tmp_path / "7" / name).unlink()
        (tmp_path / "7" / name).write_text("B=2\0")
    processes.table()
    assert processes.environment(7) == {b"B": b"2"} and processes._hung == set()


# -- an nvidia-smi that hangs, a shell with a child as a wrapper is


def hanging_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, questions: int = 2) -> Callable[[], list[int]]:
    """Puts it first in PATH. What it gives waits until every question is asked, and tells the pids."""
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nsleep 600 &\nreadlink /proc/$$/fd/* > {folder}/fds.$$; echo $$ $! >> {folder}/pids; wait\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def pids() -> list[int]:
        told = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
        return [int(pid) for pid in told] if len(told) == 2 * questions else []

    return lambda: retry_until(pids)


def gone(pids: list[int]) -> bool:
    """Whether they end; what is left is ended here."""
    try:
        retry_until(lambda: not any(map(exists, pids)), 30.0)
    except AssertionError:
        for pid in filter(exists, pids):
            os.kill(pid, signal.SIGKILL)
        return False
    return True


def test_a_view_that_fails_leaves_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, lock = hanging_smi(tmp_path, monkeypatch), tmp_path / "gpu0.lock"
    pids: list[int] = []
    monkeypatch.setattr(probe, "holders", lambda: pids.extend(asked()) or [])
    (tmp_path / "runs").write_text("")  # a file
    descriptor = os.open(lock, os.O_CREAT)
    os.set_inheritable(descriptor, True)
    try:
        with pytest.raises(NotADirectoryError):
            gpuview.view(tmp_path, ["index"], ["pid"], 600.0)
    finally:
        os.close(descriptor)
    assert gone(pids)
    inherited = [file.read_text() for file in tmp_path.glob("fds.*")]
    assert len(inherited) == 2 and not [text for text in inherited if str(lock) in text]


def test_an_nvidia_smi_that_is_too_late_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hanging_smi(tmp_path, monkeypatch)
    started = gpuasked.Asked({name: ["nvidia-smi", name] for name in "ab"}, 0.0)
    pids = asked()
    assert [(it["code"], it["why"]) for it in started.answers().values()] == [
        (None, "nvidia-smi gave no answer in 0 s")
    ] * 2
    assert gone(pids)
    started.end()  # nothing is left to end


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["gpuview", "doctor", "free", "start"])
def test_whoever_asks_nvidia_smi_and_is_ended_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: signal.Signals
) -> None:
    """As a terminal that is closed ends it: the signal goes to all of its process group."""
    asked = hanging_smi(tmp_path, monkeypatch, questions=1 if verb == "doctor" else 2)
    more: dict[str, Any] = {
        "gpuview": {"fields": ["index"], "apps": ["pid"], "seconds": 600.0},
        "doctor": {"fix": False},
        "free": {"wanted": None},
        "start": {**stand_in.start_parameters(tmp_path, "a", ""), "gpus": [0]},
    }[verb]
    command = bundle.command(sys.executable, verb, {**more, "path": str(tmp_path)}, bare=True)
    # As it is in a terminal, not as under nohup, from which this test may have it.
    plain = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", plain, *command.argv]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as view:
        assert view.stdin is not None
        view.stdin.write(command.stdin)
        view.stdin.close()
        pids = asked()
        os.killpg(view.pid, number)
        assert gone(pids)
    assert view.returncode == 128 + number


@pytest.mark.parametrize("moment", ["_start", "end"])
def test_a_signal_while_they_are_started_or_ended_spares_none(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """It comes where one is not noted yet, or while they are killed."""
    begun: list[subprocess.Popen[bytes]] = []
    popen, killpg = subprocess.Popen, os.killpg

    def begin(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        begun.append(popen(*words, **more))
        if moment == "_start":
            os.kill(os.getpid(), signal.SIGTERM)
        return begun[-1]

    def kill(group: int, number: int) -> None:
        if moment == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        killpg(group, number)

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(os, "killpg", kill)
    with pytest.raises(SystemExit) as caught:
        gpuasked.Asked({name: ["sleep", "600"] for name in "ab"}, 600.0).end()
    assert caught.value.code == 128 + signal.SIGTERM
    assert [it.returncode for it in begun] == [-signal.SIGKILL] * 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# -- containers and inventories


def test_many_stuck_processes_take_little_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(threading.Thread, "join", lambda _, timeout: asked.append(timeout))
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # none ever reads anything
    monkeypatch.setattr(processes, "_stuck", set(range(100)))
    monkeypatch.setattr(processes, "_hung", set())
    assert [processes.memory_file(pid, "environ") for pid in range(100)] == [b""] * 100
    assert asked[0] == 0.3 and sum(asked) < 6.0


def test_a_container_without_python_is_said_and_the_rest_told(
    sandbox: SandboxState, tmp_path: Path, shell: Shell
) -> None:
    own = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox).container
    bare = replace(own, python="/opt/no/python3")
    found = status.gpu_status(shell, own.host, [bare], bare)
    assert len(found.gpus) == 2
    assert [problem for problem in found.problems if "there is no Python" in problem]
    diagnosis = doctor.doctor(shell, bare)
    (check,) = (check for check in diagnosis.checks if check.level == "failure")
    assert (check.name, check.where) == ("container", str(own)) and "there is no Python" in check.evidence
    assert check.fix and "python3" in check.fix and "pct start" not in check.fix
    assert not diagnosis.ok


def test_traps_for_real(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    """Wrong numbers and counts of GPUs, a run whose process lives on, majors written by hand."""
    own = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [1, 0]\n", vmid=201), sandbox).container
    run = "a-20261129-120000-abcd"
    folder = f"{own.path}/runs/{run}"
    leave = (
        f"mkdir -p {folder}; echo '{{}}' > {folder}/run.json; echo '{{\"code\": 1}}' > {folder}/exit.json; "
        f"DFLASH_RUN_ID={run} DFLASH_RUN_DIR={folder} setsid sleep 300 >/dev/null 2>&1 </dev/null & echo $!"
    )
    pid = shell.run(own, Command(("sh", "-c", leave)), check=True).out.decode().strip()

    def wrong(container: Any) -> dict[str, tuple[str, str, str]]:
        found = doctor.doctor(shell, container)
        return {it.name: (it.level, it.evidence, it.fix or "") for it in found.checks if it.level != "ok"}

    try:
        seen = wrong(own)
        assert seen["GPU order"][0] == "warning" and seen["GPU order"][2] == "in the inventory: gpus = [0, 1]"
        level, evidence, fix = seen["orphaned run"]
        assert level == "warning" and evidence.endswith(f"its processes live: {pid}")
        assert fix == f"dflash-ops train stop {run}"
        assert seen["container config"][0] in ("note", "failure") and "hand" in seen["container config"][1]
        seen = wrong(replace(own, gpus=(0,)))
        assert seen["GPU count"][0] == "failure" and "it has nvidia0, nvidia1" in seen["GPU count"][1]
    finally:
        shell.run(own, Command(("sh", "-c", f"kill {pid}; rm -r {folder}")), check=True)
    assert "orphaned run" not in wrong(replace(own, gpus=(0, 1)))
