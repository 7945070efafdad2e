"""What a login user who is not root may do on a host: the question to sudo, the reading of its answer, and what to tell
its owner. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from dflash_ops.command import LXC_ATTACH, PCT, Command, Container, Host, Result, Sudo
from dflash_ops.errors import PreflightError
from dflash_ops.gate import without_warning

# One question for all that there is to know. A refused `sudo -n -l` is no incident in the host's logs, a try would be.
QUESTION = Command(
    ("sh", "-c", f"LC_ALL=C sudo -n -l; code=$?; [ -x {LXC_ATTACH} ] && echo && echo has-lxc-attach; exit $code")
)

_PVESH = "/usr/bin/pvesh"
_NO_TTY, _NO_SUDO = "must have a tty", "the host has no sudo"


@dataclass(frozen=True)
class Rights:
    """sudo: what is allowed; has_lxc_attach: whether the host has that program; refused: sudo's last words when it said
    nothing of rights; pvesh: whether that may be run, for what the hypervisor does."""

    user: str
    sudo: Sudo
    has_lxc_attach: bool
    refused: str = ""
    pvesh: bool = False


def read(result: Result, user: str) -> Rights:
    """The answer to QUESTION."""
    text = result.out.decode("utf-8", "replace")
    has_lxc_attach = text.rstrip().endswith("has-lxc-attach")
    if result.code != 0:
        said = without_warning(result.err).decode("utf-8", "replace").strip().replace("\n", "; ")
        why = _NO_SUDO if result.code == 127 else said or f"sudo: code {result.code}"
        return Rights(user, Sudo(), has_lxc_attach, why)
    entries = list(_entries(text))
    everything = _allowed([(allowed, word) for allowed, word in entries if word.lstrip("!") == "ALL"], "")
    allowed = Sudo(everything, pct=_allowed(entries, PCT), attach=_allowed(entries, LXC_ATTACH))
    return Rights(user, allowed, has_lxc_attach, pvesh=_allowed(entries, _PVESH))


def way(container: Container, rights: Rights) -> Container:
    """The container, by lxc-attach or pct, whichever may be run. PreflightError when neither may."""
    sudo = rights.sudo
    if container.via == "lxc-attach" and rights.has_lxc_attach and (sudo.everything or sudo.attach):
        return container
    if sudo.everything or sudo.pct:
        return replace(container, via="pct")
    raise error(container.host, rights)


def error(host: Host, rights: Rights) -> PreflightError:
    """That nothing in a container can be done so, and the line of sudoers that would change it."""
    step = _step(rights)
    if rights.refused == _NO_SUDO:
        step = f"on the host, as root: apt-get install sudo; then {step.partition(': ')[2]}"
    return PreflightError(
        f"{rights.user} may not run pct and lxc-attach as root",
        where=str(host),
        why=rights.refused or f"sudo lets {rights.user} run neither without a password",
        next=step,
    )


def pct_refused(container: Container, rights: Rights) -> PreflightError:
    """That a container can't be entered, for want of pct nobody knows why."""
    return PreflightError(
        f"container {container.vmid} is stopped, or there is none",
        where=str(container.host),
        why=f"which of them, pct would say, but sudo lets {rights.user} run lxc-attach alone",
        next=_step(rights),
    )


def no_pvesh(user: str) -> tuple[str, str]:
    """What a user lacks whom sudo does not let run pvesh, and what mends it."""
    why = f"sudo does not let {user} run {_PVESH}, and there is no [api]: ct, discover and deploy --snapshot can't work"
    return why, f"on the host, in a file of /etc/sudoers.d: {user} ALL=(root) NOPASSWD: {_PVESH}; or docs/proxmox.md"


def _step(rights: Rights) -> str:
    user = re.sub(r"([^\w.-])", r"\\\1", rights.user)
    line = f"{user} ALL=(root) NOPASSWD: {PCT}, {LXC_ATTACH}"
    if _NO_TTY in rights.refused:
        line = f"Defaults:{user} !requiretty"
    return f"on the host, as root: visudo -f /etc/sudoers.d/dflash-ops, and there the line: {line}"


def _entries(text: str) -> Iterator[tuple[bool, str]]:
    """What `sudo -l` lists for root, in its order: whether without a password, and the command ("!" before it: not)."""
    head, found, listed = text.partition("may run the following commands")
    if not found:
        return
    always = re.search(r"(^|[\s,])!authenticate\b", head) is not None
    for row in re.sub(r"\n {8,}", " ", listed).split("\n")[1:]:
        runas = re.fullmatch(r"\s+\(([^):]*)(?::[^)]*)?\)\s*(.*)", row)
        if runas is None or not _is_root([word.strip() for word in runas[1].split(",")]):
            continue
        free = always
        for word in re.split(r"(?<!\\),\s*", runas[2]):
            while tag := re.match(r"([A-Z_]+):\s*", word):
                free = tag[1] == "NOPASSWD" if tag[1] in ("NOPASSWD", "PASSWD") else free
                word = word[tag.end() :]
            yield free, re.sub(r"^(!?)sha\d+:\S+ ", r"\1", word.strip())


def _is_root(runas: list[str]) -> bool:
    return not {"!root", "!#0"} & set(runas) and bool({"ALL", "root", "#0"} & set(runas))


def _allowed(entries: list[tuple[bool, str]], program: str) -> bool:
    """Whether the last entry that means the program lets it run without a password."""
    allowed = False
    for free, entry in entries:
        pattern = entry.removeprefix("!").partition(" ")[0]
        if pattern == "ALL" or fnmatchcase(program, pattern) or (pattern[-1:] == "/" and _is_in(program, pattern)):
            allowed = free and not entry.startswith("!")
    return allowed


def _is_in(program: str, folder: str) -> bool:
    return program.rpartition("/")[0] + "/" == folder
