"""A client of the sandbox's SSH server, and eyes on this machine's processes: what the sandbox's tests share."""

import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from dflash_ops.sandbox.processes import ProcessId
from dflash_ops.sandbox.state import SandboxState


@dataclass(frozen=True)
class Answer:
    code: int  # -1 when a signal ended the shell
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode()


class Client:
    """One SSH connection; commands are shell text, as ssh sends them."""

    def __init__(self, state: SandboxState, node: str = "pve") -> None:
        self.state = state
        self.ssh = connect(state, port=state.nodes[node])

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.ssh.close()

    def open(self, command: str | bytes) -> paramiko.Channel:
        """Start a command and return its channel."""
        channel = self.ssh.get_transport().open_session(timeout=10)
        channel.settimeout(30)
        channel.exec_command(command)
        return channel

    def run(self, command: str | bytes, stdin: bytes = b"") -> Answer:
        channel = self.open(command)
        channel.sendall(stdin)
        channel.shutdown_write()
        return finish(channel)

    def inside(self, vmid: int, script: str, *words: str | bytes, stdin: bytes = b"") -> Answer:
        """Run a shell script in a container, with `words` as its $1, $2, …; the way that dflash-ops does it."""
        argv = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME=/root", "sh", "-c", script, "sh"]
        head = shlex.join(["lxc-attach", "-n", str(vmid), "--clear-env", "--", *argv]).encode()
        tail = b" ".join(quote(word if isinstance(word, bytes) else word.encode()) for word in words)
        return self.run(head + b" " + tail, stdin)

    def text(self, vmid: int, script: str, *words: str | bytes) -> str:
        """What a script in a container prints; it must succeed."""
        answer = self.inside(vmid, script, *words)
        assert answer.code == 0, answer
        return answer.text.strip()


def connect(state: SandboxState, **options: object) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.load_host_keys(str(state.known_hosts))
    known = {"port": state.port, "username": state.user, "key_filename": str(state.key), **options}
    client.connect(state.host, look_for_keys=False, allow_agent=False, timeout=10, **known)
    return client


def finish(channel: paramiko.Channel) -> Answer:
    """Read both streams to their ends, then the exit status; AssertionError when that takes half a minute."""
    out, err = bytearray(), bytearray()
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline, f"it does not end: {bytes(out)!r} {bytes(err)!r}"
        if channel.recv_stderr_ready():
            err += channel.recv_stderr(1 << 16)
        elif channel.recv_ready():
            out += channel.recv(1 << 16)
        elif channel.eof_received or channel.closed:
            break
        else:
            time.sleep(0.001)
    while data := channel.recv(1 << 16):
        out += data
    while data := channel.recv_stderr(1 << 16):
        err += data
    code = channel.recv_exit_status()
    channel.close()
    return Answer(code, bytes(out), bytes(err))


def read_until(channel: paramiko.Channel, words: bytes) -> bytes:
    """Read until `words` have come; AssertionError when the command's output ends before."""
    seen = b""
    while words not in seen:
        data = channel.recv(1 << 12)
        assert data, f"{words!r} never came: {seen!r}"
        seen += data
    return seen


def quote(word: bytes) -> bytes:
    """`shlex.quote` for bytes."""
    return b"'" + word.replace(b"'", b"'\"'\"'") + b"'"


def retry_until(condition: Callable[[], object], seconds: float = 20.0) -> object:
    """Ask until the answer is true, and return it; AssertionError when it never is."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
    return answer


def tree(root: int) -> set[ProcessId]:
    """The process and all its descendants, as this machine sees them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, pending = set[ProcessId](), [root]
    while pending:
        pid = pending.pop()
        pending += children.get(pid, [])
        if identity := ProcessId.of(pid):
            found.add(identity)
    return found


def living(processes: Iterable[ProcessId]) -> list[ProcessId]:
    return [identity for identity in processes if identity.alive]
