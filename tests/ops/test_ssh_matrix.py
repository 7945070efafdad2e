"""A matrix of client configurations against OpenSSH's own servers: what plain ssh would do, we do, or say why not.

The rows are configurations. `plain ssh` is asked the same where it should get in: a row that it does not understand
says nothing of us.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from openssh import Agent, fingerprint, make_key, public
from ssh_rows import CROWD, IN, OUT, Refusal, Row
from ssh_world import World, make_world, who

from dflash_ops import ssh
from dflash_ops.command import Command, Host
from dflash_ops.errors import HostKeyError
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(tmp_path_factory.mktemp("ssh") / "world")
    (world.folder / "conf.d").mkdir()
    (world.folder / "conf.d" / "one.conf").write_text(
        f"Host included\n HostName 127.0.0.1\n Port {world.target.port}\n"
    )
    (world.folder / "bare").mkdir()
    for source, copy in (
        ("id", f"root-{world.target.port}"),
        ("id.pub", "id-public"),
        ("signed.pub", "signed-public"),
        ("signed-cert.pub", "moved-cert"),
        ("signed", "bare/signed"),
        ("signed.pub", "bare/signed.pub"),
    ):
        shutil.copy(world.key(source), world.key(copy))
    for name, text in _known_hosts(world).items():
        (world.folder / name).write_text(text)
    hashed = ("ssh-keygen", "-q", "-H", "-f", str(world.folder / "hashed"))
    subprocess.run(hashed, check=True, capture_output=True)
    yield world
    for server in (world.target, world.gate, world.outer):
        server.end()


def _known_hosts(world: World) -> dict[str, str]:
    target, all_known = world.target, (world.folder / "known_hosts").read_text()
    rsa = target.known(key=target.host_keys[2])
    return {
        "hashed": all_known,
        "aliased": target.known("the-box"),
        "bare_name": target.known("127.0.0.1"),
        "patterns": target.known(f"!other,[127.0.?.*]:{target.port}"),
        "ecdsa_known": target.known(key=target.host_keys[1]),
        "rsa_known": rsa,
        "rotating": f"[127.0.0.1]:{target.port} {(world.folder / 'stranger.pub').read_text()}" + target.known(),
        "empty": "# nobody\n\n",
        "changed": f"[127.0.0.1]:{target.port} {(world.folder / 'stranger.pub').read_text()}"
        + target.known(key=target.host_keys[1]),
        "stranger_at_the_gate": target.known() + f"[127.0.0.1]:{world.gate.port} {public(world.key('stranger'))}\n",
        "target_only": target.known(),
        "revoked": target.known() + "".join(f"@revoked * {public(key)}\n" for key in target.host_keys),
        "authority": f"@cert-authority *,[127.0.0.1]:{target.port} {public(world.key('ca'))}\n",
        "krl": "SSHKRL\n\0",
        "revoked_keys": "".join(f"{public(key)} old\n" for key in target.host_keys),
        "wrong_address": target.known(f"[localhost]:{target.port}")
        + f"[127.0.0.1]:{target.port} {public(world.key('stranger'))}\n",
    }


# plain ssh would run false in the one, and stops at a `~` of nobody in the other
NOT_PLAIN = {"what-has-no-meaning-here", "keys-that-are-not-there"}


@pytest.fixture(scope="module")
def agents(world: World) -> Iterator[dict[tuple[str, ...], Agent]]:
    """An agent for each hand of keys that a row asks for."""
    for name in CROWD:
        make_key(world.key(name))
    with ExitStack() as stack:
        made: dict[tuple[str, ...], Agent] = {}
        for keys in {row.agent for row in IN if row.agent}:
            made[keys] = stack.enter_context(Agent(world.folder))
            made[keys].add(*map(world.key, keys), passphrase="sesame")
        yield made


@pytest.mark.parametrize("row", IN, ids=lambda row: row.name)
def test_what_lets_us_in(
    row: Row, world: World, agents: dict[tuple[str, ...], Agent], monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    monkeypatch.setenv("WORLD", str(world.folder))
    if row.agent:
        for name in ("SSH_AUTH_SOCK", "MY_AGENT"):
            monkeypatch.setenv(name, str(agents[row.agent].socket))
    host, before = world.alias(row.config, row.host), world.counts()
    assert who(host) == row.user
    assert tuple(now - then for now, then in zip(world.counts(), before, strict=True)) == row.way
    if soak and row.name not in NOT_PLAIN:  # a row that plain ssh does not understand says nothing of us
        words = ("ssh", "-F", str(host.ssh_config), "-o", "BatchMode=yes", row.host, "id -un")
        assert subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip() == row.user


@pytest.mark.parametrize("row", OUT, ids=lambda row: row.name)
def test_what_does_not(
    row: Refusal, world: World, agents: dict[tuple[str, ...], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agents[row.agent].socket))
    host = world.alias(row.config, row.host)
    before = {file.name: file.read_bytes() for file in world.folder.iterdir() if file.is_file()}
    with pytest.raises(row.error) as caught:
        who(host)
    assert type(caught.value) is row.error
    said = caught.value.line()
    prints = {"stranger": fingerprint(world.key("stranger")), "shown": fingerprint(world.target.host_keys[0])}
    for words in row.says.split(" ... "):
        assert world.filled(words, **prints) in said
    assert len(said) < 1500 and "Traceback" not in said and "OPENSSH PRIVATE" not in said
    # Nothing is ever added to a file.
    assert {file.name: file.read_bytes() for file in world.folder.iterdir() if file.is_file()} == before


def test_the_command_for_an_unknown_key_adds_exactly_that_key(world: World) -> None:
    (world.folder / "mine").write_text("")
    for name in ("gate", "box"):  # one hop after the other
        host = world.alias("UserKnownHostsFile {dir}/mine; Host box; ProxyJump gate")
        with pytest.raises(HostKeyError) as caught:
            who(host)
        assert (f"jump {name}" in caught.value.where) == (name == "gate")
        subprocess.run(("sh", "-c", caught.value.next.rpartition("then: ")[2]), check=True)
    assert who(host) == "root"
    assert len((world.folder / "mine").read_text().split("\n")) == 3


def test_what_the_inventory_says_wins(
    world: World, agents: dict[tuple[str, ...], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is the only one that is tried, whatever the agent holds."""
    other = f"Port 1; User nobody; IdentityFile {{dir}}/stranger; IdentityAgent {agents[CROWD].socket}"
    host = world.alias(f"{other}; UserKnownHostsFile {{dir}}/empty")
    assert host.ssh_config is not None
    mine = replace(host, port=world.target.port, user="joe", key=world.key("id"), known_hosts=world.key("known_hosts"))
    assert who(mine) == "joe"
    # A file for all hosts, by the environment; a host's own comes before it.
    world.alias("User joe")
    monkeypatch.setenv("DFLASH_OPS_SSH_CONFIG", str(host.ssh_config))
    assert who(Host("box", "box")) == "joe"
    (world.folder / "other").write_text(host.ssh_config.read_text().replace("User joe", "User root"))
    assert who(Host("box", "box", ssh_config=world.folder / "other")) == "root"
    assert ssh.hostname(Host("box", "box")) == "127.0.0.1"


def test_the_sandboxs_server_is_one_of_them(sandbox: SandboxState, world: World, shell: Shell) -> None:
    """As a host, and as the jump before one."""
    known = f"UserKnownHostsFile {sandbox.known_hosts} {{dir}}/known_hosts; IdentityFile {sandbox.key}"
    data = bytes(range(256)) * 400
    for config in ("Host box; Port {port}", "Host gate; Port {port}; Host box; ProxyJump gate"):
        key = world.key("id") if "gate" in config else sandbox.key
        host = world.alias(f"{known}; IdentityFile {key}; {config.format(port=sandbox.port)}")
        assert shell.run(replace(host, name=config), Command(("cat",), stdin=data)).out == data


def test_the_address_that_we_come_from(world: World) -> None:
    link = ssh.connect(world.alias("AddressFamily inet; BindAddress 127.0.0.2"), timeout=10)
    process, said = link.start(b"echo $SSH_CONNECTION"), b""
    while not (part := process.read(10))[2]:
        said += part[0]
    assert said.startswith(b"127.0.0.2 ")
    link.close()


def test_algorithms_are_those_that_the_configuration_allows(world: World) -> None:
    allowed = "Ciphers aes256-gcm@openssh.com; KexAlgorithms curve25519-sha256; HostKeyAlgorithms rsa-sha2-256"
    link = ssh.connect(world.alias(f"{allowed}; Compression yes"), timeout=10)
    transport: Any = link._transport
    assert transport.local_cipher == transport.remote_cipher == "aes256-gcm@openssh.com"
    assert (transport.host_key_type, transport.local_compression) == ("rsa-sha2-256", "zlib@openssh.com")
    link.close()
