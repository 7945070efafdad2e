"""What a deploy reads on this machine: which folder, which of its files, their content; and the archive of it.

Of a folder in a git repository, the files are those that git knows or would add (tracked, and untracked but not
ignored); of any other folder, all. `.dflashignore` in the folder takes away from either.
"""

import contextlib
import errno
import hashlib
import os
import shlex
import stat
import tarfile
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO, cast

from dflash_ops.command import Command, Local
from dflash_ops.errors import NotFoundError, OpsError, PreflightError
from dflash_ops.release import IGNORE_FILE, FileEntry, Manifest, Release, check_link, printable, select
from dflash_ops.remote.releases import MANIFEST
from dflash_ops.shell import Shell


@dataclass(frozen=True)
class Source:
    """only: the one folder of `root` that is sent, None for all of it; uses_git: whether to ask git for the files."""

    root: Path
    only: str | None = None
    uses_git: bool = True

    def __str__(self) -> str:
        return str(self.root / self.only if self.only else self.root)


def choose(explicit: Path | None, inventory: Path | None, *, here: Path) -> Source:
    """The folder to deploy: the one named, else the inventory's, else `here` when it holds trainer/, else the trainer
    that came with this package."""
    named = explicit or inventory
    if named is not None:
        if not named.is_dir():
            said_by = "SOURCE" if explicit else "the inventory's `source`"
            raise NotFoundError(
                "no such folder to deploy", where=printable(str(named)), why=f"{said_by} names it", next="correct it"
            )
        return Source(named.resolve())
    if (here / "trainer").is_dir():
        return Source(here.resolve())
    spec = find_spec("trainer")
    if spec is None or spec.origin is None:
        raise NotFoundError(
            "nothing to deploy", where=str(here), why="there is no trainer/ in it", next="name a SOURCE"
        )
    return Source(Path(spec.origin).resolve().parent.parent, only="trainer", uses_git=False)


def read(shell: Shell, source: Source) -> tuple[str | None, Manifest]:
    """The commit (None outside git) and the manifest of what would be sent now. PreflightError for a source with
    nothing to send."""
    in_git = source.uses_git and _in_repository(source.root)
    names = _git_names(shell, source.root) if in_git else list(_all_names(source.root, source.only))
    ignore_file = source.root / IGNORE_FILE
    ignore = (
        ignore_file.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if ignore_file.is_file() else []
    )
    chosen = select(names, ignore)
    manifest = Manifest(tuple(_entry(source.root, name) for name in chosen))
    if not manifest.files:
        found = len(names)
        why = f"{found} files found, all of them ignored" if found else "no file found in it"
        if in_git and not found:
            why = "git knows no file in it, and would add none"
        raise PreflightError("nothing to deploy", where=printable(str(source)), why=why, next="name another SOURCE")
    return (_git_commit(shell, source.root) if in_git else None), manifest


@contextlib.contextmanager
def temporary_file() -> Generator[BinaryIO, None, None]:
    """A file without a name: nothing is left of it, whatever ends this process."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError as error:
        raise PreflightError(
            "no temporary file can be made",
            why=error.strerror or str(error),
            next="let TMPDIR name a folder with space",
        ) from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # what a full disk does not take at the end was told before
            file.close()


def write_archive(release: Release, root: Path, file: BinaryIO) -> None:
    """Writes the release as a tar file, its manifest first, and flushes it. OpsError when a file is not what the
    manifest says; PreflightError when the disk is full."""
    try:
        _write_members(release, root, file)
        file.flush()
    except OSError as error:
        raise _not_written(error) from error


def _write_members(release: Release, root: Path, file: BinaryIO) -> None:
    # GNU's format carries names of any bytes and any length.
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        record = release.record()
        archive.addfile(_member(FileEntry(MANIFEST, 0o644, len(record), "")), BytesIO(record))
        for entry in release.manifest.files:
            if entry.link is not None:
                archive.addfile(_member(entry))
                continue
            with (root / entry.path).open("rb") as content:
                hashing = _Hashing(content)
                try:
                    archive.addfile(_member(entry), cast(IO[bytes], hashing))  # read is all that it calls
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise _changed(entry.path) from error  # tarfile's own: shorter than before
                if hashing.sha256 != entry.sha256 or content.read(1):
                    raise _changed(entry.path)


class _Hashing:
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self.size += len(data)
        return data

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def sha256_of(file: BinaryIO) -> tuple[int, str]:
    """Bytes and sha256 of all of an open file."""
    file.seek(0)
    hashing = _Hashing(file)
    while hashing.read(1 << 20):
        pass
    return hashing.size, hashing.sha256


def _member(entry: FileEntry) -> tarfile.TarInfo:
    member = tarfile.TarInfo(entry.path)
    member.mode, member.size = entry.mode, entry.size
    if entry.link is not None:
        member.type, member.linkname = tarfile.SYMTYPE, entry.link
    return member


def _not_written(error: OSError) -> OpsError:
    """Why there is no archive on this machine."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        next = "free some space there, or let TMPDIR name another folder"
        return PreflightError("the local disk is full", where=tempfile.gettempdir(), why=why, next=next)
    where = printable(os.fsdecode(error.filename)) if error.filename else ""
    return OpsError("the archive can't be made", where=where, why=why, next="correct that, and deploy again")


def _changed(name: str) -> OpsError:
    return OpsError("a file changed while it was read", where=printable(name), next="deploy again")


def _entry(root: Path, name: str) -> FileEntry:
    place = root / name
    try:
        state = place.lstat()
        if stat.S_ISLNK(state.st_mode):
            link = os.fspath(place.readlink())
            check_link(name, link)
            return FileEntry(name, 0o777, 0, "", link)
        if stat.S_ISREG(state.st_mode):
            with place.open("rb") as file:
                size, sha256 = sha256_of(file)
            return FileEntry(name, stat.S_IMODE(state.st_mode) & 0o777, size, sha256)
    except OSError as error:
        raise PreflightError(
            "a file of the source can't be read", where=printable(str(place)), why=error.strerror or str(error)
        ) from error
    what = "a repository inside the source" if stat.S_ISDIR(state.st_mode) else "neither a file nor a link"
    raise PreflightError(
        "this can't be deployed", where=printable(str(place)), why=f"it is {what}", next=f"name it in {IGNORE_FILE}"
    )


def _all_names(root: Path, only: str | None) -> Iterable[str]:
    for at, folders, files in os.walk(root / only if only else root):
        below = Path(at).relative_to(root)
        links = [name for name in folders if Path(at, name).is_symlink()]
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        yield from (str(below / name) for name in (*files, *links))


def _in_repository(root: Path) -> bool:
    return any((folder / ".git").exists() for folder in (root, *root.parents))


def _git_names(shell: Shell, root: Path) -> list[str]:
    listed = _git(shell, root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = [os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name]
    return [name for name in names if os.path.lexists(root / name)]  # what was deleted but not yet committed is gone


def _git_commit(shell: Shell, root: Path) -> str | None:
    """The commit; None in a repository without one."""
    head = _git(shell, root, "rev-parse", "--verify", "--quiet", "HEAD", missing_ok=True)
    return head.decode().strip() or None


def _git(shell: Shell, root: Path, *words: str, missing_ok: bool = False) -> bytes:
    result = shell.run(Local(), Command(("git", "-C", str(root), *words)))
    if result.code == 127:
        raise PreflightError(
            "git is missing", where=str(root), why="the source is in a git repository", next="install git"
        )
    if result.code != 0 and not missing_ok:
        raise PreflightError(
            "git refused to list the source",
            where=printable(str(root)),
            why=result.last_words,
            next=f"see what it says: git -C {shlex.quote(printable(str(root)))} status",
        )
    return result.out if result.code == 0 else b""
