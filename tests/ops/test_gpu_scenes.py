"""Generated scenes of processes on GPUs, in containers and on the host: each is told whose it is, and `gpu free` ends
earlier runs' processes and no other. Real processes in the sandbox."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_scenes
import pytest
from conftest import Box, write_inventory
from stand_in import retry_until

from dflash_ops import gpu_free, status
from dflash_ops.command import Command, Container, Host
from dflash_ops.inventory import load
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

PROGRAM = Path(gpu_scenes.__file__).read_text()
AT_ONCE = 25
MORE = """gpus = [0, 1]
[containers.unprivileged]
host = "box"
vmid = 201
python = "sandbox"
path = "/opt/scenes"
"""


@pytest.fixture
def box(sandbox: SandboxState, tmp_path: Path) -> Box:
    return Box(write_inventory(tmp_path, sandbox.name, more=MORE), sandbox)


def ask(
    shell: Shell, place: Container | Host, path: str, question: dict[str, Any], python: str
) -> list[dict[str, Any]]:
    command = Command((python, "-IS", "-c", PROGRAM, path), json.dumps(question).encode())
    return json.loads(shell.run(place, command, check=True).out)


def scenes(seed: str, count: int) -> list[dict[str, Any]]:
    """Each is in container 200; beside some of them one of container 201, or a service of the host."""
    chosen = random.Random(seed)
    made: list[dict[str, Any]] = []
    for number in range(count):
        where = chosen.choice(["own", "own", "own", "own", "neighbour", "host"])
        # What lies outside of the container may carry the very same run's id and folder.
        kinds = gpu_scenes.KINDS if where == "own" else ("trainer", "stranger", "dead parent")
        made.append(
            {
                "where": where,
                "kind": gpu_scenes.KINDS[number % len(gpu_scenes.KINDS)] if where == "own" else chosen.choice(kinds),
                "run_id": f"s{number}-20261129-120000-{chosen.randrange(1 << 16):04x}",
                "gpu": chosen.randrange(2),
                "mib": chosen.randrange(100, 900),
                "deaf": chosen.random() < 0.2,
                "over": chosen.choice(["ended", "lost"]),
            }
        )
    return made


def test_each_process_is_told_whose_it_is_and_only_earlier_runs_are_ended(
    box: Box, shell: Shell, share: Callable[[list[Any]], list[Any]]
) -> None:
    own, neighbour = box.container, load(box.inventory).container("unprivileged")
    every = scenes("scenes", 500)
    batches = [every[at : at + AT_ONCE] for at in range(0, len(every), AT_ONCE)]
    for batch in share(batches):
        the_batch(box, shell, own, neighbour, batch)


def the_batch(box: Box, shell: Shell, own: Container, neighbour: Container, batch: list[dict[str, Any]]) -> None:
    places = {"own": own, "neighbour": neighbour, "host": box.host}

    def say(where: str, question: dict[str, Any]) -> list[dict[str, Any]]:
        place = places[where]
        path = place.path if isinstance(place, Container) else "/opt/scenes"
        return ask(shell, place, path, question, own.python)

    def say_all(key: str, what: dict[str, list[Any]]) -> dict[str, list[dict[str, Any]]]:
        with ThreadPoolExecutor(len(places)) as pool:
            return dict(zip(places, pool.map(lambda where: say(where, {key: what[where]}), places), strict=True))

    built = say_all("build", {where: [it for it in batch if it["where"] == where] for where in places})
    left: dict[str, list[dict[str, Any]]] = {}
    try:
        check_status(status.gpu_status(shell, box.host, [own, neighbour], own), built, own, neighbour)
        found = gpu_free.look(shell, own)
        chosen = gpu_free.choose(found, [], unknown=False)
        stale = {(it["pid"], it["start"]) for it in built["own"] if it["owner"] == "earlier"}
        assert {(it.pid, it.start) for it in chosen} == stale
        if chosen:
            gpu_free.free(shell, own, found, chosen, grace=0.2)
        assert gpu_free.choose(gpu_free.look(shell, own), [], unknown=False) == []
    finally:
        left = say_all("end", built)
    spared = [it for it in built["own"] if it["owner"] != "earlier"]
    assert left == {**built, "own": spared}
    smi = Command(("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"))
    retry_until(lambda: shell.run(box.host, smi).out.split() == [b"0", b"0"])


def check_status(found: Any, built: dict[str, list[dict[str, Any]]], own: Container, neighbour: Container) -> None:
    told = {(it.vmid, it.container_pid or it.pid): it for it in found.processes if it.kind != "dead"}
    dead = [it for it in found.processes if it.kind == "dead"]
    vmids = {"own": own.vmid, "neighbour": neighbour.vmid, "host": None}
    seen: set[tuple[int | None, int]] = set()
    for where, processes in built.items():
        for it in processes:
            if not it["holds"]:
                continue
            row = told[vmids[where], it["pid"]]
            seen.add((vmids[where], it["pid"]))
            expected = it["owner"] if where == "own" else "host" if where == "host" else "other container"
            assert row.owner == expected, (where, it, row)
            if where == "own":
                assert row.run_id == (
                    None if it["owner"] == "unknown" and it["kind"] != "other folder" else it["run_id"]
                )
            if it["dead_parent"]:
                assert any(row.pid in gone.held_by for gone in dead), (it, dead)
    assert seen == set(told)
    charged = sum(it.used_mib or 0 for it in found.processes)
    overhead = sum(9 for gpu in found.gpus if gpu.used_mib)
    assert sum(gpu.used_mib for gpu in found.gpus) == charged + overhead
