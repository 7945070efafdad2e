"""The inventory: what it may say, how it is found, and what is said of a wrong one."""

import json
import tomllib
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import ValidationError

from dflash_ops.command import Api
from dflash_ops.errors import ConfigError, NotFoundError, OpsError, UsageFault
from dflash_ops.inventory import Inventory, examine, parse
from dflash_ops.inventory_faults import Fault
from dflash_ops.inventory_lines import line_of
from dflash_ops.inventory_tables import checked
from dflash_ops.sandbox.state import SandboxState

FILE = Path("/somewhere/dflash-ops.toml")
LAB = '[hosts.lab]\naddress = "lab.example"\n'
WHOLE = """
default = "trainer"
source = "../code"
[hosts.lab]
address = "lab.example"
port = 2222
user = "root"
key = "keys/id"
known_hosts = "/etc/known"
[containers.trainer]
host = "lab"
vmid = 200
path = "/opt/it"
python = "/opt/venv/bin/python"
gpus = [2, 3]
via = "pct"
[containers.other]
host = "lab"
vmid = 201
"""


def read(text: str) -> Inventory:
    return parse(text, FILE)


def test_everything_it_may_say_arrives_in_the_container() -> None:
    inventory = read(WHOLE)
    container = inventory.container()
    assert (container.vmid, container.path, container.python) == (200, "/opt/it", "/opt/venv/bin/python")
    assert (container.gpus, container.via) == ((2, 3), "pct")
    host = container.host
    assert (host.name, host.address, host.port, host.user) == ("lab", "lab.example", 2222, "root")
    assert (host.key, host.known_hosts) == (Path("/somewhere/keys/id"), Path("/etc/known"))
    assert inventory.source == Path("/somewhere/../code")
    other = inventory.container("other")
    assert (other.vmid, other.path, other.python, other.gpus, other.via) == (
        201,
        "/opt/dflash",
        "python3",
        (),
        "lxc-attach",
    )


SEVERAL = """
[hosts.lab]
address = "lab"
[hosts.far]
address = "far"
[hosts.bare]
address = "bare"
[containers.a]
host = "lab"
vmid = 200
user = "train"
[containers.b]
host = "far"
vmid = 200
[containers.c]
host = "lab"
vmid = 201
[groups]
night = ["c", "far"]
both = ["b", "night", "a"]
every = ["all"]
"""


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["b"], "b"),
        (["lab"], "a c"),
        (["night"], "c b"),
        (["both"], "b c a"),
        (["all"], "a b c"),
        (["every", "a"], "a b c"),
        (["c,b", " a , c "], "c b a"),
        (["far,lab"], "b a c"),
        (["bare", "b"], "b"),
    ],
)
def test_words_name_containers_hosts_and_groups(words: list[str], names: str) -> None:
    assert [container.name for container in read(SEVERAL).select(words)] == names.split()
    assert read(SEVERAL).names(words) == tuple(names.split())


def test_containers_of_one_host_share_it_and_know_their_user() -> None:
    a, b, c = read(SEVERAL).select(["all"])
    assert a.host is c.host and a.host != b.host
    assert (a.user, b.user) == ("train", None)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ([], UsageFault, "no container is named"),
        ([" , "], UsageFault, "no container is named"),
        (["a", "nigth"], NotFoundError, "nothing is called 'nigth'.*groups: night, both, every; nearest: night"),
        (["bare"], NotFoundError, "no container is on bare"),
    ],
)
def test_words_that_name_no_container_are_refused(words: list[str], error: type[OpsError], says: str) -> None:
    with pytest.raises(error, match=says):
        read(SEVERAL).select(words)


def test_a_name_of_a_host_and_a_container_must_mean_the_same() -> None:
    one = '[hosts.x]\naddress = "x"\n[containers.x]\nhost = "x"\nvmid = 200\n'
    assert [container.name for container in read(one).select(["x"])] == ["x"]
    two = read(one + '[containers.y]\nhost = "x"\nvmid = 201\n')
    assert two.container("x").vmid == 200  # -t is always a container
    with pytest.raises(UsageFault, match=r"x has two meanings.*a host with these: x, y"):
        two.select(["x"])


def test_groups_that_hold_each_other_many_times_over_are_read_at_once() -> None:
    groups = "".join(f'g{n} = ["g{n + 1}", "g{n + 1}", "all"]\n' for n in range(200))
    assert len(read(f'{SEVERAL}{groups}g200 = ["a"]').select(["g0"])) == 3


def test_the_api_of_a_host_has_paths_beside_the_file() -> None:
    text = LAB + '[hosts.lab.api]\nuser = "bot@pve"\ntoken_name = "ops"\nca = "lab-ca.pem"\ntoken_file = "/k/token"\n'
    api = read(text).host("lab").api
    assert api == Api(user="bot@pve", token_name="ops", ca=Path("/somewhere/lab-ca.pem"), token_file=Path("/k/token"))
    assert (api.port, api.token_env) == (8006, "DFLASH_OPS_PVE_TOKEN")
    assert read(LAB).host("lab").api is None


SECRET = "5f1a3c0e-9d7b-4b0e-8f5e-0123456789ab"


@pytest.mark.parametrize(
    "text",
    [
        f'[hosts.lab.api]\ntoken = "{SECRET}"',
        f'[hosts.lab.api]\nsecret = "{SECRET}"',
        f'[hosts.lab.api]\ntoken_name = "bot@pve!ops={SECRET}"',
        f'[hosts.lab.api]\nuser = "bot@pve!ops={SECRET}"',
        f'[hosts.lab.api]\nport = "{SECRET}"',
        f'[hosts.lab]\naddress = "lab"\napi = "{SECRET}"',
    ],
)
def test_a_secret_in_the_file_is_refused_and_shown_nowhere(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text if "address" in text else f"{LAB}{text}")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ValidationError) as shape:
        checked(tomllib.loads(text if "address" in text else f"{LAB}{text}"))
    assert SECRET not in str(shape.value)
    if "oken =" in text or "secret" in text:
        assert "DFLASH_OPS_PVE_TOKEN" in caught.value.line() and "token_file" in caught.value.line()


def test_the_only_container_needs_no_default() -> None:
    assert read(LAB + '[containers.one]\nhost = "lab"\nvmid = 200\n').container().vmid == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1\nb = \n", ["not TOML", "line 2"]),
        ('defalt = "x"', ["defalt", "allowed: containers, default, groups, hosts, source", "nearest: default"]),
        (
            '[hosts.lab]\nadress = "x"',
            [
                "hosts.lab.adress",
                "allowed: address, api, key, known_hosts, port, sandbox, ssh_config",
                "nearest: address",
            ],
        ),
        (LAB + 'port = "22"', ["hosts.lab.port", "whole number", "'22'"]),
        (LAB + "port = 70000", ["hosts.lab.port", "65535"]),
        ("[hosts.lab]\n", ["hosts.lab", "needs `address`, or `sandbox`"]),
        ('[hosts.lab]\nsandbox = "default"\nport = 22', ["hosts.lab", "remove: port"]),
        ('[hosts.lab]\naddress = "me@lab"', ["hosts.lab.address", "'me@lab'"]),
        (LAB + '[containers.c]\nhost = "lob"\nvmid = 200', ["containers.c.host", "hosts: lab", "nearest: lab"]),
        (LAB + '[containers.c]\nhost = "lab"\nvmid = 20', ["containers.c.vmid", "100"]),
        (LAB + '[containers.c]\nhost = "lab"', ["containers.c.vmid", "is missing"]),
        (LAB + '[containers.c]\nhost = "lab"\nvmid = 200\nvia = "scp"', ["containers.c.via", "'lxc-attach' or 'pct'"]),
        (LAB + '[containers.c]\nhost = "lab"\nvmid = 200\npath = "opt"', ["containers.c.path", "'opt'"]),
        (LAB + '[containers.c]\nhost = "lab"\nvmid = 200\ngpus = [0, 0]', ["containers.c.gpus", "twice"]),
        (LAB + '[containers.c]\nhost = "lab"\nvmid = 200\ngpu = [0]', ["containers.c.gpu", "nearest: gpus"]),
        (LAB + 'default = "c"', ["hosts.lab.default", "no such key"]),
        (LAB + "[groups]\na = []", ["groups.a", "at least 1"]),
        (LAB + '[groups]\nlab = ["all"]', ["groups.lab", "a host is called 'lab' too"]),
        (LAB + '[groups]\na = ["lob"]', ["groups.a", "nothing is called 'lob'", "nearest: lab"]),
        (LAB + '[groups]\na = ["b"]\nb = ["c", "lab"]\nc = ["a"]', ["groups.a", "a -> b -> c -> a"]),
        (LAB + '[groups]\nall = ["lab"]', ["groups.all", "every container"]),
        (LAB + '[groups]\n"a,b" = ["lab"]', ["groups.a,b", "can't be a name"]),
        (LAB + '[containers."-x"]\nhost = "lab"\nvmid = 200', ["containers.-x", "can't be a name"]),
        ('default = "lab"\n' + LAB, ["default", "a host is, and a default is one container"]),
        ('default = "d"\n' + LAB + '[containers.c]\nhost = "lab"\nvmid = 200', ["default", "containers: c"]),
        ("hosts = 3", ["hosts", "must be a table, not 3"]),
        (
            '[hosts.a]\naddress = "a"\n[containers.c]\nhost = "a"\nvmid = "200"\npython = "p"',
            ["containers.c.vmid", "must be a whole number, without quotes, not '200'"],
        ),
        (
            '[hosts.a]\naddress = "a"\n[containers.c]\nhost = "a"\nvmid = 200\npython = "p"\npath = "rel"',
            ["containers.c.path", "must be an absolute path, without / at its end, not 'rel'"],
        ),
        ("[hosts]\nlab = 3", ["hosts.lab", "must be a table, not 3"]),
        ("[containers]\nc = []", ["containers.c", "must be a table, not []"]),
        ("a = " + "[" * 5000, ["not TOML", "brackets"]),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    line = caught.value.line()
    assert str(FILE) in line and "\n" not in line
    assert [part for part in says if part not in line] == []


def test_what_there_is_counts_tables_with_faults_of_their_own() -> None:
    found = examine('[hosts.a]\naddress = "a"\nport = "x"\n[containers.c]\nhost = "b"\nvmid = 200\npython = "p"')
    assert isinstance(found, list)
    assert [it.why.partition(";")[2].partition(";")[0] for it in found if it.key == "containers.c.host"] == [
        " hosts: a"
    ]


def test_all_faults_are_told_in_the_order_of_their_lines() -> None:
    text = """# a comment
[hosts.lab]
address = "lab"

[containers.a]   # no vmid
host = "lab"
gpus = [
  0,
  -1,
]
[containers.b]
host = "lab"
vmid = 7

[containers.b.pins]
torhc = "cu126"
[hosts.far]
"""
    found = examine(text)
    assert isinstance(found, list)
    assert [(fault.line, fault.key) for fault in found] == [
        (5, "containers.a.vmid"),
        (7, "containers.a.gpus.1"),
        (13, "containers.b.vmid"),
        (16, "containers.b.pins.torhc"),
        (17, "hosts.far"),
    ]
    with pytest.raises(
        ConfigError, match=r"dflash-ops\.toml:5\): is missing \(and 4 more\).*inventory check shows all"
    ):
        read(text)
    repaired = text.replace("vmid = 7", "vmid = 207").replace("-1", "1").replace("torhc", "torch")
    assert examine(repaired.replace("# no vmid", "\nvmid = 200")) == [
        Fault("hosts.far", "needs `address`, or `sandbox`", 18)
    ]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\n\n# b\nb = 2\n", ["b"], 4),
        ("a = 1\nb = 2", ["b"], 2),
        ("a.b.c = 1\n[a.b.d]\ne = 1\n", ["a", "b", "d", "e"], 3),
        ("[t]\nx = {y = 1, z = [\n1,\n2]}\nw = 1\n", ["t", "x", "z", 1], 2),
        ("[t]\nx = {y = 1, z = [\n1,\n2]}\nw = 1\n", ["t", "w"], 5),
        ("[t]\nx = 1\n", ["t", "gone"], 1),
        ('a = """\n[b]\n"""\n[b]\nc = 1\n', ["b", "c"], 5),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\n", ["a", 1, "x"], 4),
        ("a = 1\n", ["b"], None),
        ("a = \n", ["a"], None),
        ("", ["a"], None),
    ],
)
def test_the_line_of_a_key_is_where_its_statement_begins(
    text: str, path: list[str | int], line: int | None, ending: str
) -> None:
    assert line_of(text.replace("\n", ending), path) == line


@given(st.lists(st.sampled_from(["", "# x", "k{} = 1", "k{} = [\n1,\n2]", 'k{} = """\nk0 = 2\n"""']), max_size=40))
def test_the_line_of_any_key_is_found(parts: list[str]) -> None:
    parts = [part.format(number) for number, part in enumerate(parts)]
    text, at = "\n".join(parts), 1
    for number, part in enumerate(parts):
        if part.startswith("k"):
            assert line_of(text, [f"k{number}"]) == at
        at += part.count("\n") + 1


def test_long_statements_and_long_files_have_lines() -> None:
    assert line_of("a = [\n" + "1,\n" * 300 + "]\nb = 1\n", ["b"]) == 303
    assert line_of(f"#{'x' * 100_000}\nb = 1\n", ["b"]) == 2
    text = LAB + "".join(f'[containers.c{number}]\nhost = "lab"\nvmid = {number + 100}\n' for number in range(300))
    assert line_of(text, ["containers", "c299", "vmid"]) == 902


def test_a_key_that_is_there_twice_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"not TOML.*toml:4\): .*line 4.*, at `port`\. Next: correct that line"):
        read(LAB + f'port = 1\nport = "{SECRET}"\n')
    with pytest.raises(ConfigError, match=r"toml:3\).*, at `token`") as caught:
        read(LAB + f"token = {SECRET}\n")
    assert SECRET not in caught.value.line()


def test_an_unknown_container_is_told_with_the_nearest_one() -> None:
    with pytest.raises(NotFoundError, match="it has: trainer, other; nearest: trainer"):
        read(WHOLE).container("traner")
    with pytest.raises(NotFoundError, match=r"it has: a, b, c; a group is.*or --on night"):
        read(SEVERAL).container("night")
    with pytest.raises(ConfigError, match="these containers: a, b"):
        read(LAB + '[containers.a]\nhost = "lab"\nvmid = 200\n[containers.b]\nhost = "lab"\nvmid = 201').container()


@pytest.mark.parametrize("key", ["key", "known_hosts"])
def test_the_home_of_nobody_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"hosts\.lab\.{key}.*'~no-such-user/x' has no home folder"):
        read(LAB + f'{key} = "~no-such-user/x"').host("lab")


def test_only_a_sandbox_has_a_sandbox_python() -> None:
    with pytest.raises(ConfigError, match=r"containers\.c\.python.*needs a sandbox host"):
        read(LAB + '[containers.c]\nhost = "lab"\nvmid = 200\npython = "sandbox"').container()


def test_a_sandbox_that_is_not_up_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = '[hosts.toy]\nsandbox = "nope"\n[containers.c]\nhost = "toy"\nvmid = 200'
    with pytest.raises(NotFoundError, match="dflash-ops sandbox up"):
        read(text).container()


def test_a_sandbox_says_its_api(sandbox: SandboxState) -> None:
    api = read(f'[hosts.box]\nsandbox = "{sandbox.name}"').host("box").api
    assert api is not None and api.token_file is not None and api.ca is not None
    assert (api.address, api.port) == (sandbox.host, sandbox.api_port)
    assert api.token_file.name == f"{api.user}!{api.token_name}" and api.token_file.stat().st_mode & 0o777 == 0o600
    assert "BEGIN CERTIFICATE" in api.ca.read_text()


KEYS = st.sampled_from(["address", "port", "sandbox", "key", "host", "vmid", "path", "gpus", "via", "python", "x", "é"])
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def toml(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case str():
            return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
        case _:
            return json.dumps(value)


@given(st.sampled_from(["default", "source", "hosts", "containers", "groups"]), VALUES)
def test_any_values_are_taken_or_refused_in_one_line(key: str, value: object) -> None:
    others = {"hosts": '{h = {address = "lab"}}', "containers": '{c = {host = "h", vmid = 200}}', "groups": "{}"}
    text = "\n".join(f"{name} = {text}" for name, text in {**others, key: toml(value)}.items())
    try:
        parse(text, FILE)
    except ConfigError as error:
        assert "\n" not in error.line() and str(FILE) in error.line()
