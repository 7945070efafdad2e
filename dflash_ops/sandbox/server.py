"""The hypervisor's SSH server: public keys only, and sessions as OpenSSH's sshd gives them.

Runs inside the hypervisor's namespaces, so what a session's shell and SFTP see is the hypervisor.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (paramiko carries no types.)

import contextlib
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    MSG_CHANNEL_REQUEST,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
)

from dflash_ops.sandbox import sftp, sudo, users
from dflash_ops.sandbox.session import Session, WindowSize

USER = users.ROOT
# What sshd allows on one connection by default (MaxSessions).
MAX_SESSIONS = 10
LOGIN_SECONDS = 30


@dataclass(frozen=True)
class Keys:
    """The server's and the one client's key pairs, in OpenSSH's formats."""

    host_key: Path
    host_public: str
    client_key: Path
    client_public: str
    known_hosts: Path

    def write_known_hosts(self, *ports: int) -> None:
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{port} {self.host_public}\n" for port in ports))


def make_keys(folder: Path) -> Keys:
    """Make both key pairs in `folder`."""
    made: dict[str, tuple[Path, str]] = {}
    for name in ("host_key", "client_key"):
        key = Ed25519PrivateKey.generate()
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        made[name] = (path, public.decode())
    return Keys(*made["host_key"], *made["client_key"], folder / "known_hosts")


def load(path: Path) -> paramiko.PKey:
    return paramiko.Ed25519Key(filename=str(path))


def serve(keys: Keys, host_key: paramiko.PKey, ready: int) -> NoReturn:
    """Serve until killed; the port goes to the pipe `ready` as soon as it is open."""
    users.make()
    sudo.serve()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    os.write(ready, str(listener.getsockname()[1]).encode())
    os.close(ready)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_connection, args=(connection, keys, host_key), daemon=True).start()


def _serve_connection(connection: socket.socket, keys: Keys, host_key: paramiko.PKey) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = _Transport(connection)
    transport.add_server_key(host_key)
    transport.set_subsystem_handler("sftp", sftp.Server, sftp_si=sftp.HypervisorFiles)
    server = Connection(transport, keys.client_public)
    try:
        transport.start_server(event=threading.Event(), server=server)
        deadline = time.monotonic() + LOGIN_SECONDS
        while transport.is_active() and not transport.is_authenticated():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        while transport.is_active() and transport.is_authenticated():
            channel = transport.accept(1.0)
            if channel is None:
                continue
            # paramiko closes a channel that nobody holds, also one whose command has not been asked for yet.
            server.keep(channel)
            if channel.get_id() in server.outward:
                outward = server.outward.pop(channel.get_id())
                threading.Thread(target=_forward, args=(channel, outward), daemon=True).start()
    except (paramiko.SSHException, EOFError, OSError):
        return  # a client that talks nonsense or went away: nobody to tell
    finally:
        transport.close()
        server.close()


def _answer_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Answers a request on a channel, then lets a command that it started speak."""
    paramiko.Channel._handle_request(channel, message)  # pyright: ignore[reportAttributeAccessIssue]
    transport: Any = channel.transport
    connection: Connection = transport.server_object
    session = connection.sessions.get(channel.get_id())
    if session is not None:
        session.carry()


class _Transport(paramiko.Transport):
    """paramiko has no public place for what is to happen after the answer to a request."""

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # pyright: ignore[reportAttributeAccessIssue]
        MSG_CHANNEL_REQUEST: _answer_request,
    }


class Connection(paramiko.ServerInterface):
    """What one client may do, and the sessions that it has open."""

    def __init__(self, transport: paramiko.Transport, client_public: str) -> None:
        self.transport = transport
        self.client_public = client_public
        self.sessions: dict[int, Session] = {}
        self.channels: dict[int, paramiko.Channel] = {}
        self._mutex = threading.Lock()  # of `channels`: paramiko asks us in a thread of its own
        self.outward: dict[int, socket.socket] = {}  # sockets of direct-tcpip channels that are being opened

    def keep(self, channel: paramiko.Channel) -> None:
        with self._mutex:
            self.channels[channel.get_id()] = channel

    def close(self) -> None:
        """The client is gone: let go of what no command took over."""
        for session in self.sessions.values():
            session.discard()
        for outward in self.outward.values():
            outward.close()

    # Logging in

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = f"{key.get_name()} {key.get_base64()}" == self.client_public
        return AUTH_SUCCESSFUL if known and username in (users.ROOT, users.OPS) else AUTH_FAILED

    # Channels

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind != "session":
            return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        with self._mutex:
            # A subsystem's session ends with its channel, a command's with the command.
            ended = {number for number, channel in self.channels.items() if channel.closed}
            for number in ended:
                del self.channels[number]
        self.sessions = {
            number: session for number, session in self.sessions.items() if not session.closed and number not in ended
        }
        if len(self.sessions) >= MAX_SESSIONS:
            return OPEN_FAILED_CONNECT_FAILED
        account = users.account(self.transport.get_username() or "")
        if account is None:
            return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        self.sessions[chanid] = Session(self._addresses(), account)
        return OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(self, chanid: int, origin: tuple[str, int], destination: Any) -> int:
        try:
            outward = socket.create_connection((destination[0], int(destination[1])), timeout=10)
        except (OSError, OverflowError):
            return OPEN_FAILED_CONNECT_FAILED
        outward.settimeout(None)
        self.outward[chanid] = outward
        return OPEN_SUCCEEDED

    # Requests on a session's channel

    def check_channel_env_request(self, channel: paramiko.Channel, name: bytes, value: bytes) -> bool:
        # AcceptEnv LANG LC_*, as Debian's sshd_config has it
        if not re.fullmatch(rb"LANG|LC_[A-Z_]+", name):
            return False
        self.sessions[channel.get_id()].environment[os.fsdecode(name)] = os.fsdecode(value)
        return True

    def check_channel_pty_request(
        self,
        channel: paramiko.Channel,
        term: bytes,
        width: int,
        height: int,
        pixelwidth: int,
        pixelheight: int,
        modes: bytes,
    ) -> bool:
        self.sessions[channel.get_id()].want_terminal(
            os.fsdecode(term), WindowSize(height, width, pixelwidth, pixelheight)
        )
        return True

    def check_channel_window_change_request(
        self, channel: paramiko.Channel, width: int, height: int, pixelwidth: int, pixelheight: int
    ) -> bool:
        self.sessions[channel.get_id()].resize(WindowSize(height, width, pixelwidth, pixelheight))
        return True

    def check_channel_shell_request(self, channel: paramiko.Channel) -> bool:
        return self.sessions[channel.get_id()].start(channel, None)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return self.sessions[channel.get_id()].start(channel, command)

    def _addresses(self) -> tuple[str, int, str, int]:
        sock: Any = self.transport.sock
        return (*sock.getpeername()[:2], *sock.getsockname()[:2])


def _forward(channel: paramiko.Channel, outward: socket.socket) -> None:
    """Carry bytes both ways between a direct-tcpip channel and its socket until both sides have ended."""

    def inward() -> None:
        with contextlib.suppress(OSError, EOFError):
            while data := outward.recv(1 << 15):
                channel.sendall(data)
        with contextlib.suppress(OSError, EOFError):
            channel.shutdown_write()

    carrier = threading.Thread(target=inward, daemon=True)
    carrier.start()
    with contextlib.suppress(OSError, EOFError):
        while data := channel.recv(1 << 15):
            outward.sendall(data)
    with contextlib.suppress(OSError):
        outward.shutdown(socket.SHUT_WR)
    carrier.join()
    outward.close()
    channel.close()
