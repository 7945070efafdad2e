"""Where a command runs, what it is, and the one place that turns it into shell text.

A `Command` is words, never shell text. `line(place, command)` knows ssh, sudo and the container: it wraps the words for
the place and makes one text of them, once, because the hypervisor's login shell parses the line once. Words are `str`;
bytes that are not UTF-8 travel as surrogate escapes, as in `os.fsdecode`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from dflash_ops import shell_text

T = TypeVar("T")

# `--clear-env` and `pct exec` leave PATH without /usr/local and no HOME at all, so both are always said.
CONTAINER_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}

# The whole line is one argument of the login shell, and Linux allows one argument 128 KiB.
MAX_LINE_BYTES = 120_000

# Where Proxmox VE has them, and as a sudoers file names them.
PCT, LXC_ATTACH = "/usr/sbin/pct", "/usr/bin/lxc-attach"
_SUDO = ("sudo", "-n", "--")
# pct decodes its words by the locale; `env_reset` of sudo lets LC_ALL through.
_UTF8 = ("env", "LC_ALL=C.UTF-8")

# Becomes the command whose words it has.
_BECOME = """
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.stderr.write("dflash-ops: %s: %s\\n" % (os.fsdecode(words[0]), error.strerror))
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
# Reads its own words from stdin; what follows there is the command's. Byte-exact reads: one byte too many would be lost
# to the command.
_WORDS_FROM_STDIN = (
    """
import os, sys
def take(n):
    got = b""
    while len(got) < n:
        part = os.read(0, n - len(got))
        if not part:
            sys.exit("dflash-ops: the link ended before the command had arrived")
        got += part
    return got
words = take(int(take(10))).split(b"\\0")
"""
    + _BECOME
)
_WORDS_FROM_HEX = "import os, sys\nwords = [bytes.fromhex(word) for word in sys.argv[1:]]\n" + _BECOME


@dataclass(frozen=True)
class Local:
    """This machine."""

    def __str__(self) -> str:
        return "this machine"


@dataclass(frozen=True)
class Api:
    """The Proxmox VE API of a host. address: None for the host's own; user: the token's, with its realm (bot@pve);
    token_env, token_file: the variable, or the file of mode 0600, that holds the token's secret; ca: a file of
    certificates; fingerprint: the server certificate's SHA-256, "AA:BB:..."; node: its name in the cluster."""

    address: str | None = None
    port: int = 8006
    user: str | None = None
    token_name: str | None = None
    token_env: str = "DFLASH_OPS_PVE_TOKEN"
    token_file: Path | None = None
    ca: Path | None = None
    fingerprint: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class Host:
    """A hypervisor. `address` is a host name, an address, or an alias of ~/.ssh/config; ssh_config: a file read instead
    of that one. user: who logs in; None: whom ssh's configuration says."""

    name: str
    address: str
    port: int | None = None
    user: str | None = None
    key: Path | None = None
    known_hosts: Path | None = None
    ssh_config: Path | None = None
    api: Api | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Pins:
    """What a container's environment has instead of what a release's lock says. torch: a version (`2.12.1+cu126`), or
    another build of the locked one (`cu126`, `cpu`); torch_index: the package index that has it; transformers: a
    version."""

    torch: str | None = None
    torch_index: str | None = None
    transformers: str | None = None


@dataclass(frozen=True)
class Container:
    """A container on a host. `path` holds releases, runs, shared and env; `gpus` are the host's indices of its GPUs, in
    the order in which the container sees them (empty: none are declared, nothing is locked). env_check: whether a start
    compares the environment with what the release wants. user: whose the releases in there are, and as whom `exec` and
    `shell` work (None: root); runs are root's. name: the inventory's."""

    host: Host
    vmid: int
    path: str = "/opt/dflash"
    python: str = "python3"
    gpus: tuple[int, ...] = ()
    via: Literal["lxc-attach", "pct"] = "lxc-attach"
    pins: Pins = Pins()
    env_check: bool = True
    user: str | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.host.name} / container {self.vmid}"


Place = Local | Host | Container


@dataclass(frozen=True)
class Command:
    """argv: the program and its words; stdin: bytes for it, then end of file.

    host_prefix: wrapped round the command on the host, before it enters the container: flock and its words. root: on a
    host, as root by sudo where the login user is another and sudo lets them do everything, else as that user.
    """

    argv: tuple[str, ...]
    stdin: bytes = b""
    host_prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    root: bool = False

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("a command needs at least one word")
        if any("\0" in word for word in (*self.argv, *self.host_prefix)):
            raise ValueError("a word of a command can't hold a NUL byte")


@dataclass(frozen=True)
class Query(Generic[T]):
    """A question and the reading of its answer, side by side; both pure."""

    command: Command
    parse: Callable[["Result"], T]


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code (128+n for signal n) and its bytes."""

    place: Place
    command: Command
    code: int
    out: bytes
    err: bytes

    @property
    def last_words(self) -> str:
        """The last non-empty line of stderr, else of stdout: what a user needs first."""
        for stream in (self.err, self.out):
            lines = [text.strip() for text in stream.decode("utf-8", "replace").split("\n") if text.strip()]
            if lines:
                return lines[-1]
        return f"exit code {self.code}, no output"


@dataclass(frozen=True)
class Sudo:
    """What a login user who is not root may run as root on a host, by sudo and without a password."""

    everything: bool = False
    pct: bool = False
    attach: bool = False


@dataclass(frozen=True)
class Line:
    """Shell text for a place, and the bytes that must precede the command's own stdin."""

    text: bytes
    stdin_head: bytes = b""


def pct(*words: str) -> Command:
    """A call of pct on the host, as root by sudo where that is needed."""
    return Command(("pct", *words), root=True)


def line(
    place: "Host | Container", command: Command, sudo: Sudo | None = None, *, token: str = "", terminal: bool = False
) -> Line:
    """The shell text that runs `command` at `place`. sudo: what the login user may do; None for root. token: a mark for
    the beginning of its outputs, see shell_text. terminal: for a command whose stdin is the user's terminal.

    Words that pct would not pass as they are go by stdin, and so do words too long for one line. ValueError when a
    host's own command is too long: there is nothing there to read it from stdin.
    """
    if isinstance(place, Host):
        text = shell_text.text(_on_host(command, sudo), token)
        if len(text) > MAX_LINE_BYTES:
            raise ValueError(f"a command for {place} is {len(text)} bytes long; {MAX_LINE_BYTES} are allowed")
        return Line(text)
    outside, inside = _entry(place, command.host_prefix, sudo)
    environment = {**CONTAINER_ENVIRONMENT, "PATH": _path(place), **command.env}
    entry = (*outside, "env", "-i", *(f"{key}={value}" for key, value in environment.items()), *inside)
    if place.via == "lxc-attach" or all(map(str.isascii if _loses_locale(sudo) else _is_utf8, command.argv)):
        text = shell_text.text((*entry, *command.argv), token)
        if len(text) <= MAX_LINE_BYTES:
            return Line(text)
    if terminal:
        hexed = (_encode(word).hex() for word in command.argv)
        return Line(shell_text.text((*entry, place.python, "-c", _WORDS_FROM_HEX, *hexed), token))
    packed = b"\0".join(map(_encode, command.argv))
    text = shell_text.text((*entry, place.python, "-c", _WORDS_FROM_STDIN), token)
    return Line(text, b"%010d" % len(packed) + packed)


def _on_host(command: Command, sudo: Sudo | None) -> tuple[str, ...]:
    words = (*command.host_prefix, *_with_env(command.argv, command.env))
    if not command.root:
        return words
    if command.argv[0] != "pct":
        return (*_SUDO, *words) if sudo and sudo.everything else words
    if sudo is None or sudo.everything:
        return (*(_SUDO if sudo else ()), *_UTF8, *words)
    return (*_UTF8, *_SUDO, PCT, *command.argv[1:])


def _entry(container: Container, prefix: tuple[str, ...], sudo: Sudo | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words before a command that enter its container, and those in there. sudo closes descriptors, so that a lock
    taken before it would be lost; where it allows pct and lxc-attach alone, the lock is one of the container."""
    program, *rest = _ATTACH[container.via]
    words = tuple(word.format(container.vmid) for word in rest)
    locale = _UTF8 if container.via == "pct" else ()
    if sudo is None or sudo.everything:
        return (*(_SUDO if sudo else ()), *prefix, *locale, program, *words), ()
    return (*locale, *_SUDO, PCT if container.via == "pct" else LXC_ATTACH, *words), prefix


_ATTACH = {"lxc-attach": ("lxc-attach", "-n", "{}", "--clear-env", "--"), "pct": ("pct", "exec", "{}", "--")}


def _loses_locale(sudo: Sudo | None) -> bool:
    """Whether what sudo lets through of the environment is for its configuration to say."""
    return sudo is not None and not sudo.everything


def _path(container: Container) -> str:
    """PATH in the container: `python` there is the trainer's, and so are the programs beside it."""
    folder, slash, _ = container.python.rpartition("/")
    return f"{folder}:{CONTAINER_ENVIRONMENT['PATH']}" if slash else CONTAINER_ENVIRONMENT["PATH"]


def _with_env(argv: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    return ("env", *(f"{key}={value}" for key, value in env.items()), *argv) if env else argv


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_utf8(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
