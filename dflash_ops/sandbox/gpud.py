"""The fake GPUs: a ledger of who holds them, and the answers of `nvidia-smi`.

A process of a run (guest/sitecustomize.py) opens /dev/nvidiaN and says so on a socket; the kernel tells us its pid as
the hypervisor sees it. It then locks one byte of the device, its slot, by a lock that belongs to the open file: while
any process holds a copy of that descriptor the slot is locked, and the record stays charged to the pid that opened
it, dead or not. That is what CUDA's driver does.
"""

import fcntl
import json
import os
import socket
import struct
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dflash_ops.sandbox import nvidia
from dflash_ops.sandbox.processes import ProcessId


@dataclass
class Record:
    """A process that opened a device: its pid here and in its own namespace, what it took, and its slot."""

    identity: ProcessId
    inner_pid: int
    pid_namespace: int
    mib: int
    slot: int
    opening: bool = True  # the slot is not locked yet


class Device:
    """One fake GPU."""

    def __init__(self, index: int, uuid: str, node: str) -> None:
        self.index = index
        self.uuid = uuid
        self._descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        self._records: list[Record] = []
        self._next_slot = 0
        self._mutex = threading.Lock()

    def open(self, peer: int, mib: int) -> Record:
        with self._mutex:
            identity = ProcessId.of(peer)
            if identity is None:
                raise ProcessLookupError(peer)
            inner, namespace = _inner_pid(peer), _pid_namespace(peer)
            record = Record(identity, inner, namespace, mib, self._next_slot)
            self._next_slot += 1
            self._records.append(record)
            return record

    def held(self) -> list[Record]:
        """The records whose descriptor somebody still holds; the others are forgotten."""
        with self._mutex:
            self._records = [record for record in self._records if record.opening or self._locked(record.slot)]
            return list(self._records)

    def _locked(self, slot: int) -> bool:
        question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, question)
        return struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK


def uuid_of(sandbox: str, name: str) -> str:
    """A GPU's UUID by the name of its node; it tells sandboxes apart."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{sandbox}/{name}')}"


def make_devices(sandbox: str, names: list[str]) -> dict[str, Device]:
    """The devices by the name of their node."""
    return {name: Device(index, uuid_of(sandbox, name), f"/dev/{name}") for index, name in enumerate(names)}


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(64)
    return listener


def serve(listener: socket.socket, devices: dict[str, Device]) -> NoReturn:
    """Answer until killed, each caller in a thread of its own."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, devices), daemon=True).start()


def _answer(connection: socket.socket, devices: dict[str, Device]) -> None:
    record = None
    with connection, connection.makefile("rb") as lines:
        try:
            peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            line = lines.readline()
            if line.startswith(b"nvidia-smi"):
                words = line[:-1].decode("utf-8", "replace").split("\0")
                code, out = nvidia.smi(words[1:], _seen_by(peer, devices))
                connection.sendall(f"{code}\n{out}".encode())
            else:
                question = json.loads(line)
                record = devices[question["open"]].open(peer, int(question["mib"]))
                connection.sendall(json.dumps({"slot": record.slot}).encode() + b"\n")
                lines.read()  # the caller closes when it has locked its slot, or dies
        except (OSError, ValueError, KeyError):
            return  # a caller that went away or speaks something else
        finally:
            if record is not None:
                record.opening = False


def _seen_by(peer: int, devices: dict[str, Device]) -> list[nvidia.Gpu]:
    """The devices as the process `peer` sees them: all memory, but only the processes of its own pid namespace; the
    hypervisor sees all."""
    own, theirs = _pid_namespace(os.getpid()), _pid_namespace(peer)
    seen: list[nvidia.Gpu] = []
    for device in devices.values():
        records = device.held()
        visible = [record for record in records if theirs in (own, record.pid_namespace)]
        holders = [
            nvidia.Holder(record.identity.pid if theirs == own else record.inner_pid, _name(record), record.mib)
            for record in visible
        ]
        seen.append(nvidia.Gpu(device.index, device.uuid, sum(record.mib for record in records), holders))
    return seen


def _name(record: Record) -> str | None:
    """The program of a record's process; None when the process is gone."""
    if not record.identity.alive:
        return None
    try:
        return str(Path(f"/proc/{record.identity.pid}/exe").readlink())
    except OSError:
        return None


def _pid_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def _inner_pid(pid: int) -> int:
    rows = Path(f"/proc/{pid}/status").read_text(errors="replace").split("\n")
    return int(next(row for row in rows if row.startswith("NSpid:")).split()[-1])
