"""What `init` and `inventory check` ask of a host and its containers: questions, and the reading of answers. Pure."""

from dataclasses import dataclass

from dflash_ops.command import Command, Container, Query, Result, pct
from dflash_ops.errors import OpsError, PreflightError

# The trainer's; the scripts that travel run on 3.9.
OLDEST_PYTHON, OLDEST_FOR_SCRIPTS = (3, 11), (3, 9)


@dataclass(frozen=True)
class Listed:
    """A container as `pct list` has it."""

    vmid: int
    status: str
    name: str


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi has it; index: where it was asked."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True)
class Cards:
    """GPUs in nvidia-smi's order; `refused`: why there are none."""

    cards: tuple[Card, ...]
    refused: str = ""


@dataclass(frozen=True)
class Inside:
    """What a container has of what its table in the inventory says. python: the version, None when it does not run;
    path: "" when files can be made there, else why not; user: "" when there is such a user, else why not."""

    python: tuple[int, int, int] | None
    python_said: str
    path: str
    user: str
    cards: Cards


def containers() -> Query[tuple[Listed, ...]]:
    """The containers of a host, by vmid. PreflightError when it has no pct, or pct refuses."""
    return Query(pct("list"), _containers)


def _containers(result: Result) -> tuple[Listed, ...]:
    if result.code == 127:
        raise PreflightError(
            "the host has no pct",
            where=str(result.place),
            why=result.last_words,
            next="name a Proxmox VE host; its address is the hypervisor's, not a container's",
        )
    if result.code != 0:
        raise OpsError("pct list failed", where=str(result.place), why=result.last_words)
    found: list[Listed] = []
    for row in result.out.decode("utf-8", "replace").split("\n")[1:]:
        words = row.split()
        if len(words) >= 2 and words[0].isascii() and words[0].isdigit():
            found.append(Listed(int(words[0]), words[1], row[35:].strip()))  # the column before may be empty
    return tuple(found)


_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")


def cards() -> Query[Cards]:
    """The GPUs of a host, or of a container."""
    return Query(Command(_SMI), lambda result: _cards(result.out.decode("utf-8", "replace"), result.code, result))


def _cards(text: str, code: int, result: Result | None = None) -> Cards:
    found: list[Card] = []
    for row in text.split("\n"):
        match [word.strip() for word in row.split(",", 2)]:
            case [index, uuid, name] if index.isascii() and index.isdigit() and uuid.startswith("GPU-"):
                found.append(Card(int(index), uuid, name))
            case _:
                pass
    if code == 0 and found:
        return Cards(tuple(found))
    said = [row.strip() for row in text.split("\n") if row.strip()]
    why = "there is no nvidia-smi" if code == 127 else result.last_words if result else said[-1] if said else ""
    return Cards((), why or "nvidia-smi shows none")


# One line for each thing, its name first; the rows of nvidia-smi, which may hang, come last. It looks at the nearest
# folder that is there, and makes one in it for a moment: rights alone do not tell of a disk that is read-only, or full.
_LOOK = r"""
last() { printf '%s\n' "$said" | tail -n 1; }
said=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>&1); echo "python $? $(last)"
place=$2
while [ ! -e "$place" ] && [ ! -L "$place" ]; do place=$(dirname -- "$place"); done
if [ ! -d "$place" ]; then echo "path $place is no folder"
else
    if said=$(mktemp -d "$place/.dflash-ops-check.XXXXXX" 2>&1); then rmdir "$said"; echo path
    else echo "path $(last)"; fi
fi
if [ -z "$3" ]; then echo user; elif said=$(id -u -- "$3" 2>&1); then echo user; else echo "user $(last)"; fi
if [ -n "$4" ]; then echo cards 1; echo "$4"; exit; fi
limit=$(command -v timeout >/dev/null && echo timeout 8)
said=$($limit nvidia-smi --query-gpu=index,uuid,name --format=csv,noheader 2>&1); echo "cards $?"; printf '%s\n' "$said"
"""


def inside(container: Container, no_cards: str = "") -> Query[Inside]:
    """What is in a container that runs. no_cards: why its GPUs are not asked for. OpsError when the answer can't be
    read."""
    words = ("sh", "-c", _LOOK, "look", container.python, container.path, container.user or "", no_cards)
    return Query(Command(words), _inside)


def _inside(result: Result) -> Inside:
    lines = result.out.decode("utf-8", "replace").split("\n")
    heads = [line.partition(" ") for line in lines[:4]]
    if [head[0] for head in heads] != ["python", "path", "user", "cards"]:
        raise OpsError("the container did not answer", where=str(result.place), why=result.last_words)
    code, _, said = heads[0][2].partition(" ")
    parts = said.split(".")
    version = None
    if code == "0" and len(parts) == 3 and all(part.isdigit() for part in parts):
        version = (int(parts[0]), int(parts[1]), int(parts[2]))
    found = _cards("\n".join(lines[4:]), int(heads[3][2]) if heads[3][2].isdigit() else 1)
    return Inside(version, said, heads[1][2], heads[2][2], found)
