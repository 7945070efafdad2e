"""`lxc-attach`, and what `pct exec` becomes: run a program in a container, with LXC 6's habits.

Words are bytes throughout: they come from /proc/self/cmdline and go to execve, whatever the locale. Descriptors above
2 are inherited, as LXC does. What is printed and returned when something fails is what LXC prints and returns.
"""

import errno
import os
import sys

from dflash_ops.sandbox import cgroups, containers, kernel
from dflash_ops.sandbox.processes import ProcessId, own_environment, own_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from dflash_ops.sandbox.terminal import Terminal

SHORT_PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
# PVE sets TERM in every container's lxc.environment.
LXC_ENVIRONMENT = {b"container": b"lxc", b"TERM": b"linux"}
_SOURCE = "../src/lxc/attach.c"
_NAMESPACES = ("user", "mnt", "uts", "ipc", "pid", "cgroup")


def main() -> "NoReturn":
    """The program lxc-attach."""
    name, words, clear, variables = _parse(own_words())
    identity = containers.init_of(int(name)) if name.isdigit() else None
    if identity is None:
        _complain(name, "get_attach_context: 405 Connection refused - Failed to get init pid")
        _complain(name, "lxc_attach: 1503 Connection refused - Failed to get attach context")
        sys.exit(1)
    environment = {} if clear else own_environment()
    # At once: Python would first give SIGINT back its default.
    os._exit(attach(name, identity, words, clear_environment({**environment, **variables}, clear)))


def clear_environment(environment: dict[bytes, bytes], clear: bool) -> dict[bytes, bytes]:
    """The environment inside: what is kept, what LXC sets, and with --clear-env the short PATH."""
    given = {b"PATH": SHORT_PATH} if clear else {}
    return {**given, **environment, **LXC_ENVIRONMENT}


def attach(
    name: str,
    init: ProcessId,
    words: list[bytes],
    environment: dict[bytes, bytes],
    *,
    ignore_sigpipe: bool = False,
) -> int:
    """Run `words` (none: a shell) in the container; its exit code, 128+n when signal n ended it."""
    pid = init.pid
    present = [kind for kind in _NAMESPACES if os.path.exists(f"/proc/{pid}/ns/{kind}")]
    namespaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in present}
    if os.fstat(namespaces["user"]).st_ino == os.stat("/proc/self/ns/user").st_ino:
        os.close(namespaces.pop("user"))
    terminal = _terminal(pid)
    here = _working_folder()
    kernel.setns(namespaces.pop("pid"), kernel.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            # The one group that everything attached shares.
            cgroups.enter(f"{cgroups.container_group(int(name))}/.lxc")
            for descriptor in namespaces.values():
                kernel.setns(descriptor)
            if "user" in namespaces:
                os.setgroups([])
                os.setgid(0)
                os.setuid(0)
            if terminal is not None:
                terminal.become_controlling()
            try:
                os.chdir(here)
            except OSError:
                pass
            kernel.drop_capabilities()
            kernel.default_signals(kernel.SIGPIPE, kernel.SIGXFSZ)  # Python ignores them
            if ignore_sigpipe:
                kernel.ignore_signals(kernel.SIGPIPE)
            _execute(name, words or _shell(), environment)
        except BaseException as error:
            _complain(name, f"do_attach: 1409 {error}")
        os._exit(1)
    kernel.ignore_signals(kernel.SIGINT, kernel.SIGQUIT)
    if terminal is not None:
        terminal.relay(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _terminal(init_pid: int) -> "Terminal | None":
    """A terminal of the container's, when we have one."""
    descriptors = [number for number in (0, 1, 2) if os.isatty(number)]
    if not descriptors:
        return None
    from dflash_ops.sandbox.terminal import Terminal

    return Terminal.open(init_pid, descriptors)


def _parse(words: list[bytes]) -> tuple[str, list[bytes], bool, dict[bytes, bytes]]:
    """The container's name, the words of the command, whether the environment is to be cleared, variables to set."""
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
    return name, rest, clear, variables


def _usage(message: str) -> "NoReturn":
    sys.stderr.write(f"lxc-attach: {message}\n")
    sys.exit(1)


def _complain(name: str, message: str) -> None:
    # Straight to the descriptor: the text may hold what the locale can't encode.
    text = f"lxc-attach: {name}: {_SOURCE}: {message}\n"
    try:
        os.write(2, text.encode("utf-8", "surrogateescape"))
    except OSError:
        pass


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _shell() -> list[bytes]:
    return [b"/bin/bash" if os.path.exists("/bin/bash") else b"/bin/sh"]


def _execute(name: str, words: list[bytes], environment: dict[bytes, bytes]) -> "NoReturn":
    """As os.execvpe does, which would first load `warnings`, and that from the container's files."""
    program, search = words[0], environment.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    places = [program] if b"/" in program else [os.path.join(folder, program) for folder in search]
    errors: list[OSError] = []
    if not program:
        places = []
        errors.append(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    for place in places:
        try:
            os.execve(place, words, environment)
        except OSError as error:
            errors.append(error)
    # One that is there and can't be executed says more than the places where there is none.
    there = [error for error in errors if error.errno not in (errno.ENOENT, errno.ENOTDIR)]
    error = there[0] if there else errors[-1]
    _complain(name, f'lxc_attach_run_command: 1841 {error.strerror} - Failed to exec "{os.fsdecode(program)}"')
    codes = {errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.ENOEXEC: 126, errno.EPERM: 126}
    os._exit(codes.get(error.errno or 0, 255))
