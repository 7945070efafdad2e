"""`pct push` and `pct pull`: one file, in place, by a worker whose failure is printed and then forgotten.

Tests make a push go wrong, silently and with exit code 0 as a real one does: while the file PUSH_FAULT is there, a push
ends after `cut N` bytes, or changes the byte at `flip N`.
"""

import os
import signal

from dflash_ops.sandbox import containers, kernel, layout, tasks
from dflash_ops.sandbox.perl import ConfigLock, Failure, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PUSH_FAULT = f"{layout.SUPPORT}/push-fault"


def copy(vmid: int, source: bytes, destination: bytes, options: dict[str, str], *, into: bool) -> int:
    """Copy a file into the container or out of it. The exit code is 0 whatever becomes of it, once the container runs
    and its lock is ours."""
    if containers.init_of(vmid) is None:
        # Also for a container that does not exist.
        raise Failure(f"can only {'push files to' if into else 'pull files from'} a running CT")
    with ConfigLock(vmid):
        worker = os.fork()
        if worker == 0:
            try:
                kind = "push_file" if into else "pull_file"
                tasks.foreground(kind, vmid, lambda: _copy_one(vmid, source, destination, options, into))
            except BaseException as error:
                # The worker's error is printed, and then the call exits 0 all the same.
                say(str(error))
                os._exit(1)
            os._exit(0)

        def forward(number: int, _frame: object) -> None:
            os.kill(worker, number)

        previous = signal.signal(signal.SIGTERM, forward)
        os.waitpid(worker, 0)
        signal.signal(signal.SIGTERM, previous)
    return 0


def _copy_one(vmid: int, source: bytes, destination: bytes, options: dict[str, str], into: bool) -> None:
    """The worker: never checks what a write returned, so a full disk goes unnoticed."""
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    harm, at = None, 0
    if into:
        harm, at = _fault()
        reader = _open(source, os.O_RDONLY, "reading")
        _enter_files(vmid)
        # Created or truncated in place, through symlinks, before the first byte is there.
        writer = _open(_below_root(destination), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "writing")
        _set_rights(options, writer)
    else:
        # The destination is truncated before the source is known to exist.
        writer = _open(destination, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "writing")
        _set_rights(options, writer)
        _enter_files(vmid)
        reader = _open(_below_root(source), os.O_RDONLY, "reading")
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:
            return  # a folder: no message, an empty file
        if harm is not None:
            data = _harmed(data, harm, at)
            at -= len(data)
        if not data:
            return
        try:
            os.write(writer, data)
        except OSError:
            pass


def _fault() -> tuple[str | None, int]:
    try:
        with open(PUSH_FAULT) as file:
            harm, at = file.read().split()
    except FileNotFoundError:
        return None, 0
    return harm, int(at)


def _harmed(data: bytes, harm: str, at: int) -> bytes:
    """A part of the file, `at` bytes before the place of the fault."""
    if harm == "cut":
        return data[: max(at, 0)]
    if 0 <= at < len(data):
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data


def _interrupted(*_: object) -> "NoReturn":
    raise Failure("received interrupt")


def _open(path: bytes, flags: int, purpose: str) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise Failure(f"failed to open {os.fsdecode(path)} for {purpose}: {error.strerror}") from error


def _below_root(path: bytes) -> bytes:
    return path if path.startswith(b"/") else b"/" + path


def _enter_files(vmid: int) -> None:
    """See files as the container does; as its user 0 when its config says `unprivileged: 1`."""
    init = containers.init_of(vmid)
    if init is None:
        raise Failure(f"container '{vmid}' not running!")
    files = os.open(f"/proc/{init.pid}/ns/mnt", os.O_RDONLY)
    if containers.is_unprivileged(vmid):
        kernel.setns(os.open(f"/proc/{init.pid}/ns/user", os.O_RDONLY))
        kernel.setns(files)
        os.setgroups([])
        os.setgid(0)
        os.setuid(0)
    else:
        kernel.setns(files)


def _set_rights(options: dict[str, str], descriptor: int) -> None:
    """chmod before chown, so that set-id bits are lost to the chown."""
    if "perms" in options:
        text = options["perms"]
        try:
            mode = int(text, 16) if text.startswith("0x") else int(text, 8)
        except ValueError:
            raise Failure(f"invalid mode: '{text}'") from None
        os.fchmod(descriptor, mode)
    user, group = (options.get(name) for name in ("user", "group"))
    if user is not None or group is not None:
        try:
            os.fchown(descriptor, _identity("passwd", user), _identity("group", group))
        except OSError as error:
            raise Failure(f"failed to change file owner: {error.strerror}") from error


def _identity(table: str, name: str | None) -> int:
    """The number for a name in the container's own table; -1 (unchanged) for None."""
    if name is None or name.isdigit():
        return -1 if name is None else int(name)
    with open(f"/etc/{table}", errors="replace") as file:
        rows = file.read().split("\n")
    for row in rows:
        fields = row.split(":")
        if fields[0] == name and len(fields) > 2:
            return int(fields[2])
    raise Failure(f"{'user' if table == 'passwd' else 'group'} '{name}' not found")
