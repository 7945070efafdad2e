"""Whether the GPU memory of processes that were ended is back: asked of nvidia-smi before and after.

The driver charges memory to the process that opened the device, also when it is dead and a child keeps the descriptor:
a process table without members is no proof. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_ops.remote import gpuasked, probe, processes

SMI_SECONDS = 5.0
_FORMAT = "--format=csv,noheader,nounits"
_GPUS = "--query-gpu=index,uuid,pci.bus_id,memory.used,memory.total"
_QUERIES = {
    "gpus": [f"{_GPUS},mig.mode.current", _FORMAT],
    "apps": ["--query-compute-apps=gpu_uuid,pid,used_gpu_memory", _FORMAT],
}
# The start time of nobody: the pid counts while it is dead, and a new owner of it does not.
_DEAD = -1
# What memory.used may differ from the sum of the processes beyond what was charged.
_SLACK_MIB = 32.0


@dataclass(frozen=True)
class Card:
    """One GPU by nvidia-smi, as this container sees it. Memory in MiB; None: nvidia-smi had no value. cut: into MIG
    instances, of which others may be other tenants'; what all of them use says nothing then, and `used` is None."""

    index: int
    uuid: str
    bus: str
    used: float | None
    total: float | None
    cut: bool = False


@dataclass(frozen=True)
class Picture:
    """One look. charges: (uuid, pid, MiB), pids of the dead among them. why: nvidia-smi could not tell; missing: it is
    not even there."""

    cards: tuple[Card, ...] = ()
    charges: tuple[tuple[str, int, float | None], ...] = ()
    why: str = ""
    missing: bool = False

    def card(self, uuid: str) -> Card | None:
        return next((card for card in self.cards if card.uuid == uuid), None)


def look(seconds: float = SMI_SECONDS) -> Picture:
    """Asks nvidia-smi, for so long at most."""
    told = gpuasked.ask_smi(_QUERIES, seconds)
    if told["gpus"]["code"] == 2 and "not a valid field" in told["gpus"]["out"]:
        told.update(gpuasked.ask_smi({"gpus": [_GPUS, _FORMAT]}, seconds))  # a driver that is older than MIG
    cards: list[Card] = []
    for cells in [*_rows(told["gpus"]["out"], 6), *_rows(told["gpus"]["out"], 5)]:
        if _is_count(cells[0]) and cells[1].startswith("GPU-"):
            cut = cells[5:] == ["Enabled"]
            used = None if cut else _number(cells[3])
            cards.append(Card(int(cells[0]), cells[1], cells[2], used, _number(cells[4]), cut))
    for name, answer in told.items():
        # Of a card that is lost it says so, ends with an error, and tells of the others all the same.
        if answer["code"] != 0 and (
            answer["code"] is None or not cards or (name == "apps" and told["gpus"]["code"] == 0)
        ):
            last = [line for line in answer["out"].strip().split("\n") if line.strip()]
            why = answer["why"] or (last[-1] if last else f"nvidia-smi ended with {answer['code']}")
            return Picture(why=why, missing=answer["code"] is None and "no answer" not in answer["why"])
    charges = [
        (cells[0], int(cells[1]), _number(cells[2])) for cells in _rows(told["apps"]["out"], 3) if _is_count(cells[1])
    ]
    return Picture(tuple(cards), tuple(_by_card(charges, [card for card in cards if card.cut])))


def _by_card(charges: list[tuple[str, int, float | None]], cut: list[Card]) -> list[tuple[str, int, float | None]]:
    """With what a MIG instance is charged with told of its card: the one that the process holds, or the only one that
    is cut. Of which instance nvidia-smi tells by its slow whole report alone; for whom a card is free, it is enough."""
    found: list[tuple[str, int, float | None]] = []
    minors = probe.device_minor_by_bus() if len(cut) > 1 else {}
    for uuid, pid, mib in charges:
        of = cut if uuid.startswith("MIG-") else []
        if len(of) > 1:
            held = probe.minors(pid)
            of = [card for card in of if _minor(card, minors) in held]
        found.append((of[0].uuid if len(of) == 1 else uuid, pid, mib))
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def holders_of(card: Card) -> list[dict[str, Any]]:
    """The living processes here that have this card's device open."""
    minor = _minor(card, probe.device_minor_by_bus())
    return [holder for holder in probe.holders() if minor in holder["minors"]]


def _minor(card: Card, by_bus: dict[str, int]) -> int:
    """N of its /dev/nvidiaN."""
    return {bus[-12:].lower(): minor for bus, minor in by_bus.items()}.get(card.bus[-12:].lower(), card.index)


class Proof:
    """Remembers what the processes that are to be ended hold, and tells whether it is back."""

    def __init__(self, targets: Iterable[processes.Process], child: dict[str, Any] | None, gpus: list[int]) -> None:
        targets = list(targets)
        self._known: dict[int, int] = {}
        if child is not None:
            self._known[child["pid"]] = child["start"]
        self.note(targets)
        self.wanted = bool(gpus) or any(probe.minors(process.pid) for process in targets)
        self.before = look() if self.wanted else Picture(missing=True)
        self._note_dead_parents()
        self.after = self.before
        self._charged_before, self._others_before = self._charged(self.before), self._charged(self.before, ours=False)

    def note(self, targets: Iterable[processes.Process]) -> None:
        """More processes that belong to what is ended."""
        for process in targets:
            self._known.setdefault(process.pid, process.start)

    def _note_dead_parents(self) -> None:
        """The memory of a dead process counts as theirs where nobody else could be holding it: of the living that hold
        the card and are charged with nothing of it, all are theirs."""
        for uuid, pid, _ in self.before.charges:
            card = self.before.card(uuid)
            if card is None or pid in self._known or processes.read(pid) is not None:
                continue
            charged = {other for of, other, _ in self.before.charges if of == uuid}
            heirs = [holder for holder in holders_of(card) if holder["pid"] not in charged]
            if heirs and all(self._known.get(holder["pid"]) == holder["start"] for holder in heirs):
                self._known[pid] = _DEAD

    def back(self) -> bool:
        """Whether nothing is charged to them any more, and the cards show it. True where no nvidia-smi is."""
        if self.before.missing:
            return True
        self.after = look()
        if self.after.why:
            return False
        return not self._charged(self.after) and not self._still_full()

    def result(self) -> dict[str, Any]:
        """For the answer. Call after the last `back`."""
        checked = self.wanted and not self.before.missing
        held: list[dict[str, Any]] = []
        charged = self._charged(self.after) if checked else {}
        full = self._still_full() if checked and not self.after.why else []
        for uuid in sorted(set(charged) | set(full)):
            card = self.after.card(uuid)
            if card is None:
                continue
            held.append(
                {
                    "index": card.index,
                    "used_mib": card.used,
                    "charged_mib": charged.get(uuid),
                    "holders": [_brief(holder) for holder in holders_of(card)],
                }
            )
        return {"checked": checked, "why": self.after.why if checked else "", "held": held}

    def _is_ours(self, pid: int) -> bool:
        """Whether the pid is one of theirs, living or dead; one that has a new owner is not."""
        owner = processes.read(pid) if pid in self._known else None
        return pid in self._known and (owner is None or owner.start == self._known[pid])

    def _charged(self, picture: Picture, ours: bool = True) -> dict[str, float]:
        """MiB by card that their processes are charged with, or with `ours` false everybody else's."""
        found: dict[str, float] = {}
        for uuid, pid, mib in picture.charges:
            if self._is_ours(pid) == ours:
                found[uuid] = found.get(uuid, 0.0) + (mib or 0.0)
        return found

    def _still_full(self) -> list[str]:
        """Cards whose used memory did not fall by what was charged, less what others took meanwhile."""
        full: list[str] = []
        others_now = self._charged(self.after, ours=False)
        for uuid, mib in self._charged_before.items():
            was, now = self.before.card(uuid), self.after.card(uuid)
            if was is None or now is None or was.used is None or now.used is None:
                continue
            grown = max(0.0, others_now.get(uuid, 0.0) - self._others_before.get(uuid, 0.0))
            if now.used > was.used - mib + grown + max(_SLACK_MIB, mib / 50):
                full.append(uuid)
        return full


def _brief(holder: dict[str, Any]) -> dict[str, Any]:
    return {key: holder[key] for key in ("pid", "start", "state", "wchan", "command")}


def _rows(csv: str, width: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in csv.split("\n"))
    return [row for row in rows if len(row) == width]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # [N/A], [GPU is lost], ERR!
