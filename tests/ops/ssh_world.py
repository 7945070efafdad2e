"""A small world for the SSH tests: a host, two gates before it, a hand of keys, and configurations that reach them."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from openssh import Sshd, make_key, need

from dflash_ops.command import Command, Host
from dflash_ops.shell import Shell

RELAY = Path(__file__).with_name("ssh_relay.py")


@dataclass
class World:
    """`folder` has keys (`id`, `stranger`, `locked` with the passphrase "sesame", `ecdsa`, `rsa`, `signed` with a
    certificate), known_hosts of all servers, and relay.py. Users of the servers: root, and joe."""

    folder: Path
    target: Sshd
    gate: Sshd
    outer: Sshd

    def key(self, name: str) -> Path:
        return self.folder / name

    def filled(self, text: str, **more: str) -> str:
        """In the text, {target}, {gate} and {outer} are ports, {dir} is the folder, {python} this Python."""
        ports = {"target": self.target.port, "gate": self.gate.port, "outer": self.outer.port}
        return text.format(dir=self.folder, python=sys.executable, **ports, **more)

    def alias(self, config: str, name: str = "box") -> Host:
        """A host by a name of this configuration, whose lines are set apart by `; `, with what is usual behind it."""
        key = "" if "IdentityFile" in config else " IdentityFile {dir}/id\n"
        file = self.folder / "config"
        file.write_text(self.filled("Host *\n" + config.replace("; ", "\n") + USUAL + key))
        return Host("box", name, ssh_config=file)

    def counts(self) -> tuple[int, int, int]:
        """Connections so far, to the target, the gate and the outer gate."""
        return self.target.connections, self.gate.connections, self.outer.connections


# What comes behind each configuration. For each setting the first value counts, but of IdentityFile all do.
USUAL = """
Host box
 HostName 127.0.0.1
 Port {target}
Host gate
 HostName 127.0.0.1
 Port {gate}
Host outer
 HostName 127.0.0.1
 Port {outer}
Host *
 User root
 IdentityAgent none
 UserKnownHostsFile {dir}/known_hosts
 GlobalKnownHostsFile none
"""


def make_world(folder: Path) -> World:
    need("sshd", "ssh", "ssh-keygen")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("id", "stranger", "ca", "signed"):
        make_key(folder / name)
    for kind in ("ecdsa", "rsa"):
        make_key(folder / kind, kind)
    make_key(folder / "locked", passphrase="sesame")
    sign = ("ssh-keygen", "-q", "-s", str(folder / "ca"), "-I", "someone", "-n", "root", str(folder / "signed.pub"))
    subprocess.run(sign, check=True)
    users = {"root": "/bin/bash", "joe": "/bin/bash"}
    hosts = tuple(make_key(folder / f"host_{kind}", kind) for kind in ("ed25519", "ecdsa", "rsa"))
    (folder / "banner").write_text("No entry for others.\n")
    config = f"TrustedUserCAKeys {folder / 'ca.pub'}\nBanner {folder / 'banner'}"
    target = Sshd(folder / "target", config=config, shells=users, host_keys=hosts)
    gate, outer = (Sshd(folder / name, shells=users) for name in ("gate", "outer"))
    keys = [folder / name for name in ("id", "ecdsa", "rsa", "locked")]
    for server in (target, gate, outer):
        server.authorize(*keys)
    (folder / "known_hosts").write_text("".join(server.known() for server in (target, gate, outer)))
    (folder / "relay.py").write_bytes(RELAY.read_bytes())
    return World(folder, target, gate, outer)


def who(host: Host, *, timeout: float = 10) -> str:
    """Logs in and asks who one is there."""
    with Shell(connect_timeout=timeout) as shell:
        return shell.run(host, Command(("id", "-un")), check=True).out.decode().strip()
