"""`lxc-attach`, and what `pct exec` becomes: run a program in a container, with LXC 6's habits.

Words are bytes throughout: they come from /proc/self/cmdline and go to execve, whatever the locale. Descriptors above
2 are inherited, as LXC does. What is printed and returned when something fails is what LXC prints and returns.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import tty
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from dflash_ops.sandbox import cgroups, containers, kernel
from dflash_ops.sandbox.processes import ProcessId

SHORT_PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
# PVE sets TERM in every container's lxc.environment.
LXC_ENVIRONMENT = {b"container": b"lxc", b"TERM": b"linux"}
_SOURCE = "../src/lxc/attach.c"
_NAMESPACES = ("user", "mnt", "uts", "ipc", "pid", "cgroup")


def own_words() -> list[bytes]:
    """The words after the program's name, as bytes: the interpreter's decoding would depend on the locale."""
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    # interpreter, its options, the script, and then what was typed
    return words[len(words) - len(sys.argv) + 1 :]


def own_environment() -> dict[bytes, bytes]:
    """The environment as it was given: Python adds LC_CTYPE to its own when the locale is C."""
    pairs = (entry.partition(b"=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def main() -> NoReturn:
    """The program lxc-attach."""
    options = _parse(own_words())
    identity = containers.init_of(int(options.name)) if options.name.isdigit() else None
    if identity is None:
        _complain(options.name, "get_attach_context: 405 Connection refused - Failed to get init pid")
        _complain(options.name, "lxc_attach: 1503 Connection refused - Failed to get attach context")
        sys.exit(1)
    environment = {} if options.clear else own_environment()
    environment.update(options.set)
    sys.exit(attach(options.name, identity, options.words, clear_environment(environment, options.clear)))


def clear_environment(environment: Mapping[bytes, bytes], clear: bool) -> dict[bytes, bytes]:
    """The environment inside: what is kept, what LXC sets, and with --clear-env the short PATH."""
    given = {b"PATH": SHORT_PATH} if clear else {}
    return {**given, **environment, **LXC_ENVIRONMENT}


def attach(
    name: str,
    init: ProcessId,
    words: list[bytes],
    environment: Mapping[bytes, bytes],
    *,
    ignore_sigpipe: bool = False,
) -> int:
    """Run `words` (none: a shell) in the container; its exit code, 128+n when signal n ended it."""
    pid = init.pid
    present = [kind for kind in _NAMESPACES if Path(f"/proc/{pid}/ns/{kind}").exists()]
    namespaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in present}
    own_user = Path("/proc/self/ns/user").stat().st_ino
    if os.fstat(namespaces["user"]).st_ino == own_user:
        os.close(namespaces.pop("user"))
    terminal = Terminal.open(pid)
    here = _working_folder()
    kernel.setns(namespaces.pop("pid"), kernel.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            # The one group that everything attached shares.
            cgroups.enter(cgroups.container_group(int(name)) / ".lxc")
            for descriptor in namespaces.values():
                kernel.setns(descriptor)
            if "user" in namespaces:
                os.setgroups([])
                os.setgid(0)
                os.setuid(0)
            if terminal is not None:
                terminal.become_controlling()
            with contextlib.suppress(OSError):
                os.chdir(here)
            kernel.drop_capabilities()
            signal.signal(signal.SIGPIPE, signal.SIG_IGN if ignore_sigpipe else signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            _execute(name, words or _shell(), environment)
        except BaseException as error:
            _complain(name, f"do_attach: 1409 {error}")
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    if terminal is not None:
        terminal.relay(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


class _Options(NamedTuple):
    name: str
    words: list[bytes]
    clear: bool
    set: dict[bytes, bytes]


def _parse(words: list[bytes]) -> _Options:
    name, clear, variables = "", False, dict[bytes, bytes]()
    rest = list(words)
    while rest and rest[0].startswith(b"-"):
        word = rest.pop(0)
        if word == b"--":
            break
        option, equals, value = word.partition(b"=")
        if option in (b"-n", b"--name", b"-v", b"--set-var"):
            if not equals:
                if not rest:
                    _usage(f"option requires an argument -- '{os.fsdecode(option).lstrip('-')}'")
                value = rest.pop(0)
            if option in (b"-n", b"--name"):
                name = os.fsdecode(value)
            else:
                key, _, content = value.partition(b"=")
                variables[key] = content
        elif option.startswith(b"-n") and len(option) > 2:
            name = os.fsdecode(word[2:])
        elif option in (b"--clear-env", b"--keep-env"):
            clear = option == b"--clear-env"
        elif option not in (b"-q", b"--quiet"):
            _usage(f"unrecognized option '{os.fsdecode(word)}'")
    if not name and rest:
        name = os.fsdecode(rest.pop(0))
    if not name:
        _usage("missing container name, use --name option")
    return _Options(name, rest, clear, variables)


def _usage(message: str) -> NoReturn:
    sys.stderr.write(f"lxc-attach: {message}\n")
    sys.exit(1)


def _complain(name: str, message: str) -> None:
    # Straight to the descriptor: the text may hold what the locale can't encode.
    text = f"lxc-attach: {name}: {_SOURCE}: {message}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "surrogateescape"))


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def _shell() -> list[bytes]:
    return [b"/bin/bash" if Path("/bin/bash").exists() else b"/bin/sh"]


def _execute(name: str, words: list[bytes], environment: Mapping[bytes, bytes]) -> NoReturn:
    try:
        if not words[0]:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.execvpe(words[0], words, environment)
    except OSError as error:
        message = f'lxc_attach_run_command: 1841 {error.strerror} - Failed to exec "{os.fsdecode(words[0])}"'
        _complain(name, message)
        codes = {errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.ENOEXEC: 126, errno.EPERM: 126}
        os._exit(codes.get(error.errno or 0, 255))


class Terminal:
    """A pseudo-terminal of the container's own, standing in for those of descriptors 0, 1, 2 that are terminals."""

    def __init__(self, master: int, name: str, descriptors: list[int]) -> None:
        self.master = master
        self.name = name
        self.descriptors = descriptors

    @classmethod
    def open(cls, init_pid: int) -> "Terminal | None":
        descriptors = [number for number in (0, 1, 2) if os.isatty(number)]
        if not descriptors:
            return None
        root = Path(f"/proc/{init_pid}/root")
        master = os.open(root / "dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(master, kernel.TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, kernel.TIOCGPTN, b"\0" * 4))[0]
        # Opened by the machine's root; it has to be the container's root that owns it.
        os.chown(root / f"dev/pts/{number}", root.stat().st_uid, -1)
        return cls(master, f"/dev/pts/{number}", descriptors)

    def become_controlling(self) -> None:
        """In the child, inside the container: the slave becomes its terminal."""
        os.setsid()
        slave = os.open(self.name, os.O_RDWR)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for descriptor in self.descriptors:
            os.dup2(slave, descriptor)
        os.close(slave)
        os.close(self.master)

    def relay(self, child: int) -> None:
        """Copy bytes and window sizes between the outer terminal and ours until the child's side is closed."""
        outside = self.descriptors[0]

        def resized(_signal: int, _frame: object) -> None:
            self._copy_size(outside)

        signal.signal(signal.SIGWINCH, resized)
        self._copy_size(outside)
        saved = termios.tcgetattr(outside)
        reading = [self.master] + ([0] if 0 in self.descriptors else [])
        output = 1 if 1 in self.descriptors else outside
        try:
            tty.setraw(outside)
            while True:
                for ready in select.select(reading, [], [], 0.2)[0]:
                    if ready == self.master:
                        data = _read(self.master)
                        if not data:
                            return
                        _write_all(output, data)
                    else:
                        data = _read(0)
                        if data:
                            _write_all(self.master, data)
                        else:
                            reading.remove(0)
                if self.ended(child) and not select.select([self.master], [], [], 0)[0]:
                    return
        finally:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(outside, termios.TCSADRAIN, saved)

    @staticmethod
    def ended(child: int) -> bool:
        """Whether the child has ended; it stays to be waited for."""
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _copy_size(self, outside: int) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(outside, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""  # EIO: the other side of a pseudo-terminal is closed


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
