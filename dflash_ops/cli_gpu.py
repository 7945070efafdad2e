"""The command lines `gpu-status`, `gpu free` and `doctor`. Each reads words, calls one verb, shows its value."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import render
from dflash_ops.cli_words import InventoryFile, Json, Target, find_container, load_inventory
from dflash_ops.errors import CancelledError, OpsError, PreflightError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.gpu_free import Holder, Look
    from dflash_ops.shell import Shell
    from dflash_ops.status import Answer

app = typer.Typer(help="Who holds the GPUs, and freeing what is ours.", no_args_is_help=True)


@app.command("status")
def gpu_status(
    everywhere: Annotated[bool, typer.Option("-a", "--all", help="Every host of the inventory.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="S", help="Seconds between two looks of --watch.")] = 2.0,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Show the host's GPUs, how they are, and who holds them: container, run, memory, age. With --watch and --json one
    document a line."""
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    # Every host may be asked without a default container; then no process is "this container's".
    named = target or book.tables.default or len(book.tables.containers) == 1
    own = book.container(target) if named or not everywhere else None
    containers: list[Container] = []
    away: list[OpsError] = []
    for name, table in book.tables.containers.items():
        if everywhere or (own is not None and table.host == own.host.name):
            try:
                containers.append(book.container(name))
            except OpsError as error:  # a sandbox that is down
                away.append(error)
                render.note(error.line())
    with Shell() as shell:
        while True:
            answers = _look(shell, containers, own, everywhere, watch)
            _show(answers, everywhere, as_json, clear=watch and sys.stdout.isatty() and not as_json)
            if not watch:
                break
            time.sleep(every)
    failed = [*(answer.error for answer in answers if answer.error), *away]
    if failed:  # what could be told was shown
        raise typer.Exit(failed[0].exit_code)


def _look(
    shell: "Shell", containers: "list[Container]", own: "Container | None", everywhere: bool, go_on: bool
) -> "list[Answer]":
    from dflash_ops import status as verbs

    if everywhere:
        return verbs.every_host(shell, containers, own)
    assert own is not None
    if go_on:  # a host that is away for a while is no reason to stop looking
        return verbs.every_host(shell, [it for it in containers if it.host == own.host], own)
    return [verbs.Answer(verbs.gpu_status(shell, own.host, containers, own))]


def _show(answers: "list[Answer]", everywhere: bool, as_json: bool, clear: bool) -> None:
    from dflash_ops import render_gpus

    def people() -> None:
        if clear:
            sys.stdout.write("\x1b[H\x1b[2J")
        for answer in answers:
            if everywhere:
                render.say(f"{answer.status.host}:")
            if answer.error:
                render.note(answer.error.line())
            else:
                render_gpus.show_gpus(answer.status)
        sys.stdout.flush()

    documents = [answer.status.to_json() for answer in answers]
    document = {"hosts": documents} if everywhere else documents[0]
    render.show(document, as_json=as_json, people=people)
    with render.written():
        sys.stdout.flush()


@app.command("free")
def gpu_free(
    pids: Annotated[
        list[int] | None,
        typer.Option("--pid", metavar="N", help="Also this process (PID THERE of gpu-status), whosever it is."),
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also processes in this container that are of no run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be ended.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Don't ask.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds between SIGTERM and SIGKILL.")] = 10.0,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """End what earlier runs left on this container's GPUs, and prove that the memory is back.

    Only processes of runs of ours that are over are ended; --pid and --unknown add others, which are shown first.
    Living runs, other containers and the host's own processes are never touched, and no GPU is reset.
    """
    from dflash_ops import gpu_free as verbs
    from dflash_ops import render_gpus
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        found = verbs.look(shell, container)
        chosen = verbs.choose(found, pids or [], unknown)
        if dry_run or not chosen:
            freed = verbs.nothing_done(found, chosen, dry_run)
        else:
            if any(it.owner != "earlier" for it in chosen) and not yes:
                _ask(found, chosen)
            freed = verbs.free(shell, container, found, chosen, grace=grace)
    render.show(freed.to_json(), as_json=as_json, people=lambda: render_gpus.show_freed(freed))


def _ask(found: "Look", chosen: "list[Holder]") -> None:
    from dflash_ops import render_gpus

    if not sys.stdin.isatty():
        names = ", ".join(str(it.pid) for it in chosen)
        raise UsageFault(
            "these processes are of no run of ours, and nobody can be asked",
            where=found.container,
            why=f"pids {names}",
            next="--dry-run shows them; --yes ends them",
        )
    render_gpus.note_holders(chosen)
    if not typer.confirm("End these processes?", err=True):
        raise CancelledError("nothing was ended", where=found.container)


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="First does what is safe, and says what.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Look for what would stop a run: drivers, devices, the container's config, room, programs, leftovers.

    Each finding comes with its evidence and the command that mends it. The exit code is 6 when something would stop a
    run. --fix removes what killed deploys and starts left and makes /dev/nvidia-uvm, nothing else.
    """
    from dflash_ops import doctor as verbs
    from dflash_ops import render_gpus
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        found = verbs.doctor(shell, container, fix=fix)
    render.show(found.to_json(), as_json=as_json, people=lambda: render_gpus.show_diagnosis(found))
    if not found.ok:
        raise typer.Exit(PreflightError.exit_code)
