"""inventory list, show and check: what the file says, and whether the machines agree."""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli

from dflash_ops import cli_inventory, inventory_check, inventory_probe, inventory_view
from dflash_ops.checks import Check
from dflash_ops.command import Command, Container, Host, Local, Result
from dflash_ops.errors import ConfigError, NotFoundError, OpsError, PreflightError, TimedOutError
from dflash_ops.inventory import load, parse
from dflash_ops.inventory_probe import Card, Cards, Inside
from dflash_ops.shell import Shell

HOST = Host("lab", "lab")
A, B, C = (Card(index, f"GPU-{index}", "NVIDIA H200") for index in range(3))
TEXT = """
[hosts.lab]
address = "lab"
[hosts.lab.api]
user = "bot@pve"
[hosts.bare]
address = "bare"
[containers.a]
host = "lab"
vmid = 200
gpus = [1]
[containers.b]
host = "lab"
vmid = 201
[groups]
night = ["lab"]
none = ["bare"]
"""


def result(out: str, code: int = 0, err: str = "") -> Result:
    return Result(HOST, Command(("x",)), code, out.encode(), err.encode())


# -- the words of machines


def test_pct_list_is_read_by_its_columns() -> None:
    rows = [
        "VMID       Status     Lock         Name                ",
        "200        running    backup       train200            ",
        "202        stopped                 with.dots           ",
        "203        running                                     ",
        "",
    ]
    listed = inventory_probe.containers().parse(result("\n".join(rows)))
    assert [(it.vmid, it.status, it.name) for it in listed] == [
        (200, "running", "train200"),
        (202, "stopped", "with.dots"),
        (203, "running", ""),
    ]
    assert inventory_probe.containers().parse(result("")) == ()  # no containers: not even the head


@pytest.mark.parametrize(
    ("code", "err", "error", "says"),
    [
        (127, "bash: pct: command not found", PreflightError, "the host has no pct"),
        (111, "ipcc_send_rec[1] failed: Connection refused", OpsError, "pct list failed.*Connection refused"),
    ],
)
def test_a_host_without_a_working_pct_is_told(code: int, err: str, error: type[OpsError], says: str) -> None:
    with pytest.raises(error, match=says):
        inventory_probe.containers().parse(result("", code, err))


@pytest.mark.parametrize(
    ("out", "code", "cards", "refused"),
    [
        ("0, GPU-0, NVIDIA H200\n1, GPU-1, NVIDIA H200\n", 0, (A, B), ""),
        ("No devices were found\n", 6, (), "No devices were found"),
        ("NVIDIA-SMI has failed because it couldn't communicate\n", 9, (), "couldn't communicate"),
        ("", 127, (), "there is no nvidia-smi"),
        ("", 0, (), "no output"),
        ("0, GPU-0, NVIDIA H200\n", 15, (), "GPU-0"),
    ],
)
def test_nvidia_smi_is_read_by_its_rows(out: str, code: int, cards: tuple[Card, ...], refused: str) -> None:
    found = inventory_probe.cards().parse(result(out, code))
    assert found.cards == cards and refused in found.refused and bool(found.refused) == (not cards)


def test_what_is_in_a_container_is_read_line_by_line() -> None:
    query = inventory_probe.inside(Container(HOST, 200))
    out = "python 0 3.11.7\npath\nuser id: 'x': no such user\ncards 0\n0, GPU-0, NVIDIA H200\n"
    assert query.parse(result(out)) == Inside((3, 11, 7), "3.11.7", "", "id: 'x': no such user", Cards((A,)))
    odd = query.parse(result("python 127 sh: x: not found\npath it is full\nuser\ncards 127\nsh: not found\n"))
    assert odd == Inside(None, "sh: x: not found", "it is full", "", Cards((), "there is no nvidia-smi"))
    with pytest.raises(OpsError, match="did not answer"):
        query.parse(result("", 1, "lxc-attach: 200: Failed"))


# -- the verdicts


def judged(seen: Inside, gpus: tuple[int, ...] = (), *, user: str | None = None) -> dict[str, Check]:
    host = Cards((A, B, C))
    container = Container(HOST, 200, gpus=gpus, user=user)
    return {check.name: check for check in inventory_check.judge("t", container, host, seen)}


def inside(cards: tuple[Card, ...] = (), python: tuple[int, int, int] | None = (3, 12, 1), **said: str) -> Inside:
    words = {"path": "", "user": "", **said}
    return Inside(python, "", words["path"], words["user"], Cards(cards, "" if cards else "there is no nvidia-smi"))


def test_what_is_well_is_ok() -> None:
    found = judged(inside((C, A)), (2, 0), user="train")
    assert {name: check.level for name, check in found.items()} == dict.fromkeys(
        ("python", "path", "user", "GPUs"), "ok"
    )
    assert found["GPUs"].evidence == "2, 0: 2x NVIDIA H200"


@pytest.mark.parametrize(
    ("seen", "gpus", "name", "level", "says"),
    [
        (inside(python=None), (), "python", "failure", "does not run"),
        (inside(python=(3, 8, 2)), (), "python", "failure", "3.8.2"),
        (inside(python=(3, 9, 2)), (), "python", "warning", "the trainer needs 3.11"),
        (inside(path="Read-only file system"), (), "path", "failure", "/opt/dflash can't be written: Read-only"),
        (inside(user="id: no such user"), (), "user", "failure", "no such user"),
        (inside((A, C)), (2, 0), "GPUs", "failure", "the container has the host's 0, 2, in that order"),
        (inside((A,)), (0, 1), "GPUs", "failure", "the container has the host's 0,"),
        (inside(), (0,), "GPUs", "failure", "sees none: there is no nvidia-smi"),
        (inside((A,)), (7,), "GPUs", "failure", "the host has no GPU 7; it has 0, 1, 2"),
        (inside((Card(0, "GPU-9", "x"),)), (0,), "GPUs", "failure", "the host's unknown"),
        (inside((A, B)), (), "GPUs", "note", "the inventory names none"),
    ],
)
def test_what_is_wrong_is_told(seen: Inside, gpus: tuple[int, ...], name: str, level: str, says: str) -> None:
    check = judged(seen, gpus, user="train")[name]
    assert check.level == level and says in check.evidence and check.fix


def test_two_names_for_one_place_are_remarked() -> None:
    text = '[hosts.a]\naddress = "x"\n[hosts.b]\naddress = "x"\n[hosts.c]\naddress = "x"\nport = 2222\n'
    for name, host, more in (("p", "a", ""), ("q", "b", ""), ("r", "a", ""), ("s", "a", 'path = "/other"')):
        text += f'[containers.{name}]\nhost = "{host}"\nvmid = 200\n{more}\n'
    found = inventory_check.remarks(parse(text, Path("x")).tables)
    assert [(check.level, check.where) for check in found] == [("note", "b"), ("note", "r")]


class Answers(Shell):
    """A host of one container; what is not answered hangs."""

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self._hangs = hangs
        self.asked: list[tuple[str, ...]] = []

    def ask(self, place: Any, query: Any, *, timeout: float | None = None) -> Any:
        words = query.command.argv
        self.asked.append(words)
        if words[0] == "pct":
            return query.parse(result(f"VMID Status Lock Name\n200 running {'':>22} train\n"))
        if self._hangs == "host" and isinstance(place, Host):
            raise TimedOutError("no answer within 20 s", where=str(place))
        if self._hangs == "container" and isinstance(place, Container) and not words[-1]:
            raise TimedOutError("no answer within 20 s", where=str(place))
        rows = words[-1] if isinstance(place, Container) and words[-1] else "0, GPU-0, NVIDIA H200"
        inside = f"python 0 3.12.1\npath\nuser\ncards {int(bool(words[-1]))}\n{rows}\n"
        return query.parse(result(inside if isinstance(place, Container) else rows))


@pytest.mark.parametrize("hangs", ["host", "container"])
def test_an_nvidia_smi_that_hangs_hides_nothing_else(hangs: str) -> None:
    container = Container(HOST, 200, gpus=(0,), name="t")
    found = inventory_check.look(Answers(hangs), HOST, {"t": container})
    levels = {(check.name, check.where): check.level for check in found}
    assert levels["python", "t"] == levels["path", "t"] == levels["container", "t"] == "ok"
    (bad,) = [check for check in found if check.level == "failure"]
    assert bad.name == "GPUs" and "no answer within 20 s" in bad.evidence
    assert bad.where == ("lab" if hangs == "host" else "t")


def test_all_but_the_gpus_can_be_asked(tmp_path: Path) -> None:
    query = inventory_probe.inside(Container(HOST, 200, str(tmp_path), sys.executable), "it hangs")
    with Shell() as shell:
        seen = query.parse(shell.run(Local(), query.command))
    assert seen.python == sys.version_info[:3] and seen.path == "" and seen.cards == Cards((), "it hangs")


def test_files_that_are_not_there_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "i.toml", tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "here").touch()
    file.write_text(
        """source = "gone"
[hosts.lab]
address = "lab"
key = "nokey"
known_hosts = "here"
ssh_config = "folder"
[hosts.lab.api]
token_file = "here/x"
ca = "no.pem"
"""
    )
    faults, checks = inventory_check.files(load(file))
    assert faults == [] and {check.level for check in checks} == {"warning"}
    said = {check.where.removeprefix("hosts.lab."): check.evidence.removeprefix(f"{tmp_path}/") for check in checks}
    assert said == {
        "source": "gone is not there",
        "key": "nokey is not there",
        "ssh_config": "folder is a folder",
        "api.token_file": "here/x can't be read: Not a directory",
        "api.ca": "no.pem is not there",
    }
    cli_inventory.check(inventory=file)
    assert "warning: file (hosts.lab.key)" in capsys.readouterr().out
    file.write_text(file.read_text().replace('"gone"', '"here"').replace('"nokey"', '"~no-such-user/k"'))
    assert any(check.evidence.endswith("here is no folder") for check in inventory_check.files(load(file))[1])
    with pytest.raises(ConfigError, match="one thing is wrong"):
        cli_inventory.check(inventory=file)
    assert "i.toml:4: hosts.lab.key: '~no-such-user/k' has no home folder" in capsys.readouterr().out


def test_a_host_without_containers_can_be_asked_alone() -> None:
    book = parse(TEXT, Path("/x.toml"))
    assert inventory_check.wanted(book, ["bare"]) == ((), ("bare",))
    assert inventory_check.wanted(book, ["b,bare"]) == (("b",), ("bare",))
    assert inventory_check.wanted(book, ["lab"]) == (("a", "b"), ("lab",))
    assert inventory_check.wanted(book, []) == (("a", "b"), ("lab", "bare"))
    for words in (["none"], ["bare", "nope"]):
        with pytest.raises(NotFoundError):
            inventory_check.wanted(book, words)


# -- what the file says


def test_lists_and_names_as_values() -> None:
    book = parse(TEXT, Path("/x.toml"))
    listing = inventory_view.listing(book)
    assert listing["default"] is None and [it["groups"] for it in listing["containers"]] == [["night"], ["night"]]
    assert [(it["name"], it["containers"]) for it in listing["groups"]] == [("night", ["a", "b"]), ("none", [])]
    assert inventory_view.empty_hosts(book) == ["bare"]
    (entry,) = inventory_view.about(book, "a")
    said = {row.key: row.value for row in entry.rows if row.said}
    assert said == {"host": "lab", "vmid": 200, "gpus": [1]} and "pins.torch" in {row.key for row in entry.rows}
    (host,) = inventory_view.about(book, "lab")
    assert host.containers == ("a", "b") and "api.user" in {row.key for row in host.rows if row.said}
    with pytest.raises(NotFoundError, match="nearest: night"):
        inventory_view.about(book, "nigth")


# -- for real


def run(cli: Cli, *words: str, code: int = 0) -> tuple[str, str]:
    done = cli("inventory", *words)
    assert done.returncode == code, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_list_show_and_schema_are_printed(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    cli_inventory.list_(box.inventory)
    listed = capsys.readouterr().out
    assert "trainer *" in listed and str(box.inventory) in listed
    cli_inventory.show("trainer", box.inventory)
    shown = capsys.readouterr().out
    assert "vmid = 200" in shown and 'via = "lxc-attach"  (default)' in shown
    cli_inventory.schema()
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False


def test_check_asks_every_host_and_ends_with_the_worst(box: Box, cli: Cli, silent: int) -> None:
    state = box.sandbox
    reached = f"""
address = "{box.host.address}"
port = {box.host.port}
user = "root"
key = "{box.host.key}"
known_hosts = "{box.host.known_hosts}"
"""
    box.inventory.write_text(
        f"""
[hosts.box]
sandbox = "{state.name}"
[hosts.dead]
address = "127.0.0.1"
port = {silent}
[hosts.tokenless]{reached}[hosts.tokenless.api]
user = "bot@pve"
token_name = "ops"
[hosts.broken]{reached}[hosts.broken.api]
port = {silent}
user = "bot@pve"
token_name = "ops"
token_file = "token"
ca = "{state.api_ca}"
[containers.good]
host = "box"
vmid = 200
python = "sandbox"
gpus = [0, 1]
path = "/opt/none/there/yet"
[containers.wrong]
host = "box"
vmid = 201
python = "nope"
gpus = [1, 0]
path = "/etc/hostname/x"
user = "nobody-there"
[containers.full]
host = "box"
vmid = 201
python = "sandbox"
path = "/proc/none/x"
[containers.stopped]
host = "box"
vmid = 202
[containers.missing]
host = "box"
vmid = 999
"""
    )
    token = box.inventory.parent / "token"
    token.write_text("5f1a3c0e-9d7b-4b0e-8f5e-0123456789ab")
    token.chmod(0o600)
    out, _ = run(cli, "check", "--connect", "--json", code=4)
    assert "5f1a3c0e" not in out
    found = json.loads(out)
    assert [(it["host"], it["exit_code"]) for it in found["unreached"]] == [("dead", 4)] and not found["ok"]
    levels = {(it["where"], it["name"]): it["level"] for it in found["checks"]}
    evidence = {(it["where"], it["name"]): it["evidence"] for it in found["checks"]}
    assert levels["box", "API"] == "ok" and levels["broken", "API"] == "failure"
    assert levels["tokenless", "API"] == "note" and "by pvesh" in evidence["tokenless", "API"]
    assert {name for (where, name), level in levels.items() if where == "good" and level == "ok"} == {
        "container", "python", "path", "GPUs",
    }  # fmt: skip
    assert {name for (where, name), level in levels.items() if where == "wrong" and level == "failure"} == {
        "python", "path", "user", "GPUs",
    }  # fmt: skip
    assert "is stopped" in evidence["stopped", "container"] and "no container 999" in evidence["missing", "container"]
    assert levels["full", "path"] == "failure" and "/proc/" in evidence["full", "path"]
    with Shell() as shell:
        left = shell.run(load(box.inventory).container("good"), Command(("ls", "-A", "/opt")), check=True).out
    assert b"none" not in left and b"check" not in left  # the trial folder is gone, and nothing was made


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where nobody answers: connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_check_takes_names_and_tells_the_file_alone(box: Box, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    cli_inventory.check(inventory=box.inventory)
    out = capsys.readouterr().out
    assert "1 host, 1 container" in out and "--connect" in out
    with pytest.raises(NotFoundError, match="nothing is called 'nope'"):
        cli_inventory.check(["nope"], inventory=box.inventory)
    box.inventory.write_text(box.inventory.read_text() + "gpus = [1, 0]\n")
    out, _ = run(cli, "check", "--connect", "trainer", code=6)
    assert "ok: python (trainer)" in out and "failure: GPUs (trainer)" in out and "mend it: gpus = [0, 1]" in out
    box.inventory.write_text('[hosts.a]\nadress = "x"\nport = "3"\n')
    with pytest.raises(ConfigError, match="2 things are wrong"):
        cli_inventory.check(inventory=box.inventory)
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and f"{box.inventory}:2: hosts.a.adress" in out
    with pytest.raises(ConfigError):
        cli_inventory.check(inventory=box.inventory, as_json=True)
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [(it["line"], it["key"]) for it in faults] == [(2, "hosts.a.adress"), (3, "hosts.a.port")]


def test_a_host_that_says_nothing_hides_no_other(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and is silent; meanwhile the other one is asked."""
    with listening() as (port, let_go):
        text = box.inventory.read_text() + f'[hosts.mute]\naddress = "127.0.0.1"\nport = {port}\n'
        book = parse(text, box.inventory)
        seen = threading.Event()

        def look(shell: Shell, host: Host, containers: dict) -> tuple[Check, ...]:
            if host.name == "mute":
                assert seen.wait(60)
                let_go()
            try:
                return real(shell, host, containers)
            finally:
                if host.name == "box":
                    seen.set()

        real = inventory_check.look
        monkeypatch.setattr(inventory_check, "look", look)
        box_said, mute_said = inventory_check.ask(book, [])
    assert box_said.error is None and mute_said.error is not None and mute_said.error.exit_code == 4


class listening:
    """A server that accepts and says nothing, until it is let go."""

    def __enter__(self) -> tuple[int, Callable[[], None]]:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._accepted: list[socket.socket] = []
        self._gone = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        return self._server.getsockname()[1], self._gone.set

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._accepted.append(connection)
            self._gone.wait(60)
            connection.close()

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._server.close()
