"""What `dflash-ops train` shows of runs: logs, list, status, wait. Each calls one verb.

cli_train.py registers them.
"""

import codecs
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dflash_ops import render
from dflash_ops.cli_words import InventoryFile, Json, Target, find_container
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.runs import Run

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


def logs(
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
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document a line, the run itself as the last one.")
    ] = False,
) -> None:
    """Show a run's log, byte for byte. With -f the exit code is the run's verdict: 0, 100 failed, 103 stopped."""
    from dflash_ops import logs as verbs
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    begin = verbs.parse_since(since) if since is not None else None
    pattern = verbs.check_pattern(grep) if grep is not None else None
    container = find_container(inventory, target)
    with Shell() as shell:
        name = run or train.newest(shell, container).id

        def read(out: Callable[[bytes], None], note: Callable[[str], None]) -> "Run":
            return verbs.logs(
                shell,
                container,
                name,
                on_out=out,
                follow=follow,
                tail=tail,
                since=begin,
                grep=pattern,
                on_break=note,
            )

        found = follow_log(read, as_json)
    if as_json:
        render.show({"run": found.to_json()}, as_json=True, people=lambda: None)
    elif follow:
        render_runs.note_verdict(found)
    if follow:
        raise typer.Exit(found.exit_code)


def list_(
    everything: Annotated[
        bool,
        typer.Option("-a", "--all", help="Also tmux sessions started by hand, and GPU processes that no run owns."),
    ] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """List the container's runs, the oldest first."""
    from dflash_ops import render_runs, stops, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        if everything:
            found = train.list_all(shell, container)
        else:
            found = stops.Listing(tuple(train.list_runs(shell, container)), (), ())

    def people() -> None:
        if found.runs:
            render_runs.show_runs(found.runs)
        else:
            render.say(f"no runs in {container}; dflash-ops train start makes one")
        if everything:
            render_runs.show_by_hand(found)

    document = found.to_json() if everything else {"runs": found.to_json()["runs"]}
    render.show(document, as_json=as_json, people=people)


def status(run: AnyRun = None, target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """Say how a run stands. The exit code is 0 when that could be told; --json has the run's own."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        found = train.status(shell, container, run or train.newest(shell, container).id)
    render.show(found.to_json(), as_json=as_json, people=lambda: render_runs.show_run(found))


def wait(
    run: AnyRun = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Give up after so many seconds: exit code 101.")] = None,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Wait until a run has ended, and exit with its own exit code (103 when it was stopped)."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        name = run or train.newest(shell, container).id
        found = leave_by_ctrl_c(lambda: train.wait(shell, container, name, timeout=timeout))
    render.show(found.to_json(), as_json=as_json, people=lambda: render_runs.show_run(found))
    raise typer.Exit(found.own_code)


def follow_log(read: "Callable[[Callable[[bytes], None], Callable[[str], None]], Run]", as_json: bool = False) -> "Run":
    """Reads a log to stdout. Ctrl-C leaves it, and the run goes on."""
    write = JsonLines() if as_json else _log_writer()
    found = leave_by_ctrl_c(lambda: read(write, lambda words: render.note(f"{words}; going on")))
    if isinstance(write, JsonLines):
        write.close()
    return found


def leave_by_ctrl_c(read: Callable[[], T]) -> T:
    """Ctrl-C ends the reading, not the run."""
    try:
        return read()
    except KeyboardInterrupt:
        render.note("left it; the run goes on")
        raise typer.Exit(130) from None


class JsonLines:
    """Writes a log's lines as JSON documents. A line that is not UTF-8 has marks where it is not; one of more than a
    MiB comes in pieces."""

    def __init__(self) -> None:
        self._held = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST_LINE:
            lines, self._held = [*lines, self._held], b""
        self._write(lines)

    def close(self) -> None:
        """Writes what the log's last line has, though it lacks its end."""
        if self._held:
            self._write([self._held])
            self._held = b""

    def _write(self, lines: list[bytes]) -> None:
        with render.written():
            for line in lines:
                print(json.dumps({"schema_version": 1, "line": line.decode("utf-8", "replace")}))
            sys.stdout.flush()


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
