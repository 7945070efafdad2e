"""Who may log in to the hypervisor: root, and `ops`, who is nobody but by sudo. Standard library only."""

import os
import socket
from pathlib import Path
from typing import NamedTuple

from dflash_ops.sandbox import layout

ROOT, OPS = "root", "ops"
OPS_ID = 61_000
SUDOERS = Path("/etc/sudoers.d/ops")
# What README asks of a real host's owner.
SUDOERS_TEXT = f"{OPS} ALL=(root) NOPASSWD: /usr/sbin/pct, /usr/bin/lxc-attach\n"

_PASSWD = Path("/etc/passwd")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Account(NamedTuple):
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def path(self) -> str:
        """PATH as Debian's sshd gives it: without the folders of administrators for others."""
        # /usr/local/sbin: the sandbox's programs are there where the kernel has no overlays.
        return _SYSTEM_PATH if self.uid == 0 else "/usr/local/bin:/usr/bin:/bin:/usr/games:/usr/local/sbin"


def make() -> None:
    """Gives the hypervisor its second user; called as its root, once (all of the cluster's nodes share the files)."""
    if socket.gethostname() != layout.NODES[0]:
        return
    others = [line for line in _PASSWD.read_text().split("\n") if line and not line.startswith(f"{OPS}:")]
    _write(_PASSWD, [*others, f"{OPS}:x:{OPS_ID}:{OPS_ID}::/home/{OPS}:/bin/bash"])
    home = Path("/home", OPS)
    home.mkdir(mode=0o755)
    os.chown(home, OPS_ID, OPS_ID)
    SUDOERS.parent.mkdir(mode=0o755)
    SUDOERS.write_text(SUDOERS_TEXT)
    # The machine's Python may be bound below root's home, and `sudo` is a script of it.
    Path("/root").chmod(0o711)


def account(name: str) -> Account | None:
    """The user's account as the file has it now: a test may give root another shell."""
    for line in _PASSWD.read_text().split("\n"):
        words = line.split(":")
        if words[0] == name and len(words) == 7:
            return Account(name, int(words[2]), int(words[3]), words[5], words[6] or "/bin/sh")
    return None


def name_of(uid: int) -> str:
    for line in _PASSWD.read_text().split("\n"):
        words = line.split(":")
        if len(words) == 7 and words[2] == str(uid):
            return words[0]
    return str(uid)


def _write(file: Path, lines: list[str]) -> None:
    draft = file.with_name(f"{file.name}.new")
    draft.write_text("\n".join(lines) + "\n")
    draft.replace(file)
