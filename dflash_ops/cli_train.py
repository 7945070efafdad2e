"""The verbs of `dflash-ops train` that change something: start, restart, stop. Each reads words, calls one verb, shows
its value.

cli.py mounts `app` as `train`. Verbs are imported when they are called.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import cli_keep, cli_runs, cli_watch, leaving
from dflash_ops.cli_many import INTERRUPTED, There, in_containers, leave
from dflash_ops.cli_runs import not_empty
from dflash_ops.errors import ConfigError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.many import At
    from dflash_ops.runs import Started

app = typer.Typer(help="Start, watch and stop training runs in the container.", no_args_is_help=True)


def _finite(value: float | None) -> float | None:
    """Seconds or minutes; what has no end is not written as inf."""
    if value is not None and not math.isfinite(value):
        raise UsageFault(f"{value} is no number of seconds or minutes", next="give a number; --stall-minutes 0: never")
    return value


Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one key of the config. Repeatable.")
]
EnvFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="KEY=VALUE lines for the trainer's environment, kept out of logs and argv."),
]
Release = Annotated[str | None, typer.Option(help="A release id. Default: the current one.")]
Restarts = Annotated[
    int | None,
    typer.Option("--restart", min=0, metavar="N", help="Starts a trainer again that failed in a way that can heal."),
]
StallMinutes = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="M",
        callback=_finite,
        help="Without a new step for so long the run is stalled; 0: never. Default: 30.",
    ),
]
Notify = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        envvar="DFLASH_OPS_NOTIFY",
        help="Told when the run ends, stalls or restarts: a webhook, or what apprise knows. Repeatable.",
    ),
]
ShareGpus = Annotated[bool, typer.Option("--share-gpus", help="Starts though others use its GPUs.")]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Shows the log until the run ends.")]
Wait = Annotated[bool, typer.Option("-w", "--wait", help="Waits for the end, and exits with the run's own code.")]
Grace = Annotated[float, typer.Option(min=0, callback=_finite, help="Seconds for the trainer to save and end.")]


@app.command()
@in_containers
def start(
    there: There,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The trainer's config, a TOML file.")],
    name: Annotated[str, typer.Option(help="The run's name: a-z, 0-9 and dashes.")] = "train",
    gpus: Annotated[str, typer.Option(metavar="0,1|all|none", help="GPUs, as the container numbers them.")] = "all",
    settings: Settings = None,
    env_file: EnvFile = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Goes on from the newest good checkpoint of an earlier run.", callback=not_empty
        ),
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A drafter's folder in the container to continue from.", callback=not_empty),
    ] = None,
    release: Release = None,
    restarts: Restarts = None,
    stall_minutes: StallMinutes = None,
    notify: Notify = None,
    share_gpus: ShareGpus = False,
    follow: Follow = False,
    wait: Wait = False,
) -> None:
    """Start a run, supervised in the container; a tmux session there shows it."""
    from dflash_ops import run_request, train

    run_request.check_name(name)
    _one_document(there.as_json, follow)
    text, env = _text(config), _environment(env_file)

    def begin(at: "At[Container]") -> "Started":
        request = run_request.StartRequest(
            name=name,
            config=text,
            config_name=str(config),
            gpus=run_request.parse_gpus(gpus, at.place),
            settings=tuple(settings or ()),
            env=env,
            resume=resume,
            init_from=init_from,
            release=release,
            client=os.uname().nodename,
            restart=restarts,
            stall_minutes=run_request.STALL_MINUTES if stall_minutes is None else stall_minutes,
            notify=tuple(map(run_request.check_url, notify)) if notify else None,
            share_gpus=share_gpus,
        )
        return train.start(at.shell, at.place, request, on_wait=at.on_wait)

    left = _goes_on("the start", "train list")
    _begun(there, begin, left, follow=follow, wait=wait)


@app.command()
@in_containers
def restart(
    there: There,
    run: cli_runs.AnyRun = None,
    settings: Settings = None,
    env_file: EnvFile = None,
    release: Release = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1|all|none", help="Other GPUs than the run had.")] = None,
    restarts: Restarts = None,
    stall_minutes: StallMinutes = None,
    notify: Notify = None,
    share_gpus: ShareGpus = False,
    grace: Grace = 60.0,
    follow: Follow = False,
    wait: Wait = False,
) -> None:
    """Stop a run, if it goes on, and start it again from its newest checkpoint, in the current release.

    Config, settings, environment and GPUs are the run's own; what is given here changes them.
    """
    from dataclasses import replace

    from dflash_ops import render_runs, run_request, train
    from dflash_ops.stops import Stopped

    _one_document(there.as_json, follow)
    env = _environment(env_file)

    def again(at: "At[Container]") -> "Started":
        def changes(request: run_request.StartRequest) -> run_request.StartRequest:
            return replace(
                request,
                settings=tuple(settings or ()),
                env=env,
                release=release,
                gpus=request.gpus if gpus is None else run_request.parse_gpus(gpus, at.place),
                client=os.uname().nodename,
                restart=restarts,
                stall_minutes=stall_minutes,
                notify=tuple(map(run_request.check_url, notify)) if notify else None,
                share_gpus=share_gpus,
            )

        def on_stopped(stopped: Stopped) -> None:
            if not there.as_json:
                at.note(render_runs.stopped_line(stopped))

        return train.restart(
            at.shell, at.place, run, changes=changes, grace=grace, on_wait=at.on_wait, on_stopped=on_stopped
        )

    left = _goes_on("what was begun of the restart", f"train status {run or ''}")
    _begun(there, again, left, follow=follow, wait=wait)


@app.command()
@in_containers
def stop(
    there: There,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's id, or a name. Default: the only run that goes on.", callback=not_empty
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Ends a tmux session that was started by hand (train list --all).", callback=not_empty
        ),
    ] = None,
    grace: Grace = 60.0,
) -> None:
    """Stop a run: SIGTERM, grace, then every process of it, and nothing else; then its GPU memory is back."""
    from dflash_ops import render_runs, train

    if run is not None and session is not None:
        raise UsageFault("a run and a session are two things", next="train stop RUN, or train stop --session NAME")
    if session is not None:
        there.serve(
            lambda at: train.stop_session(at.shell, at.place, session, grace=grace, on_wait=at.on_wait),
            render_runs.show_session_stopped,
            left=_goes_on("the end of the session", "train list --all"),
        )
    else:
        there.serve(
            lambda at: train.stop(at.shell, at.place, run, grace=grace, on_wait=at.on_wait),
            render_runs.show_stopped,
            left=_goes_on("the stop", f"train wait {run or ''}"),
        )


app.command()(cli_runs.logs)
app.command("list")(cli_runs.list_)
app.command("ls", hidden=True)(cli_runs.list_)
app.command()(cli_runs.status)
app.command()(cli_runs.wait)
app.command()(cli_keep.attach)
app.command()(cli_keep.fetch)
app.command()(cli_keep.rm)
app.command()(cli_watch.watch)
app.command()(cli_watch.plot)
app.command()(cli_watch.board)


def _one_document(as_json: bool, follow: bool) -> None:
    if as_json and follow:
        raise UsageFault("--json prints one document, --follow a log", next="train start --json, then train logs -f")


def _begun(
    there: There,
    begin: "Callable[[At[Container]], Started]",
    left: str,
    *,
    follow: bool,
    wait: bool,
) -> None:
    """Starts runs and shows them, then follows or waits for them; ends with the runs' exit code if it does."""
    from dataclasses import replace

    from dflash_ops import many, render_runs, train

    def whole(at: "At[Container]") -> "Started":
        started = begin(at)
        return replace(started, run=train.wait(at.shell, at.place, started.run.id))

    if there.as_json and wait:
        there.serve(
            whole,
            render_runs.show_started,
            code=lambda done: done.run.own_code,
            lasting=True,
            left=cli_runs.LEFT,
        )
        return
    started = there.gather(begin, there.containers, left=left)
    code = there.tell(started, render_runs.show_started)
    ids = {it.name: it.value.run.id for it in started if it.value is not None}
    alive = {name: place for name, place in there.containers.items() if name in ids}
    if (follow or wait) and alive and code != INTERRUPTED:
        if follow:
            ended = cli_runs.read_logs(
                there,
                lambda at, out, note: train.logs(
                    at.shell, at.place, ids[at.name], on_out=out, follow=True, on_break=note
                ),
                alive,
            )
        else:
            ended = there.gather(
                lambda at: train.wait(at.shell, at.place, ids[at.name]), alive, lasting=True, left=cli_runs.LEFT
            )
        code = many.worst([code, cli_runs.worst_of(ended, lambda run: run.own_code if wait else run.exit_code)])
        leaving.due(code)
        cli_runs.tell_runs(there, ended, verdict=True)
    leave(code)


def _goes_on(what: str, look: str) -> str:
    """Ctrl-C leaves what the container does; it does not undo it."""
    return f"{what} goes on in the container: dflash-ops {look.strip()}"


def _environment(file: Path | None) -> str | None:
    from dflash_ops import run_request

    if file is None:
        return None
    text = _text(file)
    run_request.env_names(text, str(file))
    return text


def _text(file: Path) -> str:
    """The file's text; its bytes arrive in the container as they are."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            "the file can't be read", where=str(file), why=why, next="give a file of this machine that you may read"
        ) from error
