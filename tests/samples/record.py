"""Records, on a machine with a GPU, what the probe sees in known scenes: `python tests/samples/record.py FOLDER`.

Writes <scene>.json: idle, a living CUDA process with a forked child, the same from inside a pid namespace of its own,
the child alone after its parent's SIGKILL, and nothing again. Needs libcuda and nvidia-smi, no torch.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dflash_ops.remote import gpuview

# As dflash_ops.gpus asks; written out, since that module needs more than the standard library. test_gpus.py compares.
GPUS = (
    "index,uuid,name,pci.bus_id,driver_version,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,"
    "power.limit,clocks.sm,clocks.mem,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,"
    "power.default_limit,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,"
    "clocks_event_reasons.active,ecc.mode.current,mig.mode.current,persistence_mode,remapped_rows.pending,"
    "gpu_recovery_action"
)
APPS = ["gpu_uuid", "pid", "used_gpu_memory", "process_name"]


def hold_memory() -> None:
    """Takes 1 GiB by CUDA's driver API, forks a child that inherits the descriptors, and stays."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)) == 0
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(1000)


def look() -> dict[str, object]:
    return gpuview.view(None, GPUS.split(","), APPS, 20.0)


def main(folder: Path) -> None:
    def keep(scene: str, view: dict[str, object]) -> None:
        (folder / f"{scene}.json").write_text(json.dumps(view, indent=1) + "\n")

    keep("idle", look())
    environment = {**os.environ, "DFLASH_RUN_ID": "a-20261129-120000-abcd", "DFLASH_RUN_DIR": "/opt/dflash/runs/a"}
    words = [sys.executable, __file__, "--hold"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, start_new_session=True) as holder:
        assert holder.stdout
        child = int(holder.stdout.readline())
        keep("living", look())
        inside = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, __file__, "--look"], stdout=subprocess.PIPE
        )
        (folder / "sibling-namespace.json").write_bytes(inside.stdout)
        holder.kill()
        holder.wait()
        time.sleep(2)
        keep("dead-parent", look())
        os.kill(child, signal.SIGKILL)
        time.sleep(2)
    keep("freed", look())


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold_memory()
    elif sys.argv[1] == "--look":
        print(json.dumps(look(), indent=1))
    else:
        main(Path(sys.argv[1]))
