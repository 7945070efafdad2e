"""Opening one connection, to a host or to a jump before it: the socket, the host's key, logging in.

Host keys are strict: a key that is not in known_hosts, or is another one than there, ends the attempt, and nothing is
ever added to a file. Every foreign error becomes one of ours here.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import contextlib
import queue
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash_ops import known_hosts
from dflash_ops.errors import ConfigError, HostKeyError, OpsError, UnreachableError
from dflash_ops.ssh_config import Hop, Jump
from dflash_ops.ssh_keys import Agent, Tried, offers
from dflash_ops.ssh_library import paramiko
from dflash_ops.ssh_local import Proxy, words

T = TypeVar("T")

_RSA = ("rsa-sha2-512", "rsa-sha2-256")
# One algorithm, under the only name of it that paramiko knows.
_NAMES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}


class Clock:
    """How long connecting to one host may still take. What a person needs for a passphrase is given back."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, never less than a hundredth: what gets that ends with its own error."""
        return max(self._until - time.monotonic(), 0.01)

    def give_back(self, seconds: float) -> None:
        self._until += seconds


@dataclass(frozen=True)
class Opening:
    """A hop on its way to being open. where: for errors; file: the configuration that plain ssh would need."""

    hop: Hop
    where: str
    clock: Clock
    file: Path | None

    def plain(self, *more: str) -> str:
        """The command that reaches it without us."""
        return shlex.join(("ssh", *words(Jump(self.hop.name), self.file), *more)).replace(" -- ", " ", 1)

    def unreachable(self, why: str) -> UnreachableError:
        return UnreachableError("the host can't be reached", where=self.where, why=why, next=self.plain("true"))

    def late(self, stage: str) -> UnreachableError:
        return self.unreachable(f"{stage} within {self.clock.seconds:g} s")


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
        lines = _known(opening)
        transport = _transport(opening, line, lines)
        _greet(opening, transport, proxy)
        _check_host_key(opening, transport, lines, None if through or proxy else line)
        _log_in(opening, transport, proxy)
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
    known = known_hosts.kinds(lines, _names(hop, None))
    known = [each for kind in known for each in (_RSA if kind == "ssh-rsa" else (kind,))]
    # A kind that we know, if the host has one: as ssh does.
    kinds = _allowed(opening, "HostKeyAlgorithms", options.key_types, hop.host_key_algorithms)
    options.key_types = tuple(sorted(kinds, key=lambda kind: kind not in known))
    options.kex = _allowed(opening, "KexAlgorithms", options.kex, hop.kex)
    options.ciphers = _allowed(opening, "Ciphers", options.ciphers, hop.ciphers)
    options.digests = _allowed(opening, "MACs", options.digests, hop.macs)
    transport.use_compression(hop.compression)
    transport.banner_timeout = transport.handshake_timeout = opening.clock.seconds
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


# -- the host's key


def _names(hop: Hop, line: Any | None) -> list[str]:
    """What known_hosts may call the host. Its address is asked for too where CheckHostIP wants it."""
    if not hop.check_address or line is None:
        return [hop.known_as]
    address = line.getpeername()[0].partition("%")[0]
    return [hop.known_as, address if hop.port == 22 else f"[{address}]:{hop.port}"]


def _known(opening: Opening) -> list[known_hosts.Line]:
    hop, lines = opening.hop, list[known_hosts.Line]()
    for file in (*hop.user_known_hosts, *hop.global_known_hosts):
        lines += known_hosts.read(_text(file, "known_hosts"), file)
    if hop.revoked is not None:
        if not hop.revoked.is_file():  # ssh refuses every key then
            raise ConfigError("RevokedHostKeys names no file", where=opening.where, why=str(hop.revoked))
        text = _text(hop.revoked, "RevokedHostKeys")
        if text.startswith("SSHKRL"):
            raise ConfigError(
                "RevokedHostKeys is a KRL, which we can't read",
                where=str(hop.revoked),
                next="name a file of plain public keys, or mark them @revoked in known_hosts",
            )
        lines += known_hosts.read_revoked(text, hop.revoked)
    return lines


def _text(file: Path, what: str) -> str:
    try:
        return file.read_text("utf-8") if file.is_file() else ""
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        raise ConfigError(
            f"a {what} file can't be read",
            where=str(file),
            why=getattr(error, "strerror", None) or str(error),
            next="correct it, or name another as `known_hosts` in the inventory",
        ) from error


def _check_host_key(opening: Opening, transport: Any, lines: list[known_hosts.Line], line: Any | None) -> None:
    hop = opening.hop
    key = transport.get_remote_server_key()
    blob, kind = key.asbytes(), key.get_name()
    verdict = known_hosts.judge(lines, _names(hop, line), kind, blob, bare=hop.known_bare)
    if verdict.word == "known":
        return
    shown = f"{kind} {known_hosts.fingerprint(blob)}"
    said = ", ".join(map(str, verdict.lines))
    file = (*hop.user_known_hosts, Path("~/.ssh/known_hosts").expanduser())[0]
    entry = shlex.quote(f"{hop.known_as} {kind} {key.get_base64()}")
    add = (
        "compare it with the host's own (there: ssh-keygen -lf /etc/ssh/ssh_host_"
        f"{kind.removeprefix('ssh-').split('-')[0]}_key.pub), then: echo {entry} >> {shlex.quote(str(file))}"
    )
    match verdict.word:
        case "revoked":
            raise HostKeyError(
                f"the host key of {hop.known_as} is revoked",
                where=opening.where,
                why=f"the host shows {shown}, revoked by {said}",
                next="don't connect; ask whoever runs the host for its new key",
            )
        case "changed":
            files = dict.fromkeys(str(each.file) for each in verdict.lines)
            forget = "; ".join(f"ssh-keygen -f {shlex.quote(each)} -R {shlex.quote(hop.known_as)}" for each in files)
            raise HostKeyError(
                f"the host key of {hop.known_as} has changed",
                where=opening.where,
                why=f"known_hosts has {said}, the host shows {shown}: a new installation, or somebody in between",
                next=f"if it is a new installation: {forget}",
            )
        case "other":
            why = f"known_hosts has only {said}, the host shows {shown}"
        case "authority":
            why = f"{said} is a @cert-authority: host certificates can't be checked here, and the host shows {shown}"
        case _:
            why = f"{shown} is not in {file}"
    if "KnownHostsCommand" in hop.lacks:
        why += " (KnownHostsCommand is not run)"
    raise HostKeyError(f"the host key of {hop.known_as} is not known", where=opening.where, why=why, next=add)


# -- logging in


def _log_in(opening: Opening, transport: Any, proxy: Proxy | None) -> None:
    hop, clock, tried = opening.hop, opening.clock, Tried()
    agent = None
    if hop.agent:
        try:
            agent = Agent(hop.agent, clock.left())
        except (OSError, paramiko.SSHException) as error:
            if isinstance(error, TimeoutError):  # else there is none, as often
                tried.unusable.append(f"the agent at {hop.agent} gave no answer")
    try:
        for offer in offers(hop, agent, tried):
            clock.give_back(tried.asked_s)
            tried.asked_s = 0.0
            if hop.key_algorithms and not _accepted(offer.key, hop.key_algorithms):
                tried.unusable.append(f"{offer.name}: PubkeyAcceptedAlgorithms excludes it")
                continue
            tried.offered.append(offer.name)
            transport.auth_timeout = clock.left()
            try:
                further = transport.auth_publickey(hop.user, offer.key)
            except paramiko.BadAuthenticationType as error:
                raise _refused(opening, tried, f"it takes no keys, only {', '.join(error.allowed_types)}") from error
            except paramiko.AuthenticationException as error:
                if str(error) == "Authentication timeout.":
                    raise opening.late(f"no answer to {offer.name}") from error
                if not transport.is_active():
                    raise _refused(opening, tried, "it hung up: too many keys?") from error
                continue
            except (paramiko.SSHException, OSError, EOFError) as error:
                why = str(error) or "it hung up"
                if "Too many authentication failures" in why:
                    why = "too many keys: it hung up before all were tried"
                raise _refused(opening, tried, why) from error
            if further:
                raise _refused(
                    opening, tried, f"after the key {offer.name} it wants {', '.join(further)}, which we can't give"
                )
            return
        raise _refused(opening, tried, "")
    finally:
        if agent is not None:
            agent.close()


def _accepted(key: Any, algorithms: tuple[str, ...]) -> bool:
    blob = getattr(key, "public_blob", None)
    kind: str = blob.key_type if blob else key.get_name()
    if "rsa" in kind:
        return any(
            "rsa-sha2" in name and name.endswith("-cert-v01@openssh.com") == ("cert" in kind) for name in algorithms
        )
    return kind in algorithms


def _refused(opening: Opening, tried: Tried, why: str) -> OpsError:
    """Why nothing let us in; the most telling reason first."""
    hop = opening.hop
    only = hop.identities[0] if len(hop.identities) == 1 and hop.identities_only else None
    if tried.locked and not why:
        keys = ", ".join(map(str, tried.locked))
        return UnreachableError(
            "the key is locked by a passphrase",
            where=opening.where,
            why="; ".join((keys, *_told(tried))),
            next=f"ssh-add {shlex.join(map(str, tried.locked))}",
        )
    if only is not None and not tried.offered and not why and only in tried.empty:
        return ConfigError(
            "there is no private key in the file",
            where=opening.where,
            why=str(only),
            next="correct `key` in the inventory, or IdentityFile in the ssh configuration",
        )
    parts = [why, *_told(tried), *(f"{setting} is not used" for setting in hop.lacks if setting.startswith("PKCS"))]
    target = words(Jump(hop.name), opening.file)
    many = "too many keys" in why
    return UnreachableError(
        "the host refused our key" if tried.offered else "there is no key to log in with",
        where=opening.where,
        why="; ".join(part for part in parts if part),
        next=(
            "name the right key as `key` in the inventory (or IdentityFile, with IdentitiesOnly yes)"
            if many
            else shlex.join(("ssh-copy-id", *(word for word in target if word != "--")))
            if tried.offered
            else "make one (ssh-keygen) and copy it there (ssh-copy-id), or start an agent and ssh-add it"
        ),
    )


def _told(tried: Tried) -> list[str]:
    empty = [f"{file} holds no private key" for file in tried.empty]
    return [*([f"tried: {', '.join(tried.offered)}"] if tried.offered else []), *tried.unusable, *empty]
