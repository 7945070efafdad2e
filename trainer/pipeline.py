"""Stages in threads with bounded queues between them. Knows no tensor.

    stages = [Stage("rows", [make_rows]), Stage("target", [target_0, target_1])]
    with Pipeline(source, stages, depth=2) as results:
        for result in results: ...

The source has a thread of its own, and so has each function of a stage; those of one stage share its work, whoever is
free. Results come out in the order of the source whatever the threads' timing, in the caller's thread. The first error
of any of them is raised there. Leaving the block stops all threads.

No thread waits without a bound: each wait looks again, now and then, whether there is still something to wait for. What
a stage's function itself does is beyond that: see watchdog.py.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from trainer.busy import Busy, Stopwatch

T = TypeVar("T")

JOIN_SECONDS = 30.0  # a stage may be inside a long kernel or file read when the pipeline stops
LOOK_SECONDS = 0.5  # after which who waits looks for himself, should nobody have told him


@dataclass(frozen=True)
class Stage:
    """A step on the way. Each function gets a thread: the stage's name, or that and -0, -1, ... if they are several."""

    name: str
    functions: Sequence[Callable[[Any], Any]]

    def workers(self) -> list[str]:
        """The names of its threads."""
        return [self.name] if len(self.functions) == 1 else [f"{self.name}-{n}" for n in range(len(self.functions))]


class Closed(Exception):
    """The channel was closed: nothing comes in or out any more."""


class Ended(Exception):
    """All that was put into the channel has come out, and no more will come."""


class Failure:
    """The first error of all threads that work for one caller, be they a pipeline's or others.

    Who fails claims it, and tells it once it is complete; then whoever waits is woken, and the caller raises it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: BaseException | None = None
        self._wakes: list[Callable[[], None]] = []
        self.error: BaseException | None = None  # told; to be raised by the caller

    def wakes(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, in the thread that fails, when an error is told."""
        self._wakes.append(wake)

    def claim(self, error: BaseException, worker: str) -> bool:
        """Whether it is the first. A later one is noted in the first: it may say what that one led to."""
        with self._lock:
            first, self._first = self._first, self._first or error
        if first is not None and first is not error:
            with contextlib.suppress(Exception):
                first.add_note(f"later {worker} failed: {type(error).__name__}: {error}".split("\n")[0])
        return first is None

    def tell(self) -> None:
        self.error = self._first
        for wake in self._wakes:
            wake()

    def came(self, error: BaseException, worker: str, where: str, failed: Callable[[BaseException], None]) -> None:
        """An error of a worker, in its thread: if it is the first, `failed` sees it, and then it is told."""
        if not self.claim(error, f"the worker {worker}"):
            return
        with contextlib.suppress(Exception):  # a diagnosis that fails must not hide what it is of
            failed(error)
        with contextlib.suppress(Exception):
            error.add_note(f"raised in the worker {worker}{where}")
        self.tell()


class Channel(Generic[T]):
    """A bounded queue from several threads to several, in the order of the items' numbers: 0, 1, 2, ...

    It can be ended (what is in it still comes out) and closed (nothing does). At most `depth` items and `most_bytes`
    (as `size` counts) wait in it, and besides them the item that is next to come out: were that one kept out by those
    behind it, nobody would ever move again.
    """

    def __init__(self, depth: int, most_bytes: int | None, size: Callable[[T], int] | None, writers: int) -> None:
        """writers: how many threads call `end`."""
        self._depth, self._most_bytes, self._size, self._writers = depth, most_bytes, size, writers
        self._items: dict[int, tuple[T, int]] = {}  # by number: the item and its bytes
        self._bytes = 0
        self._next = 0  # the number of the item that comes out next
        self._changed = threading.Condition()
        self._closed = False

    def put(self, number: int, item: T) -> None:
        """Waits for room. Raises Closed."""
        size = self._size(item) if self._size else 0
        with self._changed:
            self._wait(lambda: self._has_room(number, size))
            if self._closed:
                raise Closed
            self._items[number] = item, size
            self._bytes += size
            self._changed.notify_all()

    def get(self) -> tuple[int, T]:
        """Waits for the next item; with its number. Raises Ended and Closed."""
        with self._changed:
            self._wait(lambda: not self._writers or self._next in self._items)
            if self._closed:
                raise Closed
            if self._next not in self._items:
                raise Ended
            number, (item, size) = self._next, self._items.pop(self._next)
            self._next += 1
            self._bytes -= size
            self._changed.notify_all()
            return number, item

    def _has_room(self, number: int, size: int) -> bool:
        if number == self._next:
            return True
        fits = self._most_bytes is None or self._bytes + size <= self._most_bytes
        return fits and len(self._items) < self._depth

    def _wait(self, until: Callable[[], bool]) -> None:
        while not (self._closed or until()):
            self._changed.wait(LOOK_SECONDS)

    def end(self) -> None:
        """One writer has put its last."""
        with self._changed:
            self._writers -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._items, self._bytes = self._items, {}, 0
            self._changed.notify_all()
        left.clear()  # outside the lock: items may be large, and say how they go

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    def __str__(self) -> str:
        """For who looks why nothing moves. Takes no lock."""
        limit = "" if self._most_bytes is None else f", {self._bytes:,} of at most {self._most_bytes:,} bytes"
        return f"{len(self._items)} of at most {self._depth} items wait there{limit}; item {self._next} is next"


class Worker(threading.Thread):
    """A thread of a pipeline. As a daemon it doesn't keep the process from ending."""

    def __init__(self, name: str, index: int, make: Callable[["Worker", Any], None], of: Any) -> None:
        """index: of the channel that it fills, by make(itself, of)."""
        super().__init__(target=make, args=(self, of), name=name, daemon=True)
        self.index = index
        self.watch = Stopwatch()
        self.item: int | None = None  # the number of the item that it has, or had last


def joined(workers: Sequence[Worker]) -> list[str]:
    """Waits for threads that were told to stop; the names of those that don't: what was learned is worth more."""
    end = time.monotonic() + JOIN_SECONDS
    left: list[str] = []
    for worker in workers:
        if worker.ident is None:  # never started
            continue
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            left.append(worker.name)
    return left


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
        stages: Sequence[Stage],
        depth: int,
        most_bytes: int | None = None,
        size: Callable[[Any], int] | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        beat: Callable[[], None] = lambda: None,
        failure: Failure | None = None,
    ) -> None:
        """depth, most_bytes: how many items, and bytes in all of them as `size` says, may wait between two stages.

        Besides these there may be the one item that is next in order, and one in the hands of each thread. failed: gets
        the first error, in its thread, before the others stop. beat: called, in any thread, whenever an item got on.
        failure: in common with others who work for the same caller; an error of theirs stops this pipeline, too.
        Raises ValueError for a stage without functions, for two threads of one name, and for a depth below 1.
        """
        names = ["source", *(name for stage in stages for name in stage.workers())]
        if empty := [stage.name for stage in stages if not stage.functions]:
            raise ValueError(f"the stage {empty[0]!r} has no function")
        if len(set(names)) < len(names):
            raise ValueError(f"two threads of a pipeline would have one name: {', '.join(names)}")
        if depth < 1:
            raise ValueError(f"depth {depth}: there must be room for an item between two stages")
        self._failed, self._beat = failed, beat
        self._names = ["source", *(stage.name for stage in stages)]  # of the channels: who fills them
        writers = [1, *(len(stage.functions) for stage in stages)]
        self._channels: list[Channel[Any]] = [Channel(depth, most_bytes, size, count) for count in writers]
        self._failure = failure or Failure()
        self._failure.wakes(self._close)
        self._left = False
        self._caller = Stopwatch()
        self.left_behind: list[str] = []  # threads that did not stop in time when the block was left
        self._workers = [Worker("source", 0, self._read, source)]
        for index, stage in enumerate(stages, start=1):
            for name, function in zip(stage.workers(), stage.functions, strict=True):
                self._workers.append(Worker(name, index, self._work, function))

    # What the threads do: items into the next channel until they end, the pipeline stops, or one fails.

    def _read(self, worker: Worker, source: Iterable[Any]) -> None:
        with self._guard(worker):
            items = iter(source)
            for number in itertools.count():
                worker.item = number
                worker.watch.turn("working")
                try:
                    item = next(items)
                except StopIteration:
                    break
                self._put(worker, number, item)
                del item  # it may be large, and the next may be long in coming

    def _work(self, worker: Worker, function: Callable[[Any], Any]) -> None:
        inbox = self._channels[worker.index - 1]
        with self._guard(worker):
            while True:
                worker.watch.turn("waiting_in")
                try:
                    worker.item, item = inbox.get()
                except Ended:
                    break
                worker.watch.turn("working")
                made = function(item)
                del item
                self._put(worker, worker.item, made)
                del made

    def _put(self, worker: Worker, number: int, item: Any) -> None:
        worker.watch.turn("waiting_out")
        self._channels[worker.index].put(number, item)
        self._beat()

    @contextlib.contextmanager
    def _guard(self, worker: Worker) -> Generator[None]:
        """Around all that a thread does: its end and its error reach the others."""
        try:
            yield
            self._channels[worker.index].end()
        except Closed:
            pass
        except BaseException as error:  # whatever it is, the caller must see it and the others must stop
            if not self._left:  # what fails because all is stopping says nothing
                where = f", at item {worker.item} of the source, counted from 0"
                self._failure.came(error, repr(worker.name), where, self._failed)
        finally:
            worker.watch.turn("ended")

    # What the caller sees.

    def __iter__(self) -> Iterator[T]:
        with contextlib.suppress(Ended, Closed):
            while True:
                yield self._take()
        if self._failure.error is not None:
            raise self._failure.error

    def _take(self) -> T:
        self._caller.turn("waiting_in")
        try:
            item = self._channels[-1].get()[1]
        finally:
            self._caller.turn("working")
        self._beat()
        return item

    def depths(self) -> dict[str, int]:
        """How many items the source and each stage have made that nobody has taken yet, by the stage's name."""
        return {name: len(channel) for name, channel in zip(self._names, self._channels, strict=True)}

    def busy(self) -> dict[str, Busy]:
        """What each thread's seconds went into until now, by its name. Of the host: kernels may still run behind it."""
        return {worker.name: worker.watch.read() for worker in self._workers}

    def doing(self) -> dict[str, str]:
        """What each thread and the caller do at this moment, in words. Takes no lock: a stuck thread may hold it."""
        doing = {worker.name: self._words(worker) for worker in self._workers}
        phase, seconds = self._caller.phase
        if phase == "waiting_in":
            doing["the caller"] = f"waits for {self._place(-1)}, for {seconds:.1f} s"
        return doing

    def _words(self, worker: Worker) -> str:
        match worker.watch.phase:
            case "working", seconds:
                return f"works on item {worker.item}, for {seconds:.1f} s"
            case "waiting_in", seconds:
                return f"waits for {self._place(worker.index - 1)}, for {seconds:.1f} s"
            case "waiting_out", seconds:
                return f"waits to put item {worker.item} among {self._place(worker.index)}, for {seconds:.1f} s"
            case _:
                return "has ended" if worker.ident is not None else "was not started"

    def _place(self, index: int) -> str:
        return f"what {self._names[index]!r} has made ({self._channels[index]})"

    # From its start to its end.

    def __enter__(self) -> "Pipeline[T]":
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:  # the system has no thread to give
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Stops and joins the threads. One that doesn't stop is left behind: what was learned is worth more than it."""
        self._leave()

    def _leave(self) -> None:
        self._left = True
        self._close()
        self.left_behind = joined(self._workers)

    def _close(self) -> None:
        for channel in self._channels:
            channel.close()
