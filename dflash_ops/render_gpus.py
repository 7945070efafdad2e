"""GPUs and who holds them, for people. Values come from gpus.py and gpu_free.py; nothing is asked here."""

from collections import Counter
from collections.abc import Sequence

from dflash_ops import render
from dflash_ops.checks import Diagnosis
from dflash_ops.gpu_free import Freed, Holder
from dflash_ops.gpus import Gpu, GpuProcess, GpuStatus
from dflash_ops.render_runs import figure, short, span

# Less than that is the driver's own share of a card that is in use.
_OTHERS_MIB = 100.0


def show_gpus(status: GpuStatus) -> None:
    """The GPUs of a host, then who holds them and whose they are, then what is wrong."""
    columns = (
        "GPU", "NAME", "LOAD %", "MEMORY MiB", "OF MiB", "TEMP °C", "POWER W", "OF W", "CLOCK MHz", "HEALTH",
        "IN CONTAINER",
    )  # fmt: skip
    rows = [
        (
            _label(gpu),
            gpu.name,
            figure(gpu.load_percent),
            figure(gpu.used_mib),
            figure(gpu.total_mib),
            figure(gpu.temperature_c),
            figure(gpu.power_w),
            figure(gpu.power_limit_w),
            figure(gpu.clock_sm_mhz),
            gpu.health,
            ", ".join(f"{vmid}: {index}" for vmid, index in sorted(gpu.in_container.items())) or None,
        )
        for gpu in status.gpus
    ]
    spare = ("CLOCK MHz", "OF W", "POWER W", "TEMP °C", "IN CONTAINER")
    render.table(columns, rows, right=columns[2:9], spare=spare)
    by_uuid = {gpu.uuid: gpu for gpu in status.gpus}
    if status.processes:
        columns = ("GPU", "PID", "CONTAINER", "PID THERE", "RUN", "WHOSE", "USER", "MEMORY MiB", "AGE", "COMMAND")
        rows = [
            _process_row(process, by_uuid.get(process.gpu_uuid), more, status.vmid)
            for process, more in _gathered(status)
        ]
        spare = ("USER", "PID", "AGE", "COMMAND", "PID THERE")
        render.table(columns, rows, right=("PID", "PID THERE", "MEMORY MiB", "AGE"), spare=spare)
    else:
        render.say("no process holds a GPU")
    for line in _lines(status):
        render.say(line)
    for problem in status.problems:
        render.note(problem)


def show_freed(freed: Freed) -> None:
    """What was ended, or would be; what is left on the GPUs, and whose it is."""
    killed = {process.pid for process in freed.killed}
    for process in freed.freed:
        how = "would end" if freed.dry_run else "killed" if process.pid in killed else "ended"
        render.say(f"{how} {process.pid} ({short(process.command)})")
    for file in freed.removed:
        render.say(f"{'would remove' if freed.dry_run else 'removed'} {file}")
    if not freed.freed:
        render.say(f"{freed.container}: no earlier run of ours holds a GPU; nothing to free")
    elif freed.gpu.checked:
        render.say(f"the GPU memory is back ({freed.seconds:.1f} s)")
    if freed.left:
        render.say("left as they are:")
        _show_holders(freed.left)
    for index, mib in sorted(freed.others_mib.items()):
        if mib >= _OTHERS_MIB:
            render.say(f"GPU {index}: {mib:.0f} MiB of nobody that can be seen here: another tenant or the driver")
    if freed.gpu.why:
        render.note(f"nvidia-smi: {freed.gpu.why}")


def note_holders(holders: Sequence[Holder]) -> None:
    """What somebody is about to be asked about: on stderr, for stdout is the answer's."""
    for it in holders:
        memory = "no memory of its own" if it.used_mib is None else f"{it.used_mib:.0f} MiB"
        whose = f"of {it.run_id}, which is over" if it.owner == "earlier" else f"of no run, user {it.user}"
        render.note(f"  {it.pid}: {memory}, {span(it.age_s)} old, {whose}: {short(it.command, 100)}")


def _show_holders(holders: Sequence[Holder]) -> None:
    columns = ("PID", "GPUS", "WHOSE", "RUN", "USER", "MEMORY MiB", "AGE", "COMMAND")
    rows = [
        (
            it.pid,
            ",".join(map(str, it.gpus)) or None,
            {"run": "this run", "earlier": "earlier run"}.get(it.owner, it.owner),
            it.run_id,
            it.user,
            figure(it.used_mib),
            span(it.age_s),
            short(it.command),
        )
        for it in holders
    ]
    render.table(columns, rows, right=("PID", "MEMORY MiB", "AGE"), spare=("USER", "AGE", "COMMAND"))


def show_diagnosis(found: Diagnosis) -> None:
    """What is not well, the worst first, with what mends it; then how much is."""
    for line in found.fixed:
        render.say(f"fixed: {line}")
    for level in ("failure", "warning", "note"):
        for check in found.checks:
            if check.level == level:
                render.say(f"{level}: {check.name} ({check.where}): {check.evidence}")
                if check.fix:
                    render.say(f"  mend it: {check.fix}")
    well = [check.name for check in found.checks if check.level == "ok"]
    verdict = "nothing would stop a run" if found.ok else "a run would not work"
    render.say(f"{found.container}: {verdict}; well: {', '.join(dict.fromkeys(well)) or 'nothing'}")


def _label(gpu: Gpu) -> object:
    """Its number; the begin of its UUID where nvidia-smi has none for it."""
    return gpu.uuid[:12] if gpu.index is None else gpu.index


def _lines(status: GpuStatus) -> Sequence[str]:
    """What the tables have no column for."""
    lines: list[str] = []
    for gpu in status.gpus:
        name = f"GPU {gpu.uuid if gpu.index is None else gpu.index}"
        if gpu.other_mib is not None and gpu.other_mib >= _OTHERS_MIB:
            lines.append(f"{name}: {gpu.other_mib:.0f} MiB of nobody that can be seen: another tenant or the driver")
        if gpu.throttled:
            lines.append(f"{name}: clocks are lowered by {', '.join(gpu.throttled)}")
        if gpu.mig_mode == "Enabled":
            lines.append(f"{name}: MIG is on; load and memory belong to its instances: nvidia-smi -L")
        lines += [f"{name}: {finding}" for finding in gpu.findings]
    for xid in status.xids:
        gpu = next((gpu for gpu in status.gpus if gpu.uuid == xid.gpu_uuid), None)
        where = f"GPU {gpu.uuid if gpu.index is None else gpu.index}" if gpu else xid.bus_id
        whose = f", process {xid.pid}" if xid.pid else ""
        lines.append(f"{xid.time} {where}: Xid {xid.code}{whose}, {xid.meaning}: {xid.action}")
    if any(process.owner == "earlier" for process in status.processes):
        lines.append("earlier run: it is over; the next train start frees it, or: dflash-ops gpu free")
    if any(process.stale and process.owner == "other container" for process in status.processes):
        lines.append("of a run that is over in another container: dflash-ops gpu free -t NAME")
    return lines


def _gathered(status: GpuStatus) -> list[tuple[GpuProcess, int]]:
    """Each process with how many more like it are not shown: a live run's workers that hold the device open, as
    torch's compile workers do, and are charged with nothing, stand behind the run's process that is charged."""
    charged = {(it.gpu_uuid, it.run_id) for it in status.processes if it.kind == "run" and it.used_mib is not None}

    def is_worker(it: GpuProcess) -> bool:
        return it.kind == "run" and it.used_mib is None and (it.gpu_uuid, it.run_id) in charged

    workers = Counter((it.gpu_uuid, it.run_id) for it in status.processes if is_worker(it))
    return [
        (it, workers.pop((it.gpu_uuid, it.run_id), 0) if it.kind == "run" else 0)
        for it in status.processes
        if not is_worker(it)
    ]


def _whose(process: GpuProcess, vmid: int | None) -> str:
    match process.owner:
        case "run":
            return "this run"
        case "earlier":
            return "earlier run"
        case "nobody":
            return "another tenant or driver"
        case "unknown":
            return "unknown" if process.vmid == vmid else "another container"
        case "other container":
            # Without an own container, as on a host that only --all asks, the kind is what can be told.
            return "another container" if vmid is not None else {"run": "a run", "stale": "a run that is over"}.get(
                process.kind, "unknown"
            )  # fmt: skip
        case "host":
            return "host service"


def _process_row(process: GpuProcess, gpu: Gpu | None, more: int, vmid: int | None = None) -> tuple[object, ...]:
    words = short(process.command)
    if more:
        words = f"{short(process.command, 40)} (+{more} workers)"
    if process.kind == "dead":
        heirs = ", ".join(map(str, process.held_by))
        words = f"gone; its memory is held by {heirs}" if heirs else "gone; who holds its memory can't be seen"
    if process.state == "D":
        words += " (state D: stuck in the driver)"
    return (
        _label(gpu) if gpu else process.gpu_uuid,
        process.pid,
        process.vmid,
        process.container_pid,
        process.run_id,
        _whose(process, vmid),
        process.user,
        figure(process.used_mib),
        span(process.age_s),
        words,
    )
