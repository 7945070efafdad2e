"""A TLS server on loopback that answers as a test says: whole, in parts, or not at all."""

import contextlib
import datetime
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

# Gets the connection, and an event that ends every wait.
Answer = Callable[[socket.socket, threading.Event], object]


@dataclass(frozen=True)
class Identity:
    """A certificate with its key in one file, and its own file of certificates."""

    both: Path
    certificate: Path


def identity(folder: Path, name: str, *, address: str = "127.0.0.1", days: int = 2) -> Identity:
    """A certificate that signed itself, for one address; with days < 0 one that has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    called = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(called)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both, alone = folder / f"{name}.both", folder / f"{name}.pem"
    both.write_bytes(private + pem)
    alone.write_bytes(pem)
    return Identity(both, alone)


@dataclass
class Server:
    """answers: what each request gets, in turn; the last one again and again. requests: what was asked."""

    port: int
    answers: list[Answer]
    requests: list[bytes] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)


def data(value: object, status: str = "200 OK", *, close: bool = False) -> Answer:
    body = json.dumps({"data": value}).encode()
    return said(body, status, close=close)


def said(
    body: bytes, status: str = "200 OK", *, headers: str = "", length: int | None = None, close: bool = False
) -> Answer:
    """A whole answer; with `length` above its own, one that ends too early."""

    def answer(connection: socket.socket, _: threading.Event) -> None:
        length_said = len(body) if length is None else length
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length_said}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)
        if close or length is not None:
            connection.close()

    return answer


def silent(_: socket.socket, stop: threading.Event) -> None:
    """No answer as long as the test goes on."""
    stop.wait(30)


def drip(connection: socket.socket, stop: threading.Event) -> None:
    """An answer of which something comes all the time, and that never ends."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not stop.wait(0.05):
        connection.sendall(b"X-More: 1\r\n")


@contextlib.contextmanager
def serve(answers: list[Answer], identity: Identity | None) -> Generator[Server, None, None]:
    """Without an identity it speaks no TLS."""
    context = None
    if identity is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.both)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener.getsockname()[1], answers)
        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=_serve, args=(server, connection, context), daemon=True)
                threads.append(thread)
                thread.start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield server
        finally:
            server.stop.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join(10)


def _serve(server: Server, raw: socket.socket, context: ssl.SSLContext | None) -> None:
    raw.settimeout(10)
    with contextlib.suppress(OSError), raw:  # the client may have gone, and refuses wrong certificates
        connection = context.wrap_socket(raw, server_side=True) if context else raw
        with connection:
            connection.settimeout(0.02)  # how often it is looked whether the test is over
            while not server.stop.is_set() and (request := _request(server, connection)):
                server.requests.append(request)
                turn = min(len(server.requests), len(server.answers)) - 1
                server.answers[turn](connection, server.stop)


def _request(server: Server, connection: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got and not server.stop.is_set():
        try:
            part = connection.recv(65536)
        except TimeoutError:
            continue
        if not part:
            return b""
        got += part
        if not isinstance(connection, ssl.SSLSocket):  # a client that speaks TLS sends no head that would end
            break
    return got
