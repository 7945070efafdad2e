"""What `init` asks of a host's Proxmox API: the node's CA, over ssh, and whether the token is taken."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_ops import init_answers as answers
from dflash_ops import inventory_check
from dflash_ops.command import Api, Command, Host
from dflash_ops.errors import ConfigError, PreflightError, UsageFault
from dflash_ops.init_answers import Said
from dflash_ops.proxmox_token import read_token
from dflash_ops.shell import Shell

_SECONDS = 20.0
_CA = "/etc/pve/pve-root-ca.pem"


@dataclass(frozen=True)
class Tried:
    """What became of the token. went: whether it was tried; words: for the user."""

    went: bool
    words: str


def _flags(said: Said) -> list[str]:
    """The options that are of the API and no token's name."""
    words = ("token_file", "api_address", "api_port", "api_node")
    return [f"--{word.replace('_', '-')}" for word in words if getattr(said, word) is not None]


def refuse_others(said: Said, there: Api, host_name: str, inventory: Path) -> None:
    """UsageFault where the command line says other things than the file, which has an [api] already."""
    token, more = answers.token(said.api) if said.api is not None else None, _flags(said)
    if more or (token is not None and token != (there.user, there.token_name)):
        raise UsageFault(
            f"host {host_name!r} has an [api] in the file already",
            where=str(inventory),
            next=f"leave {', '.join(more or ['--api'])} out, or change [hosts.{host_name}.api] by hand",
        )


def keys_of(word: str, said: Said, token_file: str | None) -> dict[str, Any]:
    """[hosts.NAME.api] for a token's name; empty for none. token_file: as the inventory says it."""
    token = answers.token(word)
    if token is None:
        if more := _flags(said):
            raise UsageFault(f"{', '.join(more)}: of which token?", next="say --api USER@REALM!NAME")
        return {}
    keys = {
        "user": token[0],
        "token_name": token[1],
        "token_file": token_file,
        "address": said.api_address,
        "port": said.api_port,
        "node": said.api_node,
    }
    return {key: value for key, value in keys.items() if value is not None}


def ca_name(host_name: str) -> str:
    return f"{host_name}-ca.pem"


def fetch_and_try(
    shell: Shell, host: Host, host_name: str, inventory: Path, keys: Mapping[str, Any]
) -> tuple[bytes, Tried]:
    """The node's CA, and what the API said to the token. keys: [hosts.NAME.api], without `ca`.

    PreflightError where the CA can't be read; ConfigError where another lies beside the inventory; the errors of
    `proxmox.connect` and of its answer where the token is not taken."""
    asked = shell.run(host, Command(("cat", _CA), root=True), timeout=_SECONDS)
    if asked.code != 0 or b"-----BEGIN CERTIFICATE-----" not in asked.out:
        raise PreflightError(
            "the node's CA can't be read",
            where=f"{host.address}:{_CA}",
            why=asked.last_words,
            next=f"leave --api out; copy the file here, and name it as `ca` in [hosts.{host_name}.api]",
        )
    path = inventory.parent / ca_name(host_name)
    if path.exists() and path.read_bytes() != asked.out:
        raise ConfigError(
            "another CA is there already", where=str(path), next="compare the two, and remove the old one"
        )
    with tempfile.TemporaryDirectory() as folder:
        ca = Path(folder) / path.name
        ca.write_bytes(asked.out)
        said: dict[str, Any] = {**keys, "ca": ca}
        if "token_file" in keys:
            said["token_file"] = inventory.parent / Path(keys["token_file"]).expanduser()
        return asked.out, _try(shell, replace(host, api=Api(**said)), host_name)


def _try(shell: Shell, host: Host, host_name: str) -> Tried:
    api = host.api
    assert api is not None
    if read_token(api, host_name) is None:
        how = f"put it there, then: dflash-ops inventory check --connect {host_name}"
        return Tried(False, f"API: the token's secret is not in {api.token_env}; {how}")
    version, _ = inventory_check.api_version(shell, host)
    return Tried(True, f"API: version {version}, as {api.user}!{api.token_name}")
