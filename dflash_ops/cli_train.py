"""The verbs of `dflash-ops train`, and `gpu-status`: each reads words, calls one verb, shows its value.

cli.py mounts `app` as `train` and registers `gpu_status`. Verbs are imported when they are called.
"""

import codecs
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import render
from dflash_ops.cli_words import InventoryFile, Json, Target, find_container, load_inventory
from dflash_ops.errors import ConfigError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.runs import Run

app = typer.Typer(help="Start, watch and stop training runs in the container.", no_args_is_help=True)


def _not_empty(word: str | None) -> str | None:
    """What a script hands over as "$RUN" when it has none must not become the default."""
    if word == "":
        raise UsageFault("an empty word names nothing", next="leave it out, or give a name of dflash-ops train list")
    return word


AnyRun = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run's id, or a name. Default: the run that goes on, else the newest.",
        callback=_not_empty,
    ),
]


@app.command()
def start(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The trainer's config, a TOML file.")],
    name: Annotated[str, typer.Option(help="The run's name: a-z, 0-9 and dashes.")] = "train",
    gpus: Annotated[str, typer.Option(metavar="0,1|all|none", help="GPUs, as the container numbers them.")] = "all",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one key of the config. Repeatable.")
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="KEY=VALUE lines for the trainer's environment, kept out of logs and argv."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Goes on from the newest good checkpoint of an earlier run.", callback=_not_empty
        ),
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A drafter's folder in the container to continue from.", callback=_not_empty),
    ] = None,
    release: Annotated[str | None, typer.Option(help="A release id. Default: the current one.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Shows the log until the run ends.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Start a run, supervised in the container; a tmux session there shows it."""
    from dflash_ops import render_runs, runs, train
    from dflash_ops.shell import Shell

    runs.check_name(name)
    if as_json and follow:
        raise UsageFault("--json prints one document, --follow a log", next="train start --json, then train logs -f")
    container = find_container(inventory, target)
    env = _text(env_file) if env_file else None
    if env is not None:
        runs.env_names(env, str(env_file))
    request = runs.StartRequest(
        name=name,
        config=_text(config),
        config_name=str(config),
        gpus=runs.parse_gpus(gpus, container),
        settings=tuple(settings or ()),
        env=env,
        resume=resume,
        init_from=init_from,
        release=release,
        client=os.uname().nodename,
    )
    with Shell() as shell:
        started = train.start(shell, container, request)
        render.show(started.to_json(), as_json=as_json, people=lambda: render_runs.show_started(started))
        if not follow:
            return
        run_id = started.run.id
        ended = _follow(lambda out, note: train.logs(shell, container, run_id, on_out=out, follow=True, on_break=note))
    render_runs.note_verdict(ended)
    raise typer.Exit(ended.exit_code)


@app.command()
def stop(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's id, or a name. Default: the only run that goes on.", callback=_not_empty
        ),
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for the trainer to save and end.")] = 60.0,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Stop a run: SIGTERM, grace, then every process of it, and nothing else."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    with Shell() as shell:
        stopped = train.stop(shell, find_container(inventory, target), run, grace=grace)
    render.show(stopped.to_json(), as_json=as_json, people=lambda: render_runs.show_stopped(stopped))


@app.command()
def logs(
    run: AnyRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Goes on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("-n", "--tail", min=0, metavar="N", help="Only the last N lines.")] = None,
    target: Target = None,
    inventory: InventoryFile = None,
) -> None:
    """Show a run's log, byte for byte. With -f the exit code is the run's verdict: 0, 100 failed, 103 stopped."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        name = run or train.newest(shell, container).id
        found = _follow(
            lambda out, note: train.logs(shell, container, name, on_out=out, follow=follow, tail=tail, on_break=note)
        )
    if follow:
        render_runs.note_verdict(found)
        raise typer.Exit(found.exit_code)


@app.command("list")
def list_(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """List the container's runs, the oldest first."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        found = train.list_runs(shell, container)

    def people() -> None:
        if found:
            render_runs.show_runs(found)
        else:
            render.say(f"no runs in {container}; dflash-ops train start makes one")

    render.show({"runs": [run.to_json() for run in found]}, as_json=as_json, people=people)


@app.command()
def status(run: AnyRun = None, target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """Say how a run stands. The exit code is 0 when that could be told; --json has the run's own."""
    from dflash_ops import render_runs, train
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        found = train.status(shell, container, run or train.newest(shell, container).id)
    render.show(found.to_json(), as_json=as_json, people=lambda: render_runs.show_run(found))


@app.command()
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
        found = train.wait(shell, container, run or train.newest(shell, container).id, timeout=timeout)
    render.show(found.to_json(), as_json=as_json, people=lambda: render_runs.show_run(found))
    raise typer.Exit(found.own_code)


def gpu_status(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """Show the host's GPUs and who holds them: container, run, memory, age; stale holders are marked."""
    from dflash_ops import render_runs
    from dflash_ops import status as verbs
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    host = book.container(target).host
    here = [book.container(name) for name, table in book.tables.containers.items() if table.host == host.name]
    with Shell() as shell:
        found = verbs.gpu_status(shell, host, here)
    render.show(found.to_json(), as_json=as_json, people=lambda: render_runs.show_gpus(found))


def _follow(read: "Callable[[Callable[[bytes], None], Callable[[str], None]], Run]") -> "Run":
    """Reads a log to stdout. Ctrl-C leaves it, and the run goes on."""
    try:
        return read(_log_writer(), lambda words: render.note(f"{words}; trying again"))
    except KeyboardInterrupt:
        render.note("left the log; the run goes on")
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


def _text(file: Path) -> str:
    """The file's text; its bytes arrive in the container as they are."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            "the file can't be read", where=str(file), why=why, next="give a file of this machine that you may read"
        ) from error
