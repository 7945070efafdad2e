"""/proc/driver/nvidia of the fake GPUs, as the kernel module shows it: the same on the hypervisor and in containers.

A folder bound over /proc/driver. Nothing shows where the machine's /proc has no such folder.
"""

import contextlib
import os
from pathlib import Path

from dflash_ops.sandbox import kernel, nvidia

_INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t 35
GPU UUID: \t {uuid}
Video BIOS: \t ??.??.??.??.??
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def write(folder: Path, uuids: list[str]) -> None:
    """Makes the folder, for GPUs with these UUIDs in the order of their nodes."""
    for index, uuid in enumerate(uuids):
        bus = nvidia.Gpu(index, uuid, 0, []).bus_id[-12:].lower()
        card = folder / "nvidia/gpus" / bus
        card.mkdir(parents=True)
        text = _INFORMATION.format(name=nvidia.NAME, uuid=uuid, bus=bus, minor=index)
        (card / "information").write_text(text)
    version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {nvidia.DRIVER}  Release Build\n"
    (folder / "nvidia/version").write_text(version)


def show(folder: Path, root: Path) -> None:
    """Binds it over /proc/driver below `root`, whose /proc is mounted."""
    if folder.is_dir() and (root / "proc/driver").is_dir():
        kernel.bind(str(folder), str(root / "proc/driver"))


def hide() -> None:
    """Takes it away in this mount namespace: a user namespace may mount a /proc of its own only where it sees all of
    the one that is there."""
    if os.path.ismount("/proc/driver"):
        with contextlib.suppress(OSError):
            kernel.unmount("/proc/driver")
