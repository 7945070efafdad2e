"""Watching a run: what is read of its metrics, the page, the terminal that it is painted on; pictures of curves."""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from hypothesis import given
from hypothesis import strategies as st
from in_container import run_folder, stand_in_at
from proxy import Proxy
from stand_in import retry_until
from test_keeping import Terminal, in_process
from test_logs import proxied
from test_runs import facts
from typer.testing import CliRunner

from dflash_ops import plot, runs, train, watch_page, watching
from dflash_ops.cli import app
from dflash_ops.command import Container
from dflash_ops.errors import NotFoundError, OpsError, PreflightError, UsageFault
from dflash_ops.remote import curves
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.shell import Shell
from trainer.records import StepRecord

Columns = st.integers(20, 260)
Rows = st.integers(5, 90)


def record(step: int, **more: Any) -> str:
    """A line as the trainer writes it."""
    told = {"loss": 5 - step / 1000, "accept": 1 + step / 1000, "seconds": step * 0.5, "time": "2026-11-29T12:00:00Z"}
    return StepRecord(
        **{"step": step, "lr": 6e-4, "tokens": 10, "tokens_per_s": 41_000.0, **told, **more}
    ).model_dump_json()


def view(count: int = 300, state: RunState = RunState.RUNNING, **more: Any) -> watching.View:
    points = tuple(
        {"step": step, "loss": 5 - step / 1000, "accept": 1 + step / 1000, "tokens_per_s": 41e3, "seconds": step * 0.5}
        | ({"heldout_loss": 4.0, "heldout_accept": 2.0} if step % 100 == 0 else {})
        for step in range(1, count + 1)
    )
    status = {"state": "training", "step": count, "total_steps": 1000, "loss": 4.7, "accept": 1.3, "updated_at": "x"}
    run = replace(runs.run_of({**facts(), "status": status}), state=state, gpus=(0, 1))
    busy = {"target 0": {"working": 3.0, "waiting": 1.0}}
    gpus = tuple(watching.GpuLoad(index, "H200", 97.0, 1e5, 143771.0, None, None) for index in (0, 1, 7))
    last = {"lr": 6e-4, "queues": {"features": 3}, "workers": busy}
    view = watching.View(run, points, last, ("a line", "step 300/1000"), gpus, "2026-11-29T12:31:44Z")
    return replace(view, **more)


# -- curves


def test_metrics_are_read_as_they_grow(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = curves.Metrics(file, 100)
    assert metrics.read() is None
    file.write_text(record(1) + "\n" + "[1]\n{\n" + '{"step": "x"}\n' + record(2)[:20])
    first = metrics.read()
    assert first and first["anew"] and [it["step"] for it in first["points"]] == [1]
    assert metrics.read() is None
    with file.open("a") as more:
        more.write(record(2)[20:] + "\n" + record(3, queues={"rows": 2}, accuracy_by_slot=[0.5]) + "\n")
    second = metrics.read()
    assert second and not second["anew"] and [it["step"] for it in second["points"]] == [2, 3]
    assert second["last"]["queues"] == {"rows": 2} and "accuracy_by_slot" not in second["last"]
    # A resumed trainer leaves out what comes again.
    (tmp_path / "new").write_text(record(1) + "\n")
    (tmp_path / "new").replace(file)
    third = metrics.read()
    assert third and third["anew"] and [it["step"] for it in third["points"]] == [1]


@given(count=st.integers(1, 3000), limit=st.integers(20, 200))
def test_long_curves_are_thinned_evenly_and_measurements_stay(count: int, limit: int, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    measured = range(100, count + 1, 1000)
    lines = (record(it, **({"heldout_loss": 2.0} if it in measured else {})) for it in range(1, count + 1))
    file.write_text("\n".join(lines) + "\n")
    read = curves.Metrics(file, limit).read()
    assert read is not None
    steps = [it["step"] for it in read["points"]]
    assert steps == sorted(set(steps)) and {1, count} <= set(steps) and set(measured) <= set(steps)
    assert len(steps) <= limit + len(measured) + 2 and len(steps) >= min(count, limit // 2)
    plain = [step for step in steps if step not in measured][:-1]
    gaps = [later - earlier for earlier, later in pairwise(plain)]
    assert not gaps or max(gaps) <= min(gaps) + 3


def test_the_time_that_is_left() -> None:
    assert view(300).seconds_left == pytest.approx(350)
    assert view(300, RunState.FINISHED).seconds_left is None
    assert view(1).seconds_left is None
    # Started again at step 200, in a process that is slower: only that one counts.
    again = tuple({"step": step, "seconds": (step - 200) * 2.0} for step in range(201, 206))
    assert replace(view(300), points=view(200).points + again).seconds_left == pytest.approx(1400)


# -- the page


@given(columns=Columns, rows=Rows, state=st.sampled_from(RunState), count=st.sampled_from([0, 1, 2, 300]))
def test_a_page_fits_any_terminal(columns: int, rows: int, state: RunState, count: int) -> None:
    shown = watch_page.page(view(count, state), columns, rows)
    assert len(shown) == max(rows, 12) and max(line.cell_len for line in shown) <= max(columns, 40)
    text = "\n".join(line.plain for line in shown)
    assert ("goes on" in text) == state.live and "\x1b" not in text


def test_what_is_on_the_page() -> None:
    def text(view: watching.View, columns: int, rows: int) -> str:
        return "\n".join(line.plain for line in watch_page.page(view, columns, rows))

    small = text(view(), 80, 24)
    for words in ("running", "300/1000  30.0%  5 m 50 s left", "loss 4.7000", "acceptance length", "features 3",
                  "target 0 75%", "GPU 1", "97 %", "100000/143771 MiB", "step 300/1000", "12:31:44"):  # fmt: skip
        assert words in small, words
    assert "GPU 7" not in small and "tokens/s" not in small  # another run's; no room
    wide = text(view(), 160, 48)
    assert "tokens/s" in wide and wide.count("⠤") + wide.count("⠒") + wide.count("⠉") > 20
    assert "x" in wide.split("queues")[0].partition("loss")[2]
    assert "trying again" in text(view(broken="the link broke"), 80, 24)
    hostile = text(view(log=("\x1b[2J\x1b]0;title\x07 bad", "50%\r60%")), 80, 24)
    assert "\x1b" not in hostile and "60%" in hostile and "50%" not in hostile
    assert "failed" in text(view(state=RunState.FAILED), 80, 24)


def test_odd_records_are_not_drawn_and_send_no_escapes(tmp_path: Path) -> None:
    lines = [
        record(1),
        '{"step": 2, "loss": "n/a", "accept": NaN, "lr": [1], "tokens_per_s": 1e999, "seconds": true, "time": 3}',
        '{"step": 3, "loss": 2.0, "queues": ["a"], "workers": {"target": {"busy": 1}}}',
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines) + "\n")
    read = curves.Metrics(file, 100).read()
    assert read is not None and read["last"] == {"step": 3, "loss": 2.0}
    assert read["points"][1:] == [{"step": 2}, {"step": 3, "loss": 2.0}]
    evil = "q\x1b]0;PWNED\x07"
    good = {"step": 4, "queues": {evil: 3}, "workers": {evil: {"working": 1.0, "waiting": 3}}}
    file.write_text(json.dumps(good) + "\n")
    read = curves.Metrics(file, 100).read()
    assert read is not None and read["last"] == good
    row = ("0", evil, "nan", "inf", "1", "[N/A]", "2")
    gpu = watching._gpu(row)
    assert gpu is not None and (gpu.load_percent, gpu.used_mib, gpu.total_mib) == (None, None, 1.0)
    shown = watch_page.page(view(last=read["last"], gpus=(gpu,), time=f"2026-11-29T{evil}"), 160, 40)
    text = "\n".join(line.plain for line in shown)
    assert "\x1b" not in text and "\x07" not in text
    assert "\\x1b]0;PWNED\\x07 3" in text and "PWNED\\x07 25%" in text
    with pytest.raises(OpsError, match="nothing to draw"):
        plot.write([plot.Curve("a", "", ({"step": 1}, {"step": 2}))], tmp_path / "x.png")


def test_a_log_line_that_ends_in_a_return_is_shown() -> None:
    shown = watch_page.page(view(log=("10 %\r20 %", "dos\r")), 80, 24)
    assert {"20 %", "dos"} <= {line.plain for line in shown}


class Screen:
    """What a terminal shows that gets what the painter writes."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}

    def feed(self, text: str) -> None:
        if "\x1b[2J" in text:
            self.rows.clear()
        for row, line in re.findall(r"\x1b\[(\d+);1H(.*?)\x1b\[0m\x1b\[K", text):
            self.rows[int(row)] = re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_only_what_changed_is_painted() -> None:
    out, screen, size = io.StringIO(), Screen(), (80, 24)

    def painted(shown: watching.View) -> int:
        out.seek(0)
        out.truncate()
        painter.show(shown)
        screen.feed(out.getvalue())
        page = watch_page.page(shown, *size)
        assert [screen.rows[row + 1].rstrip() for row in range(size[1])] == [line.plain.rstrip() for line in page]
        return len(out.getvalue())

    with watch_page.Painter(out, lambda: size) as painter:
        assert out.getvalue().startswith("\x1b[?1049h")
        first = view()
        whole = painted(first)
        assert painted(first) == 0
        assert 0 < painted(replace(first, time="2026-11-29T12:31:45Z")) < whole / 10
        size = (100, 30)
        assert painted(first) > whole
        assert painted(view(301)) < whole
    assert out.getvalue().endswith("\x1b[?1049l")


def test_without_plotext_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotext", None)
    with pytest.raises(PreflightError, match=r"plotext.*pip install 'dflash-ops\[plots\]'"):
        watch_page.page(view(), 80, 24)


# -- a run


@pytest.fixture
def place(box: Box) -> Iterator[Container]:
    with stand_in_at(box.container) as place:
        yield place


@pytest.fixture
def run(place: Container, shell: Shell) -> runs.Run:
    """A run with metrics of 300 steps, as the real trainer's."""
    run = train.start(shell, place, StartRequest("a", "pause = 0.1", "mine.toml", gpus=())).run
    lines = "\n".join(record(step, **({"heldout_loss": 4.0} if step % 100 == 0 else {})) for step in range(1, 301))
    folder = run_folder(place, run.id)
    (folder / "metrics.jsonl").write_text(f"{lines}\n")
    (folder / "events").mkdir()
    (folder / "events" / "tf").write_text("e\n")
    return run


def test_a_run_is_watched_across_a_cut_to_its_end(
    place: Container, run: runs.Run, shell: Shell, tmp_path: Path
) -> None:
    with Proxy(place.host, tmp_path) as proxy:
        far = Cli(proxied(place, proxy, tmp_path))
        terminal = Terminal(far.words("train", "watch", "--interval", "0.1"), far.environment(), 80, 24)
        retry_until(lambda: b"300" in terminal.read() and "⠉".encode() in terminal.shown)
        retry_until(lambda: re.search(rb"step \d+", terminal.read()))
        proxy.cut()
        retry_until(lambda: b"trying again" in terminal.read())
        had = len(terminal.shown)
        retry_until(lambda: re.search(rb"step \d+", terminal.read()[had:]))
        train.stop(shell, place, run.id)
        assert terminal.end() == 103
    assert b"stopped" in terminal.shown.rpartition(b"\x1b[?1049l")[2]


def test_ctrl_c_leaves_the_page_and_json_is_a_line_each(
    place: Container, run: runs.Run, cli: Cli, shell: Shell
) -> None:
    terminal = Terminal(cli.words("train", "watch", run.id), cli.environment(), 80, 24)
    retry_until(lambda: b"Ctrl-C leaves this page" in terminal.read())
    terminal.press(b"\x03")
    assert terminal.end() == 130 and b"the run goes on" in terminal.shown.rpartition(b"\x1b[?1049l")[2]
    with cli.start("train", "watch", "--json", "--interval", "0.1") as watcher:
        assert watcher.stdout is not None
        first, second = (json.loads(watcher.stdout.readline()) for _ in range(2))
        assert (first["schema_version"], first["run"]["state"], first["last"]["step"]) == (1, "running", 300)
        assert second["log"] and second["time"] > first["time"]
        train.stop(shell, place, run.id)
        rest = watcher.stdout.read().splitlines()
        assert watcher.wait(60) == 103 and json.loads(rest[-1])["run"]["state"] == "stopped"
    assert isinstance(in_process(cli, "train", "watch"), UsageFault)  # no terminal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_screen(number: int) -> None:
    script = """
import os, signal, sys, time
from dflash_ops import cli_watch, inventory, runs, shell, watching
def watch(*_, **__):
    print("ready", flush=True)
    time.sleep(20)
watching.watch = watch
cli_watch.find_container = lambda *_: None
cli_watch.watch("a", 1.0, None, None, False)
"""
    terminal = Terminal([sys.executable, "-c", script], dict(os.environ), 80, 24)
    retry_until(lambda: b"ready" in terminal.read())
    os.kill(terminal.process.pid, number)
    assert terminal.end() == 128 + number
    assert terminal.shown.endswith(b"\x1b[?1049l")


# -- pictures


def test_pictures_of_fetched_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a<b"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(record(step) for step in range(1, 50)) + "\n")
    one = plot.Curve("a<b", "finished", watching.read_fetched(folder))
    other = plot.Curve("other", "failed", ({"step": 5, "decoded_accept": 2.5}, {"step": 9, "decoded_accept": 3.0}))
    plot.write([one, other], tmp_path / "x.png", smooth=10)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    plot.write([one, other], tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "<svg" in page and "a&lt;b" in page and "a<b" not in page and "3.00" in page and 'id="run-1"' in page
    assert not re.search(r"""(src|href)=["']?http|@import|url\(http""", page)  # it needs nothing else
    with pytest.raises(UsageFault, match="no such kind"):
        plot.write([one], tmp_path / "x.bmp")
    (tmp_path / "link.png").symlink_to("x.png")
    with pytest.raises(PreflightError, match=r"can't be written .*a link is in its place"):
        plot.write([one], tmp_path / "link.png")
    (tmp_path / "link.png").unlink()
    with pytest.raises(PreflightError, match="can't be written"):
        plot.write([one], tmp_path / "none" / "x.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PreflightError, match="can't be written"):
        plot.write([one], tmp_path / "folder.png")
    with pytest.raises(OpsError, match="nothing to draw"):
        plot.write([plot.Curve("a", "", ())], tmp_path / "x.png")
    with pytest.raises(NotFoundError, match="no metrics"):
        watching.read_fetched(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(PreflightError, match=r"pip install 'dflash-ops\[plots\]'"):
        plot.write([one], tmp_path / "y.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a<b", "folder.png", "x.html", "x.png"]


def test_smoothing() -> None:
    assert plot._smoothed([(1, 1.0), (2, 3.0), (3, 5.0), (10, 7.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0), (10, 7.0)]


def test_a_plot_and_a_board_of_a_run(
    place: Container, run: runs.Run, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = {"DFLASH_OPS_INVENTORY": str(cli.inventory)}
    words = ["train", "plot", run.id, "-o", str(tmp_path / "loss.png"), "--json"]
    done = CliRunner().invoke(app, words, env=inventory)
    assert json.loads(done.stdout)["runs"] == [{"run_id": run.id, "points": 300}]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(plot, "tensorboard", lambda *_: pytest.fail("it is not needed"))
    fetched = CliRunner().invoke(app, ["train", "board", "--fetch-only", "-o", str(tmp_path / "board")], env=inventory)
    assert fetched.exit_code == 0, fetched.exception
    assert [str(it.relative_to(tmp_path / "board")) for it in (tmp_path / "board").rglob("*") if it.is_file()] == [
        f"{run.id}/events/tf"
    ]


def test_tensorboard_opens(tmp_path: Path, soak: bool) -> None:
    words = plot.tensorboard(tmp_path, 0, "localhost")
    assert words[-2:] == ("--port", "0") and str(tmp_path) in words
    if not soak:
        return
    import subprocess

    with subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "PYTHONWARNINGS": "ignore"}) as board:
        assert board.stderr is not None
        assert any(b"http://localhost" in line for line in board.stderr)
        board.send_signal(signal.SIGINT)
        board.wait(20)
