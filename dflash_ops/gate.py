"""Tells what lxc-attach and pct say when they can't enter a container from what its programs say, and why they can't.
Pure."""

import re
from collections.abc import Callable

from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import NotFoundError, OpsError, PreflightError


class Gate:
    """Passes stderr on, but holds back what lxc-attach and pct say when they could not enter the container: the caller
    gets our one line instead."""

    def __init__(self, on_err: Callable[[bytes], None]) -> None:
        self._on_err = on_err
        self._decided = False
        self.held = bytearray()

    def __call__(self, data: bytes) -> None:
        if self._decided:
            self._on_err(data)
            return
        self.held += data
        self.held = bytearray(without_warning(self.held))
        if not self._may_be_theirs():
            self._decided = True
            self._on_err(bytes(self.held))
            self.held.clear()

    def _may_be_theirs(self) -> bool:
        if not any(self.held.startswith(word) or word.startswith(self.held) for word in _ATTACH_WORDS):
            return False
        line, ended, _ = self.held.partition(b"\n")
        return any(why in line for why in _ATTACH_REASONS) or not (ended or len(line) > _LONGEST_ATTACH_LINE)


# What a sudo says that does not find its own host's name; it works all the same.
_WARNING = b"sudo: unable to resolve host "

# How lxc-attach and pct begin the line that says why they could not enter, which reasons they have, and within how many
# bytes a reason has come.
_ATTACH_WORDS = (b"lxc-attach: ", b"container '", b"Configuration file '", _WARNING)
_ATTACH_REASONS = (b"init pid", b"not running!", b"does not exist")
_LONGEST_ATTACH_LINE = 200


def without_warning(err: bytes | bytearray) -> bytes:
    """stderr without the lines in which sudo says that it does not find its own host's name."""
    return re.sub(rb"(?m)^%b.*\n" % _WARNING, b"", err)


def never_entered(result: Result) -> bool:
    """Whether lxc-attach or pct may have failed before the command was in its container; `pct status` then says."""
    if result.code == 1:
        return b"lxc-attach: " in result.err and b"init pid" in result.err
    if result.code == 127:
        return b"pct" in result.err
    return result.code in (2, 255) and (b"not running!" in result.err or b"does not exist" in result.err)


def not_entered(container: Container, status: Result) -> OpsError | None:
    """Why a container can't be entered, by what `pct status` says of it; None when it does not say."""
    host, vmid = container.host, container.vmid
    if status.code == 0 and b"stopped" in status.out:
        return PreflightError(
            f"container {vmid} is stopped",
            where=str(host),
            next=f"dflash-ops ct start; or on the host: pct start {vmid}",
        )
    if status.code == 127:
        return PreflightError(
            "the host has no pct", where=str(host), why=status.last_words, next="check that it is a Proxmox VE host"
        )
    return None


def no_config(status: Result) -> bool:
    """Whether `pct status` knows no such container on its node."""
    return b"does not exist" in status.err


def node_command(vmid: int) -> Command:
    """Lists the container's configuration on every node of a cluster: after a migration it is on another."""
    return Command(("sh", "-c", f"ls -d /etc/pve/nodes/*/lxc/{vmid}.conf"), root=True)


def no_container(container: Container, status: Result, listed: Result) -> NotFoundError:
    """That the host's node has no such container. listed: the answer to `node_command`."""
    where, vmid = str(container.host), container.vmid
    if files := listed.out.decode("utf-8", "replace").split():
        node = files[0].split("/")[4]
        return NotFoundError(
            f"container {vmid} is on another node of the cluster",
            where=where,
            why=f"it is on {node} now",
            next=f"change its `host` in the inventory to one that is {node}",
        )
    return NotFoundError(
        f"there is no container {vmid}",
        where=where,
        why=status.last_words,
        next="on the host: pct list; then correct `vmid` in the inventory",
    )
