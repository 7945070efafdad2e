"""Servers of OpenSSH's own on loopback, each in a world of its own, and what a client of them needs: keys and agents.

An `Sshd` has a mount and a PID namespace with an /etc/passwd, homes and authorized_keys that the test writes, so that
root's login shell can be fish, and nothing of it outlives the test or touches the machine.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_ops.command import Host

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

# The server's own /run, and its users, homes and keys bound below it: pytest's folders are closed to all but root.
_ENTER = """set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/here
mount --bind "$1" /run/here
mount --bind /run/here/passwd /etc/passwd
mount --bind /run/here/shadow /etc/shadow
exec "$2" -i -f "$3" -E "$4"
"""


def need(*programs: str) -> None:
    """Skips the test where a program is missing."""
    for program in programs:
        if not (SSHD if program == "sshd" else shutil.which(program)):
            pytest.skip(f"there is no {program} on this machine")


def make_key(file: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A key pair: `file` and `file`.pub. kind: as ssh-keygen's -t, or "rsa" for one of 2048 bits."""
    bits = ("-b", "2048") if kind == "rsa" else ()
    words = ("ssh-keygen", "-q", "-t", kind, *bits, "-N", passphrase, "-C", file.name, "-f", str(file))
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return file


def public(key: Path) -> str:
    """The public half's type and base64."""
    return " ".join(key.with_name(f"{key.name}.pub").read_text().split()[:2])


def fingerprint(key: Path) -> str:
    shown = subprocess.run(("ssh-keygen", "-lf", str(key)), check=True, capture_output=True, text=True)
    return shown.stdout.split()[1]


class Sshd:
    """sshd on 127.0.0.1:`port`, one process for each connection, until `end`.

    config: more lines for sshd_config, which win over ours. shells: login shells by user; a user other than root is
    made with it. host_keys: private keys, else one of ed25519 is made. Files of a user's home may be written at any
    time: `home(user)`. `log` is what sshd wrote.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: str = "",
        shells: Mapping[str, str] | None = None,
        host_keys: tuple[Path, ...] = (),
    ) -> None:
        need("sshd", "ssh-keygen", "unshare")
        if os.geteuid() != 0:
            pytest.skip("sshd in a world of its own needs root")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._here = folder, folder / "here"
        self._log = folder / "sshd.log"
        self._here.mkdir(mode=0o755)
        self.host_keys = host_keys or (make_key(folder / "host_ed25519"),)
        self._authorized = self._here / "authorized_keys"
        self._authorized.touch(mode=0o644)
        self._write_users({"root": "/bin/bash", **(shells or {})})
        self._config = folder / "sshd_config"
        lines = [
            config,
            *(f"HostKey {key}" for key in self.host_keys),
            "AuthorizedKeysFile /run/here/authorized_keys",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PrintMotd no",
            "PrintLastLog no",
            "UseDNS no",
            "LogLevel VERBOSE",
            "" if "Subsystem" in config else "Subsystem sftp internal-sftp",
        ]
        self._config.write_text("\n".join(lines) + "\n")
        self._environment = dict(os.environ)  # a test may take the PATH away from the client
        self._running: list[subprocess.Popen[bytes]] = []
        self._mutex = threading.Lock()
        self.connections = 0
        # We listen ourselves, and sshd gets each connection as inetd would give it: no port has to be guessed.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _write_users(self, shells: Mapping[str, str]) -> None:
        passwd, shadow = [], []
        for number, (user, shell) in enumerate(shells.items()):
            uid = 0 if user == "root" else 1500 + number
            home = self._here / "home" / user
            home.mkdir(parents=True)
            os.chown(home, uid, uid)
            passwd.append(f"{user}:x:{uid}:{uid}::/run/here/home/{user}:{shell}")
            shadow.append(f"{user}:*:19000:0:99999:7:::")
        passwd.append("sshd:x:101:65534::/run/sshd:/usr/sbin/nologin")
        passwd.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
        self._here.joinpath("passwd").write_text("\n".join(passwd) + "\n")
        self._here.joinpath("shadow").write_text("\n".join(shadow) + "\n")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                with self._mutex, connection:
                    self.connections += 1
                    self._running.append(self._serve(connection))

    def _serve(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        words = (
            shutil.which("unshare", path=self._environment["PATH"]) or "",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            _ENTER,
            "sh",
        )
        with self._log.open("ab") as log:
            return subprocess.Popen(
                (*words, str(self._here), str(SSHD), str(self._config), str(self._log)),
                stdin=connection,
                stdout=connection,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def home(self, user: str = "root") -> Path:
        return self._here / "home" / user

    def authorize(self, *keys: Path, options: str = "") -> "Sshd":
        """Lets the holders of these keys in, as any user; options: the words before a key in authorized_keys."""
        with self._authorized.open("a") as file:
            file.writelines(f"{options} {public(key)}\n".lstrip() for key in keys)
        return self

    def known(self, name: str | None = None, key: Path | None = None) -> str:
        """Lines for known_hosts: all of the server's keys, or one, under its address or another name."""
        keys = (key,) if key else self.host_keys
        return "".join(f"{name or f'[127.0.0.1]:{self.port}'} {public(each)}\n" for each in keys)

    def host(self, key: Path, *, user: str = "root", name: str = "box") -> Host:
        """The server as an inventory without any ssh configuration names it."""
        known_hosts = self.folder / "known_hosts"
        known_hosts.write_text(self.known())
        return Host(name, "127.0.0.1", self.port, user, key, known_hosts)

    def freeze(self, stopped: bool = True) -> None:
        """Stops all of its processes where they are: a server that hangs, whose kernel still acknowledges."""
        with self._mutex:
            for process in self._running:
                for pid in (process.pid, *_below(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def cut(self) -> None:
        """Ends all connections at once."""
        with self._mutex:
            running, self._running = self._running, []
        for process in running:
            process.kill()  # and with unshare its namespace's first process, and with that all others
            process.wait()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut()

    def __enter__(self) -> "Sshd":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _below(int(child))


class Agent:
    """An ssh-agent at `socket`, until `end`."""

    def __init__(self, folder: Path) -> None:
        need("ssh-agent", "ssh-add")
        # A socket's path is short (108 bytes), pytest's folders are not.
        self._folder = Path(subprocess.run(("mktemp", "-d"), check=True, capture_output=True, text=True).stdout.strip())
        self.socket = self._folder / "agent"
        with (folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                ("ssh-agent", "-D", "-a", str(self.socket)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it speaks once it listens

    def add(self, *keys: Path, passphrase: str = "") -> "Agent":
        answer = self._folder / "answer"
        answer.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
        answer.chmod(0o700)
        asking = {"SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force", "SSH_AUTH_SOCK": str(self.socket)}
        for key in keys:
            words = ("ssh-add", "-q", str(key))
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, env={**os.environ, **asking})
        return self

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self._folder)

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def moved(host: Host, port: int, folder: Path) -> Host:
    """The host behind another port of 127.0.0.1, where its key is known too."""
    assert host.known_hosts is not None
    known_hosts = folder / f"known_hosts_{port}"
    known_hosts.write_text(host.known_hosts.read_text().replace(f":{host.port} ", f":{port} "))
    return replace(host, port=port, known_hosts=known_hosts)
