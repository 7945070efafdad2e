"""put, get: large files and folders into the container and back.

Their bytes go through the container's stdin or stdout: nothing is staged on the host, whose disk may be smaller than a
model. Each file is whole in its place or not there: both ends compare the sha256 of all its bytes. What a broken link
leaves is a part; the same command goes on with it, also by itself while the link comes back. Files whose content is
there already do not travel.
"""

import hashlib
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops import answers
from dflash_ops.command import Container
from dflash_ops.errors import (
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    UnreachableError,
    UsageFault,
    VerificationError,
)
from dflash_ops.exchange import Exchange, exchange
from dflash_ops.fetch import fetch_once
from dflash_ops.progress import Advance, Progress
from dflash_ops.release import printable
from dflash_ops.remote import transfer
from dflash_ops.remote.answers import Fault
from dflash_ops.remote.releases import is_inside
from dflash_ops.shell import Shell

_ANSWER_SECONDS = 60.0
_SLOWEST_BYTES_PER_SECOND = 1_000_000
# How long a put waits for a file that another one is writing; and when it comes back after a broken link, whose old end
# in the container may take 30 s to notice.
_PATIENCE_SECONDS = 5.0
_OWN_PATIENCE_SECONDS = 45.0
# Seconds before each try that follows one that brought nothing; one that brought something starts them again.
_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
# No try begins later than so after one that brought something: whoever waits should hear of a host that is gone.
_TRYING_SECONDS = 16.0
_TRIES_FOR_A_FILE = 2
_COMPARED_SLOWLY_BYTES = 1 << 28


@dataclass(frozen=True)
class Moved:
    """Files that were put or got. paths: where what was named lies now; size: bytes of all the files; sent: those that
    travelled; unchanged: files that were there already; left_out: what did not come with a folder, and why."""

    container: str
    paths: tuple[str, ...]
    files: int
    size: int
    sent: int
    unchanged: int
    seconds: float
    left_out: tuple[str, ...] = ()


@dataclass
class Tally:
    """What has been done, over all tries. failed: how often each file has."""

    sent: int = 0
    unchanged: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class _File:
    """A file to put: its name below the base, and what it was when it was listed."""

    name: str
    place: Path
    state: os.stat_result

    @property
    def size(self) -> int:
        return self.state.st_size

    @property
    def described(self) -> dict[str, Any]:
        mode = 0o755 if self.state.st_mode & stat.S_IXUSR else 0o644
        return {"name": self.name, "size": self.size, "mode": mode}

    def is_as_listed(self, state: os.stat_result) -> bool:
        now, then = ((it.st_ino, it.st_size, it.st_mtime_ns) for it in (state, self.state))
        return now == then


# -- put


def put(
    shell: Shell, container: Container, sources: Sequence[Path], target: str, *, progress: Progress | None = None
) -> Moved:
    """Copies files and folders into the container's shared folder. target: `shared/...` (or that, absolute); a name for
    one source, a folder with `/` at its end for any number. A folder's files join those that are there.

    NotFoundError, PreflightError for what can't be sent; BusyError when another put writes the same file;
    VerificationError when a file arrives wrong twice, OpsError when it changes twice while it is read; LinkLostError
    when the link did not come back: the same command goes on from there."""
    sources = [Path(os.path.normpath(source.absolute())) for source in sources]
    names = shared_names(container.path, [source.name for source in sources], target)
    done = put_below(shell, container, "shared", list(zip(names, sources, strict=True)), progress=progress)
    return replace(done, paths=tuple(f"{container.path}/shared/{name}" for name in names))


def shared_names(path: str, names: list[str], target: str) -> list[str]:
    """Where files of these names go, relative to <path>/shared. UsageFault for a target outside it."""
    relative = target.removeprefix(f"{path}/")
    below = relative.removeprefix("shared/")
    parts = PurePosixPath(below).parts
    if below == relative or below.startswith("/") or ".." in parts or "\0" in below:
        raise UsageFault(
            "put writes only below shared/",
            where=printable(target),
            why=f"it is {path}/shared",
            next="dflash-ops put FILE shared/data/",
        )
    if not below or below.endswith("/"):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UsageFault("two of these have one name", where=printable(twice[0]), next="put them one by one")
        return [str(PurePosixPath(below, name)) for name in names]
    if len(names) > 1:
        raise UsageFault(
            "several files need a folder", where=printable(target), next=f"end it with /: {printable(target)}/"
        )
    return [str(PurePosixPath(below))]


def put_below(
    shell: Shell,
    container: Container,
    base: str,
    sources: Sequence[tuple[str, Path]],
    *,
    progress: Progress | None = None,
) -> Moved:
    """As `put`, into any folder below the container's path. sources: the name below `base`, and the file or folder."""
    progress, begun, tally = progress or Progress(), time.monotonic(), Tally()
    files, folders = _listed(sources)
    left = dict(enumerate(files))

    def once(patience: float) -> None:
        numbers = list(left)
        described = [left[number].described for number in numbers]
        parameters = {"do": "put", "base": base, "files": described, "folders": folders, "patience": patience}
        progress.step(f"asking {container}")
        with exchange(shell, container, "transfer", parameters, what="put") as other:
            _Putting(container, other, left, numbers, tally, progress).run(sum(file.size for file in files))

    with_reconnects(shell, once, tally, progress)
    size = sum(file.size for file in files)
    return Moved(str(container), (), len(files), size, tally.sent, tally.unchanged, time.monotonic() - begun)


def _listed(sources: Sequence[tuple[str, Path]]) -> tuple[list[_File], list[str]]:
    files: list[_File] = []
    folders: list[str] = []
    for name, source in sources:
        if not os.path.lexists(source):
            raise NotFoundError("no such file to put", where=printable(str(source)), next="name a file or a folder")
        try:
            found, below = transfer.tree(source)
        except Fault as fault:
            answers.raise_fault({"kind": fault.kind, **fault.parts}, "this machine")
        except OSError as error:
            where, why = printable(os.fsdecode(error.filename or source)), error.strerror or str(error)
            raise PreflightError("that can't be read", where=where, why=why) from error
        files += [_File(f"{name}/{inner}" if inner else name, place, state) for inner, place, state in found]
        folders += [name] if source.is_dir() else []
        folders += [f"{name}/{inner}" for inner in below]
    return files, folders


class _Putting:
    """One try. left: the files that are not there yet, by a number of ours; numbers: those numbers, in the order in
    which the other end has the files."""

    def __init__(
        self,
        container: Container,
        other: Exchange,
        left: dict[int, _File],
        numbers: list[int],
        tally: Tally,
        progress: Progress,
    ) -> None:
        self._container, self._other, self._left, self._numbers = container, other, left, numbers
        self._tally, self._progress = tally, progress
        self._there: dict[int, list[dict[str, Any]]] = {}
        self._queue = deque(range(len(numbers)))
        self._unanswered: set[int] = set()
        self._changed: dict[int, OpsError] = {}

    def run(self, total: int) -> None:
        ready = self._what_is_there()
        here = sum(file.size for file in self._left.values())
        parts = sum(found["size"] for every in self._there.values() for found in every)
        if ready["free_bytes"] < here - parts:
            raise PreflightError(
                "the container's disk is too full",
                where=str(self._container),
                why=f"{here - parts} bytes are needed, {ready['free_bytes']} are free",
                next=f"in the container: df -h {self._container.path}",
            )
        first = self._left[self._numbers[0]].place.name if self._numbers else ""
        what = f"sending {first}" if len(self._numbers) == 1 else f"sending {len(self._numbers)} files"
        with self._progress.bytes(what, total, total - here) as advance:
            while self._queue or self._unanswered:
                if self._queue:
                    self._send(self._queue.popleft(), advance)
                wait = bool(self._unanswered and not self._queue)
                for reply in [self._answer(total)] if wait else self._other.answers_now():
                    self._note(reply)
        self._progress.step("bringing it to the disk")
        self._other.talk.say(b'{"done": true}\n')
        while self._answer(total)["event"] != "done":
            pass

    def _what_is_there(self) -> dict[str, Any]:
        while (reply := self._other.answer())["event"] != "ready":
            if reply["event"] == "has":
                self._there.setdefault(reply["file"], []).append(reply)
        return reply

    def _answer(self, size: int) -> dict[str, Any]:
        return self._other.answer(timeout=_ANSWER_SECONDS + size / _SLOWEST_BYTES_PER_SECOND)

    def _send(self, number: int, advance: Advance) -> None:
        """One file: what of it is not there. Its answer comes later."""
        file = self._left[self._numbers[number]]
        try:
            with file.place.open("rb") as content:
                state = os.fstat(content.fileno())
                if not file.is_as_listed(state):
                    file = self._left[self._numbers[number]] = replace(file, state=state)
                digest, start = self._common(number, file, content)
                if start == file.size and any(found["whole"] for found in self._there.get(number, [])):
                    advance(start)
                    self._tally.unchanged += 1
                    del self._left[self._numbers[number]]
                    return
                self._other.say({"file": number, "from": start, "size": file.size})
                self._unanswered.add(number)
                advance(start)
                count = start
                while piece := content.read(transfer.PIECE_BYTES):
                    self._other.talk.say(b"%d\n%b" % (len(piece), piece))
                    digest.update(piece)
                    count += len(piece)
                    self._tally.sent += len(piece)
                    advance(len(piece))
                    for reply in self._other.answers_now():
                        self._note(reply)
                same = count == file.size and file.is_as_listed(file.place.stat())
        except OSError as error:
            where, why = printable(str(file.place)), error.strerror or str(error)
            raise PreflightError("a file can't be read", where=where, why=why) from error
        self._other.say({"end": digest.hexdigest() if same else None})
        if not same:  # the answer will be "bad"
            where = printable(str(file.place))
            next_ = "put it again once nobody writes to it"
            self._changed[number] = OpsError("a file changes while it is read", where=where, next=next_)

    def _common(self, number: int, file: _File, content: Any) -> tuple[Any, int]:
        """How many first bytes are there already, and their running sha256."""
        for found in self._there.get(number, []):
            if found["size"] > file.size:
                continue
            if found["size"] > _COMPARED_SLOWLY_BYTES:
                self._progress.step(f"comparing {printable(file.place.name)} with what is there")
            digest, count = transfer.hashed(content, found["size"])
            if count == found["size"] and digest.hexdigest() == found["sha256"]:
                return digest, count
            content.seek(0)
        return hashlib.sha256(), 0

    def _note(self, reply: dict[str, Any]) -> None:
        if reply["event"] not in ("stored", "bad"):
            return
        number = reply["file"]
        self._unanswered.discard(number)
        if reply["event"] == "stored":
            del self._left[self._numbers[number]]
            return
        file = self._left[self._numbers[number]]
        self._tally.failed[file.name] += 1
        if self._tally.failed[file.name] >= _TRIES_FOR_A_FILE:
            where = f"{self._container}: {printable(file.name)}"
            raise self._changed.get(number) or VerificationError(
                "what arrived is not what was sent", where=where, next="run it again"
            )
        self._there.pop(number, None)
        self._queue.append(number)


# -- get


def get(
    shell: Shell,
    container: Container,
    source: str,
    target: Path,
    *,
    only: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Copies a file or folder out of the container. source: `shared/...` or `runs/...` (or that, absolute); target: a
    name for it here, or a folder (one that is there, or with `/` at its end) to put it into. only: of a folder,
    patterns of the names below it that are wanted.

    NotFoundError when it is not there; VerificationError when a file arrives wrong twice, OpsError when it changes
    twice while it is read; LinkLostError when the link did not come back: the same command goes on from there."""
    progress, begun, tally = progress or Progress(), time.monotonic(), Tally()
    name = source.removeprefix(f"{container.path}/").rstrip("/")
    if not is_inside(name) or name.partition("/")[0] not in transfer.READABLE:
        raise UsageFault(
            "get reads only below shared/ and runs/",
            where=printable(source),
            why=f"they are in {container.path}",
            next="get shared/out/model .",
        )
    place = target / PurePosixPath(name).name if target.is_dir() else target
    done: set[Path] = set()
    listed: list[tuple[int, int]] = []

    def once(patience: float) -> None:
        del patience
        progress.step(f"asking {container}")
        with exchange(shell, container, "transfer", {"do": "get", "name": name, "only": only}, what="get") as other:
            listed.append(fetch_once(container, other, place, done, tally, progress))

    with_reconnects(shell, once, tally, progress)
    files, size = listed[-1]
    left_out = tuple(f"{name}: {why}" for name, why in tally.left_out.items())
    seconds = time.monotonic() - begun
    return Moved(str(container), (str(place),), files, size, tally.sent, tally.unchanged, seconds, left_out)


# -- both


def with_reconnects(shell: Shell, once: Callable[[float], None], tally: Tally, progress: Progress) -> None:
    """Calls `once` with the patience it shall have, again after each broken link, as long as that brings anything."""
    patience, before, waits, broke_at = _PATIENCE_SECONDS, -1, iter(_WAITS), 0.0
    while True:
        try:
            return once(patience)
        except UnreachableError as error:
            if before < 0 and not isinstance(error, LinkLostError):
                raise
            if tally.sent > before:
                waits, broke_at = iter(_WAITS), time.monotonic()
            before = tally.sent
            wait = next(waits, None)
            if wait is None or time.monotonic() + wait > broke_at + _TRYING_SECONDS:
                next_ = "the same command goes on from there, once the host answers"
                raise LinkLostError(
                    "the connection broke", where=error.where, why=f"{tally.sent} bytes went; {error.why}", next=next_
                ) from error
            shell.again(error)
        time.sleep(wait)
        patience = _OWN_PATIENCE_SECONDS
