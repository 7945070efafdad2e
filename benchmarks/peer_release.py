"""What happens to memory that goes back to the driver while another GPU writes into it. Wants two GPUs.

    python benchmarks/peer_release.py [--case CASE]

One GPU is kept busy for a second; a copy to the other one is queued behind that, what it brings is dropped, and the
memory is given back. Each case is a process, for where it goes wrong the process has lost its GPUs:

torch    tensor.to(device), dropped at once
used     the same, read by a kernel of its own GPU before it is dropped
segments as torch, with the allocator's expandable_segments:True, which wait for their stream
moved    by trainer.streams.moved
sum      trainer.reduction.Reduction adds up two replicas' gradients, which are dropped
Prints one JSON object: what each case came to, and how long giving back took. The exit code is 1 where moved or sum
went wrong; that torch goes wrong by itself is no fault here. Without two GPUs it says so and ends with 2.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.reduction import Reduction
from trainer.streams import Streams, moved

CASES = ("torch", "used", "segments", "moved", "sum")
OURS = ("moved", "sum")
NUMBERS = 16 << 20  # of a tensor: 64 MiB, which the allocator asks of the driver by itself
CYCLES = 2_000_000_000  # about a second


def give_back(case: str) -> dict[str, Any]:
    busy, other = torch.device("cuda:0"), torch.device("cuda:1")
    models = [nn.Linear(4096, 4096, device=device) for device in (busy, other)]
    reduction = Reduction(models)
    ones = torch.ones(NUMBERS, device=busy)
    streams = Streams([busy, other])

    def queue() -> list[Tensor]:
        """Copies from the busy one; what is to be right in the end."""
        if case == "sum":
            for model in models:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            reduction.sum_gradients(everywhere=True)
            kept = [
                parameter.grad + 0 for model in models for parameter in model.parameters() if parameter.grad is not None
            ]
            for model in models:
                model.zero_grad(set_to_none=True)
            return kept
        there = moved(ones, other) if case == "moved" else ones.to(other, non_blocking=True)
        return [there + 1] if case in ("used", "moved") else []

    with streams.current(busy):
        del_me = queue()  # kernels are loaded, rooms made
        for device in (busy, other):
            torch.cuda.synchronize(device)
        del del_me
        torch.cuda.empty_cache()
        torch.cuda._sleep(CYCLES)  # pyright: ignore[reportPrivateUsage]
        kept = queue()
        began = time.monotonic()
        try:
            torch.cuda.empty_cache()
            seconds = round(time.monotonic() - began, 2)
            for device in (busy, other):
                torch.cuda.synchronize(device)
            right = all(bool((tensor == 2).all()) for tensor in kept)
        except RuntimeError as error:
            return {"came to": str(error).split("\n")[0]}
    return {"came to": "right" if right else "wrong numbers", "given back in s": seconds}


def case_alone(case: str) -> dict[str, Any]:
    """In a process of its own."""
    environment = dict(os.environ)
    if case == "segments":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    line = [sys.executable, __file__, "--one", case]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    try:
        return json.loads(done.stdout.strip().split("\n")[-1])
    except ValueError:
        return {"came to": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}


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
    with ThreadPoolExecutor(len(cases)) as pool:
        found = dict(zip(cases, pool.map(case_alone, cases), strict=True))
    told = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), **found}
    print(json.dumps(told, indent=1))
    return int(any(found[case]["came to"] != "right" for case in OURS if case in found))


if __name__ == "__main__":
    sys.exit(main())
