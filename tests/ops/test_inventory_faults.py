"""What is said of wrong inventories: every fault at once, soon, and with no secret in it; and what editors are told."""

import dataclasses
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops import inventory_faults, inventory_lines, inventory_view
from dflash_ops.inventory import examine, parse
from dflash_ops.inventory_faults import Fault, brief
from dflash_ops.inventory_tables import (
    ApiTable,
    ContainerTable,
    HostTable,
    InventoryFile,
    PinsTable,
    schema_text,
)

FOLDER = Path(__file__).parents[2] / "inventory"
LAB = '[hosts.lab]\naddress = "lab"\n'
ONE = '[containers.t]\nhost = "lab"\nvmid = 200\n'


def faults(text: str) -> list[Fault]:
    found = examine(text)
    assert isinstance(found, list)
    return found


# -- every fault


def test_a_fault_in_one_table_hides_none_between_the_others() -> None:
    text = f"""default = "tt"
{LAB}{ONE}[containers.u]
host = "labb"
vmid = 201
[containers.bad]
host = "lab"
vmid = 7
[hosts.worse]
adress = "x"
[containers.on]
host = "worse"
vmid = 202
[groups]
g = ["t", "bad", "worse", "nosuch"]
"""
    assert [(it.line, it.key) for it in faults(text)] == [
        (1, "default"),
        (8, "containers.u.host"),
        (12, "containers.bad.vmid"),
        (14, "hosts.worse.adress"),
        (19, "groups.g"),
    ]
    assert "nosuch" in faults(text)[-1].why


def test_a_mistyped_kind_is_the_only_fault_of_its_tables() -> None:
    text = 'default = "t"\n[host.lab]\naddress = "lab"\n' + ONE + '[groups]\ng = ["lab"]\n'
    (fault,) = faults(text)
    assert fault.key == "host" and "nearest: hosts" in fault.why and fault.line == 2
    (fault,) = faults("hosts = 3\n" + ONE)
    assert fault.key == "hosts"


def test_each_statement_is_read_a_few_times_however_many_faults_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def counted(text: str) -> dict[str, Any]:
        nonlocal count
        count += len(text)
        return real(text)

    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", counted)
    text = LAB + "".join(f'[containers.c{n}]\nhost = "lab"\nvmid = {100 + n}\ngpu = [\n0,\n]\n' for n in range(300))
    found = faults(text)
    assert [it.line for it in found] == [6 + 6 * n for n in range(300)]
    assert count < 4 * len(text)


def test_a_statement_of_many_lines_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of `a` may be its last."""
    monkeypatch.setattr(inventory_lines, "_MOST_READ", 10_000)
    text = "z = 1\na = [\n" + "[1],\n" * 300 + "]\nb = 1\n"
    assert [(it.line, it.end) for it in inventory_lines.statements(text)] == [(0, 1)]
    assert inventory_lines.line_of(text, ["b"]) is None and inventory_lines.line_of(text, ["z"]) == 1
    plain = text.replace("[1]", "1")
    assert inventory_lines.line_of(plain, ["b"]) == 304


def test_a_circle_is_told_once() -> None:
    ring = "[groups]\n" + "".join(f'g{n} = ["g{(n + 1) % 300}"]\n' for n in range(300))
    (fault,) = faults(LAB + ring)
    assert fault.key == "groups.g0" and "g0 -> g1" in fault.why and fault.why.endswith("g299 -> g0")
    assert len(fault.why) < 200
    two = '[groups]\na = ["b"]\nb = ["a", "c"]\nc = ["b", "d"]\nd = ["lab"]\ne = ["a"]\n'
    assert [it.key for it in faults(LAB + two)] == ["groups.a", "groups.c"]


def test_long_chains_of_groups_are_no_circle() -> None:
    text = LAB + "[groups]\n" + "".join(f'g{n} = ["g{n + 1}"]\n' for n in range(300)) + 'g300 = ["lab"]\n'
    assert isinstance(examine(text), InventoryFile)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAB + ONE + 'torch = "cu126"', "it belongs in [containers.NAME.pins]"),
        (LAB + ONE + 'default = "t"', "it belongs at the top"),
        ('[hosts.lab]\nHostName = "x"', "nearest: address"),
        (LAB + 'identityfile = "x"', "nearest: key"),
        (LAB + "[hosts.lab.pins]", "it belongs in [containers.NAME]"),
        (LAB + ONE + "gpu = [0]", "nearest: gpus"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(text: str, says: str) -> None:
    (fault,) = [it for it in faults(text) if it.why.startswith("no such key")]
    assert says in fault.why


# -- odd input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAB + ONE + f"gpus = [{'9' * 5000}]\n", "a number is too long"),
        (LAB + ONE + f"gpus = [0x{'f' * 5000}]\n", "not what is there"),
        ("a." * 20_000 + "b = 1", "a key of more than 64 parts"),
        (f"{LAB}x = {{{'a.' * 100}b = 1}}", "a key of more than 64 parts"),
        ("a = " + "{a=" * 3000 + "1" + "}" * 3000, "brackets in brackets"),
        ("hosts = " + "{a=" * 80 + "1" + "}" * 80, "no such key"),
        (f'{LAB}key = "a\\u0000b"', "without line breaks and control characters"),
        (f'{LAB}known_hosts = "a\\nb"', "without line breaks"),
        (f'{LAB}key = ""', "must not be empty"),
        ('[hosts.lab]\naddress = "la\\u001b[31mb"', "without line breaks"),
        ('[hosts.lab]\naddress = "la\\u0000b"', "hosts.lab.address"),
        (f'{LAB}{ONE}python = "a\\u0000"', "without line breaks"),
        (f'{LAB}{ONE}path = "/a\\nb"', "containers.t.path"),
        (f'source = "a\\u0000"\n{LAB}', "without line breaks"),
    ],
)
def test_what_no_inventory_says_is_refused_in_words(text: str, says: str) -> None:
    told = "\n".join(f"{it.key}: {it.why}" for it in faults(text))
    assert says in told and "\0" not in told and "\x1b" not in told


def test_a_number_that_is_too_long_has_its_line() -> None:
    (fault,) = faults(f"{LAB}{ONE}# x\ngpus = [\n{'9' * 5000}]\n")
    assert (fault.line, fault.why[:20]) == (7, "a number is too long")


# -- secrets


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("https://user:hunter2@idx/simple", "https://***@idx/simple"),
        ("https://hun@ter2@idx/simple", "https://***@idx/simple"),
        ("root:hunter2@lab", "***@lab"),
        ("me@lab", "me@lab"),
        ("https://idx/a@b", "https://idx/a@b"),
        (["root:hunter2@lab", 3], ["***@lab", 3]),
        ({"a": {"b": "root:hunter2@lab"}}, {"a": {"b": "***@lab"}}),
    ],
)
def test_a_password_is_shown_nowhere(said: object, shown: object) -> None:
    assert inventory_faults.hidden(said) == shown
    assert brief(said) == repr(shown)


def test_neither_faults_nor_views_show_a_password() -> None:
    for text in ('[hosts.lab]\naddress = "root:hunter2@lab"', f'{LAB}user = "root:hunter2"'):
        assert "hunter2" not in repr(faults(text)) and len(faults(text)) == 1
    index = "https://user:hunter2@idx/simple"
    book = parse(f'{LAB}{ONE}[containers.t.pins]\ncuda_index = "{index}"\n', Path("/x.toml"))
    assert book.container().pins.torch_index == index
    shown = repr((inventory_view.listing(book), inventory_view.about(book, "t")))
    assert "hunter2" not in shown and "https://***@idx/simple" in shown


# -- what editors are told


def test_the_schema_has_the_keys_that_the_tables_have() -> None:
    whole = json.loads(schema_text())

    def of(kind: str) -> dict[str, Any]:
        (inner,) = whole["properties"][kind]["patternProperties"].values()
        return inner

    for table, kind in (
        (whole, InventoryFile),
        (of("hosts"), HostTable),
        (of("hosts")["properties"]["api"], ApiTable),
        (of("containers"), ContainerTable),
        (of("containers")["properties"]["pins"], PinsTable),
    ):
        assert list(table["properties"]) == [key.name for key in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ((FOLDER / "lab.toml.example").read_text(), True),
        ((FOLDER / "sandbox.toml").read_text(), True),
        ('default = "t"\n' + LAB + ONE, True),
        ('[hosts.a]\nsandbox = "b"\nport = 1\n', False),
        ('[hosts.a]\nsandbox = "b"\naddress = "a"\n', False),
        ("[hosts.a]\nport = 1\n", False),
        ('[hosts.all]\naddress = "a"\n', False),
        (f'[hosts.{"a" * 65}]\naddress = "a"\n', False),
        (LAB + ONE + "gpus = [0, 0]\n", False),
        (LAB + ONE + "gpus = [1, 0]\n", True),
        (LAB + "port = 0\n", False),
        ("[groups]\na = []\n", False),
        ("deflaut = 1\n", False),
        (LAB + 'key = "a\\u0000b"\n', False),
    ],
)
def test_editors_and_commands_say_the_same(text: str, good: bool) -> None:
    """jsonschema's word where it is there, and always that of the few rules that our schema is made of."""
    document, schema = tomllib.loads(text), json.loads(schema_text())
    assert isinstance(examine(text), InventoryFile) == good
    assert (list(refused(schema, document)) == []) == good
    try:
        import jsonschema  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError:
        return
    assert jsonschema.Draft202012Validator(schema).is_valid(document) == good


_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def refused(schema: Any, value: Any) -> Iterator[str]:
    """The rules of a schema that a value breaks: those that ours uses, as JSON Schema means them."""
    import re

    if schema is False:
        yield "nothing may be here"
    if not isinstance(schema, dict):
        return
    for rule, said in schema.items():
        match rule:
            case "type" if not isinstance(value, _TYPES[said]) or (said == "integer" and isinstance(value, bool)):
                yield rule
            case "pattern" if isinstance(value, str) and not re.search(said, value):
                yield rule
            case "maxLength" if isinstance(value, str) and len(value) > said:
                yield rule
            case "minimum" if isinstance(value, int) and value < said:
                yield rule
            case "maximum" if isinstance(value, int) and value > said:
                yield rule
            case "minItems" if isinstance(value, list) and len(value) < said:
                yield rule
            case "uniqueItems" if isinstance(value, list) and len({json.dumps(it) for it in value}) < len(value):
                yield rule
            case "enum" if value not in said:
                yield rule
            case "const" if value != said:
                yield rule
            case "not" if not list(refused(said, value)):
                yield rule
            case "oneOf" if sum(not list(refused(one, value)) for one in said) != 1:
                yield rule
            case "anyOf" if all(list(refused(one, value)) for one in said):
                yield rule
            case "required" if isinstance(value, dict) and not value.keys() >= set(said):
                yield rule
            case "items" if isinstance(value, list):
                yield from (it for one in value for it in refused(said, one))
            case "propertyNames" if isinstance(value, dict):
                yield from (it for key in value for it in refused(said, key))
            case "properties" if isinstance(value, dict):
                yield from (it for key, inner in said.items() if key in value for it in refused(inner, value[key]))
            case "patternProperties" if isinstance(value, dict):
                for pattern, inner in said.items():
                    yield from (it for key in value if re.search(pattern, key) for it in refused(inner, value[key]))
            case "additionalProperties" if isinstance(value, dict) and said is False:
                known = schema.get("properties", {})
                patterns = schema.get("patternProperties", {})
                if any(key not in known and not any(re.search(it, key) for it in patterns) for key in value):
                    yield rule
            case _:
                pass
