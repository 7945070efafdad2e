"""init: what is asked, what is tried on the machine, and what is written."""

import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from dflash_ops import init
from dflash_ops.cli_inventory import _Asker, _place
from dflash_ops.command import Command
from dflash_ops.errors import ConfigError, HostKeyError, OpsError, PreflightError, UsageFault
from dflash_ops.init import Said
from dflash_ops.init_answers import name_of
from dflash_ops.inventory import load
from dflash_ops.inventory_tables import schema_text
from dflash_ops.inventory_write import add
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell


class Person:
    """Answers by the flag; the last answer again when it is asked for more. Keeps what was asked and told."""

    def __init__(self, **answers: str | list[str]) -> None:
        self._answers = {f"--{key}": [words] if isinstance(words, str) else words for key, words in answers.items()}
        self.asked: list[tuple[str, str | None]] = []
        self.told: list[str] = []
        self.errors: list[OpsError] = []
        self.can_ask = True

    def ask(self, what: str, flag: str, default: str | None) -> str:
        self.asked.append((flag, default))
        words = self._answers.get(flag, [])
        word = words.pop(0) if words else default
        assert word is not None, f"nobody said {flag}"
        return word

    def again(self, error: OpsError) -> bool:
        self.errors.append(error)
        return len(self.errors) < 20

    def tell(self, text: str) -> None:
        self.told.append(text)


class Nobody(Person):
    def ask(self, what: str, flag: str, default: str | None) -> str:
        raise UsageFault(f"{flag} is not said")

    def again(self, error: OpsError) -> bool:
        return False


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """One connection for all of these tests: they ask, and leave nothing there."""
    with Shell() as shell:
        yield shell


def reaching(state: SandboxState, **more: Any) -> Said:
    given = {"port": state.port, "key": state.key, "known_hosts": state.known_hosts, **more}
    return Said(**given)


WHOLE = {"host": "lab", "vmid": "200", "name": "t", "path": "/opt/x", "gpus": "0,1", "api": "none"}


def test_each_question_is_asked_with_what_was_found(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    person = Person(
        address=f"root@{sandbox.host}",
        vmid=["999", "202", "abc", "200"],
        python=["nope", sandbox.python],
        path=["relative", "/etc/hostname/x", "/opt/made-by-init"],
        gpus=["1,0", "0;1", "0,1"],
        name=["a,b", "trainer"],
        api=["bot@pve", "bot@pve!dflash"],
    )
    file = tmp_path / "dflash-ops.toml"
    plan = init.plan(shell, file, reaching(sandbox), person)
    assert not file.exists()  # nothing is written by asking
    assert [error.exit_code for error in person.errors] == [8, 6, 2, 6, 2, 6, 6, 2, 2, 2]
    defaults = dict(person.asked)
    assert (defaults["--address"], defaults["--vmid"]) == (None, None)  # two containers run: neither is meant
    assert (defaults["--host"], defaults["--python"], defaults["--path"]) == ("box", "python3", "/opt/dflash")
    assert (defaults["--gpus"], defaults["--name"], defaults["--api"]) == ("0,1", "trainer", "none")
    assert any("200  running" in line for line in person.told) and any("202  stopped" in line for line in person.told)
    init.write(plan)
    container = load(file).container()
    assert (container.vmid, container.gpus, container.path) == (200, (0, 1), "/opt/made-by-init")
    assert (container.python, container.name, container.host.user) == (sandbox.python, "trainer", "root")
    api = container.host.api
    assert api is not None and (api.user, api.token_name) == ("bot@pve", "dflash")
    assert api.ca is not None and api.ca.read_bytes() == sandbox.api_ca.read_bytes()
    assert file.read_text().startswith("#:schema ./dflash-ops.schema.json\n")
    assert (tmp_path / "dflash-ops.schema.json").read_text() == schema_text()
    assert shell.run(container, Command(("true",))).code == 0
    made = shell.run(container, Command(("ls", "/opt"))).out
    assert b"made-by-init" not in made


def test_a_file_that_is_there_gets_more_and_loses_nothing(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    file = tmp_path / "dflash-ops.toml"
    said = reaching(sandbox, address=f"root@{sandbox.host}", python=sandbox.python, **{**WHOLE, "path": "/opt/y"})
    init.write(init.plan(shell, file, said, Nobody()))
    file.write_text(file.read_text() + "# a note of mine\n")
    before = file.read_text()
    plan = init.plan(shell, file, reaching(sandbox, host="lab", vmid="201", python=sandbox.python), Person(api="none"))
    assert plan.container == "trainer" and plan.hosts == {} and plan.files == {}
    init.write(plan)
    after = file.read_text()
    assert [line for line in before.split("\n") if line not in after.split("\n")] == []
    assert load(file).tables.default == "t" and load(file).container("trainer").vmid == 201
    # The same address is the same host.
    address = f"root@{sandbox.host}"
    again = reaching(sandbox, address=address, vmid="200", name="third", python=sandbox.python)
    third = init.plan(shell, file, again, Person(api="bot@pve!dflash"))
    assert third.hosts == {"lab": {"api": {"user": "bot@pve", "token_name": "dflash", "ca": "lab-ca.pem"}}}
    init.write(third)
    api = load(file).host("lab").api
    assert api is not None and api.ca == tmp_path / "lab-ca.pem"
    with pytest.raises(UsageFault, match=r"container 200 with /opt/y is 't' in the file already"):
        init.plan(
            shell, file, reaching(sandbox, host="lab", vmid="200", path="/opt/y", python=sandbox.python), Nobody()
        )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"vmid": "202"}, PreflightError, "container 202 is stopped, and can't be tried.*pct start 202"),
        ({"gpus": "5"}, PreflightError, "the host has no GPU 5.*say another --gpus"),
        ({"container_user": "nobody-there"}, PreflightError, "user: .*nobody-there"),
        ({"known_hosts": Path("/dev/null")}, HostKeyError, "SHA256:.*to hold this line"),
    ],
)
def test_what_is_wrong_is_raised_where_nobody_corrects_it(
    change: dict[str, Any], error: type[OpsError], says: str, sandbox: SandboxState, tmp_path: Path, shell: Shell
) -> None:
    said = {"address": f"root@{sandbox.host}", "python": sandbox.python, **WHOLE, **change}
    with pytest.raises(error, match=says):
        init.plan(shell, tmp_path / "x.toml", reaching(sandbox, **said), Nobody())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host": "a b"}, "can't be a name"),
        ({"address": "-oProxyCommand=x"}, "hosts.new.address"),
        ({"vmid": "7"}, "containers.new.vmid.*100"),
        ({"path": "opt"}, "containers.new.path"),
        ({"gpus": "0,0"}, "no list of GPUs"),
        ({"gpus": "²"}, "no list of GPUs"),
        ({"vmid": "²"}, "no number of a container"),
        ({"path": "/opt/\udcff"}, "containers.new.path"),
        ({"name": "all"}, "every container"),
    ],
)
def test_what_no_inventory_can_say_is_refused_untested(change: dict[str, str], says: str, tmp_path: Path) -> None:
    said = Said(**{"address": "far", **WHOLE, "python": "python3", **change})
    with pytest.raises(UsageFault, match=says):
        init.write(init.plan(None, tmp_path / "x.toml", said, Nobody()))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_host_key_is_not_asked_about_again(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    person = Person(address=f"root@{sandbox.host}")
    known_hosts = tmp_path / "known_hosts"
    known_hosts.touch()
    with pytest.raises(HostKeyError):
        init.plan(shell, tmp_path / "x.toml", reaching(sandbox, known_hosts=known_hosts), person)
    assert person.errors == [] and known_hosts.read_text() == ""


def test_untested_asks_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "inventory" / "default.toml"
    file.parent.mkdir()
    (file.parent / "schema.json").write_text(schema_text())
    said = Said(address="far.example", key=file.parent / "id", vmid="300", gpus="none", api="none")
    init.write(init.plan(None, file, said, Person()))
    container = load(file).container("trainer")
    assert (container.host.name, container.vmid, container.gpus) == ("far", 300, ())
    assert 'key = "id"' in file.read_text() and file.read_text().startswith("#:schema ./schema.json\n")
    assert sorted(path.name for path in file.parent.iterdir()) == ["default.toml", "schema.json"]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="it is a pipe"):
        init.plan(None, tmp_path / "pipe.toml", Said(), Nobody())
    with pytest.raises(ConfigError, match="it is a pipe"):
        add(tmp_path / "pipe.toml", hosts={"lab": {"address": "lab"}})


def test_a_secret_on_the_command_line_is_refused_and_not_repeated(tmp_path: Path) -> None:
    said = Said(address="x", api="bot@pve!ops=5f1a3c0e-9d7b", **{key: WHOLE[key] for key in ("vmid", "gpus")})
    person = Person()
    with pytest.raises(UsageFault, match="belongs on no command line") as caught:
        init.plan(None, tmp_path / "x.toml", said, type("Silent", (Person,), {"again": lambda *_: False})())
    assert "5f1a3c0e" not in caught.value.line() and person.errors == []


def test_a_ca_of_another_node_is_not_overwritten(sandbox: SandboxState, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "lab-ca.pem").write_text("another")
    said = {"address": f"root@{sandbox.host}", "python": sandbox.python, **WHOLE, "api": "bot@pve!dflash"}
    with pytest.raises(ConfigError, match="another CA is there already"):
        init.plan(shell, tmp_path / "x.toml", reaching(sandbox, **said), Nobody())
    assert (tmp_path / "lab-ca.pem").read_text() == "another"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = init.plan(None, tmp_path / "x.toml", Said(address="far", vmid="300", gpus="none"), Person())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        init.write(plan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("lab.example.org", "lab"),
        ("10.0.0.7", "box"),
        ("fe80::1", "box"),
        ("Über", "ber"),
        ("-.-", "box"),
        ("x" * 99, "x" * 60),
    ],
)
def test_a_name_is_made_of_an_address(address: str, name: str) -> None:
    assert name_of(address) == name


# -- the command


def flags(state: SandboxState, *more: str) -> list[str]:
    reach = ["--port", str(state.port), "--key", str(state.key), "--known-hosts", str(state.known_hosts)]
    return ["init", "--address", f"root@{state.host}", *reach, *more]


def test_the_command_writes_by_flags_and_names_what_is_missing(cli: Cli, sandbox: SandboxState, tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    out = here / "dflash-ops.toml"
    done = cli(*flags(sandbox, "--vmid", "200", "--yes", "--python", sandbox.python, "--json", "--out", str(here)))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["container"] == "trainer" and document["file"] == str(out)
    assert load(out).container().gpus == (0, 1)
    for words, says in (
        (["init"], "--address is not said: there is no terminal to ask at"),
        (flags(sandbox), "--host is not said: there is no terminal to ask at. Next: say --host, or --yes for box"),
    ):
        done = cli(*words, "--out", str(tmp_path / "other.toml"), cwd=here)
        assert done.returncode == 2 and says in done.stderr.decode()
    assert not (tmp_path / "other.toml").exists()


def test_where_an_inventory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _place() == tmp_path / "dflash-ops.toml"
    (tmp_path / "inventory").mkdir()
    assert _place() == tmp_path / "inventory" / "default.toml"
    (tmp_path / "dflash-ops.toml").touch()
    assert _place() == tmp_path / "dflash-ops.toml"
    monkeypatch.setenv("DFLASH_OPS_INVENTORY", "/elsewhere/x.toml")
    assert _place() == Path("/elsewhere/x.toml")


def test_yes_takes_what_has_a_default() -> None:
    asker = _Asker(yes=True)
    assert asker.ask("Its Python", "--python", "python3") == "python3" and not asker.can_ask
    with pytest.raises(UsageFault, match=r"--vmid is not said: --yes asks nothing\. Next: say --vmid$"):
        asker.ask("Its number", "--vmid", None)


def test_a_person_at_a_terminal_is_asked(cli: Cli, sandbox: SandboxState, tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    main, side = pty.openpty()
    words = cli.words(*flags(sandbox, "--out", str(file), "--host", "lab", "--gpus", "0,1"))
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env={**cli.environment(), "TERM": "dumb"})
    os.close(side)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            ready, _, _ = select.select([main], [], [], max(0.0, end - time.monotonic()))
            assert ready, shown
            shown += os.read(main, 4096)

    for question, answer in (
        (b"number", b"202\n"),
        (b"is stopped", b""),
        (b"number: ", b"200\n"),
        (b"Python in", sandbox.python.encode() + b"\n"),
        (b"Folder in", b"\n"),
        (b"[trainer]", b"\n"),
        (b"[none]", b"\n"),
        (b"Write this as", b"y\n"),
    ):
        until(question)
        shown = shown[shown.index(question) + len(question) :]
        os.write(main, answer)
    until(b"next: dflash-ops doctor")
    assert process.wait(60) == 0
    os.close(main)
    container = load(file).container()
    assert (container.vmid, container.python, container.gpus) == (200, sandbox.python, (0, 1))


def test_no_at_the_end_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    main, side = pty.openpty()
    words = [
        "init",
        "--out",
        str(tmp_path / "x.toml"),
        "--untested",
        "--address",
        "far",
        "--host",
        "far",
        "--vmid",
        "300",
    ]
    words += ["--python", "python3", "--path", "/opt/x", "--gpus", "none", "--name", "t", "--api", "none"]
    process = subprocess.Popen(cli.words(*words), stdin=side, stdout=side, stderr=side, env=cli.environment())
    os.close(side)
    os.write(main, b"n\n")
    assert process.wait(60) == 103
    os.close(main)
    assert not (tmp_path / "x.toml").exists()
