"""What an inventory may say, key by key: the shape that its TOML is checked against, and the JSON schema for editors.

Pure: nothing here looks at a file or another table; what must hold between tables is in `inventory_faults`. Each key
has its rule, as pydantic's core checks it, and its description. The core is used without pydantic's models round it:
every command reads an inventory, and those take 0.07 s to load and to build.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args

from pydantic_core import CoreConfig, SchemaValidator
from pydantic_core import core_schema as rules

SANDBOX = "sandbox"  # as a container's `python`: the sandbox's own
ALL = "all"  # the word of --on for every container; no name
# No control character belongs in an inventory, and the programs that get these words take no NUL.
PLAIN = r"^[^\x00-\x1f\x7f-\x9f]+$"


@dataclass(frozen=True)
class _Key:
    """What a key may say, and what editors tell of it."""

    about: str
    rule: rules.CoreSchema


# Strict: numbers are no texts, and 1 is not true.
def _text(pattern: str = PLAIN) -> rules.CoreSchema:
    return rules.str_schema(strict=True, pattern=pattern)


def _number(least: int, most: int) -> rules.CoreSchema:
    return rules.int_schema(strict=True, ge=least, le=most)


def _list(rule: rules.CoreSchema, least: int | None = None, **editors: object) -> rules.CoreSchema:
    return rules.list_schema(rule, strict=True, min_length=least, metadata={"pydantic_js_updates": editors})


def _named(rule: rules.CoreSchema) -> rules.CoreSchema:
    """A table whose keys are names. A name is a word of --on, where commas part them, and part of a file's name. (Its
    length is a rule of its own: of `{0,63}` the core takes 18 ms to make an expression.)"""
    name = rules.str_schema(strict=True, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=64)
    told = {"additionalProperties": False, "propertyNames": {"maxLength": 64, "not": {"const": ALL}}}
    return rules.dict_schema(name, rule, metadata={"pydantic_js_updates": told})


def _table(kind: type[Any], **editors: object) -> rules.CoreSchema:
    """A table of TOML that becomes a dataclass; keys that it does not have are refused. editors: what the JSON schema
    says of it beside that."""
    keys: list[rules.DataclassField] = []
    for key in dataclasses.fields(kind):
        about: _Key = get_args(key.type)[1]
        rule = about.rule
        if key.default_factory is not dataclasses.MISSING:
            rule = rules.with_default_schema(rule, default_factory=key.default_factory)
        elif key.default is not dataclasses.MISSING:
            rule = rules.with_default_schema(rule, default=key.default)
        told = {"pydantic_js_updates": {"description": about.about}}
        keys.append(rules.dataclass_field(key.name, rule, kw_only=True, metadata=told))
    arguments = rules.dataclass_args_schema(kind.__name__, keys, extra_behavior="forbid")
    names = [key.name for key in dataclasses.fields(kind)]
    told = {"pydantic_js_updates": {"additionalProperties": False, **editors}}
    return rules.dataclass_schema(kind, arguments, names, frozen=True, metadata=told)


Text = str | None


@dataclass(frozen=True, kw_only=True)
class ApiTable:
    """[hosts.NAME.api]: the host's Proxmox VE API. The token's secret stands in a variable or a file, never here."""

    address: Annotated[
        Text, _Key("Where the API listens. Default: the host's address.", _text(r"^[^\s@/\x00-\x1f\x7f]+$"))
    ] = None
    port: Annotated[int, _Key("The API's port.", _number(1, 65535))] = 8006
    user: Annotated[
        Text,
        _Key(
            'The user the token belongs to, with its realm: "bot@pve".',
            _text(r"^[^\s!=:/@]+@[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ),
    ] = None
    token_name: Annotated[
        Text, _Key('The token\'s name: what follows the "!" in bot@pve!dflash.', _text(r"^[A-Za-z][A-Za-z0-9._-]*$"))
    ] = None
    token_env: Annotated[
        str, _Key("The environment variable that holds the token's secret.", _text(r"^[A-Za-z_][A-Za-z0-9_]*$"))
    ] = "DFLASH_OPS_PVE_TOKEN"
    token_file: Annotated[
        Text, _Key("A file of mode 0600 that holds the token's secret. Relative to the inventory.", _text())
    ] = None
    ca: Annotated[
        Text,
        _Key("The node's certificate authority, its /etc/pve/pve-root-ca.pem. Relative to the inventory.", _text()),
    ] = None
    fingerprint: Annotated[
        Text,
        _Key(
            'Instead of `ca`: the SHA-256 fingerprint of the certificate, "AA:BB:...".',
            _text(r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){31}$"),
        ),
    ] = None
    node: Annotated[
        Text, _Key("The node's name in its cluster. Default: asked for.", _text(r"^[A-Za-z0-9][A-Za-z0-9-]*$"))
    ] = None


@dataclass(frozen=True, kw_only=True)
class HostTable:
    """[hosts.NAME]: either `sandbox`, or `address` and what ssh's own configuration does not say of it."""

    address: Annotated[
        Text,
        _Key(
            "A host name, an address, or an alias of ~/.ssh/config.",
            _text(r"^[^\s@\x00-\x1f\x7f-][^\s@\x00-\x1f\x7f]*$"),
        ),
    ] = None
    port: Annotated[int | None, _Key("The port of its ssh server.", _number(1, 65535))] = None
    user: Annotated[
        Text,
        _Key(
            "Who logs in. Others than root need `sudo -n` there.",
            _text(r"^[^\s@:\x00-\x1f\x7f-][^\s@:\x00-\x1f\x7f]*$"),
        ),
    ] = None
    key: Annotated[Text, _Key("The private key. Relative to the inventory.", _text())] = None
    known_hosts: Annotated[Text, _Key("The file that knows the host's key. Relative to the inventory.", _text())] = None
    ssh_config: Annotated[
        Text, _Key("Read instead of ~/.ssh/config, as `ssh -F` does. Relative to the inventory.", _text())
    ] = None
    sandbox: Annotated[
        Text,
        _Key("Instead of all else: the name of a running `dflash-ops sandbox`.", _text(r"^[a-z0-9][a-z0-9-]{0,30}$")),
    ] = None
    api: Annotated[ApiTable | None, _Key("The host's Proxmox VE API.", _table(ApiTable))] = None


@dataclass(frozen=True, kw_only=True)
class PinsTable:
    """[containers.NAME.pins]: what its environment has instead of what the release's lock says."""

    torch: Annotated[
        Text,
        _Key(
            'Another build of the locked torch ("cu126", "cpu"), or a whole version ("2.12.1+cu126").',
            _text(r"^(cpu|cu\d{3}|\d[\w.+!]*)$"),
        ),
    ] = None
    cuda_index: Annotated[
        Text,
        _Key(
            "The package index that has that torch; PyTorch's site names one for each CUDA.",
            _text(r"^(https?|file)://[^\s\x00-\x1f\x7f]+$"),
        ),
    ] = None
    transformers: Annotated[Text, _Key("Another version of transformers.", _text(r"^\d[\w.+!]*$"))] = None


@dataclass(frozen=True, kw_only=True)
class ContainerTable:
    """[containers.NAME]: an LXC container on one of the hosts, and where the trainer lives in it."""

    host: Annotated[str, _Key("The name of its host in this file.", _text())]
    vmid: Annotated[int, _Key("Its number, as `pct list` shows it.", _number(100, 999_999_999))]
    path: Annotated[
        str,
        _Key(
            "Its folder in the container: releases, runs, shared and env lie in it.",
            _text(r"^/[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f/]$"),
        ),
    ] = "/opt/dflash"
    python: Annotated[
        str,
        _Key("What `env sync` makes the trainer's environment of; it runs the trainer where none was made.", _text()),
    ] = "python3"
    user: Annotated[
        Text,
        _Key(
            "Whose its releases are, and as whom `exec` and `shell` work. Default: root.",
            _text(r"^[A-Za-z_][A-Za-z0-9_.-]*\$?$"),
        ),
    ] = None
    gpus: Annotated[
        list[int],
        _Key(
            "The host's numbers of its GPUs, in the order in which the container sees them.",
            _list(_number(0, 4095), uniqueItems=True),
        ),
    ] = field(default_factory=list[int])
    via: Annotated[
        Literal["lxc-attach", "pct"],
        _Key(
            'How commands enter it; "pct" where lxc-attach may not be called.',
            rules.literal_schema(["lxc-attach", "pct"]),
        ),
    ] = "lxc-attach"
    env_check: Annotated[
        bool,
        _Key("Whether `train start` compares its packages with the release's lock.", rules.bool_schema(strict=True)),
    ] = True
    pins: Annotated[
        PinsTable, _Key("What its environment has instead of what the release's lock says.", _table(PinsTable))
    ] = PinsTable()


_ONE_WAY = [
    {"required": ["address"], "properties": {"sandbox": False}},
    {
        "required": ["sandbox"],
        "properties": {key.name: False for key in dataclasses.fields(HostTable) if key.name != "sandbox"},
    },
]
_HOSTS = _table(HostTable, oneOf=_ONE_WAY)


@dataclass(frozen=True, kw_only=True)
class InventoryFile:
    """An inventory of dflash-ops: hosts, the containers on them, and groups of those."""

    default: Annotated[Text, _Key("The container meant when none is named.", rules.str_schema(strict=True))] = None
    source: Annotated[Text, _Key("What `deploy` sends. Relative to this file.", _text())] = None
    hosts: Annotated[dict[str, HostTable], _Key("The hypervisors, by a name of your choice.", _named(_HOSTS))] = field(
        default_factory=dict[str, HostTable]
    )
    containers: Annotated[
        dict[str, ContainerTable],
        _Key("The containers, by a name of your choice.", _named(_table(ContainerTable))),
    ] = field(default_factory=dict[str, ContainerTable])
    groups: Annotated[
        dict[str, list[str]],
        _Key(
            "Names for several: of containers, hosts (all containers there) and other groups.",
            _named(_list(rules.str_schema(strict=True), 1)),
        ),
    ] = field(default_factory=dict[str, list[str]])


_WHOLE = _table(InventoryFile)
# What was given is in no text of pydantic's own: a traceback may show that, and a file may hold a secret where none
# belongs.
_VALIDATOR = SchemaValidator(_WHOLE, CoreConfig(hide_input_in_errors=True))


def checked(document: dict[str, Any]) -> InventoryFile:
    """The tables of a TOML document. pydantic_core.ValidationError names all that is wrong in them."""
    return _VALIDATOR.validate_python(document)


def schema_text() -> str:
    """The JSON schema of an inventory, for editors."""
    import json

    from pydantic.json_schema import GenerateJsonSchema

    schema = GenerateJsonSchema().generate(_WHOLE)
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **_for_toml(schema)}, indent=1) + "\n"


def _for_toml(schema: Any, *, names: bool = False) -> Any:
    """The schema without titles, which repeat the keys, and without defaults that TOML can't say. names: whether its
    keys are names of ours: `default` is one."""
    if not isinstance(schema, dict):
        return schema
    parts = cast(dict[str, Any], schema)
    return {
        key: _for_toml(value, names=not names and key in ("properties", "patternProperties"))
        for key, value in parts.items()
        if names or (key != "title" and not _unsayable(key, value))
    }


def _unsayable(key: str, value: Any) -> bool:
    return key == "default" and (value is None or (isinstance(value, dict) and None in value.values()))
