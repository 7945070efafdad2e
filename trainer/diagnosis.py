"""What can be said when torch's tracer or compiler fails beside threads: who traced, what each thread did, what to do
next. Reads only; changes nothing."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false
# (torch.fx and torch._dynamo keep what is read here for themselves)

import platform
import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from trainer.fx_state import states
from trainer.watchdog import stacks

FLAG = ("torch.fx._symbolic_trace", "_is_fx_tracing_flag")
OWN_FLAG = "_is_fx_tracing_tls"  # of torch 2.14
COMPILER = tuple(f"/torch/{part}/" for part in ("fx", "_dynamo", "_functorch", "_inductor", "_higher_order_ops"))


def concerns_compiler(error: BaseException) -> bool:
    """Whether an error, or what it came from, was raised inside torch's tracer or compiler."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    for one in _chain(error):
        if type(one).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx")):
            return True
        last = one.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is not None and any(part in last.tb_frame.f_code.co_filename for part in COMPILER):
            return True
    return False


def diagnosis(error: BaseException) -> str:
    """The report, of several lines. Made where the error is caught, it shows what the other threads are doing then."""
    lines = [
        f"torch's tracer or compiler failed in the thread {threading.current_thread().name!r}: {_headline(error)}",
        *(f"guard: {guard}" for guard in guards(error)),
        f"advice: {advice(error)}",
        f"versions: {_versions()}",
        f"fix: {_fix()}",
        f"tracing now: {', '.join(map(repr, tracing_threads())) or 'no thread'}",
        f"told that it traces: {_flags()}",
        f"compiling now: {_compiling()}",
    ]
    return "\n".join([*lines, *stacks()])


def explain(error: BaseException) -> None:
    """Adds the diagnosis to an error that concerns the compiler, once, for whoever prints its traceback."""
    if concerns_compiler(error) and not hasattr(error, "diagnosed"):
        error.add_note(diagnosis(error))
        error.diagnosed = True  # type: ignore[attr-defined]


def advice(error: BaseException) -> str:
    """What to do next, in a line."""
    from trainer.threads import installed

    text, fix = " ".join(map(str, _chain(error))), installed()
    if "fail_on_recompile" in text or "ecompil" in type(error).__name__:
        why = (
            "the guards tell what each form that there is does not fit by"
            if guards(error)
            else "there is no form of it"
        )
        return (
            f"something was to be compiled after the warm-up: {why}. `python -m trainer warm CONFIG` shows whether the "
            f"warm-up itself works; if it does, report this"
        )
    if fix is None or fix.fix != "per-thread":
        return "train.fx_fix is not per-thread: set it, or leave it out"
    if fix.left:
        return (
            f"this torch has faults that could not be repaired ({', '.join(fix.left)}): use one that is known to work"
        )
    return "`python -m trainer selftest threads` shows whether the repairs hold here; if they do, report this"


def guards(error: BaseException) -> list[str]:
    """What each compiled form of a function did not fit by, when a compilation was refused; newest form first."""
    lines = [line.strip() for one in _chain(error) for line in str(one).splitlines()]
    return list(dict.fromkeys(line.removeprefix("- ") for line in lines if re.match(r"(- )?\d+/\d+: ", line)))


def tracing_threads() -> list[str]:
    """Names of the threads that are inside a trace."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    trace = torch.fx.Tracer.trace.__code__
    return [
        names.get(ident, str(ident))
        for ident, frame in sys._current_frames().items()
        if any(
            inner.f_code.co_qualname == trace.co_qualname and inner.f_code.co_filename == trace.co_filename
            for inner in _frames(frame)
        )
    ]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _headline(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _versions() -> str:
    found = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if torch.cuda.is_available():
        found += [f"CUDA {torch.version.cuda}", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"]
    return ", ".join(found)


def _fix() -> str:
    from trainer.threads import installed

    return str(installed() or "none was made: train.fx_fix is not in force")


def _flags() -> str:
    """The tracing flag as each thread has it."""
    module: Any = symbolic_trace
    if FLAG[1] in vars(type(module)):  # ours: see fx_globals.py
        told = {state.thread.name: bool(state.values.get(FLAG, False)) for state in states() if state.thread.is_alive()}
        return ", ".join(f"{name!r} {'yes' if flag else 'no'}" for name, flag in sorted(told.items())) or "no thread"
    if isinstance(own := vars(module).get(OWN_FLAG), threading.local):
        traces = "yes" if getattr(own, "flag", False) else "no"
        return f"in this torch each thread by itself; {threading.current_thread().name!r} {traces}"
    if FLAG[1] in vars(module):
        return f"one flag for all threads: {'yes' if getattr(module, FLAG[1]) else 'no'}"
    return "unknown, this torch keeps it elsewhere"


def _compiling() -> str:
    """Who holds dynamo's lock: as Python shows a lock."""
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    owner = re.search(r"owner=(\d+) count=([1-9]\d*)", repr(lock))
    if owner is None:
        return "no thread"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return repr(names.get(int(owner[1]), owner[1]))
