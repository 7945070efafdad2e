"""Large files and folders into <path> and out of it, through this command's own stdin and stdout.

A file that has not arrived whole lies beside its place as `.NAME.put-part`, and a later `put` goes on with it: this end
says how many bytes it has and their sha256, the other end whether its own first bytes are the same. Each file takes its
name by one rename, after the sha256 of all its bytes. A link that ends, or is silent for 30 s, ends it.

Parameters: path; do, the verb; the verb's own. Both ends speak in lines of JSON; bytes of a file come in pieces, each
after a line that says only how many. An empty line is a sign of life. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import re
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflash_ops.remote import answers, locks, logfile, processes, releases
from dflash_ops.remote.answers import Fault

PIECE_BYTES = 1 << 18
_LONGEST_NAME = 255

_SILENCE_SECONDS = 30.0
_BEAT_SECONDS = 5.0
# Smaller files are brought to the disk together at the end: a wait for the disk for each of 20,000 takes minutes.
_SYNC_AT_ONCE_BYTES = 1 << 20
# What `get` reads: not releases, which are in git, and not what may hold secrets beside them.
READABLE = ("shared", "runs")
# In a run's folder: env, notify, and what is left of their writing (.env.part); not notify.log.
_SECRET = re.compile(r"\.?(env|notify)(?!\.log$)([.~-].*)?$", re.DOTALL)


def main(parameters: dict[str, Any]) -> int:
    path = Path(parameters["path"])
    os.umask(0o022)
    return answers.answer(path, lambda: _VERBS[parameters["do"]](path, parameters))


# -- put


def put(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """base: the folder below <path>; folders: names to make; files: [{"name", "size", "mode"}], relative to base.

    Says {"event": "has", "file", "whole", "size", "sha256"} of what is there, then "ready". Hears for any file
    {"file", "from", "size"}, pieces, {"end": sha256} or {"end": null} when it changed on its way; answers "stored", or
    "bad" when it must come again. At {"done"} all is on the disk.
    """
    base = path / parameters["base"]
    base.mkdir(parents=True, exist_ok=True)
    files = [_Incoming(base / file["name"], int(file["size"]), int(file["mode"])) for file in parameters["files"]]
    _check_places(base, [*parameters["folders"], *(file["name"] for file in parameters["files"])])
    for name in parameters["folders"]:
        (base / name).mkdir(parents=True, exist_ok=True)
    beat = _Beat()
    for number, file in enumerate(files):
        for found in file.look(beat):
            answers.say({"event": "has", "file": number, **found})
    answers.say({"event": "ready", "free_bytes": shutil.disk_usage(files[0].folder if files else base).free})
    unsynced: list[Path] = []
    heard = _Input()
    while (request := heard.line()) is not None:
        if "done" in request:
            for place in (*unsynced, *{place.parent for place in unsynced}):
                releases.sync(place)
                beat()
            return {"event": "done"}
        file = files[int(request["file"])]
        file.size = int(request["size"])  # it may have grown since it was listed
        stored = file.receive(heard, int(request["from"]), parameters["patience"])
        if stored and file.size < _SYNC_AT_ONCE_BYTES:
            unsynced.append(file.place)
        answers.say({"event": "stored" if stored else "bad", "file": request["file"]})
    return {"event": "left"}


class _Incoming:
    """A file that may come, and what there is of it."""

    def __init__(self, place: Path, size: int, mode: int) -> None:
        self.place, self.size, self.mode = place, size, mode
        self.part = part_of(place, "put")
        self._digest = hashlib.sha256()  # of the part's first bytes
        self._hashed = 0

    @property
    def folder(self) -> Path:
        """The nearest folder above that is there."""
        return next(folder for folder in self.place.parents if folder.is_dir())

    def look(self, beat: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """What is there that may be of use: a file of that size, a part not longer than it."""
        if self.place.is_dir():
            raise Fault("failed", "that is a folder", str(self.place), "end it with / to put files into it")
        if (kind := answers.kind_of(self.place)) not in ("", "a file", "a link"):  # a link's own place is taken
            raise Fault("failed", f"that is {kind}", str(self.place), "name another place")
        for place, whole in ((self.place, True), (self.part, False)):
            try:
                state = place.lstat()
                if not stat.S_ISREG(state.st_mode) or (state.st_size != self.size if whole else not state.st_size):
                    continue
                if state.st_size > self.size:
                    continue
                with place.open("rb") as content:
                    digest, count = hashed(content, state.st_size, beat)
            except OSError:  # it is not there, or not to be read
                continue
            if not whole:
                self._digest, self._hashed = digest, count
            yield {"whole": whole, "size": count, "sha256": digest.hexdigest()}

    def receive(self, heard: _Input, start: int, patience: float) -> bool:
        """Takes the bytes from `start` on; whether the file is whole in its place now."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.part, patience) as file:
            good = start in (0, self._hashed) and os.fstat(file.fileno()).st_size >= start
            digest = self._digest if start and good else hashlib.sha256()
            self._hashed = -1  # from now on it is another
            file.truncate(start if good else 0)
            file.seek(0, os.SEEK_END)
            for piece in heard.pieces():
                file.write(piece)
                digest.update(piece)
            ending = heard.ending
            if ending is None or ending["end"] is None:
                return False
            file.flush()
            size = os.fstat(file.fileno()).st_size
            if not good or size != self.size or digest.hexdigest() != ending["end"]:
                file.truncate(0)
                return False
            os.fchmod(file.fileno(), self.mode)
            if self.size >= _SYNC_AT_ONCE_BYTES:
                os.fsync(file.fileno())
            self.part.replace(self.place)
        if self.size >= _SYNC_AT_ONCE_BYTES:
            releases.sync(self.place.parent)
        return True


@contextlib.contextmanager
def _locked(part: Path, patience: float) -> Generator[BinaryIO, None, None]:
    """The part, ours alone: the kernel frees it with this process."""
    deadline = time.monotonic() + patience
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b") as file:
            if locks.take(descriptor):
                if part.exists() and os.path.samestat(os.fstat(descriptor), part.stat()):
                    yield file
                    return
                continue  # another put has just finished it: its part is a whole file now
            if time.monotonic() > deadline:
                why, where = f"held by {_holder(part)}", str(part.parent)
                raise Fault("busy", "another put writes this file", why, "run it again later", where)
        time.sleep(0.1)


def _holder(part: Path) -> str:
    """Who has the part open, as the mark in its command line says."""
    for process in processes.table():
        if process.pid != os.getpid() and os.fspath(part) in processes.open_files(process.pid):
            return processes.command(process.pid).rpartition(" transfer ")[2] or f"process {process.pid}"
    return "somebody"


def _check_places(base: Path, names: list[str]) -> None:
    """No name leaves the folder, by itself or through a link."""
    root, good = base.resolve(), set[Path]()
    for name in names:
        folder = (base / name).parent
        if not releases.is_inside(name) or (
            folder not in good and root not in (folder.resolve(), *folder.resolve().parents)
        ):
            raise Fault("failed", f"the file would leave {base.name}/", repr(name), f"name a place below {base.name}/")
        good.add(folder)


# -- get


def get(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """name: of a file or folder, relative to <path>; only: of a folder, patterns of the names below it that are wanted.

    Says {"event": "tree", "folder", "files": [[name, size, mode]], "folders", "left_out": [[name, why]]}; hears for any
    file {"file", "from", "sha256", "whole"}, what the other end has of it; answers {"event": "from", "file", "offset"},
    pieces, and {"event": "end", "file", "sha256", "gone"}: null when it changed on its way, gone when it is no more.
    One that grows is sent as long as it was listed, one written anew since as it is now. At {"done"} it ends.
    """
    name = str(parameters["name"])
    place = path / name
    if not releases.is_inside(name) or name.partition("/")[0] not in READABLE:
        raise Fault("failed", "get reads only shared/ and runs/", repr(name), "name a place below them")
    if not place.exists():
        raise Fault("not_found", f"there is no {name}", _nearest(place), "dflash-ops exec -- ls", str(path))
    if why := _kept_back(path, place):
        raise Fault("failed", f"{name} is not read", why, "name another place")
    left_out: list[tuple[str, str]] = []
    files, folders = tree(place, lambda at: _kept_back(path, at), left_out)
    if parameters.get("only") is not None:
        files = [file for file in files if any(fnmatch.fnmatchcase(file[0], it) for it in parameters["only"])]
        left_out = [it for it in left_out if any(fnmatch.fnmatchcase(it[0], wanted) for wanted in parameters["only"])]
        above = {parent for file in files for parent in Path(file[0]).parents}
        folders = [folder for folder in folders if Path(folder) in above]
    listed = [[relative, state.st_size, stat.S_IMODE(state.st_mode)] for relative, _, state in files]
    told = {"event": "tree", "folder": place.is_dir(), "files": listed, "folders": folders, "left_out": left_out}
    answers.say(told)
    heard, out, beat = _Input(), sys.stdout.buffer, _Beat()
    while (request := heard.line()) is not None:
        if "done" in request:
            return {"event": "done"}
        _, source, seen = files[int(request["file"])]
        sha256, gone = None, not (source.exists() or source.name == "log")
        with contextlib.suppress(OSError), _opened(source, seen) as content:
            state = os.fstat(content.fileno())
            digest, count = hashed(content, int(request["from"]), beat)
            size = min(seen.st_size, state.st_size) if os.path.samestat(seen, state) else state.st_size
            if digest.hexdigest() != request["sha256"] or (request["whole"] and count != size):
                digest, count = hashlib.sha256(), 0
                content.seek(0)
            answers.say({"event": "from", "file": request["file"], "offset": count})
            while count < size:
                piece = content.read(min(PIECE_BYTES, size - count))
                if not piece:
                    break
                digest.update(piece)
                out.write(b"%d\n%b" % (len(piece), piece))
                count += len(piece)
            after = os.fstat(content.fileno())
            same = after.st_mtime_ns == state.st_mtime_ns
            if after.st_size > size:
                # A log that grows is fetched as long as it was, unless what we have read was written anew meanwhile.
                content.seek(0)
                out.flush()
                same = hashed(content, size, beat)[0].digest() == digest.digest()
            if count == size and same:
                sha256 = digest.hexdigest()
        out.flush()
        answers.say({"event": "end", "file": request["file"], "sha256": sha256, "gone": gone})
    return {"event": "left"}


def _opened(source: Path, seen: os.stat_result) -> BinaryIO:
    """The file; a run's log that was rotated since it was seen by its new name: nothing else has its bytes."""
    file: BinaryIO | None = None
    with contextlib.suppress(FileNotFoundError):
        file = source.open("rb")
        if os.path.samestat(os.fstat(file.fileno()), seen):
            return file
    if source.name == "log":
        for _, _, part in logfile.parts(source.parent):
            with contextlib.suppress(OSError):
                if os.path.samestat(part.stat(), seen):
                    if file is not None:
                        file.close()
                    return part.open("rb")
    return file or source.open("rb")


def _kept_back(path: Path, place: Path) -> str:
    """Why `get` doesn't read this; empty where it does: not a run's secrets, by whatever name, and in a run nothing
    that lies outside of it."""
    runs = path / "runs"
    real_runs = _real_folder(runs)
    real = place.resolve() if place.is_symlink() else _real_folder(place.parent) / place.name
    below = [at.relative_to(root).parts for at, root in ((place, runs), (real, real_runs)) if root in at.parents]
    if any(len(parts) > 1 and _SECRET.match(parts[1]) for parts in below):
        return "it holds secrets of a run, or a part of them"
    if runs not in place.parents:
        return ""
    if place.is_symlink() and not place.exists():
        return "it is a link that leads nowhere"
    run = real_runs / place.relative_to(runs).parts[0]
    return "" if run in (real, *real.parents) else "it is a link that leads out of its run"


@functools.lru_cache(64)
def _real_folder(folder: Path) -> Path:
    return folder.resolve()  # asked for each of its files


def _nearest(place: Path) -> str:
    """What is there instead, for the line that says so."""
    above = next(folder for folder in place.parents if folder.is_dir())
    found = sorted(entry.name for entry in above.iterdir() if not entry.name.startswith("."))
    return f"{above} has: {', '.join(found[:8]) or 'nothing'}" + (" ..." if len(found) > 8 else "")


# -- both


def tree(
    place: Path, kept_back: Callable[[Path], str] = lambda at: "", left_out: list[tuple[str, str]] | None = None
) -> tuple[list[tuple[str, Path, os.stat_result]], list[str]]:
    """The regular files of a file or folder, each with its name below it ("" for the file itself), and its folders'
    names. Links count as what they lead to; Fault for one that leads nowhere, or back to a folder that it lies in.
    kept_back: why a place below does not count, which then joins `left_out` with its name; empty where it does."""
    files: list[tuple[str, Path, os.stat_result]] = []
    folders: list[str] = []

    def walk(at: Path, name: str, above: tuple[tuple[int, int], ...]) -> None:
        try:
            state = at.stat()
        except FileNotFoundError:
            if name and not at.is_symlink():
                return  # it went away meanwhile
            raise Fault("failed", "a link leads nowhere", str(at), "remove it, or name what you want") from None
        if stat.S_ISREG(state.st_mode):
            if not at.name.endswith(".put-part"):
                files.append((name, at, state))
        elif stat.S_ISDIR(state.st_mode):
            key = (state.st_dev, state.st_ino)
            if key in above:
                raise Fault("failed", "a link leads back to a folder that it lies in", str(at), "remove it")
            if name:
                folders.append(name)
            for entry in sorted(at.iterdir()):
                below = f"{name}/{entry.name}" if name else entry.name
                if why := kept_back(entry):
                    (left_out if left_out is not None else []).append((below, why))
                else:
                    walk(entry, below, (*above, key))
        else:
            raise Fault("failed", "neither a file nor a folder", str(at), "remove it, or name what you want")

    walk(place, "", ())
    return files, folders


def part_of(place: Path, verb: str) -> Path:
    """Where a file lies that is not whole yet. A name that would be too long with that is told by its sha256."""
    name = f".{place.name}.{verb}-part"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()}.{verb}-part"
    return place.with_name(name)


def hashed(content: BinaryIO, size: int, beat: Callable[[], None] = lambda: None) -> tuple[Any, int]:
    """The running sha256 of the first `size` bytes, and how many there were."""
    digest, count = hashlib.sha256(), 0
    while count < size and (piece := content.read(min(1 << 20, size - count))):
        digest.update(piece)
        count += len(piece)
        beat()
    return digest, count


class _Beat:
    """Called often; says now and then that we still work."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _BEAT_SECONDS

    def __call__(self) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + _BEAT_SECONDS
            answers.say({"event": "busy"})


class _Input:
    """What the other end says: lines, and after some of them the pieces of a file."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.ending: dict[str, Any] | None = None

    def line(self) -> dict[str, Any] | None:
        """The next line of JSON; None when the other end has left."""
        while (text := self._text()) is not None:
            if text:
                value = json.loads(text)
                assert isinstance(value, dict)
                return value  # pyright: ignore[reportUnknownVariableType]
        return None

    def pieces(self) -> Iterator[bytes]:
        """A file's bytes; `ending` is the line after them, None when the other end has left before."""
        self.ending = None
        while (text := self._text()) is not None:
            if text.isdigit():
                left = int(text)
                while left:
                    if not self._bytes and not self._more():
                        return
                    piece = bytes(memoryview(self._bytes)[:left])
                    del self._bytes[:left]
                    left -= len(piece)
                    yield piece
            elif text:
                self.ending = json.loads(text)
                return

    def _text(self) -> bytes | None:
        while (end := self._bytes.find(b"\n")) < 0:
            if not self._more():
                return None
        text = bytes(memoryview(self._bytes)[:end])
        del self._bytes[: end + 1]
        return text.strip()

    def _more(self) -> bool:
        if not select.select([0], [], [], _SILENCE_SECONDS)[0]:
            return False
        part = os.read(0, 1 << 20)
        self._bytes += part
        return bool(part)


_VERBS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {"put": put, "get": get}
