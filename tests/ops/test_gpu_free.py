"""`gpu free` by hand: what is shown, asked and refused; files of freed runs; and `gpu-status` of hosts that are slow,
away, or have an old driver."""

import contextlib
import inspect
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_scenes
import pytest
import typer
from conftest import Box, Cli, write_inventory
from in_process import InProcess

from dflash_ops import cli_gpu, cli_many, gpu_free, gpu_join, gpus, many, render_gpus, status
from dflash_ops.command import Command, Container, Host
from dflash_ops.errors import BusyError, CancelledError, NotFoundError, OpsError
from dflash_ops.remote import gpuproof, gpuview, owners, processes
from dflash_ops.sandbox import layout
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

PROGRAM = Path(gpu_scenes.__file__).read_text()
RUN = "a-20261129-120000-abcd"


def holder(pid: int, owner: str = "unknown", parent: int = 1, **more: Any) -> gpu_free.Holder:
    first = gpu_free.Holder(pid, 7, parent, "S", None, "root", "python", 1.0, (0,), 100.0, "unknown", None)
    return replace(first, owner=owner, run_id=None if owner == "unknown" else RUN, **more)


def look(*holders: gpu_free.Holder, gone: dict[int, tuple[int, ...]] | None = None) -> gpu_free.Look:
    return gpu_free.Look("lab / container 200", "boot", holders, gone or {}, {}, "")


# -- choosing


@pytest.mark.parametrize(
    ("pids", "unknown", "chosen"),
    [
        ([], False, [2]),
        ([], True, [2, 3, 4]),
        ([3], False, [2, 3, 4]),  # 4 is its child
        ([4], False, [2, 4]),
        ([2], False, [2]),
    ],
)
def test_what_is_chosen(pids: list[int], unknown: bool, chosen: list[int]) -> None:
    found = look(holder(1, "run"), holder(2, "earlier"), holder(3), holder(4, parent=3), holder(5, "run", parent=4))
    assert [it.pid for it in gpu_free.choose(found, pids, unknown)] == chosen


def test_what_can_not_be_chosen() -> None:
    found = look(holder(1, "run"), holder(3), gone={77: (3,)})
    with pytest.raises(BusyError, match=f"process 1 is of run {RUN}.*train stop {RUN}"):
        gpu_free.choose(found, [1], False)
    with pytest.raises(NotFoundError, match=r"process 9 holds no GPU"):
        gpu_free.choose(found, [9], False)
    with pytest.raises(NotFoundError, match=r"a child of it holds its memory. Next: --pid 3"):
        gpu_free.choose(found, [77], False)


def test_a_dry_run_tells_the_files_that_would_be_removed(capsys: pytest.CaptureFixture[str]) -> None:
    earlier, stranger = holder(2, "earlier"), holder(3)
    found = replace(look(earlier, stranger), files={RUN: ("/dev/shm/a", "/tmp/b"), "other": ("/tmp/c",)})
    for chosen, expected in ([earlier], ("/dev/shm/a", "/tmp/b")), ([stranger], ()):
        done = gpu_free.nothing_done(found, chosen, dry_run=True)
        render_gpus.show_freed(done)
        said = capsys.readouterr().out.split("\n")
        assert done.removed == expected
        assert [line for line in said if "remove" in line] == [f"would remove {file}" for file in expected]


# -- freeing, for real


@pytest.fixture
def place(box: Box, shell: Shell) -> Iterator[Container]:
    place = box.container
    yield place
    ends = Command((place.python, "-IS", "-c", PROGRAM, place.path), json.dumps({"end": made.pop(place, [])}).encode())
    shell.run(place, ends, check=True)


made: dict[Container, list[dict[str, Any]]] = {}


def build(shell: Shell, place: Container, *kinds: str) -> list[dict[str, Any]]:
    scenes = [
        {"kind": kind, "run_id": f"s{at}-20261129-120000-abc{at}", "gpu": 0, "mib": 500, "deaf": False, "over": "lost"}
        for at, kind in enumerate(kinds)
    ]
    question = Command((place.python, "-IS", "-c", PROGRAM, place.path), json.dumps({"build": scenes}).encode())
    made[place] = json.loads(shell.run(place, question, check=True).out)
    return made[place]


def alive(shell: Shell, place: Container, *made: dict[str, Any]) -> list[bool]:
    words = 'for pid; do grep -q "^State:.[^ZX]" /proc/$pid/status && echo yes || echo no; done 2>/dev/null'
    asked = Command(("sh", "-c", words, "sh", *(str(it["pid"]) for it in made)))
    return [word == b"yes" for word in shell.run(place, asked).out.split()]


def test_free_by_hand(place: Container, cli: Cli, shell: Shell) -> None:
    cli = InProcess(cli.inventory)
    stale, stranger = build(shell, place, "dead parent", "stranger")
    files = [f"/dev/shm/torch_{stale['run_id']}", f"/tmp/{stale['run_id']}"]
    others = [f"/dev/shm/torch_{stale['run_id']}0", "/tmp/s0-20261129-120000"]
    shell.run(
        place, Command(("sh", "-c", f"mkdir {files[1]}; touch {files[1]}/x {files[0]} {' '.join(others)}")), check=True
    )

    dry = json.loads(cli("gpu", "free", "--dry-run", "--json").stdout)
    assert [it["pid"] for it in dry["freed"]] == [stale["pid"]] and dry["dry_run"] and not dry["gpu"]["checked"]
    assert dry["removed"] == files
    assert gpu_free.look(shell, place).files == {stale["run_id"]: tuple(files)}  # and they are there still
    refused = cli("gpu", "free", "--unknown")
    assert refused.returncode == 2 and str(stranger["pid"]) in refused.stderr.decode()
    assert alive(shell, place, stale, stranger) == [True, True]

    freed = json.loads(cli("gpu", "free", "--json").stdout)
    assert [it["pid"] for it in freed["freed"]] == [stale["pid"]]
    assert (freed["gpu"]["checked"], freed["gpu"]["back"]) == (True, True)
    assert freed["removed"] == files
    assert [(it["pid"], it["owner"], it["used_mib"]) for it in freed["left"]] == [(stranger["pid"], "unknown", 500.0)]
    listed = shell.run(place, Command(("sh", "-c", "ls -d /dev/shm/* /tmp/s0*"))).out.decode()
    assert all(file in listed for file in others) and not any(f"{file}\n" in listed for file in files)
    assert alive(shell, place, stale, stranger) == [False, True]

    done = cli("gpu", "free", "--pid", str(stranger["pid"]), "--yes")
    assert done.returncode == 0 and f"ended {stranger['pid']}" in done.stdout.decode()
    assert alive(shell, place, stranger) == [False]


def test_what_has_changed_since_the_look_is_spared(place: Container, shell: Shell) -> None:
    (stranger,) = build(shell, place, "stranger")
    found = gpu_free.look(shell, place)
    (chosen,) = gpu_free.choose(found, [stranger["pid"]], False)
    gpu_free.free(shell, place, found, [replace(chosen, start=chosen.start - 1)], grace=0.0)  # another had that pid
    assert alive(shell, place, stranger) == [True]
    with pytest.raises(BusyError, match="the host was restarted"):
        gpu_free.free(shell, place, replace(found, boot_id="earlier"), [chosen], grace=0.0)
    assert alive(shell, place, stranger) == [True]


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(look(holder(5)), others_mib={0: 900.0, 1: 12.0})
    render_gpus.show_freed(gpu_free.nothing_done(found, [], dry_run=False))
    out = capsys.readouterr().out
    assert "nothing to free" in out and "unknown" in out
    assert "GPU 0: 900 MiB of nobody that can be seen here: another tenant or the driver" in out and "GPU 1:" not in out
    render_gpus.note_holders([holder(5), holder(6, "earlier", used_mib=None)])
    asked = capsys.readouterr().err
    assert "5: 100 MiB, 1 s old, of no run, user root: python" in asked and f"of {RUN}, which is over" in asked


def test_one_that_would_not_die_is_told_and_never_called_killed(box: Box) -> None:
    stuck = {"pid": 5, "start": 1, "state": "D", "wchan": "nv_wait", "command": "python x"}
    reply = {"freed": [], "killed": [], "removed": [], "seconds": 1.0, "survivors": [stuck]}
    proof = {"checked": True, "back": False, "why": "", "held": []}

    class Stub:
        def ask(self, *_: object, **__: object) -> dict[str, Any]:
            return {**reply, "gpu": proof}

    with pytest.raises(OpsError, match=r"would not die: 5 \(python x\), state D in nv_wait.*restart of the host"):
        gpu_free.free(Stub(), box.container, look(), [holder(5)], grace=0.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("heir", "back"), [(7, False), (8, True)])
def test_memory_of_a_dead_parent_is_not_back_while_it_is_charged(
    heir: int, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead parent's charge counts as that of its heir: when all that hold the card are to be ended. With a stranger
    among them it may be the stranger's."""
    child = subprocess.Popen(["sleep", "100"])
    process = processes.read(child.pid)
    assert process
    card = gpuproof.Card(0, "GPU-1", "0000:01:00.0", 1551.0, 24576.0)
    holders = [
        {"pid": process.pid, "start": process.start if heir == 7 else 8, "state": "S", "wchan": None, "command": ""}
    ]
    monkeypatch.setattr(gpuproof, "look", lambda: gpuproof.Picture((card,), (("GPU-1", 2**22 - 1, 1542.0),)))
    monkeypatch.setattr(gpuproof, "holders_of", lambda _: holders)
    try:
        proof = gpuproof.Proof([process], None, [0])
        assert proof.back() == back
        assert bool(proof.result()["held"]) != back
    finally:
        child.kill()
        child.wait()


def test_somebody_is_asked_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for says in (False, True):
        monkeypatch.setattr("typer.confirm", lambda *_, says=says, **__: says)
        with contextlib.nullcontext() if says else pytest.raises(CancelledError, match="nothing was ended"):
            cli_gpu._ask([(look(holder(5)), [holder(5)])])
        assert "5: 100 MiB, 1 s old, of no run, user root: python" in capsys.readouterr().err

    def aborted(*_: Any, **__: Any) -> None:
        raise typer.Abort

    monkeypatch.setattr("typer.confirm", aborted)
    with pytest.raises(CancelledError, match="nothing was ended"):
        cli_gpu._ask([(look(holder(5)), [holder(5)])])


def test_who_started_us_is_never_ended() -> None:
    assert {os.getpid(), os.getppid(), 1} <= owners.ancestors()


def test_a_link_with_a_runs_id_is_removed_and_not_what_it_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_TEMPORARY", (str(tmp_path), str(tmp_path / "missing")))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / RUN).symlink_to(tmp_path / "kept")
    assert owners.remove_files({RUN}) == [str(tmp_path / RUN)]
    assert (tmp_path / "kept" / "file").exists()


def test_what_is_mounted_and_what_others_own_is_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_TEMPORARY", (str(tmp_path),))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    inside = tmp_path / f"{RUN} two" / "sub"
    inside.mkdir(parents=True)
    (tmp_path / f"another.{RUN}").touch()
    os.chown(tmp_path / f"another.{RUN}", 12345, 12345)
    (tmp_path / f"own.{RUN}").touch()
    subprocess.run(["mount", "--bind", tmp_path / "data", inside], check=True)
    try:
        assert owners.remove_files({RUN}) == [str(tmp_path / f"own.{RUN}")]
        assert (tmp_path / "data" / "precious").exists() and (tmp_path / f"another.{RUN}").exists()
    finally:
        subprocess.run(["umount", inside], check=True)


# -- gpu-status of several hosts, and again and again


def test_ctrl_c_ends_a_watch_while_a_host_is_asked(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    class Broken(cli_many.There):
        def gather(self, *_: Any, **__: Any) -> Any:
            asked.append(1)
            if len(asked) > 1:
                raise AssertionError("it was asked again")
            host = Host("box", "127.0.0.1")
            return [many.Outcome("box", host, None, many.Interrupted("interrupted"), 0.0)]

    asked: list[int] = []
    monkeypatch.setattr(cli_gpu, "_hosts", lambda there: ({}, [], {}))
    there = Broken(shell, None, None, None, as_json=False, many=False, debug=False)
    with pytest.raises(typer.Exit) as ended:
        inspect.unwrap(cli_gpu.gpu_status)(there, everywhere=False, watch=True, every=0.2)
    assert ended.value.exit_code == 130


def test_all_and_watch_on_the_command_line(sandbox: SandboxState, tmp_path: Path) -> None:
    away = '[hosts.away]\naddress = "127.0.0.1"\nport = 1\n[containers.far]\nhost = "away"\nvmid = 200\n'
    away += '[hosts.down]\nsandbox = "no-such-one"\n[containers.gone]\nhost = "down"\nvmid = 200\npython = "sandbox"\n'
    cli = Cli(write_inventory(tmp_path, sandbox.name, more=away))
    done = cli("gpu-status", "--all", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 4
    assert [(host["host"], len(host["gpus"])) for host in document["hosts"]] == [("box", 2), ("away", 0)]
    assert document["hosts"][0]["gpus"][0]["health"] == "ok"
    text = cli("gpu-status", "--all")
    assert b"box:" in text.stdout and b"away" in text.stderr and b"no-such-one" in text.stderr
    watching = cli.start("gpu-status", "--watch", "--every", "0.2", "--json")
    assert watching.stdout
    try:
        assert [json.loads(watching.stdout.readline())["host"] for _ in range(2)] == ["box", "box"]
    finally:
        watching.kill()
        watching.communicate()


# -- old drivers, the kernel's log


OLD_SMI = """#!{python}
import sys
KNOWN = ["index", "uuid", "name", "pci.bus_id", "driver_version", "memory.used", "clocks_throttle_reasons.active"]
if sys.argv[1] == "--help-query-gpu":
    print('"name" or "gpu_name"\\n' + "\\n".join(f'"{{name}}"\\nwords, "quoted" ones too\\n' for name in KNOWN))
    sys.exit(0)
option, _, asked = sys.argv[1].partition("=")
open("{log}", "a").write(option + "\\n")
if option == "--query-gpu":
    fields = asked.split(",")
    unknown = [field for field in fields if field not in KNOWN]
    if unknown:
        print(f'Field "{{unknown[0]}}" is not a valid field to query.\\n')
        sys.exit(2)
    values = {{"index": "0", "uuid": "GPU-1", "pci.bus_id": "00000000:01:00.0", "memory.used": "12"}}
    values["clocks_throttle_reasons.active"] = "0x0000000000000040"
    print(", ".join(values.get(field, "x") for field in fields))
"""


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    for name, text in texts.items():
        file = folder / name.replace("_", "-")
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_old_driver_is_asked_for_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    programs(tmp_path, monkeypatch, nvidia_smi=OLD_SMI.format(python=sys.executable, log=log))
    view = gpuview.view(None, list(gpus.GPU_FIELDS), list(gpus.APP_FIELDS), 10.0)
    (gpu,) = gpu_join.join("lab", view, {}).gpus
    assert (gpu.used_mib, gpu.throttled, gpu.load_percent) == (12.0, ("heat (hardware)",), None)
    assert gpu.missing["load_percent"] == "this driver does not tell" and "used_mib" not in gpu.missing
    assert gpu.health == "warning"
    assert log.read_text().split().count("--query-gpu") == 2


def test_a_driver_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, nvidia_smi="#!/bin/sh\nexec sleep 100\n")
    view = gpuview.view(None, list(gpus.GPU_FIELDS), list(gpus.APP_FIELDS), 0.3)
    assert gpu_join.join("lab", view, {}).problems[0] == "lab: nvidia-smi gave no answer in 0 s"


def test_xids_of_the_hosts_log(box: Box, shell: Shell) -> None:
    message = "NVRM: Xid (PCI:0000:01:00): 94, pid=1234, name=python, Contained error"
    lines = [
        json.dumps({"MESSAGE": text, "__REALTIME_TIMESTAMP": str(moment)})
        for text, moment in ((message, 4_000_000_000_000_000), (message.replace("94", "45"), 1_000_000), ("NVRM: x", 5))
    ]
    write = Command(("sh", "-c", f"cat > {layout.KERNEL_LOG}"), "\n".join(lines).encode())
    shell.run(box.host, write, check=True)
    try:
        found = status.gpu_status(shell, box.host, [box.container])
    finally:
        shell.run(box.host, Command(("rm", str(layout.KERNEL_LOG))), check=True)
    (xid,) = found.xids  # the other one is of 1970: longer ago than a day, and no run is that old
    assert (xid.code, xid.pid, xid.gpu_uuid, xid.weight) == (94, 1234, found.gpus[0].uuid, "warning")
    assert found.gpus[0].health == "warning" and found.gpus[1].health == "ok"
    assert not [problem for problem in found.problems if "kernel" in problem]
