"""The CUDA streams of the workers. What one worker queues on a device runs in its order; workers wait for each other by
events alone, never for a device. On the CPU there are no streams, and nothing here does anything.
"""

# torch's streams are partly untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Generator, Sequence

import torch


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
