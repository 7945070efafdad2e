"""init: no option is dropped, no secret shown, no answer asked for in vain; the token is tried."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Cli

from dflash_ops import cli_inventory, init
from dflash_ops.cli_inventory import _place
from dflash_ops.errors import CancelledError, ConfigError, OpsError, PreflightError, TimedOutError, UsageFault
from dflash_ops.init import Said
from dflash_ops.init_answers import token, user_and_address
from dflash_ops.inventory import load
from dflash_ops.inventory_tables import schema_text
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

UUID = "5f1a3c0e-9d7b-4b0e-8f5e-0123456789ab"
LAB = '[hosts.lab]\naddress = "lab"\nport = 22\nkey = "id"\n'
ONE = '[containers.t]\nhost = "lab"\nvmid = 200\n'


class Nobody:
    can_ask = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def ask(self, what: str, flag: str, default: str | None) -> str:
        if default is None:
            raise UsageFault(f"{flag} is not said")
        return default

    def again(self, error: OpsError) -> bool:
        return False

    def tell(self, text: str) -> None:
        self.told.append(text)


def planned(file: Path, **said: Any) -> init.Plan:
    """Untested, with the defaults."""
    return init.plan(None, file, Said(**{"vmid": "201", "gpus": "none", **said}), Nobody())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "dflash-ops.toml"
    file.write_text(LAB + ONE)
    return file


# -- a host that is there


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"host": "lab", "port": 2222, "user": "bob"}, r"lab' is in the file with other values.*--port, --user"),
        ({"host": "lab", "key": Path("/nonexistent")}, r"other values.*--key"),
        ({"host": "lab", "known_hosts": Path("/k"), "ssh_config": Path("/c")}, r"--known-hosts, --ssh-config"),
        ({"address": "lab", "key": Path("/nonexistent")}, r"other values.*--key"),
        ({"address": "lab", "port": 22, "host": "other"}, r"is host 'lab' in the file already.*say --host lab"),
        ({"host": "lob"}, r"no host is called 'lob', and --address is not said.*nearest: lab"),
        ({"address": "bob@x", "user": "alice"}, "two users are said.*bob before the @, and alice"),
    ],
)
def test_no_option_is_dropped(said: dict[str, Any], says: str, file: Path) -> None:
    with pytest.raises(UsageFault, match=says):
        planned(file, **said)


def test_options_that_say_what_the_file_says_are_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for said in ({"host": "lab", "port": 22, "key": Path("id")}, {"address": "lab", "port": 22, "key": Path("./id")}):
        assert planned(file, **said).hosts == {}
    assert planned(file, host="new", address="other").hosts["new"]["address"] == "other"


API = '[hosts.lab.api]\nuser = "bot@pve"\ntoken_name = "dflash"\n'


def test_an_api_that_is_there_is_not_another_one(file: Path) -> None:
    file.write_text(LAB + API + ONE)
    for said in ({"api": "bot@pve!dflash"}, {"api": "none"}, {}):
        assert planned(file, host="lab", **said).hosts == {}
    for said in ({"api": "bot@pve!other"}, {"token_file": Path("x")}, {"api_port": 1}):
        with pytest.raises(UsageFault, match=r"'lab' has an \[api\] in the file already"):
            planned(file, host="lab", **said)
    with pytest.raises(UsageFault, match="--token-file, --api-node: of which token"):
        planned(file, address="new", token_file=Path("x"), api_node="pve1")


# -- names


def test_names_are_tried_in_this_file_when_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(LAB + ONE + '[groups]\ntrainer = ["t"]\nfar = ["t"]\nct = ["lab"]\n')
    plan = planned(file, address="far.example")
    assert (plan.host, plan.container) == ("far-2", "box")  # `far` and `trainer` are groups
    init.write(plan)
    assert load(file).container("box").host.name == "far-2"
    asked: list[str] = []

    class Person(Nobody):
        can_ask = True
        names = iter(("trainer", "t", "lab", "fine"))

        def ask(self, what: str, flag: str, default: str | None) -> str:
            asked.append(flag)
            return next(self.names) if flag == "--name" else super().ask(what, flag, default)

        def again(self, error: OpsError) -> bool:
            self.tell(error.line())
            return True

    person = Person()
    file.write_text(LAB + ONE + '[groups]\ntrainer = ["t"]\nct = ["lab"]\n')
    plan = init.plan(None, file, Said(host="lab", vmid="202", gpus="none"), person)
    assert plan.container == "fine" and asked.count("--name") == 4 and asked.count("--path") == 1
    assert "a group is called 'trainer'" in person.told[0] and "two meanings" not in person.told[0]
    assert "is in the file already" in person.told[1] and "groups.ct" in person.told[2]


def test_a_user_that_no_container_can_have_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    class Mute(Nobody):
        def ask(self, what: str, flag: str, default: str | None) -> str:
            raise AssertionError(flag)

    with pytest.raises(UsageFault, match=r"containers\.new\.user"):
        init.plan(None, tmp_path / "x.toml", Said(container_user="0"), Mute())


def test_a_default_that_comes_with_a_container_is_told(file: Path) -> None:
    plan = planned(file, host="lab")
    assert plan.default == {"default": "t"} and init.preview(plan).startswith('default = "t"\n')
    init.write(plan)
    assert load(file).container().vmid == 200
    assert planned(file, host="lab", vmid="203").default == {}


# -- files


def test_only_what_was_written_is_told_and_an_older_schema_is_renewed(tmp_path: Path) -> None:
    file, schema = tmp_path / "x.toml", tmp_path / "dflash-ops.schema.json"
    schema.touch()  # a write that was cut off
    assert init.write(planned(file, address="far")) == [schema]
    assert schema.read_text() == schema_text()
    assert init.write(planned(file, host="far", vmid="202")) == []
    schema.write_text("{}")
    assert init.write(planned(file, host="far", vmid="203")) == [schema]
    assert schema.read_text() == schema_text()


def test_two_inits_for_one_host_both_get_it(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    one, other = (planned(file, address="far", vmid=vmid, name=f"t{vmid}") for vmid in ("201", "202"))
    init.write(one)
    init.write(other)
    assert list(load(file).tables.hosts) == ["far"]
    assert [it.vmid for it in load(file).select(["far"])] == [201, 202]


def test_what_can_be_no_file_is_told(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    for out in (loop, tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "y.toml"):
        with pytest.raises(ConfigError, match="the inventory can't be read"):
            planned(out, address="far")
    here = tmp_path / "here"
    (here / "dflash-ops.toml").mkdir(parents=True)
    words = ("init", "--untested", "--yes", "--address", "far", "--vmid", "200")
    for out in ("dflash-ops.toml", "x" * 300):
        done = cli(*words, "--out", out, cwd=here)
        assert done.returncode == 3 and b"Traceback" not in done.stderr
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match="it is a folder"):
        planned(_place(), address="far")
    assert list((here / "dflash-ops.toml").iterdir()) == []


def test_a_folder_that_the_variable_names_gets_the_file_that_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_OPS_INVENTORY", str(tmp_path))
    assert _place() == tmp_path / "default.toml"


def test_what_to_run_next_can_be_pasted(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "a b" / "i.toml"
    words = ("init", "--untested", "--yes", "--address", "far", "--vmid", "200", "--out", str(file))
    done = cli(*words, cwd=tmp_path)
    assert done.returncode == 0 and f"--inventory '{file}'" in done.stdout.decode()


# -- secrets


@pytest.mark.parametrize(
    "word", [UUID, f"bot@pve!dflash:{UUID}", f"bot@pve!dflash={UUID}", f"bot@pve!dflash {UUID}", "bot@pve:hunter2!x"]
)
def test_a_word_that_may_be_the_secret_is_not_shown(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageFault) as caught:
        token(word)
    assert UUID[:8] not in caught.value.line() and "hunter2" not in caught.value.line()
    with pytest.raises(UsageFault) as caught:
        planned(tmp_path / "x.toml", address="far", api=word)
    assert UUID[:8] not in caught.value.line() and "hunter2" not in caught.value.line()


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(UsageFault, match="a password belongs on no command line") as caught:
        user_and_address("root:hunter2@lab", None)
    assert "hunter2" not in caught.value.line()


# -- the machine


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with Shell() as shell:
        yield shell


def reaching(state: SandboxState, **more: Any) -> Said:
    reach = {"port": state.port, "key": state.key, "known_hosts": state.known_hosts, "python": state.python}
    return Said(**{"address": f"root@{state.host}", **reach, "vmid": "200", "gpus": "none", "host": "lab", **more})


def test_the_token_is_tried(
    sandbox: SandboxState, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_OPS_PVE_TOKEN", raising=False)
    file, asks = tmp_path / "x.toml", {"api": "bot@pve!dflash", "api_port": sandbox.api_port, "api_node": "pve"}
    plan = init.plan(shell, file, reaching(sandbox, **asks), Nobody())
    assert not [it for it in plan.tried if it.startswith("API")]
    assert "secret is not in DFLASH_OPS_PVE_TOKEN" in plan.untried[0]
    secret = sandbox.api_tokens / "bot@pve!dflash"
    plan = init.plan(shell, file, reaching(sandbox, **asks, token_file=secret), Nobody())
    assert plan.untried == () and plan.tried[-1].startswith("API: version ")
    init.write(plan)
    api = load(file).host("lab").api
    assert api is not None and (api.port, api.node, api.token_file) == (sandbox.api_port, "pve", secret)
    assert api.ca == tmp_path / "lab-ca.pem"
    (tmp_path / "token").write_text(f"bot@pve!another={UUID}")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ConfigError, match="token") as caught:  # what is wrong with it is told, and nothing written
        init.plan(shell, tmp_path / "o.toml", reaching(sandbox, **asks, token_file=tmp_path / "token"), Nobody())
    assert UUID[:8] not in caught.value.line() and not (tmp_path / "o.toml").exists()


def test_a_host_whose_nvidia_smi_hangs_can_be_written(
    sandbox: SandboxState, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    class Hangs(Shell):
        def ask(self, place: Any, query: Any, *, timeout: float | None = None) -> Any:
            if query.command.argv[0] == "nvidia-smi":
                asked.append(place)
                raise TimedOutError("no answer within 20 s")
            return shell.ask(place, query, timeout=timeout)

    with Hangs() as hangs:
        assert init.plan(hangs, tmp_path / "x.toml", reaching(sandbox), Nobody()).containers and asked == []
        nobody = Nobody()
        plan = init.plan(hangs, tmp_path / "x.toml", reaching(sandbox, gpus=None), nobody)
        assert "gpus" not in plan.containers["trainer"] and len(asked) == 1
        assert any("no answer within 20 s" in line for line in nobody.told)
        with pytest.raises(PreflightError, match=r"the host shows no GPU.*no answer within 20 s"):
            init.plan(hangs, tmp_path / "x.toml", reaching(sandbox, gpus="0"), Nobody())


def test_a_wrong_user_in_the_container_is_told_by_its_flag(sandbox: SandboxState, shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"user: .*say another --container-user"):
        init.plan(shell, tmp_path / "x.toml", reaching(sandbox, container_user="nobody-there"), Nobody())


def test_ctrl_c_at_the_last_question_writes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Person(Nobody):
        can_ask = True

    def aborted(*_: object, **__: object) -> bool:
        raise typer.Abort

    monkeypatch.setattr(cli_inventory, "_Asker", lambda yes: Person())
    monkeypatch.setattr(typer, "confirm", aborted)
    with pytest.raises(CancelledError, match="nothing was written"):
        cli_inventory.init(tmp_path / "x.toml", "far", vmid="300", gpus="none", untested=True)
    assert list(tmp_path.iterdir()) == []


def test_an_api_alone_is_added_to_a_host_that_is_there(
    sandbox: SandboxState, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_OPS_PVE_TOKEN", raising=False)
    file = tmp_path / "x.toml"
    init.write(init.plan(None, file, reaching(sandbox), Nobody()))
    before = file.read_text()
    for said in (Said(host="lab", api="bot@pve!dflash"), Said(api="bot@pve!dflash")):
        plan = init.plan(shell, file, said, Nobody())
        assert (plan.host, plan.container, plan.containers) == ("lab", None, {})
    assert init.write(plan) == [tmp_path / "lab-ca.pem"]
    assert file.read_text().startswith(before)
    api = load(file).host("lab").api
    assert api is not None and (api.user, api.token_name, api.ca) == ("bot@pve", "dflash", tmp_path / "lab-ca.pem")
    with pytest.raises(UsageFault, match=r"'lab' has an \[api\] in the file already"):
        init.plan(shell, file, Said(host="lab", api="bot@pve!dflash"), Nobody())


def test_the_document_says_what_was_not_tried(cli: Cli, tmp_path: Path) -> None:
    words = ("init", "--untested", "--yes", "--json", "--address", "far", "--vmid", "200", "--out", str(tmp_path / "x"))
    document = json.loads(cli(*words, cwd=tmp_path).stdout)
    assert (document["tried"], document["untried"]) == ([], [])
    assert document["also_written"] == [str(tmp_path / "dflash-ops.schema.json")]
