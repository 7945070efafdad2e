"""docs/programs.md says what programs get: the exit codes, and the fields of each JSON document."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

from test_runs import facts

from dflash_ops import (
    checks,
    containers,
    deployed,
    discover,
    errors,
    gpu_free,
    gpus,
    keeping,
    many,
    proxmox_values,
    runs,
    snapshots,
    stops,
    watching,
    xids,
)
from dflash_ops.cli_many import _result  # pyright: ignore[reportPrivateUsage]
from dflash_ops.remote import notify
from trainer.records import Status

TEXT = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()

HOLDER = gpu_free.Holder(1, 2, 3, "S", None, "root", "x", 1.0, (0,), None, "unknown", None)
FREED = gpu_free.nothing_done(gpu_free.Look("lab / container 200", "b", (HOLDER,), {}, {0: 1.0}, ""), [HOLDER], True)


def documented(section: str) -> set[str]:
    """The fields of a section: what stands in backticks before the first colon of each of its points."""
    body = TEXT.partition(f"\n### {section}\n")[2].partition("\n#")[0]
    points = re.findall(r"^- (.*)$", body, re.MULTILINE)
    return {name for point in points for name in re.findall(r"`([^`]+)`", point.partition(":")[0])}


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_is_documented() -> None:
    run = runs.run_of(facts())
    proof = stops.GpuProof(True, True, "", ())
    shapes: dict[str, set[str]] = {
        "Run": set(run.to_json()),
        "Deployed": fields(deployed.Deployed),
        "Plan": fields(deployed.Plan),
        "ListedRelease": fields(deployed.ListedRelease),
        "RolledBack": fields(deployed.RolledBack),
        "Pruned": fields(deployed.Pruned),
        "Process": fields(runs.RunProcess),
        "Started": set(runs.Started(run, None, (), False).to_json()),
        "Stopped": set(stops.Stopped(run, 1.0, (), (), False, proof).to_json()),
        "GpuProof": fields(stops.GpuProof),
        "Listing": set(stops.Listing((), (), ()).to_json()),
        "Session": fields(stops.Session),
        "HandProcess": fields(stops.HandProcess),
        "SessionStopped": set(stops.SessionStopped("a", 1.0, (), (), (), False, proof).to_json()),
        "GpuStatus": set(gpus.GpuStatus("lab", (), (), ()).to_json()),
        "Gpu": fields(gpus.Gpu),
        "GpuProcess": fields(gpus.GpuProcess) | {"stale"},
        "Xid": fields(xids.Xid),
        "Freed": set(FREED.to_json()),
        "Holder": fields(gpu_free.Holder),
        "Diagnosis": set(checks.Diagnosis("lab", ()).to_json()),
        "Check": fields(checks.Check),
        "View": set(watching.View(run).to_json()),
        "GpuLoad": fields(watching.GpuLoad),
        "Removed": fields(keeping.Removed),
        "Outcome": set(_result(many.Outcome("a", None, None, None, 1.0), 0, lambda value: value)),
        "ContainerStatus": fields(containers.ContainerStatus),
        "Changed": fields(containers.Changed),
        "Snapped": fields(snapshots.Snapped),
        "Snapshot": fields(proxmox_values.Snapshot),
        "Lost": fields(snapshots.Lost),
        "WentBack": fields(snapshots.WentBack),
        "Discovered": fields(discover.Discovered),
        "Added": fields(discover.Added),
        "Notification": set(notify.describe(Path("a-20261129-120000-abcd"), "failed")),
    }
    assert {name: documented(name) for name in shapes} == shapes
    assert set() != documented("Status") <= set(Status.model_fields)
    held = re.search(r"`held`: list of (.*?):", TEXT)
    assert held and set(re.findall(r"`(\w+)`", held.group(1))) == fields(stops.HeldGpu)
    states = re.search(r"`state`: (starting, running.*)", TEXT)
    assert states and set(re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", states.group(1)))) == set(runs.RunState)


def test_every_document_is_json_with_its_version() -> None:
    run = runs.run_of(facts())
    proof = stops.GpuProof(True, True, "", (stops.HeldGpu(0, 1.0, None, (runs.RunProcess(1, "S", None, "x"),)),))
    by_hand = stops.HandProcess(1, "S", "x", 1.0, (0,), None)
    for value in (
        run,
        runs.Started(run, None, (), False, ("a note",)),
        stops.Stopped(run, 1.0, (), (), False, proof),
        stops.Listing((run,), (stops.Session("a", None, True, (by_hand,)),), (by_hand,)),
        stops.SessionStopped("a", 1.0, (), (), (), False, proof),
        gpus.GpuStatus("lab", (), (), ()),
        FREED,
        checks.Diagnosis("lab", (checks.Check("disk", "lab", "ok", "x"),)),
    ):
        assert json.loads(json.dumps(value.to_json()))["schema_version"] == 1


def test_every_exit_code_is_documented() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)}
    ours = {it.exit_code for _, it in inspect.getmembers(errors, inspect.isclass) if issubclass(it, errors.OpsError)}
    assert rows == ours | {0, 130}
