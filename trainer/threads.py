"""torch beside threads: what is compiled is compiled once, in one thread, before the others start.

Compiling while other threads run breaks in several ways (a tracing flag, patched module calls and traceback metadata
that belong to the whole process; two locks taken in opposite order while a backward compiles). Today only the drafter's
thread runs compiled code, the target's thread runs eagerly, and all shapes are static: so warming up before the
threads start is a whole cure. Several drafter threads will want the state of FX kept per thread as well.
"""

# pyright: reportUnknownMemberType=false
# (torch.compiler.set_stance has no types)

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def nothing_compiles(device: torch.device) -> Generator[None]:
    """Inside, a compilation is an error that names itself, instead of a race or a hang. The CPU compiles nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
