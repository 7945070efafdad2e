"""Whether a host's key is the one that we know. Strict: one that is not in known_hosts, or is another one than there,
ends the attempt, and nothing is ever added to a file."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import shlex
from pathlib import Path
from typing import Any

from dflash_ops import known_hosts
from dflash_ops.errors import ConfigError, HostKeyError
from dflash_ops.ssh_config import Hop
from dflash_ops.ssh_opening import Opening


def names_of(hop: Hop, line: Any | None) -> list[str]:
    """What known_hosts may call the host. Its address is asked for too where CheckHostIP wants it."""
    if not hop.check_address or line is None:
        return [hop.known_as]
    address = line.getpeername()[0].partition("%")[0]
    return [hop.known_as, address if hop.port == 22 else f"[{address}]:{hop.port}"]


def known_lines(opening: Opening) -> list[known_hosts.Line]:
    """All that the configuration's files say of keys. ConfigError when one can't be read."""
    hop, lines = opening.hop, list[known_hosts.Line]()
    for file in (*hop.user_known_hosts, *hop.global_known_hosts):
        lines += known_hosts.read(_text(file, "known_hosts"), file)
    if hop.revoked is not None:
        if not hop.revoked.is_file():  # ssh refuses every key then
            raise ConfigError("RevokedHostKeys names no file", where=opening.where, why=str(hop.revoked))
        text = _text(hop.revoked, "RevokedHostKeys")
        if text.startswith("SSHKRL"):
            raise ConfigError(
                "RevokedHostKeys is a KRL, which we can't read",
                where=str(hop.revoked),
                next="name a file of plain public keys, or mark them @revoked in known_hosts",
            )
        lines += known_hosts.read_revoked(text, hop.revoked)
    return lines


def _text(file: Path, what: str) -> str:
    try:
        return file.read_text("utf-8") if file.is_file() else ""
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        raise ConfigError(
            f"a {what} file can't be read",
            where=str(file),
            why=getattr(error, "strerror", None) or str(error),
            next="correct it, or name another as `known_hosts` in the inventory",
        ) from error


def check_host_key(opening: Opening, transport: Any, lines: list[known_hosts.Line], line: Any | None) -> None:
    """Raises HostKeyError unless the key that the host has shown is known. line: the socket to it, if there is one."""
    hop = opening.hop
    key = transport.get_remote_server_key()
    blob, kind = key.asbytes(), key.get_name()
    verdict = known_hosts.judge(lines, names_of(hop, line), kind, blob, bare=hop.known_bare)
    if verdict.word == "known":
        return
    shown = f"{kind} {known_hosts.fingerprint(blob)}"
    said = ", ".join(map(str, verdict.lines))
    files = (*hop.user_known_hosts, *hop.global_known_hosts)
    add = (
        "compare it with the host's own (there: ssh-keygen -lf /etc/ssh/ssh_host_"
        f"{kind.removeprefix('ssh-').split('-')[0]}_key.pub), then{_add(files, hop.known_as, kind, key.get_base64())}"
    )
    match verdict.word:
        case "revoked":
            raise HostKeyError(
                f"the host key of {hop.known_as} is revoked",
                where=opening.where,
                why=f"the host shows {shown}, revoked by {said}",
                next="don't connect; ask whoever runs the host for its new key",
            )
        case "changed":
            changed = dict.fromkeys(str(each.file) for each in verdict.lines)
            forget = "; ".join(f"ssh-keygen -f {shlex.quote(each)} -R {shlex.quote(hop.known_as)}" for each in changed)
            raise HostKeyError(
                f"the host key of {hop.known_as} has changed",
                where=opening.where,
                why=f"known_hosts has {said}, the host shows {shown}: a new installation, or somebody in between",
                next=f"if it is a new installation: {forget}",
            )
        case "other":
            why = f"known_hosts has only {said}, the host shows {shown}"
        case "authority":
            why = f"{said} is a @cert-authority: host certificates can't be checked here, and the host shows {shown}"
        case _:
            why = f"{shown} is not in {files[0] if files else 'any file: none is named'}"
    if "KnownHostsCommand" in hop.lacks:
        why += " (KnownHostsCommand is not run)"
    raise HostKeyError(f"the host key of {hop.known_as} is not known", where=opening.where, why=why, next=add)


def _add(files: tuple[Path, ...], name: str, kind: str, key: str) -> str:
    """How to make a key known: the command that adds it to the first file that can hold it (/dev/null, say, can't)."""
    entry = shlex.quote(f"{name} {kind} {key}")
    for file in files:
        if file.is_file() or not file.exists():
            folder = "" if file.parent.is_dir() else f"mkdir -p -m 700 {shlex.quote(str(file.parent))} && "
            return f": {folder}echo {entry} >> {shlex.quote(str(file))}"
    return f" name a UserKnownHostsFile (or `known_hosts` in the inventory) to hold this line: {entry}"
