"""How a run stands while it goes on, as a value that is told again and again; and its curves.

One command in the container sends what has changed; after a broken link it is asked anew.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_ops import runs
from dflash_ops.answers import accepted, document
from dflash_ops.command import Command, Container
from dflash_ops.errors import NotFoundError, OpsError, PreflightError, TimedOutError, UnreachableError
from dflash_ops.logs import OnWords, Patience
from dflash_ops.remote import bundle, curves
from dflash_ops.runs import Run
from dflash_ops.shell import Shell

POINTS = 2000
_SILENCE_SECONDS = 45.0  # the script says something each 10 s at least

Point = Mapping[str, Any]
"""The fields of remote/curves.py that the step's record has; `step` always."""


@dataclass(frozen=True)
class GpuLoad:
    """A GPU as the container sees it. None: nvidia-smi does not tell."""

    index: int
    name: str
    load_percent: float | None
    used_mib: float | None
    total_mib: float | None
    temperature_c: float | None
    power_w: float | None


@dataclass(frozen=True)
class View:
    """All that is known of a run now. points: oldest first, thinned; last: the newest one, with queues and workers."""

    run: Run
    points: tuple[Point, ...] = ()
    last: Mapping[str, Any] = field(default_factory=dict[str, Any])
    log: tuple[str, ...] = ()
    gpus: tuple[GpuLoad, ...] = ()
    time: str = ""
    broken: str = ""
    """Why nothing newer is known; empty while the link is whole."""

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, by the speed of the last tenth of the steps of this process."""
        if self.run.status is None or not self.run.state.live:
            return None
        left = self.run.status.total_steps - self.run.status.step
        timed = [point for point in self.points if "seconds" in point]
        # `seconds` begins at 0 in a trainer that was started again.
        begin = max((i for i in range(1, len(timed)) if timed[i]["seconds"] < timed[i - 1]["seconds"]), default=0)
        timed = timed[begin:][-max(2, len(timed[begin:]) // 10) :]
        if len(timed) < 2 or timed[-1]["step"] <= timed[0]["step"]:
            return None
        return left * (timed[-1]["seconds"] - timed[0]["seconds"]) / (timed[-1]["step"] - timed[0]["step"])

    def to_json(self) -> dict[str, Any]:
        """The document of a stream: without the curves, of which only the newest record is in it."""
        return {
            "schema_version": runs.SCHEMA_VERSION,
            "run": self.run.to_json(),
            "last": dict(self.last),
            "log": list(self.log),
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "seconds_left": self.seconds_left,
            "time": self.time,
        }


def watch(
    shell: Shell,
    container: Container,
    run: str,
    *,
    on_view: Callable[[View], None],
    interval: float = 1.0,
    lines: int = 40,
    on_break: OnWords = lambda words: None,
) -> View:
    """Tells how the run stands, until it has ended; gives the last view. interval: seconds between two looks."""
    view: View | None = None
    heard = 0

    def hear(newer: View) -> None:
        nonlocal view, heard
        view, heard = newer, heard + 1
        on_view(newer)

    def broken(words: str) -> None:
        on_break(words)
        if view is not None:
            on_view(replace(view, broken=words))

    patience = Patience(broken)
    while True:
        had = heard
        taker = _Taker(str(container), hear)
        command = _command(container, view.run.id if view else run, follow=True, interval=interval, lines=lines)
        try:
            code = shell.stream(container, command, on_out=taker, timeout=_SILENCE_SECONDS)
            if view is not None and taker.over:
                return view
            error = OpsError("the run can't be watched", where=str(container), why=f"the script's exit code is {code}")
        except (UnreachableError, PreflightError, TimedOutError) as lost:
            error = lost
            shell.close()  # the next command connects anew
        if view is None:
            raise error  # it never worked
        patience.spend(error, progress=heard != had)


def look(shell: Shell, container: Container, run: str, *, points: int = POINTS) -> View:
    """How the run stands now, with its curves."""
    views: list[View] = []
    taker = _Taker(str(container), views.append)
    command = _command(container, run, follow=False, interval=0, lines=40, points=points)
    code = shell.stream(container, command, on_out=taker, timeout=_SILENCE_SECONDS)
    if not views:
        raise OpsError("the run can't be read", where=str(container), why=f"the script's exit code is {code}")
    return views[-1]


def read_fetched(folder: Path, *, points: int = POINTS) -> tuple[Point, ...]:
    """The curves of a run that was fetched. NotFoundError when the folder has no metrics."""
    read = curves.Metrics(folder / "metrics.jsonl", points).read()
    if read is None or not read["points"]:
        raise NotFoundError("there are no metrics", where=str(folder), next="dflash-ops train fetch RUN")
    return tuple(read["points"])


def _command(
    container: Container, run: str, *, follow: bool, interval: float, lines: int, points: int = POINTS
) -> Command:
    parameters = {
        "path": container.path,
        "run": run,
        "follow": follow,
        "interval": interval,
        "points": points,
        "lines": lines,
    }
    return bundle.command(container.python, "page", parameters)


class _Taker:
    """Makes views of what the script says."""

    def __init__(self, place: str, on_view: Callable[[View], None]) -> None:
        self._place, self._on_view = place, on_view
        self._held = b""
        self._view: View | None = None
        self._points: list[Point] = []
        self.over = False

    def __call__(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        said = [reply for line in lines if (reply := document(line)) is not None]
        for reply in said:
            self._take(accepted(reply, self._place))
        if said and self._view is not None:
            self._on_view(self._view)  # only the newest: a slow terminal must not fall behind

    def _take(self, reply: Mapping[str, Any]) -> None:
        changes: dict[str, Any] = {"time": str(reply.get("time", ""))}
        if "metrics" in reply:
            new = reply["metrics"]
            self._points = thin([*([] if new["anew"] else self._points), *new["points"]], 2 * POINTS)
            changes["points"] = tuple(self._points)
            if new["last"] or new["anew"]:
                changes["last"] = new["last"] or {}
        if "log" in reply:
            changes["log"] = tuple(reply["log"])
        if "gpus" in reply:
            changes["gpus"] = tuple(gpu for row in reply["gpus"] if (gpu := _gpu(row)) is not None)
        if "facts" in reply:
            changes["run"] = runs.run_of(reply["facts"])
        self.over = bool(reply.get("over"))
        if self._view is not None:
            self._view = replace(self._view, **changes)
        elif "run" in changes:
            self._view = View(**changes)


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Every second of the points that measured nothing, when there are more than `limit`; the newest stays."""
    if len(points) <= limit:
        return list(points)
    return [
        point
        for number, point in enumerate(points)
        if number % 2 == 0 or number == len(points) - 1 or "heldout_loss" in point or "decoded_accept" in point
    ]


def _gpu(row: Sequence[str]) -> GpuLoad | None:
    """A row of nvidia-smi; None for what is none."""
    if len(row) != 7 or not row[0].isdigit():
        return None
    load, used, total, temperature, power = (_number(cell) for cell in row[2:])
    return GpuLoad(int(row[0]), row[1], load, used, total, temperature, power)


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:  # [N/A] and its kin
        return None
    return value if math.isfinite(value) else None
