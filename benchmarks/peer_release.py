"""What happens to memory that goes back to the driver while another GPU writes into it. Wants two GPUs.

    python benchmarks/peer_release.py [--case CASE]

One GPU is kept busy for a second; a copy to the other one is queued behind that, what it brings is dropped, and the
memory is given back. Each case is a process, for where it goes wrong the process has lost its GPUs:

torch          tensor.to(device), dropped at once
used           the same, read by a kernel of the other GPU's own before it is dropped
segments       as torch, with the allocator's expandable_segments:True, which wait for their stream
moved          by trainer.streams.moved
moved-default  the same on each GPU's default stream
moved-short    as moved, given back by the allocator itself, for want of memory
sum            trainer.reduction.Reduction adds up two replicas' gradients, which are dropped
nccl           the same by NCCL
nccl-alone     torch's NCCL without the Reduction
Prints one JSON object: what each case came to, and how long giving back took. A case counts only if the copy was still
to come when the memory was to go back, and memory did go: else it says so. The exit code is 1 where one of ours did not
come to "right"; that torch goes wrong by itself is no fault here. Without two GPUs it says so and ends with 2.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl as torch_nccl
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.reduction import Reduction
from trainer.streams import Streams, moved

OURS = ("moved", "moved-default", "moved-short", "sum", "nccl")
CASES = ("torch", "used", "segments", *OURS, "nccl-alone")
NUMBERS = 16 << 20  # of a tensor: 64 MiB, which the allocator asks of the driver by itself
CYCLES = 4_000_000_000  # about two seconds
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")  # of the allocator


class Tried:
    """A case: something that is queued, and what of it is to be right in the end."""

    def __init__(self, case: str) -> None:
        self.case, self.busy, self.other = case, torch.device("cuda:0"), torch.device("cuda:1")
        self.devices = [self.busy, self.other]
        self.models = [nn.Linear(4096, 4096, device=device) for device in self.devices]
        self.reduction = Reduction(self.models, "nccl" if case == "nccl" else "copies")
        self.ones = torch.ones(NUMBERS, device=self.busy)

    def prepare(self) -> None:
        self.reduction.prepare()

    def queue(self) -> list[Tensor]:
        """What must be 2 everywhere."""
        if self.case in ("sum", "nccl"):
            parameters = [parameter for model in self.models for parameter in model.parameters()]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            self.reduction.sum_gradients(everywhere=True)
            kept = [parameter.grad + 0 for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = None
            return kept
        if self.case == "nccl-alone":
            summed = [torch.ones(NUMBERS, device=device) for device in self.devices]
            torch_nccl.all_reduce(summed, streams=[torch.cuda.current_stream(device) for device in self.devices])
            return [tensor + 0 for tensor in summed]
        if self.case.startswith("moved"):
            return [moved(self.ones, self.other) + 1]
        there = self.ones.to(self.other, non_blocking=True)
        return [there + 1] if self.case == "used" else []

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def give_back(self) -> None:
        if self.case != "moved-short":
            torch.cuda.empty_cache()
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device=self.other)


def give_back(case: str) -> dict[str, Any]:
    one = Tried(case)
    streams = contextlib.nullcontext() if case == "moved-default" else Streams(one.devices).current(one.busy)
    with streams:
        one.prepare()
        warm = one.queue()  # kernels are loaded, rooms made
        one.wait()
        del warm
        torch.cuda.empty_cache()
        torch.cuda._sleep(CYCLES)  # pyright: ignore[reportPrivateUsage]
        kept = one.queue()
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(one.busy))
        pending, before, began = not reached.query(), torch.cuda.memory_reserved(one.other), time.monotonic()
        try:
            one.give_back()
            seconds, gone = round(time.monotonic() - began, 2), before - torch.cuda.memory_reserved(one.other)
            one.wait()
            right = all(bool((tensor == 2).all()) for tensor in kept)
        except RuntimeError as error:
            return {"came to": str(error).split("\n")[0]}
    proved = pending and gone > 0
    came = "right" if right and proved else "nothing: no copy was waited for" if right else "wrong numbers"
    return {"came to": came, "given back in s": seconds, "mib": gone >> 20, "copy was pending": pending}


def case_alone(case: str) -> dict[str, Any]:
    """In a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    if case == "segments":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    line = [sys.executable, __file__, "--one", case]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"came to": "hung for 120 s"}
    if done.returncode:
        return {"came to": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return json.loads(done.stdout.strip().split("\n")[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("peer_release.py wants two GPUs, and there are not two here", file=sys.stderr)
        return 2
    if options.one:
        print(json.dumps(give_back(options.one)), flush=True)
        os._exit(0)  # a process that lost its GPUs would die of tidying up
    cases = options.case or CASES
    with ThreadPoolExecutor(4) as pool:  # more at a time would take each other's seconds
        found = dict(zip(cases, pool.map(case_alone, cases), strict=True))
    print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), **found}, indent=1))
    return int(any(found[case]["came to"] != "right" for case in OURS if case in found))


if __name__ == "__main__":
    sys.exit(main())
