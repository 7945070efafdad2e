"""A TCP relay before a sandbox, which can fall silent or cut the line: the cable, in a test's hands."""

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path

from dflash_ops.command import Container, Host


class Proxy:
    """Relays 127.0.0.1:`port` to a server. `silence` keeps the line open but carries nothing any more; `cut` closes
    it; `cut_after` is the count of bytes sent by the client after which it is cut by itself."""

    def __init__(self, host: Host, folder: Path) -> None:
        assert host.port is not None and host.known_hosts is not None
        self._server = (host.address, host.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_after: int | None = None
        self.sent = 0
        self._open: list[socket.socket] = []
        self._loud = threading.Event()
        self._loud.set()
        known_hosts = folder / f"known_hosts_{self.port}"
        known_hosts.write_text(host.known_hosts.read_text().replace(f":{host.port} ", f":{self.port} "))
        self.host = replace(host, port=self.port, known_hosts=known_hosts)
        threading.Thread(target=self._accept, daemon=True).start()

    def before(self, container: Container) -> Container:
        return replace(container, host=self.host)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def silence(self) -> None:
        self._loud.clear()

    def cut(self) -> None:
        self._loud.set()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                threading.Thread(target=self._carry, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._loud.wait()
                if counted:
                    self.sent += len(data)
                    if self.cut_after is not None and self.sent >= self.cut_after:
                        self.cut()
                        return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
