"""The views of a host and of its containers, joined to one status. Pure.

A process is joined to its GPU by the descriptors it has open, to its container by its pid namespace, to its run by what
its container says of it; nvidia-smi adds the memory.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from dflash_ops import xids
from dflash_ops.gpus import (
    GPU_FIELDS,
    App,
    Gpu,
    GpuProcess,
    GpuStatus,
    Health,
    Kind,
    Owner,
    other_lines,
    parse_apps,
    parse_gpus,
    parse_indices,
    untold,
)
from dflash_ops.runs import Run, run_of
from dflash_ops.xids import Xid

_BRAKES = {"hardware slowdown", "heat (hardware)", "power brake (hardware)"}
_RECOVERY = {
    "Reset": "stop what uses it, then nvidia-smi -r -i N on the host",
    "Reboot": "restart the host",
    "Drain P2P": "end what uses several GPUs, then nvidia-smi -r -i N on the host",
    "Drain and Reset": "let what runs end, then nvidia-smi -r -i N on the host",
}
# What a container says of a process of its own, and what that makes it.
_KINDS: Mapping[str, Kind] = {"run": "run", "earlier": "stale", "unknown": "container"}
_OWNERS: Mapping[Kind, Owner] = {"run": "run", "stale": "earlier"}
_NOTHING: Mapping[str, Any] = {}
_NO_ANSWER = "no answer"  # what the probe says of an nvidia-smi that hangs
_LOST = "nvidia-smi does not tell of it"
# Lines that nvidia-smi says beside its rows: so many are shown, of such a length.
_LINES, _LINE = 5, 200
# They hold every GPU of the host, and keep no memory of the dead.
_MONITORS = ("nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nvidia-smi")


def by_vmid(views: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """The views of containers by vmid. Those of one container, each of another folder of it, become one with the runs
    of all; what else they say is the same."""
    merged: dict[int, dict[str, Any]] = {}
    for vmid, view in views:
        known = merged.setdefault(vmid, {**view, "runs": [], "holders": []})
        known["runs"] = [*known["runs"], *view["runs"]]
        known["holders"] = _clearest([*known["holders"], *view["holders"]])
    return merged


def _clearest(holders: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each process once, by the view that knows most of it: a living run of one folder is a stranger to another's."""
    ranks = {"unknown": 0, "earlier": 1, "run": 2}
    found: dict[tuple[int, int], Mapping[str, Any]] = {}
    for holder in sorted(holders, key=lambda it: ranks.get(it.get("owner", "unknown"), 0)):
        found[holder["pid"], holder["start"]] = holder
    return list(found.values())


def join(
    host: str, view: Mapping[str, Any], containers: Mapping[int, Mapping[str, Any]], own: int | None = None
) -> GpuStatus:
    """One host's status, from its own view and the views of its containers by vmid. own: the vmid that owners are told
    for; None: the only one, if there is one."""
    if own is None and len(containers) == 1:
        own = next(iter(containers))
    indices = _indices(containers)
    gpus = parse_gpus(view["smi"]["gpus"]["out"], indices, _fields(view))
    gpus = list({gpu.uuid: gpu for gpu in gpus}.values())
    gpus += _untold(gpus, view, indices)
    apps = parse_apps(view["smi"]["apps"]["out"])
    by_minor = _uuid_by_minor(gpus, view["minors"])
    charged = _charges(
        apps, gpus, {it["pid"]: {by_minor.get(minor) for minor in it["minors"]} for it in view["holders"]}
    )
    vmids: dict[str, int] = {
        inside["pid_namespace"]: vmid for vmid, inside in containers.items() if inside["pid_namespace"]
    }
    runs = {vmid: {run.id: run for run in map(run_of, inside["runs"])} for vmid, inside in containers.items()}
    # What each container says of its own processes: pid and start time there are one process.
    said: dict[tuple[int, int, int], Mapping[str, Any]] = {
        (vmid, it["pid"], it["start"]): it
        for vmid, inside in containers.items()
        for it in inside["holders"]
        if "owner" in it
    }

    processes: list[GpuProcess] = []
    for holder in [*view["holders"], *_told_inside(view, containers)]:
        vmid: int | None = vmids.get(holder["pid_namespace"], holder["vmid"])
        inside_host = vmid is None and holder["pid_namespace"] == view["pid_namespace"]
        container_pid = None if inside_host else _pid_there(holder)
        own_words = said.get((vmid or 0, container_pid or 0, holder["start"]), _NOTHING)
        run_id: str | None = own_words.get("run_id") or holder["run_id"]
        run = runs.get(vmid or 0, {}).get(run_id or "")
        kind: Kind = "host" if inside_host else "container"
        if own_words:
            kind = _KINDS[own_words["owner"]]
        elif run is not None:
            kind = "run" if run.state.live else "stale"
        # With a GPU that nobody tells of, the node's name has to do.
        cards = {by_minor.get(minor, f"/dev/nvidia{minor}") for minor in holder["minors"]}
        if not holder["minors"]:  # its files can't be read; nvidia-smi names it
            cards = {uuid for uuid, pid in charged if pid == holder["pid"]}
        for uuid in sorted(cards):
            app = charged.pop((uuid, holder["pid"]), None)
            processes.append(
                GpuProcess(
                    gpu_uuid=uuid,
                    pid=holder["pid"],
                    container_pid=container_pid,
                    vmid=vmid,
                    run_id=run_id,
                    kind=kind,
                    used_mib=app.used_mib if app else None,
                    age_s=holder["age_s"],
                    state=holder["state"],
                    command=holder["command"],
                    user=own_words.get("user") or holder.get("user"),
                    owner=_owner(kind, vmid, own),
                )
            )
    processes += [_uncharged(app, processes, view) for app in charged.values()]
    heirs = {pid for process in processes for pid in process.held_by}
    # On the host, an open device without memory is the persistence daemon or a monitor: no user of the GPU.
    processes = [it for it in processes if it.kind != "host" or it.used_mib is not None or it.pid in heirs]
    found = xids.read(view.get("xids") or (), {gpu.bus_id: gpu.uuid for gpu in gpus}, _since(runs, view))
    told = view["smi"]["apps"]["code"] == 0
    gpus = [
        _judged(_with_others(gpu, processes, told), [xid for xid in found if xid.gpu_uuid == gpu.uuid]) for gpu in gpus
    ]
    return GpuStatus(host, tuple(gpus), tuple(processes), tuple(_problems(host, view, containers)), tuple(found), own)


def _told_inside(view: Mapping[str, Any], containers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The holders that only their containers tell of, as the host would: its login user may not look into them."""
    outside = {(it["vmid"], _pid_there(it), it["start"]): it for it in view.get("hidden", ()) if it["namespace_pids"]}
    known = {it["pid"] for it in view["holders"]}
    found: list[dict[str, Any]] = []
    for vmid, inside in containers.items():
        for holder in inside["holders"]:
            it = outside.get((vmid, holder["pid"], holder["start"]))
            if it is not None and it["pid"] not in known:
                found.append({**holder, **it, "pid_namespace": inside["pid_namespace"]})
    return found


def _pid_there(holder: Mapping[str, Any]) -> int | None:
    """The pid in the container, which is the first namespace below the host's; what a container has started in one of
    its own has a further one."""
    pids = holder["namespace_pids"]
    return pids[min(1, len(pids) - 1)] if pids else None


def _untold(gpus: Sequence[Gpu], view: Mapping[str, Any], indices: Mapping[str, Mapping[int, int]]) -> list[Gpu]:
    """The GPUs that the driver has, and that nvidia-smi does not tell of: it hangs, or lost them."""
    told = view["smi"]["gpus"]
    if told["code"] is None and _NO_ANSWER not in told["why"]:
        return []  # there is no nvidia-smi
    known = {gpu.uuid for gpu in gpus}
    cards = [card for card in view.get("cards", ()) if card["uuid"] not in known]
    return [untold(card, _LOST, indices.get(card["uuid"], {})) for card in cards]


def _charges(
    apps: Sequence[App], gpus: Sequence[Gpu], held: Mapping[int, Set[str | None]]
) -> dict[tuple[str, int], App]:
    """What is charged, by GPU and pid. What MIG instances of a GPU are charged with is that GPU's: the one that the
    process holds, or the only one that is cut."""
    cut = {gpu.uuid for gpu in gpus if gpu.mig_mode == "Enabled"}
    found: dict[tuple[str, int], App] = {}
    for app in apps:
        uuid = app.gpu_uuid
        if uuid.startswith("MIG-"):
            mine = cut & held.get(app.pid, set()) or cut
            uuid = next(iter(mine)) if len(mine) == 1 else uuid
        known = found.get((uuid, app.pid))
        if known is not None and known.used_mib is not None:
            app = replace(app, used_mib=known.used_mib + (app.used_mib or 0.0))
        found[uuid, app.pid] = replace(app, gpu_uuid=uuid)
    return found


def _fields(view: Mapping[str, Any]) -> Sequence[str]:
    return view["smi"]["gpus"].get("fields") or GPU_FIELDS


def _owner(kind: Kind, vmid: int | None, own: int | None) -> Owner:
    if kind == "host":
        return "host"
    if vmid != own or vmid is None:
        return "other container"
    return _OWNERS.get(kind, "unknown")


def _with_others(gpu: Gpu, processes: Sequence[GpuProcess], told: bool) -> Gpu:
    """With the memory that no process is charged with."""
    if gpu.used_mib is None or not told:
        return gpu
    charged = sum(it.used_mib or 0.0 for it in processes if it.gpu_uuid == gpu.uuid)
    unclear = [it for it in processes if it.gpu_uuid == gpu.uuid and it.owner == "nobody"]
    charged -= sum(it.used_mib or 0.0 for it in unclear)
    return replace(gpu, other_mib=max(0.0, gpu.used_mib - charged))


def _judged(gpu: Gpu, found: Sequence[Xid]) -> Gpu:
    """With the verdict on its health."""
    sick: list[str] = []
    warnings: list[str] = []
    lost = sorted({why for why in gpu.missing.values() if "is lost" in why or "requires reset" in why or why == "ERR!"})
    sick += [f"nvidia-smi says {why}: restart the host" for why in lost]
    if gpu.missing.get("index") == _LOST:
        sick.append(f"{_LOST}, though the driver has it: look into journalctl -k --grep NVRM on the host; restart it")
    if gpu.recovery_action not in (None, "None"):
        advice = _RECOVERY.get(gpu.recovery_action, "see NVIDIA's words on recovery actions")
        sick.append(f"the driver wants: {gpu.recovery_action}; {advice}")
    if gpu.ecc_uncorrected:
        warnings.append(f"{gpu.ecc_uncorrected:.0f} uncorrectable ECC errors since the driver was loaded")
    if (gpu.remap_pending or "").lower() in ("yes", "1"):
        warnings.append("memory rows wait to be remapped: reset the GPU when nobody uses it")
    brakes = sorted(_BRAKES & set(gpu.throttled or ()))
    if brakes:
        warnings.append(f"slowed down by {', '.join(brakes)}: check cooling and power")
    for code in sorted({xid.code for xid in found if xid.weight != "program"}):
        last = [xid for xid in found if xid.code == code][-1]
        (sick if last.weight == "sick" else warnings).append(f"Xid {code}, {last.meaning}: {last.action}")
    told = gpu.used_mib is not None or gpu.recovery_action is not None
    health: Health = "sick" if sick else "warning" if warnings else "ok" if told else "unknown"
    return replace(gpu, health=health, findings=(*sick, *warnings))


def _since(runs: Mapping[int, Mapping[str, Run]], view: Mapping[str, Any]) -> float | None:
    """From when on Xids are of interest, in seconds since 1970."""
    every = [run for inside in runs.values() for run in inside.values() if run.created_at]
    live = [run for run in every if run.state.live]
    began = sorted(filter(None, (_seconds(run.created_at) for run in live or every)))
    if not began:
        return view["now"] - 86400.0 if "now" in view else None
    return began[0] if live else began[-1]


def _seconds(moment: str | None) -> float | None:
    try:
        found = datetime.fromisoformat(moment or "")
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _uncharged(app: App, holders: Sequence[GpuProcess], view: Mapping[str, Any]) -> GpuProcess:
    """A charge to a process that holds no device. The driver charges memory to the process that opened the device, also
    when it is dead and only a child, which inherited the descriptor and is itself charged with nothing, keeps it."""
    living = [
        it
        for it in holders
        if it.gpu_uuid == app.gpu_uuid and it.used_mib is None and not (it.kind == "host" and _is_monitor(it.command))
    ]
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
        owner=heir.owner if heir else "nobody",
    )


def _is_monitor(command: str) -> bool:
    return command.split(" ")[0].rpartition("/")[2] in _MONITORS


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
    if view["smi"]["gpus"]["code"] == 0:
        lines = other_lines(view["smi"]["gpus"]["out"], _fields(view))
        problems += [f"{host}: nvidia-smi: {line[:_LINE]}" for line in lines[:_LINES]]
        if len(lines) > _LINES:
            problems.append(f"{host}: nvidia-smi: and {len(lines) - _LINES} lines more that are no rows")
    if view.get("hidden"):
        problems.append(
            f"{host}: what {len(view['hidden'])} processes have open can't be read by this user: who holds a GPU on "
            "the host itself is told as far as nvidia-smi names it"
        )
    if "xids" in view and view["xids"] is None:
        problems.append(f"{host}: the kernel's log can't be read: no Xid is known")
    for vmid, inside in containers.items():
        answered = inside["smi"]["gpus"]
        if answered["code"] not in (0, None):
            problems.append(
                f"container {vmid}: nvidia-smi ended with {answered['code']}: {answered['out'].strip()[-200:]}"
            )
    return list(dict.fromkeys(problems))
