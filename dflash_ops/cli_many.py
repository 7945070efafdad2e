"""How each command reaches its container, the one that -t or the inventory says, or all of them that --on names.

    @in_containers
    def releases(there: There) -> None:
        there.serve(lambda at: verbs.releases(at.shell, at.place), show_releases)

gives the command -t, --on, --inventory and --json. One container's value or error is shown as it is; with --on each is
shown with its container's name, and the exit code is the worst.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, cast

import typer

from dflash_ops import hints, leaving, progress, render
from dflash_ops.cli_words import InventoryFile, Json, Target, load_inventory
from dflash_ops.errors import OpsError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container, Host
    from dflash_ops.inventory import Inventory
    from dflash_ops.many import At, Board, Outcome
    from dflash_ops.shell import Shell

T = TypeVar("T")
P = TypeVar("P", "Container", "Host")
Words = ParamSpec("Words")

On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="NAME[,NAME]...",
        help="Instead of -t: in all of these at once; containers, hosts, groups, or `all`. Repeatable.",
    ),
]


INTERRUPTED = 130  # the exit code after Ctrl-C


def _well(value: object) -> int:
    del value
    return 0


@dataclass(frozen=True)
class There:
    """Where a command works, and how it tells of it. many: told with names, as --on wants it. The inventory is read,
    and the only container connected to, when they are first asked for."""

    shell: "Shell"
    inventory: Path | None
    target: str | None
    on: Sequence[str] | None
    as_json: bool
    many: bool
    debug: bool

    @functools.cached_property
    def book(self) -> "Inventory":
        return load_inventory(self.inventory)

    @functools.cached_property
    def containers(self) -> "Mapping[str, Container | OpsError]":
        """By name; with --on, an error where a name leads nowhere now."""
        if self.on is not None:
            return {name: self._found(name) for name in self.book.names(self.on)}
        container = self.book.container(self.target)
        self.shell.begin(container.host)  # what the verb needs is loaded while the host answers
        return {container.name: container}

    def _found(self, name: str) -> "Container | OpsError":
        try:
            return self.book.container(name)
        except OpsError as error:  # a sandbox that is down
            return error

    def serve(
        self,
        verb: "Callable[[At[Container]], T]",
        show: Callable[[T], None],
        *,
        document: Callable[[T], Any] = lambda value: value,
        code: Callable[[T], int] = _well,
        lasting: bool = False,
        left: str = "",
    ) -> None:
        """Calls the verb for each container, shows what came of it, and ends with the worst exit code. See `gather` and
        `tell`."""
        outcomes = self.gather(verb, self.containers, lasting=lasting, left=left)
        leave(self.tell(outcomes, show, document=document, code=code))

    def look(self, verb: "Callable[[At[Container]], T]") -> "dict[str, Outcome[Container, T]]":
        """What comes before a question: the outcomes by name, still to be told of. Ctrl-C ends the command."""
        outcomes = self.gather(verb, self.containers, quiet=True)
        if any(it.error is not None and it.error.exit_code == INTERRUPTED for it in outcomes):
            raise typer.Exit(INTERRUPTED)
        return {it.name: it for it in outcomes}

    def gather(
        self,
        verb: "Callable[[At[P]], T]",
        places: "Mapping[str, P | OpsError]",
        *,
        quiet: bool = False,
        board: "Board | None" = None,
        lasting: bool = False,
        left: str = "",
    ) -> "list[Outcome[P, T]]":
        """Calls the verb for each of these places; without --on the error of the only one is raised. quiet: no line for
        each that is done; board: what shows how it goes on, instead of rows or lines; lasting: the verb ends when a run
        does; left: what Ctrl-C leaves going on."""
        if self.many:
            from dflash_ops import many, render_many

            chosen = board or render_many.board(list(places), quiet=quiet or self.as_json, debug=self.debug)
            with chosen as shown:
                return many.each(self.shell, places, verb, board=shown, lasting=lasting, left=left)
        from dflash_ops.many import At, Outcome

        ((name, place),) = places.items()
        if isinstance(place, OpsError):
            raise place
        countdown = progress.Countdown()
        try:
            value = verb(At(name, place, self.shell, progress.shown(debug=self.debug), countdown, render.note))
        except KeyboardInterrupt:
            countdown.close()
            if not left:
                raise
            render.note(left)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            countdown.close()
        return [Outcome(name, place, value, None, 0.0)]

    def tell(
        self,
        outcomes: "Sequence[Outcome[P, T]]",
        show: Callable[[T], None],
        *,
        document: Callable[[T], Any] = lambda value: value,
        code: Callable[[T], int] = _well,
    ) -> int:
        """Shows the outcomes and gives the worst exit code. show: a value for people; document: what is its JSON; code:
        the exit code of a value."""
        codes = [code(cast(T, it.value)) if it.error is None else it.error.exit_code for it in outcomes]
        if not self.many:
            value = outcomes[0].result()
            leaving.due(codes[0])
            render.show(document(value), as_json=self.as_json, people=lambda: show(value))
            return codes[0]
        from dflash_ops import many, render_many

        leaving.due(worst := many.worst(codes))
        results = [_result(it, number, document) for it, number in zip(outcomes, codes, strict=True)]
        render.show({"results": results}, as_json=self.as_json, people=lambda: render_many.show(outcomes, show))
        for it in outcomes:
            if self.debug and it.error is not None:
                import traceback

                traceback.print_exception(it.error)
        if not self.as_json:
            render_many.note_sum(outcomes, codes)
        return worst


def _result(outcome: "Outcome[P, T]", code: int, document: Callable[[T], Any]) -> dict[str, Any]:
    from dflash_ops.command import Host

    place, error = outcome.place, outcome.error
    host = place if isinstance(place, Host) else place and place.host
    with hints.at(None if isinstance(place, Host) else outcome.name):
        failed = error and error_document(error)
    return {
        "container": None if isinstance(place, Host) else outcome.name,
        "host": host and host.name,
        "ok": code == 0,
        "exit_code": code,
        "seconds": outcome.seconds,
        "value": None if error is not None else document(cast(T, outcome.value)),
        "error": failed,
    }


def error_document(error: OpsError) -> dict[str, Any]:
    """An error's parts for programs."""
    return {"what": error.what, "where": error.where, "why": error.why, "next": hints.here(error.next)}


def leave(code: int) -> None:
    """Ends the command, unless all is well."""
    if code:
        raise typer.Exit(code)


def in_containers(command: "Callable[Concatenate[There, Words], None]") -> Callable[..., None]:
    """A command for Typer of a function that gets `there` and the words of its own. A word of the same name as one of
    ours takes its place, and comes to the function too. UsageFault when both -t and --on are said."""
    _, *own = inspect.signature(command).parameters.values()
    names = {it.name for it in own}
    context, *shared = inspect.signature(_words).parameters.values()

    @functools.wraps(command)
    def run(context: typer.Context, **words: Any) -> None:
        from dflash_ops.shell import Shell

        ours = {it.name: words[it.name] if it.name in names else words.pop(it.name) for it in shared}
        if ours["on"] is not None and ours["target"] not in (None, os.environ.get("DFLASH_OPS_TARGET")):
            raise UsageFault("-t and --on both say where", where=f"-t {ours['target']}", next="give one of them")
        with Shell(on_break=render.note) as shell:
            there = There(shell, **ours, many=ours["on"] is not None, debug=bool(context.obj))
            cast(Callable[..., None], command)(there, **words)

    parameters = [context, *own, *(it for it in shared if it.name not in names)]
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue] (Typer reads both)
    run.__annotations__ = {it.name: it.annotation for it in parameters}
    return run


def _words(
    context: typer.Context,
    target: Target = None,
    on: On = None,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """What each command has beside its own words."""
