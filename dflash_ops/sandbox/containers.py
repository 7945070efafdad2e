"""What there is to know of the containers: their configs and which of them run. Runs in the hypervisor.

Light: every `pct` and `lxc-attach` imports it.
"""

import os

from dflash_ops.sandbox import layout
from dflash_ops.sandbox.processes import ProcessId


def configured(node: str = layout.NODE) -> list[int]:
    """The ids of a node's containers, sorted."""
    try:
        stems = [name.removesuffix(".conf") for name in os.listdir(layout.configs(node)) if name.endswith(".conf")]
    except FileNotFoundError:
        return []
    return sorted(int(stem) for stem in stems if stem.isdigit())


def read_config(vmid: int, node: str = layout.NODE) -> list[tuple[str, str]] | None:
    """The lines of a container's config as (key, value), in file order; None when it has none on that node."""
    try:
        with open(layout.config_file(vmid, node), errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    pairs = (line.partition(":") for line in text.split("\n[", 1)[0].split("\n") if ":" in line)
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def is_unprivileged(vmid: int) -> bool:
    return dict(read_config(vmid) or []).get("unprivileged") == "1"


def init_of(vmid: int, node: str = layout.NODE) -> ProcessId | None:
    """The container's init as the hypervisor sees it; None when it is not running on that node."""
    try:
        with open(f"{layout.running(node)}/{vmid}.init") as file:
            identity = ProcessId.parse(file.read())
    except FileNotFoundError:
        return None
    return identity if identity is not None and identity.alive else None
