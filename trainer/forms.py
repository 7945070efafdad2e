"""The forms in which a function was compiled, beside threads.

dynamo keeps them in a list and takes the first one whose guards hold, which then moves to the front. Guards give up
Python's lock, so another thread may be on its way along the list: it goes on behind a form that has just moved, and may
pass over its own. Then nothing fits, and it compiles anew, or is refused. (With torch 2.11 and 2.13 and three threads
about one call in 200.) So the forms have to stay where they are; that the one used last is no longer tried first costs
microseconds.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (dynamo's frames are private and untyped)

from typing import Any

import torch
from torch import Tensor

from trainer.fx_globals import CannotHold, Undo

NAME = "forms"


def forms_move() -> str | None:
    """What goes wrong in this torch, or None. Loads dynamo, which takes seconds."""
    import torch._dynamo as dynamo
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    def forms() -> list[int]:
        return [id(entry.code) for entry in _debug_get_cache_entry_list(plus_one.__code__)]

    compiled = torch.compile(plus_one, backend="eager", dynamic=False)
    sizes = [torch.ones(1), torch.ones(2)]
    try:
        for size in sizes:
            compiled(size)
        before, after = forms(), list[list[int]]()
        for size in sizes:
            compiled(size)
            after.append(forms())
    finally:
        dynamo.reset_code(plus_one.__code__)  # pyright: ignore[reportPrivateImportUsage]
    if len(before) == 2 and after == [before, before]:
        return None
    return "compiled forms of a function move while another thread looks for its own: it may pass over it"


def keep_forms_in_place() -> Undo:
    """Raises CannotHold where this torch has no switch for it."""
    import torch._C._dynamo.eval_frame as eval_frame

    switch: Any = getattr(eval_frame, "_set_lru_cache", None)
    if switch is None:
        raise CannotHold("dynamo's forms move, and torch._C._dynamo.eval_frame._set_lru_cache is gone")
    switch(False)
    return lambda: switch(True)
