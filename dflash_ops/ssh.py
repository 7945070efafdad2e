"""Connecting to a host: Fabric reads the user's ssh configuration and jumps, paramiko speaks the protocol.

Host keys are strict: a key that is not in known_hosts, or is another one than there, ends the attempt, and nothing is
ever added to the file. Every foreign error becomes one of ours here; none passes this file.
"""

# fabric and paramiko carry no types: what comes from them is unknown to the checker. Their objects are Any in here
# (guessing at them, it takes most of fabric's attributes for None), and none leaves this file.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import logging
import math
import select
import shlex
import socket
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType

from dflash_ops.command import Host
from dflash_ops.errors import ConfigError, HostKeyError, LinkLostError, OpsError, UnreachableError

KEEPALIVE_SECONDS = 5.0
# A host that has not answered three keepalives in a row is gone.
DEAD_AFTER_SECONDS = 3 * KEEPALIVE_SECONDS

# paramiko logs tracebacks of its thread; without a handler Python would print them on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Link:
    """One open connection to one host, with as many channels as asked for at once.

    One thread asks the server for a sign of life every 5 s, another closes the connection once the last answer is 15 s
    old: whatever anybody waits for on it ends then, so that a pulled cable and a frozen server are noticed.
    """

    def __init__(self, host: Host, connection: Any) -> None:
        self.host = host
        self._connection = connection
        self._transport: Any = connection.transport
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        self._why_closed = "the connection was closed"
        with contextlib.suppress(OSError, AttributeError):  # a jump's socket is a channel and has no such option
            self._transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._keep_alive, self._watch):
            threading.Thread(target=work, name=f"{work.__name__.strip('_')} {host}", daemon=True).start()

    def _keep_alive(self) -> None:
        while not self._closed.wait(KEEPALIVE_SECONDS):
            with contextlib.suppress(Exception):  # a broken transport: `check` and the channels say so
                self._transport.global_request("keepalive@openssh.com", wait=True)  # returns when answered, or broken
            if not self._transport.is_active():
                return
            self._answered_at = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(KEEPALIVE_SECONDS / 5):
            silent_s = time.monotonic() - self._answered_at
            if silent_s > DEAD_AFTER_SECONDS:
                self._why_closed = f"no sign of life for {silent_s:.0f} s"
                self.close()

    @property
    def is_open(self) -> bool:
        return bool(self._transport.is_active())

    def check(self) -> None:
        """Raises LinkLostError when the link is broken."""
        if not self.is_open:
            raise self.lost(self._why_closed)

    def lost(self, why: str) -> LinkLostError:
        return LinkLostError(
            "the connection broke", where=str(self.host), why=why, next="run it again once the host answers"
        )

    def start(self, line: bytes, *, terminal: tuple[str, int, int] | None = None) -> "RemoteProcess":
        """Starts a line of shell text; `terminal` is (TERM, columns, rows) for a command that wants a tty."""
        self.check()
        try:
            channel: paramiko.Channel = self._transport.open_session(timeout=DEAD_AFTER_SECONDS)
            if terminal is not None:
                channel.get_pty(*terminal)
            channel.exec_command(line)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.check()
            raise OpsError("the host refused to start a command", where=str(self.host), why=str(error)) from error
        return RemoteProcess(self, channel)

    @contextlib.contextmanager
    def sftp(self) -> Generator[paramiko.SFTPClient, None, None]:
        """An SFTP session whose every wait is bounded; a break of the link raises LinkLostError."""
        self.check()
        client: paramiko.SFTPClient | None = None
        try:
            client = self._transport.open_sftp_client()
            assert client is not None
            channel: Any = client.get_channel()
            channel.settimeout(DEAD_AFTER_SECONDS)
            yield client
        except TimeoutError as error:
            raise self.lost(f"no progress for {DEAD_AFTER_SECONDS:.0f} s") from error
        except (paramiko.SSHException, EOFError) as error:
            self.check()
            raise OpsError("SFTP failed", where=str(self.host), why=str(error)) from error
        except OSError:
            self.check()
            raise
        finally:
            if client is not None:
                with contextlib.suppress(Exception):  # the link may be gone
                    client.close()

    def close(self) -> None:
        self._closed.set()
        _close(self._connection)


class RemoteProcess:
    """A command running behind a channel. `read` gives what has come; the code is known once `finished`."""

    def __init__(self, link: Link, channel: paramiko.Channel) -> None:
        self._link = link
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]:
        """Waits at most `seconds` for output: new stdout, new stderr, and whether that was the end of both."""
        self._poll.poll(math.ceil(max(seconds, 0.0) * 1000))
        ended = self._channel.eof_received or self._channel.closed  # before draining, so that nothing is missed
        out = self._channel.recv(1 << 20) if self._channel.recv_ready() else b""
        err = self._channel.recv_stderr(1 << 20) if self._channel.recv_stderr_ready() else b""
        if not ended:
            self._link.check()
        return out, err, bool(ended and not out and not err)

    def write(self, data: bytes) -> None:
        """Blocks while the other side does not read; OSError once it has ended."""
        try:
            self._channel.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError(str(error)) from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it has ended already
            self._channel.shutdown_write()

    def code(self, seconds: float) -> int | None:
        """The exit code; None when there is none yet. LinkLostError when the link broke before it came."""
        if not self._channel.status_event.wait(seconds):
            self._link.check()
            return None
        code = int(self._channel.exit_status)
        if code == -1:
            # No code, but the link lives: a signal ended it on the host. ssh too says 255 then, and paramiko not which.
            self._link.check()
            return 255
        return code

    def resize(self, columns: int, rows: int) -> None:
        with contextlib.suppress(OSError, paramiko.SSHException):  # it has ended already
            self._channel.resize_pty(columns, rows)

    def fileno(self) -> int:
        return int(self._channel.fileno())

    def end(self) -> None:
        self._channel.close()


class _StrictHostKeys(paramiko.MissingHostKeyPolicy):
    """Refuses a key that no known_hosts file holds, and says how to add exactly that key."""

    def __init__(self, host: Host, known_hosts: Path) -> None:
        self._host = host
        self._known_hosts = known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        entry = shlex.quote(f"{hostname} {key.get_name()} {key.get_base64()}")
        raise HostKeyError(
            f"the host key of {hostname} is not known",
            where=str(self._host),
            why=f"{key.get_name()} {key.fingerprint} is not in {self._known_hosts}",
            next="compare it with the host's own (there: ssh-keygen -lf /etc/ssh/ssh_host_"
            f"{key.get_name().removeprefix('ssh-').split('-')[0]}_key.pub), then: "
            f"echo {entry} >> {shlex.quote(str(self._known_hosts))}",
        )


def connect(host: Host, *, timeout: float) -> Link:
    """Connects and logs in. UnreachableError, HostKeyError or ConfigError when that can't be."""
    connection = _configure(host, timeout)
    where = f"{host}, {connection.user}@{connection.host}:{connection.port}"
    try:
        connection.open()
    except OpsError:
        _close(connection)
        raise
    except Exception as error:
        _close(connection)
        raise _our_error(error, where, host, connection) from error
    return Link(host, connection)


def _configure(host: Host, timeout: float) -> Any:
    """A connection, not yet open, with everything the user's ssh configuration says about the address."""
    where = str(host)
    if host.key is not None and not host.key.is_file():
        raise ConfigError("there is no such key file", where=where, why=str(host.key), next="correct `key`")
    try:
        # Lazy: of Fabric's own files (~/.fabric.yaml ...) none is read, only ssh's.
        config = fabric.Config(lazy=True)
        config.load_ssh_config()
        no_jump = config.base_ssh_config.lookup(host.address).get("proxyjump") == "none"
        connection = fabric.Connection(
            host.address,
            user=host.user,
            port=host.port,
            config=config,
            gateway=False if no_jump else None,
            connect_timeout=math.ceil(timeout),
            connect_kwargs={"key_filename": [str(host.key)] if host.key else []},
        )
    except (paramiko.SSHException, ValueError, OSError) as error:
        raise ConfigError(
            "the ssh configuration can't be used", where=where, why=str(error), next="correct ~/.ssh/config"
        ) from error
    for hop in _hops(connection):
        files = _known_hosts(host.known_hosts if hop is connection else None, hop.ssh_config)
        for file in files:
            try:
                if file.is_file():
                    hop.client.load_system_host_keys(str(file))
            except (OSError, ValueError, InvalidHostKey) as error:  # ValueError: bytes that are not UTF-8
                raise ConfigError(
                    "a known_hosts file can't be read",
                    where=str(file),
                    why=str(error),
                    next="correct it, or name another as `known_hosts` in the inventory",
                ) from error
        hop.client.set_missing_host_key_policy(_StrictHostKeys(host, files[0]))
        keys: list[str] = hop.connect_kwargs.get("key_filename") or []
        hop.connect_timeout = math.ceil(timeout)
        hop.connect_kwargs = {
            # ssh too passes over an IdentityFile that is not there.
            "key_filename": [key for key in keys if _expanded(key).is_file()],
            "look_for_keys": hop is not connection or host.key is None,
            "auth_timeout": timeout,
            "channel_timeout": timeout,
            "transport_factory": _without_delay,
        }
    return connection


def _without_delay(sock: Any, **options: Any) -> paramiko.Transport:
    """A transport that sends each word at once, as ssh's does: else small ones wait 40 ms for an acknowledgement of the
    one before."""
    with contextlib.suppress(AttributeError, OSError):  # through a jump it is a channel
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return paramiko.Transport(sock, **options)


def _known_hosts(explicit: Path | None, ssh_config: Any) -> list[Path]:
    """The files that may vouch for a host; a new key would be added to the first."""
    if explicit is not None:
        return [explicit]
    words: list[str] = str(ssh_config.get("userknownhostsfile", "")).split() or ["~/.ssh/known_hosts"]
    return [*map(_expanded, words), Path("/etc/ssh/ssh_known_hosts")]


def _expanded(text: str) -> Path:
    """The path with its `~` resolved; as it is when there is no such user, as ssh does."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _our_error(error: Exception, where: str, host: Host, connection: Any) -> OpsError:
    match error:
        case paramiko.BadHostKeyException():
            known, got = error.expected_key, error.key
            return HostKeyError(
                f"the host key of {error.hostname} has changed",
                where=where,
                why=f"known_hosts has {known.get_name()} {known.fingerprint}, the host shows {got.get_name()} "
                f"{got.fingerprint}: a new installation, or somebody in between",
                next=_forget_command(host, connection),
            )
        case paramiko.PasswordRequiredException():
            keys = ", ".join(connection.connect_kwargs["key_filename"])
            return UnreachableError(
                "the key is locked by a passphrase", where=where, why=keys or str(error), next=f"ssh-add {keys}".strip()
            )
        case paramiko.SSHException() | ValueError() if host.key is not None and not _holds_a_key(host.key):
            return ConfigError(
                "there is no private key in the file", where=where, why=str(host.key), next="correct `key`"
            )
        case paramiko.AuthenticationException():
            keys = ", ".join(connection.connect_kwargs["key_filename"]) or "the agent's and ~/.ssh's"
            return UnreachableError(
                "the host refused our key",
                where=where,
                why=f"tried: {keys}",
                next=f"ssh-copy-id -p {connection.port} {connection.user}@{connection.host}",
            )
        case socket.gaierror() | UnicodeError():  # UnicodeError: no name can be spelled so
            why = getattr(error, "strerror", None) or str(error)
            return UnreachableError("no such host", where=where, why=why, next="correct `address` in the inventory")
        case OSError() | EOFError() | paramiko.SSHException():
            return UnreachableError(
                "the host can't be reached",
                where=where,
                why=getattr(error, "strerror", None) or str(error) or type(error).__name__,
                next=f"ssh -p {connection.port} {connection.user}@{connection.host} true",
            )
        case _:
            return OpsError("connecting failed", where=where, why=f"{type(error).__name__}: {error}")


def _holds_a_key(file: Path) -> bool:
    """Whether there is a private key in the file, be it locked."""
    try:
        paramiko.PKey.from_path(file)
    except (ValueError, UnknownKeyType):
        return False
    except (TypeError, OSError, paramiko.SSHException):  # it is locked, or can't be read: told as that
        return True
    return True


def _forget_command(host: Host, connection: Any) -> str:
    name = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
    file = _known_hosts(host.known_hosts, connection.ssh_config)[0]
    return f"if it is a new installation: ssh-keygen -f {shlex.quote(str(file))} -R {shlex.quote(name)}"


def _close(connection: Any) -> None:
    for hop in _hops(connection):
        with contextlib.suppress(Exception):  # closing what is broken must not hide why it broke
            hop.client.close()


def _hops(connection: Any) -> Iterator[Any]:
    """The connection, then the jump before it, and so on."""
    while isinstance(connection, fabric.Connection):
        yield connection
        connection = connection.gateway
