"""`dflash-ops env`: the packages that the trainer runs with in the container. cli.py mounts `app` as `env`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import render
from dflash_ops.cli_many import There, in_containers
from dflash_ops.cli_words import a_path
from dflash_ops.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.environment import Checked, Environment, Synced, WarmedUp
    from dflash_ops.many import At

app = typer.Typer(help="The packages that the trainer runs with: made, compared, warmed up.", no_args_is_help=True)

Release = Annotated[str | None, typer.Option(help="The release whose lock counts. Default: the current one.")]


@app.command()
@in_containers
def sync(
    there: There,
    wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=a_path,
            help="Installs from this folder of wheels alone: the container needs no network.",
        ),
    ] = None,
    release: Release = None,
) -> None:
    """Make the environment that the release's lock asks for, and make it the current one; the one before is kept.

    Runs use it from their next start on. Nothing is built when it is there already."""
    from dflash_ops import environment

    there.serve(
        lambda at: environment.sync(at.shell, at.place, release, wheelhouse=wheels, progress=at.way, on_build=at.note),
        _show_synced,
    )


def _show_synced(done: "Synced") -> None:
    what = f"built by {done.installer} in {done.seconds:.0f} s" if done.made else "was there already"
    render.say(f"environment {done.environment} is current in {done.container} for release {done.release}: {what}")
    torch = f", torch {done.torch}" if done.torch else ""
    before = f"; {done.previous} is kept" if done.previous not in (None, done.environment) else ""
    render.say(f"  Python {done.python}{torch}, {render.size(done.size)}{before}")


@app.command()
@in_containers
def check(
    there: There,
    release: Release = None,
    every: Annotated[bool, typer.Option("--all", help="Shows also what fits.")] = False,
) -> None:
    """Compare Python, torch, CUDA, driver, transformers and every locked package with what the release wants.

    The exit code is 6 when something does not fit; `train start` refuses then."""
    from dflash_ops import environment

    there.serve(
        lambda at: environment.check(at.shell, at.place, release),
        lambda found: _show_checked(found, every),
        code=lambda found: 0 if found.ok else PreflightError.exit_code,
    )


def _show_checked(found: "Checked", every: bool) -> None:
    first = ("python", "CUDA of torch", "driver", "torch", "transformers")
    rows = [row for row in found.rows if every or not row.ok or row.name in first]
    marks = {True: "", False: "differs"}
    render.table(
        ("", "WANTED", "HAS", ""),
        [(row.name, row.wanted, row.has, marks[row.ok]) for row in rows],
    )
    wrong = sum(not row.ok for row in found.rows)
    which = f"environment {found.environment}" if found.environment else found.python
    if wrong:
        render.say(f"{which} does not fit release {found.release}: {wrong} of {len(found.rows)} differ")
        render.say("next: dflash-ops env sync, or say in the inventory what this container has: pins, env_check")
    else:
        render.say(f"{which} fits release {found.release}: {len(found.rows)} compared")


@app.command("list")
@in_containers
def list_(
    there: There,
) -> None:
    """List the container's environments, the oldest first. * marks the current one."""
    from dflash_ops import environment

    there.serve(
        lambda at: (at.place, environment.list_all(at.shell, at.place)),
        lambda found: _show_environments(*found),
        document=lambda found: {"environments": found[1]},
    )


def _show_environments(container: "Container", found: "list[Environment]") -> None:
    if not found:
        render.say(f"no environments in {container}: the trainer runs by {container.python}; dflash-ops env sync")
        return
    columns = ("", "ENVIRONMENT", "MADE", "PYTHON", "TORCH", "TRANSFORMERS", "SIZE", "USED BY")
    rows = [
        (
            "*" if it.current else "",
            it.id + ("" if it.whole else " (unfinished)"),
            it.made_at and it.made_at[:19].replace("T", " "),
            it.python,
            it.torch,
            it.transformers,
            render.size(it.size),
            ", ".join(it.used_by),
        )
        for it in found
    ]
    render.table(columns, rows, right=("SIZE",), spare=("TRANSFORMERS", "MADE"))


@app.command()
@in_containers
def prune(
    there: There,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the newest environments stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove old environments; never the current one, or one that a run uses."""
    from dflash_ops import environment
    from dflash_ops.cli_deploy import show_pruned

    there.serve(
        lambda at: environment.prune(at.shell, at.place, keep, dry_run=dry_run),
        lambda done: show_pruned(done, "environment"),
    )


@app.command()
@in_containers
def warm(
    there: There,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The trainer's config, a TOML file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes one key of the config. Repeatable.")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="0,1|all|none", help="GPUs, as the container numbers them.")] = "all",
    release: Release = None,
) -> None:
    """Fill the compile cache with what a training with this config runs, so that its start need not compile.

    It holds the GPUs meanwhile, and says what each start saves from now on."""
    from dflash_ops import environment, run_request

    try:
        text = config.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError("the file can't be read", where=str(config), why=why, next="name another") from error

    def fill(at: "At[Container]") -> "WarmedUp":
        return environment.warm(
            at.shell,
            at.place,
            text,
            str(config),
            settings=tuple(settings or ()),
            gpus=run_request.parse_gpus(gpus, at.place),
            release=release,
            progress=at.way,
        )

    there.serve(fill, _show_warmed)


def _show_warmed(done: "WarmedUp") -> None:
    for device in done.devices:
        graphs = f"{device['compiled']} graphs compiled, {device['found']} from the cache"
        render.say(f"{device['device']}: {device['state']}, {device['seconds']:.1f} s, {graphs}")
    if not done.devices:
        render.say("nothing is compiled on the CPU: there is nothing to warm up")
    elif done.saved_seconds is None:
        render.say(f"all of it was there already, in {done.cache}")
    else:
        render.say(f"each start saves {done.saved_seconds:.1f} s from now on: {done.cache}")
