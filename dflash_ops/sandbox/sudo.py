"""`sudo`, as far as scripts use it: -n, -l, --, and what /etc/sudoers.d says.

Nothing in the sandbox is set-uid. The program hands its words, environment and descriptors 0 to 2 to a daemon of the
hypervisor's root, which asks the kernel who it is, and runs the command or says why not. Words and exit codes are those
of sudo 1.9. Standard library only.
"""

import contextlib
import fnmatch
import json
import os
import re
import signal
import socket
import struct
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dflash_ops.sandbox import users
from dflash_ops.sandbox.processes import own_environment, own_words

SECURE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULTS = ("env_reset", "mail_badpass", "secure_path=" + SECURE_PATH.replace(":", "\\:"), "use_pty")
_CHECKED = re.compile(rb"COLORTERM|LANG|LANGUAGE|LC_[A-Z]+|LINGUAS|TERM|TZ")
_KEPT = re.compile(rb"COLORS|DISPLAY|HOSTNAME|KRB5CCNAME|LS_COLORS|PS1|PS2|XAUTHORITY|XAUTHORIZATION")
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH, signal.SIGUSR1)


class Refused(Exception):
    """Why a call ends before its command: sudo's words for stderr."""


# -- the program


def main() -> NoReturn:
    """The program sudo."""
    words = own_words()
    listing = False
    while words and words[0].startswith(b"-"):
        word = words.pop(0)
        if word == b"--":
            break
        if word in (b"-l", b"--list"):
            listing = True
        elif word not in (b"-n", b"--non-interactive"):
            _leave(f"sudo: {os.fsdecode(word)}: the sandbox's sudo has no such option", 1)
    if not words and not listing:
        _leave("usage: sudo -h | -K | -k | -V", 1)
    door = socket.socket(socket.AF_UNIX)
    door.connect(_socket_path())
    request = {
        "words": [word.hex() for word in words],
        "environment": {name.hex(): value.hex() for name, value in own_environment().items()},
        "folder": str(Path.cwd()),
        "listing": listing,
        "terminal": _has_terminal(),
    }
    # Handlers first: what arrives while the daemon decides is for the command.
    for number in _RELAYED:
        signal.signal(number, lambda number, _: _tell(door, number))
    socket.send_fds(door, [b"\n"], [0, 1, 2])
    document = json.dumps(request).encode()
    door.sendall(struct.pack("!I", len(document)) + document)
    answer = json.loads(_all_of(door) or b'{"say": "sudo: the sandbox ended", "code": 1}')
    if answer.get("say"):
        _leave(answer["say"], answer["code"])
    if answer["code"] < 0:  # as its command
        if -answer["code"] != signal.SIGKILL:
            signal.signal(-answer["code"], signal.SIG_DFL)
        os.kill(os.getpid(), -answer["code"])
    os._exit(answer["code"])


def _tell(door: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        door.sendall(bytes([number]))


def _all_of(door: socket.socket) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(OSError):
        while part := door.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(text: str, code: int) -> NoReturn:
    out = 1 if code == 0 else 2
    with contextlib.suppress(OSError):
        os.write(out, (text.rstrip("\n") + "\n").encode("utf-8", "surrogateescape"))
    os._exit(code)


# -- the daemon


def _socket_path() -> str:
    return f"/run/sandbox-sudo-{socket.gethostname()}.sock"  # each node of the cluster has its own, as its own name


def serve() -> None:
    """Listens from now on, in a thread of the caller's, who is the hypervisor's root."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_socket_path())
    os.chmod(_socket_path(), 0o666)  # noqa: PTH101 (a name, as bind has it)
    listener.listen(64)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_answer, args=(client,), daemon=True).start()

    threading.Thread(target=accept, name="sudo", daemon=True).start()


def _answer(client: socket.socket) -> None:
    descriptors: list[int] = []
    with client, contextlib.suppress(OSError, ValueError):
        try:
            _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
            (size,) = struct.unpack("!I", _exactly(client, 4))
            request = json.loads(_exactly(client, size))
            answer = _obey(client, request, descriptors)
        except Refused as refused:
            answer = {"say": str(refused), "code": 1}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        client.sendall(json.dumps(answer).encode())
        client.shutdown(socket.SHUT_RDWR)  # a thread still reads of it, which keeps it open


def _exactly(client: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = client.recv(count - len(got))
        if not part:
            raise OSError("half a request")
        got += part
    return got


def _obey(client: socket.socket, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    user = users.name_of(uid)
    policy = Policy.of(user)
    if "requiretty" in policy.defaults and not request["terminal"] and uid != 0:
        raise Refused("sudo: sorry, you must have a tty to run sudo")
    if request["listing"] and not request["words"]:
        return {"say": policy.listing(), "code": 0}
    words = [bytes.fromhex(word) for word in request["words"]]
    program = _find(os.fsdecode(words[0]))
    policy.check(program, words, execute=not request["listing"])
    if request["listing"]:
        return {"say": program, "code": 0}
    given = {bytes.fromhex(name): bytes.fromhex(value) for name, value in request["environment"].items()}
    process = subprocess.Popen(
        words,
        executable=program,
        stdin=descriptors[0],
        stdout=descriptors[1],
        stderr=descriptors[2],
        env=_environment(given, user, words),
        cwd=request["folder"],
        start_new_session=True,
        umask=0o022,
    )
    for descriptor in descriptors:
        os.close(descriptor)  # now: the command's end of file is not to wait for us
    descriptors.clear()
    threading.Thread(target=_relay, args=(client, process), daemon=True).start()
    return {"code": process.wait()}


def _relay(client: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """The client's signals to the command, as long as both live."""
    with contextlib.suppress(OSError):
        while number := client.recv(1):
            process.send_signal(number[0])


def _find(name: str) -> str:
    # Where the kernel has no overlays, the sandbox's programs are in /usr/local/sbin.
    names = [name, f"/usr/local/sbin/{os.path.basename(name)}"]  # noqa: PTH119
    for path in names if "/" in name else [f"{folder}/{name}" for folder in SECURE_PATH.split(":")]:
        if os.access(path, os.X_OK) and not os.path.isdir(path):  # noqa: PTH112
            return path
    raise Refused(f"sudo: {name}: command not found")


def _environment(given: dict[bytes, bytes], user: str, words: list[bytes]) -> dict[bytes, bytes]:
    """env_reset: little is kept, and of that nothing odd."""
    kept = {
        name: value
        for name, value in given.items()
        if _KEPT.fullmatch(name) or (_CHECKED.fullmatch(name) and not re.search(rb"[%/]", value))
    }
    account = users.account(user)
    uid, gid = (account.uid, account.gid) if account else (0, 0)
    said = {"HOME": "/root", "PATH": SECURE_PATH, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}
    said |= {"SUDO_USER": user, "SUDO_UID": str(uid), "SUDO_GID": str(gid)}
    return {
        **kept,
        **{name.encode(): value.encode() for name, value in said.items()},
        b"SUDO_COMMAND": b" ".join(words),
    }


# -- what sudoers says


class Entry(NamedTuple):
    """One command of a user's line: free means NOPASSWD."""

    runas: str
    free: bool
    pattern: str

    def matches(self, program: str, line: str) -> bool:
        """line: the program and its words."""
        pattern = self.pattern.removeprefix("!")
        if pattern == "ALL" or fnmatch.fnmatchcase(program, pattern):
            return True
        return " " in pattern and fnmatch.fnmatchcase(line, pattern)


class Policy(NamedTuple):
    user: str
    defaults: tuple[str, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, user: str) -> "Policy":
        defaults: list[str] = list(_DEFAULTS)
        entries: list[Entry] = [Entry("ALL : ALL", False, "ALL")] if user == users.ROOT else []
        for line in _lines():
            if setting := re.fullmatch(r"Defaults(?::(\S+))?\s+(.*)", line):
                if setting[1] in (None, user):
                    for word in re.split(r",\s*", setting[2]):
                        opposite = word[1:] if word.startswith("!") else f"!{word}"
                        defaults = [each for each in defaults if each != opposite]
                        defaults.append(word)
            elif rule := re.fullmatch(rf"(?:{re.escape(user)}|ALL)\s+ALL\s*=\s*(?:\(([^)]*)\))?\s*(.*)", line):
                entries += _entries(rule[1] or "root", rule[2], "!authenticate" in defaults)
        return cls(user, tuple(defaults), tuple(entries))

    def check(self, program: str, words: list[bytes], *, execute: bool) -> None:
        """Raises Refused where the policy does not let the user run it without being asked."""
        if self.user == users.ROOT:
            return
        line = " ".join([program, *map(os.fsdecode, words[1:])])
        chosen = [entry for entry in self.entries if entry.matches(program, line)][-1:]
        allowed = bool(chosen) and not chosen[0].pattern.startswith("!")
        free = chosen[0].free if allowed else "!authenticate" in self.defaults
        if not execute:
            free = any(entry.free for entry in self.entries)  # listpw=any
        if not free:
            raise Refused("sudo: a password is required")
        if not allowed:
            host = socket.gethostname()
            raise Refused(f"Sorry, user {self.user} is not allowed to execute '{line}' as root on {host}.")

    def listing(self) -> str:
        if self.user != users.ROOT and not any(entry.free for entry in self.entries):
            raise Refused("sudo: a password is required")
        host = socket.gethostname()
        rows: list[str] = []
        for number, entry in enumerate(self.entries):
            before = self.entries[number - 1] if number else None
            tag = "NOPASSWD: " if entry.free and (before is None or not before.free) else ""
            tag = "PASSWD: " if not entry.free and before is not None and before.free else tag
            if before is not None and before.runas == entry.runas:
                rows[-1] += f", {tag}{entry.pattern}"
            else:
                rows.append(f"    ({entry.runas}) {'NOPASSWD: ' if entry.free else ''}{entry.pattern}")
        head = _wrapped(f"    {', '.join(self.defaults)}", 4)
        return (
            f"Matching Defaults entries for {self.user} on {host}:\n{head}\n\n"
            f"User {self.user} may run the following commands on {host}:\n"
            + "\n".join(_wrapped(row, 8) for row in rows)
        )


def _wrapped(row: str, indent: int) -> str:
    """At 80 columns, as sudo does on a pipe too."""
    return textwrap.fill(row, 80, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _entries(runas: str, text: str, free: bool) -> Iterator[Entry]:
    for word in re.split(r"(?<!\\),\s*", text):
        while tag := re.match(r"([A-Z_]+):\s*", word):
            free = tag[1] == "NOPASSWD" if tag[1] in ("NOPASSWD", "PASSWD") else free
            word = word[tag.end() :]
        yield Entry(runas, free, word.strip())


def _lines() -> Iterator[str]:
    for file in (Path("/etc/sudoers"), *sorted(users.SUDOERS.parent.glob("*"))):
        if file.is_file() and "." not in file.name:
            for line in file.read_text().replace("\\\n", " ").split("\n"):
                if (text := line.partition("#")[0].strip()) and not text.startswith("@"):
                    yield text
