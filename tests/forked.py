"""dflash-ops as a process of its own that begins in a moment: forked from one that has loaded all of it.

    done = run(words, stdin=b"", cwd=None, environment={...}, timeout=60)

What differs from `python -m dflash_ops` is that its modules are loaded when it begins, which is more than half of a
command's time here. What is about loading them, or about signals and terminals meanwhile, starts the real one
(conftest.py's Cli.start and Cli.words); so does whoever sets another locale or other variables of Python's, which
Python reads when it starts.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["forked", "loaded"])
_PR_SET_PDEATHSIG = 1


def can_be(environment: Mapping[str, str]) -> bool:
    """Whether a forked process is as one that starts with this environment."""
    return _read_at_the_start(environment) == _begin()


@functools.cache
def _begin() -> dict[str, str]:
    """Starts the process that all are forked from; what of the environment counts for it."""
    began = _read_at_the_start(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Python 3.11 tells it of no other
        forkserver.ensure_running()
    return began


def _read_at_the_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(("LC_", "LANG", "PYTHON"))}


def run(
    words: Sequence[str | bytes], *, stdin: bytes, cwd: Path | None, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run with output kept."""
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(3)]
    (child_in, feed), (out, child_out), (err, child_err) = ends
    typed = [os.fsdecode(word) for word in words]
    process = _CONTEXT.Process(
        target=_become,
        args=(typed, str(cwd or Path.cwd()), dict(environment), child_in, child_out, child_err),
    )
    process.start()
    for end in (child_in, child_out, child_err):
        end.close()
    said: dict[Connection, bytes] = {}
    carriers = [threading.Thread(target=_read, args=(end, said)) for end in (out, err)]
    carriers.append(threading.Thread(target=_write, args=(feed, stdin)))
    for carrier in carriers:
        carrier.start()
    process.join(timeout)
    if late := process.exitcode is None:
        process.kill()
        process.join()
    for carrier in carriers:
        carrier.join()
    code = process.exitcode
    process.close()
    if late:
        raise subprocess.TimeoutExpired(list(words), timeout, said[out], said[err])
    return subprocess.CompletedProcess(list(words), code or 0, said[out], said[err])


def _read(end: Connection, said: dict[Connection, bytes]) -> None:
    with os.fdopen(os.dup(end.fileno()), "rb") as stream:
        end.close()
        said[end] = stream.read()


def _write(end: Connection, data: bytes) -> None:
    try:
        with os.fdopen(os.dup(end.fileno()), "wb", buffering=0) as stream:
            end.close()
            while data:
                data = data[stream.write(data) :]
    except BrokenPipeError:
        pass  # it ended without having read all


def _become(words: list[str], cwd: str, environment: dict[str, str], *streams: Connection) -> None:
    """In the new process: what Python does before it runs a program, and then the program."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what a test leaves ends with the tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("error")
    import dflash_ops.__main__ as program

    sys.modules["__main__"] = program
    sys.argv = [str(program.__file__), *words]
    program.main()
