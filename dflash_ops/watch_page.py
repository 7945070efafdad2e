"""The page of `train watch`: a view as lines of a terminal of some size, and a painter that sends only what changed.

Nothing is asked here. plotext draws the curves; it is loaded when a page is drawn.
"""

import contextlib
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.style import Style
from rich.text import Text

from dflash_ops.errors import PreflightError
from dflash_ops.release import printable as plain
from dflash_ops.render_runs import printable, span
from dflash_ops.runs import RunState
from dflash_ops.watching import GpuLoad, Point, View

_SMALLEST = (40, 12)
_STATES = {
    RunState.RUNNING: "bold green",
    RunState.STARTING: "bold cyan",
    RunState.STALLED: "bold yellow",
    RunState.WAITING: "bold yellow",
    RunState.FINISHED: "bold green",
    RunState.STOPPED: "bold magenta",
    RunState.FAILED: "bold red",
    RunState.LOST: "bold red",
}
_DIM = Style(dim=True)
# Curves, the most telling first: title, what is learned with, what is measured now and then.
_CHARTS = (
    ("loss", "loss", "heldout_loss"),
    ("acceptance length", "accept", "heldout_accept"),
    ("tokens/s", "tokens_per_s", None),
)
_LEAST_CHART = (34, 7)


def page(view: View, columns: int, rows: int) -> list[Text]:
    """The page: exactly `rows` lines, none longer than `columns`."""
    columns, rows = max(columns, _SMALLEST[0]), max(rows, _SMALLEST[1])
    head = [_title(view, columns), _bar(view, columns), _figures(view, columns)]
    foot = [_verdict(view)]
    gpus = _gpus(view, columns, most=2 if rows < 30 else 8)
    queues = _workings(view, columns)
    rest = rows - len(head) - len(foot) - len(gpus) - len(queues)
    charts = min(max(_LEAST_CHART[1], rest * 2 // 3), 24) if rest >= _LEAST_CHART[1] + 2 else 0
    log = rest - charts
    body = [*(_charts(view, columns, charts) if charts else []), *queues, *gpus, *_log(view, log)]
    lines = [*head, *body, *foot]
    lines = [*lines[: rows - 1], lines[-1]] if len(lines) > rows else [*lines, *[Text()] * (rows - len(lines))]
    for line in lines:
        line.truncate(columns, overflow="ellipsis")
    return lines


def _title(view: View, columns: int) -> Text:
    run = view.run
    title = Text.assemble((run.id, "bold"), "  ", (run.state.value, _STATES[run.state]))
    if run.restarts:
        title.append(f"  restarted {run.restarts}x", "yellow")
    known = plain(view.time)[11:19] + " UTC" if view.time else ""
    gap = columns - title.cell_len - len(known)
    if gap > 1:
        title.append(" " * gap).append(known, _DIM)
    return title


def _bar(view: View, columns: int) -> Text:
    status = view.run.status
    if status is None or not status.total_steps:
        return Text("no step yet", _DIM)
    share = min(1.0, status.step / status.total_steps)
    left = view.seconds_left
    words = f" {status.step}/{status.total_steps}  {share:.1%}" + (f"  {span(left)} left" if left is not None else "")
    if status.skipped:
        words += f"  {status.skipped} skipped"
    width = max(10, columns - len(words) - 1)
    full = int(share * width)
    return Text.assemble(("━" * full, "green"), ("━" * (width - full), _DIM), words)


def _figures(view: View, columns: int) -> Text:
    status = view.run.status
    if status is None:
        return Text()
    parts: list[tuple[str, str | None]] = [
        ("loss", _figure(status.loss, 4)),
        ("accept", _figure(status.accept, 2)),
        ("tok/s", _short(status.tokens_per_s)),
        ("held-out", _figure(status.heldout_loss, 4)),
        ("accept", _figure(status.heldout_accept, 2)),
        ("decoded", _figure(status.decoded_accept, 2)),
        ("lr", None if "lr" not in view.last else f"{view.last['lr']:.1e}"),
    ]
    line = Text()
    for name, value in parts:
        if value is not None and line.cell_len + len(name) + 1 + len(value) <= columns:
            line.append(f"{name} ", _DIM).append(value, "bold").append("  ")
    line.rstrip()
    return line


def _charts(view: View, columns: int, rows: int) -> list[Text]:
    count = max(1, min(len(_CHARTS), columns // _LEAST_CHART[0]))
    width = columns // count
    # The last one gets what the division leaves.
    sizes = [width] * (count - 1) + [columns - width * (count - 1)]
    drawn = [
        chart(title, view.points, name, measured, size, rows)
        for (title, name, measured), size in zip(_CHARTS, sizes, strict=False)
    ]
    return [Text("").join(parts) for parts in zip(*drawn, strict=True)]


def chart(title: str, points: Sequence[Point], name: str, measured: str | None, columns: int, rows: int) -> list[Text]:
    """A curve in braille dots, with an x for each measurement: `rows` lines of `columns` cells."""
    line = [(point["step"], point[name]) for point in points if math.isfinite(point.get(name, math.nan))]
    marks = [(point["step"], point[measured]) for point in points if measured and measured in point]
    if len(line) < 2:
        empty = [Text(" " * columns) for _ in range(rows)]
        empty[rows // 2] = Text(f"{title}: no two steps yet".center(columns), _DIM)
        return empty
    plotext = _plotext()
    plotext.terminal.limit(False, False)  # the page has its own size
    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.plot_size(columns, rows)
    figure.title(title)
    curve = figure.signal([x for x, _ in line], [y for _, y in line], marker="braille")
    curve.lines(True)
    figure.draw(curve)
    if marks:
        figure.draw(figure.signal([x for x, _ in marks], [y for _, y in marks], marker="x"))
    ticks = _steps(line[0][0], line[-1][0], max(2, columns // 12))
    figure.ruler("x").ticks(ticks, [_short(tick) for tick in ticks])
    low, high = min(y for _, y in [*line, *marks]), max(y for _, y in [*line, *marks])
    levels = _levels(low, high, max(2, rows // 3))
    digits = 0 if high - low > 20 else 1 if high - low > 2 else 2
    figure.ruler("y").ticks(levels, [_short(it) if high > 10_000 else f"{it:.{digits}f}" for it in levels])
    drawn = [Text.from_ansi(text) for text in str(figure.build()).split("\n")][:rows]
    for text in drawn:
        text.pad_right(max(0, columns - text.cell_len))
    return [*drawn, *[Text(" " * columns) for _ in range(rows - len(drawn))]]


def _plotext() -> Any:
    try:
        import plotext  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise PreflightError("watch draws with plotext", next="pip install 'dflash-ops[plots]'") from None
    if not hasattr(plotext, "figure"):
        raise PreflightError(
            "watch draws with plotext 6 or newer", why="an older one is installed", next="pip install -U plotext"
        )
    return plotext


def _steps(first: int, last: int, count: int) -> list[int]:
    return sorted({first + round((last - first) * number / (count - 1)) for number in range(count)})


def _levels(low: float, high: float, count: int) -> list[float]:
    return [low + (high - low) * number / (count - 1) for number in range(count)] if high > low else [low]


def _workings(view: View, columns: int) -> list[Text]:
    """What waits in the pipeline's queues and how busy its workers are; then the advice, if there is any."""
    lines: list[Text] = []
    line = Text()
    queues: Mapping[str, int] = view.last.get("queues") or {}
    if queues:
        line.append("queues ", _DIM).append(
            "  ".join(f"{plain(name)} {count}" for name, count in queues.items())
        ).append("  ")
    busy: list[str] = []
    workers: Mapping[str, Mapping[str, float]] = view.last.get("workers") or {}
    for name, seconds in workers.items():
        total = seconds["working"] + seconds["waiting"]
        busy.append(f"{plain(name)} {seconds['working'] / total:.0%}" if total > 0 else f"{plain(name)} -")
    if busy:
        line.append("busy ", _DIM).append("  ".join(busy))
    if line:
        lines.append(line)
    advice = view.run.status.advice if view.run.status else None
    if advice and view.run.state.live:
        lines += [Text(text, "yellow") for text in textwrap.wrap(f"advice: {printable(advice)}", columns)[:2]]
    return lines


def _gpus(view: View, columns: int, most: int) -> list[Text]:
    """A line each, those of the run first; what there is no room for is counted."""
    mine = set(view.run.gpus) if view.run.gpus_known else {gpu.index for gpu in view.gpus}
    shown = [gpu for gpu in view.gpus if gpu.index in mine]
    lines = [_gpu(gpu, columns) for gpu in shown[:most]]
    if len(shown) > most:
        loads = [gpu.load_percent for gpu in shown if gpu.load_percent is not None]
        mean = f", mean load {sum(loads) / len(loads):.0f} %" if loads else ""
        lines[-1] = Text(f"and {len(shown) - most + 1} more GPUs of the run{mean}", _DIM)
    return lines


def _gpu(gpu: GpuLoad, columns: int) -> Text:
    load = gpu.load_percent
    bar = Text("-" * 10, _DIM)
    if load is not None:
        full = round(load / 10)
        bar = Text.assemble(("█" * full, "cyan"), ("░" * (10 - full), _DIM))
    memory = f"{_figure(gpu.used_mib) or '-'}/{_figure(gpu.total_mib) or '-'} MiB"
    line = Text.assemble((f"GPU {gpu.index} ", _DIM), bar, f" {_figure(load) or '-':>3} %  {memory}")
    line.append(f"  {_figure(gpu.temperature_c) or '-'} °C  {_figure(gpu.power_w) or '-'} W")
    if columns >= 100:
        line.append(f"  {plain(gpu.name)}", _DIM)
    return line


def _log(view: View, rows: int) -> list[Text]:
    if rows < 1:
        return []
    lines = [
        Text(printable(line.replace("\t", "    ").rstrip("\r").rpartition("\r")[2]), _DIM) for line in view.log[-rows:]
    ]
    return [Text.from_ansi(line.plain, style=_DIM) for line in lines] + [Text()] * (rows - len(lines))


def _verdict(view: View) -> Text:
    if view.broken:
        return Text(f"trying again: {printable(view.broken)}", "bold yellow")
    if view.run.state.live:
        return Text("Ctrl-C leaves this page; the run goes on", _DIM)
    error = view.run.status.error if view.run.status else None
    return Text(plain(view.run.verdict()) + (f": {printable(error)}" if error else ""), _STATES[view.run.state])


def _figure(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _short(value: float | None) -> str:
    """A number in few characters: 950, 12.3k, 4.56M."""
    if value is None:
        return "-"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.0f}"


class Painter:
    """Shows pages on a terminal: of each only the lines that are not there already, so that nothing flickers and a slow
    link carries little. The terminal gets its old content back at the end."""

    def __init__(self, out: TextIO, size: Callable[[], tuple[int, int]]) -> None:
        self._out, self._size = out, size
        self._shown: list[str] = []
        self._drawn_for = (0, 0)

    def __enter__(self) -> "Painter":
        self._out.write("\x1b[?1049h\x1b[?25l\x1b[?7l")  # other screen, no cursor, no wrapping
        self._out.flush()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed has no content to get back
            self._out.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
            self._out.flush()

    def show(self, view: View) -> None:
        size = self._size()
        lines = ansi(page(view, *size), size[0])
        words: list[str] = []
        if size != self._drawn_for:
            self._drawn_for, self._shown = size, []
            words.append("\x1b[2J")
        for number, line in enumerate(lines[: size[1]]):
            if number >= len(self._shown) or self._shown[number] != line:
                words.append(f"\x1b[{number + 1};1H{line}\x1b[0m\x1b[K")
        self._shown = lines
        if words:
            # Between these two a terminal that knows them shows all at once.
            self._out.write(f"\x1b[?2026h{''.join(words)}\x1b[?2026l")
            self._out.flush()


def ansi(lines: Sequence[Text], columns: int) -> list[str]:
    """The lines with their styles as escape sequences; without colours when NO_COLOR says so."""
    console = Console(force_terminal=True, width=columns, legacy_windows=False, highlight=False)
    with console.capture() as captured:
        for line in lines:
            console.print(line, soft_wrap=True, end="\n")
    return captured.get().split("\n")[: len(lines)]
