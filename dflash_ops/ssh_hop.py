"""Opening one connection, to a host or to a jump before it: the line, the protocol's begin, the host's key, logging in.

Every foreign error becomes one of ours here.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_ops import known_hosts
from dflash_ops.errors import ConfigError, UnreachableError
from dflash_ops.ssh_host_key import check_host_key, known_lines, names_of
from dflash_ops.ssh_library import paramiko
from dflash_ops.ssh_local import Proxy
from dflash_ops.ssh_login import log_in
from dflash_ops.ssh_opening import Opening

T = TypeVar("T")

_RSA = ("rsa-sha2-512", "rsa-sha2-256")
# One algorithm, under the only name of it that paramiko knows.
_NAMES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}


@dataclass
class Opened:
    """An open connection: its transport, and what has to end with it."""

    transport: Any
    proxy: Proxy | None

    def close(self) -> None:
        with contextlib.suppress(Exception):  # closing what is broken must not hide why it broke
            self.transport.close()
        if self.proxy is not None:
            self.proxy.close()


def open_hop(opening: Opening, through: Any | None) -> Opened:
    """Connects and logs in. through: the transport of the jump before it."""
    hop = opening.hop
    line: Any = None
    proxy: Proxy | None = None
    transport: Any = None
    try:
        if through is not None:
            line = _through(opening, through)
        elif hop.proxy_command is not None:
            proxy = _proxy(opening, hop.proxy_command)
            line = proxy.socket
        else:
            line = _connected(opening)
        lines = known_lines(opening)
        transport = _transport(opening, line, lines)
        _greet(opening, transport, proxy)
        check_host_key(opening, transport, lines, None if through or proxy else line)
        log_in(opening, transport)
        return Opened(transport, proxy)
    except BaseException:
        for each in (transport, line):
            if each is not None:
                with contextlib.suppress(Exception):  # closing what is broken must not hide why it broke
                    each.close()
        if proxy is not None:
            proxy.close()
        raise


# -- the line


def _connected(opening: Opening) -> socket.socket:
    """A TCP connection to the first address that answers. Each is given its share of the time that is left."""
    hop, clock = opening.hop, opening.clock
    try:
        found = _within(
            clock.left(),
            lambda: socket.getaddrinfo(hop.hostname, hop.port, hop.family, socket.SOCK_STREAM),
        )
    except TimeoutError:
        raise opening.late("its name was not resolved") from None
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name can be spelled so
        raise UnreachableError(
            "no such host",
            where=opening.where,
            why=getattr(error, "strerror", None) or str(error),
            next="correct `address` in the inventory, or HostName in the ssh configuration",
        ) from error
    why = ""
    for index, (family, kind, protocol, _, address) in enumerate(found):
        line = socket.socket(family, kind, protocol)
        try:
            line.settimeout(clock.left() / (len(found) - index))
            if hop.bind_address is not None:
                line.bind(socket.getaddrinfo(hop.bind_address, 0, family, kind, protocol)[0][4])
            line.connect(address)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line
        except TimeoutError:
            line.close()
            why = f"no connection within {clock.seconds:g} s"
        except OSError as error:
            line.close()
            why = error.strerror or str(error)
    raise opening.unreachable(why or "it has no address of that family")


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, or raises; TimeoutError when it takes longer (it is then left behind in its thread)."""
    done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((True, work()))
        except BaseException as error:
            done.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        good, value = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if not good:
        raise value
    return value


def _through(opening: Opening, through: Any) -> Any:
    hop, refusals = opening.hop, {1: "it forbids that", 2: "connecting failed", 4: "it is short of resources"}
    try:
        channel = through.open_channel(
            "direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=opening.clock.left()
        )
    except paramiko.ChannelException as error:
        raise opening.unreachable(
            f"the jump before it can't connect: {refusals.get(error.code, error.text)}"
        ) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        if through.is_active():
            raise opening.late("the jump before it gave no answer") from error
        raise opening.unreachable(f"the jump before it hung up: {error}") from error
    return channel


def _proxy(opening: Opening, command: str) -> Proxy:
    try:
        return Proxy(command)
    except OSError as error:
        raise opening.unreachable(f"ProxyCommand {command}: {error.strerror}") from error


def _transport(opening: Opening, line: Any, lines: list[known_hosts.Line]) -> Any:
    """paramiko's side of the connection, not yet begun, with the algorithms that the configuration allows."""
    hop = opening.hop
    transport = paramiko.Transport(line)
    options = transport.get_security_options()
    known = known_hosts.kinds(lines, names_of(hop, None))
    known = [each for kind in known for each in (_RSA if kind == "ssh-rsa" else (kind,))]
    # A kind that we know, if the host has one: as ssh does.
    kinds = _allowed(opening, "HostKeyAlgorithms", options.key_types, hop.host_key_algorithms)
    options.key_types = tuple(sorted(kinds, key=lambda kind: kind not in known))
    options.kex = _allowed(opening, "KexAlgorithms", options.kex, hop.kex)
    options.ciphers = _allowed(opening, "Ciphers", options.ciphers, hop.ciphers)
    options.digests = _allowed(opening, "MACs", options.digests, hop.macs)
    transport.use_compression(hop.compression)
    # Ours is the clock: its own limits are out of the way.
    transport.banner_timeout = transport.handshake_timeout = opening.clock.seconds + 60
    return transport


def _allowed(opening: Opening, setting: str, ours: Sequence[str], theirs: Sequence[str] | None) -> tuple[str, ...]:
    if theirs is None:
        return tuple(ours)
    both = tuple(name for name in dict.fromkeys(_NAMES.get(name, name) for name in theirs) if name in ours)
    if not both:
        raise ConfigError(
            f"{setting} of the ssh configuration allows nothing that we know",
            where=opening.where,
            why=f"it allows {','.join(theirs)}",
            next=f"allow one of {','.join(ours)}",
        )
    return both


def _greet(opening: Opening, transport: Any, proxy: Proxy | None) -> None:
    """Exchanges versions and keys."""
    begun = threading.Event()
    transport.start_client(event=begun)
    if not begun.wait(opening.clock.left()):
        raise opening.late(
            "it never said that it speaks SSH" if not transport.remote_version else "no keys were agreed on"
        )
    if not transport.is_active():
        error = transport.get_exception()
        why = str(error or "") or "it hung up before it spoke"
        if proxy is not None and (said := proxy.last_words()):
            why = f"ProxyCommand {opening.hop.proxy_command}: {said}"
        raise opening.unreachable(why) from error
