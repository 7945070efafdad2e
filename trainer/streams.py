"""The CUDA streams of the workers. What one worker queues on a device runs in its order; workers wait for each other by
events alone, never for a device. On the CPU there are no streams, and nothing here does anything.

What goes from one GPU to another and is dropped some time goes by `moved`. A copy is queued on its source's device,
which writes into the other's memory. torch makes what follows there wait for it, and so may use that memory again as
soon as the tensor is gone; but when it gives memory back to the driver (`empty_cache`, or for want of memory) neither
torch nor cudaFree waits for another device's copy. That then writes to where nothing is any more, and the process is
lost: "unspecified launch failure". See https://github.com/pytorch/pytorch/issues/196257 and benchmarks/peer_release.py.
"""

# torch's streams are partly untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On another device. A GPU's queue keeps the order, so no copy to it is waited for; the CPU would read early.

    From GPU to GPU the memory is kept until the copy is done, however early the tensor goes.
    """
    there = tensor.to(device, dtype, non_blocking=device.type == "cuda")
    if there.is_cuda and tensor.is_cuda and there.device != tensor.device:
        keep_until(there, tensor.device)
    return there


_witnesses: dict[torch.device, torch.cuda.Stream] = {}


def keep_until(tensor: Tensor, device: torch.device) -> None:
    """The tensor's memory is kept until all is done that the current stream of another GPU, `device`, holds now."""
    stream = torch.cuda.current_stream(device)
    if not stream.cuda_stream:
        # A GPU's first stream, of which there is one name for all GPUs: the allocator would take it for the tensor's
        # own. So another stream waits for it.
        witness = _witnesses.get(device) or _witnesses.setdefault(device, torch.cuda.Stream(device))
        witness.wait_stream(stream)
        stream = witness
    tensor.record_stream(stream)


class Streams:
    """A stream on each of some devices, all of one worker, or of workers that take turns."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """devices: any of them may be the CPU, or be named more than once."""
        self._streams = {
            device: torch.cuda.Stream(device) for device in dict.fromkeys(devices) if device.type == "cuda"
        }

    @contextlib.contextmanager
    def current(self, own: torch.device | None = None) -> Generator[None]:
        """Inside, in this thread, they are the current streams of their devices; of `own` that is the current device.

        own: one of the devices; None: the first.
        """
        with contextlib.ExitStack() as stack:
            streams = list(self._streams.values())
            if own in self._streams:
                streams.insert(0, self._streams[own])
            for stream in reversed(streams):  # each makes its device the current one: the last one stays it
                stack.enter_context(torch.cuda.stream(stream))
            yield
