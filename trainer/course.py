"""The steps of a training: each is learned from, then measured and saved when that is due, up to the last or a stop."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path

from trainer.acceptance import CycleFigures
from trainer.checkpoint import Progress, Score, write_score
from trainer.config import TrainSection
from trainer.features import FeatureBatch
from trainer.feed import Feed
from trainer.heldout import HeldoutFigures, heldout_figures
from trainer.journal import Journal
from trainer.live import HeldoutDecoder, Measuring
from trainer.optim import learning_rate
from trainer.replicas import Replicas
from trainer.saving import Saver
from trainer.tally import Step, Tally, measured_figures
from trainer.workers import Meter


class Due:
    """What is to be done after which step."""

    def __init__(self, settings: TrainSection, feed: Feed, decoder: HeldoutDecoder | None) -> None:
        self._settings, self._feed, self._decodes = settings, feed, decoder is not None

    def figures(self, step: int) -> bool:
        """Whether the held-out data is measured."""
        return self._feed.measures_after(step)

    def decoding(self, step: int) -> bool:
        """Whether held-out prompts are decoded."""
        return self._decodes and (step % self._settings.decode_every == 0 or step == self._settings.steps)

    def measuring(self, step: int) -> bool:
        return self.figures(step) or self.decoding(step)

    def saving(self, step: int) -> bool:
        return step % self._settings.checkpoint_every == 0 or step == self._settings.steps

    def cut(self, step: int, figured: HeldoutFigures | None, decoded: CycleFigures | None) -> bool:
        """Whether some of it was not measured."""
        return (self.figures(step) and figured is None) or (self.decoding(step) and decoded is None)


class Course:
    """Where a training stands, and its way on; all in the loop's thread."""

    def __init__(
        self,
        settings: TrainSection,
        feed: Feed,
        results: Iterator[FeatureBatch],
        replicas: Replicas,
        *,
        progress: Progress,
        last_saved: int | None,
        due: Due,
        decoder: HeldoutDecoder | None,
        scores: Measuring | None,
        tally: Tally,
        meter: Meter,
        saver: Saver,
        journal: Journal,
        stop: threading.Event,
        beat: Callable[[], None],
    ) -> None:
        """results: of the feed's batches, what the targets made, in its order. progress: what it goes on from.

        last_saved: the step of the run's newest checkpoint, if it has one. scores: None when nothing is held out.
        """
        self.progress = progress
        self._settings, self._feed, self._results, self._replicas = settings, feed, results, replicas
        self._due, self._decoder, self._scores = due, decoder, scores
        self._tally, self._meter, self._saver, self._journal = tally, meter, saver, journal
        self._stop, self._beat = stop, beat
        self._last_saved = last_saved
        self._score: Score | None = None  # of the last step

    @property
    def finished(self) -> bool:
        return self.progress.step == self._settings.steps and not self.progress.unmeasured

    def save_as_own(self, score: Score | None) -> None:
        """Saves what another run had reached: from here on this one can do without it. score: that checkpoint's."""
        self._saver.save(self.progress, score)
        self._last_saved = self.progress.step

    def catch_up(self, checkpoint: Path) -> None:
        """Measures what a stop had cut after the last step; its score goes into that step's checkpoint."""
        step = self.progress.step
        figured, decoded = self._measure(step)
        if self._due.cut(step, figured, decoded):
            return
        self._score = self._scores.score(figured, decoded) if self._scores else None
        self.progress = self.progress.model_copy(update={"unmeasured": False})
        self._journal.amend(step, measured_figures(figured, decoded))
        write_score(checkpoint, self.progress, self._score, self._settings.keep)

    def go_on(self) -> None:
        """Takes the steps that are left, up to a stop. Raises GaveUp, TrainingError, OSError."""
        for step in range(self.progress.step + 1, self._settings.steps + 1):
            if self._stop.is_set():
                break
            taken = self._take(step)
            self._tally.add(taken)
            # What is decoded is saved too: else its score were for nothing.
            if self._due.saving(step) or taken.decoded is not None:
                self._save(step)
            self._saver.poll()
        self._replicas.check()

    def end(self) -> None:
        """Tells of the last step and saves it, if that was not done, and waits until it is on the disk."""
        self._tally.settle()
        if self._last_saved != self.progress.step:
            self._saver.save(self._tally.noted(self.progress), self._score)
            self._journal.update(step=self.progress.step)
        self._saver.wait()

    def _take(self, step: int) -> Step:
        """Learns from a step's rows, and measures what is due after it."""
        settings = self._settings
        lr = learning_rate(step, steps=settings.steps, highest=settings.lr, warmup_ratio=settings.warmup_ratio)
        tokens = learn_from(islice(self._results, self._feed.batches_per_step), self._replicas)
        figures = self._replicas.update(lr)
        rows = self._feed.source(step)
        due = self._due.measuring(step)
        self.progress = Progress(
            step=step,
            row=rows.after.row,
            cursor=rows.after,
            data_digest=self._feed.rows.prepared.digest,
            packing=self._feed.rows.packing,
            unmeasured=due,
        )
        figured = decoded = self._score = None
        if due:
            if not self._stop.is_set():
                self._tally.settle()
                figures.read()  # waits for the step, which is training, before what is none begins
                figured, decoded = self._measure(step)
            self.progress = self.progress.model_copy(update={"unmeasured": self._due.cut(step, figured, decoded)})
            self._score = self._scores.score(figured, decoded) if self._scores else None
        return Step(rows, lr, tokens, figures, figured, decoded)

    def _measure(self, step: int) -> tuple[HeldoutFigures | None, CycleFigures | None]:
        """What is due after a step, of what is to be measured; None for what a stop has cut."""
        figured = decoded = None
        with self._aside():
            if self._due.figures(step) and not self._stop.is_set():
                batches = islice(self._results, self._feed.heldout_batches)
                figured = heldout_figures(self._replicas, batches, self._stop, late=len(self._replicas.learners))
            if self._decoder and self._due.decoding(step) and not self._stop.is_set():
                decoded = self._decoder.measure(self._stop, self._beat)
        return figured, decoded

    def _save(self, step: int) -> None:
        self._tally.settle()
        # While steps are skipped nothing is learned, and an older checkpoint may be better.
        if self._tally.skipped_in_a_row:
            return
        with self._aside():
            self._replicas.check()
            self._saver.save(self._tally.noted(self.progress), self._score)
        self._last_saved = step
        self._journal.update(step=step)

    @contextlib.contextmanager
    def _aside(self) -> Generator[None]:
        """What is no training: in no figure of speed, and no worker's waiting."""
        with self._tally.paused(), self._replicas.paused(), self._meter.paused():
            yield


def learn_from(batches: Iterable[FeatureBatch], replicas: Replicas) -> int:
    """Gives them to their drafters; the tokens in them."""
    tokens = 0
    for batch in batches:
        tokens += batch.tokens
        replicas.learn(batch)
    return tokens
