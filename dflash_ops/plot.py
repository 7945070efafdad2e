"""Curves of runs in one picture: a PNG (or whatever matplotlib writes by the file's name), or a page of HTML that needs
nothing else.

matplotlib is loaded when a picture is made.
"""

import contextlib
import html
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.errors import OpsError, PreflightError, UsageFault
from dflash_ops.remote.answers import kind_of
from dflash_ops.watching import Point

# Title, what is learned with, what is measured now and then.
_PANELS = (
    ("loss", "loss", "heldout_loss"),
    ("acceptance length", "accept", "heldout_accept"),
    ("acceptance length of decoding", None, "decoded_accept"),
    ("tokens/s", "tokens_per_s", None),
)


@dataclass(frozen=True)
class Curve:
    """A run's name in the legend, what is said of it in a table, and its points."""

    label: str
    verdict: str
    points: tuple[Point, ...]


def write(curves: Sequence[Curve], file: Path, *, smooth: int = 1) -> None:
    """Writes the picture: .html, .png, .svg or .pdf. smooth: steps that a moving mean goes over.

    PreflightError without matplotlib or when the file can't be written, UsageFault for another ending."""
    ending = file.suffix.lower()
    known = (".html", ".png", ".svg", ".pdf")
    if ending not in known:
        raise UsageFault("no such kind of picture", where=str(file), next=f"end its name with {', '.join(known)}")
    if not any(curve.points for curve in curves):
        raise OpsError("there is nothing to draw", why="no step was logged yet", next="dflash-ops train status")
    figure = _figure(curves, smooth)
    content = _page(curves, figure) if ending == ".html" else _saved(figure, ending[1:])
    part = file.with_name(f".{file.name}.part")
    try:
        if (kind := kind_of(file)) not in ("", "a file"):
            raise OSError(f"{kind} is in its place")
        part.write_bytes(content)
        part.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = error.strerror or str(error)
        raise PreflightError(
            "the picture can't be written", where=str(file), why=why, next="name another file"
        ) from error


def _figure(curves: Sequence[Curve], smooth: int) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PreflightError("plot draws with matplotlib", next="pip install 'dflash-ops[plots]'") from None
    panels = [
        panel
        for panel in _PANELS
        if any(name in point for curve in curves for point in curve.points for name in panel[1:] if name)
    ]
    if not panels:
        why = "no step has a loss, an acceptance length or tokens/s"
        raise OpsError("there is nothing to draw", why=why, next="dflash-ops train logs")
    columns = 3 if len(panels) == 3 else min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure: Any = Figure(figsize=(12 if columns > 1 else 7, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, name, measured) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, curve in enumerate(curves):
            colour = f"C{number % 10}"
            line = [(point["step"], point[name]) for point in curve.points if name and name in point]
            marks = [(point["step"], point[measured]) for point in curve.points if measured and measured in point]
            if line and smooth > 1:
                axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.8, alpha=0.25, gid=f"run-{number}")
            if line:
                axes.plot(*zip(*_smoothed(line, smooth), strict=True), color=colour, linewidth=1.2, gid=f"run-{number}")
            if marks:
                style = {"marker": "x", "linestyle": ":", "linewidth": 0.9, "markersize": 5}
                axes.plot(*zip(*marks, strict=True), color=colour, gid=f"run-{number}", **style)
        axes.set_title(f"{title} (x: held out)" if name and measured else title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=f"C{number % 10}") for number in range(len(curves))]
    labels = [curve.label for curve in curves]
    figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(curves)), fontsize=8, frameon=False)
    return figure


def _smoothed(line: Sequence[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    """The mean over the points of the last `steps` steps."""
    smoothed: list[tuple[int, float]] = []
    begin, total = 0, 0.0
    for number, (step, value) in enumerate(line):
        total += value
        while line[begin][0] <= step - steps:
            total -= line[begin][1]
            begin += 1
        smoothed.append((step, total / (number - begin + 1)))
    return smoothed


def _saved(figure: Any, kind: str) -> bytes:
    content = io.BytesIO()
    # Without the time of day: the same curves make the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure.savefig(content, format=kind, dpi=110, metadata=metadata)
    return content.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; background: #fff }}
svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse }}
td, th {{ padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd }}
td:nth-child(2), th:nth-child(2), td:last-child, th:last-child {{ text-align: left }}
</style>
<h1>{title}</h1>
{svg}
<table>
<tr><th></th><th>run</th><th>step</th><th>loss</th><th>accept</th><th>held-out loss</th><th>held-out accept</th>
<th>decoded</th><th>tokens/s</th><th></th></tr>
{rows}
</table>
<script>
for (const box of document.querySelectorAll("input"))
  box.addEventListener("change", () => {{
    for (const line of document.querySelectorAll(`[id="run-${{box.value}}"]`))
      line.style.display = box.checked ? "" : "none";
  }});
</script>
</html>
"""


def _page(curves: Sequence[Curve], figure: Any) -> bytes:
    svg = _saved(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    title = "1 run" if len(curves) == 1 else f"{len(curves)} runs"
    rows = "\n".join(_row(number, curve) for number, curve in enumerate(curves))
    return _PAGE.format(title=title, svg=svg, rows=rows).encode("utf-8", "replace")


def _row(number: int, curve: Curve) -> str:
    def newest(name: str, digits: int) -> str:
        value = next((point[name] for point in reversed(curve.points) if name in point), None)
        return "-" if value is None else f"{value:.{digits}f}"

    from matplotlib.colors import to_hex

    colour = to_hex(f"C{number % 10}")
    box = f'<input type="checkbox" checked value="{number}" style="accent-color: {colour}">'
    figures = [
        newest(name, digits)
        for name, digits in (
            ("step", 0),
            ("loss", 4),
            ("accept", 2),
            ("heldout_loss", 4),
            ("heldout_accept", 2),
            ("decoded_accept", 2),
            ("tokens_per_s", 0),
        )
    ]
    cells = [box, html.escape(curve.label), *figures, html.escape(curve.verdict)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def tensorboard(folder: Path, port: int, host: str) -> tuple[str, ...]:
    """The words that open TensorBoard on a folder. PreflightError when it is not installed."""
    import sys
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise PreflightError("TensorBoard is not installed", next="pip install 'dflash-ops[board]'")
    words = (sys.executable, "-m", "tensorboard.main", "--logdir", os.fspath(folder), "--host", host)
    return (*words, "--port", str(port))
