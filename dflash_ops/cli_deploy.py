"""`dflash-ops deploy`, `releases`, `rollback`, `prune`: read words, call one verb, show its value. cli.py registers
them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_ops import progress, render
from dflash_ops.cli_words import InventoryFile, Json, Target, a_path, find_container, load_inventory
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.deploy import Deployed, LiveRun, Plan
    from dflash_ops.release import LeftOut

# Names that are told of what was left out; --json has them all.
_TOLD = 10


def deploy(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            parser=a_path,
            help="The folder to send. Default: the inventory's, else here, else the packaged trainer.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what differs from the current release, and send nothing.")
    ] = False,
    no_activate: Annotated[
        bool, typer.Option("--no-activate", help="Send and check it, but leave `current` where it is.")
    ] = False,
    via: Annotated[
        Literal["push", "stream"],
        typer.Option(help="push: SFTP to the host, then pct push; stream: through the container's stdin."),
    ] = "push",
    user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The container's user who owns the files. Default: root. Runs are root's all the same.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Send also what matches, though it looks like a secret or a checkpoint. Repeatable."
        ),
    ] = None,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Send code into the container as a new release, check it there, and make it the current one.

    Only content that the container lacks travels. A run that goes on keeps the release that it started with."""
    from dflash_ops.inventory import working_folder
    from dflash_ops.shell import Shell

    if user == "":
        raise UsageFault("an empty word names nobody", where="--user", next="leave it out, or name a user")
    book = load_inventory(inventory)
    container, way = book.container(target), progress.shown(debug=bool(context.obj))
    with Shell() as shell:
        shell.begin(container.host)
        # The rest is loaded while the host answers.
        from dataclasses import replace

        from dflash_ops import deploy as verbs
        from dflash_ops import source as sources

        chosen = replace(sources.choose(source, book.source, here=working_folder()), include=tuple(include or ()))
        if dry_run or diff:
            plan = verbs.plan(shell, container, chosen, texts=diff, way=way)
            _tell_left_out(plan.left_out)
            render.show(plan, as_json=as_json, people=lambda: _show_plan(plan))
            return
        done = verbs.deploy(
            shell,
            container,
            chosen,
            via=via,
            activate=not no_activate,
            user=user,
            way=way,
            warn=lambda text: render.note(f"dflash-ops: warning: {text}"),
        )
    _tell_left_out(done.left_out)
    render.show(done, as_json=as_json, people=lambda: _show_deployed(done))


def _show_deployed(done: "Deployed") -> None:
    verb = "deployed" if done.activated else "sent"
    render.say(
        f"{verb} {done.release} to {done.container}: {done.files} files, {render.size(done.size)}, "
        f"{done.sent} bytes sent, {done.seconds:.2f} s"
    )
    if not done.activated:
        render.say(f"it is not current; dflash-ops rollback {done.release} makes it so")
    _show_runs(done.runs)


def _show_plan(plan: "Plan") -> None:
    from dflash_ops.release import printable

    if plan.damaged:
        render.say(f"`current` is damaged: {plan.damaged}")
    if plan.diff is not None:
        render.say(plan.diff.removesuffix("\n") or f"nothing differs from {plan.current}")
        return
    render.say(f"would deploy {plan.files} files, {render.size(plan.size)}, to {plan.container}; nothing was sent")
    render.say(f"would send {plan.lacking} files, {render.size(plan.to_send)}; the container has the rest")
    for sign, names in (("+", plan.changes.added), ("~", plan.changes.changed), ("-", plan.changes.removed)):
        for name in names:
            render.say(f"{sign} {printable(name)}")
    if not plan.changes and plan.current is not None:
        render.say(f"nothing differs from {plan.current}")
    _show_runs(plan.runs)


def _show_runs(runs: "Sequence[LiveRun]") -> None:
    for run in runs:
        render.say(f"run {run.run_id} goes on, untouched, with {run.release}")


def _tell_left_out(left_out: "Sequence[LeftOut]") -> None:
    from dflash_ops.release import printable

    for item in left_out[:_TOLD]:
        what = f"{printable(item.path)}: it looks like {item.why}"
        render.note(f"dflash-ops: left out {what}; --include names what is to be sent")
    if len(left_out) > _TOLD:
        render.note(f"dflash-ops: left out {len(left_out) - _TOLD} more; --json lists them")


def releases(target: Target = None, inventory: InventoryFile = None, as_json: Json = False) -> None:
    """List the container's releases, the oldest first."""
    from dflash_ops import deploy as verbs
    from dflash_ops.remote.releases import IS_FOLDER
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        listed = verbs.releases(shell, container)

    def people() -> None:
        if listed.damaged:
            mend = "move it away" if listed.damaged == IS_FOLDER else "dflash-ops rollback or deploy replaces it"
            render.say(f"`current` is damaged: {listed.damaged}; {mend}")
        if not listed.releases:
            render.say(f"no releases in {container}; dflash-ops deploy makes one")
            return
        columns = ("", "RELEASE", "COMMIT", "FILES", "SIZE")
        rows = [
            (
                "*" if item.current else "",
                item.id + (" (damaged)" if item.damaged else ""),
                item.commit and item.commit[:12],
                item.files,
                render.size(item.size),
            )
            for item in listed.releases
        ]
        render.table(columns, rows, right=("FILES", "SIZE"))

    render.show(listed, as_json=as_json, people=people)


def rollback(
    release: Annotated[str | None, typer.Argument(help="The release. Default: the one before the current one.")] = None,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Make another release the current one, once every file of it has been checked."""
    from dflash_ops import deploy as verbs
    from dflash_ops.shell import Shell

    if release == "":  # what a script hands over as "$ID" when it has none must not become the default
        raise UsageFault("an empty word names nothing", next="leave it out, or give an id of dflash-ops releases")
    with Shell() as shell:
        done = verbs.rollback(shell, find_container(inventory, target), release)
    render.show(
        done,
        as_json=as_json,
        people=lambda: render.say(f"{done.release} is current in {done.container}, was {done.previous}"),
    )


def prune(
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the newest releases stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    target: Target = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Remove old releases; never the current one, one that a run uses, or the newest that is whole."""
    from dflash_ops import deploy as verbs
    from dflash_ops.shell import Shell

    container = find_container(inventory, target)
    with Shell() as shell:
        done = verbs.prune(shell, container, keep, dry_run=dry_run)

    def people() -> None:
        for name in done.removed:
            render.say(f"{'would remove' if dry_run else 'removed'} {name}")
        for item in done.kept:
            render.say(f"kept {item.id}: {item.why}")
        freed = "" if dry_run else f", {render.size(done.freed)} freed"
        render.say(f"{len(done.removed)} of {len(done.removed) + len(done.kept)} releases in {container}{freed}")

    render.show(done, as_json=as_json, people=people)
