"""exec and shell: a command, or a person, in the container, where the trainer runs."""

import os
import shlex
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import hints, render
from dflash_ops.cli_words import InventoryFile, Target, find_container
from dflash_ops.errors import OpsError, TimedOutError, UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Command, Container
    from dflash_ops.shell import Shell

User = Annotated[
    str | None,
    typer.Option("--user", metavar="NAME", help="Who runs it in there, instead of the inventory's `user`, or root."),
]


def run(
    words: Annotated[list[str], typer.Argument(metavar="-- CMD [WORD]...", help="The program and its words.")],
    target: Target = None,
    inventory: InventoryFile = None,
    user: User = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds of silence.")] = None,
) -> None:
    """Run a command in the container, in the current release: words, input, output and exit code pass as they are.

    On a terminal the command gets one too.
    """
    from dflash_ops.shell import Shell

    if not words[0]:
        raise UsageFault("the command is an empty word", next="exec -- CMD")
    if timeout is not None and not timeout > 0:  # nan is not either
        raise UsageFault("no time to wait", where=f"--timeout {timeout:g}", next="give a number above 0")
    container = find_container(inventory, target)
    command = _in_release(container, user, words)
    with Shell() as shell:
        if _on_a_terminal():
            code = shell.interactive(container, command)
        else:
            code = _streamed(shell, container, command, words, timeout)
    raise typer.Exit(code)


def _streamed(
    shell: "Shell", container: "Container", command: "Command", words: list[str], timeout: float | None
) -> int:
    try:
        return shell.stream(container, command, on_out=_writer(1), on_err=_writer(2), stdin=0, timeout=timeout)
    except KeyboardInterrupt:  # as with ssh without a terminal, it hears nothing of that
        render.note(f"dflash-ops: left {shlex.join(words)[:80]} ({container}): it may go on in there")
        raise typer.Exit(128 + signal.SIGINT) from None
    except TimedOutError as error:
        from dflash_ops.conversation import brief

        if error.why == brief(command):  # which begins with what we put before it
            raise TimedOutError(
                error.what, where=error.where, why=shlex.join(words[:3])[:80], next=error.next
            ) from error
        raise


def shell(target: Target = None, inventory: InventoryFile = None, user: User = None) -> None:
    """Open a shell in the container: the user's own, in the current release, with the trainer's Python first."""
    from dflash_ops.shell import Shell

    if not _on_a_terminal():
        raise UsageFault("a shell needs a terminal", next="dflash-ops exec -- bash, which reads what you pipe into it")
    container = find_container(inventory, target)
    with Shell() as door:
        code = door.interactive(container, _in_release(container, user, ("sh", "-c", _AT_LOGIN, "sh", _LOGGED_IN)))
    raise typer.Exit(code)


# There `python -m trainer` is the deployed one, by the Python of the current environment, when one was made. Before the
# first deploy there is no such folder, and that is no error. setpriv becomes the command, where su and runuser stay
# before it and have words of their own about its end. One line, without what a login shell reads in its own way.
_ENTER = (
    'env="${1%/*}/env/current"; [ -x "$env/bin/python" ] && PATH="$(readlink -f "$env")/bin:$PATH"; '
    'cd "$1" 2>/dev/null; user=$2; none=$3; shift 3; [ -n "$user" ] || exec "$@"; '
    'entry=$(getent passwd "$user") || { echo "$none" >&2; exit 8; }; '
    'of() { echo "$entry" | cut -d: -f"$1"; }; '
    'exec setpriv --reuid "$(of 3)" --regid "$(of 4)" --init-groups '
    'env "HOME=$(of 6)" "USER=$(of 1)" "LOGNAME=$(of 1)" "$@"'
)
# /etc/profile sets PATH anew, so the environment's folder is put before it afterwards; then the user's shell, which
# reads its own files.
_AT_LOGIN = 'case "$PATH" in */env/*/bin:*) bin="${PATH%%:*}:";; *) bin=;; esac; exec sh -lc "$1" sh "$bin" "$PWD"'
_LOGGED_IN = (
    'PATH="$1$PATH"; cd "$2"; SHELL=$(getent passwd "$(id -u)" | cut -d: -f7); '
    'case "$SHELL" in */nologin|*/false) SHELL=;; esac; '  # whoever runs services may have none
    '[ -x "$SHELL" ] || SHELL=$(command -v bash || echo /bin/sh); export PATH SHELL; exec "$SHELL"'
)


def _in_release(container: "Container", user: str | None, words: "list[str] | tuple[str, ...]") -> "Command":
    from dflash_ops.command import Command

    who = user or container.user or "root"
    if who == "root":
        who, none = "", ""
    else:
        make = f"dflash-ops exec --user root -- useradd -m {shlex.quote(who)}"
        none = OpsError(
            f"there is no user {who}", where=str(container), next=f"name another, or make one: {make}"
        ).line()
        none = f"dflash-ops: {render.clean(hints.here(none))}"
    return Command(("sh", "-c", _ENTER, "exec", f"{container.path}/current", who, none, *words))


def _on_a_terminal() -> bool:
    return os.isatty(0) and os.isatty(1)


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        try:
            with render.written(descriptor):
                while view:
                    view = view[os.write(descriptor, view) :]
        except BrokenPipeError:  # `| head`: as a program that SIGPIPE ends
            raise typer.Exit(128 + signal.SIGPIPE) from None

    return write
