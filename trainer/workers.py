"""The target workers of a training, and how busy all of its workers are."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import torch

from trainer.busy import Busy, DeviceClock, advice
from trainer.config import TrainConfig
from trainer.draft_config import DraftConfig
from trainer.features import FeatureBatch, RowBatch
from trainer.layout import Layout
from trainer.learner import features_of
from trainer.records import WorkerSeconds
from trainer.start import target_dtype
from trainer.streams import Streams
from trainer.tally import Load
from trainer.target import TargetModel, load_target

Reading = tuple[Busy, Busy]  # of a worker's device and of its thread

ADVICE_SECONDS = 60.0  # that advice is made of, at least: a shorter stretch says little


def load_targets(config: TrainConfig, layout: Layout) -> list[TargetModel]:
    """The target of each worker. Workers on the same devices have one in common. Raises TargetError."""
    loaded: dict[tuple[str, ...], TargetModel] = {}
    for names in layout.targets:
        if names not in loaded:
            devices = [torch.device(name) for name in names]
            loaded[names] = load_target(config.target.path, devices, target_dtype(config, devices[-1]))
    return [loaded[names] for names in layout.targets]


class TargetWorker:
    """Makes features of rows, on streams of its own, and brings them to the drafter that the rows are for."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftConfig,
        devices: Sequence[torch.device],
        drafters: Sequence[torch.device],
        *,
        anchors: int,
        teacher: bool,
    ) -> None:
        """devices: its own. drafters: of each replica. anchors, teacher: as features_of has them."""
        self._target, self._draft, self._drafters = target, draft, drafters
        self._anchors, self._teacher = anchors, teacher
        self._own = devices[-1]
        self._streams = Streams([*devices, *drafters])
        self._pins = any(device.type == "cuda" for device in devices)
        self.clock = DeviceClock(self._own)

    def __call__(self, rows: RowBatch) -> FeatureBatch:
        """The batch may still be under way to its device: see FeatureBatch.received."""
        with self._streams.current(self._own):
            self.clock.start()
            batch = features_of(
                self._target,
                rows.pinned() if self._pins else rows,
                self._draft,
                self._drafters[rows.replica],
                anchors=self._anchors,
                teacher=self._teacher,
            )
            self.clock.end()
            return batch.sent()


class Meter:
    """How busy target workers and drafters are: of the devices' queues what was worked, of the threads what waited."""

    def __init__(
        self,
        layout: Layout,
        targets: Mapping[str, DeviceClock],
        drafters: Mapping[str, DeviceClock],
        *,
        queues: Callable[[], dict[str, int]],
        threads: Callable[[], Mapping[str, Busy]],
        most_drafters: int,
    ) -> None:
        """targets, drafters: by the names of their threads. queues, threads: as the pipeline tells them."""
        self._layout, self._clocks = layout, {**targets, **drafters}
        self._targets, self._drafters = list(targets), list(drafters)
        self._queues, self._threads, self._most_drafters = queues, threads, most_drafters
        self._aside = {name: (Busy(), Busy()) for name in self._clocks}  # what was no training
        self._told = self._advised = self._read()
        self._advised_at, self._advice = time.monotonic(), None

    def load(self) -> Load:
        now = self._read()
        since = self._between(self._told, now)
        self._told = now
        seconds = {
            name: WorkerSeconds(working=round(busy.working, 3), waiting=round(busy.total - busy.working, 3))
            for name, busy in since.items()
        }
        return Load(self._queues(), seconds, self._advise(now))

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """For what is no training (measuring, saving): what the workers do and wait for meanwhile is not told."""
        before = self._read()
        try:
            yield
        finally:
            for clock in self._clocks.values():
                clock.skip()
            after = self._read()
            for name, aside in self._aside.items():
                pairs = zip(aside, after[name], before[name], strict=True)
                device, thread = (known + now - then for known, now, then in pairs)
                self._aside[name] = device, thread

    def _read(self) -> dict[str, Reading]:
        """All that was training so far."""
        threads = self._threads()
        return {
            name: (clock.read() - self._aside[name][0], threads[name] - self._aside[name][1])
            for name, clock in self._clocks.items()
        }

    def _between(self, before: Mapping[str, Reading], after: Mapping[str, Reading]) -> dict[str, Busy]:
        pairs = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
        # A device that had nothing to do says nothing of it: then the thread tells what it waited for.
        return {
            name: device.split_like(thread) if device.total else Busy(0.0, thread.waiting_in, thread.waiting_out)
            for name, (device, thread) in pairs.items()
        }

    def _advise(self, now: Mapping[str, Reading]) -> str | None:
        """Of the last minute or more; until that is over what was said before."""
        if time.monotonic() - self._advised_at < ADVICE_SECONDS:
            return self._advice
        stretch = self._between(self._advised, now)
        self._advice = advice(
            [stretch[name] for name in self._targets],
            [stretch[name] for name in self._drafters],
            target_devices=self._layout.targets,
            draft_devices=self._layout.drafters,
            gpus=torch.cuda.device_count(),
            most_drafters=self._most_drafters,
        )
        self._advised, self._advised_at = now, time.monotonic()
        return self._advice
