"""What `init` is told, who answers its questions, and what the answers mean. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_ops.command import Host
from dflash_ops.errors import NotFoundError, OpsError, PreflightError, UsageFault
from dflash_ops.inventory_probe import Cards, Listed

NONE = "none"


@dataclass(frozen=True)
class Said:
    """What the command line says; None is asked for, or left out. address: may be USER@ADDRESS; host, name: of the
    tables in the inventory; gpus: "0,1", or "none"; api: whose token, USER@REALM!NAME, or "none"; token_file: its
    secret's."""

    address: str | None = None
    port: int | None = None
    user: str | None = None
    key: Path | None = None
    known_hosts: Path | None = None
    ssh_config: Path | None = None
    host: str | None = None
    vmid: str | None = None
    name: str | None = None
    path: str | None = None
    python: str | None = None
    gpus: str | None = None
    container_user: str | None = None
    api: str | None = None
    token_file: Path | None = None
    api_address: str | None = None
    api_port: int | None = None
    api_node: str | None = None


class Asker(Protocol):
    """Who is asked for what the command line does not say. can_ask: whether there is somebody."""

    can_ask: bool

    def ask(self, what: str, flag: str, default: str | None) -> str:
        """The answer. UsageFault, naming the flag, where nobody can be asked."""
        ...

    def again(self, error: OpsError) -> bool:
        """Whether to ask again after a wrong answer; tells why it is wrong."""
        ...

    def tell(self, text: str) -> None: ...


def name_of(text: str) -> str:
    """A name made of an address or a host name: its first label, for an address of digits "box"."""
    label = text if re.fullmatch(r"[\d.:]+|.*:.*", text) is None else "box"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", label.split(".")[0]).strip("-")[:60] or "box"


def user_and_address(word: str, said: str | None) -> tuple[str | None, str]:
    """What [USER@]ADDRESS means beside --user. UsageFault where they say two users, or there is a password."""
    user, _, address = word.rpartition("@")
    if ":" in user:  # not shown
        raise UsageFault("a password belongs on no command line", next="say USER@ADDRESS; ssh uses keys, or its agent")
    if user and said is not None and said != user:
        raise UsageFault("two users are said", why=f"{user} before the @, and {said} by --user", next="say one")
    return user or said, address


def one_of(word: str, listed: Sequence[Listed], host: Host) -> Listed:
    if not re.fullmatch("[0-9]{1,9}", word):
        raise UsageFault("no number of a container", where=repr(word), next="say one, as pct list shows it")
    if not listed:  # nothing was asked
        return Listed(int(word), "unknown", "")
    found = next((entry for entry in listed if entry.vmid == int(word)), None)
    if found is None:
        there = ", ".join(str(entry.vmid) for entry in listed)
        raise NotFoundError(f"there is no container {word}", where=host.address, why=f"it has: {there}", next="say one")
    if found.status != "running":
        raise PreflightError(
            f"container {word} is {found.status}, and can't be tried",
            where=host.address,
            next=f"on the host: pct start {word}; or say --untested",
        )
    return found


def gpus(word: str) -> tuple[int, ...]:
    if word.strip().lower() == NONE:
        return ()
    parts = [part.strip() for part in word.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) for part in parts) or len(set(parts)) < len(parts):
        raise UsageFault("no list of GPUs", where=repr(word), next="say numbers with commas between them, or none")
    return tuple(map(int, parts))


def detected(host: Cards | None, inside: Cards) -> tuple[int, ...]:
    """The host's numbers of the container's GPUs, where the host knows them all."""
    numbers = {card.uuid: card.index for card in host.cards} if host else {}
    if any(card.uuid not in numbers for card in inside.cards):
        return ()
    return tuple(numbers[card.uuid] for card in inside.cards)


def token(word: str) -> tuple[str, str] | None:
    if word.strip().lower() == NONE:
        return None
    # The word is never shown: the secret may be in it, or be it.
    if "=" in word or re.search(r"![^:]*:|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-", word):
        raise UsageFault(
            "a token's secret belongs on no command line",
            why="other users see it there, and the shell keeps it",
            next="make a new one; say USER@REALM!NAME alone, and put the secret into DFLASH_OPS_PVE_TOKEN",
        )
    match = re.fullmatch(r"([^\s!=:/@]+@[A-Za-z0-9][A-Za-z0-9._-]*)!([A-Za-z][A-Za-z0-9._-]*)", word.strip())
    if match is None:
        raise UsageFault("--api is no name of a token", next="say USER@REALM!NAME, for instance bot@pve!dflash")
    return match.group(1), match.group(2)
