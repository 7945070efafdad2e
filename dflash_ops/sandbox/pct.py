"""`pct` as Proxmox VE 9 has it, its faults included: what facts it follows is told where it does something odd.

The words of a real pct pass through perl's decoding by locale, so bytes are lost on the way (`through_perl`).
"""

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NoReturn

from dflash_ops.sandbox import attach, containers, kernel, layout
from dflash_ops.sandbox.processes import ProcessId

LOCK_SECONDS = 10.0
_BEGAN = time.monotonic()


class Failure(Exception):
    """The end of a pct call: text for stderr and the exit code, which perl's `die` takes from errno, else 255."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.code = code


def main() -> NoReturn:
    """The program pct."""
    try:
        words = through_perl(attach.own_words(), attach.own_environment())
        code = _dispatch(words)
    except Failure as failure:
        _say(str(failure))
        code = failure.code
    except KeyboardInterrupt:
        code = 130
    _take_time()
    sys.stdout.flush()
    sys.exit(code)


def through_perl(words: list[bytes], environment: dict[bytes, bytes]) -> list[bytes]:
    """What arrives of the words: perl decodes them by the locale and encodes them again."""
    locale = next((environment[name] for name in (b"LC_ALL", b"LC_CTYPE", b"LANG") if environment.get(name)), b"C")
    utf8 = re.search(rb"utf-?8", locale, re.IGNORECASE) is not None
    return [_decode_utf8(word) if utf8 else re.sub(rb"[\x80-\xff]", "\ufffd".encode(), word) for word in words]


def _decode_utf8(word: bytes) -> bytes:
    """Valid UTF-8 as it is; a start byte with the continuation bytes it may claim becomes one U+FFFD, as in perl."""
    if word.isascii():
        return word
    out, at = bytearray(), 0
    while at < len(word):
        first = word[at]
        claimed = 1 if first < 0xC0 else (8 - (first ^ 0xFF).bit_length() if first < 0xFF else 13)
        end = at + 1
        while end < min(len(word), at + claimed) and 0x80 <= word[end] < 0xC0:
            end += 1
        piece = word[at:end]
        out += piece.decode("utf-8", "ignore").encode() or "\ufffd".encode()
        at = end
    return bytes(out)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode("utf-8", "surrogateescape"))


def _take_time() -> None:
    """A real call costs 0.6 s whatever it does; `up --pct-delay` says how long ours takes at least."""
    with contextlib.suppress(OSError, ValueError):
        rest = float(layout.PCT_DELAY.read_text()) - (time.monotonic() - _BEGAN)
        if rest > 0:
            time.sleep(rest)


def _dispatch(words: list[bytes]) -> int:
    if os.geteuid() != 0 or not layout.CONFIGS.is_dir():
        why = "Unknown error -1" if os.geteuid() != 0 else "Connection refused"
        for number in (1, 2, 3):
            _say(f"ipcc_send_rec[{number}] failed: {why}")
        raise Failure(f"Unable to load access control list: {why}", 255 if os.geteuid() != 0 else 111)
    if not words:
        raise Failure("ERROR: no command specified\n" + _USAGE)
    typed = os.fsdecode(words[0])
    # Subcommands may be abbreviated as long as only one fits.
    fits = [typed] if typed in _COMMANDS else [name for name in _COMMANDS if name.startswith(typed)]
    if len(fits) != 1:
        raise Failure(f"ERROR: unknown command 'pct {typed}'\n" + _USAGE)
    verb, allowed, least = _COMMANDS[fits[0]]
    call = Call(fits[0], words[1:], allowed, least)
    return verb(call)


class Call:
    """The words of one call, taken apart as PVE does: options anywhere until `--`, one dash or two, abbreviated."""

    def __init__(self, name: str, words: list[bytes], allowed: dict[str, bool], least: int) -> None:
        self.options: dict[str, str] = {}
        self.rest: list[bytes] = []
        unknown: list[str] = []
        words = list(words)
        while words:
            word = words.pop(0)
            if word == b"--":
                self.rest += words
                break
            if not word.startswith(b"-") or word == b"-":
                self.rest.append(word)
                continue
            key, equals, value = os.fsdecode(word).lstrip("-").partition("=")
            fits = [key] if key in allowed else [option for option in allowed if option.lower().startswith(key.lower())]
            if len(fits) != 1:
                unknown.append(key)
                continue
            takes_value = allowed[fits[0]]
            if not equals and takes_value:
                value = os.fsdecode(words.pop(0)) if words else ""
            elif not equals:
                # A switch takes a 0 or 1 that follows.
                value = os.fsdecode(words.pop(0)) if words and words[0] in (b"0", b"1") else "1"
            self.options[fits[0]] = value
        if unknown:
            _say("\n".join(f"Unknown option: {key}" for key in unknown))
            raise Failure("400 unable to parse option\n" + _USAGE)
        if len(self.rest) < least:
            raise Failure(f"400 not enough arguments\npct {name} <vmid> …")
        self.vmid = self._vmid() if least else 0

    def _vmid(self) -> int:
        text = os.fsdecode(self.rest.pop(0))
        if not re.fullmatch(r"[1-9]\d{2,8}", text, re.ASCII):
            numeric = re.fullmatch(r"\d+", text, re.ASCII)
            why = (
                "value must have a minimum value of 100" if numeric else f"type check ('integer') failed - got '{text}'"
            )
            raise Failure(f"400 Parameter verification failed.\nvmid: {why}\n{_USAGE}", 2)
        return int(text)

    def config(self, code: int) -> list[tuple[str, str]]:
        """The container's config; a missing one ends the call with the code that this subcommand happens to give."""
        config = containers.read_config(self.vmid)
        if config is None:
            raise Failure(f"Configuration file 'nodes/{layout.NODE}/lxc/{self.vmid}.conf' does not exist", code)
        return config


def _list(_: Call) -> int:
    ids = containers.configured()
    row = "%-10s %-10s %-12s %-20s"
    lines = [row % ("VMID", "Status", "Lock", "Name")] if ids else []  # without containers not even the header
    for vmid in ids:
        config = dict(containers.read_config(vmid) or [])
        name = re.sub(r"\s", "", config.get("hostname", f"CT{vmid}"))
        lines.append(row % (vmid, _status_word(vmid), config.get("lock", ""), name))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _status_word(vmid: int) -> str:
    return "running" if containers.init_of(vmid) else "stopped"


def _status(call: Call) -> int:
    config = dict(call.config(2))
    word = _status_word(call.vmid)
    if call.options.get("verbose", "0") == "0":
        sys.stdout.write(f"status: {word}\n")
        return 0
    init = containers.init_of(call.vmid)
    values = {
        "cpus": config.get("cores", "1"),
        "maxmem": str(int(config.get("memory", "512")) * 1024 * 1024),
        "name": config.get("hostname", f"CT{call.vmid}"),
        "status": word,
        "type": "lxc",
        "vmid": str(call.vmid),
    }
    if init is not None:
        ticks = os.sysconf("SC_CLK_TCK")
        values["pid"] = str(init.pid)
        values["uptime"] = str(int(time.clock_gettime(time.CLOCK_BOOTTIME) - init.start / ticks))
    if "lock" in config:
        values["lock"] = config["lock"]
    sys.stdout.write("".join(f"{key}: {value}\n" for key, value in sorted(values.items())))
    return 0


def _config(call: Call) -> int:
    pairs = call.config(2)
    plain = sorted(pair for pair in pairs if not pair[0].startswith("lxc."))
    raw = [pair for pair in pairs if pair[0].startswith("lxc.")]
    sys.stdout.write("".join(f"{key}: {value}\n" for key, value in [*plain, *raw]))
    return 0


def _start(call: Call) -> int:
    from dflash_ops.sandbox import container  # only here and below: it costs every other call its loading

    config = dict(call.config(255))
    if containers.init_of(call.vmid):
        raise Failure(f"CT {call.vmid} already running")
    with _locked(call.vmid):
        if "lock" in config:
            raise Failure(f"CT is locked ({config['lock']})")
        try:
            container.start(call.vmid)
        except (container.StartError, OSError) as error:
            raise Failure(f"startup for container '{call.vmid}' failed: {error}") from error
    return 0


def _stop(call: Call) -> int:
    from dflash_ops.sandbox import container

    return _end(call, lambda: container.stop(call.vmid))


def _shutdown(call: Call) -> int:
    from dflash_ops.sandbox import container

    def end() -> None:
        if not container.shutdown(call.vmid, float(call.options.get("timeout", "60"))):
            if call.options.get("forceStop", "0") == "0":
                raise Failure("container did not stop")
            container.stop(call.vmid)

    return _end(call, end)


def _end(call: Call, end: Callable[[], None]) -> int:
    config = dict(call.config(255))
    if containers.init_of(call.vmid) is None:
        raise Failure(f"CT {call.vmid} not running")
    with _locked(call.vmid):
        if "lock" in config:
            raise Failure(f"CT is locked ({config['lock']})")
        end()
    return 0


def _reboot(call: Call) -> int:
    if containers.init_of(call.vmid) is None:
        raise Failure(f"VM {call.vmid} not running")
    _shutdown(call)
    return _start(call)


def _running(call: Call) -> ProcessId:
    identity = containers.init_of(call.vmid)
    if identity is None:
        raise Failure(f"container '{call.vmid}' not running!")
    return identity


def _exec(call: Call) -> int:
    call.config(2)
    identity = _running(call)
    if not call.rest:
        raise Failure("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 271.")
    return _attach(call, identity, call.rest)


def _enter(call: Call) -> int:
    call.config(2)
    return _attach(call, _running(call), [])


def _attach(call: Call, identity: ProcessId, words: list[bytes]) -> int:
    clear = call.options.get("keep-env", "1") == "0"
    environment = {} if clear else {**attach.own_environment(), b"PATH": attach.SHORT_PATH}
    _take_time()
    given = attach.clear_environment(environment, clear)
    # perl leaves SIGPIPE ignored in what it becomes.
    return attach.attach(str(call.vmid), identity, words, given, ignore_sigpipe=True)


def _push(call: Call) -> int:
    return _copy(call, into=True)


def _pull(call: Call) -> int:
    return _copy(call, into=False)


def _copy(call: Call, *, into: bool) -> int:
    if containers.init_of(call.vmid) is None:
        # Also for a container that does not exist.
        raise Failure(f"can only {'push files to' if into else 'pull files from'} a running CT")
    with _locked(call.vmid):
        worker = os.fork()
        if worker == 0:
            try:
                _copy_one(call, into)
            except BaseException as error:
                # The worker's error is printed, and then the call exits 0 all the same.
                _say(str(error))
                os._exit(1)
            os._exit(0)

        def forward(number: int, _frame: object) -> None:
            os.kill(worker, number)

        previous = signal.signal(signal.SIGTERM, forward)
        os.waitpid(worker, 0)
        signal.signal(signal.SIGTERM, previous)
    return 0


def _copy_one(call: Call, into: bool) -> None:
    """The worker: never checks what a write returned, so a full disk goes unnoticed."""
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    source, destination = call.rest[0], call.rest[1]
    umask = os.umask(0)
    os.umask(umask)
    if into:
        reader = _open(source, os.O_RDONLY, "reading")
        _enter_files(call.vmid)
        # Created or truncated in place, through symlinks, before the first byte is there.
        writer = _open(_below_root(destination), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "writing")
        _set_rights(call, writer)
    else:
        # The destination is truncated before the source is known to exist.
        writer = _open(destination, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "writing")
        _set_rights(call, writer)
        _enter_files(call.vmid)
        reader = _open(_below_root(source), os.O_RDONLY, "reading")
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:
            return  # a folder: no message, an empty file
        if not data:
            return
        with contextlib.suppress(OSError):
            os.write(writer, data)


def _interrupted(*_: object) -> NoReturn:
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


def _set_rights(call: Call, descriptor: int) -> None:
    """chmod before chown, so that set-id bits are lost to the chown."""
    if "perms" in call.options:
        text = call.options["perms"]
        try:
            mode = int(text, 16) if text.startswith("0x") else int(text, 8)
        except ValueError:
            raise Failure(f"invalid mode: '{text}'") from None
        os.fchmod(descriptor, mode)
    user, group = (call.options.get(name) for name in ("user", "group"))
    if user is not None or group is not None:
        try:
            os.fchown(descriptor, _identity("passwd", user), _identity("group", group))
        except OSError as error:
            raise Failure(f"failed to change file owner: {error.strerror}") from error


def _identity(table: str, name: str | None) -> int:
    """The number for a name in the container's own table; -1 (unchanged) for None."""
    if name is None or name.isdigit():
        return -1 if name is None else int(name)
    for row in Path("/etc", table).read_text(errors="replace").split("\n"):
        fields = row.split(":")
        if fields[0] == name and len(fields) > 2:
            return int(fields[2])
    raise Failure(f"{'user' if table == 'passwd' else 'group'} '{name}' not found")


@contextlib.contextmanager
def _locked(vmid: int) -> Generator[None]:
    """The container's config lock: waits ten seconds at most, and says so on stderr."""
    layout.LOCKS.mkdir(parents=True, exist_ok=True)
    path = layout.LOCKS / f"pve-config-{vmid}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.write(2, b"trying to acquire lock...")
            _wait_for_lock(descriptor, path)
            os.write(2, b" OK\n")
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    def expired(*_: object) -> NoReturn:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, LOCK_SECONDS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except TimeoutError:
        raise Failure(f"can't lock file '{path}' - got timeout", 4) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


_USAGE = "USAGE: pct <COMMAND> [ARGS] [OPTIONS]"
_COPY_OPTIONS = {"user": True, "group": True, "perms": True}
# name -> (what does it, its options and whether each takes a value, the least number of words)
_COMMANDS: dict[str, tuple[Callable[[Call], int], dict[str, bool], int]] = {
    "config": (_config, {"current": False, "snapshot": True}, 1),
    "enter": (_enter, {"keep-env": False}, 1),
    "exec": (_exec, {"keep-env": False}, 1),
    "list": (_list, {}, 0),
    "pull": (_pull, _COPY_OPTIONS, 3),
    "push": (_push, _COPY_OPTIONS, 3),
    "reboot": (_reboot, {"timeout": True}, 1),
    "shutdown": (_shutdown, {"timeout": True, "forceStop": False}, 1),
    "start": (_start, {"skiplock": False}, 1),
    "status": (_status, {"verbose": False}, 1),
    "stop": (_stop, {"skiplock": False}, 1),
}
