"""Stages in threads with bounded queues between them. Knows no tensor.

    with Pipeline(source, [("rows", make_rows), ("target", run_target)], depth=2) as results:
        for result in results: ...

The source and each stage run in a thread of their own; results come out in the order of the source, in the caller's
thread. The first error of any of them is raised there. Leaving the block stops all threads.

A known gap: nothing watches over the threads. A stage that hangs for good (a file system that is gone, a kernel that
never returns) is waited for without end and without a word; only the run's log standing still shows it.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 30.0  # a stage may be inside a long kernel or file read when the pipeline stops


class Closed(Exception):
    """The channel was closed: nothing comes in or out any more."""


class Channel(Generic[T]):
    """A bounded queue that can be ended (what is in it still comes out) and closed (nothing does)."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False

    def put(self, item: T) -> None:
        """Waits for room. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        """Waits for an item. Raises Closed when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or bool(self._items))
            if self._closed or not self._items:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                yield self.get()
        except Closed:
            return


class Worker(threading.Thread):
    """A thread of a pipeline. As a daemon it doesn't keep the process from ending."""


def left_running() -> bool:
    """Whether a thread of any pipeline still runs.

    If so, end the process with os._exit: Python would take itself down under a thread that is in the middle of a torch
    operation, and the process would die of an abort.
    """
    return any(isinstance(thread, Worker) for thread in threading.enumerate())


class Pipeline(Generic[T]):
    """source -> stage -> stage -> the caller. T is what the last stage returns."""

    def __init__(
        self,
        source: Iterable[Any],
        stages: Sequence[tuple[str, Callable[[Any], Any]]],
        depth: int,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """depth: items that may wait between two stages. failed: gets an error, in its thread, before others stop."""
        self._failed = failed
        self._channels: list[Channel[Any]] = [Channel(depth) for _ in range(len(stages) + 1)]
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.left_behind: list[str] = []  # threads that did not stop in time when the block was left
        self._threads = [Worker(target=self._run, args=(source, None, 0), name="source", daemon=True)]
        for index, (name, stage) in enumerate(stages):
            arguments = (self._channels[index], stage, index + 1)
            self._threads.append(Worker(target=self._run, args=arguments, name=name, daemon=True))

    def _run(self, items: Iterable[Any], stage: Callable[[Any], Any] | None, index: int) -> None:
        """One thread: items through a stage into the next channel, until they end, the pipeline stops, or one fails."""
        out = self._channels[index]
        try:
            for item in items:
                out.put(item if stage is None else stage(item))
            out.end()
        except Closed:
            pass
        except BaseException as error:  # whatever it is, the caller must see it and the others must stop
            with contextlib.suppress(Exception):  # a diagnosis that fails must not hide what it is of
                self._failed(error)
            with self._lock:
                self._error = self._error or error
            self._close()

    def depths(self) -> dict[str, int]:
        """How many items each thread has made that nobody has taken yet, by the thread's name."""
        return {thread.name: len(channel) for thread, channel in zip(self._threads, self._channels, strict=True)}

    def _close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __iter__(self) -> Iterator[T]:
        yield from self._channels[-1]
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Pipeline[T]":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Stops and joins the threads. One that doesn't stop is left behind: what was learned is worth more than it."""
        self._close()
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.left_behind.append(thread.name)
