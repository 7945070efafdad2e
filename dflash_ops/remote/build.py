"""A release in the making: what the container has is hard-linked or copied, what it lacks is unpacked, all is checked.

Content is known by its sha256, whatever its name and release. What turns out to have vanished, or to be something else
by now, is lacking again and asked for. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, Protocol, cast

from dflash_ops.remote import releases
from dflash_ops.remote.answers import Fault

_CHUNK = 1 << 20
_MODE_OF_FOLDERS = 0o555
# So many places of one content are remembered, should the first have vanished.
_PLACES = 4


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def owner(user: str | None) -> tuple[int, int]:
    """uid and gid of the release's files: those of a user of the container, else ours."""
    if user is None:
        return os.geteuid(), os.getegid()
    import pwd

    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise Fault(
            "preflight", f"the container has no user {user!r}", "", f"in the container: useradd --create-home {user}"
        ) from None
    return entry.pw_uid, entry.pw_gid


@contextlib.contextmanager
def building(
    path: Path, files: list[dict[str, Any]], folders: list[str], ids: tuple[int, int], check: Callable[[], None]
) -> Generator[Build, None, None]:
    """A build that leaves nothing behind unless it was finished. check: called between files; may raise."""
    token = os.urandom(4).hex()
    build = Build(path, files, folders, ids, check, token)
    try:
        yield build
    finally:
        for left in (build.folder, build.received):
            if left.exists():
                releases.remove(left)


class Build:
    """files, folders: the manifest's, as they came. ids: the owner's uid and gid."""

    def __init__(
        self,
        path: Path,
        files: list[dict[str, Any]],
        folders: list[str],
        ids: tuple[int, int],
        check: Callable[[], None],
        token: str,
    ) -> None:
        for name in [*(str(file["path"]) for file in files), *folders]:
            if not releases.is_inside(name):
                raise Fault("verification", "a file would leave the release", repr(name))
        self.folder = path / "releases" / f"new.tmp-{token}"
        self.received = path / "incoming" / f"deploy-{token}"
        self._path, self._files, self._folders, self._ids, self._check = path, files, folders, ids, check
        self._sizes = {str(file["sha256"]): int(file["size"]) for file in files if file["link"] is None}
        self._known = contents(path, self._sizes)
        self._got: set[str] = set()  # what lies in `received` or was moved from there
        self._placed: dict[str, list[Path]] = {}  # by sha256, in this release
        self._done: set[str] = set()
        self._new: list[Path] = []  # to be brought to the disk

    def lacking(self) -> list[str]:
        """The sha256 of every content that must be sent, in the files' order."""
        wanted = dict.fromkeys(str(file["sha256"]) for file in self._files if file["link"] is None)
        there = {**self._placed, **dict.fromkeys(self._got)}
        return [sha for sha in wanted if sha not in there and not self._candidates(sha)]

    def copied(self) -> int:
        """Bytes of the files that can't be linked to what is there, since their mode or owner is another."""
        sizes = 0
        for file in self._files:
            if file["link"] is None:
                there = self._candidates(str(file["sha256"]))
                sizes += 0 if not there or any(self._fits(place, file) for place in there) else int(file["size"])
        return sizes

    def unpack(self, archive: Readable) -> None:
        """Takes the members of a tar file, each the content that its name, a sha256, says."""
        import tarfile

        self.received.mkdir(mode=0o700, exist_ok=True)
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", archive), mode="r|", bufsize=_CHUNK) as members:
                for member in members:
                    self._check()
                    if not member.isreg() or self._sizes.get(member.name) != member.size:
                        raise Fault("verification", "nobody asked for this", repr(member.name), "run it again")
                    content = members.extractfile(member)
                    assert content is not None  # it is a regular file
                    self._receive(content, member.name)
        except tarfile.TarError as error:
            raise Fault("verification", "the archive can't be read", str(error), "run it again") from error
        while archive.read(_CHUNK):  # what pads its end
            pass

    def _receive(self, content: IO[bytes], sha: str) -> None:
        place = self.received / sha
        with open(place, "wb", opener=_private) as file:
            if self._copy(content, file) != sha:
                raise Fault("verification", "what arrived is not what was sent", f"content {sha[:16]}", "run it again")
        self._got.add(sha)

    def fill(self) -> list[str]:
        """Puts every file in its place and checks them all. Gives what is still lacking, empty when the release is
        whole."""
        self.place_known()
        if self.lacking():
            return self.lacking()
        self._drop_what_differs()
        return self.lacking()

    def place_known(self) -> None:
        """Puts in its place what is there already; `fill` does the rest."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        for name in self._folders:
            os.makedirs(self.folder / name, mode=0o755, exist_ok=True)
        for file in self._files:
            name = str(file["path"])
            if name in self._done:
                continue
            self._check()
            target = self.folder / name
            os.makedirs(target.parent, mode=0o755, exist_ok=True)
            if file["link"] is not None:
                os.symlink(file["link"], target)
                self._done.add(name)
            elif self._place(file, target):
                self._done.add(name)

    def finish(self, release: str, record: dict[str, Any]) -> None:
        """Gives the release its name: from then on it is there, whole, on the disk and read-only."""
        manifest = self.folder / releases.MANIFEST
        text = json.dumps({**record, "files": self._files, "folders": self._folders}, indent=0) + "\n"
        manifest.write_text(text, encoding="ascii")
        os.chmod(manifest, 0o444)
        if hashlib.sha256(releases.canonical(self._files, self._folders)).hexdigest()[:8] != release[-8:]:
            raise releases.damaged(release, "its manifest is another one's")
        for place in (*self._new, manifest):
            releases.sync(place)
        uid, gid = self._ids
        changes = (uid, gid) != (os.geteuid(), os.getegid())
        for at, below, names in os.walk(self.folder, topdown=False):
            for name in (*below, *names) if changes else ():
                os.chown(os.path.join(at, name), uid, gid, follow_symlinks=False)
            if changes:
                os.chown(at, uid, gid)
            os.chmod(at, _MODE_OF_FOLDERS)
            releases.sync(Path(at))
        self._check()
        os.rename(self.folder, self._path / "releases" / release)
        releases.sync(self._path / "releases")

    # -- one file

    def _place(self, file: dict[str, Any], target: Path) -> bool:
        sha, mode = str(file["sha256"]), int(file["mode"])
        for place in (*self._placed.get(sha, ()), *self._candidates(sha)):
            if self._fits(place, file):
                # It may be gone, on another disk, or have as many links as can be: then it is copied.
                with contextlib.suppress(OSError):
                    os.link(place, target, follow_symlinks=False)
                    self._placed.setdefault(sha, []).append(target)
                    return True
        if (self.received / sha).exists():
            os.rename(self.received / sha, target)
        elif not any(
            self._copied_from(place, sha, target) for place in (*self._placed.get(sha, ()), *self._candidates(sha))
        ):
            self._known.pop(sha, None)
            self._got.discard(sha)
            return False
        os.chown(target, *self._ids)
        os.chmod(target, mode)
        self._new.append(target)
        self._placed.setdefault(sha, []).append(target)
        return True

    def _copied_from(self, place: Path, sha: str, target: Path) -> bool:
        try:
            with (
                open(place, "rb", opener=_not_through_links) as source,
                open(target, "wb", opener=_private) as file,
            ):
                if self._copy(source, file) == sha:
                    return True
        except FileNotFoundError:
            pass
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        return False

    def _copy(self, source: Readable, target: IO[bytes]) -> str:
        digest = hashlib.sha256()
        while part := source.read(_CHUNK):
            self._check()
            digest.update(part)
            target.write(part)
        return digest.hexdigest()

    def _candidates(self, sha: str) -> list[Path]:
        """Where that content lies in other releases, as far as its size tells."""
        there: list[Path] = []
        for place in self._known.get(sha, ()):
            with contextlib.suppress(OSError):
                state = os.lstat(place)
                if stat.S_ISREG(state.st_mode) and state.st_size == self._sizes[sha]:
                    there.append(place)
        return there

    def _fits(self, place: Path, file: dict[str, Any]) -> bool:
        """Whether the file can share its inode: mode and owner are the inode's."""
        try:
            state = os.lstat(place)
        except OSError:
            return False
        return stat.S_IMODE(state.st_mode) == file["mode"] and (state.st_uid, state.st_gid) == self._ids

    def _drop_what_differs(self) -> None:
        """The check of every file: what an earlier release has under that sha256 may have been changed since."""
        shas = {str(file["path"]): str(file["sha256"]) for file in self._files if file["link"] is None}
        for name, why in releases.differences(self.folder, self._files, self._folders, self._check):
            sha = shas.get(name)
            if sha is None or sha in self._got:
                raise Fault("verification", "the release is not whole", f"{name!r} {why}", "deploy again")
            self._known.pop(sha, None)
            for place in self._placed.pop(sha, ()):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place)
                self._done.discard(str(place.relative_to(self.folder)))


def contents(path: Path, wanted: dict[str, int]) -> dict[str, list[Path]]:
    """Where the releases have these contents (sha256), as their manifests say; those of the current one first."""
    found: dict[str, list[Path]] = {}
    now = releases.current(path)
    names = sorted(releases.names(path), key=lambda name: (name == now, name), reverse=True)
    for name in names:
        folder = path / "releases" / name
        try:
            files = releases.manifest(folder)["files"]
        except (OSError, ValueError):
            continue
        for file in files:
            sha = file.get("sha256")
            if sha in wanted and file.get("link") is None and releases.is_inside(str(file.get("path"))):
                places = found.setdefault(sha, [])
                if len(places) < _PLACES:
                    places.append(folder / str(file["path"]))
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
