"""The driver's Xid lines of the kernel's log: what each number means, and what to do. Pure.

Names are those of the driver's sources, advice follows NVIDIA's Xid catalogue.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Weight = Literal["program", "warning", "sick"]

_LINE = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\)(?: GPU-I:\d+)?: (\d+)(?:, pid='?([^',]*))?"
)

_RESTART = "restart the run; look at its code when it comes again"
_RESET = "stop what uses the GPU, then reset it (nvidia-smi -r -i N) or restart the host"

# number: (what it is, how bad, what to do)
_MEANINGS: Mapping[int, tuple[str, Weight, str]] = {
    8: ("the GPU stopped processing", "warning", _RESTART),
    13: ("graphics engine exception: usually the program's own fault", "program", _RESTART),
    31: ("memory page fault: usually the program's own fault", "program", _RESTART),
    32: ("invalid or corrupted push buffer", "warning", _RESTART),
    38: ("driver firmware error", "warning", _RESET),
    43: ("a channel was reset: usually the program's own fault", "program", _RESTART),
    45: ("a channel was ended early: what a kill leaves", "program", "nothing, after a kill"),
    48: ("double-bit ECC error", "sick", _RESET),
    61: ("internal microcontroller halt", "sick", _RESET),
    62: ("internal microcontroller halt", "sick", _RESET),
    63: ("a memory row was remapped", "warning", f"let the run go on; {_RESET} when it has ended"),
    64: ("a memory row could not be remapped", "sick", f"{_RESET}; return the card when it comes again"),
    69: ("graphics engine class error", "program", _RESTART),
    74: ("NVLink error", "sick", f"{_RESET}; check the bridge or the board when it comes again"),
    79: ("the GPU has fallen off the bus", "sick", "restart the host; check power, riser and cooling"),
    92: ("many single-bit ECC errors", "warning", "watch it; have the card tested when they go on"),
    94: ("contained ECC error: only the program that met it ends", "warning", "restart the run; reset the idle GPU"),
    95: ("uncontained ECC error", "sick", _RESET),
    109: ("context switch timeout", "warning", _RESTART),
    119: ("the GPU's system processor gave no answer", "sick", _RESET),
    120: ("error of the GPU's system processor", "sick", _RESET),
    121: ("C2C link error", "warning", _RESET),
    140: ("unrecovered ECC error", "sick", _RESET),
    154: ("the GPU's recovery action changed", "warning", "do what RECOVERY says"),
}  # fmt: skip


@dataclass(frozen=True)
class Xid:
    """One line. time: RFC 3339, UTC; gpu_uuid: None when no GPU has its bus id; pid: the host's, None when it was not
    told; weight: program (usually its fault), warning, sick."""

    time: str
    code: int
    bus_id: str
    gpu_uuid: str | None
    pid: int | None
    meaning: str
    weight: Weight
    action: str
    message: str


def read(records: Iterable[Mapping[str, Any]], uuid_by_bus: Mapping[str, str], since: float | None) -> list[Xid]:
    """The Xids among the log's records ({"time", "message"}). uuid_by_bus: by bus id as nvidia-smi writes it; since:
    seconds since 1970, None for all."""
    # The kernel's line has no function: 0000:01:00 for 00000000:01:00.0.
    by_slot = {_slot(bus): uuid for bus, uuid in uuid_by_bus.items()}
    found: list[Xid] = []
    for record in records:
        match = _LINE.search(record["message"])
        if match is None or (since is not None and record["time"] < since):
            continue
        bus, code, pid = match.group(1).lower(), int(match.group(2)), match.group(3)
        meaning, weight, action = _MEANINGS.get(
            code, ("not one of the common ones", "warning", f"look up Xid {code} in NVIDIA's catalogue")
        )
        found.append(
            Xid(
                time=datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                code=code,
                bus_id=bus,
                gpu_uuid=by_slot.get(_slot(f"{bus}.0")),
                pid=int(pid) if pid and pid.isascii() and pid.isdigit() else None,
                meaning=meaning,
                weight=weight,
                action=action,
                message=record["message"],
            )
        )
    return found


def _slot(bus_id: str) -> tuple[int, ...]:
    """Domain, bus and device; nvidia-smi writes the domain with eight digits, the kernel with four."""
    parts = re.fullmatch(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.\d+", bus_id.strip())
    return tuple(int(part, 16) for part in parts.groups()) if parts else ()
