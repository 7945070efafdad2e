"""Runs and GPUs as rich tables. Values come from runs.py and gpus.py; nothing is asked here."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from dflash_ops.gpus import Gpu, GpuProcess, GpuStatus
from dflash_ops.runs import Run, RunState

_STYLES = {
    RunState.STARTING: "cyan",
    RunState.RUNNING: "green",
    RunState.FINISHED: "bold",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "red",
    RunState.LOST: "red",
}
# What a terminal may get of a log: text, line ends, tabs and colours.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|(\x1b\[[0-?]*[ -/]*[@-~]?|\x1b|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f])")


def runs_table(runs: Sequence[Run], now: datetime | None = None) -> Table:
    """One line a run, the newest last."""
    columns = ("RUN", "STATE", "STEP", "LOSS", "ACCEPT", "CHECKPOINT", "CODE", "GPUS", "BEGAN", "RELEASE")
    table = _table(columns, right=("STEP", "LOSS", "ACCEPT", "CODE"))
    for run in runs:
        status = run.status
        table.add_row(
            run.id,
            Text(run.state, style=_STYLES[run.state]),
            f"{status.step}/{status.total_steps}" if status else "–",
            figure(status.loss if status else None, 3),
            figure(status.accept if status else None, 2),
            run.checkpoints[-1] if run.checkpoints else "–",
            "–" if run.code is None else str(run.code),
            ",".join(map(str, run.gpus)) or "–",
            _ago(run.created_at, now),
            run.release or "–",
        )
    return table


def run_lines(run: Run) -> list[str]:
    """A run in words: the verdict, where it stands, what lives of it, the last lines of a failed one."""
    lines = [run.verdict()]
    if run.status and run.status.loss is not None:
        accept = f", acceptance length {run.status.accept:.2f}" if run.status.accept is not None else ""
        lines.append(f"  loss {run.status.loss:.4f}{accept}")
    if run.checkpoints:
        lines.append(f"  newest checkpoint {run.checkpoints[-1]}")
    if run.status and run.status.error:
        lines.append(f"  {run.status.error}")
    if run.processes and not run.state.live:
        lines += [f"  still alive: {it.pid} ({it.command[:100]}), state {it.state}" for it in run.processes]
        lines.append(f"  end them: dflash-ops train stop {run.id}")
    if run.state is RunState.FAILED:
        lines += [f"  | {line}" for line in run.last_lines[-10:]]
    return lines


def gpus_table(status: GpuStatus) -> Table:
    columns = ("GPU", "NAME", "LOAD", "MEMORY", "TEMP", "POWER", "IN CONTAINER")
    table = _table(columns, right=("LOAD", "MEMORY", "TEMP", "POWER"))
    for gpu in status.gpus:
        table.add_row(
            _index(gpu),
            gpu.name,
            f"{figure(gpu.load_percent)} %",
            f"{figure(gpu.used_mib)} / {figure(gpu.total_mib)} MiB",
            f"{figure(gpu.temperature_c)} °C",
            f"{figure(gpu.power_w)} / {figure(gpu.power_limit_w)} W",
            ", ".join(f"{vmid}: {index}" for vmid, index in sorted(gpu.in_container.items())) or "–",
        )
    return table


def processes_table(status: GpuStatus) -> Table:
    """One line for each process on each GPU; stale ones, and the dead that are still charged, stand out."""
    table = _table(("GPU", "PID", "INSIDE", "CONTAINER", "RUN", "KIND", "MEMORY", "AGE", "COMMAND"), right=("MEMORY",))
    by_uuid = {gpu.uuid: gpu for gpu in status.gpus}
    for process in status.processes:
        gpu = by_uuid.get(process.gpu_uuid)
        table.add_row(
            _index(gpu) if gpu else process.gpu_uuid,
            str(process.pid),
            "–" if process.container_pid is None else str(process.container_pid),
            "–" if process.vmid is None else str(process.vmid),
            process.run_id or "–",
            Text(process.kind, style="bold red" if process.kind in ("stale", "dead") else ""),
            f"{figure(process.used_mib)} MiB",
            span(process.age_s),
            _command(process),
        )
    return table


def span(seconds: float | None) -> str:
    """A length of time in its two largest units."""
    if seconds is None:
        return "–"
    left = int(seconds)
    parts = ((left // 86400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s"))
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def figure(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def printable(text: str) -> str:
    """A log's text for a terminal: control characters and escape sequences other than colours become "?"."""
    return _ESCAPES.sub(lambda match: "?" if match.group(1) else match.group(), text)


def _table(columns: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis", justify="right" if column in right else "left")
    return table


def _command(process: GpuProcess) -> str:
    if process.kind != "dead":
        return process.command
    heirs = ", ".join(map(str, process.held_by))
    return f"{process.command} is dead; " + (
        f"process {heirs} lives on and holds its memory" if heirs else "holder unseen"
    )


def _index(gpu: Gpu) -> str:
    return "?" if gpu.index is None else str(gpu.index)


def _ago(moment: str | None, now: datetime | None) -> str:
    if moment is None:
        return "–"
    try:
        began = datetime.fromisoformat(moment)
    except ValueError:
        return "–"
    return f"{span(((now or datetime.now(UTC)) - began).total_seconds())} ago"
