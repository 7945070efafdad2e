"""What `dflash-ops train` shows of runs: logs, list, status, wait. Each calls one verb.

cli_train.py registers them.
"""

import codecs
import json
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dflash_ops import hints, leaving, render
from dflash_ops.cli_many import There, error_document, in_containers, leave
from dflash_ops.errors import OpsError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.many import At, Outcome
    from dflash_ops.runs import Run
    from dflash_ops.stops import Listing

T = TypeVar("T")
_LONGEST_LINE = 1 << 20


def not_empty(word: str | None) -> str | None:
    """What a script hands over as "$RUN" when it has none must not become the default."""
    if word == "":
        raise UsageFault("an empty word names nothing", next="leave it out, or give a name of dflash-ops train list")
    return word


AnyRun = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's id, or a name. Default: the run that goes on, else the newest.",
        callback=not_empty,
    ),
]


LEFT = "left it; the run goes on"


@in_containers
def logs(
    there: There,
    run: AnyRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Goes on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("-n", "--tail", min=0, metavar="N", help="Only the last N lines.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="10m|TIME", help="Only what was written since: 10m, 1h30m, or an RFC 3339 time."),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only lines that match; --tail counts these.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document a line, the run itself as the last one.")
    ] = False,
) -> None:
    """Show a run's log, byte for byte. With -f the exit code is the run's verdict: 0, 100 failed, 103 stopped.

    With --on each line comes with its container's name before it, as it is written."""
    from dflash_ops import logs as verbs
    from dflash_ops import train

    begin = verbs.parse_since(since) if since is not None else None
    pattern = verbs.check_pattern(grep) if grep is not None else None

    def read(at: "At[Container]", out: Callable[[bytes], None], note: Callable[[str], None]) -> "Run":
        return verbs.logs(
            at.shell,
            at.place,
            run or train.newest(at.shell, at.place).id,
            on_out=out,
            follow=follow,
            tail=tail,
            since=begin,
            grep=pattern,
            on_break=note,
        )

    found = read_logs(there, read, there.containers)
    leaving.due(code := worst_of(found, lambda run: run.exit_code if follow else 0))
    tell_runs(there, found, verdict=follow)
    leave(code)


@in_containers
def list_(
    there: There,
    everything: Annotated[
        bool,
        typer.Option("-a", "--all", help="Also tmux sessions started by hand, and GPU processes that no run owns."),
    ] = False,
) -> None:
    """List the container's runs, the oldest first."""
    from dflash_ops import stops, train

    def ask(at: "At[Container]") -> "tuple[Container, Listing]":
        if everything:
            return at.place, train.list_all(at.shell, at.place)
        return at.place, stops.Listing(tuple(train.list_runs(at.shell, at.place)), (), ())

    there.serve(
        ask,
        lambda found: _show_listing(*found, everything),
        document=lambda found: found[1].to_json() if everything else {"runs": found[1].to_json()["runs"]},
    )


def _show_listing(container: "Container", found: "Listing", everything: bool) -> None:
    from dflash_ops import render_runs

    if found.runs:
        render_runs.show_runs(found.runs)
    else:
        render.say(f"no runs in {container}; dflash-ops train start makes one")
    if everything:
        render_runs.show_by_hand(found)


@in_containers
def status(
    there: There,
    run: AnyRun = None,
) -> None:
    """Say how a run stands. The exit code is 0 when that could be told; --json has the run's own."""
    from dflash_ops import render_runs, train

    there.serve(
        lambda at: train.status(at.shell, at.place, run or train.newest(at.shell, at.place).id),
        render_runs.show_run,
    )


@in_containers
def wait(
    there: There,
    run: AnyRun = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Give up after so many seconds: exit code 101.")] = None,
) -> None:
    """Wait until a run has ended, and exit with its own exit code (103 when it was stopped)."""
    from dflash_ops import render_runs, train

    def wait_for(at: "At[Container]") -> "Run":
        name = run or train.newest(at.shell, at.place).id
        return train.wait(at.shell, at.place, name, timeout=timeout)

    there.serve(wait_for, render_runs.show_run, code=lambda run: run.own_code, lasting=True, left=LEFT)


# -- logs, of one run or of several at once

Reader = Callable[["At[Container]", Callable[[bytes], None], Callable[[str], None]], "Run"]


def read_logs(
    there: There, read: Reader, places: "Mapping[str, Container | OpsError]"
) -> "list[Outcome[Container, Run]]":
    """Reads the runs' logs to stdout, by `read(at, on_out, on_break)`. Ctrl-C leaves them, and the runs go on."""

    from dflash_ops import render_many

    def show(at: "At[Container]") -> "Run":
        label = at.name if there.many else None
        out = JsonLines(label) if there.as_json else LabelledLines(label) if label is not None else _log_writer()
        found = read(at, out, lambda words: at.note(f"{words}; going on"))
        if isinstance(out, LogLines):
            out.close()
        return found

    return there.gather(show, places, board=render_many.Lines(), lasting=True, left=LEFT)


def tell_runs(there: There, found: "list[Outcome[Container, Run]]", *, verdict: bool = False) -> None:
    """What comes after the logs: with --json each run or error; else the errors, and with `verdict` how each ended."""
    from dflash_ops import render_runs

    for it in found:
        name = {"container": it.name} if there.many else {}
        if it.error is not None:
            render.note(hints.of(it.name if there.many else None, f"dflash-ops: {it.name}: {it.error.line()}"))
        if there.as_json:
            what = {"error": error_document(it.error)} if it.error is not None else {"run": it.result().to_json()}
            render.show({**name, **what}, as_json=True, people=lambda: None)
        elif verdict and it.error is None:
            render_runs.note_verdict(it.result(), it.name if there.many else "")


def worst_of(found: "list[Outcome[Container, Run]]", code: "Callable[[Run], int]") -> int:
    """The worst exit code of runs and of errors."""
    from dflash_ops import many

    return many.worst([it.error.exit_code if it.error is not None else code(it.result()) for it in found])


# Lines of several logs are written one after the other.
_writing = threading.Lock()


class LogLines:
    """Takes a log's bytes and writes its whole lines; one of more than a MiB comes in pieces."""

    def __init__(self, label: str | None = None) -> None:
        self._label, self._held = label, b""

    def __call__(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST_LINE:
            lines, self._held = [*lines, self._held], b""
        self._print(lines)

    def close(self) -> None:
        """Writes what the log's last line has, though it lacks its end."""
        if self._held:
            self._print([self._held])
            self._held = b""

    def _print(self, lines: list[bytes]) -> None:
        with _writing, render.written():
            for line in lines:
                self._write(line)
            sys.stdout.flush()

    def _write(self, line: bytes) -> None:
        raise NotImplementedError


class JsonLines(LogLines):
    """Lines as JSON documents. One that is not UTF-8 has marks where it is not."""

    def _write(self, line: bytes) -> None:
        name = {} if self._label is None else {"container": self._label}
        print(json.dumps({"schema_version": 1, **name, "line": line.decode("utf-8", "replace")}))


class LabelledLines(LogLines):
    """Lines with the container's name before them; on a terminal without what could upset it."""

    def _write(self, line: bytes) -> None:
        if not sys.stdout.isatty():
            sys.stdout.buffer.write(f"{self._label} | ".encode() + line + b"\n")
            return
        from dflash_ops.render_runs import printable

        sys.stdout.write(f"{self._label} | {printable(line.decode('utf-8', 'replace'))}\n")


def leave_by_ctrl_c(read: Callable[[], T]) -> T:
    """Ctrl-C ends the reading, not the run."""
    try:
        return read()
    except KeyboardInterrupt:
        render.note(LEFT)
        raise typer.Exit(130) from None


def _log_writer() -> Callable[[bytes], None]:
    """Writes a log's bytes to stdout as they are; on a terminal without what could upset it."""
    if not sys.stdout.isatty():

        def write(data: bytes) -> None:
            with render.written():
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

        return write

    from dflash_ops.render_runs import printable

    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        with render.written():
            sys.stdout.write(printable(decoder.decode(data)))
            sys.stdout.flush()

    return show
