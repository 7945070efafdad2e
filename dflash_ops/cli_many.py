"""How each command reaches its container, the one that -t or the inventory says, or all of them that --on names.

with reach(context, inventory, target, on) as there:
    there.serve(lambda at: verbs.releases(at.shell, at.place), show_releases, as_json=as_json)
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from dflash_ops import progress, render
from dflash_ops.cli_words import load_inventory
from dflash_ops.errors import OpsError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container, Host
    from dflash_ops.inventory import Inventory
    from dflash_ops.many import At, Board, Outcome
    from dflash_ops.shell import Shell

T = TypeVar("T")
P = TypeVar("P", "Container", "Host")

On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="NAME[,NAME]...",
        help="Instead of -t: in all of these at once; containers, hosts, groups, or `all`. Repeatable.",
    ),
]


def _well(value: object) -> int:
    del value
    return 0


@dataclass(frozen=True)
class There:
    """Where a command works. many: by --on; then `containers` may hold errors, of names that lead nowhere now."""

    book: "Inventory"
    containers: "Mapping[str, Container | OpsError]"
    many: bool
    shell: "Shell"
    debug: bool

    def serve(
        self,
        verb: "Callable[[At[Container]], T]",
        show: Callable[[T], None],
        *,
        as_json: bool,
        document: Callable[[T], Any] = lambda value: value,
        code: Callable[[T], int] = _well,
        lasting: bool = False,
        left: str = "",
    ) -> None:
        """Calls the verb for each container, shows what came of it, and ends with the worst exit code. See `gather` and
        `tell`."""
        outcomes = self.gather(verb, self.containers, quiet=as_json, lasting=lasting, left=left)
        leave(self.tell(outcomes, show, as_json=as_json, document=document, code=code))

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

            with board or render_many.board(list(places), quiet=quiet, debug=self.debug) as shown:
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
            raise typer.Exit(130) from None
        finally:
            countdown.close()
        return [Outcome(name, place, value, None, 0.0)]

    def tell(
        self,
        outcomes: "Sequence[Outcome[P, T]]",
        show: Callable[[T], None],
        *,
        as_json: bool,
        document: Callable[[T], Any] = lambda value: value,
        code: Callable[[T], int] = _well,
    ) -> int:
        """Shows the outcomes and gives the worst exit code. show: a value for people; document: what is its JSON; code:
        the exit code of a value."""
        codes = [code(cast(T, it.value)) if it.error is None else it.error.exit_code for it in outcomes]
        if not self.many:
            value = outcomes[0].result()
            render.show(document(value), as_json=as_json, people=lambda: show(value))
            return codes[0]
        from dflash_ops import many, render_many

        results = [_result(it, number, document) for it, number in zip(outcomes, codes, strict=True)]
        render.show({"results": results}, as_json=as_json, people=lambda: render_many.show(outcomes, show))
        for it in outcomes:
            if self.debug and it.error is not None:
                import traceback

                traceback.print_exception(it.error)
        if not as_json:
            render_many.note_sum(outcomes, codes)
        return many.worst(codes)


def _result(outcome: "Outcome[P, T]", code: int, document: Callable[[T], Any]) -> dict[str, Any]:
    from dflash_ops.command import Host

    place, error = outcome.place, outcome.error
    host = place if isinstance(place, Host) else place and place.host
    return {
        "container": None if isinstance(place, Host) else outcome.name,
        "host": host and host.name,
        "ok": code == 0,
        "exit_code": code,
        "seconds": outcome.seconds,
        "value": None if error is not None else document(cast(T, outcome.value)),
        "error": error and error_document(error),
    }


def error_document(error: OpsError) -> dict[str, Any]:
    """An error's parts for programs."""
    return {"what": error.what, "where": error.where, "why": error.why, "next": error.next}


def leave(code: int) -> None:
    """Ends the command, unless all is well."""
    if code:
        raise typer.Exit(code)


@contextmanager
def reach(
    context: typer.Context, inventory: Path | None, target: str | None, on: list[str] | None
) -> Generator[There, None, None]:
    """The containers that the words name, and an open shell. UsageFault when both -t and --on are said."""
    from dflash_ops.shell import Shell

    book = load_inventory(inventory)
    debug = bool(context.obj)
    if on is None:
        container = book.container(target)
        with Shell() as shell:
            shell.begin(container.host)  # what the verb needs is loaded while the host answers
            yield There(book, {container.name: container}, False, shell, debug)
        return
    if target is not None and target != os.environ.get("DFLASH_OPS_TARGET"):
        raise UsageFault("-t and --on both say where", where=f"-t {target}", next="give one of them")
    with Shell() as shell:
        yield There(book, {name: _found(book, name) for name in book.names(on)}, True, shell, debug)


def _found(book: "Inventory", name: str) -> "Container | OpsError":
    try:
        return book.container(name)
    except OpsError as error:  # a sandbox that is down
        return error
