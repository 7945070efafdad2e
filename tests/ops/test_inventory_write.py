"""Adding to an inventory: what was there stays, what is added can be read, and nothing is half written."""

import os
import random
import threading
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.errors import BusyError, ConfigError, UsageFault
from dflash_ops.inventory import load, parse
from dflash_ops.inventory_write import add, added

FILE = Path("/somewhere/dflash-ops.toml")
COMMENTED = """# The boxes of the lab. Ask Kim before you change this.

source = ".."   # the trainer

[hosts.lab]     # in the cellar
address = "lab"

# The container with the good cards.
[containers.trainer]
host = "lab"
vmid   =   200
# [containers.trainer.pins]
# torch = "cu126"
"""


def test_a_new_file_is_an_inventory(tmp_path: Path) -> None:
    file = tmp_path / "new" / "dflash-ops.toml"
    api = {"user": "bot@pve", "ca": None}
    add(file, hosts={"lab": {"address": "lab.example", "port": None, "key": Path("keys/id"), "api": api}})
    add(file, containers={"trainer": {"host": "lab", "vmid": 200, "gpus": (0, 1)}})
    inventory = load(file)
    assert inventory.container().gpus == (0, 1)
    host = inventory.host("lab")
    assert (host.address, host.port, host.key) == ("lab.example", None, file.parent / "keys/id")
    assert host.api is not None and host.api.user == "bot@pve"
    assert "port" not in file.read_text() and file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_was_there_stays_line_for_line(ending: str) -> None:
    text = COMMENTED.replace("\n", ending)
    got = added(text, FILE, {"hosts": {"far": {"address": "far"}}, "containers": {}})
    new = '\n[hosts.far]\naddress = "far"\n'.replace("\n", ending)
    assert got == text + new
    cut = text.removesuffix(ending)
    assert added(cut, FILE, {"hosts": {"far": {"address": "far"}}, "containers": {}}) == text + new


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_rights_and_links_stay(tmp_path: Path, mark: bytes) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "dflash-ops.toml"
    real.write_bytes(mark + COMMENTED.encode())
    real.chmod(0o640)
    link.symlink_to("real.toml")
    add(link, hosts={"far": {"address": "far"}})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert real.read_bytes().startswith(mark + COMMENTED.encode())
    assert load(link).host("far").address == "far"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dflash-ops.toml", "real.toml"]


def test_the_only_container_stays_the_one_that_is_meant() -> None:
    got = added(COMMENTED, FILE, {"hosts": {}, "containers": {"two": {"host": "lab", "vmid": 201}}})
    lines = got.split("\n")
    assert lines[:4] == [*COMMENTED.split("\n")[:1], "", 'default = "trainer"', ""]
    assert parse(got, FILE).container().vmid == 200
    third = added(got, FILE, {"hosts": {}, "containers": {"three": {"host": "lab", "vmid": 202}}})
    assert third.count("default") == 1


@pytest.mark.parametrize(
    ("top", "begins"),
    [
        ("", 'default = "a"\n\n[hosts.lab]'),
        ("# the lab\n", 'default = "a"\n\n# the lab\n[hosts.lab]'),
        ("#:schema ./schema.json\n", '#:schema ./schema.json\ndefault = "a"\n\n[hosts.lab]'),
        ("# the lab\n\n", '# the lab\n\ndefault = "a"\n\n[hosts.lab]'),
    ],
)
def test_a_default_parts_no_comment_from_what_it_is_about(top: str, begins: str) -> None:
    text = f'{top}[hosts.lab]\naddress = "lab"\n[containers.a]\nhost = "lab"\nvmid = 200'
    assert added(text, FILE, {"hosts": {}, "containers": {"b": {"host": "lab", "vmid": 201}}}).startswith(begins)


@pytest.mark.parametrize(
    "text",
    [
        'hosts = {lab = {address = "lab"}}  # here\ncontainers = {}\n',
        'hosts.lab.address = "lab"\n',
        '[hosts]\nlab.address = "lab"\n[containers]\n# none yet\n',
        '[hosts]\nlab = {address = "lab"}\n',
        '[hosts.lab]\naddress = "lab"\n[groups]\nx = ["lab"]\n[hosts.other]\naddress = "y"',
        '"hosts"."lab"."address" = "lab"\n',
    ],
)
def test_every_way_to_write_tables_can_be_added_to(text: str) -> None:
    new = {"hosts": {"far": {"address": "far"}}, "containers": {"c": {"host": "far", "vmid": 200}}}
    got = added(text, FILE, new)
    assert ("#" in text) == ("#" in got)
    assert parse(got, FILE).container("c").host.address == "far"
    assert parse(got, FILE).host("lab").address == "lab"


@pytest.mark.parametrize(
    ("hosts", "containers", "says"),
    [
        ({"lab": {"address": "x"}}, {}, "there is a host 'lab' already"),
        ({}, {"trainer": {"host": "lab", "vmid": 201}}, "there is a container 'trainer' already"),
        ({}, {"c": {"host": "nowhere", "vmid": 201}}, "no host is called 'nowhere'"),
        ({"a,b": {"address": "x"}}, {}, "can't be a name"),
        ({"x": {"adress": "x"}}, {}, "no such key"),
    ],
)
def test_what_can_not_be_said_is_refused(hosts: dict, containers: dict, says: str) -> None:
    with pytest.raises(UsageFault, match=says):
        added(COMMENTED, FILE, {"hosts": hosts, "containers": containers})


def test_a_wrong_file_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "dflash-ops.toml"
    file.write_text("hosts = 3\n")
    with pytest.raises(ConfigError, match="must be a table, not 3"):
        add(file, hosts={"lab": {"address": "lab"}})
    assert file.read_text() == "hosts = 3\n"


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        add(tmp_path / "file" / "dflash-ops.toml", hosts={"lab": {"address": "lab"}})
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="can't be written"):
        add(loop, hosts={"lab": {"address": "lab"}})


def test_two_who_add_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dflash-ops.toml"

    def work(name: str) -> None:
        while True:
            try:
                add(file, hosts={name: {"address": name}})
                return
            except BusyError:
                continue

    names = [f"h{number}" for number in range(8)]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(load(file).tables.hosts) == names


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dflash-ops.toml"
    file.write_text(COMMENTED)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        add(file, hosts={"far": {"address": "far"}})
    assert file.read_text() == COMMENTED and len(list(tmp_path.iterdir())) == 1


NAMES = st.text(st.sampled_from("abXY01._-"), min_size=1, max_size=8)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12)
LINES = ["", "# a note", "#:schema ./x", 'source = ".."']


@given(st.lists(st.tuples(NAMES, TEXTS), max_size=6), st.randoms())
def test_any_keys_arrive_and_no_old_line_goes(new: list, draw: random.Random) -> None:
    text = "\n".join(draw.sample(LINES, draw.randint(0, 4))) + "\n"
    for name, path in new:
        before = text.split("\n")
        try:
            text = added(text, FILE, {"hosts": {name: {"address": "far", "known_hosts": path}}, "containers": {}})
        except UsageFault:
            assert name[0] in ".-" or name in tomllib.loads(text)["hosts"]
            continue
        assert text.split("\n")[: len(before) - 1] == before[:-1]
        assert tomllib.loads(text)["hosts"][name] == {"address": "far", "known_hosts": path}
        text += draw.choice(["", "# behind it\n", "\n"])


def test_many_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "dflash-ops.toml"
    with pytest.raises(UsageFault, match="no host is called 'lob'; hosts: lab; nearest: lab"):
        add(file, hosts={"lab": {"address": "x"}}, containers={"c": {"host": "lob", "vmid": 200}})
    assert list(tmp_path.iterdir()) == []


NEW = {"hosts": {"n": {"address": "n"}}, "containers": {"k": {"host": "n", "vmid": 900, "gpus": [3]}}}


@pytest.mark.parametrize(
    "text",
    [
        'hosts = {lab = {address = "lab"}}  # in\r\ncontainers = {t = {host = "lab", vmid = 200}}  # in\r\n# end',
        '[hosts]\r\nlab = {address = "lab"}\r\n',
    ],
)
def test_line_endings_stay_where_tables_are_in_braces(text: str) -> None:
    got = added(text, FILE, NEW)
    assert "\n" not in got.replace("\r\n", "") and got.count("\r\n") > text.count("\r\n")
    assert got.count("# in") == text.count("# in")


def test_a_new_table_comes_between_no_comment_and_its_table() -> None:
    text = (
        'hosts = {lab = {address = "lab"}}\n[containers.t]\nhost = "lab"\nvmid = 200\n'
        '\n# about groups\n[groups]\na = ["t"]\n# the end\n'
    )
    got = added(text, FILE, NEW)
    assert "# about groups\n[groups]" in got
    assert got.endswith('# the end\n\n[containers.k]\nhost = "n"\nvmid = 900\ngpus = [3]\n')


def test_dotted_hosts_at_the_top_can_be_added_to() -> None:
    text = '# mine\nhosts.h0.address = "a"  # x\ncontainers = {t = {host = "h0", vmid = 200}}\n\n# late\n[groups]\n'
    got = added(text, FILE, NEW)
    assert got.endswith('\n[hosts.n]\naddress = "n"\n') and "# late\n[groups]" in got and "# x" in got
    assert parse(got, FILE).container("k").host.address == "n"


def test_what_is_refused_is_the_new_table_and_not_how_it_would_be_written() -> None:
    text = 'hosts.h0.address = "a"\ncontainers = {}\n'
    with pytest.raises(UsageFault, match=r"containers\.k\.vmid .*greater than or equal to 100"):
        added(text, FILE, {"hosts": {}, "containers": {"k": {"host": "h0", "vmid": 7}}})


def test_a_host_that_is_there_word_for_word_is_that_host() -> None:
    text = added("", FILE, {**NEW, "containers": {}})
    got = added(text, FILE, NEW)
    assert got.count("[hosts.n]") == 1 and parse(got, FILE).container("k").host.address == "n"
    for other in ({**NEW, "hosts": {"n": {"address": "m"}}}, {**NEW, "containers": {}}):
        with pytest.raises(UsageFault, match="there is a host 'n' already"):
            added(text, FILE, other)


# -- files beside it


def test_files_beside_it_are_written_once_and_told(tmp_path: Path) -> None:
    file, ca, schema = tmp_path / "i.toml", tmp_path / "ca.pem", tmp_path / "schema.json"
    beside = {ca: b"CA", schema: b"{}"}
    assert add(file, hosts={"a": {"address": "a"}}, beside=beside, renewed={schema}) == [ca, schema]
    assert add(file, hosts={"b": {"address": "b"}}, beside=beside, renewed={schema}) == []
    assert add(file, hosts={"c": {"address": "c"}}, beside={ca: b"CA", schema: b"{1}"}, renewed={schema}) == [schema]
    assert (ca.read_bytes(), schema.read_bytes()) == (b"CA", b"{1}")
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"another file is there already .*ca\.pem"):
        add(file, hosts={"d": {"address": "d"}}, beside={schema: b"{2}", ca: b"another"}, renewed={schema})
    assert (file.read_bytes(), ca.read_bytes(), schema.read_bytes()) == (before, b"CA", b"{1}")
    assert len(list(tmp_path.iterdir())) == 3


def test_who_comes_second_takes_away_nothing_of_the_first(tmp_path: Path) -> None:
    file, ca = tmp_path / "i.toml", tmp_path / "ca.pem"
    add(file, hosts={"a": {"address": "a"}}, containers={"x": {"host": "a", "vmid": 200}}, beside={ca: b"CA"})
    with pytest.raises(UsageFault, match="there is a container 'x' already"):
        add(file, containers={"x": {"host": "a", "vmid": 201}}, beside={ca: b"CA", tmp_path / "other": b"x"})
    assert ca.read_bytes() == b"CA" and sorted(it.name for it in tmp_path.iterdir()) == ["ca.pem", "i.toml"]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_disk_that_fills_leaves_things_as_they_were(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ca, schema = tmp_path / "i.toml", tmp_path / "ca.pem", tmp_path / "schema.json"
    schema.write_bytes(b"older")
    count = 0

    def full(_: int) -> None:
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        add(file, hosts={"a": {"address": "a"}}, beside={ca: b"CA", schema: b"{}"}, renewed={schema})
    assert [it.name for it in tmp_path.iterdir()] == ["schema.json"] and schema.read_bytes() == b"older"


def test_a_rename_that_fails_takes_back_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ca = tmp_path / "i.toml", tmp_path / "ca.pem"
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target == file:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(ConfigError, match="Input/output error"):
        add(file, hosts={"a": {"address": "a"}}, beside={ca: b"CA"})
    assert list(tmp_path.iterdir()) == []
