"""GPUs and who holds them, as values: the questions to hosts and containers, and the reading of nvidia-smi's words.

A GPU is its UUID: indices differ between a host and its containers. gpu_join.py joins the answers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dflash_ops.answers import answer
from dflash_ops.command import Command, Container, Query
from dflash_ops.remote import bundle
from dflash_ops.xids import Xid

SCHEMA_VERSION = 1
SMI_SECONDS = 10.0

# Asked by these names, read by position: the header's names are others. The first five are texts; of the rest, each
# with the field of Gpu that it becomes, a driver may know fewer.
_IDENTITY = ("index", "uuid", "name", "pci.bus_id", "driver_version")
_FIGURES: Mapping[str, str] = {
    "utilization.gpu": "load_percent",
    "memory.used": "used_mib",
    "memory.total": "total_mib",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "clocks.sm": "clock_sm_mhz",
    "clocks.mem": "clock_mem_mhz",
    "ecc.errors.corrected.volatile.total": "ecc_corrected",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "power.default_limit": "power_default_w",
    "pcie.link.gen.current": "pcie_gen",
    "pcie.link.gen.max": "pcie_gen_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
}
_WORDS: Mapping[str, str] = {
    "clocks_event_reasons.active": "throttled",
    "ecc.mode.current": "ecc_mode",
    "mig.mode.current": "mig_mode",
    "persistence_mode": "persistence",
    "remapped_rows.pending": "remap_pending",
    "gpu_recovery_action": "recovery_action",
}
GPU_FIELDS = (*_IDENTITY, *_FIGURES, *_WORDS)
APP_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")

# nvmlClocksEventReasons; an idle GPU, and one whose clocks somebody set, are not throttled.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake (hardware)",
}

Kind = Literal["run", "stale", "container", "host", "dead"]
Owner = Literal["run", "earlier", "unknown", "other container", "host", "nobody"]
Health = Literal["ok", "warning", "sick", "unknown"]


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: nvidia-smi had no value, and `missing` says why. index: the host's; in_container: by vmid, the
    container's index.

    other_mib: used by no process that can be seen: another tenant, or the driver itself; never stale. throttled: why
    its clocks are lowered. recovery_action: what the driver says has to be done. health: our verdict, `findings` the
    reasons for it and what to do.
    """

    uuid: str
    index: int | None
    name: str
    bus_id: str
    driver: str | None
    load_percent: float | None
    used_mib: float | None
    total_mib: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    in_container: Mapping[int, int]
    other_mib: float | None = None
    clock_sm_mhz: float | None = None
    clock_mem_mhz: float | None = None
    throttled: tuple[str, ...] | None = None
    ecc_mode: str | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    remap_pending: str | None = None
    mig_mode: str | None = None
    persistence: str | None = None
    power_default_w: float | None = None
    pcie_gen: float | None = None
    pcie_gen_max: float | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    recovery_action: str | None = None
    health: Health = "unknown"
    findings: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class App:
    """One line of nvidia-smi's compute processes. The pid may be dead: then its memory is held by a child. gpu_uuid: of
    a MIG instance on a GPU that is cut into such."""

    gpu_uuid: str
    pid: int
    used_mib: float | None
    name: str


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU.

    kind: "run" (of a live run), "stale" (of a run of ours that is over), "container" (in a container, of no run that we
    know), "host" (on the hypervisor itself), "dead" (nvidia-smi charges it, it is gone; `held_by`: who lives on).
    owner: whose it is, seen from the container that was asked about: "run" (a run there that goes on), "earlier" (a run
    there that is over), "unknown" (there, of no run), "other container", "host", "nobody" (another tenant or the
    driver). pid: the host's; container_pid: its pid in there. user: in there. age_s: seconds since it began.
    """

    gpu_uuid: str
    pid: int
    container_pid: int | None
    vmid: int | None
    run_id: str | None
    kind: Kind
    used_mib: float | None
    age_s: float | None
    state: str | None
    command: str
    held_by: tuple[int, ...] = ()
    user: str | None = None
    owner: Owner = "unknown"

    @property
    def stale(self) -> bool:
        return self.kind == "stale"


@dataclass(frozen=True)
class GpuStatus:
    """All of one host. problems: what could not be asked, and why. xids: since the oldest of the runs that go on began,
    else the newest run; without any run those of the last day. vmid: the container that was asked about."""

    host: str
    gpus: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...]
    problems: tuple[str, ...]
    xids: tuple[Xid, ...] = ()
    vmid: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "vmid": self.vmid,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "processes": [{**asdict(process), "stale": process.stale} for process in self.processes],
            "xids": [asdict(xid) for xid in self.xids],
            "problems": list(self.problems),
        }


# -- questions


def host_query() -> Query[dict[str, Any]]:
    """The hypervisor's view: GPUs, memory by process, holders of devices and locks, the kernel's Xid lines."""
    return Query(_view("python3", None, GPU_FIELDS, APP_FIELDS, root=True), answer)


def container_query(container: Container) -> Query[dict[str, Any]]:
    """A container's view: the indices that it has for its GPUs, its pid namespace, its runs and their processes."""
    return Query(_view(container.python, container.path, ("index", "uuid"), ()), answer)


def _view(python: str, path: str | None, fields: Sequence[str], apps: Sequence[str], *, root: bool = False) -> Command:
    parameters = {"path": path, "fields": fields, "apps": apps, "seconds": SMI_SECONDS}
    return bundle.command(python, "gpuview", parameters, root=root, bare=True)


# -- reading nvidia-smi


def number(text: str) -> float | None:
    """The number; None for the bracketed non-values ([N/A], [Not Supported], [GPU is lost]) and for ERR!."""
    match = re.fullmatch(r"-?\d+(\.\d+)?", text.strip(), re.ASCII)
    return float(match.group()) if match else None


def parse_gpus(
    csv: str, in_container: Mapping[str, Mapping[int, int]] | None = None, fields: Sequence[str] = GPU_FIELDS
) -> list[Gpu]:
    """The answer to these fields, which begin with index, uuid, name, bus id, driver. Lines of another width (errors,
    warnings) are left out: see `other_lines`."""
    gpus: list[Gpu] = []
    for cells in (_cells(line, fields) for line in csv.split("\n")):
        if len(cells) != len(fields):
            continue
        told = dict(zip(fields, cells, strict=True))
        if not told["uuid"].startswith("GPU-"):
            continue
        missing: dict[str, str] = {}
        for name, attribute in (*_FIGURES.items(), *_WORDS.items()):
            text = told.get(name)
            if text is None:
                missing[attribute] = "this driver does not tell"
            elif (number(text) is None) if name in _FIGURES else no_value(text):
                missing[attribute] = text or "empty"
        figures: dict[str, Any] = {attribute: number(told.get(name, "")) for name, attribute in _FIGURES.items()}
        words: dict[str, Any] = {
            attribute: None if attribute in missing else told[name] for name, attribute in _WORDS.items()
        }
        gpus.append(
            Gpu(
                uuid=told["uuid"],
                index=integer(told["index"]),
                name=told["name"],
                bus_id=told["pci.bus_id"],
                driver=None if no_value(told["driver_version"]) else told["driver_version"],
                in_container=(in_container or {}).get(told["uuid"], {}),
                missing=missing,
                throttled=_throttles(words.pop("throttled")),
                **figures,
                **words,
            )
        )
    return gpus


def _throttles(mask: str | None) -> tuple[str, ...] | None:
    """The reasons that a bit mask such as 0x0000000000000004 names."""
    if mask is None or not re.fullmatch(r"0x[0-9a-fA-F]+", mask):
        return None
    return tuple(words for bit, words in _THROTTLES.items() if int(mask, 16) & bit)


def other_lines(csv: str, fields: Sequence[str]) -> list[str]:
    """What nvidia-smi says beside the rows, or in rows without a UUID: a GPU that it can't reach, a damaged infoROM."""
    lines = [line.strip() for line in csv.split("\n") if line.strip()]
    at = fields.index("uuid")
    rows = [(line, _cells(line, fields)) for line in lines]
    return [line for line, row in rows if len(row) != len(fields) or not row[at].startswith("GPU-")]


def untold(card: Mapping[str, Any], why: str, in_container: Mapping[int, int]) -> Gpu:
    """A GPU that the driver's table has ("uuid", "name", "bus") and nvidia-smi does not tell of."""
    attributes = [*_FIGURES.values(), *_WORDS.values()]
    nothing: dict[str, Any] = dict.fromkeys(attributes)
    return Gpu(
        uuid=card["uuid"],
        index=None,
        name=card["name"],
        bus_id=card["bus"],
        driver=None,
        in_container=in_container,
        missing=dict.fromkeys(["index", "driver", *attributes], why),
        **nothing,
    )


def parse_apps(csv: str) -> list[App]:
    """The answer to APP_FIELDS; only the name, the last, may hold commas."""
    apps: list[App] = []
    for line in csv.split("\n"):
        cells = [cell.strip() for cell in line.split(",", len(APP_FIELDS) - 1)]
        if (
            len(cells) == len(APP_FIELDS)
            and cells[0].startswith(("GPU-", "MIG-"))
            and (pid := integer(cells[1])) is not None
        ):
            apps.append(App(cells[0], pid, number(cells[2]), cells[3]))
    return apps


def parse_indices(csv: str) -> dict[str, int]:
    """UUID -> index, the answer to index,uuid."""
    found = ((uuid, integer(index)) for index, uuid in _rows(csv, 2) if uuid.startswith("GPU-"))
    return {uuid: index for uuid, index in found if index is not None}


def _cells(line: str, fields: Sequence[str]) -> list[str]:
    """A row's cells. Only the name may hold commas; a row is known by its index and UUID."""
    cells = [cell.strip() for cell in line.split(",")]
    more = len(cells) - len(fields)
    if more > 0 and tuple(fields[:3]) == _IDENTITY[:3] and cells[0].isdigit() and cells[1].startswith("GPU-"):
        cells[2 : 3 + more] = [", ".join(cells[2 : 3 + more])]
    return cells


def _rows(csv: str, width: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in csv.split("\n"))
    return [row for row in rows if len(row) == width]


def integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def no_value(text: str) -> bool:
    return text.startswith("[") or text in ("", "N/A", "ERR!")
