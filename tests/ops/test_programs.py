"""docs/programs.md says what programs get: the exit codes, and the fields of each JSON document."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Cli
from documented import COMMANDS, SECTIONS, TEXT, compare
from in_process import InProcess
from test_runs import facts

from dflash_ops import (
    checks,
    containers,
    data,
    deployed,
    discover,
    environment,
    errors,
    gpu_free,
    gpus,
    inventory_view,
    keeping,
    many,
    proxmox_values,
    runs,
    snapshots,
    stops,
    watching,
    xids,
)
from dflash_ops.cli import app
from dflash_ops.cli_many import _result  # pyright: ignore[reportPrivateUsage]
from dflash_ops.remote import notify
from trainer.records import Status

HOLDER = gpu_free.Holder(1, 2, 3, "S", None, "root", "x", 1.0, (0,), None, "unknown", None)
FREED = gpu_free.nothing_done(gpu_free.Look("lab / container 200", "b", (HOLDER,), {}, {0: 1.0}, ""), [HOLDER], True)


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
        "Moved": fields(data.Moved),
        "Synced": fields(environment.Synced),
        "Checked": fields(environment.Checked),
        "Row": fields(environment.Row),
        "Environment": fields(environment.Environment),
        "WarmedUp": fields(environment.WarmedUp),
        "Sandbox": {"schema_version", "name", "pid", "host", "port", "user", "key", "known_hosts", "containers"}
        | {"nodes", "api_port", "api_ca", "api_tokens"},  # as tests/sandbox/test_cli.py sees it
        "Status": set(Status.model_fields),
        "Entry": fields(inventory_view.Entry),
        "Discovery": fields(discover.Discovery) | {"added"},
        "Discovered": fields(discover.Discovered),
        "Added": fields(discover.Added),
        "Notification": set(notify.describe(Path("a-20261129-120000-abcd"), "failed")),
    }
    assert {name: set(told) for name, told in SECTIONS.items()} == shapes
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
    assert rows == ours | {0, 130, 141}


# -- what commands really print: each document that a test asks for is compared (see Cli in conftest.py)


def commands(group: Any, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """By its words, every command of Typer's that help shows."""
    if not hasattr(group, "commands"):
        return {} if group.hidden else {before: group}
    return {words: it for name, one in group.commands.items() for words, it in commands(one, (*before, name)).items()}


def test_every_command_that_prints_json_is_in_the_table() -> None:
    found = commands(typer.main.get_command(app))
    told = {tuple(word for word in command if not word.startswith("--")) for command in COMMANDS}
    assert told == {words for words, it in found.items() if any("--json" in one.opts for one in it.params)}


def test_the_documents_that_no_other_test_asks_for(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    cli = InProcess(cli.inventory)
    assert cli("put", str(tmp_path / "file"), "shared/").returncode == 0
    for words in (
        ["inventory", "list"],
        ["inventory", "show", "trainer"],
        ["inventory", "check"],
        ["train", "list"],
        ["train", "list", "--on", "trainer"],
        ["env", "list"],
        ["get", "shared/file", str(tmp_path / "here")],
    ):
        assert cli(*words, "--json").stdout, words


@pytest.mark.parametrize(
    ("words", "document", "told"),
    [
        (["releases"], {"damaged": ""}, ["releases has no releases, which is told"]),
        (["releases"], {"releases": [], "damaged": "", "x": 1}, ["releases has x, which is not told"]),
        (
            ["-t", "a", "releases"],
            {"releases": [{"id": "a", "current": True, "files": 1, "size": 1, "commit": None}], "damaged": ""},
            ["releases.releases has no damaged, which is told"],
        ),
        (["train", "rm", "--on=a"], {"results": [{}]}, list(SECTIONS["Outcome"])),
        (
            ["inventory", "check"],
            {"file": "", "ok": True, "faults": [{"a": 1}], "checks": [], "unreached": []},
            ["has a", "no key", "no why", "no line"],
        ),
        (["rollback"], {"container": {"a": 1}, "release": "", "previous": ""}, ["an object, of which nothing is told"]),
        (["prune"], {"container": "", "dry_run": True, "removed": [], "kept": [{"id": ""}], "freed": 0}, ["no why"]),
        (["frobnicate"], {}, ["frobnicate is in no row of the table"]),
    ],
)
def test_a_document_that_is_not_as_told_is_found(words: list[str], document: dict[str, Any], told: list[str]) -> None:
    found = compare(words, json.dumps({"schema_version": 1, **document}))
    assert len(found) == len(told)
    assert all(one in line for one, line in zip(told, found, strict=True))
