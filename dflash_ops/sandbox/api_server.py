"""pveproxy: HTTPS on a loopback port, with the habits of the real one, and with faults on demand.

Runs inside the hypervisor's namespaces as a process of its own.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NoReturn

from dflash_ops.sandbox import api, certificates, faults, layout, rights
from dflash_ops.sandbox.api import ApiError
from dflash_ops.sandbox.calls import CALLS
from dflash_ops.sandbox.rights import Entry, Rights

ROLE = "DFlash"  # what dflash-ops needs of the containers
_PREFIX = "/api2/json"
_MOST = 512 << 10  # bytes of a body
_IDLE_SECONDS = 60
_TLS_HANDSHAKE = 0x16  # the first byte of one


def prepare() -> dict[str, Any]:
    """Make the certificates and the users; what a client needs of them: {"ca": PEM, "tokens": {name: secret}}."""
    authority = certificates.make_authority("sandbox")
    Path(layout.CA).write_bytes(authority.pem)
    for node in layout.NODES:
        _keep(Path(layout.configs(node)).parent, *certificates.make_node(authority, node))
    return {"ca": authority.pem.decode(), "tokens": _make_users()}


def _make_users() -> dict[str, str]:
    """Who there is at first; the secrets of their tokens."""
    mine = Rights.read()
    mine.users |= {"bot@pve": True, "viewer@pve": True}
    mine.tokens = {"root@pam!full": False, "bot@pve!dflash": False, "bot@pve!bare": True, "viewer@pve!audit": False}
    mine.secrets = {name: _uuid() for name in mine.tokens}
    needed = ("VM.Audit", "VM.PowerMgmt", "VM.Snapshot", "VM.Snapshot.Rollback")
    mine.roles = {ROLE: frozenset(needed), "Auditor": frozenset(["VM.Audit"])}
    mine.entries = [
        Entry("/vms", "bot@pve", ROLE, True),
        Entry("/nodes", "bot@pve", "PVEAuditor", True),
        Entry("/vms/200", "viewer@pve", "Auditor", True),
    ]
    mine.write()
    return mine.secrets


def _uuid() -> str:
    text = secrets.token_hex(16)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _keep(folder: Path, certificate: bytes, key: bytes) -> None:
    for name, data, mode in (("pve-ssl.pem", certificate, 0o640), ("pve-ssl.key", key, 0o600)):
        (folder / name).touch(mode)
        (folder / name).write_bytes(data)


def serve(ready: int) -> NoReturn:
    """Serve until killed; what a client has to know goes to the pipe `ready` as one line of JSON."""
    facts = prepare()
    server = Server(("127.0.0.1", 0), Handler)
    os.write(ready, json.dumps({"port": server.server_address[1], **facts}).encode())
    os.close(ready)
    server.serve_forever()
    os._exit(0)


class Server(ThreadingTCPServer):
    """TLS and plain HTTP on one port: the first byte says which."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._mutex = threading.Lock()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, so that a client that says nothing keeps nobody waiting."""
        request.settimeout(_IDLE_SECONDS)
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = request.recv(1, socket.MSG_PEEK)
        if first == bytes([_TLS_HANDSHAKE]):
            with self._mutex:
                context = self._context()
            with context.wrap_socket(request, server_side=True) as secured:
                Handler(secured, client_address, self)
        elif first:
            Redirect(request, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or does not like our certificate is no news; all else goes to the sandbox's log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _context(self) -> ssl.SSLContext:
        kind = faults.read().certificate
        folder = Path(layout.CONFIGS).parent
        if kind != "own":
            folder = Path(layout.SUPPORT, kind)
            if not folder.exists():
                folder.mkdir(mode=0o700)
                _keep(folder, *certificates.make_node(certificates.make_authority("somebody else"), layout.NODE))
        if kind not in self._contexts:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "pve-ssl.pem", folder / "pve-ssl.key")
            self._contexts[kind] = context
        return self._contexts[kind]


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "pve-api-daemon/3.0", ""

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it, and it would hold secrets."""

    def version_string(self) -> str:
        return self.server_version


class Redirect(_Quiet):
    """Plain HTTP on the port of HTTPS."""

    def answer(self) -> None:
        host = self.headers.get("Host", "localhost")
        self.send_response(301, "Moved Permanently")
        self.send_header("Location", f"https://{host}{self.path}")
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer


class Handler(_Quiet):
    """One connection with TLS."""

    def __getattr__(self, name: str) -> Callable[[], None]:
        # Whatever the method is: PVE itself says what it does not have.
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        began = time.monotonic()
        path, _, query = self.path.partition("?")
        body = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _MOST))
        wrong = faults.read()
        try:
            if not path.startswith(_PREFIX):
                raise ApiError(404, f"no such file '{path}'")
            user = self._user()
            path = urllib.parse.unquote(path.removeprefix(_PREFIX)) or "/"
            data = api.answer(CALLS, self.command, path, self._given(query, body), user)
            code, reason = 200, "OK"
            content: Any = {"data": data} | ({"total": data.total} if isinstance(data, api.Page) else {})
        except ApiError as error:
            code, reason = error.code, error.message
            content = None if error.silent else {"data": None, "message": f"{error.message}\n"}
            if content is not None and error.errors:
                content["errors"] = error.errors
        event = f"{self.command} {path}"
        if code == 401:
            time.sleep(max(0.0, wrong.unauthorized_delay - (time.monotonic() - began)))
        elif wrong.delay and re.search(wrong.slow, event):
            time.sleep(wrong.delay)
        if wrong.garbage and re.search(wrong.garbage, event):
            content = "<html><body><h1>502 Bad Gateway</h1></body></html>"
            code, reason = 200, "OK"
        self._send(code, reason, content, dies=bool(wrong.dies and re.search(wrong.dies, event)))

    def _user(self) -> str:
        """Who is asking; 401 with an empty body when nobody knows."""
        kind, _, rest = self.headers.get("Authorization", "").partition("=")
        if kind != "PVEAPIToken":
            raise ApiError(401, "No ticket", silent=True)
        token, separator, secret = rest.rpartition("=")
        refusal = rights.Rights.read().refusal(token, secret) if separator else "invalid token"
        if refusal is not None:
            raise ApiError(401, refusal, silent=True)
        return token

    def _given(self, query: str, body: bytes) -> dict[str, str]:
        given = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if not body:
            return given
        if "json" in self.headers.get("Content-Type", ""):
            try:
                return given | {str(name): str(value) for name, value in json.loads(body).items()}
            except (ValueError, AttributeError) as error:
                raise ApiError(400, f"unable to decode the body: {error}") from error
        return given | dict(urllib.parse.parse_qsl(body.decode(errors="replace"), keep_blank_values=True))

    def _send(self, code: int, reason: str, content: Any, *, dies: bool) -> None:
        body = (
            content.encode() if isinstance(content, str) else b"" if content is None else json.dumps(content).encode()
        )
        # A reason is one line of Latin-1.
        self.send_response_only(code, reason.strip().replace("\n", " ").encode("latin-1", "replace").decode("latin-1"))
        self.send_header("Cache-Control", "max-age=0")
        self.send_header("Connection", "close" if dies else "Keep-Alive")
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Pragma", "no-cache")
        self.send_header("Server", self.server_version)
        self.send_header("Content-Length", str(len(body)))
        if body:
            kind = "text/html" if isinstance(content, str) else "application/json"
            self.send_header("Content-Type", f"{kind};charset=UTF-8")
        self.end_headers()
        if dies:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        elif self.command != "HEAD":
            self.wfile.write(body)
