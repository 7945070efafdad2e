"""The keys that a host is offered, in OpenSSH's order: certificates, configured keys that the agent holds, the agent's
others, then files."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import base64
import binascii
import contextlib
import io
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from dflash_ops import ssh_ask
from dflash_ops.ssh_config import Hop
from dflash_ops.ssh_library import AgentSSH, PublicBlob, paramiko

_MAGIC = b"openssh-key-v1\0"
_CERTIFICATE = "-cert-v01@openssh.com"
# An agent that says nothing for so long is passed over.
_AGENT_SECONDS = 5.0


class Offer(NamedTuple):
    """A key to try. name: how a user knows it."""

    name: str
    key: Any


@dataclass
class Tried:
    """What became of the keys, for an error to tell."""

    offered: list[str] = field(default_factory=list[str])
    locked: list[Path] = field(default_factory=list[Path])
    empty: list[Path] = field(default_factory=list[Path])  # files without a private key
    unusable: list[str] = field(default_factory=list[str])  # with the reason
    asked_s: float = 0.0  # that a person took to answer


class _NoKeyError(ValueError):
    """There is no private key in the file: a public one perhaps, whose other half the agent should hold."""


class _Identity(NamedTuple):
    file: Path
    blob: bytes | None  # its public half, when that can be read without a passphrase


class Agent(AgentSSH):  # pyright: ignore[reportUntypedBaseClass]
    """The keys of the agent behind a socket, none of whose answers is waited for without bound."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__()
        self._line = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(min(seconds, _AGENT_SECONDS))
            connection.connect(path)
            super()._connect(connection)  # pyright: ignore[reportAttributeAccessIssue] (its own subclasses begin so)
            connection.settimeout(None)  # signing may wait for a touch or a click; logging in has a bound of its own
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Ends the connection to the agent, and with it the waiting of whoever asks for a signature."""
        with contextlib.suppress(OSError):  # it is gone
            self._line.shutdown(socket.SHUT_RDWR)
        super()._close()  # pyright: ignore[reportAttributeAccessIssue]


def offers(hop: Hop, agent: Agent | None, tried: Tried) -> Iterator[Offer]:
    """The keys for a host, each at most once. Whoever takes the next one has been refused with those before."""
    held: dict[bytes, Any] = {key.blob: key for key in agent.get_keys()} if agent else {}
    identities = [_Identity(file, public_blob(file)) for file in hop.identities if file.is_file()]
    named = {identity.blob for identity in identities}
    given: set[bytes] = set()

    def from_agent(blob: bytes, name: str) -> Iterator[Offer]:
        if blob in held and blob not in given:
            given.add(blob)
            yield Offer(name, held[blob])

    for file, blob, certificate in _certificates(hop, identities, tried):
        key = held.get(blob) or next((_load(each, hop, tried) for each in identities if each.blob == blob), None)
        if key is not None:
            yield Offer(str(file), _certified(key, certificate))
            key.public_blob = None
    for identity in identities:
        if identity.blob:
            yield from from_agent(identity.blob, f"{identity.file} (in the agent)")
    if not hop.identities_only:
        for blob, key in held.items():
            if blob not in named:
                yield from from_agent(blob, f"{key.comment or key.get_name()} (in the agent)")
    # A key that needs a passphrase comes after all that need none.
    for identity in sorted(identities, key=lambda each: _is_locked(each.file)):
        if identity.blob is None or identity.blob not in given:
            key = _load(identity, hop, tried)
            if key is not None:
                if identity.blob:
                    given.add(identity.blob)
                yield Offer(str(identity.file), key)


def public_blob(file: Path) -> bytes | None:
    """The public half of a key pair, from the file beside it, the file itself (it may be a public key whose private
    half the agent holds), or the open part of a private key in OpenSSH's format."""
    for each in (file.with_name(f"{file.name}.pub"), file):
        with contextlib.suppress(OSError, ValueError, binascii.Error):
            words = each.read_text(errors="replace").split()
            if len(words) >= 2 and (words[0].startswith(("ssh-", "ecdsa-", "sk-"))):
                return base64.b64decode(words[1], validate=True)
    return _open_part(file)[1]


def _open_part(file: Path) -> tuple[bytes, bytes | None]:
    """Of a private key in OpenSSH's format, what can be read without a passphrase: its cipher, and its public half."""
    with contextlib.suppress(OSError, ValueError, binascii.Error, struct.error):
        lines = file.read_text().strip().split("\n")
        if lines[0].strip() == "-----BEGIN OPENSSH PRIVATE KEY-----":
            rest = base64.b64decode("".join(lines[1:-1]))
            if rest.startswith(_MAGIC):
                cipher, rest = _string(rest[len(_MAGIC) :])
                _, rest = _string(rest)  # the key derivation
                _, rest = _string(rest)  # and its options
                return cipher, _string(rest[4:])[0]  # past the count of keys, which is 1
    return b"none", None


def _is_locked(file: Path) -> bool:
    """Whether a passphrase is needed, told without trying."""
    with contextlib.suppress(OSError):
        return b"ENCRYPTED" in file.read_bytes() or _open_part(file)[0] != b"none"
    return False


def _string(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack(">I", data[:4])
    return data[4 : 4 + size], data[4 + size :]


def _certificates(hop: Hop, identities: list[_Identity], tried: Tried) -> Iterator[tuple[Path, bytes, Any]]:
    """Certificates that are configured, or lie beside an identity: the file, the blob of their bare key, themselves."""
    beside = [identity.file.with_name(f"{identity.file.name}-cert.pub") for identity in identities]
    for file in dict.fromkeys((*hop.certificates, *beside)):
        if not file.is_file():
            continue
        try:
            certificate = PublicBlob.from_file(str(file))
            kind = certificate.key_type.removesuffix(_CERTIFICATE)
            classes: list[Any] = [each for each in paramiko.key_classes if kind in each.identifiers()]
            if not classes or kind == certificate.key_type:
                raise ValueError(f"a certificate of a kind that we don't know: {certificate.key_type}")
            yield file, classes[0](data=certificate.key_blob).asbytes(), certificate
        except (OSError, ValueError, binascii.Error, paramiko.SSHException) as error:
            tried.unusable.append(f"{file}: {error}")


def _certified(key: Any, certificate: Any) -> Any:
    key.public_blob = certificate
    return key


# What has been unlocked, or given up, by its file: each is asked for once in the life of a program.
_unlocked: dict[Path, Any] = {}
_unlocking = threading.Lock()


def _load(identity: _Identity, hop: Hop, tried: Tried) -> Any:
    """The private key of a file; None when it can't be had, which `tried` then tells of."""
    try:
        return _private(identity.file, None)
    except TypeError:  # cryptography's word for a missing passphrase
        return _unlock(identity.file, hop, tried)
    except _NoKeyError:
        tried.empty.append(identity.file)
    except (OSError, ValueError, UnsupportedAlgorithm, paramiko.SSHException) as error:
        tried.unusable.append(f"{identity.file}: {getattr(error, 'strerror', None) or error}")
    return None


def _unlock(file: Path, hop: Hop, tried: Tried) -> Any:
    began = time.monotonic()
    with _unlocking:
        try:
            if file not in _unlocked:
                if not hop.ask or not ssh_ask.possible():
                    tried.locked.append(file)
                    return None
                _unlocked[file] = _asked(file)
            if _unlocked[file] is None:
                tried.locked.append(file)
            return _unlocked[file]
        finally:
            tried.asked_s += time.monotonic() - began


def _asked(file: Path) -> Any:
    with ssh_ask.around():
        for _ in range(ssh_ask.TRIES):
            answer = ssh_ask.passphrase(f"Enter passphrase for key '{file}': ")
            if not answer:
                return None
            with contextlib.suppress(ValueError, paramiko.SSHException):  # a wrong one
                return _private(file, answer)
        return None


def _private(file: Path, passphrase: bytes | None) -> Any:
    """Loads a private key of any format that OpenSSH reads. TypeError: it is locked. ValueError: the passphrase is
    wrong, or there is no key in the file."""
    data = file.read_bytes()
    if b"PRIVATE KEY-----" not in data:
        raise _NoKeyError
    try:
        loaded: Any = serialization.load_ssh_private_key(data, passphrase)
    except ValueError:
        if b"BEGIN OPENSSH" in data:
            raise
        loaded = serialization.load_pem_private_key(data, passphrase)
    for kind, ours in (
        (Ed25519PrivateKey, paramiko.Ed25519Key),
        (EllipticCurvePrivateKey, paramiko.ECDSAKey),
        (RSAPrivateKey, paramiko.RSAKey),
    ):
        if isinstance(loaded, kind):
            # paramiko reads fewer formats; this one it does.
            openssh, pem = serialization.PrivateFormat.OpenSSH, serialization.Encoding.PEM
            plain = loaded.private_bytes(pem, openssh, serialization.NoEncryption())
            return ours.from_private_key(io.StringIO(plain.decode()))
    raise ValueError(f"a key of a kind that paramiko does not know ({type(loaded).__name__})")
