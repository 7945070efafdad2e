"""The command line: reads words, calls one verb, shows its value. The only place where an error becomes text.

Verbs are imported when they are called: `--help` needs neither torch nor an ssh library.
"""

import contextlib
import gc
import getpass
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from dflash_ops import cli_data, cli_deploy, cli_env, cli_gpu, cli_train, render
from dflash_ops.cli_words import InventoryFile, Target, find_container
from dflash_ops.errors import OpsError, UsageFault
from dflash_ops.sandbox import cli as sandbox_cli

app = typer.Typer(
    name="dflash-ops",
    help="Deploy, run and watch a DFlash drafter trainer in an LXC container on a Proxmox GPU box.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command()(cli_deploy.deploy)
app.command()(cli_deploy.releases)
app.command()(cli_deploy.rollback)
app.command()(cli_deploy.prune)
app.add_typer(cli_train.app, name="train")
app.add_typer(cli_env.app, name="env")
app.command("put")(cli_data.put)
app.command("get")(cli_data.get)
app.command("gpu-status")(cli_gpu.gpu_status)
app.add_typer(cli_gpu.app, name="gpu")
app.command()(cli_gpu.doctor)
app.add_typer(sandbox_cli.app, name="sandbox")


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and each step on stderr.")] = False,
) -> None:
    context.obj = debug


# -- verbs


@app.command("exec", context_settings={"allow_interspersed_args": False})
def run(
    words: Annotated[list[str], typer.Argument(metavar="-- CMD [WORD]...", help="The program and its words.")],
    target: Target = None,
    inventory: InventoryFile = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds of silence.")] = None,
) -> None:
    """Run a command in the container, in the current release: words, input, output and exit code pass as they are.

    On a terminal the command gets one too: `exec -- bash` is a shell there.
    """
    from dflash_ops.command import Command
    from dflash_ops.shell import Shell

    if not words[0]:
        raise UsageFault("the command is an empty word", next="exec -- CMD")
    if timeout is not None and not timeout > 0:  # nan is not either
        raise UsageFault("no time to wait", where=f"--timeout {timeout:g}", next="give a number above 0")
    container = find_container(inventory, target)
    command = Command((*_IN_CURRENT_RELEASE, f"{container.path}/current", *words))
    with Shell() as shell:
        if os.isatty(0) and os.isatty(1):
            code = shell.interactive(container, command)
        else:
            code = shell.stream(container, command, on_out=_writer(1), on_err=_writer(2), stdin=0, timeout=timeout)
    raise typer.Exit(code)


# There `python -m trainer` is the deployed one, by the Python of the current environment, when one was made. Before the
# first deploy there is no such folder, and that is no error.
_IN_CURRENT_RELEASE = (
    "sh",
    "-c",
    'env="${1%/*}/env/current"; [ -x "$env/bin/python" ] && PATH="$(readlink -f "$env")/bin:$PATH"; '
    'cd "$1" 2>/dev/null; shift; exec "$@"',
    "exec",
)


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


# -- shared by all verbs


def main() -> NoReturn:
    """The console script: runs the app, and turns every error into one line and an exit code. (Typer itself ends it
    quietly with 130 at Ctrl-C, and when a reader of its output has gone.)"""
    # Most of a command's time goes into loading modules, a sixth of that into looking through them for garbage.
    gc.set_threshold(100_000, 50, 50)
    _open_closed_streams()
    _name_the_user()
    debug = "--debug" in sys.argv[1:2]
    try:
        app()
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except OpsError as error:
        code = _told(error.line(), error.exit_code, debug)
    except Exception as error:
        code = _told(f"{type(error).__name__}: {error}. Next: the same with `dflash-ops --debug ...`", 1, debug)
    _leave(code)


def _open_closed_streams() -> None:
    """Puts /dev/null where the caller closed a standard stream (`>&-`): else a socket that we open gets its number, and
    what is meant for the stream goes there."""
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (lives as long as we do)
            setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)


def _name_the_user() -> None:
    """Gives a user that no passwd file knows the number as a name: ssh's libraries ask for one even where the inventory
    says `user`, and a deploy's lock says whose it is."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # KeyError until Python 3.12
        os.environ["LOGNAME"] = str(os.getuid())


def _told(line: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    render.note(f"dflash-ops: {line}")
    return code


def _leave(code: int) -> NoReturn:
    """Ends the process. A reader that has gone (`| head`) is no error, a full disk under `> file` is."""
    try:
        with render.written():
            sys.stdout.flush()
    except BrokenPipeError:
        render.discard()
    except OpsError as error:
        code = _told(error.line(), error.exit_code, debug=False)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Taking hundreds of modules and an SSH library's threads apart would take longer than many a command.
    os._exit(code)
