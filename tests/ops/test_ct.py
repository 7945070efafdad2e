"""`ct`: a container started, stopped, snapshotted and put back, through the API and through pvesh."""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import documented
import pytest
import stand_in
from click.testing import Result
from conftest import Cli
from in_container import end_runs, put_stand_in
from stand_in import retry_until
from test_proxmox import by_api, by_ssh, changed_config, wrong
from typer.testing import CliRunner

from dflash_ops import cli_ct, containers, proxmox, snapshots, train
from dflash_ops.cli import app as cli_app
from dflash_ops.command import Command, Container
from dflash_ops.errors import (
    BusyError,
    CancelledError,
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    UsageFault,
)
from dflash_ops.inventory import load
from dflash_ops.proxmox import post
from dflash_ops.remote import since
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import Run
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

VMID = 202


def write_inventory(file: Path, sandbox: SandboxState, way: str, token: str = "bot@pve!dflash") -> Path:
    """An inventory with container 202, whose host is asked one way or the other."""
    user, _, name = token.partition("!")
    api = (
        f'[hosts.box.api]\naddress = "127.0.0.1"\nport = {sandbox.api_port}\nca = "{sandbox.api_ca}"\n'
        f'user = "{user}"\ntoken_name = "{name}"\ntoken_file = "{sandbox.api_tokens / token}"\n'
    )
    api = api if way == "https" else ""
    file.write_text(
        f'default = "trainer"\n[hosts.box]\naddress = "{sandbox.host}"\nport = {sandbox.port}\n'
        f'user = "{sandbox.user}"\nkey = "{sandbox.key}"\nknown_hosts = "{sandbox.known_hosts}"\n{api}'
        f'[containers.trainer]\nhost = "box"\nvmid = {VMID}\npython = "{sandbox.python}"\n'
        f'path = "/opt/test-{secrets.token_hex(4)}"\n'
    )
    return file


@pytest.fixture(params=["https", "pvesh"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def inventory(way: str, sandbox: SandboxState, tmp_path: Path) -> Path:
    return write_inventory(tmp_path / "dflash-ops.toml", sandbox, way)


@pytest.fixture
def place(inventory: Path, sandbox: SandboxState) -> Iterator[Container]:
    """Container 202, stopped; so it is again afterwards, without snapshots."""
    yield load(inventory).container()
    with Shell() as shell:
        root = Container(by_api(sandbox, "root@pam!full"), VMID)
        for it in snapshots.listing(shell, root).snapshots:
            snapshots.remove(shell, root, it.name)
        containers.stop(shell, root, kill=True)


@pytest.fixture
def running(place: Container, shell: Shell) -> Container:
    containers.start(shell, place)
    return place


def ct(inventory: Path, *words: str, stdin: str = "") -> Result:
    """`dflash-ops ct ...` in this process."""
    result = CliRunner().invoke(cli_ct.app, [*words, "--inventory", str(inventory)], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    documented.confirm(["ct", *words], result.stdout_bytes)
    return result


def status_by_pct(shell: Shell, sandbox: SandboxState) -> str:
    asked = Command(("pct", "status", str(VMID)))
    return shell.run(by_ssh(sandbox), asked, check=True).out.decode().strip()


# -- start, stop


def test_from_stopped_to_running_and_back(
    place: Container, inventory: Path, shell: Shell, sandbox: SandboxState, way: str
) -> None:
    started = ct(inventory, "start")
    assert started.stdout.startswith("box / container 202 started on node pve, ")
    assert started.stderr.startswith("starting container 202\n")
    assert status_by_pct(shell, sandbox) == "status: running"
    found = json.loads(ct(inventory, "status", "--json").stdout)
    assert (found["status"], found["here"], found["node"], found["lock"]) == ("running", True, "pve", None)
    assert found["asked"].startswith("box, by pvesh" if way == "pvesh" else "https://127.0.0.1:")
    if way == "https":
        assert ct(inventory, "start").stdout == "box / container 202 runs already, on node pve\n"
        assert ct(inventory, "reboot").stdout.startswith("box / container 202 rebooted on node pve, ")
    with wrong(sandbox, warns="vzshutdown 202"):
        done = json.loads(ct(inventory, "stop", "--timeout", "30", "--json").stdout)
    assert (done["did"], done["changed"], done["warnings"]) == ("stopped", True, 1)
    assert status_by_pct(shell, sandbox) == "status: stopped"


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_stopped_container(place: Container, inventory: Path) -> None:
    assert ct(inventory, "status").stdout == "container 202 (train202) is stopped on node pve\n"
    assert "is stopped already" in ct(inventory, "stop", "--kill").stdout
    with pytest.raises(PreflightError, match=r"container 202 is stopped .*dflash-ops ct start"):
        ct(inventory, "reboot")


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_why_a_start_failed(place: Container, inventory: Path, sandbox: SandboxState) -> None:
    with changed_config(sandbox, VMID, "lock: backup"):
        with pytest.raises(BusyError, match=r"container 202 is locked \(backup\)"):
            ct(inventory, "start")
        assert "locked (backup)" in ct(inventory, "status").stdout
    with (
        changed_config(sandbox, VMID, "dev0: /dev/nvidia-uvm-none"),
        pytest.raises(OpsError, match=r"starting container 202 failed .*Device /dev/nvidia-uvm-none does not exist"),
    ):
        ct(inventory, "start")


def test_no_such_container_and_no_right(sandbox: SandboxState, shell: Shell) -> None:
    for host in (by_api(sandbox), by_ssh(sandbox)):
        with pytest.raises(NotFoundError, match=r"there is no container 999 .*no node of the cluster has it"):
            containers.status(shell, Container(host, 999))
    viewer = by_api(sandbox, "viewer@pve!audit")
    with pytest.raises(PreflightError, match=r"lacks VM.Audit on /vms/202.*or there is no container 202"):
        containers.status(shell, Container(viewer, VMID))
    for verb in (containers.stop, lambda shell, it: snapshots.rollback(shell, it, "s1")):
        with pytest.raises(PreflightError, match=r"lacks VM.PowerMgmt on /vms/200"):
            verb(shell, Container(viewer, 200))
    with pytest.raises(PreflightError, match="the token bot@pve!bare may see no container"):
        containers.status(shell, Container(by_api(sandbox, "bot@pve!bare"), VMID))


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_start_that_does_nothing_is_not_taken_for_one(
    place: Container, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with HA: the task went well, and the container does not run (yet)."""
    monkeypatch.setattr(containers, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(proxmox.Proxmox, "run", lambda *_, **__: proxmox.Task(None, 0, ()))  # type: ignore[arg-type]
    with pytest.raises(OpsError, match="container 202 is not running, though its task went well"):
        containers.start(shell, place)


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_an_answer_that_was_lost(place: Container, inventory: Path, sandbox: SandboxState) -> None:
    asked = containers.again

    def later(found: containers.Found) -> containers.Found:
        return retry_until(lambda: it if (it := asked(found)).running else None)

    with pytest.MonkeyPatch.context() as patch, wrong(sandbox, dies="POST .*"):
        patch.setattr(containers, "again", later)  # it is done, and nobody hears of it
        assert "202 started on node pve" in ct(inventory, "start").stdout
        patch.setattr(containers, "again", lambda found: found)
        with pytest.raises(LinkLostError, match="broke off while it answered POST"):
            ct(inventory, "stop")


@pytest.fixture
def run(running: Container, shell: Shell) -> Iterator[Run]:
    """A run that goes on in it."""
    put_stand_in(running)
    yield train.start(shell, running, StartRequest("mine", "", "mine.toml", gpus=())).run
    if containers.status(shell, running).status == "running":
        end_runs(running)


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_living_run_is_not_ended_unasked(
    run: Run, running: Container, inventory: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = inventory.read_text()
    # The same container, and nobody's run in this folder of it.
    elsewhere = text.replace('"trainer"', '"other"').replace("[containers.trainer]", "[containers.other]")
    other = inventory.with_name("other.toml")
    other.write_text(elsewhere.replace("/opt/test-", "/opt/other-") + text[text.index("[containers.trainer]") :])
    stranger = inventory.with_name("stranger.toml")  # it knows nothing of the folder where the run is
    stranger.write_text(text.replace("/opt/test-", "/opt/other-"))
    there = f"{run.id} in {running.path}"
    for book, words, who in (
        (inventory, ("stop", "--kill"), run.id),
        (other, ("stop",), run.id),
        (stranger, ("reboot",), there),
    ):
        with pytest.raises(BusyError, match=rf"run {who} goes on .*dflash-ops train stop {run.id}"):
            ct(book, *words)
    ct(inventory, "snapshot", "s1")
    for book, who in ((inventory, run.id), (stranger, there)):
        with pytest.raises(
            BusyError, match=rf"a run goes on in container 202 .*: {who}. Next: .*dflash-ops train stop"
        ):
            ct(book, "rollback", "s1", "--confirm-vmid", "202")
        assert f"run {who} goes on: going back is refused" in ct(book, "rollback", "s1", "--dry-run").stdout
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    with pytest.raises(CancelledError, match="nothing was done"):
        ct(inventory, "stop", stdin="n\n")
    assert train.status(shell, running, run.id).state.live
    assert "stopped on node pve" in ct(inventory, "stop", stdin="y\n").stdout


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_container_that_can_not_be_looked_into_is_not_stopped_unasked(
    running: Container, inventory: Path, sandbox: SandboxState
) -> None:
    ct(inventory, "snapshot", "s1")
    inventory.write_text(inventory.read_text().replace(sandbox.python, "/no/python"))
    with pytest.raises(PreflightError, match=r"lost can't be seen: there is no Python .*or dflash-ops ct stop --yes"):
        ct(inventory, "rollback", "s1", "--confirm-vmid", "202")
    with pytest.raises(
        BusyError, match=r"whether a run goes on can't be seen .*--yes, if it is to shut down all the same"
    ):
        ct(inventory, "stop")
    assert ct(inventory, "stop", "--yes").exit_code == 0


# -- snapshots


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_snapshots_are_made_listed_and_removed(
    running: Container, inventory: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no snapshots of box / container 202" in ct(inventory, "snapshots").stdout
    much = "the day before " + "y" * 9000
    assert ct(inventory, "snapshot", "before-x", "--description", much).exit_code == 0
    monkeypatch.setattr(snapshots, "_own_name", lambda: "dflash-now")  # two in one second
    unnamed = [json.loads(ct(inventory, "snapshot", "--json").stdout)["snapshot"] for _ in range(2)]
    assert unnamed == ["dflash-now", "dflash-now-2"]
    asked = snapshots._snapshots
    with monkeypatch.context() as patch:  # somebody makes it between our look and our call
        patch.setattr(snapshots, "_snapshots", lambda found: [it for it in asked(found) if it.name == "dflash-now-3"])
        assert snapshots.make(shell, running).snapshot == "dflash-now-3"
    for name in ("dflash-now-2", "dflash-now-3"):
        ct(inventory, "snapshot", "--remove", name)
    unnamed = "dflash-now"
    listed = json.loads(ct(inventory, "snapshots", "--json").stdout)["snapshots"]
    assert [(it["name"], it["description"]) for it in listed] == [("before-x", much), (unnamed, "made by dflash-ops")]
    shown = ct(inventory, "snapshots").stdout
    assert "the day before" in shown and max(map(len, shown.split("\n"))) < 200
    with pytest.raises(UsageFault, match="there is a snapshot before-x already"):
        ct(inventory, "snapshot", "before-x")
    for bad in ("", "1st", "x", "a b", "current", "a" * 41, "é" * 3):
        with pytest.raises(UsageFault):
            ct(inventory, "snapshot", bad)
    ct(inventory, "snapshot", "--remove", "before-x")
    with pytest.raises(NotFoundError, match=f"there is no snapshot before-x .*it has: {unnamed}"):
        ct(inventory, "snapshot", "--remove", "before-x")
    with pytest.raises(NotFoundError, match="there is no snapshot before-x"):
        ct(inventory, "rollback", "before-x")


def write(shell: Shell, container: Container, script: str) -> str:
    return shell.run(container, Command(("sh", "-ec", f"cd {container.path}; {script}")), check=True).out.decode()


def run_folder(run_id: str, created_at: str) -> str:
    """Shell text that makes a run which is over."""
    return (
        f"mkdir -p runs/{run_id}/checkpoints; echo '{{\"code\": 0}}' > runs/{run_id}/exit.json; "
        f'echo \'{{"created_at": "{created_at}"}}\' > runs/{run_id}/run.json; '
    )


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_going_back_lists_what_is_lost_and_wants_the_number_typed(
    running: Container, inventory: Path, shell: Shell
) -> None:
    old, new = "old-20201130-010000-0001", "new-20991130-010000-0002"
    first, second = (f"20261130-01000{digit}-nogit-0123456{digit}" for digit in "12")
    shell.run(running, Command(("mkdir", "-p", running.path)), check=True)
    made = run_folder(old, "2020-11-30T01:00:00Z") + f"mkdir -p runs/{old}/checkpoints/step-1 releases/{first} env; "
    # What was there before the snapshot is an hour older than it.
    write(
        shell, running, f"{made}touch releases/{first}/.dflash-manifest.json; find . -exec touch -d '1 hour ago' {{}} +"
    )
    ct(inventory, "snapshot", "s1")
    shown = snapshots.lost(shell, running, "s1")
    made = run_folder(new, "2099-11-30T01:00:00Z") + f"mkdir runs/{old}/checkpoints/step-2 releases/{second} env/e1; "
    write(shell, running, f"{made}touch releases/{second}/.dflash-manifest.json env/e1/pyvenv.cfg runs/{old}/log")

    listed = ct(inventory, "rollback", "s1", "--dry-run").stdout
    assert [line.strip() for line in listed.split("\n")[1:-1]] == [
        f"run {new}", f"run {old}: its log, metrics and end since", f"checkpoint {old}/step-2", f"release {second}",
        "environment e1", "data in shared/, runs in folders that the inventory lacks, and any other file",
    ]  # fmt: skip
    # What was agreed to before all that was made is no leave to lose it.
    with pytest.raises(BusyError, match=f"more would be lost than was shown .*: run {new}, .*, environment e1"):
        snapshots.rollback(shell, running, "s1", shown=shown)
    asked = snapshots._snapshots
    with pytest.MonkeyPatch.context() as patch:  # made an hour from now: a clock was set back
        patch.setattr(
            snapshots, "_snapshots", lambda found: [replace(it, created_at=_in_an_hour()) for it in asked(found)]
        )
        assert re.search(r"can't be listed: the clock was set back: it is 3\d+ s behind the snapshot",
                         ct(inventory, "rollback", "s1", "--dry-run").stdout)  # fmt: skip
    for typed in ("", "2020\n"):
        with pytest.raises((CancelledError, UsageFault)):
            ct(inventory, "rollback", "s1", stdin=typed)
    assert ct(inventory, "rollback", "s1", "--yes").exit_code == 2
    with pytest.raises(UsageFault, match="--confirm-vmid is 200, but box / container 202 is meant"):
        ct(inventory, "rollback", "s1", "--confirm-vmid", "200")
    names = f"ls runs releases runs/{old}/checkpoints env"
    assert write(shell, running, names).split().count(new) == 1

    done = ct(inventory, "rollback", "s1", stdin="202\n")
    assert "back at snapshot s1; it runs again" in done.stdout and f"run {new}" in done.stderr
    left = set(write(shell, running, names).split())
    assert {old, first, "step-1"} <= left and not left & {new, second, "step-2", "e1"}


def _in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_rollback_that_leaves_the_container_down_says_so(
    running: Container, inventory: Path, shell: Shell, sandbox: SandboxState, monkeypatch: pytest.MonkeyPatch
) -> None:
    ct(inventory, "snapshot", "s1")
    words = ("rollback", "s1", "--confirm-vmid", "202")
    root = Container(by_api(sandbox, "root@pam!full"), VMID)
    before = _rollbacks(shell, root)
    with (  # the rollback's own task starts it, whether we hear of it or not
        wrong(sandbox, dies="POST .*rollback"),
        pytest.raises(LinkLostError, match=r"has begun is not known .*may be back at s1 already.*dflash-ops ct status"),
    ):
        ct(inventory, *words)
    assert retry_until(lambda: _rollbacks(shell, root) - before).pop()[1] == "OK"
    assert containers.status(shell, running).status == "running"
    # The last section of the file is the snapshot's: the container gets the device by going back.
    with (
        changed_config(sandbox, VMID, "dev0: /dev/nvidia-uvm-none"),
        pytest.raises(OpsError, match=r"uvm-none does not exist.*; container 202 is stopped now.*ct start"),
    ):
        ct(inventory, *words)
    containers.start(shell, running)
    # Where its end says nothing of the start, which is a task of its own there.
    monkeypatch.setattr(snapshots, "_START_SECONDS", 0.0)
    monkeypatch.setattr(snapshots, "post", lambda *path, **_: post(*path))
    with (
        changed_config(sandbox, VMID, "dev0: /dev/nvidia-uvm-none"),
        pytest.raises(OpsError, match=r"is back at snapshot s1, and does not run: .*uvm-none .*ct start"),
    ):
        ct(inventory, *words)


def _rollbacks(shell: Shell, container: Container) -> set[tuple[str, str]]:
    """Those that have ended: (id of the task, how it ended)."""
    with proxmox.connect(shell, container.host) as api:
        tasks = api.get("nodes", "pve", "tasks", vmid=container.vmid, source="archive", typefilter="vzrollback")
        return {(it["upid"], it["status"]) for it in tasks}


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_a_deploy_makes_one_snapshot_of_a_container_and_none_when_it_can_not_deploy(
    place: Container, inventory: Path, shell: Shell, tmp_path: Path
) -> None:
    text = inventory.read_text()
    second = text[text.index("[containers.trainer]") :].replace("trainer", "second").replace("/opt/test-", "/opt/also-")
    inventory.write_text(text + second)
    folder = stand_in.make_release(tmp_path / "code")
    words = ("deploy", str(folder), "--snapshot", "--json", "--on", "trainer,second")
    cli = Cli(inventory)
    failed = cli(*words)
    assert failed.returncode == 6 and b"dflash-ops ct start" in failed.stdout + failed.stderr, failed
    assert snapshots.listing(shell, place).snapshots == ()
    containers.start(shell, place)
    done = cli(*words)
    assert done.returncode == 0, done
    (made,) = snapshots.listing(shell, place).snapshots
    assert made.description == "before a deploy" and done.stdout.count(f'"snapshot": "{made.name}"'.encode()) == 2
    said = done.stderr.decode()
    assert any(  # whichever of the two had its turn first
        f"snapshot {made.name} made; dflash-ops ct rollback -t {name} {made.name} goes back to it" in said
        for name in ("trainer", "second")
    )
    with pytest.raises(UsageFault, match="needs no snapshot"):
        CliRunner().invoke(cli_app, ["deploy", "--snapshot", "--diff"], catch_exceptions=False)


@pytest.mark.parametrize("way", ["https"], indirect=True)
def test_going_back_with_the_container_stopped(running: Container, inventory: Path, shell: Shell) -> None:
    containers.stop(shell, running)
    ct(inventory, "snapshot", "s1")
    ct(inventory, "snapshot", "s2")
    assert "the container is stopped" in ct(inventory, "rollback", "s1", "--dry-run").stdout

    def refused(*_: Any, **__: Any) -> None:
        raise BusyError("it is locked")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(BusyError, match=r"^it is locked$"):
        patch.setattr(proxmox.Proxmox, "run", refused)  # nothing has happened, and nothing more is said
        ct(inventory, "rollback", "s1", "--confirm-vmid", "202")
    done = json.loads(ct(inventory, "rollback", "s1", "--confirm-vmid", "202", "--json").stdout)
    assert (done["started"], done["lost"]["known"]) == (False, False)
    assert containers.status(shell, running).status == "stopped"


def test_what_was_made_since_a_moment(tmp_path: Path) -> None:
    def made(name: str, at: float) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        os.utime(file, (at, at))
        return file

    for at, digit in ((100.0, "1"), (200.0, "2")):
        made(f"releases/20261130-01000{digit}-nogit-0123456{digit}/.dflash-manifest.json", at)
        made(f"env/e{digit}/pyvenv.cfg", at)
        made(f"runs/r-20261130-01000{digit}-000{digit}/exit.json", at)
        made(f"runs/r-20261130-01000{digit}-000{digit}/run.json", at)
        step = tmp_path / f"runs/r-20261130-010001-0001/checkpoints/step-{digit}"
        step.mkdir(parents=True)
        os.utime(step, (at, at))
    found = since.since([tmp_path], 150.0)
    assert abs(found.pop("now") - time.time()) < 600
    assert found == {
        "runs": ["r-20261130-010002-0002"],
        "continued": [],
        "checkpoints": ["r-20261130-010001-0001/step-2"],
        "releases": ["20261130-010002-nogit-01234562"],
        "environments": ["e2"],
    }
    made("runs/r-20261130-010002-0002/run.json", 200.0).write_text('{"created_at": "1970-01-01T00:01:00Z"}')
    assert since.since([tmp_path], 150.0)["runs"] == []
    made("runs/r-20261130-010001-0001/metrics.jsonl", 200.0)
    found = since.since([tmp_path / "none", tmp_path], 150.0)
    assert found["continued"] == ["r-20261130-010001-0001", "r-20261130-010002-0002"]


def test_what_lives_is_found_whatever_its_folder(tmp_path: Path) -> None:
    """By its marks, or by its supervisor, which is alone between a crash and a restart."""
    one, two = f"a-20261130-010001-{secrets.token_hex(2)}", f"b-20261130-010001-{secrets.token_hex(2)}"
    folders = [tmp_path / "x" / "runs" / run_id for run_id in (one, two)]
    for folder in folders:
        folder.mkdir(parents=True)
    marks = {"DFLASH_RUN_ID": one, "DFLASH_RUN_DIR": str(folders[0])}
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with contextlib.ExitStack() as ended:
        for words, env in ((sleep, {**os.environ, **marks}), ([*sleep, "supervisor", str(folders[1])], None)):
            process = ended.enter_context(subprocess.Popen(words, env=env))
            ended.callback(process.kill)

        def elsewhere(*paths: Path) -> list[list[str]]:  # others' runs of this machine may live, too
            return [it for it in since.live(paths)["elsewhere"] if it[0] in (one, two)]

        assert elsewhere(tmp_path / "y") == [[one, str(tmp_path / "x")], [two, str(tmp_path / "x")]]
        (tmp_path / "link").symlink_to(tmp_path / "x")
        assert elsewhere(tmp_path / "link") == [] and {one, two} <= set(since.live([tmp_path / "link"])["live"])
        (folders[0] / "exit.json").write_text("{}")  # what a run left when it ended is none
        assert elsewhere(tmp_path / "y") == [[two, str(tmp_path / "x")]]


# -- on another node


@pytest.fixture
def migrated(place: Container, shell: Shell, sandbox: SandboxState) -> Iterator[Container]:
    """It is on node pve2, though the inventory's host is pve."""

    def migrate(node: str, target: str) -> None:
        with proxmox.connect(shell, by_api(sandbox, "root@pam!full")) as api:
            api.run(post("nodes", node, "lxc", VMID, "migrate", target=target, restart=1), "the migration")

    migrate("pve", "pve2")
    yield place
    migrate("pve2", "pve")


def test_a_migrated_container_is_found_and_its_node_named(
    migrated: Container, inventory: Path, shell: Shell, sandbox: SandboxState
) -> None:
    shown = ct(inventory, "status")
    assert shown.stdout == "container 202 (train202) is stopped on node pve2\n"
    assert "container 202 is on node pve2 now, not on host box: in the inventory, [containers.trainer]" in shown.stderr
    with wrong(sandbox, down=["pve2"]), pytest.raises(OpsError, match="node pve2 does not answer the one we asked"):
        ct(inventory, "status")


# -- secrets


def test_no_secret_is_told_with_debug_either(sandbox: SandboxState, tmp_path: Path) -> None:
    hidden = [file.read_text().strip() for file in sandbox.api_tokens.iterdir()]
    book = write_inventory(tmp_path / "dflash-ops.toml", sandbox, "https", "viewer@pve!audit")
    strange = tmp_path / "strange"
    strange.write_text("bot@pve!x=" + "\n".join([hidden[0], "X-Evil: 1"]))
    strange.chmod(0o600)
    lines = book.read_text()
    cases: list[tuple[str, dict[str, Any]]] = [
        (lines, {}),
        (lines, {"certificate": "other"}),
        (lines.replace(str(sandbox.api_tokens / "viewer@pve!audit"), str(strange)), {}),
    ]
    told = b""
    for text, faults in cases:
        book.write_text(text)
        with wrong(sandbox, unauthorized_delay=0.0, **faults):
            done = Cli(book)("--debug", "ct", "stop")
        assert done.returncode not in (0, 2) and b"Traceback" in done.stderr, done.stderr.decode()
        told += done.stdout + done.stderr
    assert len(hidden) > 3 and not any(secret.encode() in told for secret in hidden)
