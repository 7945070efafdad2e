"""What the answers to `init`'s questions mean. Pure."""

import re
from collections.abc import Sequence

from dflash_ops.command import Host
from dflash_ops.errors import NotFoundError, PreflightError, UsageFault
from dflash_ops.inventory_probe import Cards, Listed

NONE = "none"


def name_of(text: str) -> str:
    """A name made of an address or a host name: its first label, for an address of digits "box"."""
    label = text if re.fullmatch(r"[\d.:]+|.*:.*", text) is None else "box"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", label.split(".")[0]).strip("-")[:60] or "box"


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
    if "=" in word:  # never shown: what follows it is the secret
        raise UsageFault(
            "a token's secret belongs on no command line",
            why="other users see it there, and the shell keeps it",
            next="make a new one; say USER@REALM!NAME alone, and put the secret into DFLASH_OPS_PVE_TOKEN",
        )
    match = re.fullmatch(r"([^\s!=:/@]+@[A-Za-z0-9][A-Za-z0-9._-]*)!([A-Za-z][A-Za-z0-9._-]*)", word.strip())
    if match is None:
        raise UsageFault(
            "no name of a token", where=repr(word), next="say USER@REALM!NAME, for instance bot@pve!dflash"
        )
    return match.group(1), match.group(2)
