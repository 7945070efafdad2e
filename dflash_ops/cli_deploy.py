"""`dflash-ops deploy`, `releases`, `rollback`, `prune`: read words, call one verb, show its value. cli.py registers
them."""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash_ops import render
from dflash_ops.cli_many import There, in_containers, leave
from dflash_ops.cli_words import a_path
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.deploy import Deployed, Listing, LiveRun, Plan, Pruned
    from dflash_ops.many import At, Outcome
    from dflash_ops.release import LeftOut
    from dflash_ops.shell import Shell
    from dflash_ops.source import Reading, Source

# Names that are told of what was left out; --json has them all.
_TOLD = 10


@in_containers
def deploy(
    there: There,
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
            help="The container's user who owns the files. Default: the inventory's, or root. Runs are root's.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Send also what matches, though it looks like a secret or a checkpoint. Repeatable."
        ),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option("--snapshot", help="First make a snapshot of the container, which `ct rollback` goes back to."),
    ] = False,
) -> None:
    """Send code into the container as a new release, check it there, and make it the current one.

    Only content that the container lacks travels. A run that goes on keeps the release that it started with."""
    from dflash_ops.inventory import working_folder

    if user == "":
        raise UsageFault("an empty word names nobody", where="--user", next="leave it out, or name a user")
    if snapshot and (dry_run or diff):
        raise UsageFault("a look changes nothing, and needs no snapshot", where="--snapshot", next="leave it out")
    containers = there.containers
    # The rest is loaded while the host answers.
    from dataclasses import replace

    from dflash_ops import deploy as verbs
    from dflash_ops import source as sources

    chosen = replace(sources.choose(source, there.book.source, here=working_folder()), include=tuple(include or ()))

    reading, taken = _Readings(), _Snapshots()
    moment = datetime.now(UTC) if there.many else None  # one id everywhere

    def look(at: "At[Container]") -> "Plan":
        return verbs.plan(at.shell, at.place, chosen, texts=diff, way=at.way, read=reading.of_one())

    def send(at: "At[Container]") -> "Deployed":
        made = None
        if snapshot:
            # First a look, which fails as the deploy would: each try would leave a snapshot.
            verbs.plan(at.shell, at.place, chosen, way=at.way, read=reading.of_one())
            made = taken.of(at)
        done = verbs.deploy(
            at.shell,
            at.place,
            chosen,
            via=via,
            activate=not no_activate,
            user=user,
            way=at.way,
            warn=lambda text: at.note(f"dflash-ops: warning: {text}"),
            read=reading.of_one(),
            moment=moment,
        )
        return replace(done, snapshot=made)

    if dry_run or diff:
        plans = there.gather(look, containers)
        _tell_left_out(plans)
        _tell_of_no_trainer(chosen)
        leave(there.tell(plans, _show_plan))
    else:
        done = there.gather(send, containers)
        _tell_left_out(done)
        _tell_of_no_trainer(chosen)
        leave(there.tell(done, _show_deployed))


class _Readings:
    """Reads the source once for all deploys of it, and once more for those that have seen it change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Reading | None = None

    def of_one(self) -> "Callable[[Shell, Source], Reading]":
        """What one deploy reads by: the newest reading, or a new one when that is what it had."""
        had: Reading | None = None

        def read(shell: "Shell", source: "Source") -> "Reading":
            from dflash_ops import source as sources

            nonlocal had
            with self._lock:
                if self._newest is None or self._newest is had:
                    self._newest = sources.read(shell, source)
                had = self._newest
                return had

        return read


class _Snapshots:
    """Makes one snapshot of each container, however many of its folders are deployed to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._made: dict[tuple[str, int], str] = {}

    def of(self, at: "At[Container]") -> str:
        """The snapshot's name."""
        from dflash_ops import snapshots

        which = (at.place.host.name, at.place.vmid)
        with self._lock:
            own = self._locks.setdefault(which, threading.Lock())
        with own:
            if which not in self._made:
                made = snapshots.make(at.shell, at.place, description="before a deploy", on_log=at.way.step)
                self._made[which] = made.snapshot
                at.note(f"snapshot {made.snapshot} made; dflash-ops ct rollback {made.snapshot} goes back to it")
            return self._made[which]


def _show_deployed(done: "Deployed") -> None:
    verb = "deployed" if done.activated else "sent"
    render.say(
        f"{verb} {done.release} to {done.container}: {render.count(done.files, 'file')}, {render.size(done.size)}, "
        f"{render.size(done.sent)} sent, {done.seconds:.2f} s"
    )
    if not done.activated:
        render.say(f"it is not current; dflash-ops rollback {done.release} makes it so")
    _show_runs(done.runs)


def _show_plan(plan: "Plan") -> None:
    from dflash_ops.release import printable

    if plan.damaged:
        render.say(f"`current` is damaged: {plan.damaged}")
    if plan.diff is not None:
        render.verbatim(plan.diff.removesuffix("\n") or f"nothing differs from {plan.current}")
        return
    files, lacking = render.count(plan.files, "file"), render.count(plan.lacking, "file")
    render.say(f"would deploy {files}, {render.size(plan.size)}, to {plan.container}; nothing was sent")
    render.say(f"would send {lacking}, {render.size(plan.to_send)}; the container has the rest")
    for sign, names in (("+", plan.changes.added), ("~", plan.changes.changed), ("-", plan.changes.removed)):
        for name in names:
            render.say(f"{sign} {printable(name)}")
    if not plan.changes and plan.current is not None:
        render.say(f"nothing differs from {plan.current}")
    _show_runs(plan.runs)


def _show_runs(runs: "Sequence[LiveRun]") -> None:
    for run in runs:
        render.say(f"run {run.run_id} goes on, untouched, with {run.release}")


def _tell_left_out(outcomes: "Sequence[Outcome[Container, Deployed]] | Sequence[Outcome[Container, Plan]]") -> None:
    """What of the source was not sent: the same for every container."""
    from dflash_ops.release import printable

    left_out: Sequence[LeftOut] = next((it.value.left_out for it in outcomes if it.value is not None), ())
    for item in left_out[:_TOLD]:
        what = f"{printable(item.path)}: it looks like {item.why}"
        render.note(f"dflash-ops: left out {what}; --include names what is to be sent")
    if len(left_out) > _TOLD:
        render.note(f"dflash-ops: left out {len(left_out) - _TOLD} more; --json lists them")


def _tell_of_no_trainer(source: "Source") -> None:
    if not (source.root / "trainer").is_dir():
        render.note(f"dflash-ops: warning: there is no trainer/ in {source}: train start needs one")


@in_containers
def releases(
    there: There,
) -> None:
    """List the container's releases, the oldest first. * marks the current one."""
    from dflash_ops import deploy as verbs

    there.serve(
        lambda at: (at.place, verbs.releases(at.shell, at.place)),
        lambda listed: _show_releases(*listed),
        document=lambda listed: listed[1],
    )


def _show_releases(container: "Container", listed: "Listing") -> None:
    from dflash_ops.remote.releases import IS_FOLDER

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


@in_containers
def rollback(
    there: There,
    release: Annotated[str | None, typer.Argument(help="The release. Default: the one before the current one.")] = None,
) -> None:
    """Make another release the current one, once every file of it has been checked."""
    from dflash_ops import deploy as verbs

    if release == "":  # what a script hands over as "$ID" when it has none must not become the default
        raise UsageFault("an empty word names nothing", next="leave it out, or give an id of dflash-ops releases")
    there.serve(
        lambda at: verbs.rollback(at.shell, at.place, release),
        lambda done: render.say(f"{done.release} is current in {done.container}, was {done.previous}"),
    )


@in_containers
def prune(
    there: There,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the newest releases stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove old releases; never the current one, one that a run uses, or the newest that is whole."""
    from dflash_ops import deploy as verbs

    there.serve(
        lambda at: verbs.prune(at.shell, at.place, keep, dry_run=dry_run), lambda done: show_pruned(done, "release")
    )


def show_pruned(done: "Pruned", what: str) -> None:
    """For releases and environments alike."""
    verb = "would remove" if done.dry_run else "removed"
    for name in done.removed:
        render.say(f"{verb} {name}")
    for item in done.kept:
        render.say(f"kept {item.id}: {item.why}")
    freed = "" if done.dry_run else f", {render.size(done.freed)} freed"
    all_of_them = render.count(len(done.removed) + len(done.kept), what)
    render.say(f"{verb} {len(done.removed)} of {all_of_them} in {done.container}{freed}")
