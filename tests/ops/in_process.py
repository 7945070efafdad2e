"""The command line in the tests' own process: each command costs half a second less than a process of its own."""

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import documented
from conftest import Cli
from typer.testing import CliRunner

from dflash_ops.cli import app
from dflash_ops.errors import OpsError


class InProcess(Cli):
    """For whole words and what comes of them; signals, streams and bytes need the real one."""

    def __call__(self, *words: Any, cwd: Path | None = None, **_: Any) -> subprocess.CompletedProcess[bytes]:
        """An error is told as main() tells it: one line on stderr, and its exit code."""
        with contextlib.chdir(cwd or Path()):
            done = CliRunner().invoke(app, [*words], env={"DFLASH_OPS_INVENTORY": str(self.inventory)})
        code, said = done.exit_code, done.stderr_bytes or b""
        if isinstance(done.exception, OpsError):
            code, said = done.exception.exit_code, said + f"dflash-ops: {done.exception.line()}\n".encode()
        elif done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        documented.confirm([str(word) for word in words], done.stdout_bytes)
        return subprocess.CompletedProcess(words, code, done.stdout_bytes, said)
