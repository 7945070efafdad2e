"""dflash-ops as a process of its own that begins in a moment: forked from one that has loaded all of it.

    done = run(words, stdin=b"", cwd=None, environment={...}, timeout=60)

What differs from `python -m dflash_ops` is that its modules are loaded when it begins, which is more than half of a
command's time here. What is about loading them, or about signals and terminals meanwhile, starts the real one
(conftest.py's Cli.start and Cli.words); so does whoever sets another locale or other variables of Python's, which
Python reads when it starts.
"""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["forked", "loaded"])
_PR_SET_PDEATHSIG = 1
# What Python and Typer read when they are loaded.
_EARLY = ("LC_", "LANG", "PYTHON", "TERMINAL_WIDTH", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
# multiprocessing asks at each start after all processes of this one, and an exit code can be read once.
_ONE = threading.Lock()


def can_be(environment: Mapping[str, str]) -> bool:
    """Whether a forked process is as one that starts with this environment."""
    with _ONE:
        return _read_early(environment) == _begin()


@functools.cache
def _begin() -> dict[str, str]:
    """Starts the process that all are forked from; what of the environment counts for it."""
    began = _read_early(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Python 3.11 tells it of no other
        forkserver.ensure_running()
    return began


def _read_early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(_EARLY)}


class Forked:
    """A process that calls a function; what lives of it at the end of `with` is killed."""

    def __init__(self, function: Callable[..., None], *given: object) -> None:
        self._process = _CONTEXT.Process(target=function, args=given)
        with _ONE:
            _begin()
            self._process.start()

    def code(self, seconds: float) -> int | None:
        """The exit code, negative when a signal ended it; None: it lives."""
        wait([self._process.sentinel], seconds)
        with _ONE:
            return self._process.exitcode

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        if self.code(0) is None:
            self._process.kill()
        while self.code(10) is None:
            pass
        with _ONE:
            self._process.close()


def settle(cwd: str, environment: Mapping[str, str]) -> None:
    """The first that a function does in its new process."""
    assert "dflash_ops.cli" in sys.modules, "what loaded.py loads is not there"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what a test leaves ends with the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def run(
    words: Sequence[str | bytes], *, stdin: bytes, cwd: Path | None, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run with output kept."""
    deadline = time.monotonic() + timeout
    (child_in, feed), (out, child_out), (err, child_err) = (_CONTEXT.Pipe(duplex=False) for _ in range(3))
    said = bytearray(), bytearray()
    typed = [os.fsdecode(word) for word in words]
    with Forked(_become, typed, str(cwd or Path.cwd()), dict(environment), child_in, child_out, child_err) as process:
        for end in (child_in, child_out, child_err):
            end.close()
        carriers = [
            threading.Thread(target=_read, args=each, daemon=True) for each in zip((out, err), said, strict=True)
        ]
        threading.Thread(target=_write, args=(feed, stdin), daemon=True).start()
        for carrier in carriers:
            carrier.start()
        code = process.code(timeout)
        for carrier in carriers:  # another process may hold its output still
            carrier.join(max(0.0, deadline - time.monotonic()))
    if code is None or any(carrier.is_alive() for carrier in carriers):
        raise subprocess.TimeoutExpired(list(words), timeout, bytes(said[0]), bytes(said[1]))
    return subprocess.CompletedProcess(list(words), code, bytes(said[0]), bytes(said[1]))


def _read(end: Connection, said: bytearray) -> None:
    with os.fdopen(os.dup(end.fileno()), "rb", buffering=0) as stream:
        end.close()
        while data := stream.read(1 << 16):
            said += data


def _write(end: Connection, data: bytes) -> None:
    try:
        with os.fdopen(os.dup(end.fileno()), "wb", buffering=0) as stream:
            end.close()
            while data:
                data = data[stream.write(data) :]
    except BrokenPipeError:
        pass  # it ended without having read all


def _become(words: list[str], cwd: str, environment: dict[str, str], *streams: Connection) -> None:
    """What Python does before it runs a program, and then the program."""
    settle(cwd, environment)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    warnings.simplefilter("error")
    import dflash_ops.__main__ as program

    sys.modules["__main__"] = program
    sys.argv = [str(program.__file__), *words]
    program.main()
