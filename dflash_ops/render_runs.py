"""Runs for people. Values come from runs.py and stops.py; nothing is asked here."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from dflash_ops import long_table, render
from dflash_ops.runs import Run, RunProcess, RunState, Started
from dflash_ops.stops import HandProcess, Listing, SessionStopped, Stopped

# What a terminal may get of a log: text, line ends, tabs and colours.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|(\x1b\[[0-?]*[ -/]*[@-~]?|\x1b|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f])")

_CUT_SHORT = (RunState.STOPPED, RunState.FAILED, RunState.LOST)


def show_runs(runs: Sequence[Run]) -> None:
    """One line a run, the newest last."""
    columns = ("RUN", "STATE", "STEP", "LOSS", "ACCEPT", "CHECKPOINT", "CODE", "GPUS", "BEGAN", "RELEASE")
    rows = [
        (
            run.id,
            run.state.value,
            run.progress,
            figure(run.status and run.status.loss, 3),
            figure(run.status and run.status.accept, 2),
            run.checkpoints[-1] if run.checkpoints else None,
            run.code,
            ",".join(map(str, run.gpus)) or None,
            ago(run.created_at),
            run.release,
        )
        for run in runs
    ]
    long_table.show(
        columns, rows, right=("STEP", "LOSS", "ACCEPT", "CODE"), spare=("RELEASE", "CODE", "GPUS", "CHECKPOINT")
    )


def show_by_hand(found: Listing) -> None:
    """The tmux sessions of the container's default server, then the processes with a GPU that nobody owns."""
    if not found.sessions and not found.gpu_processes:
        render.say("no tmux session of the default server, no GPU process outside of runs")
    if found.sessions:
        columns = ("SESSION", "BEGAN", "ATTACHED", "PROCESSES", "GPUS", "COMMAND")
        rows = [
            (
                session.name,
                ago(session.created_at),
                "yes" if session.attached else "no",
                len(session.processes),
                ",".join(map(str, sorted({gpu for it in session.processes for gpu in it.gpus}))) or None,
                _most_telling(session.processes),
            )
            for session in found.sessions
        ]
        render.table(columns, rows, right=("PROCESSES",), spare=("ATTACHED", "BEGAN"))
        render.say("end one with all of its processes: dflash-ops train stop --session NAME")
    if found.gpu_processes:
        render.say("processes with a GPU that no run and no session owns:")
        columns = ("PID", "GPUS", "MEMORY MiB", "AGE", "COMMAND")
        rows = [
            (it.pid, ",".join(map(str, it.gpus)), figure(it.used_mib), span(it.age_s), short(it.command))
            for it in found.gpu_processes
        ]
        render.table(columns, rows, right=("PID", "MEMORY MiB"), spare=("AGE",))


def _most_telling(processes: Sequence[HandProcess]) -> str | None:
    """The command of the process with a GPU, else of the youngest, which is no shell."""
    ranked = sorted(processes, key=lambda it: (bool(it.gpus), -it.age_s))
    return short(ranked[-1].command) if ranked else None


def show_started(started: Started) -> None:
    for words in started.notes:
        render.note(words)
    for process in started.freed:
        render.say(f"freed {process.pid} ({short(process.command)}), left by an earlier run")
    again = " (it had been started already)" if started.existing else ""
    render.say(f"run {started.run.id} started{again}, release {started.run.release}")
    if started.window:
        render.say(f"  window: tmux -L dflash attach -t '={started.window}', in the container")
    if started.run.state.live:
        render.say(f"  follow it: dflash-ops train logs -f {started.run.id}")
    else:
        show_run(started.run)


def show_stopped(stopped: Stopped) -> None:
    for process in stopped.killed:
        render.say(f"killed {process.pid} ({short(process.command)}): it had not ended in the grace")
    _show_spared(stopped.spared, "it lives in a tmux server that the run began")
    lost = ", its supervisor had been lost" if stopped.was_lost else ""
    if stopped.gpu.checked:
        lost += ", GPU memory is back"
    nothing = "nothing else of it" if stopped.spared else "nothing of it"
    render.say(f"{stopped.run.verdict()}, {nothing} is left ({stopped.seconds:.1f} s{lost})")
    if kept := _kept(stopped.run):
        render.say(f"  {kept}")


def stopped_line(stopped: Stopped) -> str:
    """The end of a run that is started again at once."""
    return f"{stopped.run.verdict()}, nothing of it is left ({stopped.seconds:.1f} s)"


def _show_spared(spared: Sequence[RunProcess], why: str) -> None:
    for process in spared:
        render.say(f"left alone {process.pid} ({short(process.command)}): {why}")


def show_session_stopped(stopped: SessionStopped) -> None:
    for process in stopped.killed:
        render.say(f"killed {process.pid} ({short(process.command)}): it had not ended in the grace")
    _show_spared(stopped.spared, "a tmux server and its sessions, and runs, are others'")
    if stopped.also_in:
        render.say(f"left alone the panes that session {', '.join(stopped.also_in)} shows too")
    render.say(f"session {stopped.session} ended with {len(stopped.ended)} processes ({stopped.seconds:.1f} s)")
    if stopped.gpu.checked:
        render.say("  its GPU memory is back")


def show_run(run: Run) -> None:
    """The verdict, where the run stands, what lives of it, the last lines of a failed one."""
    render.say(run.verdict())
    if run.status and run.status.loss is not None:
        accept = f", acceptance length {run.status.accept:.2f}" if run.status.accept is not None else ""
        render.say(f"  loss {run.status.loss:.4f}{accept}")
    if run.status and run.status.heldout_loss is not None:
        accept = f", acceptance length {run.status.heldout_accept:.2f}" if run.status.heldout_accept is not None else ""
        cycle = run.status.heldout_cycle_accept
        walked = f", {cycle:.2f} tokens a cycle" if cycle is not None else ""
        render.say(f"  held out: loss {run.status.heldout_loss:.4f}{accept}{walked}")
    if run.status and run.status.decoded_accept is not None:
        render.say(f"  decoded: {run.status.decoded_accept:.2f} tokens a cycle")
    if run.checkpoints:
        render.say(f"  newest checkpoint {run.checkpoints[-1]}")
    elif run.resumes and run.state in _CUT_SHORT:
        render.say(f"  {_kept(run)}")
    if run.status and run.status.error:
        render.say(f"  {run.status.error}")
    if run.processes and not run.state.live:
        for process in run.processes:
            render.say(f"  still alive: {process.pid} ({short(process.command)}), state {process.state}")
        render.say(f"  end them: dflash-ops train stop {run.id}")
    if run.state is RunState.FAILED:
        for line in run.last_lines[-10:]:
            render.say(f"  | {line}")


def note_verdict(run: Run, container: str = "") -> None:
    """How a followed run ended, on stderr: stdout is its log's. container: told when there are several."""
    render.note(f"{container}: {run.verdict()}" if container else run.verdict())
    if run.state in _CUT_SHORT and (kept := _kept(run)):
        render.note(f"  {kept}")


def _kept(run: Run) -> str:
    """Where to go on from: the run's own checkpoint, or before its first the one that it went on from; "" for none."""
    if run.checkpoints:
        return f"newest checkpoint {run.checkpoints[-1]}; go on: --resume {run.id}"
    return (
        f"no checkpoint of its own: it had gone on from {run.resumes}; go on: --resume {run.resumes}"
        if run.resumes
        else ""
    )


def short(command: str, width: int = 60) -> str:
    """A command line for a table: the program without its folder, and no more than fits."""
    program, space, rest = command.partition(" ")
    text = program.rpartition("/")[2] + space + rest
    return text if len(text) <= width else text[: width - 1] + "…"


def figure(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def span(seconds: float | None) -> str | None:
    """A length of time in its two largest units."""
    if seconds is None:
        return None
    left = int(seconds)
    parts = ((left // 86400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s"))
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def ago(moment: str | None, now: datetime | None = None) -> str | None:
    """An RFC 3339 time as seen from now."""
    try:
        began = datetime.fromisoformat(moment or "")
    except ValueError:
        return None
    return f"{span(((now or datetime.now(UTC)) - began).total_seconds())} ago"


def printable(text: str) -> str:
    """A log's text for a terminal: control characters and escape sequences other than colours become "?"."""
    return _ESCAPES.sub(lambda match: "?" if match.group(1) else match.group(), text)
