"""gpu-status over real ssh: two containers, one of them twice in the inventory, one stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory
from in_container import end_runs, put_stand_in
from in_process import InProcess
from stand_in import retry_until

from dflash_ops import gpu_join, gpus, train
from dflash_ops.command import Command
from dflash_ops.inventory import load
from dflash_ops.run_request import StartRequest
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

MORE = """gpus = [0, 1]
[containers.unprivileged]
host = "box"
vmid = 201
python = "sandbox"
path = "/opt/status"
gpus = [0, 1]
[containers.again]
host = "box"
vmid = 200
python = "sandbox"
path = "/opt/another-folder-of-200"
[containers.stopped]
host = "box"
vmid = 202
python = "sandbox"
"""


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    return Box(write_inventory(tmp_path, sandbox.name, more=MORE), sandbox)


def test_gpu_status_of_two_containers(box: Box, cli: Cli, shell: Shell) -> None:
    started = {}
    for name, gpu in (("trainer", 0), ("unprivileged", 1)):
        container = load(box.inventory).container(name)
        put_stand_in(container)
        run = train.start(shell, container, StartRequest(name, "", "c.toml", gpus=(gpu,))).run
        started[container.vmid] = (container, run.id)
    try:

        def both() -> list[dict[str, object]]:
            found = json.loads(InProcess(cli.inventory)("gpu-status", "--json").stdout)["processes"]
            return found if len(found) == 2 else []

        rows = sorted(retry_until(both, every=0.3), key=lambda row: str(row["vmid"]))
        assert [(row["vmid"], row["run_id"], row["kind"]) for row in rows] == [
            (200, started[200][1], "run"),
            (201, started[201][1], "run"),
        ]
        assert all(row["used_mib"] == 1542.0 and row["age_s"] >= 0 and row["container_pid"] for row in rows)
        shown = cli("gpu-status")
        text = shown.stdout.decode()
        assert shown.returncode == 0
        assert started[200][1] in text and started[201][1] in text and "200: 0, 201: 0" in text
        assert "container 202 is stopped" in shown.stderr.decode()
    finally:
        for container, _ in started.values():
            end_runs(container)
    assert json.loads(InProcess(cli.inventory)("gpu-status", "--json").stdout)["processes"] == []


def test_a_host_without_the_driver_says_so(box: Box, shell: Shell) -> None:
    command = replace(gpus.host_query().command, env={"PATH": "/nowhere"})
    argv = ("/usr/bin/python3", *command.argv[1:])
    view = gpus.host_query().parse(shell.run(box.host, replace(command, argv=argv)))
    status = gpu_join.join("box", view, {})
    assert status.gpus == ()
    assert status.problems[0] == "box: nvidia-smi: No such file or directory"


def test_a_probes_own_nvidia_smi_is_no_holder(box: Box, shell: Shell) -> None:
    container = load(box.inventory).container("trainer")
    hold = "import os, sys; os.open('/dev/nvidia0', 0); print('held', flush=True); sys.stdin.read()"
    for mark, seen in (("DFLASH_OPS_PROBE", False), ("DFLASH_OPS_OTHER", True)):
        with shell.converse(container, Command((container.python, "-c", hold), env={mark: "1"})) as talk:
            assert talk.hear() == b"held"
            holders = shell.ask(box.host, gpus.host_query())["holders"]
            assert any("os.open('/dev/nvidia0'" in holder["command"] for holder in holders) == seen
