"""Locks of GPUs: whichever numbers two inventories give a GPU, and whichever version of dflash-ops asks, one start has
it and the other one says who."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, write_inventory
from in_container import end_runs, put_stand_in
from stand_in import retry_until

from dflash_ops import gpu_locks, gpus, train
from dflash_ops.command import Command, Container, Host, Result
from dflash_ops.errors import BusyError
from dflash_ops.gpu_locks import LockHolder
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import Started
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

BOX = Container(Host("lab", "lab"), 200, gpus=(3, 1))
A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
RUN = "a-20261129-120000-abcd"


# -- the words


def locked(tmp_path: Path, words: tuple[str, ...], shell: str = "sh", smi: str = "exit 9") -> list[str]:
    """The names that these words would lock, the first first, on a host with this driver's table."""
    script = words[2].replace("/proc/driver/nvidia/gpus", str(tmp_path / "gpus")).replace('exec "$@"', 'echo "$@"')
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (programs / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", script, *words[3:], "lxc", "a b"], capture_output=True, text=True, env=environment, input="stdin"
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("lxc a b\n")
    assert done.stdout.count("flock -n -E 7 -F") == done.stdout.count(".lock ")
    return [word[len("/run/lock/dflash-ops-gpu-") : -len(".lock")] for word in done.stdout.split() if "lock/" in word]


def card(tmp_path: Path, bus: str, uuid: str, more: str = "GPU Excluded:\t No\n") -> None:
    folder = tmp_path / "gpus" / bus
    folder.mkdir(parents=True)
    text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\nDevice Minor: \t 0\n"
    (folder / "information").write_text(text + more)


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_indices_become_uuids_by_the_drivers_table(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    card(tmp_path, "0000:c1:00.0", B)
    card(tmp_path, "0000:01:00.0", A)
    card(tmp_path, "0000:81:00.0", C, "GPU Excluded:\t Yes\n")  # nvidia-smi does not count it
    two = replace(BOX, gpus=(1, 0))
    assert locked(tmp_path, gpu_locks.words(two, (0,)), shell) == ["1", B]
    # In the host's order, however they are asked for.
    assert locked(tmp_path, gpu_locks.words(two, (0, 1)), shell) == ["0", A, "1", B]
    assert locked(tmp_path, gpu_locks.words(two, (0, 1), (B, A)), shell) == ["0", A, "1", B]
    assert locked(tmp_path, gpu_locks.words(two, (0,), (B,)), shell) == ["1", B]
    # What the host does not know is locked by the name it has.
    assert locked(tmp_path, gpu_locks.words(BOX, (0, 1)), shell) == ["1", B, "3"]
    assert locked(tmp_path, gpu_locks.words(two, (0,), (C,)), shell) == [C]


SMI = (
    f"cat > {{0}}/stdin; echo '0, {A}'; echo 'Unable to determine the device handle for GPU0000:02:00'; echo '12, {B}'"
)


@pytest.mark.parametrize("table", ["none", "not used yet"])
def test_indices_become_uuids_by_nvidia_smi_where_the_table_has_none(tmp_path: Path, table: str) -> None:
    if table == "not used yet":
        card(tmp_path, "0000:01:00.0", "GPU-????????-????-????-????-????????????")
    smi = SMI.format(tmp_path)
    wide = replace(BOX, gpus=(12, 0, 1))
    assert locked(tmp_path, gpu_locks.words(wide, (0, 1)), smi=smi) == ["0", A, "12", B]
    assert locked(tmp_path, gpu_locks.words(wide, (2,)), smi=smi) == ["1"]
    assert (tmp_path / "stdin").read_text() == ""  # the command's own is not for nvidia-smi
    for broken in ("exit 9", "echo NVIDIA-SMI has failed; exit 9", "echo '0, GPU-../../etc/x'"):
        assert locked(tmp_path, gpu_locks.words(wide, (0, 1)), smi=broken) == ["12", "0"] or broken


def test_only_the_gpus_in_use_are_locked() -> None:
    assert gpu_locks.words(BOX, (0,))[3:] == ("gpu-locks", "3", "--")
    assert gpu_locks.words(BOX, (0, 1))[3:] == ("gpu-locks", "1", "3", "--")
    assert gpu_locks.words(BOX, ()) == gpu_locks.words(replace(BOX, gpus=()), (0, 1)) == ()


# -- who holds them


def test_holders() -> None:
    def holder(pid: int, age_s: float = 60.0, **more: Any) -> dict[str, Any]:
        return {"pid": pid, "locks": [], "locks_for": None, "vmid": None, "age_s": age_s, **more}

    smi = {"out": f"0, {A}, NVIDIA X\n1, {B}, NVIDIA X\n", "code": 0}
    supervisor = holder(50, locks=[0, 1], locked_uuids=[A, B, C], locks_for=RUN, vmid=200)
    older = holder(60, 0.0, locks=[1], vmid=201)
    view = {"now": 1e9, "smi": {"gpus": smi}, "holders": [supervisor, older]}
    found = gpu_locks.holders(view)
    since = "2001-09-09T01:45:40Z"
    assert found == [
        LockHolder(0, 50, RUN, 200, A, since),
        LockHolder(1, 50, RUN, 200, B, since),
        LockHolder(1, 60, None, 201, B, "2001-09-09T01:46:40Z"),
        LockHolder(None, 50, RUN, 200, C, since),
    ]
    assert [it.pid for it in gpu_locks.of(found, (1,), ())] == [50, 60]
    assert [it.uuid for it in gpu_locks.of(found, (0,), (B, C))] == [B, B, C]
    # nvidia-smi has no answer, and the earlier version has no UUIDs.
    view = {"smi": {"gpus": {"out": "", "code": None}}, "holders": [holder(60, locks=[1])]}
    assert gpu_locks.holders(view) == [LockHolder(1, 60, None, None)]
    assert gpu_locks.of(gpu_locks.holders(view), (1,), (B,)) == gpu_locks.holders(view)


# -- for real


@pytest.fixture(scope="module")
def deployed(sandbox: SandboxState, tmp_path_factory: pytest.TempPathFactory) -> tuple[Container, Container]:
    """Containers 200 and 201 with both GPUs, which the second one's inventory numbers the wrong way round."""
    made: list[Container] = []
    for vmid, numbers in ((200, "[0, 1]"), (201, "[1, 0]")):
        more = f"gpus = {numbers}\n"
        inventory = write_inventory(tmp_path_factory.mktemp("inventory"), sandbox.name, vmid=vmid, more=more)
        made.append(replace(Box(inventory, sandbox).container, path="/opt/locks"))
        put_stand_in(made[-1])
    return made[0], made[1]


@pytest.fixture
def places(deployed: tuple[Container, Container]) -> Iterator[tuple[Container, Container]]:
    yield deployed
    for place in deployed:
        end_runs(place)


def begin(shell: Shell, place: Container, name: str, *on: int) -> Started:
    return train.start(shell, place, StartRequest(name, "", "mine.toml", gpus=on))


def test_two_containers_that_number_gpus_differently_exclude_each_other(
    places: tuple[Container, Container], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = places
    asked: list[Command] = []
    stream = Shell.stream

    def noted(shell: Shell, place: Container, command: Command, **more: Any) -> int:
        asked.append(command)
        return stream(shell, place, command, **more)

    monkeypatch.setattr(Shell, "stream", noted)
    first = begin(shell, own, "a", 0)
    assert first.notes == () and len(asked) == 1
    # Its inventory says that GPU 0 there is the host's 1, which is free.
    with pytest.raises(BusyError, match=rf"GPU 0 of box is taken .*run {first.run.id} in container 200 holds it since"):
        begin(shell, other, "b", 0)
    # It says that GPU 1 there is the host's 0, which is taken; but it is the other one.
    second = begin(shell, other, "b", 1)
    assert len(second.notes) == 1 and "dflash-ops doctor" in second.notes[0]
    with pytest.raises(BusyError, match=rf"GPU 1 of box is taken .*run {second.run.id} in container 201"):
        begin(shell, own, "c", 1)
    # A restart in the place of a run asks for the same GPU, whose number in the inventory is another run's.
    second = train.restart(shell, other, "b", grace=0)
    view = shell.ask(own.host, gpus.host_query())
    held = [(it.index, it.run_id, it.vmid) for it in gpu_locks.holders(view) if it.uuid]
    assert held == [(0, first.run.id, 200), (1, second.run.id, 201)]
    assert sorted(len(it["locks"]) + len(it["locked_uuids"]) for it in view["holders"] if it["locks_for"]) == [2, 2]


def test_an_earlier_version_and_this_one_exclude_each_other(places: tuple[Container, Container], shell: Shell) -> None:
    own, _ = places
    file = "/run/lock/dflash-ops-gpu-1.lock"
    held = Command(("sh", "-c", "echo held; cat"), host_prefix=("flock", "-n", "-E", "7", "-F", file))
    with shell.converse(own, held) as talk:  # as an earlier version starts a run
        assert talk.hear() == b"held"
        with pytest.raises(BusyError, match=r"GPU 1 of box is taken .*process .* of the host in container 200"):
            begin(shell, own, "a", 0, 1)
    retry_until(lambda: shell.run(own, held).code == 0, every=0.3)  # it has ended
    begin(shell, own, "a", 0, 1)
    assert shell.run(own, held).code == gpu_locks.TAKEN


def test_where_sudo_allows_little_the_holder_is_told_from_the_container(
    places: tuple[Container, Container], shell: Shell
) -> None:
    """The locks are the container's own: sudo closes descriptors."""
    own = replace(places[0], host=replace(places[0].host, user="ops"))
    first = begin(shell, own, "a", 0)
    with pytest.raises(BusyError, match=rf"GPU 0 of box is taken .*run {first.run.id} in container 200 holds it since"):
        begin(shell, own, "b", 0)
    # There, too, the locks are those of the GPUs that the container has, not of the inventory's numbers.
    other = replace(places[1], host=own.host)
    second = begin(shell, other, "b", 1)
    assert len(second.notes) == 1 and "dflash-ops doctor" in second.notes[0]
    (it,) = (it for it in gpu_locks.holders(shell.ask(other, gpus.container_query(other))) if it.uuid)
    assert (it.index, it.run_id) == (1, second.run.id)


def test_a_start_that_is_told_and_still_lacks_its_locks_says_so(
    places: tuple[Container, Container], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An lxc-attach that closes descriptors."""
    monkeypatch.setattr(gpu_locks, "_SCRIPT", 'until [ "$1" = -- ]; do shift; done; shift; exec "$@"')
    started = begin(shell, places[0], "a", 0)
    assert len(started.notes) == 1 and "did not come in here" in started.notes[0]


def test_what_a_start_wants_instead() -> None:
    def said(text: str) -> Result:
        return Result(BOX, Command(("x",)), 0, text.encode(), b"")

    wanted = gpu_locks.instead(said(f'{{"ok": true, "lock_instead": {{"uuids": ["{A}"], "held": []}}}}\n'))
    assert wanted == gpu_locks.Instead((A,), ())
    assert gpu_locks.instead(said('{"ok": true, "facts": {}}\n')) is None
