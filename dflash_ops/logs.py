"""The log of a run, byte for byte, across all that may break on the way.

The reader here knows the offset of the byte that comes next, and asks for it again after a broken link, a restart of
the container, or the death of the reader there: no byte is lost, none comes twice.
"""

import re
import time
from collections.abc import Callable
from datetime import datetime

from dflash_ops import runs
from dflash_ops.command import Container
from dflash_ops.errors import OpsError, PreflightError, TimedOutError, UnreachableError, UsageFault
from dflash_ops.runs import Run
from dflash_ops.shell import Shell

_RECONNECT_SECONDS = 600.0  # how long `logs -f` tries to come back
_CALL_SECONDS = 15.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")

OnBytes = Callable[[bytes], None]
OnWords = Callable[[str], None]


def logs(
    shell: Shell,
    container: Container,
    run: str,
    *,
    on_out: OnBytes,
    follow: bool = False,
    tail: int | None = None,
    since: dict[str, float] | None = None,
    grep: str | None = None,
    on_break: OnWords = lambda words: None,
    quiet: bool = False,
) -> Run:
    """Hands on the log's bytes; with `follow` until the run has ended. Returns the run as it then is.

    After a broken link, or a restart of the container, it goes on at the byte it had come to; `on_break` is told. tail:
    only the last lines, None: all. since: as `parse_since` gives it. grep: only lines in which this regular expression
    is found, `tail` of them.
    """
    taker = _Taker(str(container), on_out, on_break, framed=grep is not None)
    patience = Patience(on_break)
    while True:
        had = taker.offset
        command = runs.follow_command(
            container,
            taker.run_id or run,
            offset=taker.offset,
            tail=tail,
            follow=follow,
            quiet=quiet,
            since=since,
            grep=grep,
        )
        taker.expect_header()
        try:
            code = shell.stream(container, command, on_out=taker)
            found = shell.ask(container, runs.run_query(container, taker.run_id or run), timeout=_CALL_SECONDS)
            if code == 0 and (not follow or not found.state.live):
                return found
            error = OpsError("the log can't be read on", where=str(container), why=f"its reader's exit code is {code}")
        except (UnreachableError, PreflightError, TimedOutError) as broken:  # Preflight: the container is restarted
            error = broken
            shell.close()  # the next command connects anew
        if taker.run_id is None:
            raise error  # it never worked
        patience.spend(error, progress=taker.offset != had)


class Patience:
    """The waiting between two tries to read on: longer each time, until something has come or it is given up."""

    def __init__(self, on_break: OnWords) -> None:
        self._on_break = on_break
        self._broken_at: float | None = None
        self._pause = _FIRST_PAUSE

    def spend(self, error: OpsError, *, progress: bool) -> None:
        """Tells of the error and waits; raises it when nothing has come for 10 minutes. progress: whether anything has
        since the last call."""
        if self._broken_at is None or progress:
            self._broken_at, self._pause = time.monotonic(), _FIRST_PAUSE
        if time.monotonic() - self._broken_at > _RECONNECT_SECONDS:
            raise error
        self._on_break(error.line())
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def parse_since(text: str, now: datetime | None = None) -> dict[str, float]:
    """A length of time such as `10m` or `1h30m`, back from now by the container's clock, or a moment such as
    `2026-11-29T12:00:00Z`, by this machine's zone when it names none. UsageFault for what is neither."""
    if _DURATION.fullmatch(text):
        return {"ago_s": sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhd]", text))}
    try:
        moment = datetime.fromisoformat(text)
        return {"at": (moment if moment.tzinfo else moment.astimezone()).timestamp()}
    except (ValueError, OverflowError):  # or a year that this machine's zone can't have
        raise UsageFault(
            "no time to begin at", where=f"--since {text}", next="--since 10m, 1h30m, or 2026-11-29T12:00:00Z"
        ) from None


def check_pattern(pattern: str) -> str:
    """The pattern; UsageFault when it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageFault("--grep needs a regular expression", where=pattern, why=str(error), next="quote it") from None
    return pattern


class _Taker:
    """Takes the first line off, hands on the rest, and knows the byte offset that comes next."""

    def __init__(self, place: str, on_out: OnBytes, on_gone: OnWords, *, framed: bool) -> None:
        self._place, self._on_out, self._on_gone, self._framed = place, on_out, on_gone, framed
        self._head: bytes | None = b""
        self._frames = bytearray()
        self.run_id: str | None = None
        self.offset: int | None = None

    def expect_header(self) -> None:
        self._head = b""
        self._frames.clear()  # half a frame comes again

    def __call__(self, data: bytes) -> None:
        if self._head is not None:
            line, end, data = (self._head + data).partition(b"\n")
            if not end:
                self._head = line
                return
            self._head = None
            first = self.run_id is None
            self.run_id, self.offset, gone, timed = runs.log_header(line, self._place)
            if gone:
                self._on_gone(f"{gone} bytes of the log before this are gone: it was rotated")
            if first and not timed:
                self._on_gone("this log has no times, an earlier version writes it: --since shows all of it")
        if not data:
            return
        if self._framed:
            self._frames += data
            self._take_frames()
        else:
            assert self.offset is not None
            self.offset += len(data)
            self._on_out(data)

    def _take_frames(self) -> None:
        while (end := self._frames.find(b"\n")) >= 0:
            offset, size = map(int, bytes(self._frames[:end]).split())
            if len(self._frames) < end + 1 + size:
                return
            lines = bytes(memoryview(self._frames)[end + 1 : end + 1 + size])
            del self._frames[: end + 1 + size]
            self.offset = offset
            if lines:
                self._on_out(lines)
