"""The releases of a container as they lie on its disk: read, checked against their manifests, made current.

Every step leaves `current` a whole release: build.py writes one in `releases/new.tmp-*`, checks it, brings it to the
disk, and gives it its name by one rename; `current` changes by one rename after that. A release is read-only: a file's
mode in its manifest has no write bits (those of earlier versions had them). Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from dflash_ops.remote.answers import Fault

MANIFEST = ".dflash-manifest.json"
# Why there is no current release, when nothing of ours may take its place.
IS_FOLDER = "it is a folder"

_RELEASE_ID = re.compile(r"\d{8}-\d{6}-(?:[0-9a-f]{7}|nogit)-[0-9a-f]{8}", re.ASCII)
# What killed ones leave, by folder; nothing else is removed there, for it is not ours.
_LEFT_IN_RELEASES = re.compile(rf"new\.tmp-[0-9a-f]{{8}}|(?:{_RELEASE_ID.pattern})\.tmp-prune", re.ASCII)
_LEFT_IN_INCOMING = re.compile(r"deploy-[0-9a-f]{8}(?:\.part)?", re.ASCII)
# Beside a release that was never current.
_UNUSED = ".unused"
_LEFT_BESIDE = re.compile(r"\.current-[0-9a-f]{8}", re.ASCII)
_CHUNK = 1 << 20


# -- pure


def is_inside(name: str) -> bool:
    """Whether a relative name stays below the folder it is relative to."""
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def is_release_id(name: str) -> bool:
    """Whether a release can be called that: `YYYYMMDD-HHMMSS-<commit7 or nogit>-<8 hex>`, of a date that there is and
    that others can follow."""
    if _RELEASE_ID.fullmatch(name) is None:
        return False
    parts = [int(name[:4]), *(int(name[at : at + 2]) for at in (4, 6, 9, 11, 13))]
    try:
        return datetime.datetime(*parts).year < datetime.MAXYEAR  # pyright: ignore[reportArgumentType]
    except ValueError:
        return False


def may_come_in(name: str) -> bool:
    """Whether an archive may be called that in `incoming`: as leftovers are, so that it can become one."""
    return name.endswith(".part") and _LEFT_IN_INCOMING.fullmatch(name) is not None


def canonical(files: list[dict[str, Any]], folders: list[str]) -> bytes:
    """The bytes whose sha256 ends a release's id: the manifest's files, and its empty folders if there are any, in one
    spelling."""
    content: Any = {"files": files, "folders": folders} if folders else files
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def nearest(wanted: str, found: list[str]) -> str:
    """The name that was probably meant, in words; empty when there is none."""
    import difflib

    close = difflib.get_close_matches(wanted, found, n=1, cutoff=0.4) or found[-1:]
    return f"nearest: {close[0]}" if close else ""


# -- reading


def current(path: Path) -> str | None:
    """The id of the current release; None when there is none, or `current` is damaged."""
    name, _ = current_or_why(path)
    return name


def current_or_why(path: Path) -> tuple[str | None, str]:
    """The id of the current release, or why there is none; both empty before the first deploy."""
    link = path / "current"
    try:
        text = os.readlink(link)
    except FileNotFoundError:
        return None, ""
    except OSError:
        return None, IS_FOLDER if stat.S_ISDIR(_mode(link)) else "it is no link"
    name = os.path.basename(text)
    if not is_release_id(name) or text not in (f"releases/{name}", str(path / "releases" / name)):
        return None, f"it leads to {text!r}, which is no release"
    if not stat.S_ISDIR(_mode(path / "releases" / name)):
        return None, f"it leads to {name}, which is " + ("no folder" if _mode(path / "releases" / name) else "missing")
    return name, ""


def names(path: Path) -> list[str]:
    """The ids of all releases, the oldest first. A link or a file of such a name is none: it is somebody else's."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path / "releases") as entries:
        return sorted(
            entry.name for entry in entries if is_release_id(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    return []


def unused(path: Path) -> set[str]:
    """The releases that were never current: sent with `--no-activate`, or by a deploy that was killed at its end."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path / "releases") as entries:
        marks = [entry.name[: -len(_UNUSED)] for entry in entries if entry.name.endswith(_UNUSED) and entry.is_file()]
        return {name for name in marks if is_release_id(name)}
    return set()


def mark_unused(path: Path, release: str) -> None:
    """To be done before a release is there; it becoming current takes the mark away."""
    (path / "releases" / f"{release}{_UNUSED}").touch()


def manifest(folder: Path) -> dict[str, Any]:
    """A release's manifest, with `folders` also where an earlier version wrote none. OSError or ValueError when it
    can't be read."""
    found = json.loads((folder / MANIFEST).read_bytes())
    try:
        if all(isinstance(file["size"], int) for file in found["files"]):
            return {"folders": [], "user": None, **found}
    except (KeyError, TypeError):
        pass
    raise ValueError("it is no manifest")


def describe(path: Path, name: str) -> dict[str, Any]:
    """A release's id, and what its manifest says of it."""
    try:
        found = manifest(path / "releases" / name)
        files = found["files"]
        size = sum(file["size"] for file in files)
        return {"id": name, "files": len(files), "bytes": size, "commit": found["commit"], "damaged": False}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": name, "files": None, "bytes": None, "commit": None, "damaged": True}


def verify(folder: Path, release: str, check: Callable[[], None] = lambda: None) -> list[str]:
    """Compares a release with its manifest, file by file, and the manifest with the release's id. Gives the files'
    names; Fault("verification") when it is not whole. check: called between files."""
    try:
        found = manifest(folder)
        if hashlib.sha256(canonical(found["files"], found["folders"])).hexdigest()[:8] != release[-8:]:
            raise damaged(release, "its manifest is another one's")
        for name, why in differences(folder, found["files"], found["folders"], check):
            raise damaged(release, f"{name!r} {why}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(release, f"{error.filename} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(release, f"its manifest can't be read: {error}") from error
    return [file["path"] for file in found["files"]]


def differences(
    folder: Path, files: list[dict[str, Any]], folders: list[str], check: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, str]]:
    """Every name in a release that is not as its manifest says, and why. What Python keeps of its own (__pycache__) is
    nobody's business."""
    for file in files:
        check()
        why = _difference(folder, file)
        if why:
            yield file["path"], why
    for name in folders:
        if not is_inside(name) or not stat.S_ISDIR(_mode(folder / name)):
            yield name, "is no folder any more"
    known = {MANIFEST, *(file["path"] for file in files)}
    for name in _found(folder, ""):
        if name not in known:
            yield name, "was not sent by anybody"


def _found(folder: Path, below: str) -> Iterator[str]:
    with os.scandir(folder / below if below else folder) as entries:
        for entry in entries:
            name = below + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif entry.name != "__pycache__":
                yield from _found(folder, name + "/")


def _difference(folder: Path, file: dict[str, Any]) -> str:
    name = str(file["path"])
    if not is_inside(name):
        return "leads out of the release"
    place = folder / name
    try:
        state = os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if file["link"] is not None:
        as_sent = stat.S_ISLNK(state.st_mode) and os.readlink(place) == file["link"]
        return "" if as_sent else "is not the link that was sent"
    if not stat.S_ISREG(state.st_mode) or state.st_size != file["size"]:
        return "is not what was sent"
    if stat.S_IMODE(state.st_mode) != file["mode"]:
        return f"has mode {stat.S_IMODE(state.st_mode):o}, not {file['mode']:o} as sent"
    with open(place, "rb") as content:
        return "" if sha256(content) == file["sha256"] else "is not what was sent"


def _mode(place: Path) -> int:
    try:
        return os.lstat(place).st_mode
    except OSError:
        return 0


def damaged(release: str, why: str) -> Fault:
    return Fault("verification", f"release {release} is not whole", why, "deploy again")


# -- writing


def activate(path: Path, release: str) -> None:
    """Makes it the current release, by one rename."""
    link = path / f".current-{os.urandom(4).hex()}"
    link.symlink_to(f"releases/{release}")
    try:
        link.replace(path / "current")
    except OSError as error:
        link.unlink()
        why = error.strerror or str(error)
        raise Fault("failed", "`current` can't be replaced", why, f"look at {path}/current", str(path)) from error
    sync(path)
    (path / "releases" / f"{release}{_UNUSED}").unlink(missing_ok=True)


def remove_leftovers(path: Path, but: Path | None = None) -> None:
    """Removes what killed deploys left behind; whoever holds the lock knows that nobody is at work on it. A push that
    another began ahead may be among it; it will be asked for again. but: our own."""
    for folder, ours in ((path / "incoming", _LEFT_IN_INCOMING), (path / "releases", _LEFT_IN_RELEASES)):
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if ours.fullmatch(entry.name)]
        for old in found:
            if old != but:
                with contextlib.suppress(FileNotFoundError):  # its own deploy may remove it too
                    remove(old)
    for release in unused(path).difference(names(path)):
        (path / "releases" / f"{release}{_UNUSED}").unlink()
    with os.scandir(path) as entries:
        links = [entry.path for entry in entries if _LEFT_BESIDE.fullmatch(entry.name) and entry.is_symlink()]
    for link in links:
        os.unlink(link)


def remove(place: Path) -> int:
    """Removes a folder and all below it, though it be read-only; gives the bytes that this freed (what other releases
    share stays). What is no folder is removed itself: a link is never followed."""
    state = os.lstat(place)
    if not stat.S_ISDIR(state.st_mode):
        os.unlink(place)
        return state.st_size if state.st_nlink == 1 and stat.S_ISREG(state.st_mode) else 0
    os.chmod(place, 0o700)
    with os.scandir(place) as entries:
        freed = sum(remove(Path(entry.path)) for entry in entries)
    os.rmdir(place)
    return freed


# -- small things


def free_bytes(path: Path) -> int:
    """What fits on the disk of a folder."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while part := file.read(_CHUNK):
        digest.update(part)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Brings a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
