"""Logging in with keys, and why nothing let us in."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import shlex
from typing import Any

from dflash_ops.errors import ConfigError, OpsError, UnreachableError
from dflash_ops.ssh_keys import Agent, Tried, offers
from dflash_ops.ssh_library import paramiko
from dflash_ops.ssh_opening import Opening


def log_in(opening: Opening, transport: Any) -> None:
    """Offers keys until one is accepted. UnreachableError, or ConfigError where the only key is none."""
    hop, clock, tried = opening.hop, opening.clock, Tried()
    agent = None
    if hop.agent:
        try:
            agent = Agent(hop.agent, clock.left())
        except (OSError, paramiko.SSHException) as error:
            if isinstance(error, TimeoutError):  # else there is none, as often
                tried.unusable.append(f"the agent at {hop.agent} gave no answer")
    try:
        for offer in offers(hop, agent, tried):
            clock.give_back(tried.asked_s)
            tried.asked_s = 0.0
            if hop.key_algorithms and not _accepted(offer.key, hop.key_algorithms):
                tried.unusable.append(f"{offer.name}: PubkeyAcceptedAlgorithms excludes it")
                continue
            tried.offered.append(offer.name)
            transport.auth_timeout = clock.left()
            try:
                further = transport.auth_publickey(hop.user, offer.key)
            except paramiko.BadAuthenticationType as error:
                raise _refused(opening, tried, f"it takes no keys, only {', '.join(error.allowed_types)}") from error
            except paramiko.AuthenticationException as error:
                if str(error) == "Authentication timeout.":
                    raise opening.late(f"no answer to {offer.name}") from error
                if not transport.is_active():
                    raise _refused(opening, tried, "it hung up: too many keys?") from error
                continue
            except (paramiko.SSHException, OSError, EOFError) as error:
                why = str(error) or "it hung up"
                if "Too many authentication failures" in why:
                    why = "too many keys: it hung up before all were tried"
                raise _refused(opening, tried, why) from error
            if further:
                raise _refused(
                    opening, tried, f"after the key {offer.name} it wants {', '.join(further)}, which we can't give"
                )
            return
        raise _refused(opening, tried, "")
    finally:
        if agent is not None:
            agent.close()


def _accepted(key: Any, algorithms: tuple[str, ...]) -> bool:
    blob = getattr(key, "public_blob", None)
    kind: str = blob.key_type if blob else key.get_name()
    if "rsa" in kind:
        return any(
            "rsa-sha2" in name and name.endswith("-cert-v01@openssh.com") == ("cert" in kind) for name in algorithms
        )
    return kind in algorithms


def _refused(opening: Opening, tried: Tried, why: str) -> OpsError:
    """Why nothing let us in; the most telling reason first."""
    hop = opening.hop
    only = hop.identities[0] if len(hop.identities) == 1 and hop.identities_only else None
    if tried.locked and not why:
        keys = ", ".join(map(str, tried.locked))
        return UnreachableError(
            "the key is locked by a passphrase",
            where=opening.where,
            why="; ".join((keys, *_told(tried))),
            next=f"ssh-add {shlex.join(map(str, tried.locked))}",
        )
    if only is not None and not tried.offered and not why and only in tried.empty:
        return ConfigError(
            "there is no private key in the file",
            where=opening.where,
            why=str(only),
            next="correct `key` in the inventory, or IdentityFile in the ssh configuration",
        )
    parts = [why, *_told(tried), *(f"{setting} is not used" for setting in hop.lacks if setting.startswith("PKCS"))]
    many = "too many keys" in why
    return UnreachableError(
        "the host refused our key" if tried.offered else "there is no key to log in with",
        where=opening.where,
        why="; ".join(part for part in parts if part),
        next=(
            "name the right key as `key` in the inventory (or IdentityFile, with IdentitiesOnly yes)"
            if many
            else shlex.join(("ssh-copy-id", *hop.plain))
            if tried.offered
            else "make one (ssh-keygen) and copy it there (ssh-copy-id), or start an agent and ssh-add it"
        ),
    )


def _told(tried: Tried) -> list[str]:
    empty = [f"{file} holds no private key" for file in tried.empty]
    return [*([f"tried: {', '.join(tried.offered)}"] if tried.offered else []), *tried.unusable, *empty]
