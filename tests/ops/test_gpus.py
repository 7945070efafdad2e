"""nvidia-smi and /proc, read and joined: on samples from real machines, and on generated input."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import gpu_join, gpus, render_gpus, xids
from dflash_ops.remote import probe

SAMPLES = sorted((Path(__file__).parents[1] / "samples" / "gpus.join").glob("*.json"))
UUIDS = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-11111111-1111-1111-1111-111111111111")
FEW = gpus.GPU_FIELDS[:11]  # what any driver knows
RUN = "a-20261129-120000-abcd"


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_samples(file: Path) -> None:
    sample = json.loads(file.read_text())
    containers = {int(vmid): inside for vmid, inside in sample["containers"].items()}
    status = gpu_join.join("lab", sample["view"], containers)
    assert json.loads(json.dumps(status.to_json())) == sample["status"]
    render_gpus.show_gpus(status)


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 5


# -- nvidia-smi's words


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42.0), ("122.30", 122.3), (" 7 ", 7.0), ("-1", -1.0)]
    + [(word, None) for word in ("[N/A]", "N/A", "[Not Supported]", "[GPU is lost]", "ERR!", "", "0x0", "1e9", "nan")],
)
def test_number(text: str, value: float | None) -> None:
    assert gpus.number(text) == value


def test_a_sick_gpu_and_noise_between() -> None:
    csv = (
        "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
        f"0, {UUIDS[0]}, NVIDIA X, 00000000:01:00.0, 580.1, [N/A], [Unknown Error], 24576, ERR!, [N/A], [GPU is lost]\n"
        "Unable to determine the device handle for GPU1: 0000:02:00.0: Unknown Error\n"
    )
    (gpu,) = gpus.parse_gpus(csv, fields=FEW)
    assert gpu.missing["power_limit_w"] == "[GPU is lost]" and gpu.missing["temperature_c"] == "ERR!"
    assert gpu.missing["recovery_action"] == "this driver does not tell"
    assert len(gpus.other_lines(csv, FEW)) == 2
    assert (gpu.load_percent, gpu.used_mib, gpu.total_mib, gpu.temperature_c) == (None, None, 24576.0, None)
    assert (gpu.power_w, gpu.power_limit_w) == (None, None)


@given(st.text(), st.text())
def test_any_answer_can_be_read(gpu_text: str, app_text: str) -> None:
    gpus.parse_gpus(gpu_text)
    gpus.parse_apps(app_text)
    gpus.parse_indices(gpu_text)


_words = st.text(st.characters(exclude_characters="\n\r,", exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(UUIDS),
            st.integers(1, 4_194_304),
            st.none() | st.integers(0, 200_000),
            st.lists(_words, min_size=1, max_size=4).map(",".join),
        )
    )
)
def test_apps_survive_the_way_there_and_back(rows: list[tuple[str, int, int | None, str]]) -> None:
    csv = "".join(f"{uuid}, {pid}, {'[N/A]' if mib is None else mib}, {name}\n" for uuid, pid, mib, name in rows)
    read = [(app.gpu_uuid, app.pid, app.used_mib, app.name) for app in gpus.parse_apps(csv)]
    assert read == [(uuid, pid, mib, name.strip()) for uuid, pid, mib, name in rows]


def test_what_is_mapped_is_held() -> None:
    maps = (
        b"7f1 rw-s 00000000 00:05 487 /dev/nvidiactl\n7f2 rw-s 00000000 00:05 488 /dev/nvidia-uvm\n"
        b"7f3 rw-s 00000000 00:05 489                        /dev/nvidia1\n7f4 r--p 0 08:01 7 /tmp/dev/nvidia3\n"
        b"7f5 rw-s 00000000 00:05 489                        /dev/nvidia12\n"
    )
    assert probe.mapped_minors(maps) == [1, 12]


@pytest.mark.parametrize(
    ("cgroup", "vmid", "run"),
    [
        ("0::/lxc/200/ns/.lxc/dflash-run-{}\n", 200, RUN),
        ("0::/lxc/20/ns/dflash-run-{}/below\n", 20, RUN),
        ("0::/dflash-run-{}\n", None, RUN),  # as the container itself sees it
        ("0::/lxc/200/ns/.lxc/dflash-run-{}x\n", 200, None),
        ("0::/lxc.monitor/200\n", None, None),
        ("12:devices:/lxc/200\n0::/lxc/201\n", 201, None),
        ("", None, None),
    ],
)
def test_containers_and_runs_by_cgroup(cgroup: str, vmid: int | None, run: str | None) -> None:
    """A trainer's child that cleared its environment is in its run's group still."""
    text = cgroup.format(RUN).encode()
    assert (probe.vmid_of(text), probe.run_of(text)) == (vmid, run)


# -- the kernel's log


@pytest.mark.parametrize(
    ("message", "code", "pid", "known"),
    [
        ("NVRM: Xid (PCI:0000:01:00): 94, pid=1234, name=python, Contained: ...", 94, 1234, True),
        (
            "[  12.3] NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus",
            79,
            None,
            True,
        ),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 13, pid='77', name=python, Graphics Exception", 13, 77, True),
        ("NVRM: Xid (PCI:0000:01:00) GPU-I:05: 48, pid=7", 48, 7, True),
        ("NVRM: Xid (PCI:0000:C1:00): 777, something new", 777, None, False),
        ("NVRM: GPU at PCI:0000:01:00: GPU-1", None, None, False),
    ],
)
def test_xids(message: str, code: int | None, pid: int | None, known: bool) -> None:
    found = xids.read([{"time": 1e9, "message": message}], {"00000000:01:00.0": UUIDS[0]}, None)
    assert [(it.code, it.pid) for it in found] == ([(code, pid)] if code else [])
    for it in found:
        assert it.gpu_uuid == (UUIDS[0] if known else None)
        assert it.meaning and it.action and it.time == "2001-09-09T01:46:40Z"
    assert xids.read([{"time": 1e9, "message": message}], {}, 1e9 + 1) == []


# -- joining


def gpu_line(index: int) -> str:
    return f"{index}, {UUIDS[index]}, NVIDIA X, 00000000:0{index + 1}:00.0, 580.1, 0, 0, 24576, 30, 15, 300\n"


def host_view(*, apps: str = "", holders: tuple[dict[str, Any], ...] = (), minors: Any = None) -> dict[str, Any]:
    return {
        "pid_namespace": "pid:[1]",
        "smi": {
            "gpus": {"code": 0, "out": gpu_line(0) + gpu_line(1), "why": "", "fields": FEW},
            "apps": {"code": 0, "out": apps, "why": ""},
        },
        "minors": minors or {},
        "holders": list(holders),
    }


def holder(pid: int, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "start": 1,
        "state": "S",
        "wchan": None,
        "command": "python",
        "group": pid,
        "namespace_pids": [pid, pid - 1000],
        "pid_namespace": "pid:[200]",
        "vmid": None,
        "minors": [0],
        "locks": [],
        "locks_for": None,
        "run_id": None,
        "age_s": 5.0,
        **more,
    }


def container_view(*, alive: bool = True, indices: str = "") -> dict[str, Any]:
    facts = {
        "run_id": RUN,
        "run": {},
        "state": {},
        "exit": None if alive else {"code": 0},
        "status": None,
        "supervisor_alive": alive,
        "child_alive": alive,
        "starting": False,
        "log_bytes": 0,
        "checkpoints": [],
    }
    smi = {"gpus": {"code": 0, "out": indices, "why": ""}}
    return {"pid_namespace": "pid:[200]", "smi": smi, "minors": {}, "holders": [], "runs": [facts]}


@pytest.mark.parametrize(
    ("who", "inside", "kind", "stale"),
    [
        (holder(2000, run_id=RUN), container_view(), "run", False),
        (holder(2000, run_id=RUN), container_view(alive=False), "stale", True),
        (holder(2000, run_id="b-20261129-120000-abcd"), container_view(), "container", False),
        (holder(2000), container_view(), "container", False),
        (holder(2000, run_id=RUN, pid_namespace="pid:[9]", vmid=201), container_view(alive=False), "container", False),
        (holder(2000, pid_namespace="pid:[1]", namespace_pids=[2000]), container_view(), "host", False),
    ],
)
def test_kinds(who: dict[str, Any], inside: dict[str, Any], kind: str, stale: bool) -> None:
    view = host_view(holders=(who,), apps=f"{UUIDS[0]}, 2000, 512, python\n")
    (process,) = gpu_join.join("lab", view, {200: inside}).processes
    assert (process.kind, process.stale, process.used_mib) == (kind, stale, 512.0)
    assert process.container_pid == (None if kind == "host" else 1000)


def test_indices_differ_between_host_and_container() -> None:
    inside = container_view(indices=f"0, {UUIDS[1]}\n")
    minors = {"0000:01:00.0": 1, "0000:02:00.0": 0}  # the driver numbers its nodes the other way round
    status = gpu_join.join("lab", host_view(holders=(holder(2000, minors=[0]),), minors=minors), {200: inside})
    assert [dict(gpu.in_container) for gpu in status.gpus] == [{}, {200: 0}]
    assert [process.gpu_uuid for process in status.processes] == [UUIDS[1]]


def test_a_monitor_on_the_host_is_no_user() -> None:
    monitor = holder(9, pid_namespace="pid:[1]", namespace_pids=[9], minors=[0, 1])
    assert gpu_join.join("lab", host_view(holders=(monitor,)), {}).processes == ()


def test_a_dead_parents_own_child_is_told_from_a_neighbour() -> None:
    neighbour, child = holder(3000), holder(3001, group=2999, run_id=RUN)
    view = host_view(holders=(neighbour, child), apps=f"{UUIDS[0]}, 2999, 1542, [Not Found]\n")
    dead = gpu_join.join("lab", view, {200: container_view(alive=False)}).processes[-1]
    assert (dead.kind, dead.pid, dead.held_by, dead.run_id, dead.used_mib) == ("dead", 2999, (3001,), RUN, 1542.0)


def test_memory_of_nobody_we_see() -> None:
    (dead,) = gpu_join.join("lab", host_view(apps=f"{UUIDS[0]}, 77, [N/A], [Not Found]\n"), {}).processes
    assert (dead.kind, dead.held_by, dead.used_mib) == ("dead", (), None)


def test_a_hung_driver_is_a_finding() -> None:
    view = host_view()
    view["smi"]["gpus"] = {"fields": FEW, "code": None, "out": "", "why": "nvidia-smi gave no answer in 10 s"}
    status = gpu_join.join("lab", view, {})
    assert status.gpus == ()
    assert status.problems == ("lab: nvidia-smi gave no answer in 10 s",)


def full_line(**told: str) -> str:
    """nvidia-smi's row of all fields; those that are not said are [N/A]."""
    known = {"index": "0", "uuid": UUIDS[0], "pci.bus_id": "00000000:01:00.0", "memory.used": "1000", **told}
    return ", ".join(known.get(field.replace("_", "."), known.get(field, "[N/A]")) for field in gpus.GPU_FIELDS) + "\n"


def judged(xids: list[dict[str, Any]] | None = None, **told: str) -> gpus.Gpu:
    view = {**host_view(), "xids": xids or [], "now": 2e9}
    view["smi"]["gpus"] = {"code": 0, "out": full_line(**told), "why": "", "fields": list(gpus.GPU_FIELDS)}
    (gpu,) = gpu_join.join("lab", view, {}).gpus
    return gpu


@pytest.mark.parametrize(
    ("told", "health", "words"),
    [
        ({}, "ok", ""),
        ({"gpu_recovery_action": "None", "clocks_event_reasons.active": "0x0000000000000001"}, "ok", ""),
        ({"gpu_recovery_action": "Reset"}, "sick", "nvidia-smi -r"),
        ({"gpu_recovery_action": "Something new"}, "sick", "Something new"),
        ({"temperature.gpu": "[GPU requires reset]"}, "sick", "requires reset"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "warning", "3 uncorrectable"),
        ({"remapped_rows.pending": "Yes"}, "warning", "remapped"),
        ({"clocks_event_reasons.active": "0x0000000000000048"}, "warning", "heat (hardware)"),
        ({"clocks_event_reasons.active": "0x0000000000000004"}, "ok", ""),
        ({"memory.used": "[Unknown Error]"}, "unknown", ""),
    ],
)
def test_health(told: dict[str, str], health: str, words: str) -> None:
    gpu = judged(**told)
    assert gpu.health == health and words in "; ".join(gpu.findings) and bool(gpu.findings) == bool(words)


def test_why_clocks_are_lowered() -> None:
    assert judged(**{"clocks_event_reasons.active": "0x0000000000000044"}).throttled == ("power cap", "heat (hardware)")
    assert judged(**{"clocks_event_reasons.active": "[N/A]"}).throttled is None


def test_xids_weigh_on_health() -> None:
    def line(code: int) -> list[dict[str, Any]]:
        return [{"time": 2e9 - 60, "message": f"NVRM: Xid (PCI:0000:01:00): {code}, pid='<unknown>', name=x"}]

    assert [judged(line(code)).health for code in (45, 94, 79)] == ["ok", "warning", "sick"]


def test_memory_that_no_process_is_charged_with_is_anothers() -> None:
    view = host_view(apps=f"{UUIDS[0]}, 2000, 512, python\n{UUIDS[0]}, 77, 100, [Not Found]\n", holders=(holder(2000),))
    view["smi"]["gpus"]["out"] = gpu_line(0).replace(" 0, 24576", " 1024, 24576")
    status = gpu_join.join("lab", view, {200: container_view()})
    assert [(it.pid, it.kind, it.owner) for it in status.processes] == [
        (2000, "container", "unknown"),
        (77, "dead", "nobody"),
    ]
    assert status.gpus[0].other_mib == 1024 - 512


@pytest.mark.parametrize(
    ("said", "own", "kind", "owner"),
    [
        ({"owner": "run", "run_id": RUN}, 200, "run", "run"),
        ({"owner": "earlier", "run_id": RUN}, 200, "stale", "earlier"),
        ({"owner": "unknown", "run_id": None}, 200, "container", "unknown"),
        ({"owner": "run", "run_id": RUN}, 201, "run", "other container"),
        ({"owner": "earlier", "run_id": RUN, "start": 2}, 200, "container", "unknown"),  # the pid has a new owner
    ],
)
def test_a_container_says_whose_its_processes_are(said: dict[str, Any], own: int, kind: str, owner: str) -> None:
    inside = container_view()
    inside["holders"] = [{**holder(1000), "user": "train", **said}]
    view = host_view(holders=(holder(2000),), apps=f"{UUIDS[0]}, 2000, 512, python\n")
    (process,) = gpu_join.join("lab", view, {200: inside}, own).processes
    assert (process.kind, process.owner) == (kind, owner)
    assert process.user == (None if "start" in said else "train")


def test_the_recorder_asks_what_gpu_status_asks() -> None:
    text = (SAMPLES[0].parents[1] / "record.py").read_text()
    asked = text.partition("GPUS = (")[2].partition("\n)")[0]
    assert tuple("".join(re.findall(r'"(.*?)"', asked)).split(",")) == gpus.GPU_FIELDS


_scene = st.lists(
    st.builds(
        lambda pid, **more: holder(pid, **more),
        st.integers(1001, 1020),
        minors=st.lists(st.integers(0, 3), max_size=3),
        run_id=st.sampled_from([None, RUN, "b-20261129-120000-abcd"]),
        pid_namespace=st.sampled_from(["pid:[1]", "pid:[200]", "pid:[7]", ""]),
        group=st.integers(1001, 1020),
    ),
    unique_by=lambda it: it["pid"],
    max_size=6,
)
_charges = st.lists(st.tuples(st.sampled_from(UUIDS), st.integers(1001, 1020)), unique=True, max_size=6)


@given(_scene, _charges, st.booleans())
def test_every_charge_is_told_once_and_nothing_foreign_is_stale(
    scene: list[dict[str, Any]], charges: list[tuple[str, int]], alive: bool
) -> None:
    apps = "".join(f"{uuid}, {pid}, 100, python\n" for uuid, pid in charges)
    status = gpu_join.join("lab", host_view(holders=tuple(scene), apps=apps), {200: container_view(alive=alive)})
    told = [(process.gpu_uuid, process.pid) for process in status.processes if process.used_mib is not None]
    assert sorted(told) == sorted(charges)
    assert sum(process.used_mib or 0 for process in status.processes) == 100 * len(charges)
    for process in status.processes:
        if process.stale:
            assert (process.run_id, process.vmid, alive) == (RUN, 200, False)
    json.dumps(status.to_json(), allow_nan=False)


def process(pid: int, run_id: str | None, kind: gpus.Kind, used_mib: float | None) -> gpus.GpuProcess:
    return gpus.GpuProcess(
        gpu_uuid=UUIDS[0],
        pid=pid,
        container_pid=pid,
        vmid=200,
        run_id=run_id,
        kind=kind,
        used_mib=used_mib,
        age_s=1.0,
        state="S",
        command=f"python worker{pid}",
    )


def test_a_runs_workers_stand_behind_it_and_nothing_else_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    found = [process(1, RUN, "run", 1056.0), process(2, RUN, "run", None), process(3, RUN, "run", None)]
    found += [process(4, "other-20261129-120000-abcd", "run", None), process(5, RUN, "stale", None)]
    found += [process(6, None, "container", None)]
    render_gpus.show_gpus(gpus.GpuStatus("lab", (), tuple(found), ()))
    out = capsys.readouterr().out
    assert "worker1 (+2 workers)" in out and "worker2" not in out and "worker3" not in out
    assert all(f"worker{pid}" in out for pid in (4, 5, 6))


def test_a_narrow_terminal_goes_without_columns_and_breaks_no_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    status = gpus.GpuStatus("lab", (), (replace(process(1, RUN, "run", 1056.0), gpu_uuid="GPU-1"),), ())
    for width, shown, hidden in (
        ("200", ("PID THERE", "AGE", "worker1"), ()),
        ("80", (RUN, "MEMORY MiB"), ("PID THERE",)),
    ):
        monkeypatch.setenv("COLUMNS", width)
        render_gpus.show_gpus(status)
        out = capsys.readouterr().out
        assert all(word in out for word in shown) and not any(word in out for word in hidden)
