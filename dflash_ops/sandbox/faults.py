"""What goes wrong with the API on purpose: a file in the hypervisor that is read for each request.

Tests change it from outside, by `set_faults`, without an ssh connection.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_ops.sandbox import layout


@dataclass(frozen=True)
class Faults:
    """delay: seconds before each answer
    dies: a regular expression on "METHOD /path": the connection closes in the middle of such an answer
    slow: likewise, those answers that `delay` is for (all of them when empty)
    certificate: "own"; "other" is one that another authority signed
    down: nodes that don't answer (the other one, or this one's pvedaemon); down_code: 595, 596 or 599
    unauthorized_delay: seconds before a 401; a real one takes 3
    garbage: likewise, answers that are not JSON, as from a proxy in between
    hangs, warns: regular expressions on "TYPE VMID" of a task ("vzstart 202"): it never ends, or ends with a warning
    """

    delay: float = 0.0
    slow: str = ""
    dies: str = ""
    garbage: str = ""
    certificate: str = "own"
    down: list[str] = field(default_factory=list[str])
    down_code: int = 595
    unauthorized_delay: float = 3.0
    hangs: str = ""
    warns: str = ""


def read(root: str = "") -> Faults:
    """The faults of the hypervisor whose root folder this is."""
    try:
        return Faults(**json.loads(Path(f"{root}{layout.FAULTS}").read_text()))
    except FileNotFoundError:
        return Faults()


def set_faults(init_pid: int, **changes: Any) -> Faults:
    """Change the faults of the sandbox whose hypervisor's init is this (`SandboxState.init_pid`), from outside it; what
    is not named stays. With no change at all everything is well again."""
    root = f"/proc/{init_pid}/root"
    faults = replace(read(root), **changes) if changes else Faults()
    file = Path(f"{root}{layout.FAULTS}")
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(asdict(faults)))
    draft.replace(file)
    return faults
