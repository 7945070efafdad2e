"""GPUs and who holds them, as values: the questions to hosts and containers, and the joining of their answers.

A GPU is its UUID: indices differ between a host and its containers. A process is joined to its GPU by the descriptors
it has open, to its container by its pid namespace, to its run by its environment; nvidia-smi adds the memory.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflash_ops.answers import answer
from dflash_ops.command import Command, Container, Query
from dflash_ops.remote import bundle
from dflash_ops.runs import run_of

SCHEMA_VERSION = 1
SMI_SECONDS = 10.0

# Asked by these names, read by position: the header's names are others.
GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
APP_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")
_FORMAT = "--format=csv,noheader,nounits"

Kind = Literal["run", "stale", "container", "host", "dead"]


@dataclass(frozen=True)
class Gpu:
    """One GPU. None: nvidia-smi had no value. index: the host's; in_container: by vmid, the container's index."""

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


@dataclass(frozen=True)
class App:
    """One line of nvidia-smi's compute processes. The pid may be dead: then its memory is held by a child."""

    gpu_uuid: str
    pid: int
    used_mib: float | None
    name: str


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU.

    kind: "run" (of a live run), "stale" (of a run of ours that is over), "container" (in a container, of no run that we
    know), "host" (on the hypervisor itself), "dead" (nvidia-smi charges it, it is gone; `held_by`: who lives on).
    pid: the host's; container_pid: its pid in there. age_s: seconds since it began.
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

    @property
    def stale(self) -> bool:
        return self.kind == "stale"


@dataclass(frozen=True)
class GpuStatus:
    """All of one host. problems: what could not be asked, and why."""

    host: str
    gpus: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "processes": [{**asdict(process), "stale": process.stale} for process in self.processes],
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class LockHolder:
    """Who holds the lock of a GPU on the hypervisor. pid: the host's."""

    index: int
    pid: int
    run_id: str | None
    vmid: int | None


# -- questions


def host_query() -> Query[dict[str, Any]]:
    """The hypervisor's view: GPUs, memory by process, holders of devices and locks."""
    queries = {
        "gpus": [f"--query-gpu={','.join(GPU_FIELDS)}", _FORMAT],
        "apps": [f"--query-compute-apps={','.join(APP_FIELDS)}", _FORMAT],
    }
    return Query(_probe("python3", None, queries), answer)


def container_query(container: Container) -> Query[dict[str, Any]]:
    """A container's view: the indices that it has for its GPUs, its pid namespace, its runs."""
    return Query(_probe(container.python, container.path, {"gpus": ["--query-gpu=index,uuid", _FORMAT]}), answer)


def _probe(python: str, path: str | None, queries: Mapping[str, Sequence[str]]) -> Command:
    parameters = {"path": path, "queries": queries, "seconds": SMI_SECONDS}
    return bundle.command(python, "probe", parameters)


# -- reading nvidia-smi


def number(text: str) -> float | None:
    """The number; None for the bracketed non-values ([N/A], [Not Supported], [GPU is lost]) and for ERR!."""
    match = re.fullmatch(r"-?\d+(\.\d+)?", text.strip(), re.ASCII)
    return float(match.group()) if match else None


def parse_gpus(csv: str, in_container: Mapping[str, Mapping[int, int]] | None = None) -> list[Gpu]:
    """The answer to GPU_FIELDS. Lines of another width (errors, warnings) are left out."""
    gpus: list[Gpu] = []
    for cells in _rows(csv, len(GPU_FIELDS)):
        index, uuid, name, bus_id, driver, *figures = cells
        if not uuid.startswith("GPU-"):
            continue
        load, used, total, temperature, power, limit = map(number, figures)
        gpus.append(
            Gpu(
                uuid=uuid,
                index=_integer(index),
                name=name,
                bus_id=bus_id,
                driver=None if _no_value(driver) else driver,
                load_percent=load,
                used_mib=used,
                total_mib=total,
                temperature_c=temperature,
                power_w=power,
                power_limit_w=limit,
                in_container=(in_container or {}).get(uuid, {}),
            )
        )
    return gpus


def parse_apps(csv: str) -> list[App]:
    """The answer to APP_FIELDS; only the name, the last, may hold commas."""
    apps: list[App] = []
    for line in csv.split("\n"):
        cells = [cell.strip() for cell in line.split(",", len(APP_FIELDS) - 1)]
        if len(cells) == len(APP_FIELDS) and cells[0].startswith("GPU-") and (pid := _integer(cells[1])) is not None:
            apps.append(App(cells[0], pid, number(cells[2]), cells[3]))
    return apps


def parse_indices(csv: str) -> dict[str, int]:
    """UUID -> index, the answer to index,uuid."""
    found = ((uuid, _integer(index)) for index, uuid in _rows(csv, 2) if uuid.startswith("GPU-"))
    return {uuid: index for uuid, index in found if index is not None}


def _rows(csv: str, width: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in csv.split("\n"))
    return [row for row in rows if len(row) == width]


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _no_value(text: str) -> bool:
    return text.startswith("[") or text in ("", "N/A", "ERR!")


# -- joining


def by_vmid(views: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The views of containers by vmid. Those of one container, each of another folder of it, become one with the runs
    of all; what else they say is the same."""
    merged: dict[int, dict[str, Any]] = {}
    for vmid, view in views:
        known = merged.setdefault(vmid, {**view, "runs": []})
        known["runs"] = [*known["runs"], *view["runs"]]
    return merged


def join(host: str, view: Mapping[str, Any], containers: Mapping[int, Mapping[str, Any]]) -> GpuStatus:
    """One host's status, from its own view and the views of its containers by vmid."""
    gpus = parse_gpus(view["smi"]["gpus"]["out"], _indices(containers))
    apps = parse_apps(view["smi"]["apps"]["out"])
    charged = {(app.gpu_uuid, app.pid): app for app in apps}
    by_minor = _uuid_by_minor(gpus, view["minors"])
    vmids = {inside["pid_namespace"]: vmid for vmid, inside in containers.items() if inside["pid_namespace"]}
    runs = {vmid: {run.id: run for run in map(run_of, inside["runs"])} for vmid, inside in containers.items()}

    processes: list[GpuProcess] = []
    for holder in view["holders"]:
        vmid = vmids.get(holder["pid_namespace"], holder["vmid"])
        inside_host = vmid is None and holder["pid_namespace"] == view["pid_namespace"]
        for uuid in sorted({by_minor[minor] for minor in holder["minors"] if minor in by_minor}):
            app = charged.pop((uuid, holder["pid"]), None)
            run = runs.get(vmid or 0, {}).get(holder["run_id"] or "")
            kind: Kind = "host" if inside_host else "container"
            if run is not None:
                kind = "run" if run.state.live else "stale"
            processes.append(
                GpuProcess(
                    gpu_uuid=uuid,
                    pid=holder["pid"],
                    container_pid=holder["namespace_pids"][-1]
                    if not inside_host and holder["namespace_pids"]
                    else None,
                    vmid=vmid,
                    run_id=holder["run_id"],
                    kind=kind,
                    used_mib=app.used_mib if app else None,
                    age_s=holder["age_s"],
                    state=holder["state"],
                    command=holder["command"],
                )
            )
    processes += [_uncharged(app, processes, view) for app in charged.values()]
    heirs = {pid for process in processes for pid in process.held_by}
    # On the host, an open device without memory is the persistence daemon or a monitor: no user of the GPU.
    processes = [it for it in processes if it.kind != "host" or it.used_mib is not None or it.pid in heirs]
    return GpuStatus(host, tuple(gpus), tuple(processes), tuple(_problems(host, view, containers)))


def _uncharged(app: App, holders: Sequence[GpuProcess], view: Mapping[str, Any]) -> GpuProcess:
    """A charge to a process that holds no device. The driver charges memory to the process that opened the device, also
    when it is dead and only a child, which inherited the descriptor and is itself charged with nothing, keeps it."""
    living = [it for it in holders if it.gpu_uuid == app.gpu_uuid and it.used_mib is None]
    # A child that is still in the dead one's process group is certainly its own; else whoever is in a container.
    group = {holder["pid"] for holder in view["holders"] if holder["group"] == app.pid}
    own = [it for it in living if it.pid in group] or [it for it in living if it.kind != "host"] or living
    heir = own[0] if own else None
    return GpuProcess(
        gpu_uuid=app.gpu_uuid,
        pid=app.pid,
        container_pid=None,
        vmid=heir.vmid if heir else None,
        run_id=heir.run_id if heir else None,
        kind="dead",
        used_mib=app.used_mib,
        age_s=None,
        state=None,
        command=app.name,
        held_by=tuple(it.pid for it in own),
    )


def _indices(containers: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for vmid, inside in containers.items():
        for uuid, index in parse_indices(inside["smi"]["gpus"]["out"]).items():
            found.setdefault(uuid, {})[vmid] = index
    return found


def _uuid_by_minor(gpus: Sequence[Gpu], minors: Mapping[str, int]) -> dict[int, str]:
    """N of /dev/nvidiaN -> UUID: as the driver says; else nvidia-smi's index has to do for it."""
    by_bus = {bus[-12:].lower(): minor for bus, minor in minors.items()}
    found: dict[int, str] = {}
    for gpu in gpus:
        minor = by_bus.get(gpu.bus_id[-12:].lower(), gpu.index)
        if minor is not None:
            found[minor] = gpu.uuid
    return found


def _problems(host: str, view: Mapping[str, Any], containers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What nvidia-smi would not tell. In a container without GPUs it is usually not there: no problem."""
    problems: list[str] = []
    for answered in view["smi"].values():
        if answered["code"] != 0:
            last = [line for line in answered["out"].strip().split("\n") if line.strip()]
            why = answered["why"] or (last[-1] if last else f"exit code {answered['code']}")
            problems.append(f"{host}: {why}")
    for vmid, inside in containers.items():
        answered = inside["smi"]["gpus"]
        if answered["code"] not in (0, None):
            problems.append(
                f"container {vmid}: nvidia-smi ended with {answered['code']}: {answered['out'].strip()[-200:]}"
            )
    return list(dict.fromkeys(problems))


def lock_holders(view: Mapping[str, Any]) -> list[LockHolder]:
    """Who holds which GPU lock, from the host's view."""
    return [
        LockHolder(index, holder["pid"], holder["locks_for"], holder["vmid"])
        for holder in view["holders"]
        for index in holder["locks"]
    ]
