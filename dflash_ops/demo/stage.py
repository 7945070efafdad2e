"""One stage of the demo: the command that a person would type, run as typed, its output shown and its time kept."""

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from dflash_ops.command import Command, Local
from dflash_ops.errors import OpsError
from dflash_ops.shell import Shell

# A stage that says nothing for so long hangs; the demo must end then, not the patience of who watches it.
SILENT_SECONDS = 120.0


@dataclass
class Lines:
    """Bytes in, whole lines out: a stream is cut anywhere, also inside a character."""

    each: Callable[[str], None]
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for row in whole:
            self.each(row.decode("utf-8", "replace").rstrip("\r"))

    def end(self) -> None:
        if self._rest:
            self.each(self._rest.decode("utf-8", "replace"))
            self._rest = b""


@dataclass
class Stages:
    """Runs `dflash-ops` commands one after the other on `console`; `seconds` keeps what each stage took."""

    console: Console
    environment: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def stage(self, name: str, what: str) -> Generator[None]:
        self.console.print(f"\n[bold cyan]{name}[/]: {what}")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def shown(self, *words: str) -> None:
        """Print a command as a person would type it."""
        self.console.print(Text("$ " + shlex.join(words), style="bold green"), soft_wrap=not self.console.record)

    def type(self, *words: str) -> str:
        """Print `dflash-ops WORDS` and run it."""
        self.shown("dflash-ops", *words)
        return self.run(*words)

    def run(self, *words: str, quiet: bool = False, each: Callable[[str], None] | None = None, code: int = 0) -> str:
        """Run `dflash-ops WORDS` to its end; its output, which is also shown unless quiet.

        each: called with every line of its output instead of printing it. OpsError when it ends with another exit code.
        """
        return self.python("-m", "dflash_ops", *words, quiet=quiet, each=each, code=code)

    def python(self, *words: str, quiet: bool = False, each: Callable[[str], None] | None = None, code: int = 0) -> str:
        """The same for this Python's own words."""
        kept: list[str] = []
        errors: list[str] = []

        def show(line: str) -> None:
            # A terminal folds lines by itself, and a copied command stays whole; a picture has no such help.
            self.console.print(Text.from_ansi(line), soft_wrap=not self.console.record)

        def take(line: str) -> None:
            kept.append(line)
            if each is not None:
                each(line)
            elif not quiet:
                show(line)

        def complain(line: str) -> None:
            errors.append(line)
            if not quiet:
                show(line)

        out, err = Lines(take), Lines(complain)
        # A shell of its own: one stage may follow a log while the next stops the run.
        with Shell() as shell:
            ended = shell.stream(
                Local(),
                Command((sys.executable, *words), env=self.environment),
                on_out=out.feed,
                on_err=err.feed,
                timeout=SILENT_SECONDS,
            )
        out.end()
        err.end()
        if ended != code:
            raise OpsError(
                f"the demo stopped: exit code {ended} where {code} was due",
                where=shlex.join(("python", *words)),
                why=(errors or kept or [""])[-1],
            )
        return "\n".join(kept)


class Beside:
    """A command that runs beside the others; `join` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def target() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(SILENT_SECONDS)
        if self._error is not None:
            raise self._error


def colours(console: Console) -> dict[str, str]:
    """What makes a command whose output is a pipe print as it would on this console."""
    wanted = {"COLUMNS": str(console.width), "PYTHONUNBUFFERED": "1"}
    if console.is_terminal and "NO_COLOR" not in os.environ:
        wanted["FORCE_COLOR"] = "1"
    return wanted
