"""The receiving end of `get`: files that come out of a container, each written beside its place until it is whole."""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dflash_ops.command import Container
from dflash_ops.errors import BusyError, OpsError, PreflightError, VerificationError
from dflash_ops.exchange import Exchange
from dflash_ops.progress import Advance, Progress
from dflash_ops.release import printable
from dflash_ops.remote import transfer
from dflash_ops.remote.answers import kind_of
from dflash_ops.remote.releases import is_inside

if TYPE_CHECKING:
    from dflash_ops.data import Tally

_TRIES_FOR_A_FILE = 2
# Asked for before the first has come: else each of many small files would take a way there and back.
_ASKED_AHEAD = 64
_SYNCED_BYTES = 1 << 20


@dataclass(frozen=True)
class _File:
    """number: the other end's; size: bytes, as it was listed there."""

    number: int
    place: Path
    size: int
    executable: bool

    @property
    def part(self) -> Path:
        return transfer.part_of(self.place, "get")


def fetch_once(
    container: Container, other: Exchange, place: Path, done: set[Path], tally: "Tally", progress: Progress
) -> tuple[int, int]:
    """One try: all files that are not in `done` yet, which they join. Gives how many there are, and their bytes."""
    tree = other.answer()
    try:
        files, folders = _listed(container, tree, place)
        tally.left_out.update({printable(str(place / name)): printable(why) for name, why in tree["left_out"]})
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        left = [file for file in files if file.place not in done]
        total, missing = sum(file.size for file in files), sum(file.size for file in left)
        _check_room(place, missing - sum(file.part.stat().st_size for file in left if file.part.exists()))
        what = f"fetching {place.name}" if len(files) == 1 else f"fetching {len(files)} files"
        with progress.bytes(what, total, total - missing) as advance:
            _Fetching(container, other, left, done, tally, advance).run()
    except OSError as error:
        raise _our_error(error, place) from error
    other.say({"done": True})
    while other.answer()["event"] != "done":
        pass
    return len(files), total


def _listed(container: Container, tree: dict[str, Any], place: Path) -> tuple[list[_File], list[Path]]:
    """What the other end has, as places here. Its names are not trusted."""
    if tree["folder"] and (kind := kind_of(place)) and not place.is_dir():
        raise OpsError(f"{kind} is in the way", where=printable(str(place)), next="name another place")
    for name in (*(file[0] for file in tree["files"] if tree["folder"]), *tree["folders"]):
        if not is_inside(name):
            raise VerificationError("a file would leave the folder", where=f"{container}: {printable(name)}")
    if tree["folder"]:
        _check_twins(container, [file[0] for file in tree["files"]], place)
    files = [
        _File(number, place / name if tree["folder"] else place, int(size), bool(mode & 0o100))
        for number, (name, size, mode) in enumerate(tree["files"])
    ]
    for file in files:
        _check_free(file.place)
        _check_free(file.part)
    return files, [place if tree["folder"] else place.parent, *(place / name for name in tree["folders"])]


def _check_free(place: Path) -> None:
    """OpsError unless nothing or a regular file is there: a rename would put the file in the place of a device, and
    (as root) break the machine with /dev/null."""
    if (kind := kind_of(place)) not in ("", "a file"):
        why = "only a regular file is replaced"
        raise OpsError(f"{kind} is in the way", where=printable(str(place)), why=why, next="name another place")


def _check_twins(container: Container, names: Iterable[str], place: Path) -> None:
    """PreflightError when two names are one here: file systems of Macs make no difference between upper and lower case,
    nor between the ways to write an accent, and the second file would take the place of the first."""
    import unicodedata

    spelt: dict[str, str] = {}
    for name in names:
        other = spelt.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name and _same_here(other, name, place):
            raise PreflightError(
                "two files would be one here",
                where=f"{container}: {printable(other)} and {printable(name)}",
                why="this disk makes no difference between their names",
                next="get them one by one, under names of your own",
            )


def _same_here(first: str, second: str, place: Path) -> bool:
    """Whether the disk takes two names for one, tried in the nearest folder that is there."""
    one, other = next(pair for pair in zip(first.split("/"), second.split("/"), strict=False) if pair[0] != pair[1])
    with tempfile.TemporaryDirectory(prefix=".dflash-ops-", dir=_nearest_folder(place)) as probe:
        Path(probe, one).touch()
        return Path(probe, other).exists()


def _nearest_folder(place: Path) -> Path:
    return next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())


def _check_room(place: Path, need: int) -> None:
    folder = _nearest_folder(place)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PreflightError(
            "the local disk is too full",
            where=printable(str(folder)),
            why=f"{need} bytes are needed, {free} are free",
            next="name a place with more room",
        )


class _Fetching:
    def __init__(
        self,
        container: Container,
        other: Exchange,
        files: list[_File],
        done: set[Path],
        tally: "Tally",
        advance: Advance,
    ) -> None:
        self._container, self._other, self._done, self._tally = container, other, done, tally
        self._advance = advance
        self._queue = deque(files)
        self._asked: deque[tuple[_File, Any, int, bool]] = deque()

    def run(self) -> None:
        while self._queue or self._asked:
            while self._queue and len(self._asked) < _ASKED_AHEAD:
                self._ask(self._queue.popleft())
            self._receive(*self._asked.popleft())

    def _ask(self, file: _File) -> None:
        digest, count = hashlib.sha256(), 0
        whole = file.place.is_file() and file.place.stat().st_size == file.size
        place = file.place if whole else file.part
        if place.is_file():
            with place.open("rb") as content:
                digest, count = transfer.hashed(content, file.size)
        self._other.say({"file": file.number, "from": count, "sha256": digest.hexdigest(), "whole": whole})
        self._asked.append((file, digest, count, whole))

    def _receive(self, file: _File, digest: Any, count: int, whole: bool) -> None:
        """One file. count: how many of its first bytes are here, digest: their sha256, whole: in its place, not in a
        part."""
        reply = self._next()
        if reply["event"] == "from":
            start = int(reply["offset"])
            self._advance(start)
            if whole and start == count:
                reply = self._next()
            else:
                with _locked(file) as part:
                    digest, reply = self._written(part, start, digest if start else hashlib.sha256())
                whole = False
        if reply["gone"] and reply["sha256"] is None:
            self._tally.left_out[printable(str(file.place))] = "it was removed meanwhile"
            self._done.add(file.place)
            return
        if reply["sha256"] is None:
            error = OpsError(
                "a file changes while it is read",
                where=f"{self._container}: {printable(file.place.name)}",
                next="get it again once nobody writes to it",
            )
            return self._again(file, error)
        if reply["sha256"] != digest.hexdigest():
            where = printable(str(file.place))
            file.part.unlink(missing_ok=True)
            error = VerificationError("what arrived is not what was sent", where=where, next="run it again")
            return self._again(file, error)
        if whole:
            self._tally.unchanged += 1
        else:
            if file.size >= _SYNCED_BYTES:
                with file.part.open("rb") as content:
                    os.fsync(content.fileno())
            file.part.replace(file.place)
        self._done.add(file.place)

    def _written(self, part: BinaryIO, start: int, digest: Any) -> tuple[Any, dict[str, Any]]:
        """Writes the pieces that come, from `start` on; gives the sha256 of all, and the line after them."""
        part.truncate(start)
        part.seek(start)
        while True:
            line = self._other.talk.hear()
            if line is None:
                raise self._other.why_ended()
            if not line.strip().isdigit():
                if (reply := self._other.read(line)) is not None and reply["event"] == "end":
                    return digest, reply
                continue
            left = int(line)
            while left:
                piece = self._other.talk.take(left)
                if not piece:
                    raise self._other.why_ended()
                part.write(piece)
                digest.update(piece)
                left -= len(piece)
                self._tally.sent += len(piece)
                self._advance(len(piece))

    def _next(self) -> dict[str, Any]:
        while (reply := self._other.answer())["event"] not in ("from", "end"):
            pass
        return reply

    def _again(self, file: _File, error: OpsError) -> None:
        self._tally.failed[str(file.place)] += 1
        if self._tally.failed[str(file.place)] >= _TRIES_FOR_A_FILE:
            raise error
        self._queue.append(file)


@contextmanager
def _locked(file: _File) -> Generator[BinaryIO, None, None]:
    descriptor = os.open(file.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o777 if file.executable else 0o666)
    with os.fdopen(descriptor, "r+b") as part:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                "another get writes this file", where=printable(str(file.place)), next="run it again later"
            ) from None
        yield part


def _our_error(error: OSError, place: Path) -> OpsError:
    where, why = printable(os.fsdecode(error.filename or place)), error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PreflightError("the local disk is full", where=where, why=why, next="free some space; get goes on then")
    return PreflightError("that can't be written", where=where, why=why, next="name another place")
