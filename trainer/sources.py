# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
# (pyarrow and datasets have no types, and may be missing)
"""Files of conversations, record after record: JSON lines, plain or gzipped, Parquet, and Hugging Face folders.

A source is read as a stream, never as a whole. Each record has a number that runs on through all files of a folder.
Parquet and `save_to_disk` folders need the package `datasets`, which brings pyarrow.
"""

import gzip
import hashlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.conversations import NOT_TEXT, LineError, one_line
from trainer.prepared import META, DataError

MOST_BYTES = 64 * 2**20  # of a line; a longer one is left out
BATCH = 64  # records of a table that are read together
COLUMNS = ("messages", "conversations", "prompt", "response", "system", *NOT_TEXT)
JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PACKED = (".zst", ".bz2", ".xz", ".zip", ".tar", ".tar.gz", ".tgz", ".7z")
SPLITS = ("train", "training", "test", "testing", "valid", "val", "validation", "dev", "eval", "evaluation", "heldout")
"""Words in the names of files and folders that lie side by side and belong apart."""
BESIDE = ("readme", "license", "licence", "notice", "citation", "dataset_info", "dataset_infos", "_success")
"""Begins of names of files that lie beside data and hold none."""
NAMED = 20  # files that a message names
READ = 1 << 20  # bytes that are hashed at a time
GZIP = b"\x1f\x8b"

Check = Callable[[], None]

Record = bytes | Mapping[str, Any] | LineError  # the last: one that can't even be read


@dataclass
class Source:
    """Files that are read as one."""

    path: Path
    files: list[Path]
    saved: bool = False  # by datasets' save_to_disk
    unread: list[str] = field(default_factory=list[str])  # in the folder, of another kind
    starts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Each file that was read with the number of its first record; whole once `records` has ended."""

    @property
    def name(self) -> str:
        return one_line(self.path.resolve().name)

    @property
    def listed(self) -> str | None:
        """What is read of a folder, for people; None of a single file."""
        if self.files == [self.path]:
            return None
        names = [one_line(str(file.relative_to(self.path))) for file in self.files]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        return f"{self.name}: {len(names):,} files: {', '.join(names[:NAMED])}{more}"

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def digest(self, check: Check = lambda: None) -> str:
        """sha256 of the file; of a folder, that of its files' names and digests. check: raises what ends the reading.

        Raises DataError.
        """
        if self.files == [self.path]:
            return file_digest(self.path, check)
        lines = [f"{file.relative_to(self.path)} {file_digest(file, check)}\n" for file in self.files]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def records(self) -> Iterator[tuple[int, Record]]:
        """All records with their numbers from 1 on; blank lines count and are left out. Raises DataError."""
        self.starts = []
        before = 0
        for file in [self.path] if self.saved else self.files:
            name = self.name if file == self.path else one_line(str(file.relative_to(self.path)))
            self.starts.append((name, before + 1))
            number = 0
            reader = saved_records if self.saved else parquet_records if is_parquet(file) else line_records
            try:
                for number, record in reader(file):
                    if record is not None:
                        yield before + number, record
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"data {file} can't be read behind record {number}: {error}") from error
            before += number


def open_source(path: Path) -> Source:
    """A file or folder of conversations. Raises DataError: it is missing, or nothing that can be read."""
    try:
        if path.is_dir():
            return open_folder(path)
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise DataError(f"data {path} is neither a file nor a folder")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"data {path} can't be read: {error.strerror}") from error
    if path.name.lower().endswith(PACKED):
        raise DataError(f"data {path}: unpack it first, or pack it with gzip (.jsonl.gz)")
    return Source(path, [path])


def open_folder(path: Path) -> Source:
    """What `datasets` saved, or a folder of Parquet or JSON lines files."""
    if (path / "dataset_dict.json").is_file():
        names = ", ".join(str(path / found.parent.name) for found in sorted(path.glob("*/dataset_info.json")))
        raise DataError(f"data {path} has splits: name one of {names}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return Source(path, sorted(file for file in path.iterdir() if file.is_file()), saved=True)
    if (path / "ids.bin").is_file() and (path / "mask.bin").is_file():
        raise DataError(f"data {path} is half a folder of prepared data, without its {META}: prepare it again")
    tables, lines, unread = list[Path](), list[Path](), list[str]()
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if any(part.startswith(".") for part in inside.parts):  # an editor's or a system's own
            continue
        if file.is_dir() and not file.is_symlink():
            continue
        if file.is_file() and is_parquet(file):
            tables.append(file)
        elif file.is_file() and file.name.lower().endswith(JSON_LINES):
            lines.append(file)
        elif file.is_file() and file.name.lower().endswith(PACKED):
            raise DataError(f"data {path}: unpack {inside} first, or pack it with gzip (.jsonl.gz)")
        elif not file.name.lower().startswith(BESIDE) and file.suffix.lower() != ".md":
            unread.append(one_line(str(inside)))
    if tables and lines:
        raise DataError(f"data {path} has Parquet and JSON lines files: name one of them")
    if not tables and not lines:
        there = f" (there are {', '.join(unread[:NAMED])})" if unread else ""
        raise DataError(f"data {path}: no .jsonl, .jsonl.gz or .parquet in it, and not saved by `datasets`{there}")
    refuse_splits(path, tables or lines)
    return Source(path, tables or lines, unread=unread)


def refuse_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raises DataError when files of several splits lie side by side: held-out data would be learned."""
    found: dict[str, Path] = {}
    for file in files:
        inside = file.relative_to(folder)
        words = [part.lower() for part in inside.parts[:-1]] + re.split(r"[-_.]", inside.name.lower())
        numbered = re.match(r"(.+)-\d+-of-\d+\.", file.name)
        if numbered:
            found.setdefault(numbered[1], file)
        elif split := next((word for word in words if word in SPLITS), None):
            found.setdefault(split, file)
    if len(found) > 1:
        examples = ", ".join(str(file) for _, file in sorted(found.items()))
        raise DataError(
            f"data {folder} has the splits {', '.join(sorted(found))} side by side: name a file of one ({examples}), "
            f"or put the files of one into a folder of their own"
        )


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def is_gzip(file: Path) -> bool:
    """By its first bytes: a name may be wrong."""
    with file.open("rb") as opened:
        return file.suffix.lower() == ".gz" or opened.read(2) == GZIP


def file_digest(path: Path, check: Check = lambda: None) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(READ):
                check()
                digest.update(part)
    except OSError as error:
        raise DataError(f"data {path} can't be read: {error.strerror}") from error
    return digest.hexdigest()


# Readers: (number from 1 on, record). None stands for a blank line: it counts, and there is nothing in it.


def line_records(path: Path) -> Iterator[tuple[int, Record | None]]:
    with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
        number, anything = 0, False
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not anything and re.match(rb"\s*\[\s*(\{|$)", line[:4096]):
                new = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".jsonl") + ".lines.jsonl"
                raise DataError(f"data {path} is a JSON array, not an object a line. Next: jq -c '.[]' FILE > {new}")
            anything = anything or bool(line.strip())
            if len(line) > MOST_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(2**20)
                yield number, LineError(f"longer than {MOST_BYTES // 2**20} MiB")
            else:
                yield number, line if line.strip() else None


def parquet_records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing(path, "Parquet") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = chosen(path, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=BATCH, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except pyarrow.ArrowException as error:
        raise DataError(f"data {path} can't be read behind record {number}: {str(error).splitlines()[0]}") from error


def saved_records(folder: Path) -> Iterator[tuple[int, Record]]:
    try:
        import datasets
        import pyarrow
    except ImportError as error:
        raise missing(folder, "what `datasets` saved") from error
    number = 0
    try:
        found = datasets.load_from_disk(str(folder))
        table: Any = found.select_columns(chosen(folder, list(found.column_names))).with_format("arrow")
        for batch in table.iter(batch_size=BATCH):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (pyarrow.ArrowException, ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data {folder} can't be read behind record {number}: {why}") from error


def chosen(path: Path, names: list[str]) -> list[str]:
    """The columns that say something of a conversation; others, which may be large, are not read."""
    known = [name for name in names if name in COLUMNS]
    if not ({"messages", "conversations"}.intersection(known) or {"prompt", "response"} <= set(known)):
        shown = one_line(", ".join(names))
        raise DataError(f"data {path}: no column messages, conversations, or prompt and response; it has {shown}")
    return known


def missing(path: Path, what: str) -> DataError:
    return DataError(f"data {path}: {what} needs the package datasets. Next: {sys.executable} -m pip install datasets")
