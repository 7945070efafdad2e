"""torch beside threads: what torch.fx keeps for the whole process is given to each thread by itself, and what is
compiled is compiled once, in one thread, before the others start.

While one thread traces or compiles, torch.fx tells every thread that it traces (their compiled functions then refuse to
run), mixes up the metadata of their traces and records their module calls into its own graph; traces that overlap leave
some of that behind for good. `make_torch_thread_safe` repairs it: fx_faults.py brings each fault about, fx_globals.py
and fx_patches.py cure it. And dynamo may lose compiled forms when threads call one function (forms.py).

What no repair can cure is two locks that are taken in opposite order while a backward is compiled beside another
thread's: that is what warming up (warm.py) and `nothing_compiles` are for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (torch.compiler.set_stance has no types)

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback as traceback
import torch.nn.attention.flex_attention  # pyright: ignore[reportUnusedImport]

from trainer import forms, fx_faults
from trainer.diagnosis import tracing_threads
from trainer.fx_globals import CannotHold, Undo, all_functions, always, per_thread
from trainer.fx_patches import patches_per_thread

Fix = Literal["per-thread", "always-false", "off"]


@dataclass
class ThreadSafety:
    """What this torch has, what of it was repaired, and how to take that back."""

    fix: Fix
    torch_version: str
    found: dict[str, str] = field(default_factory=dict[str, str])  # by the fault's name: what went wrong
    left: dict[str, str] = field(default_factory=dict[str, str])  # what goes wrong still
    refused: list[str] = field(default_factory=list[str])  # what the repairs could not take hold of
    flag_is_false: bool = False  # in every thread, the one that traces too
    undos: list[Undo] = field(default_factory=list[Undo], repr=False)

    @property
    def repaired(self) -> list[str]:
        return [name for name in self.found if name not in self.left]

    def undo(self) -> None:
        """Makes torch what it was, to the last object. Raises RuntimeError while a thread traces."""
        global _installed
        _refuse_while_tracing()
        while self.undos:
            self.undos.pop()()
        if _installed is self:
            _installed = None

    def __str__(self) -> str:
        if not self.found:
            return f"torch {self.torch_version} has none of the known faults of torch.fx beside threads"
        line = f"torch {self.torch_version}, torch.fx beside threads: found {', '.join(self.found)}; "
        if self.fix == "off":
            return line + "repaired nothing: train.fx_fix is off"
        line += f"repaired {', '.join(self.repaired) or 'nothing'}"
        if self.left:
            line += "; not repaired: " + ", ".join(f"{name} ({wrong})" for name, wrong in self.left.items())
        if self.refused:
            line += f"; this torch is not as known: {'; '.join(self.refused)}"
        if self.flag_is_false:
            line += "; every thread is told that it traces nothing, a thread that does as well"
        return line


_installed: ThreadSafety | None = None


def installed() -> ThreadSafety | None:
    """What is in force now."""
    return _installed


def make_torch_thread_safe(fix: Fix = "per-thread") -> ThreadSafety:
    """Finds out which faults this torch has, by trying, and repairs those. Call it before other threads use torch.

    per-thread: each thread gets its own flag, metadata and patches. Where this torch offers nothing to hold the flag
    by, that becomes always-false, and `str` of what is returned says so. always-false: no thread is ever told that it
    traces, and nothing else is repaired. off: nothing is. Compiled functions that exist already are reached too. A
    second call with the same fix changes nothing; with another fix it undoes the first. Raises RuntimeError while a
    thread traces.
    """
    global _installed
    if _installed is not None:
        if _installed.fix == fix:
            return _installed
        _installed.undo()
    _refuse_while_tracing()
    safety = ThreadSafety(fix, torch.__version__, found=fx_faults.found())
    if fix == "per-thread":
        _repair(safety)
    elif fix == "always-false" and {"flag", "stuck-flag"} & set(safety.found):
        _say_no(safety)
    safety.left = fx_faults.found() if safety.undos else dict(safety.found)
    _installed = safety
    return safety


def make_compiler_thread_safe() -> ThreadSafety | None:
    """The part of make_torch_thread_safe that needs torch's compiler, which takes seconds to load: to be called when
    something is about to be compiled. What is in force then is completed and returned; None: nothing is in force.
    """
    safety = _installed
    if safety is None or forms.NAME in safety.found or (wrong := forms.forms_move()) is None:
        return safety
    safety.found[forms.NAME] = wrong
    if safety.fix == "per-thread":
        _attempt(safety, forms.keep_forms_in_place)
    if (wrong := forms.forms_move()) is not None:
        safety.left[forms.NAME] = wrong
    return safety


def _attempt(safety: ThreadSafety, repair: Callable[[], Undo]) -> bool:
    try:
        safety.undos.append(repair())
    except CannotHold as error:
        safety.refused.append(str(error))
        return False
    return True


def _repair(safety: ThreadSafety) -> None:
    def attempt(repair: Callable[[], Undo]) -> bool:
        return _attempt(safety, repair)

    # flex attention, which is imported above, copies a name that becomes each thread's: see fx_globals.py.
    found, functions = set(safety.found), all_functions()
    flag, patches = bool(found & {"flag", "stuck-flag"}), bool(found & {"module-patches", "overlap"})
    if flag or patches:
        wanted = (flag * ["_is_fx_tracing_flag"]) + (patches * ["CURRENT_PATCHER"])
        held = attempt(lambda: per_thread(symbolic_trace, tuple(wanted), functions))
        if flag and not held:
            _say_no(safety)
        if held and patches:
            attempt(patches_per_thread)
    if "metadata" in found:
        names = tuple(name for name in fx_faults.META_GLOBALS if name in traceback.__dict__)
        attempt(lambda: per_thread(traceback, names, functions))
    if "make-fx" in found:
        attempt(lambda: per_thread(proxy_tensor, ("_CURRENT_MAKE_FX_TRACER",), functions))


def _say_no(safety: ThreadSafety) -> None:
    safety.undos.append(always(symbolic_trace.is_fx_symbolic_tracing, False))
    safety.flag_is_false = True


def _refuse_while_tracing() -> None:
    if busy := tracing_threads():
        raise RuntimeError(f"torch.fx can't be changed while the thread {busy[0]!r} traces: do it before or after")


@contextlib.contextmanager
def nothing_compiles(devices: torch.device | Sequence[torch.device]) -> Generator[None]:
    """Inside, a compilation is an error that names its guard, instead of a race or a hang, in every thread.

    What is compiled already runs on. devices: of the drafters. The CPU compiles nothing: with it alone nothing is done.
    """
    every = [devices] if isinstance(devices, torch.device) else devices
    if all(device.type == "cpu" for device in every):
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
