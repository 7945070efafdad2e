"""The command line: reads words, calls one verb, shows its value. The only place where an error becomes text.

Verbs are imported when they are called: `--help` needs neither torch nor an ssh library.
"""

import contextlib
import errno
import gc
import getpass
import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from dflash_ops import leaving, render
from dflash_ops.errors import ConfigError, OpsError

# Each first word of the command line, in --help's order, with its module and its function, or a group's app there.
_COMMANDS = {
    "init": ("cli_inventory", "init"),
    "inventory": ("cli_inventory", "app"),
    "deploy": ("cli_deploy", "deploy"),
    "releases": ("cli_deploy", "releases"),
    "rollback": ("cli_deploy", "rollback"),
    "prune": ("cli_deploy", "prune"),
    "train": ("cli_train", "app"),
    "env": ("cli_env", "app"),
    "put": ("cli_data", "put"),
    "get": ("cli_data", "get"),
    "gpu-status": ("cli_gpu", "gpu_status"),
    "gpu": ("cli_gpu", "app"),
    "doctor": ("cli_gpu", "doctor"),
    "exec": ("cli_exec", "run"),
    "shell": ("cli_exec", "shell"),
    "ct": ("cli_ct", "app"),
    "sandbox": ("sandbox.cli", "app"),
}

# The exit code when the reader of our output has gone: that of a program which SIGPIPE ends, as in `exec`.
_UNREAD = 128 + signal.SIGPIPE


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        render.say(f"dflash-ops {version('dflash-ops')}")
        raise typer.Exit


def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and each step on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and end.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    del version
    context.obj = debug


def build(first: str | None = None) -> typer.Typer:
    """The command line. first: its first word, when nothing else is needed of it; any other than those of a command
    stands for all, so that help and a mistyped word see them."""
    app = typer.Typer(
        name="dflash-ops",
        help="Deploy, run and watch a DFlash drafter trainer in an LXC container on a Proxmox GPU box.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=False,
    )
    app.callback()(options)
    for name in [first] if first in _COMMANDS else _COMMANDS:
        module, attribute = _COMMANDS[name]
        found = getattr(import_module(f"dflash_ops.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            # `exec` leaves the options behind its command alone.
            settings = {"allow_interspersed_args": False} if name == "exec" else None
            app.command(name, context_settings=settings)(found)
    return app


def __getattr__(name: str) -> Any:
    """`app`: the whole command line, made when somebody asks for it."""
    if name == "app":
        return build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> NoReturn:
    """Runs the app, for __main__.py, and turns every error into one line and an exit code. (Typer itself ends it
    quietly with 130 at Ctrl-C, and with 1 when a reader of its output has gone.)"""
    # Most of a command's time goes into loading modules, a sixth of that into looking through them for garbage.
    gc.set_threshold(100_000, 50, 50)
    # A thread that connects waits for many small answers; each time the one that loads would keep it out for 5 ms.
    sys.setswitchinterval(0.0005)
    _open_closed_streams()
    _name_the_user()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leaving.by_ctrl_c)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leaving.by_signal)
    debug = "--debug" in sys.argv[1:2]
    first = sys.argv[1 + debug : 2 + debug]
    try:
        build(first[0] if first else None)()
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        if isinstance(done.__context__, BrokenPipeError):
            code = leaving.code_due() or _UNREAD
    except KeyboardInterrupt:  # while modules load
        code = 128 + signal.SIGINT
    except OpsError as error:
        code = _told(error.line(), leaving.code_due() or error.exit_code, debug)
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # Typer told of wrong words, and nobody heard it
            code = _own_code(error) or _UNREAD
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # help is written by Typer
            render.discard()
            code = _told(render.unwritten(error).line(), _own_code(error) or OpsError.exit_code, debug)
        elif isinstance(error, RuntimeError) and (fault := _no_home()) is not None:
            code = _told(fault.line(), fault.exit_code, debug)
        else:
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


def _no_home() -> ConfigError | None:
    """What is wrong where nobody knows our home folder, of which pathlib and platformdirs say a RuntimeError."""
    from pathlib import Path

    try:
        Path.home()
    except RuntimeError:
        why = f"HOME is not set, and no passwd file knows user {os.getuid()}"
        return ConfigError("you have no home folder", why=why, next="set HOME: ssh looks there for its files")
    return None


def _own_code(error: BaseException | None) -> int:
    """The exit code of what was being told of when this came in between; 0 for none."""
    while error is not None:
        if isinstance(code := getattr(error, "exit_code", None), int):
            return code
        error = error.__context__
    return 0


def _told(line: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(BrokenPipeError):  # nobody hears it
        render.note(f"dflash-ops: {line}")
    return code


def _leave(code: int) -> NoReturn:
    """Ends the process. A reader that has gone (`| head`) is told of by the exit code alone, unless that says more; a
    full disk under `> file` is an error, whose code says less than that of a failure before it."""
    leaving.now()
    try:
        with render.written():
            sys.stdout.flush()
    except BrokenPipeError:
        render.discard()
        code = code or _UNREAD
    except OpsError as error:
        told = _told(error.line(), error.exit_code, debug=False)
        code = code or told
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Taking hundreds of modules and an SSH library's threads apart would take longer than many a command.
    os._exit(code)
