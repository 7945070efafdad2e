"""`pct` as Proxmox VE 9 has it, faults included: exit codes and texts are those that a real one was seen to give.

It and what it imports load as little as can be, since tests call it thousands of times: with pathlib, typing, re,
dataclasses and their like a `pct status` took 89 ms of CPU; without them it takes 27, of which Python's start is 18.
"""

import os
import sys
import time

from dflash_ops.sandbox import containers, layout
from dflash_ops.sandbox.perl import Failure, say, take_time, through_perl
from dflash_ops.sandbox.processes import ProcessId, own_environment, own_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def main() -> "NoReturn":
    """The program pct."""
    try:
        words = through_perl(own_words(), own_environment())
        code = _dispatch(words)
    except Failure as failure:
        say(str(failure))
        code = failure.code
    except KeyboardInterrupt:
        code = 130
    take_time()
    sys.stdout.flush()
    os._exit(code)  # what Python does at its end otherwise costs 3 ms


def _dispatch(words: list[bytes]) -> int:
    if os.geteuid() != 0 or not os.path.isdir(layout.CONFIGS):
        why = "Unknown error -1" if os.geteuid() != 0 else "Connection refused"
        for number in (1, 2, 3):
            say(f"ipcc_send_rec[{number}] failed: {why}")
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
        self.name = name
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
            say("\n".join(f"Unknown option: {key}" for key in unknown))
            raise Failure("400 unable to parse option\n" + _USAGE)
        if len(self.rest) < least:
            raise Failure(f"400 not enough arguments\npct {name} <vmid> …")
        self.vmid = self._vmid() if least else 0

    def _vmid(self) -> int:
        text = os.fsdecode(self.rest.pop(0))
        numeric = text.isascii() and text.isdigit()
        if not numeric or text.startswith("0") or not 3 <= len(text) <= 9:
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
        name = "".join(config.get("hostname", f"CT{vmid}").split())
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
    from dflash_ops.sandbox import jobs  # only here and below: it costs every other call its loading

    config = dict(call.config(255))
    if containers.init_of(call.vmid):
        raise Failure(f"CT {call.vmid} already running")
    return _task("vzstart", call, config, lambda: jobs.start(call.vmid))


def _stop(call: Call) -> int:
    from dflash_ops.sandbox import jobs

    return _task("vzstop", call, _of_running(call), lambda: jobs.stop(call.vmid))


def _shutdown(call: Call) -> int:
    from dflash_ops.sandbox import jobs

    config = _of_running(call)
    timeout, force = float(call.options.get("timeout", "60")), call.options.get("forceStop", "0") != "0"
    return _task("vzshutdown", call, config, lambda: jobs.shutdown(call.vmid, timeout, force))


def _reboot(call: Call) -> int:
    from dflash_ops.sandbox import jobs

    if containers.init_of(call.vmid) is None:
        raise Failure(f"VM {call.vmid} not running")
    config = dict(call.config(255))
    return _task("vzreboot", call, config, lambda: jobs.reboot(call.vmid, float(call.options.get("timeout", "60"))))


def _of_running(call: Call) -> dict[str, str]:
    config = dict(call.config(255))
    if containers.init_of(call.vmid) is None:
        raise Failure(f"CT {call.vmid} not running")
    return config


def _task(kind: str, call: Call, config: dict[str, str], work: "Callable[[], None]") -> int:
    """Do it as a task in the foreground; a lock that the config names is seen before there is one."""
    from dflash_ops.sandbox import tasks

    if "lock" in config:
        raise Failure(f"CT is locked ({config['lock']})")
    tasks.foreground(kind, call.vmid, work)
    return 0


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
    from dflash_ops.sandbox import attach

    clear = call.options.get("keep-env", "1") == "0"
    environment = {} if clear else {**own_environment(), b"PATH": attach.SHORT_PATH}
    take_time()
    given = attach.clear_environment(environment, clear)
    # perl leaves SIGPIPE ignored in what it becomes.
    return attach.attach(str(call.vmid), identity, words, given, ignore_sigpipe=True)


def _push(call: Call) -> int:
    from dflash_ops.sandbox import transfer

    return transfer.copy(call.vmid, call.rest[0], call.rest[1], call.options, into=True)


def _pull(call: Call) -> int:
    from dflash_ops.sandbox import transfer

    return transfer.copy(call.vmid, call.rest[0], call.rest[1], call.options, into=False)


def _snapshot(call: Call) -> int:
    """What pct_snapshots.py has, by the names that it has there."""
    from dflash_ops.sandbox import pct_snapshots

    return pct_snapshots.VERBS[call.name](call)


_USAGE = "USAGE: pct <COMMAND> [ARGS] [OPTIONS]"
_COPY_OPTIONS = {"user": True, "group": True, "perms": True}
# name -> (what does it, its options and whether each takes a value, the least number of words)
_COMMANDS: "dict[str, tuple[Callable[[Call], int], dict[str, bool], int]]" = {
    "config": (_config, {"current": False, "snapshot": True}, 1),
    "delsnapshot": (_snapshot, {"force": False}, 2),
    "enter": (_enter, {"keep-env": False}, 1),
    "exec": (_exec, {"keep-env": False}, 1),
    "list": (_list, {}, 0),
    "listsnapshot": (_snapshot, {}, 1),
    "migrate": (_snapshot, {"restart": False, "online": False, "timeout": True}, 2),
    "pull": (_pull, _COPY_OPTIONS, 3),
    "push": (_push, _COPY_OPTIONS, 3),
    "reboot": (_reboot, {"timeout": True}, 1),
    "rollback": (_snapshot, {"start": False}, 2),
    "shutdown": (_shutdown, {"timeout": True, "forceStop": False}, 1),
    "snapshot": (_snapshot, {"description": True}, 2),
    "start": (_start, {"skiplock": False}, 1),
    "status": (_status, {"verbose": False}, 1),
    "stop": (_stop, {"skiplock": False}, 1),
    "unlock": (_snapshot, {}, 1),
}
