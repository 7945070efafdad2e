"""Connecting to a host: OpenSSH's own client says how (`ssh -G`), paramiko speaks the protocol.

This file is light: the library loads while `ssh -G` runs. `ssh_config` reads what it says, `ssh_hop` opens each
connection on the way, `ssh_keys` offers the keys, `ssh_link` is what one then has.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_ops.command import Host
from dflash_ops.errors import ConfigError
from dflash_ops.ssh_config import Hop, Jump, Settings, parse, route
from dflash_ops.ssh_local import Question, here

if TYPE_CHECKING:
    from dflash_ops.ssh_hop import Opened
    from dflash_ops.ssh_link import Link, NoSftpError, RemoteProcess

__all__ = ["DEAD_AFTER_SECONDS", "KEEPALIVE_SECONDS", "Link", "NoSftpError", "RemoteProcess", "connect", "hostname"]

KEEPALIVE_SECONDS = 5.0
# A host that has not answered three keepalives in a row is gone.
DEAD_AFTER_SECONDS = 3 * KEEPALIVE_SECONDS
# For `ssh -G`, which may run commands (Match exec) and ask name servers.
CONFIG_SECONDS = 15.0


def __getattr__(name: str) -> Any:
    """Link, NoSftpError and RemoteProcess, without loading the library before somebody asks."""
    if name in ("Link", "NoSftpError", "RemoteProcess"):
        from dflash_ops import ssh_link

        return getattr(ssh_link, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(host: Host, *, timeout: float) -> "Link":
    """Connects and logs in, by way of its jumps. UnreachableError, HostKeyError or ConfigError when that can't be.

    timeout: seconds for each hop, unless ConnectTimeout says otherwise.
    """
    if host.key is not None and not host.key.is_file():
        raise ConfigError("there is no such key file", where=str(host), why=str(host.key), next="correct `key`")
    hops = _hops(host, meanwhile=load)
    from dflash_ops.ssh_hop import open_hop
    from dflash_ops.ssh_link import Link
    from dflash_ops.ssh_opening import Clock, Opening

    def opened() -> "list[Opened]":
        done: list[Opened] = []
        try:
            for hop in hops:
                clock = Clock(hop.connect_timeout or timeout)
                opening = Opening(hop, _where(host, hop, is_jump=hop is not hops[-1]), clock)
                done.append(open_hop(opening, done[-1].transport if done else None))
            return done
        except BaseException:
            for each in reversed(done):
                each.close()
            raise

    return Link(host, opened(), opened, keepalive_s=KEEPALIVE_SECONDS, dead_after_s=DEAD_AFTER_SECONDS)


def hostname(host: Host) -> str:
    """The name or address that the ssh configuration gives a host, without connecting. ConfigError as for `connect`."""
    return _hops(host)[-1].hostname


def load() -> None:
    """Loads the library. For whoever connects in a thread: Python's threads would only take turns at it."""
    import dflash_ops.ssh_link  # noqa: F401  # pyright: ignore[reportUnusedImport]


def _config_file(host: Host) -> Path | None:
    """The file that is read instead of ~/.ssh/config, if any."""
    named = os.environ.get("DFLASH_OPS_SSH_CONFIG")
    file = host.ssh_config or (Path(named).expanduser() if named else None)
    if file is not None and not file.is_file():
        by = "ssh_config" if host.ssh_config else "DFLASH_OPS_SSH_CONFIG"
        raise ConfigError("there is no such ssh configuration", where=str(host), why=str(file), next=f"correct {by}")
    return file


def _hops(host: Host, meanwhile: Callable[[], None] = lambda: None) -> tuple[Hop, ...]:
    """The way to the host, each stop by its own settings, with what the inventory says of the host itself. meanwhile:
    what to do while ssh is asked about the host."""
    file, by_ssh = _config_file(host), True
    target = Jump(host.address, host.user, host.port)

    def ask(jump: Jump) -> Settings:
        nonlocal by_ssh
        question = Question(jump, file) if by_ssh else None
        try:
            if jump is target:
                meanwhile()
            text = question.answer(CONFIG_SECONDS) if question else None
        finally:
            if question is not None:
                question.end()
        if text is not None:
            return parse(text)
        by_ssh = False
        from dflash_ops.ssh_library import read_config

        return read_config(jump, file)

    settings = ask(target)  # first, since it tells whether there is an ssh at all
    hops = route(target, lambda jump: settings if jump is target else ask(jump), here(by_database=by_ssh))
    named = ("-F", str(file)) if file else ()
    hops = [hop._replace(plain=(*named, *hop.plain)) for hop in hops]
    return (*hops[:-1], _as_the_inventory_says(hops[-1], host))


def _as_the_inventory_says(hop: Hop, host: Host) -> Hop:
    if host.key is not None:
        plain = ("-i", str(host.key), *hop.plain)
        hop = hop._replace(identities=(host.key,), identities_only=True, plain=plain)
    if host.known_hosts is not None:
        hop = hop._replace(user_known_hosts=(host.known_hosts,), global_known_hosts=())
    return hop


def _where(host: Host, hop: Hop, *, is_jump: bool) -> str:
    address = f"[{hop.hostname}]" if ":" in hop.hostname else hop.hostname
    at = f"{hop.user}@{address}:{hop.port}"
    return f"{host}, jump {hop.name}, {at}" if is_jump else f"{host}, {at}"
