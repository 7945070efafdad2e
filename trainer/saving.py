"""Checkpoints written from a thread, while the training goes on.

    with Saver(folder, replicas.state, keep=2, origin=origin, saved=tell, say=print) as saver:
        for each step: ...; saver.save(progress); saver.poll()

The state is copied to the host at once (snapshot.py); what the disk takes its time for happens in the thread. One write
is under way at most: the next save waits for it. A write that fails is an OSError of the next call here, in the
caller's thread: a training without checkpoints is not worth going on with. What was written before stays whole.

Who waits for a write beats as long as the disk gets on with it, however slowly; while one hangs he does not, so that a
watchdog can end the process.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trainer.checkpoint import Progress, Score, Written, newest_good_checkpoint, tidy, write_checkpoint
from trainer.origin import Origin
from trainer.snapshot import HostCopy, Snapshot, Trained

LOOK_SECONDS = 0.5  # between two looks whether a write gets on


class Saver:
    """The writer of one training's checkpoints; all calls come from one thread."""

    def __init__(
        self,
        folder: Path,
        state: Trained,
        *,
        keep: int,
        origin: Origin | None,
        saved: Callable[[Written], None],
        say: Callable[[str], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """state: what each checkpoint is made of, as it is at that moment.

        saved: called, in the caller's thread, when a checkpoint is on the disk. say: what is odd about others.
        beat: called while a call here waits for a write, whenever that has got on.
        """
        self._say, self._said = say, set[str]()
        self._folder, self._state, self._beat = folder, state, beat
        self._keep, self._origin, self._saved = keep, origin, saved
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._done = 0  # pieces of its work that the thread has told of
        self._written: Written | None = None
        self._error: BaseException | None = None

    def save(self, progress: Progress, score: Score | None = None) -> None:
        """Starts to write a checkpoint of what the drafter is now. score: how good it is, where that was measured."""
        self.wait()
        snapshot = self._copy.take(self._state)
        self._thread = threading.Thread(target=self._write, args=(snapshot, progress, score), name="checkpoint")
        self._thread.start()

    def tidy(self, checkpoint: Path) -> None:
        """Does what a save does last, beside a checkpoint that is there already: a kill may have kept it from it."""
        self.wait()
        self._notes(tidy(checkpoint, self._keep, later=False))

    def poll(self) -> None:
        """Tells of a write that is done. Raises OSError when it failed."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the write under way, however long the disk takes. Raises OSError when it failed."""
        if self._thread is None:
            return
        before = self._got_on()
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
            if (now := self._got_on()) != before:
                before = now
                self._beat()
        self._thread = None
        error, self._error = self._error, None
        written, self._written = self._written, None
        if isinstance(error, OSError):
            raise OSError(f"no checkpoint could be written: {error}; {self._what_is_left()}") from error
        if error is not None:
            raise error
        if written is not None:
            self._saved(written)
            self._notes(written)

    def _got_on(self) -> object:
        """Another value when the thread has done something. safetensors tells of nothing, and makes a file of its
        whole length first: its blocks and its time are what changes.
        """
        files: list[tuple[str, int, int, int]] = []
        with contextlib.suppress(OSError):  # one was just renamed; or the disk fails, which the thread will tell
            for path in self._folder.glob(".*.tmp/*"):
                stat = path.stat()
                files.append((path.name, stat.st_size, stat.st_blocks, stat.st_mtime_ns))
        return self._done, sorted(files)

    def _piece_done(self) -> None:
        self._done += 1

    def _notes(self, written: Written) -> None:
        for note in written.notes:
            if note not in self._said:  # each save would say it again
                self._said.add(note)
                self._say(note)

    def _write(self, snapshot: Snapshot, progress: Progress, score: Score | None) -> None:
        try:
            self._written = write_checkpoint(
                self._folder, snapshot, progress, self._keep, score=score, origin=self._origin, beat=self._piece_done
            )
        except BaseException as error:  # whatever it is, the caller must see it
            self._error = error

    def _what_is_left(self) -> str:
        try:
            newest = newest_good_checkpoint(self._folder, lambda line: None)
        except (OSError, ValueError):
            newest = None
        if newest is None:
            return "there is none yet, so nothing of the training is kept"
        return f"{newest.name} is whole: mend the disk and start again, which goes on from there"

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Waits for the write under way. When an error is on its way already, that one is told, not the write's."""
        try:
            self.wait()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"and {own}")
