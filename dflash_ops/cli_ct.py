"""`dflash-ops ct ...` and `inventory discover`: read words, call one verb, show its value.

cli.py and cli_inventory.py register them.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import render
from dflash_ops.cli_words import InventoryFile, Json, Target, load_inventory
from dflash_ops.errors import BusyError, CancelledError, ConfigError, OpsError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container, Host
    from dflash_ops.containers import Changed, ContainerStatus, GoingOn, OnRuns
    from dflash_ops.discover import Added, Discovery
    from dflash_ops.inventory import Inventory
    from dflash_ops.proxmox_values import Snapshot
    from dflash_ops.snapshots import Lost

app = typer.Typer(
    help="What the hypervisor does with the container: start, stop, snapshots.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Yes = Annotated[bool, typer.Option("-y", "--yes", help="Does not ask, though a run goes on there.")]
Timeout = Annotated[int, typer.Option(min=1, max=86400, metavar="SECONDS", help="How long it may take to shut down.")]


@app.command()
def status(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """Show the container as its node knows it, on whichever node of the cluster it is."""
    from dflash_ops import containers as verbs
    from dflash_ops.shell import Shell

    container = load_inventory(inventory).container(target)
    with Shell() as shell:
        found = verbs.status(shell, container)
    render.show(found, as_json=as_json, people=lambda: _show_status(found))
    if not found.here:
        render.note(f"dflash-ops: warning: {verbs.elsewhere(container, found.node)}")


@app.command()
def start(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """Start the container, and wait until it runs."""
    from dflash_ops import containers as verbs
    from dflash_ops.shell import Shell

    with Shell() as shell:
        done = verbs.start(shell, load_inventory(inventory).container(target), on_log=render.note)
    _show_changed(done, as_json)


@app.command()
def stop(
    kill: Annotated[bool, typer.Option("--kill", help="End it at once, instead of shutting it down.")] = False,
    timeout: Timeout = 60,
    yes: Yes = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Shut the container down, and wait until it is stopped. Asks first when a run goes on in it."""
    from dflash_ops import containers as verbs
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    container = book.container(target)
    on_runs = None if yes else _asking("kill" if kill else "shut down", container)
    with Shell() as shell:
        done = verbs.stop(
            shell,
            container,
            kill=kill,
            timeout=timeout,
            on_runs=on_runs,
            also=_also(book, container),
            on_log=render.note,
        )
    _show_changed(done, as_json)


@app.command()
def reboot(
    timeout: Timeout = 60,
    yes: Yes = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Shut the container down and start it again. Asks first when a run goes on in it."""
    from dflash_ops import containers as verbs
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    container = book.container(target)
    on_runs = None if yes else _asking("reboot", container)
    with Shell() as shell:
        done = verbs.reboot(
            shell, container, timeout=timeout, on_runs=on_runs, also=_also(book, container), on_log=render.note
        )
    _show_changed(done, as_json)


@app.command()
def snapshot(
    name: Annotated[str | None, typer.Argument(help="Default: dflash-, and the time.")] = None,
    description: Annotated[str, typer.Option(metavar="TEXT", help="What it is for.")] = "made by dflash-ops",
    remove: Annotated[bool, typer.Option("--remove", help="Remove that snapshot instead.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Make a snapshot of the container; what runs in it goes on."""
    from dflash_ops import snapshots as verbs
    from dflash_ops.shell import Shell

    if name == "" or (remove and name is None):  # what a script hands over as "$NAME" when it has none
        raise UsageFault("no snapshot is named", next="give the name of one" if remove else "leave it out, or name it")
    container = load_inventory(inventory).container(target)
    with Shell() as shell:
        if remove and name is not None:
            done = verbs.remove(shell, container, name, on_log=render.note)
        else:
            done = verbs.make(shell, container, name, description=description, on_log=render.note)
    what = f"snapshot {done.snapshot} of {done.container} {done.did}, {done.seconds:.1f} s"
    render.show(done, as_json=as_json, people=lambda: render.say(what))


@app.command()
def snapshots(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """List the container's snapshots, the oldest first."""
    from dflash_ops import snapshots as verbs
    from dflash_ops.shell import Shell

    with Shell() as shell:
        listed = verbs.listing(shell, load_inventory(inventory).container(target))

    def people() -> None:
        if not listed.snapshots:
            render.say(f"no snapshots of {listed.container}; dflash-ops ct snapshot makes one")
            return
        rows = [(it.name, _moment(it), textwrap.shorten(it.description, 80)) for it in listed.snapshots]
        render.table(("SNAPSHOT", "MADE", "FOR"), rows, spare=("FOR",))

    render.show(listed, as_json=as_json, people=people)


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The snapshot to go back to.")],
    confirm_vmid: Annotated[
        int | None, typer.Option("--confirm-vmid", metavar="VMID", help="The container's number, instead of typing it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be lost, and do nothing.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Put the container back to a snapshot: everything written in it since is lost.

    Shows what that is, and wants the container's number typed. Never while a run goes on, in whatever folder."""
    from dflash_ops import snapshots as verbs
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    container = book.container(target)
    also = _also(book, container)
    if confirm_vmid not in (None, container.vmid):
        raise UsageFault(
            f"--confirm-vmid is {confirm_vmid}, but {container} is meant", next=f"-t NAME, or {container.vmid}"
        )
    with Shell() as shell:
        losing = verbs.lost(shell, container, name, also=also)
        if dry_run:
            render.show(losing, as_json=as_json, people=lambda: _tell(losing, container.vmid, render.say))
            return
        verbs.refuse_living(container, losing)
        _tell(losing, container.vmid, render.note)
        if confirm_vmid is None:
            _want_typed(container.vmid)
        done = verbs.rollback(shell, container, name, shown=losing, also=also, on_log=render.note)
    again = "; it runs again" if done.started else ""
    what = f"{done.container} is back at snapshot {done.snapshot}{again}, {done.seconds:.1f} s"
    render.show(done, as_json=as_json, people=lambda: render.say(what))


def discover(
    host: Annotated[str | None, typer.Argument(help="A host of the inventory. Default: the default's.")] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="VMID[=NAME]", help="Write this container into the inventory. Repeatable."),
    ] = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """List the containers of a host's cluster with the GPUs that they have, and add chosen ones to the inventory."""
    from dflash_ops import discover as verbs
    from dflash_ops.shell import Shell

    chosen = _chosen(add or [])
    book = load_inventory(inventory)
    with Shell() as shell:
        found = verbs.discover(shell, book, _host(book, host))
    asks = not add and not as_json and os.isatty(0) and os.isatty(2)
    if asks:
        _show_discovery(found)
        chosen = _chosen([_typed(f"Add which to {book.file}? Their VMIDs; Enter for none: ")])
    added = verbs.add(book.file, book, found, chosen)

    def people() -> None:
        if not added and not asks:
            _show_discovery(found)
        _show_added(added, book.file)

    document = {"host": found.host, "asked": found.asked, "node": found.node, "containers": found.containers}
    render.show({**document, "added": added}, as_json=as_json, people=people)


# -- what is shown


def _show_status(found: "ContainerStatus") -> None:
    parts = [f"container {found.vmid} ({found.name}) is {found.status} on node {found.node}"]
    if found.uptime_s is not None:
        parts.append(f"up {_span(found.uptime_s)}")
    if found.memory_used_bytes is not None and found.memory_bytes:
        parts.append(f"{render.size(found.memory_used_bytes)} of {render.size(found.memory_bytes)} memory")
    if found.lock:
        parts.append(f"locked ({found.lock})")
    if found.ha_managed:
        parts.append("managed by HA")
    render.say(", ".join(parts))


def _show_changed(done: "Changed", as_json: bool) -> None:
    if done.changed:
        warned = f", {done.warnings} warnings" if done.warnings else ""
        what = f"{done.container} {done.did} on node {done.node}, {done.seconds:.1f} s{warned}"
    else:
        what = f"{done.container} {'runs' if done.did == 'started' else 'is stopped'} already, on node {done.node}"
    render.show(done, as_json=as_json, people=lambda: render.say(what))


def _tell(losing: "Lost", vmid: int, say: "Callable[[str], None]") -> None:
    """What going back would lose, a line each."""
    since = f"since {_moment(losing.snapshot)}"
    say(f"going back to snapshot {losing.snapshot.name} loses everything written in container {vmid} {since}")
    for what, names, also in (
        ("run", losing.runs, ""),
        ("run", losing.continued, ": its log, metrics and end since"),
        ("checkpoint", losing.checkpoints, ""),
        ("release", losing.releases, ""),
        ("environment", losing.environments, ""),
    ):
        for name in names:
            say(f"  {what} {name}{also}")
    if not losing.known:
        say(f"  {'what else that is' if losing.runs else 'what that is'} can't be listed: {losing.unknown}")
    else:
        say("  data in shared/, runs in folders that the inventory lacks, and any other file")
    for run in losing.live:
        say(f"  run {run} goes on: going back is refused until it has ended; {run.advice}")
    if losing.newer_snapshots:
        say(f"  newer snapshots, on storages that allow it only without them: {', '.join(losing.newer_snapshots)}")


def _show_discovery(found: "Discovery") -> None:
    from dflash_ops.discover import in_inventory, shown

    if not found.containers:
        render.say(f"no containers on {found.host}")
        return
    rows = [
        (
            it.vmid,
            it.name,
            it.node,
            it.status,
            ", ".join([*map(str, it.gpus), *(["MIG"] if it.mig else [])]) or None,
            in_inventory(it) or None,
            "; ".join(it.problems) or None,
        )
        for it in shown(found)
    ]
    columns = ("VMID", "NAME", "NODE", "STATUS", "GPUS", "INVENTORY", "NOTE")
    render.table(columns, rows, right=("VMID",), spare=("STATUS",))


def _show_added(added: "Sequence[Added]", file: Path) -> None:
    for it in added:
        gpus = f", GPUs {', '.join(map(str, it.gpus))}" if it.gpus else ""
        render.say(f"added container {it.vmid} as {it.name} on host {it.host}{gpus} to {file}")
    for host in dict.fromkeys(it.host for it in added if it.new_host):
        render.say(f"[hosts.{host}] is new: correct its address if `ssh {host}` does not lead there")


def _moment(it: "Snapshot") -> str:
    """When it was made, as every other time is told."""
    return f"{datetime.fromtimestamp(it.moment, UTC):%Y-%m-%d %H:%M:%S} UTC" if it.created_at else "-"


def _span(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    hours, minutes = divmod(rest // 60, 60)
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""]
    return " ".join(part for part in parts if part) or f"{seconds} s"


# -- what is asked


def _asking(doing: str, container: "Container") -> "OnRuns":
    """Asks whether to go on though runs do; without a terminal it refuses."""

    def on_runs(live: "Sequence[GoingOn]", error: OpsError | None) -> None:
        if error is not None:
            raise BusyError(
                "whether a run goes on can't be seen",
                where=str(container),
                why=str(error),
                next=f"the same with --yes, if it is to {doing} all the same",
            ) from error
        who = f"run {live[0]} goes on" if len(live) == 1 else f"runs go on: {', '.join(map(str, live))}"
        if not os.isatty(0):
            raise BusyError(
                who,
                where=str(container),
                why=f"it would end with the container, which is to {doing}",
                next=f"{live[0].advice}; or the same with --yes",
            )
        if _typed(f"{who}. {doing.capitalize()} container {container.vmid} all the same? [y/N] ").lower() not in (
            "y",
            "yes",
        ):
            raise CancelledError("nothing was done")

    return on_runs


def _want_typed(vmid: int) -> None:
    """The container's number, from the terminal or a pipe; nothing else will do."""
    typed = _typed(f"Type the container's number ({vmid}) to go back: ")
    if not typed and not os.isatty(0):
        raise UsageFault(
            "going back wants the container's number typed", why="stdin is empty", next=f"--confirm-vmid {vmid}"
        )
    if typed != str(vmid):
        raise CancelledError(f"nothing was done: that is not {vmid}")


def _typed(question: str) -> str:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip()


# -- which are meant


def _also(book: "Inventory", container: "Container") -> "list[Container]":
    """What else the inventory has in that container: folders of others, which may have runs too."""
    return [
        book.container(name)
        for name, table in book.tables.containers.items()
        if name != container.name and table.host == container.host.name and table.vmid == container.vmid
    ]


def _host(book: "Inventory", name: str | None) -> "Host":
    if name is not None:
        return book.host(name)
    hosts = list(book.tables.hosts)
    if len(hosts) == 1:
        return book.host(hosts[0])
    if book.tables.default is not None:
        return book.container().host
    raise ConfigError(
        "no host is named", where=str(book.file), why=f"it has: {', '.join(hosts) or 'none'}", next="name one of these"
    )


def _chosen(words: "Sequence[str]") -> dict[int, str | None]:
    """`201`, `201=name`, several with commas or spaces between them."""
    chosen: dict[int, str | None] = {}
    for part in " ".join(words).replace(",", " ").split():
        number, equals, name = part.partition("=")
        if not (number.isascii() and number.isdigit()) or (equals and not name):
            raise UsageFault(f"{part!r} is no VMID", next="--add 201, or --add 201=NAME")
        chosen[int(number)] = name or None
    return chosen
