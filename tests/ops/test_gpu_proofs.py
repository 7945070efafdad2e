"""What proves that GPU memory is back, and that a card is free: devices that are only mapped, GPUs that are divided."""

import os
from pathlib import Path

import pytest
from test_gpu_strange import UUIDS, smi

from dflash_ops.remote import gpuproof, preflight, probe, processes, stop


def test_a_device_that_is_only_mapped_wants_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "maps").write_text("7f3 rw-s 00000000 00:05 489    /dev/nvidia0\n")
    (tmp_path / "7" / "stat").write_text("7 (python) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 55 0")
    card = gpuproof.Card(0, "GPU-1", "0000:01:00.0", 1551.0, 24576.0)
    monkeypatch.setattr(gpuproof, "look", lambda: gpuproof.Picture((card,), (("GPU-1", 7, 1542.0),)))
    process = processes.read(7)
    assert process
    proof = gpuproof.Proof([process], None, [])
    assert proof.wanted and not proof.back()
    assert [it["pid"] for it in gpuproof.holders_of(card)] == [7]
    (held,) = proof.result()["held"]
    assert (held["charged_mib"], [it["pid"] for it in held["holders"]]) == (1542.0, [7])
    assert stop._holds(process, tmp_path) == "GPU 0"  # what a stop says of who is left alone


ROWS = f"0, {UUIDS[0]}, 00000000:01:00.0, 20000, 24576, Enabled\n1, {UUIDS[1]}, 00000000:02:00.0, 9, 24576, [N/A]\n"


def test_what_other_mig_instances_use_keeps_no_run_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, code=0, gpu_rows=ROWS)
    picture = gpuproof.look()
    assert [(card.used, card.cut) for card in picture.cards] == [(None, True), (9.0, False)]
    assert preflight._taken(tmp_path, [0, 1], picture) == []
    # A process of this container on an instance is told of the card, and takes it.
    smi(tmp_path, monkeypatch, code=0, gpu_rows=ROWS, app_rows=f"MIG-aaaa, {os.getpid()}, 100\n")
    picture = gpuproof.look()
    assert picture.charges == ((UUIDS[0], os.getpid(), 100.0),)
    ((fault, lives),) = preflight._taken(tmp_path, [0], picture)
    assert lives and fault.parts["what"] == "GPU 0 is taken" and "uses 100 MiB" in fault.parts["why"]
    # Of several that are cut it is the one that the process holds; of a dead one it can't be told.
    both = ROWS.replace("[N/A]", "Enabled")
    smi(tmp_path, monkeypatch, code=0, gpu_rows=both, app_rows=f"MIG-aaaa, {os.getpid()}, 100\nMIG-b, 4194303, 5\n")
    monkeypatch.setattr(probe, "minors", lambda pid: [1] if pid == os.getpid() else [])
    monkeypatch.setattr(probe, "device_minor_by_bus", dict[str, int])
    assert gpuproof.look().charges == ((UUIDS[1], os.getpid(), 100.0), ("MIG-b", 4194303, 5.0))


def test_a_driver_that_knows_no_mig_is_asked_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, code=0, gpu_rows=f"0, {UUIDS[0]}, 00000000:01:00.0, 9, 24576\n")
    program = tmp_path / "nvidia-smi"
    refuses = (
        'case "$1" in *mig.mode*) echo "Field \\"mig.mode.current\\" is not a valid field to query."; exit 2;; esac'
    )
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{refuses}\n"))
    picture = gpuproof.look()
    assert (picture.why, [(card.used, card.cut) for card in picture.cards]) == ("", [(9.0, False)])
