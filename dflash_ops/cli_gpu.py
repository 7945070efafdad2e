"""The command lines `gpu-status`, `gpu free` and `doctor`. Each reads words, calls one verb, shows its value."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import leaving, render
from dflash_ops.cli_many import INTERRUPTED, There, in_containers, leave
from dflash_ops.errors import CancelledError, OpsError, PreflightError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container, Host
    from dflash_ops.gpu_free import Freed, Holder, Look
    from dflash_ops.gpus import GpuStatus
    from dflash_ops.many import At, Outcome

app = typer.Typer(help="Who holds the GPUs, and freeing what is ours.", no_args_is_help=True)


@app.command("status")
@in_containers
def gpu_status(
    there: There,
    everywhere: Annotated[bool, typer.Option("-a", "--all", help="Every host of the inventory.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="S", help="Seconds between two looks of --watch.")] = 2.0,
) -> None:
    """Show the host's GPUs, how they are, and who holds them: container, run, memory, age. With --watch and --json one
    document a line. --on asks the hosts of these containers."""
    from dflash_ops import many, status

    if everywhere and there.many:
        raise UsageFault("--all and --on both say where", next="give one of them")
    if everywhere:
        there = replace(there, on=("all",), many=True)
    hosts, containers, own = _hosts(there)
    # A host that is away for a while is no reason to stop looking.
    asking = replace(there, many=True) if watch else there
    while True:
        found = asking.gather(
            lambda at: status.gpu_status(at.shell, at.place, containers, own.get(at.name)),
            hosts,
            quiet=True,
            board=many.Board() if watch else None,
        )
        if watch and any(it.error is not None and it.error.exit_code == INTERRUPTED for it in found):
            raise typer.Exit(INTERRUPTED)  # Ctrl-C while a host was asked
        code = _show(there, found, everywhere, clear=watch and sys.stdout.isatty())
        if not watch:
            break
        time.sleep(every)
    leave(code)  # what could be told was shown


def _hosts(there: There) -> "tuple[dict[str, Host | OpsError], list[Container], dict[str, Container]]":
    """The hosts to ask, with names that lead nowhere; all containers there; by host the one that owners are told for:
    the one that is meant, when it is the only one."""
    book = there.book
    hosts: dict[str, Host | OpsError] = {}
    meant: dict[str, list[Container]] = {}
    for name, found in there.containers.items():
        if isinstance(found, OpsError):
            hosts[name] = found
        else:
            hosts[found.host.name] = found.host
            meant.setdefault(found.host.name, []).append(found)
    containers: list[Container] = []
    for name, table in book.tables.containers.items():
        if table.host in meant and not isinstance(there.containers.get(name), OpsError):
            containers.append(book.container(name))
    if there.many and (there.target or book.tables.default or len(book.tables.containers) == 1):
        default = book.container(there.target)
        if default in meant.get(default.host.name, ()):
            meant[default.host.name] = [default]
    return hosts, containers, {name: each[0] for name, each in meant.items() if len(each) == 1}


def _show(there: There, found: "list[Outcome[Host, GpuStatus]]", everywhere: bool, clear: bool) -> int:
    from dflash_ops import many, render_gpus, render_many
    from dflash_ops.gpus import GpuStatus

    def people() -> None:
        if clear:
            sys.stdout.write("\x1b[H\x1b[2J")
        if there.many:
            render_many.show(found, render_gpus.show_gpus)
        elif found[0].error is not None:
            render.note(found[0].error.line())
        else:
            render_gpus.show_gpus(found[0].result())
        sys.stdout.flush()

    if there.many and not everywhere and there.as_json:
        return there.tell(found, render_gpus.show_gpus)
    leaving.due(code := many.worst([it.error.exit_code if it.error else 0 for it in found]))
    documents = [it.value or GpuStatus(str(it.place), (), (), (str(it.error),)) for it in found if it.place]
    render.show({"hosts": documents} if everywhere else documents[0], as_json=there.as_json, people=people)
    with render.written():
        sys.stdout.flush()
    return code


@app.command("free")
@in_containers
def gpu_free(
    there: There,
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
) -> None:
    """End what earlier runs left on this container's GPUs, and prove that the memory is back.

    Only processes of runs of ours that are over are ended; --pid and --unknown add others, which are shown first.
    Living runs, other containers and the host's own processes are never touched, and no GPU is reset.
    """
    from dflash_ops import gpu_free as verbs
    from dflash_ops import render_gpus

    if pids and there.many:
        raise UsageFault("a pid is of one container", where="--pid", next="-t NAME instead of --on")

    def look(at: "At[Container]") -> "tuple[Look, list[Holder]]":
        found = verbs.look(at.shell, at.place)
        return found, verbs.choose(found, pids or [], unknown)

    looks = there.look(look)
    if not dry_run and not yes:
        _ask([it.value for it in looks.values() if it.value is not None])

    def free(at: "At[Container]") -> "Freed":
        found, chosen = looks[at.name].result()
        if dry_run or not chosen:
            return verbs.nothing_done(found, chosen, dry_run)
        return verbs.free(at.shell, at.place, found, chosen, grace=grace)

    there.serve(free, render_gpus.show_freed)


def _ask(looks: "list[tuple[Look, list[Holder]]]") -> None:
    """Asks once for all containers, where more than what runs of ours left is to be ended."""
    from dflash_ops import render_gpus

    others = [(found, chosen) for found, chosen in looks if any(it.owner != "earlier" for it in chosen)]
    if not others:
        return
    where = ", ".join(found.container for found, _ in others)
    if not sys.stdin.isatty():
        names = ", ".join(str(it.pid) for _, chosen in others for it in chosen)
        raise UsageFault(
            "these processes are of no run of ours, and nobody can be asked",
            where=where,
            why=f"pids {names}",
            next="--dry-run shows them; --yes ends them",
        )
    for found, chosen in others:
        if len(looks) > 1:
            render.note(f"{found.container}:")
        render_gpus.note_holders(chosen)
    try:
        agreed = typer.confirm("End these processes?", err=True)
    except typer.Abort:  # Ctrl-C, or the end of the input
        agreed = False
    if not agreed:
        raise CancelledError("nothing was ended", where=where)


@in_containers
def doctor(
    there: There,
    fix: Annotated[bool, typer.Option("--fix", help="First does what is safe, and says what.")] = False,
) -> None:
    """Look for what would stop a run: drivers, devices, the container's config, room, programs, leftovers.

    Each finding comes with its evidence and the command that mends it. The exit code is 6 when something would stop a
    run. --fix removes what killed deploys and starts left and makes /dev/nvidia-uvm, nothing else.
    """
    from dflash_ops import doctor as verbs
    from dflash_ops import render_gpus

    there.serve(
        lambda at: verbs.doctor(at.shell, at.place, fix=fix),
        render_gpus.show_diagnosis,
        code=lambda found: 0 if found.ok else PreflightError.exit_code,
    )
