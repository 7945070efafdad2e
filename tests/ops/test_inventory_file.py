"""Where the inventory is looked for, and how its bytes are read; what the repository's own files say."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import ConfigError
from dflash_ops.inventory import load, parse
from dflash_ops.inventory_file import decoded, find, users_own
from dflash_ops.inventory_tables import schema_text

FOLDER = Path(__file__).parents[2] / "inventory"


def test_it_is_found_upwards_and_never_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b"
    (tmp_path / "inventory").mkdir()
    (deep / "inventory").mkdir(parents=True)
    sandbox, default = tmp_path / "inventory" / "sandbox.toml", tmp_path / "inventory" / "default.toml"
    named, nearer = tmp_path / "named.toml", tmp_path / "a" / "dflash-ops.toml"
    sandbox.touch()
    assert find(start=deep) == sandbox  # the empty inventory/ below is none
    default.touch()
    assert find(start=deep) == default
    nearer.touch()
    assert find(start=deep) == nearer
    named.touch()
    monkeypatch.setenv("DFLASH_OPS_INVENTORY", str(named))
    assert find(start=deep) == named
    assert find(tmp_path / "inventory", start=deep) == default
    with pytest.raises(ConfigError, match="--inventory names it"):
        find(tmp_path / "nowhere.toml")
    monkeypatch.setenv("DFLASH_OPS_INVENTORY", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="DFLASH_OPS_INVENTORY names it"):
        find(start=deep)


def test_none_at_all_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no inventory .*Next: dflash-ops init writes one"):
        find(start=tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "dflash-ops.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"can't be read .*Next: "):
        load(file)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"can't be looked for .*File name too long\. Next: "):
        find(Path("x" * 300))


LAB = b'[hosts.lab]\naddress = "lab"\n'


@pytest.mark.parametrize("raw", [LAB, b"\xef\xbb\xbf" + LAB, LAB.replace(b"\n", b"\r\n"), b""])
def test_marks_and_line_endings_of_editors_are_taken(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "dflash-ops.toml"
    file.write_bytes(raw)
    assert list(load(file).tables.hosts) == (["lab"] if raw else [])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (LAB + b"# caf\xe9\n", "line 3 is not UTF-8"),
        ("[hosts]".encode("utf-16"), "it is UTF-16"),
        (b"#" * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_what_is_no_text_of_ours_is_told(raw: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=f"can't be read.*{says}.*save it as UTF-8"):
        decoded(raw, Path("x"))


def test_what_is_no_file_is_told_and_never_passed_over(tmp_path: Path) -> None:
    deep = tmp_path / "a"
    deep.mkdir()
    (tmp_path / "dflash-ops.toml").touch()
    nearer = deep / "dflash-ops.toml"
    nearer.mkdir()
    with pytest.raises(ConfigError, match=r"a/dflash-ops\.toml\): it is a folder"):
        find(start=deep)
    nearer.rmdir()
    nearer.symlink_to("gone.toml")
    with pytest.raises(ConfigError, match=r"it is a link to gone\.toml, which is not there"):
        find(start=deep)
    nearer.unlink()
    nearer.symlink_to(nearer)
    with pytest.raises(ConfigError, match="symbolic links"):
        find(start=deep)
    nearer.unlink()
    os.mkfifo(nearer)
    for words in ((None, deep), (nearer, None)):
        with pytest.raises(ConfigError, match="it is a pipe"):  # and is not opened: that would wait for a writer
            find(words[0], start=words[1])


def test_the_users_own_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    own = home / "dflash-ops" / "inventory.toml"
    own.parent.mkdir(parents=True)
    own.write_bytes(LAB)
    assert find(start=work) == own and users_own()[0] == own
    (work / "dflash-ops.toml").touch()
    assert find(start=work) == work / "dflash-ops.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")  # counts as not said
    monkeypatch.setenv("HOME", str(tmp_path))
    assert users_own()[0] == tmp_path / ".config" / "dflash-ops" / "inventory.toml"


def test_somebody_elses_inventory_in_a_folder_above_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    deep, file = tmp_path / "a", tmp_path / "dflash-ops.toml"
    deep.mkdir()
    file.write_bytes(LAB)
    os.chown(file, 4321, 4321)
    with pytest.raises(ConfigError, match=r"is not used .*it is a file of user 4321.*Next: say --inventory"):
        find(start=deep)
    assert find(file, start=deep) == file  # who names it has chosen it
    monkeypatch.setenv("SUDO_UID", "4321")
    assert find(start=deep) == file
    monkeypatch.delenv("SUDO_UID")
    os.chown(file, 0, 4321)
    file.chmod(0o664)
    assert find(start=deep) == file
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"everybody may write it\. Next: chmod o-w"):
        find(start=deep)
    file.rename(tmp_path / "real.toml")
    (tmp_path / "real.toml").chmod(0o644)
    file.symlink_to("real.toml")
    assert find(start=deep) == file
    os.chown(file, 4321, 4321, follow_symlinks=False)
    with pytest.raises(ConfigError, match="it is a file of user 4321"):
        find(start=deep)
    file.unlink()
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "default.toml").write_bytes(LAB)
    os.chown(tmp_path / "inventory" / "default.toml", 4321, 4321)
    with pytest.raises(ConfigError, match="is not used"):
        find(start=deep)


def test_the_files_of_this_repository_are_good() -> None:
    for file in (FOLDER / "sandbox.toml", FOLDER / "lab.toml.example"):
        assert parse(file.read_text(), file).tables.default == "trainer"


def test_the_example_shows_every_key() -> None:
    text = (FOLDER / "lab.toml.example").read_text()
    shown = re.sub(r"(?m)^# (?=\[|\w+ = )", "", text).replace("AA:BB:...", ":".join(["AA"] * 32))
    parse(shown, FOLDER / "lab.toml.example")
    keys = {name for _, table in tables(json.loads(schema_text())) for name in table["properties"]}
    assert [key for key in keys - {"sandbox", "address", "node"} if not re.search(rf"\b{key}\b", text)] == []


def tables(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every table of the schema, with its description."""
    if not isinstance(schema, dict):
        return []
    own = [(schema.get("description", ""), schema)] if "properties" in schema else []
    return own + [found for value in schema.values() for found in tables(value)]


def test_the_schema_in_the_repository_is_the_commands() -> None:
    assert (FOLDER / "schema.json").read_text() == schema_text()


def test_the_schema_describes_every_key_and_allows_no_other() -> None:
    found = tables(json.loads(schema_text()))
    assert len(found) == 5
    for description, table in found:
        assert description and table["additionalProperties"] is False
        for key in table["properties"].values():
            assert key["description"] and "title" not in key and ("default" not in key or key["default"] is not None)
    names = {name for _, table in found for name in table["properties"]}
    assert {"address", "token_file", "vmid", "groups", "cuda_index"} <= names
