"""Found by every Python in a container: does to the sandbox's fake GPUs what CUDA does to real ones.

A process of a run opens the device nodes that it may use, inheritably, and is charged with memory for as long as any
process holds one of those descriptors: its forked children keep the memory taken after its own death.
"""

import os


def _open_gpus():
    import fcntl
    import json
    import re
    import socket
    import struct

    names = sorted(name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))  # noqa: PTH208
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: indices, up to the first that is none.
        chosen: list[str] = []
        for word in visible.split(","):
            if not word.strip().isdigit() or int(word) >= len(names):
                break
            chosen.append(names[int(word)])
        names = chosen
    for name in names:
        device = os.open("/dev/" + name, os.O_RDWR)
        os.set_inheritable(device, True)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("/dev/nvidia-sandbox")
            mib = int(os.environ.get("DFLASH_SANDBOX_GPU_MIB", "1542"))
            connection.sendall(json.dumps({"open": name, "mib": mib}).encode() + b"\n")
            slot = json.loads(connection.makefile("rb").readline())["slot"]
            # A lock of the open file itself, not of this process: it lasts as long as any copy of the descriptor.
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
            fcntl.fcntl(device, fcntl.F_OFD_SETLK, lock)


if "DFLASH_RUN_ID" in os.environ:
    import contextlib

    with contextlib.suppress(OSError):  # no such devices here: a run without GPUs
        _open_gpus()
