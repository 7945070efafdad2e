"""The command line: reads words, calls one verb, shows its value. The only place where an error becomes text.

Verbs are imported when they are called: `--help` needs neither torch nor an ssh library.
"""

import contextlib
import gc
import getpass
import os
import sys
from typing import Annotated, NoReturn

import typer

from dflash_ops import cli_ct, cli_data, cli_deploy, cli_env, cli_exec, cli_gpu, cli_inventory, cli_train, render
from dflash_ops.errors import OpsError
from dflash_ops.sandbox import cli as sandbox_cli

app = typer.Typer(
    name="dflash-ops",
    help="Deploy, run and watch a DFlash drafter trainer in an LXC container on a Proxmox GPU box.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command()(cli_inventory.init)
app.add_typer(cli_inventory.app, name="inventory")
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
app.command("exec", context_settings={"allow_interspersed_args": False})(cli_exec.run)
app.command()(cli_exec.shell)
app.add_typer(cli_ct.app, name="ct")
app.add_typer(sandbox_cli.app, name="sandbox")


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and each step on stderr.")] = False,
) -> None:
    context.obj = debug


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
