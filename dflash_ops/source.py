"""What a deploy reads on this machine: which folder, which of its files, their content; and the archive of it.

Of a folder in a git repository, the files are those that git knows or would add (tracked, and untracked but not
ignored), and the empty folders that git would not ignore; of any other folder, all. `.dflashignore` in the folder takes
away from either, and what looks like a secret or a checkpoint is left out of both.
"""

import contextlib
import errno
import hashlib
import os
import shlex
import stat
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from dflash_ops.command import Command, Local
from dflash_ops.errors import NotFoundError, OpsError, PreflightError
from dflash_ops.release import IGNORE_FILE, FileEntry, LeftOut, Manifest, check_link, printable, select
from dflash_ops.shell import Shell

# A release is read-only in the container.
_MODE_BITS = 0o555
_TRIES = 2
_CHUNK = 1 << 20


class SourceChanged(OpsError):
    """A file changed while it was read: what would arrive was never there as a whole."""

    def __init__(self, name: str) -> None:
        super().__init__("a file changed while it was read", where=printable(name), next="deploy again")


class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class Source:
    """only: the one folder of `root` that is sent, None for all of it; uses_git: whether to ask git for the files;
    include: patterns that name what would be left out as a secret or a checkpoint."""

    root: Path
    only: str | None = None
    uses_git: bool = True
    include: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.root / self.only if self.only else self.root)


@dataclass(frozen=True)
class Reading:
    """What would be sent now. commit: None outside git; branch: None there and on none; dirty: whether anything of the
    source differs from the commit, None outside git."""

    commit: str | None
    manifest: Manifest
    left_out: tuple[LeftOut, ...] = ()
    branch: str | None = None
    dirty: bool | None = None


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


def read(shell: Shell, source: Source) -> Reading:
    """What would be sent now. PreflightError for a source with nothing to send, SourceChanged for one that changes
    under our eyes."""
    in_git = source.uses_git and _in_repository(source.root)
    names, empty = _git_names(shell, source.root) if in_git else _all_names(source.root, source.only)
    ignore_file = source.root / IGNORE_FILE
    ignore = (
        ignore_file.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if ignore_file.is_file() else []
    )
    chosen, left_out = select(names, ignore, source.include)
    # A folder is matched as one by its slash.
    folders, _ = select([f"{name}/" for name in empty], ignore, source.include)
    files = tuple(_entry(source.root, name) for name in chosen)
    links = {file.path: file.link for file in files if file.link is not None}
    for name in links:
        check_link(name, links)
    if not files:
        found = len(names)
        why = f"{found} files found, all of them ignored or left out" if found else "no file found in it"
        if in_git and not found:
            why = "git knows no file in it, and would add none"
        raise PreflightError("nothing to deploy", where=printable(str(source)), why=why, next="name another SOURCE")
    manifest = Manifest(files, tuple(name.rstrip("/") for name in folders))
    commit, branch, dirty = _git_state(shell, source.root) if in_git else (None, None, None)
    return Reading(commit, manifest, tuple(left_out), branch, dirty)


@contextlib.contextmanager
def temporary_file() -> Generator[BinaryIO, None, None]:
    """A file without a name: nothing is left of it, whatever ends this process."""
    import tempfile

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


def archive_size(files: Iterable[FileEntry]) -> int:
    """Bytes of the archive of these contents, but for what pads its end."""
    return sum(512 + -(-file.size // 512) * 512 for file in files) + 1024


def write_archive(files: Iterable[FileEntry], root: Path, file: Writable) -> None:
    """Writes the contents of these files as a tar file, each named by its sha256. SourceChanged when one is not what
    the manifest says; PreflightError when the disk is full."""
    import tarfile  # here, as a deploy connects meanwhile

    try:
        # GNU's format carries sizes beyond 8 GiB.
        with tarfile.open(
            fileobj=cast(IO[bytes], file), mode="w|", bufsize=_CHUNK, format=tarfile.GNU_FORMAT
        ) as archive:
            for entry in files:
                member = tarfile.TarInfo(entry.sha256)
                member.size = entry.size
                try:
                    with (root / entry.path).open("rb") as content:
                        hashing = _Hashing(content)
                        archive.addfile(member, cast(IO[bytes], hashing))  # read is all that it calls
                        if hashing.sha256 != entry.sha256 or content.read(1):
                            raise SourceChanged(entry.path)
                except FileNotFoundError as error:
                    raise SourceChanged(entry.path) from error
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise SourceChanged(entry.path) from error  # tarfile's own: shorter than before
    except OSError as error:
        raise _not_written(error) from error


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
    while hashing.read(_CHUNK):
        pass
    return hashing.size, hashing.sha256


def _not_written(error: OSError) -> OpsError:
    """Why there is no archive on this machine."""
    import tempfile

    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        next = "free some space there, or let TMPDIR name another folder"
        return PreflightError("the local disk is full", where=tempfile.gettempdir(), why=why, next=next)
    where = printable(os.fsdecode(error.filename)) if error.filename else ""
    return OpsError("the archive can't be made", where=where, why=why, next="correct that, and deploy again")


def _entry(root: Path, name: str) -> FileEntry:
    """A file as it is. One that changes while it is read is read once more."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return _read_entry(root, name)
        except SourceChanged:
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _read_entry(root: Path, name: str) -> FileEntry:
    place = root / name
    try:
        state = place.lstat()
        if stat.S_ISLNK(state.st_mode):
            return FileEntry(name, 0o777, 0, "", os.fspath(place.readlink()))
        if stat.S_ISREG(state.st_mode):
            with place.open("rb") as file:
                before = os.fstat(file.fileno())
                size, sha256 = sha256_of(file)
                after = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns, size) != (after.st_size, after.st_mtime_ns, after.st_size):
                raise SourceChanged(name)
            return FileEntry(name, stat.S_IMODE(state.st_mode) & _MODE_BITS, size, sha256)
    except OSError as error:
        raise PreflightError(
            "a file of the source can't be read", where=printable(str(place)), why=error.strerror or str(error)
        ) from error
    what = "a repository inside the source" if stat.S_ISDIR(state.st_mode) else "neither a file nor a link"
    raise PreflightError(
        "this can't be deployed", where=printable(str(place)), why=f"it is {what}", next=f"name it in {IGNORE_FILE}"
    )


def _all_names(root: Path, only: str | None) -> tuple[list[str], list[str]]:
    """Every file and link below a folder, and every folder with nothing in it."""
    names: list[str] = []
    empty: list[str] = []
    for at, folders, files in os.walk(root / only if only else root):
        below = Path(at).relative_to(root)
        if not folders and not files and Path(at) != root:
            empty.append(str(below))
        links = [name for name in folders if Path(at, name).is_symlink()]
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        names += (str(below / name) for name in (*files, *links))
    return names, empty


def _in_repository(root: Path) -> bool:
    return any((folder / ".git").exists() for folder in (root, *root.parents))


def _git_names(shell: Shell, root: Path) -> tuple[list[str], list[str]]:
    listed = _git(shell, root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = [os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name]
    # What was deleted but not yet committed is gone.
    return [name for name in names if os.path.lexists(root / name)], _git_empty_folders(shell, root)


def _git_empty_folders(shell: Shell, root: Path) -> list[str]:
    """Folders with nothing in them, which git does not ignore; they lie in folders of which it knows no file."""
    listed = _git(shell, root, "ls-files", "-z", "--others", "--directory", "--exclude-standard")
    found: list[str] = []
    for name in (os.fsdecode(name) for name in listed.split(b"\0") if name.endswith(b"/")):
        if not (root / name / ".git").exists():
            _, empty = _all_names(root / name, None)
            found += [name + inner for inner in empty] if any((root / name).iterdir()) else [name.rstrip("/")]
    if not found:
        return []
    text = b"".join(os.fsencode(name) + b"/\0" for name in found)
    ignored = _git(shell, root, "check-ignore", "-z", "--stdin", stdin=text, missing_ok=True).split(b"\0")
    return [name for name in found if os.fsencode(name) + b"/" not in ignored]


def _git_state(shell: Shell, root: Path) -> tuple[str | None, str | None, bool]:
    """The commit, None in a repository without one; the branch, None on none; whether files below root differ from the
    commit, new ones that git does not ignore included. Takes no lock of the repository's."""
    told = _git(shell, root, "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-z", "--", ".")
    heads: dict[str, str] = {}
    dirty = False
    for line in told.split(b"\0"):
        if line.startswith(b"# "):
            _, name, *value = os.fsdecode(line).split(" ", 2)
            heads[name] = "".join(value)
        elif line:
            dirty = True
    commit, branch = heads.get("branch.oid"), heads.get("branch.head")
    return None if commit == "(initial)" else commit, None if branch == "(detached)" else branch, dirty


def _git(shell: Shell, root: Path, *words: str, stdin: bytes = b"", missing_ok: bool = False) -> bytes:
    result = shell.run(Local(), Command(("git", "-C", str(root), *words), stdin))
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
