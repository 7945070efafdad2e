"""The trainer's command line.

    python -m trainer train CONFIG.toml RUN_DIR [--init-from DRAFTER] [--resume RUN_DIR] [--set key=value ...]
    python -m trainer train CONFIG.toml --dry-run [--set key=value ...]
    python -m trainer check CONFIG.toml [--set key=value ...] [--json]
    python -m trainer config | prepare | bench | warm | regenerate | eval | chat | export | selftest | import-gguf ...
                                                                            (--help of each says more)

Exit codes: 0 done, `train` also when SIGTERM or SIGINT stopped it so that it can be started again, on a checkpoint
unless it was still preparing data; 2 the command line is wrong; 3 the config is wrong; 6 import-gguf: the model's
package is missing; 9 eval: tokens that are not the target's own; 14 train: nothing got on for layout.stall_seconds;
130 Ctrl-C in a command that doesn't stop on a checkpoint; 143 regenerate after SIGTERM; 1 anything else.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from trainer.config import ConfigFault, TrainConfig, as_mapping, load
from trainer.watchdog import stacks_on

CONFIG_CODE = 3
INTERRUPTED_CODE = 130

# Commands that read their words themselves: name -> module with main(words) -> exit code, and what it does.
OTHERS = {
    "config": ("trainer.presets", "write a config to start with: the presets' names, or one of them"),
    "prepare": ("trainer.prepare", "conversations as tokens on disk, ready to be trained on"),
    "regenerate": ("trainer.regenerate", "conversations made by the target itself, to train its drafter on"),
    "eval": ("trainer.evaluate", "decode with a drafter: acceptance length, speed, and that no token changes"),
    "export": ("trainer.export", "a drafter as transformers, SGLang and vLLM load it, read back before it is done"),
    "chat": ("trainer.talk", "talk with a target through its drafter: its tokens are shown in green"),
    "bench": ("trainer.bench", "how fast a training is here, what share of the limit that is, what holds it back"),
    "warm": ("trainer.prewarm", "compile what a training will run, so that its start need not"),
    "selftest": ("trainer.selftest", "does this torch work beside threads: its faults, with and without the repair"),
    "import-gguf": ("trainer.models", "make the small real target"),
}


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    # Read when torch is imported. Its CPU threads wait for each other by spinning, which on a busy machine takes the
    # processor from the very threads that are waited for: 5 times slower, seen with two cores and a load of 3.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Read when CUDA starts: without it cuBLAS may add up in another order from one run to the next.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if words and words[0] in OTHERS:
        try:
            return int(imported(OTHERS[words[0]][0]).main(words[1:]))
        except (ValueError, OSError) as error:
            return fail(error)
        except KeyboardInterrupt:
            print(f"{words[0]}: stopped by Ctrl-C", file=sys.stderr)
            return INTERRUPTED_CODE
    parser = _parser()
    options: Any = parser.parse_args(words)
    if options.command == "train" and not (options.run_dir or options.dry_run):
        parser.error("train: RUN_DIR is missing; only --dry-run needs none")
    try:
        if options.command == "check":
            return check(options.config, options.sets, as_json=options.json)
        config = load(options.config, options.sets)
        if options.dry_run:
            return dry_run(config)
        return train(config, options.run_dir, options.init_from, options.resume)
    except ConfigFault as fault:
        print(fault, file=sys.stderr)
        return CONFIG_CODE


def check(config: Path, sets: Sequence[str], *, as_json: bool) -> int:
    """Reads the config and nothing else; imports no torch, so that it is quick."""
    checked = load(config, sets)
    if as_json:
        print(json.dumps(as_mapping(checked), indent=2))
    else:
        print(f"{config}: good, {checked.train.steps} steps")
    return 0


def dry_run(config: TrainConfig) -> int:
    """Prints what a training would be like, and trains nothing."""
    try:
        page = imported("trainer.estimate").dry_run(config)
        imported("trainer.start").check_paths(config)
        print(page)
    except (ValueError, RuntimeError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("train --dry-run: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED_CODE
    return 0


def train(config: TrainConfig, run_dir: Path, init_from: Path | None, resume: Path | None) -> int:
    """Trains until the last step or the first SIGTERM or SIGINT; a second one ends at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        with contextlib.suppress(OSError):  # the log's reader may be what died
            line = f"{signal.Signals(number).name}: stopping after this step, on a checkpoint; before the first, soon\n"
            os.write(1, line.encode())  # not print: the signal may have come in the middle of one
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, signal.SIG_DFL)

    stacks_on(signal.SIGUSR1)  # for who wonders what a run does: kill -USR1 writes every thread's stack into its log
    # Before torch is imported, which takes seconds in which a stop may come.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    imported("trainer.train")
    from trainer.checkpoint import CheckpointError
    from trainer.data import DataError
    from trainer.target import TargetError
    from trainer.train import TrainingError
    from trainer.train import train as run

    try:
        run(config, run_dir, init_from=init_from, resume=resume, stop=stop, say=say)
    except (CheckpointError, DataError, TargetError, TrainingError, OSError) as error:
        return fail(error)
    # Everything is written. While Python takes itself down it would give the signals back their default, death: a stop
    # that comes now must not turn a good end into a bad one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return 0


def imported(name: str) -> Any:
    """A module, with torch where nothing has imported that yet: all of it stays, so Python needs not look through it
    for garbage meanwhile, half a second for each start."""
    if "torch" in sys.modules:
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()  # not frozen: the repair of torch beside threads looks for functions among all objects


def leave(code: int) -> NoReturn:
    """Ends the process, at once when a thread was left behind."""
    from trainer.pipeline import left_running

    if left_running():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def say(line: str) -> None:
    write_line(sys.stdout, line)


def write_line(stream: TextIO, line: str) -> None:
    """A line of the log. One that can't be written (its reader died, the disk is full) stops no training."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # What the stream still holds would fail again with each line, and once more when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def fail(error: Exception) -> int:
    """A mistake of the user's or a full disk: one line. Anything else keeps its traceback, for the run's log."""
    write_line(sys.stderr, f"{type(error).__name__}: {error}".replace("\n", "; "))
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__, formatter_class=_Raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    running = commands.add_parser("train", help="train a drafter, or say what it would take", formatter_class=_Raw)
    running.add_argument("config", type=Path)
    running.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        help="records, prepared data and checkpoints; one with checkpoints is resumed",
    )
    running.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print shapes, parameters, tokens a step and how much memory it would take",
    )
    running.add_argument("--init-from", type=Path, metavar="DRAFTER", help="start with this drafter's weights")
    running.add_argument(
        "--resume", type=Path, metavar="RUN_DIR", help="go on from this earlier run's newest checkpoint"
    )

    checking = commands.add_parser("check", help="check a config, quickly")
    checking.add_argument("config", type=Path)
    checking.add_argument("--json", action="store_true", help="print it with all defaults")

    for command in (running, checking):
        command.add_argument(
            "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config"
        )

    for name, (_, what) in OTHERS.items():
        commands.add_parser(name, help=f"{what} (python -m trainer {name} --help)", add_help=False)
    return parser


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:
        # As Python would tell it, but before it takes itself down, which it can't under a thread that was left behind.
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code)
