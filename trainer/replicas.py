"""Drafters that learn together: one replica a device and a thread a replica; each step is one step of them all.

    with Replicas(learners, streams=streams, ...) as replicas:
        for each step:
            for batch in its batches: replicas.learn(batch)   # to the thread of batch.rows.replica
            figures = replicas.update(lr)

Forward and backward are queued by the replicas' threads. All that involves several of them (sums of gradients, copies,
checksums) and the updates are queued by the caller's thread, once the others have nothing to do: one order of work on
each device, the same in every run. For that the caller's current streams must be those of `streams`, too. On a GPU
nothing here waits for a device, except for an old checksum.
"""

# torch's streams are partly untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Literal, cast

import torch
from torch import Tensor, nn

from trainer.busy import Busy, DeviceClock
from trainer.checksums import checksums
from trainer.features import FeatureBatch
from trainer.learner import Learner, Measured, StepFigures, Verdict
from trainer.loss import LossTerms
from trainer.optim import divide_gradients, gradient_norms, total_norm
from trainer.pipeline import LOOK_SECONDS, Failure, Worker, joined
from trainer.reduction import Reduce, Reduction
from trainer.snapshot import Trained
from trainer.start import TrainingError
from trainer.streams import Streams, moved

Sharing = Literal["replicated", "sharded"]

# An error, the worker's name, its device and the batch in its hands -> what to raise: the same, or what tells more.

WAITING = 1  # batches that wait for a replica's thread
AHEAD = 2  # batches that a GPU has at a time: one at work and one behind it. Each holds its features' memory


class Replicas:
    """Learners of one drafter that share each step's batches. All calls come from one thread, which is not theirs.

    replicated: every optimiser has all moments and makes the same update. sharded: each has those of its shard of the
    weights (reduction.py), updates these and gives them to the others: less memory, and the same bits. A single
    learner does to the bit what it would do alone.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        *,
        optimizer: Sharing = "replicated",
        reduce: Reduce = "copies",
        check_every: int = 0,
        steps_done: int = 0,
        streams: Streams | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        beat: Callable[[], None] = lambda: None,
        failure: Failure | None = None,
    ) -> None:
        """check_every: steps between two proofs that the replicas are equal; 0: none. steps_done: before the first.

        failed: gets the first error of a thread, in that thread, before the others stop. beat: called, in any thread,
        whenever something is done. failure: in common with others who work for the same caller. Raises ValueError for
        NCCL where it can't be.
        """
        self.learners, self._streams = list(learners), streams or Streams([])
        self._failed, self._beat = failed, beat
        self._sharded = optimizer == "sharded" and len(self.learners) > 1
        self._reduction = Reduction([learner.model for learner in self.learners], reduce)
        self._names = [name for name, _ in self.learners[0].model.named_parameters()]
        self._check_every, self._step = check_every if len(self.learners) > 1 else 0, steps_done
        self._unread: tuple[int, list[_OnItsWay]] | None = None  # the step of the last checksums, which were not read
        self._changed = threading.Condition()
        self._inboxes: list[deque[FeatureBatch]] = [deque() for _ in self.learners]
        self._at_work = [False for _ in self.learners]
        self._failure = failure or Failure()
        self._failure.wakes(self._wake)
        self._closed = False
        self.left_behind: list[str] = []  # threads that did not stop in time when the block was left
        many = len(self.learners) > 1
        names = [f"drafter-{number}" if many else "drafter" for number in range(len(self.learners))]
        self._workers = [Worker(name, number, self._work, self.learners[number]) for number, name in enumerate(names)]
        self.clocks = {name: DeviceClock(learner.device) for name, learner in zip(names, self.learners, strict=True)}

    @property
    def state(self) -> Trained:
        """What checkpoints are made of and read into, between steps only."""
        keeps = [self._names] * len(self.learners)
        if self._sharded:
            keeps = [[self._names[index] for index in own] for own in self._reduction.shards]
        models, optimizers = zip(*((learner.model, learner.optimizer) for learner in self.learners), strict=True)
        return Trained(models, optimizers, tuple(frozenset(names) for names in keeps))

    # A step.

    def learn(self, batch: FeatureBatch) -> None:
        """Gives a batch of the step under way to its replica; waits only while that one has enough to do.

        Raises the first error of any replica's thread.
        """
        inbox = self._inboxes[batch.rows.replica]
        with self._changed:
            self._wait(lambda: len(inbox) < WAITING)
            inbox.append(batch)
            self._changed.notify_all()

    def update(self, lr: float) -> StepFigures:
        """Ends the step: every replica has the weights that a single learner would have after all its batches.

        Raises the first error of any replica's thread, and TrainingError when replicas were found to differ.
        """
        self._settle()
        self._read_checksums()
        self._step += 1
        self._mark_all(lambda clock: clock.start())
        figures = self.learners[0].update(lr) if len(self.learners) == 1 else self._update_all(lr)
        self._mark_all(lambda clock: clock.end())
        if self._check_every and self._step % self._check_every == 0:
            self._begin_check()
        self._beat()
        return figures

    def _update_all(self, lr: float) -> StepFigures:
        terms = self._total()
        for learner in self.learners:
            learner.sum_up()
        self._reduction.sum_gradients(everywhere=not self._sharded)
        for learner, parameters in self._each():
            divide_gradients(parameters, moved(terms.normaliser, learner.device))
        verdict = Verdict.of(terms, self._grad_norm())
        for learner, parameters in self._each():
            learner.apply(lr, verdict.to(learner.device), parameters)
        if self._sharded:
            self._reduction.spread_weights()
        return StepFigures(terms, verdict.grad_norm, verdict.finite)

    def measure_all(self, batch: FeatureBatch) -> Measured:
        """As Learner's, by the batch's replica, between steps. The terms come to the first one's device.

        It is the caller's thread that queues it.
        """
        self._settle()
        first, learner = self.learners[0], self.learners[batch.rows.replica]
        measured = learner.measure_all(batch.received())
        self._beat()
        return replace(measured, terms=_terms_on(measured.terms, first.device))

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """For what is no training (measuring, saving), between steps: to the clocks it is neither work nor waiting."""
        self._settle()
        self._mark_all(lambda clock: clock.skip())
        try:
            yield
        finally:
            self._mark_all(lambda clock: clock.skip())

    def check(self) -> None:
        """Proves now that all replicas are equal, and waits for it; for who is about to save them.

        Raises TrainingError when they are not. Does nothing with check_every 0.
        """
        self._settle()
        if not self._check_every:
            return
        self._read_checksums()
        self._begin_check()
        self._read_checksums()

    def busy(self) -> dict[str, Busy]:
        """What each thread's seconds went into until now, by its name. Of the host: kernels may still run behind it."""
        return {worker.name: worker.watch.read() for worker in self._workers}

    def doing(self) -> dict[str, str]:
        """What each thread does at this moment, in words. Takes no lock: a stuck thread may hold it."""
        words = {
            "working": "works on a batch",
            "waiting_in": "waits for a batch",
            "waiting_out": "",
            "ended": "has ended",
        }
        doing: dict[str, str] = {}
        for worker in self._workers:
            phase, seconds = worker.watch.phase
            doing[self._named(worker.index)] = f"{words[phase]}, for {seconds:.1f} s"
        return doing

    def _mark_all(self, mark: Callable[[DeviceClock], None]) -> None:
        """Only while the threads have nothing to do, as after _settle."""
        for clock in self.clocks.values():
            mark(clock)

    def _each(self) -> Iterator[tuple[Learner, list[nn.Parameter]]]:
        """Each learner with the parameters that it updates."""
        for number, learner in enumerate(self.learners):
            parameters = self._reduction.parameters[number]
            own = self._reduction.shards[number]
            yield learner, [parameters[index] for index in own] if self._sharded else parameters

    def _total(self) -> LossTerms:
        """The terms of the whole step, on the first replica's device."""
        device = self.learners[0].device
        every = [_terms_on(terms, device) for learner in self.learners if (terms := learner.step_terms) is not None]
        assert every, "update without learn"
        return sum(every[1:], every[0])

    def _grad_norm(self) -> Tensor:
        """Of the whole gradient, on the first replica's device: of the norms that the owners made, in one order."""
        device, norms = self.learners[0].device, dict[int, Tensor]()
        for parameters, shard in zip(self._reduction.parameters, self._reduction.shards, strict=True):
            own = [index for index in shard if parameters[index].grad is not None]
            if own:
                there = torch.stack(gradient_norms([parameters[index] for index in own]))
                norms |= zip(own, moved(there, device).unbind(), strict=True)
        return total_norm([norms[index] for index in sorted(norms)])

    # The proof that they are equal.

    def _begin_check(self) -> None:
        made = [_OnItsWay(checksums(parameters)) for parameters in self._reduction.parameters]
        self._unread = self._step, made

    def _read_checksums(self) -> None:
        if self._unread is None:
            return
        (step, made), self._unread = self._unread, None
        first, *others = (on_its_way.read() for on_its_way in made)
        for number, other in enumerate(others, start=1):
            wrong = [name for name, one, two in zip(self._names, first, other, strict=True) if one != two]
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                once = "; if it comes again, --set layout.optimizer=sharded has each weight made once and copied"
                again = "" if self._sharded else once
                raise TrainingError(
                    f"after step {step} {self._named(0)} and {self._named(number)} are not equal any more: they differ "
                    f"in {wrong[0]}{more}. Each step gives them the same bits, so a GPU or a copy between two went "
                    f"wrong, or the GPUs round differently: look at the kernel's log and nvidia-smi -q -d ECC, and "
                    f"start again, which goes on from the last checkpoint{again}"
                )

    def _named(self, number: int) -> str:
        return f"{self._workers[number].name} ({self.learners[number].device})"

    # The threads.

    def _work(self, worker: Worker, learner: Learner) -> None:
        """What a replica's thread does: learns from its batches until the block is left, or any thread fails."""
        queued = deque[torch.cuda.Event]()
        try:
            with self._streams.current(learner.device):
                while True:
                    worker.watch.turn("waiting_in")
                    batch = self._next(worker.index)
                    if batch is None:
                        return
                    worker.watch.turn("working")
                    self._learn(worker, learner, batch)
                    del batch  # it is large, and the next may be long in coming
                    if learner.device.type == "cuda":
                        queued.append(torch.cuda.Event(blocking=True))
                        queued[-1].record(torch.cuda.current_stream(learner.device))
                        if len(queued) >= AHEAD:
                            queued.popleft().synchronize()
                    self._done(worker.index)
        except BaseException as error:  # whatever it is, the caller must see it and the others must stop
            if not self._closed:  # what fails because all is stopping says nothing
                self._failure.came(error, self._named(worker.index), "", self._failed)
        finally:
            worker.watch.turn("ended")

    def _learn(self, worker: Worker, learner: Learner, batch: FeatureBatch) -> None:
        batch = batch.received()
        self.clocks[worker.name].start()
        learner.learn(batch)
        self.clocks[worker.name].end()

    def _next(self, number: int) -> FeatureBatch | None:
        """Waits for a batch; None when there will be none."""
        inbox = self._inboxes[number]
        with self._changed:
            while not (inbox or self._closed or self._failure.error):
                self._changed.wait(LOOK_SECONDS)
            if self._closed or self._failure.error:
                return None
            self._at_work[number] = True
            self._changed.notify_all()
            return inbox.popleft()

    def _done(self, number: int) -> None:
        self._beat()
        with self._changed:
            self._at_work[number] = False
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Waits until no replica has anything to do. Raises the first error of any of them."""
        with self._changed:
            self._wait(lambda: not any(self._at_work) and not any(self._inboxes))

    def _wait(self, until: Callable[[], bool]) -> None:
        assert not self._closed, "the replicas' threads run inside the with block only"
        while self._failure.error is None and not until():
            self._changed.wait(LOOK_SECONDS)
        if self._failure.error is not None:
            raise self._failure.error

    def __enter__(self) -> "Replicas":
        self._reduction.prepare()
        if self._check_every:
            self._begin_check()
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.left_behind = joined(self._workers)
        for inbox in self._inboxes:
            inbox.clear()


class _OnItsWay:
    """Whole numbers on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # into page-locked memory, where it comes from a GPU
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast(list[int], self._values.tolist())


def _terms_on(terms: LossTerms, device: torch.device) -> LossTerms:
    there = (moved(cast(Tensor, getattr(terms, f.name)), device) for f in fields(terms))
    return LossTerms(*there)
