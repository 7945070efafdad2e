"""One verb in many places at once: containers, or hosts. Each has a thread; what fails in one is told for that one.

    outcomes = each(shell, {"a": container, "b": other}, lambda at: deploy.releases(at.shell, at.place))

The verbs are the same as for one place. All share the connections of one `Shell`: one per host.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_ops.command import Container, Host
from dflash_ops.conversation import TICK_SECONDS
from dflash_ops.errors import OpsError
from dflash_ops.progress import Advance, Progress
from dflash_ops.shell import Shell

P = TypeVar("P", Container, Host)
T = TypeVar("T")

# So many places work at once, and so many of one host, which does all of their work. Both are for verbs that end soon;
# where they don't, all begin at once.
AT_ONCE = 32
AT_ONCE_OF_A_HOST = 8
# After Ctrl-C the verbs' connections are closed; this is for what they still tidy up here.
_TIDY_SECONDS = 5.0

# Exit codes, the worst first. Ctrl-C; what may have left something wrong or unknown; who can't be reached; what a user
# can mend; then verdicts of runs. A code that is not here is a run's own, and a failed run.
_WORST_FIRST = (130, 9, 1, 5, 4, 124, 3, 2, 6, 7, 8, 100, 103, 101, 0)


class Interrupted(OpsError):
    """Ctrl-C came before this place was done."""

    exit_code = 130


class Board:
    """Hears how each place gets on, from many threads, while its block runs. This one says nothing."""

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, name: str) -> None:
        """It is its turn."""

    def step(self, name: str, text: str) -> None:
        """What it does now, in a few words."""

    def note(self, name: str, text: str) -> None:
        """A line that is to stay."""

    def end(self, name: str, error: OpsError | None, seconds: float) -> None:
        """It is done, or has failed."""


@dataclass(frozen=True)
class At(Generic[P]):
    """What a verb gets of its place. on_wait: told what is waited for, and for how many seconds more; note: takes a
    line that is to stay."""

    name: str
    place: P
    shell: Shell
    way: Progress
    on_wait: Callable[[str, int], None]
    note: Callable[[str], None]


@dataclass(frozen=True)
class Outcome(Generic[P, T]):
    """What became of a verb in one place: its value, or its error. place: None where the inventory's words lead
    nowhere; seconds: from its turn to its end."""

    name: str
    place: P | None
    value: T | None
    error: OpsError | None
    seconds: float

    def result(self) -> T:
        """The value; raises the error when there is none."""
        if self.error is not None:
            raise self.error
        return self.value  # pyright: ignore[reportReturnType] (a verb's value may well be None)


def worst(codes: Sequence[int]) -> int:
    """The exit code that stands for all of these, 0 for none."""

    def rank(code: int) -> int:
        return _WORST_FIRST.index(code if code in _WORST_FIRST else 100)

    return min(codes, key=rank, default=0)


def each(
    shell: Shell,
    places: Mapping[str, P | OpsError],
    verb: Callable[[At[P]], T],
    *,
    board: Board | None = None,
    lasting: bool = False,
    left: str = "",
) -> list[Outcome[P, T]]:
    """Runs the verb in every place, many at once; gives what became of each, in the order of `places`.

    places: by name; an error is the outcome of a name that leads nowhere. lasting: the verb ends when a run does, so
    that none must wait for its turn. left: what to say of a place that Ctrl-C left while it worked. Ctrl-C ends all:
    who was not done has Interrupted as its error, which says where it was.
    """
    return _Work(shell, places, verb, board or Board(), lasting, left).outcomes()


@dataclass
class _Task(Generic[P, T]):
    name: str
    place: P | OpsError
    begun_at: float | None = None
    step: str = ""
    outcome: Outcome[P, T] | None = None

    @property
    def works(self) -> bool:
        return self.begun_at is not None and self.outcome is None

    @property
    def host(self) -> Host | None:
        if isinstance(self.place, OpsError):
            return None
        return self.place.host if isinstance(self.place, Container) else self.place


class _Work(Generic[P, T]):
    def __init__(
        self,
        shell: Shell,
        places: Mapping[str, P | OpsError],
        verb: Callable[[At[P]], T],
        board: Board,
        lasting: bool,
        left: str,
    ) -> None:
        self._shell, self._verb, self._board, self._lasting, self._left = shell, verb, board, lasting, left
        self._tasks = [_Task[P, T](name, place) for name, place in places.items()]
        self._changed = threading.Condition()
        self._interrupted = threading.Event()
        self._fatal: BaseException | None = None
        shell.load()  # in threads Python would only take turns at it

    def outcomes(self) -> list[Outcome[P, T]]:
        """Begins them in their order, as there are turns, and waits for all."""
        try:
            with self._changed:
                while True:
                    for task in self._tasks:
                        self._begin(task)
                    if self._fatal is not None or all(task.outcome is not None for task in self._tasks):
                        break
                    self._changed.wait(TICK_SECONDS)
        except KeyboardInterrupt:
            self._interrupted.set()
            with contextlib.suppress(KeyboardInterrupt):  # a second one: at once
                self._shell.close()  # what is waited for over there ends
                with self._changed:
                    self._changed.wait_for(lambda: not self._working(), _TIDY_SECONDS)
        if self._fatal is not None:
            raise self._fatal
        return [task.outcome or self._broken_off(task) for task in self._tasks]

    def _working(self, host: Host | None = None) -> int:
        """How many are at work, of this host or of all."""
        return sum(task.works and host in (None, task.host) for task in self._tasks)

    def _begin(self, task: "_Task[P, T]") -> None:
        """Begins a task that has not begun, when it is its turn."""
        if task.begun_at is not None or task.outcome is not None:
            return
        if isinstance(task.place, OpsError):
            error = task.place
            gone = self._shown(lambda: self._board.end(task.name, error, 0.0))
            self._end(task, Outcome(task.name, None, None, error, 0.0), gone)
        elif self._lasting or (self._working() < AT_ONCE and self._working(task.host) < AT_ONCE_OF_A_HOST):
            task.begun_at = time.monotonic()
            # Daemons: after a second Ctrl-C nobody waits for them.
            arguments = (task, task.place, task.begun_at)
            threading.Thread(target=self._run, args=arguments, name=f"many {task.name}", daemon=True).start()

    def _run(self, task: "_Task[P, T]", place: P, begun_at: float) -> None:
        value, error = None, None
        gone = self._shown(lambda: self._board.begin(task.name))
        try:
            value = self._verb(self._at(task, place))
        except OpsError as failure:
            error = failure
        except BrokenPipeError as failure:
            gone = failure
        except Exception as fault:
            error = OpsError(f"{type(fault).__name__}: {fault}", where=str(place), next="the same with --debug")
            error.__cause__ = fault
        outcome = Outcome(task.name, place, value, error, time.monotonic() - begun_at)
        if error is not None and self._interrupted.is_set():  # it was we who broke it off
            outcome = self._broken_off(task)
        gone = gone or self._shown(lambda: self._board.end(task.name, outcome.error, outcome.seconds))
        self._end(task, outcome, gone)

    def _shown(self, tell: Callable[[], None]) -> BrokenPipeError | None:
        """Tells the board. Gives its error where nobody reads our output any more: that is the end of all. Any other
        must not hide what became of the work."""
        try:
            tell()
        except BrokenPipeError as gone:
            return gone
        except Exception:
            return None
        return None

    def _end(self, task: "_Task[P, T]", outcome: Outcome[P, T], fatal: BaseException | None = None) -> None:
        with self._changed:
            task.outcome = outcome
            self._fatal = self._fatal or fatal
            self._changed.notify_all()

    def _broken_off(self, task: "_Task[P, T]") -> Outcome[P, T]:
        place = None if isinstance(task.place, OpsError) else task.place
        where = str(place or task.name)
        if task.begun_at is None:
            return Outcome(task.name, place, None, Interrupted("not begun: Ctrl-C came before", where=where), 0.0)
        why = "; ".join(part for part in (task.step and f"it was at: {task.step}", self._left) if part)
        error = Interrupted("interrupted", where=where, why=why, next="" if self._left else "the same again")
        return Outcome(task.name, place, None, error, time.monotonic() - task.begun_at)

    def _at(self, task: "_Task[P, T]", place: P) -> At[P]:
        def step(text: str) -> None:
            task.step = text
            self._board.step(task.name, text)

        def note(text: str) -> None:
            if not self._interrupted.is_set():  # that the link broke was our doing
                self._board.note(task.name, text)

        return At(
            task.name,
            place,
            _Lent(self._shell, self._interrupted, note),
            _Row(step),
            lambda doing, left_s: step(f"{doing} ({left_s} s)"),
            note,
        )


class _Lent(Shell):
    """The shell of all, for one of them. Verbs close it to connect anew after a break: that must not cut the others'
    commands, and a broken link is renewed by whoever needs it next. After Ctrl-C it begins nothing more."""

    def __init__(self, shell: Shell, interrupted: threading.Event, note: Callable[[str], None]) -> None:
        super().__init__(on_break=note)
        self._shell, self._interrupted = shell, interrupted

    def close(self) -> None:
        pass

    def _known(self, host: Host):
        if self._interrupted.is_set():
            raise Interrupted("interrupted", where=str(host))
        return self._shell._known(host)


class _Row(Progress):
    """Steps and bytes as words for one row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def step(self, text: str) -> None:
        self._say(text)

    @contextlib.contextmanager
    def bytes(self, what: str, total: int, done: int = 0) -> Generator[Advance, None, None]:
        had, told = done, -1

        def advance(count: int) -> None:
            nonlocal had, told
            had += count
            if (percent := had * 100 // max(total, 1)) != told:
                told = percent
                self._say(f"{what} {percent}%")

        yield advance
