"""`inventory discover`: containers with their GPUs, and the chosen ones written into the inventory."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import documented
import pytest
import typer
from click.testing import Result
from test_ct import write_inventory
from test_proxmox import by_api, wrong
from typer.testing import CliRunner

from dflash_ops import cli_ct, discover, proxmox
from dflash_ops.errors import NotFoundError, PreflightError, UsageFault
from dflash_ops.inventory import load, parse
from dflash_ops.proxmox import post
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

_app = typer.Typer()
_app.command()(cli_ct.discover)


@pytest.fixture(params=["https", "pvesh"])
def inventory(request: pytest.FixtureRequest, sandbox: SandboxState, tmp_path: Path) -> Path:
    """An inventory with a comment, that knows container 202."""
    file = write_inventory(tmp_path / "dflash-ops.toml", sandbox, request.param)
    file.write_text("# mine\n" + file.read_text() + "gpus = []  # none yet\n")
    return file


def run(inventory: Path, *words: str, stdin: str = "") -> Result:
    result = CliRunner().invoke(_app, [*words, "--inventory", str(inventory)], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    documented.confirm(["inventory", "discover", *words], result.stdout_bytes)
    return result


def test_containers_are_shown_with_their_gpus_and_added_with_comments_kept(inventory: Path) -> None:
    found = json.loads(run(inventory, "--json").stdout)
    by_vmid = {it["vmid"]: it for it in found["containers"]}
    assert (found["host"], found["node"], found["added"]) == ("box", "pve", [])
    assert sorted(by_vmid) == [200, 201, 202]
    assert [by_vmid[vmid]["gpus"] for vmid in (200, 201, 202)] == [[0, 1], [0, 1], []]
    assert by_vmid[201]["problems"] == []
    assert [by_vmid[vmid]["known_as"] for vmid in (200, 201, 202)] == [[], [], ["trainer"]]
    assert (by_vmid[200]["host"], by_vmid[200]["node"], by_vmid[200]["name"]) == ("box", "pve", "train200")
    before = inventory.read_text()
    assert (
        "added container 201 as second on host box, GPUs 0, 1"
        in run(inventory, "box", "--add", "200,201=second").stdout
    )
    after = inventory.read_text()
    assert after.startswith(before)
    book = load(inventory)
    assert [(it.vmid, it.gpus) for it in book.select(["train200", "second"])] == [(200, (0, 1)), (201, (0, 1))]
    with pytest.raises(UsageFault, match=r"container 201 is in the inventory already .*as second"):
        run(inventory, "--add", "201")
    with pytest.raises(NotFoundError, match=r"there is no container 999 to add .*200, 201, 202"):
        run(inventory, "--add", "999")
    for word in ("x", "201=", "-1"):
        with pytest.raises(UsageFault, match="is no VMID"):
            run(inventory, "--add", word)
    assert inventory.read_text() == after


@pytest.mark.parametrize("inventory", ["https"], indirect=True)
def test_on_a_terminal_it_asks_which(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor in (0, 2))
    before = inventory.read_text()
    shown = run(inventory, stdin="\n")
    assert "train201" in shown.stdout and "Add which to" in shown.stderr and inventory.read_text() == before
    assert "added container 201 as train201" in run(inventory, stdin="201\n").stdout
    monkeypatch.undo()
    assert "Add which" not in run(inventory).stderr  # a pipe is asked nothing


def test_a_token_that_sees_nothing(sandbox: SandboxState, shell: Shell, tmp_path: Path) -> None:
    book = load(write_inventory(tmp_path / "i.toml", sandbox, "https", "bot@pve!bare"))
    with pytest.raises(PreflightError, match="the token bot@pve!bare may see no container"):
        discover.discover(shell, book, book.host("box"))
    viewer = load(write_inventory(tmp_path / "i.toml", sandbox, "https", "viewer@pve!audit"))
    assert [it.vmid for it in discover.discover(shell, viewer, viewer.host("box")).containers] == [200]


@pytest.fixture
def elsewhere(sandbox: SandboxState, shell: Shell) -> Iterator[None]:
    """Container 202 is on node pve2."""

    def migrate(node: str, target: str) -> None:
        with proxmox.connect(shell, by_api(sandbox, "root@pam!full")) as api:
            api.run(post("nodes", node, "lxc", 202, "migrate", target=target), "the migration")

    migrate("pve", "pve2")
    yield
    migrate("pve2", "pve")


def test_a_container_of_another_node_brings_its_host(
    elsewhere: None, inventory: Path, sandbox: SandboxState, shell: Shell
) -> None:
    inventory.write_text(inventory.read_text().replace("vmid = 202", "vmid = 200"))
    book = load(inventory)
    found = discover.discover(shell, book, book.host("box"))
    (it,) = [it for it in found.containers if it.vmid == 202]
    assert (it.node, it.host, it.known_as, it.stale) == ("pve2", None, (), {})
    with wrong(sandbox, down=["pve2"]):
        (silent,) = [it for it in discover.discover(shell, book, book.host("box")).containers if it.vmid == 202]
    assert silent.status == "unknown" and "node pve2 does not answer" in silent.problems[0]
    shown = run(inventory, "--add", "202=moved").stdout
    assert "[hosts.pve2] is new" in shown
    assert load(inventory).container("moved").host.address == "pve2"
    with pytest.raises(UsageFault, match="container 202 is in the inventory already"):
        run(inventory, "--add", "202=again")


def test_a_container_that_was_migrated_is_known_and_not_written_twice(elsewhere: None, inventory: Path) -> None:
    before = inventory.read_text()
    (it,) = [it for it in json.loads(run(inventory, "--json").stdout)["containers"] if it["vmid"] == 202]
    assert (it["node"], it["known_as"], it["stale"]) == ("pve2", ["trainer"], {"trainer": "box"})
    assert "trainer (says box; now on pve2)" in run(inventory).stdout
    with pytest.raises(UsageFault, match=r"change `host` in \[containers\.trainer\] to a host that is pve2"):
        run(inventory, "--add", "202")
    assert inventory.read_text() == before
    inventory.write_text(before + '[hosts.second]\naddress = "pve2"\n')
    with pytest.raises(UsageFault, match=r"change `host` in \[containers\.trainer\] to second"):
        run(inventory, "--add", "202")
    inventory.write_text(before.replace('host = "box"', 'host = "second"') + '[hosts.second]\naddress = "pve2"\n')
    (it,) = [it for it in json.loads(run(inventory, "box", "--json").stdout)["containers"] if it["vmid"] == 202]
    assert (it["known_as"], it["stale"]) == (["trainer"], {})


def test_a_number_in_another_cluster_is_another_container() -> None:
    text = (
        '[hosts.lab]\naddress = "lab"\n[hosts.again]\naddress = "lab"\n[hosts.far]\naddress = "far"\n'
        '[hosts.two]\naddress = "pve2"\n'
    )
    text += "".join(f'[containers.{on}1]\nhost = "{on}"\nvmid = 200\n' for on in ("lab", "again", "far", "two"))
    book = parse(text, Path("i.toml"))
    hosts = discover._hosts_by_node(book, "lab", "pve")
    cluster = discover._of_the_cluster(book, hosts, "lab", "pve", ["pve", "pve2"])
    assert cluster == {"lab": "pve", "again": "pve", "two": "pve2"}
    assert discover._known_as(book, cluster, 200) == {"lab1": "lab", "again1": "again", "two1": "two"}


def made(**keys: Any) -> discover.Discovered:
    plain = discover.Discovered("pve", 200, "train", "running", (0,), False, (), "lab", ())
    return replace(plain, **keys)


@pytest.mark.parametrize(
    ("name", "taken", "chosen"),
    [
        ("train", [], "train"), ("train", ["train"], "train-200"), ("gpu.lan.example", [], "gpu"),
        ("all", [], "ct200"), ("ü!", [], "ct200"), ("a b", [], "a-b"), ("", [], "ct200"),
        ("x" * 80, ["x" * 50], f"{'x' * 50}-200"),
    ],
)  # fmt: skip
def test_what_a_container_is_called(name: str, taken: list[str], chosen: str) -> None:
    assert discover.free_name(made(name=name), taken) == chosen


def test_a_host_is_known_by_its_node_its_name_or_its_address() -> None:
    text = (
        '[hosts.lab]\naddress = "10.0.0.1"\n[hosts.lab.api]\nnode = "pve1"\n[hosts.pve2]\naddress = "10.0.0.2"\n'
        '[hosts.third]\naddress = "pve3.lan"\n'
    )
    hosts = discover._hosts_by_node(parse(text, Path("i.toml")), "third", "own")
    assert [hosts.get(node) for node in ("pve1", "pve2", "pve3", "own", "pve4")] == [
        "lab",
        "pve2",
        "third",
        "third",
        None,
    ]


def test_what_can_not_be_written_is_not(tmp_path: Path) -> None:
    file = tmp_path / "i.toml"
    file.write_text('[hosts.pve2]\naddress = "10.0.0.2"\n[hosts.lab]\naddress = "lab"\n')
    book = load(file)
    one, other = made(vmid=201, name="x"), made(vmid=202, name="y", host=None, node="pve2")
    found = discover.Discovery("lab", "", "pve", (one, other))
    with pytest.raises(UsageFault, match="two containers can't both be x"):
        discover.add(
            file, book, discover.Discovery("lab", "", "pve", (one, replace(one, vmid=203))), {201: "x", 203: "x"}
        )
    with pytest.raises(UsageFault, match="node pve2 of container 202 is no host that is known"):
        discover.add(file, book, found, {201: None, 202: None})
    assert load(file).tables.containers == {}
    assert discover.add(file, book, found, {}) == []
