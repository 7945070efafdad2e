"""The releases of a container as they lie on its disk: read, unpacked, checked against their manifests, made current.

Every step leaves `current` a whole release: one is written in `releases/<id>.tmp-*`, checked, brought to the disk, and
takes its name by one rename; `current` changes by one rename after that. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
from pathlib import Path
from typing import IO, Any

from dflash_ops.remote.answers import Fault

MANIFEST = ".dflash-manifest.json"

_RELEASE_ID = re.compile(r"\d{8}-\d{6}-(?:[0-9a-f]{7}|nogit)-[0-9a-f]{8}")
_CHUNK = 1 << 20


# -- pure


def is_inside(name: str) -> bool:
    """Whether a relative name stays below the folder it is relative to."""
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def is_release_id(name: str) -> bool:
    """Whether a release can be called that: `YYYYMMDD-HHMMSS-<commit7 or nogit>-<8 hex>`."""
    return _RELEASE_ID.fullmatch(name) is not None


def canonical(files: list[dict[str, Any]]) -> bytes:
    """The bytes whose sha256 ends a release's id: the manifest's files, in one spelling."""
    return json.dumps(files, sort_keys=True, separators=(",", ":")).encode("ascii")


# -- reading


def current(path: Path) -> str | None:
    """The id of the current release; None when there is none or the link leads nowhere."""
    try:
        name = (path / "current").readlink().name
    except OSError:
        return None
    return name if (path / "releases" / name).is_dir() else None


def names(path: Path) -> list[str]:
    """The ids of all releases, the oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(entry.name for entry in (path / "releases").iterdir() if is_release_id(entry.name))
    return []


def describe(path: Path, name: str) -> dict[str, Any]:
    """A release's id, and what its manifest says of it."""
    try:
        manifest = json.loads((path / "releases" / name / MANIFEST).read_bytes())
        files = manifest["files"]
        size = sum(file["size"] for file in files)
        return {"id": name, "files": len(files), "bytes": size, "commit": manifest["commit"], "damaged": False}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": name, "files": None, "bytes": None, "commit": None, "damaged": True}


def verify(folder: Path, release: str) -> list[str]:
    """Compares a release with its manifest, file by file, and the manifest with the release's id. Gives the files'
    names; Fault("verification") when it is not whole."""
    try:
        files: list[dict[str, Any]] = json.loads((folder / MANIFEST).read_bytes())["files"]
        if hashlib.sha256(canonical(files)).hexdigest()[:8] != release[-8:]:
            raise _damaged(release, "its manifest is another one's")
        for file in files:
            if not _is_as_sent(folder, file):
                raise _damaged(release, f"{file['path']!r} is not what was sent")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _damaged(release, f"{error.filename} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(release, f"its manifest can't be read: {error}") from error
    return [file["path"] for file in files]


def _is_as_sent(folder: Path, file: dict[str, Any]) -> bool:
    name = str(file["path"])
    if not is_inside(name):
        return False
    place = folder / name
    state = place.lstat()
    if file["link"] is not None:
        return stat.S_ISLNK(state.st_mode) and os.fspath(place.readlink()) == file["link"]
    if not stat.S_ISREG(state.st_mode) or stat.S_IMODE(state.st_mode) != file["mode"] or state.st_size != file["size"]:
        return False
    with place.open("rb") as content:
        return sha256(content) == file["sha256"]


def _damaged(release: str, why: str) -> Fault:
    return Fault("verification", f"release {release} is not whole", why, "deploy again")


# -- writing


def unpack(archive: Path, path: Path, release: str) -> None:
    """releases/<id> with every file of the archive, checked and on the disk; or nothing."""
    folder = path / "releases" / f"{release}.tmp-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        # Names are bytes: whatever is not UTF-8 in them passes as surrogate escapes.
        with tarfile.open(archive, "r:", encoding="utf-8", errors="surrogateescape") as members:
            got = _unpack_members(members, folder)
        sent = {*verify(folder, release), MANIFEST}
        if got != sent:
            raise _damaged(release, f"nobody sent {sorted(got - sent)[0]!r}")
        for at, _, files in os.walk(folder, topdown=False):
            for name in files:
                if not Path(at, name).is_symlink():
                    sync(Path(at, name))
            sync(Path(at))
        folder.rename(path / "releases" / release)
        sync(path / "releases")
    except tarfile.TarError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise Fault("verification", "the archive can't be read", str(error), "run it again") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _unpack_members(members: tarfile.TarFile, folder: Path) -> set[str]:
    """Regular files and links, each below `folder`; links last, so that no file is written through one."""
    got: set[str] = set()
    links: list[tuple[Path, str]] = []
    for member in members:
        if not is_inside(member.name):
            raise Fault("verification", "a file would leave the release", repr(member.name))
        if member.name in got:
            raise Fault("verification", "a file comes twice", repr(member.name))
        got.add(member.name)
        target = folder / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            links.append((target, member.linkname))
        elif member.isreg():
            source = members.extractfile(member)
            assert source is not None  # it is a regular file
            _write_new(target, source, member.mode & 0o777)
        else:
            raise Fault("verification", "neither a file nor a link", repr(member.name))
    for target, text in links:
        target.symlink_to(text)
    return got


def _write_new(target: Path, source: IO[bytes], mode: int) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        os.fchmod(descriptor, mode)


def activate(path: Path, release: str) -> None:
    """Makes it the current release, by one rename."""
    link = path / f".current-{secrets.token_hex(4)}"
    link.symlink_to(f"releases/{release}")
    try:
        link.replace(path / "current")
    except OSError as error:
        link.unlink()
        why = error.strerror or str(error)
        raise Fault("failed", "`current` can't be replaced", why, f"look at {path}/current", str(path)) from error
    sync(path)


def remove_leftovers(path: Path) -> None:
    """Removes what killed deploys left behind; whoever holds the lock knows that nobody is at work on it."""
    for old in (path / "incoming").glob("deploy-*.part"):
        old.unlink()
    for old in (path / "releases").glob("*.tmp-*"):
        shutil.rmtree(old)
    for old in path.glob(".current-*"):
        old.unlink()


# -- small things


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
