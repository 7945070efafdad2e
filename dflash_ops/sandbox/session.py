"""One SSH session: a shell that runs a command, on pipes or on a pseudo-terminal, as OpenSSH's sshd starts it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (paramiko carries no types.)

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from dflash_ops.sandbox.users import Account

HOME = "/root"
_CHUNK = 1 << 15
_POLL_SECONDS = 0.1  # how soon a client's going is noticed


@dataclass(frozen=True)
class WindowSize:
    rows: int
    columns: int
    width: int = 0
    height: int = 0


class Session:
    """The state of one session channel, from its opening to the end of its command."""

    def __init__(self, addresses: tuple[str, int, str, int], account: Account) -> None:
        client, client_port, server, server_port = addresses
        self.closed = False
        self.account = account
        self.environment = {
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            "SHELL": account.shell,
            "PATH": account.path,
            "SSH_CLIENT": f"{client} {client_port} {server_port}",
            "SSH_CONNECTION": f"{client} {client_port} {server} {server_port}",
        }
        self._master: int | None = None
        self._slave: int | None = None
        self._carrier: threading.Thread | None = None

    def want_terminal(self, term: str, size: WindowSize) -> None:
        """Give the session a pseudo-terminal; before the command is started."""
        self._master, self._slave = os.openpty()
        os.chown(self._slave, self.account.uid, -1)
        self.environment["TERM"] = term
        self.environment["SSH_TTY"] = os.ttyname(self._slave)
        self.resize(size)

    def resize(self, size: WindowSize) -> None:
        if self._master is not None:
            with contextlib.suppress(OSError):
                packed = struct.pack("HHHH", size.rows, size.columns, size.width, size.height)
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, packed)

    def discard(self) -> None:
        """Close the pseudo-terminal, if there is one."""
        for descriptor in (self._master, self._slave):
            if descriptor is not None:
                os.close(descriptor)
        self._master = self._slave = None

    def start(self, channel: paramiko.Channel, command: bytes | None) -> bool:
        """Start the login shell with `command`, or for a person (None); `carry` then takes its bytes."""
        account = self.account
        name = os.path.basename(account.shell)  # noqa: PTH119 (a word, not a path)
        words = [f"-{name}".encode()] if command is None else [name.encode(), b"-c", command]
        identity: dict[str, Any] = {}
        if account.uid != 0:
            identity = {"user": account.uid, "group": account.gid, "extra_groups": [account.gid]}
        try:
            if self._slave is None:
                process = subprocess.Popen(
                    words,
                    executable=account.shell,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self.environment,
                    cwd=account.home,
                    start_new_session=True,
                    bufsize=0,
                    **identity,
                )
            else:
                # `setsid --ctty` makes the terminal the controlling one, which Popen can't.
                login = [b"-l"] if command is None else words[1:]
                process = subprocess.Popen(
                    [b"setsid", b"--ctty", account.shell.encode(), *login],
                    stdin=self._slave,
                    stdout=self._slave,
                    stderr=self._slave,
                    env=self.environment,
                    cwd=account.home,
                    **identity,
                )
                os.close(self._slave)
                self._slave = None
        except OSError:
            self.closed = True
            return False
        self._carrier = threading.Thread(target=self._carry, args=(channel, process), daemon=True)
        return True

    def carry(self) -> None:
        """Begin to carry a started command's bytes; its end closes the channel. To be called once the client has been
        told that the command was started: a short one would else be over, and its channel closed, before that."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.start()

    def _carry(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        """Carry the command's bytes until its output ends, report how it ended, close the channel."""
        try:
            if self._master is None:
                self._carry_pipes(channel, process)
            else:
                self._carry_terminal(channel, process, self._master)
        finally:
            self.closed = True  # before the client can know: it may open another at once
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.close()
            process.wait()

    def _carry_pipes(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout and process.stderr
        drains = [
            threading.Thread(target=_drain, args=(channel, process.stdout, channel.sendall), daemon=True),
            threading.Thread(target=_drain, args=(channel, process.stderr, channel.sendall_stderr), daemon=True),
        ]
        threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
        for drain in drains:
            drain.start()
        # As sshd: the status as soon as the shell has ended, the channel's end when nobody holds its output any more.
        process.wait()
        _report(channel, process)
        for drain in drains:
            drain.join()

    def _carry_terminal(self, channel: paramiko.Channel, process: subprocess.Popen[bytes], master: int) -> None:
        # One descriptor for each direction: each thread closes its own.
        threading.Thread(target=_feed, args=(channel, os.fdopen(os.dup(master), "wb", 0)), daemon=True).start()
        with os.fdopen(os.dup(master), "rb", 0) as output:
            while channel_is_open := not channel.closed:
                if select.select([output], [], [], _POLL_SECONDS)[0]:
                    data = _read(output)
                    if not data:
                        break
                    _send(channel.sendall, data)
                elif process.poll() is not None:
                    break
        self.discard()  # a client that hung up: the terminal does too, and its session gets SIGHUP
        if channel_is_open:
            process.wait()
            _report(channel, process)


def _feed(channel: paramiko.Channel, stream: IO[bytes]) -> None:
    """The client's bytes to the command, then end of file. What the command no longer reads is thrown away."""
    with contextlib.suppress(OSError, EOFError):
        listening = True
        while data := channel.recv(_CHUNK):
            while data and listening:
                try:
                    data = data[os.write(stream.fileno(), data) :]
                except OSError:
                    listening = False
    with contextlib.suppress(OSError):
        stream.close()


def _drain(channel: paramiko.Channel, stream: IO[bytes], send: Callable[[bytes], None]) -> None:
    """The command's bytes to the client. When the client is gone our end is closed at once, as sshd does: whatever
    the command prints next fails."""
    with stream:
        while not channel.closed:
            if select.select([stream], [], [], _POLL_SECONDS)[0]:
                data = _read(stream)
                if not data or not _send(send, data):
                    return


def _read(stream: IO[bytes]) -> bytes:
    try:
        return os.read(stream.fileno(), _CHUNK)
    except OSError:
        return b""  # EIO: nobody has the pseudo-terminal open any more


def _send(send: Callable[[bytes], None], data: bytes) -> bool:
    try:
        send(data)
    except (OSError, EOFError, paramiko.SSHException):
        return False
    return True


def _report(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if code >= 0:
            channel.send_exit_status(code)
        else:
            _send_exit_signal(channel, -code)


def _send_exit_signal(channel: paramiko.Channel, number: int) -> None:
    """RFC 4254, section 6.10: paramiko has a method for the status only."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(signal.Signals(number).name.removeprefix("SIG"))
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    transport: Any = channel.transport
    transport._send_user_message(message)
