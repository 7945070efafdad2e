"""A stop that workers don't answer: the step under way is given up, what is learned is kept."""

import threading
from types import TracebackType

from trainer.pipeline import Failure

GIVE_UP_SECONDS = 20.0  # without anything getting on, once a stop was asked for
LOOK_SECONDS = 0.5


class GaveUp(Exception):
    """Raised where the caller waits for a worker that hangs."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing got on for {seconds:g} s after the stop")


class Patience:
    """Watches, from a daemon thread, that a stop is answered: between two steps the caller does that itself.

    A worker that hangs (a file system that is gone, a kernel that never returns) would keep it from ever looking.
    """

    def __init__(self, stop: threading.Event, failure: Failure) -> None:
        """stop: when set, and then nothing beats for GIVE_UP_SECONDS, GaveUp is the workers' failure."""
        self._stop, self._failure, self._seconds = stop, failure, GIVE_UP_SECONDS
        self._beaten = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    def beat(self) -> None:
        """Something got on. From any thread."""
        self._beaten = True

    def _watch(self) -> None:
        quiet = 0.0
        while not self._over.wait(LOOK_SECONDS):
            quiet = 0.0 if self._beaten or not self._stop.is_set() else quiet + LOOK_SECONDS
            self._beaten = False
            if quiet >= self._seconds:
                if self._failure.claim(GaveUp(self._seconds), "patience"):
                    self._failure.tell()
                return

    def __enter__(self) -> "Patience":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
