"""A folder of prepared documents: what it holds, and how it is read without being loaded.

meta.json     Meta: what was read, by which tokenizer, what was left out and why; sizes and sha256 of the files;
              written last
ids.bin       int32, all documents' tokens one after another
mask.bin      uint8, 1 where the assistant speaks
offsets.bin   int64, where each document begins, and where the last one ends
first.bin     int32, the first place for an anchor in each document
lines.bin     int64, each document's line (or record) in the source
counts.bin    int64, how often each token of the vocabulary occurs
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.documents import Document

SCHEMA_VERSION = 2  # 1: without the files' sha256
META = "meta.json"
FILES = {"ids": "<i4", "mask": "u1", "offsets": "<i8", "first": "<i4", "lines": "<i8", "counts": "<i8"}
SLICE = 1 << 16  # values looked at together in a pass over all of them
READ = 1 << 20  # bytes of a file that are hashed at a time

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class DataError(ValueError):
    """Data that can't be learned from: names the file or folder and why."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Part):
    """What decides, beside source and tokenizer, which tokens are learned."""

    last_turn_only: bool
    end_tokens: tuple[int, ...]


class Source(Part):
    """What was read: its name without folders, its sha256, and its files with the number of their first line."""

    name: str
    digest: str
    files: tuple[tuple[str, int], ...]
    unread: int = 0
    """Files of the folder that are of another kind."""
    unread_names: tuple[str, ...] = ()
    """The first of them."""

    def place(self, line: int) -> str:
        """Where a line stands: file and number."""
        name, first = self.files[max(0, bisect_right([first for _, first in self.files], line) - 1)]
        return f"{name}:{line - first + 1}"


class Fingerprint(Part):
    """A tokenizer, by what it does: equal ones make the same tokens of the same conversation."""

    digest: str
    vocabulary: int
    """One more than its highest token."""


class Dropped(Part):
    """Records that were left out for one reason."""

    reason: str
    count: int
    lines: tuple[int, ...]
    """The first of them."""


class Meta(Part):
    """meta.json."""

    kind: Literal["dflash-prepared"] = "dflash-prepared"
    schema_version: int = SCHEMA_VERSION
    source: Source
    tokenizer: Fingerprint
    settings: Settings
    records: int
    """Lines or records that were read, blank ones left out."""
    documents: int
    tokens: int
    learned: int
    """Tokens of the assistant."""
    dropped: tuple[Dropped, ...]
    """Records that are no conversation that can be learned."""
    wordless: int
    """Conversations without an answer of two tokens."""
    wordless_lines: tuple[int, ...] = ()
    """The first of them."""
    split: int = 0
    """Conversations of which each answer made a document: the chat template writes earlier turns otherwise later."""
    split_documents: int = 0
    digest: str
    """sha256 of all tokens and masks: tells whether two folders hold the same documents."""
    bytes: dict[str, int]
    files: dict[str, str]
    """sha256 of each."""
    own: str = ""
    """sha256 of this content with `own` empty."""

    def sealed(self) -> "Meta":
        whole = Meta.model_validate_json(self.model_dump_json())  # every field is set, as when it is read again
        return whole.model_copy(update={"own": whole.seal()})

    def seal(self) -> str:
        """What `own` has to be: of the fields that the file has, so that one from before a new field keeps its own."""
        content = self.model_copy(update={"own": ""}).model_dump_json(exclude_unset=True).encode()
        return hashlib.sha256(content).hexdigest()


class Prepared:
    """A folder of documents, mapped into memory."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        """Raises DataError when the files don't fit each other."""
        self.folder, self.meta = folder, meta
        self._ids, self._mask, self._offsets, self._first, self._lines, counts = (
            np.asarray(np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")) for name, dtype in FILES.items()
        )
        self.counts: Integers = np.array(counts, dtype=np.int64)
        """How often each token occurs."""
        sums = int(self._offsets[0]), int(self._offsets[-1]), int(self.counts.sum())
        if sums != (0, meta.tokens, meta.tokens):
            raise self._damaged("its files don't fit each other")

    def verify(self, check: Callable[[], None] = lambda: None) -> None:
        """Reads all of it, half a gigabyte a second or more. Raises DataError when it isn't what was written.

        check: called now and then; it may raise what ends the reading.
        """
        arrays = self._ids, self._mask, self._offsets, self._first, self._lines, self.counts
        learned = 0
        for name, values in zip(FILES, arrays, strict=True):
            digest = hashlib.sha256()
            content = values.view(np.uint8)
            for start in range(0, len(content), READ):
                check()
                part = content[start : start + READ]
                digest.update(part.tobytes())
                learned += int(np.count_nonzero(part)) if name == "mask" else 0
            if digest.hexdigest() != self.meta.files.get(f"{name}.bin"):
                raise self._damaged(f"{name}.bin is not what was written")
        if learned != self.meta.learned:
            raise self._damaged("its files don't fit each other")

    def _damaged(self, why: str) -> DataError:
        return DataError(f"prepared data {self.folder} is damaged: {why}; prepare it again: delete {self.folder}")

    def __len__(self) -> int:
        return self.meta.documents

    @property
    def digest(self) -> str:
        return self.meta.digest

    @property
    def tokens(self) -> int:
        return self.meta.tokens

    @property
    def report(self) -> tuple[str, ...]:
        """What was left out and why, one line each."""
        source = self.meta.source
        lines = [
            f"left out {one.count:,} of {self.meta.records:,} records of {source.name}: {one.reason} "
            f"({self._places(one.lines, one.count)})"
            for one in self.meta.dropped
        ]
        if self.meta.wordless:
            lines.append(
                f"left out {self.meta.wordless:,} of {self.meta.records:,} records of {self.meta.source.name}: "
                f"no answer of two tokens ({self._places(self.meta.wordless_lines, self.meta.wordless)})"
            )
        if self.meta.split:
            lines.append(
                f"{self.meta.split:,} of {self.meta.records:,} records of {self.meta.source.name} have a document for "
                f"each answer, {self.meta.split_documents:,} in all: the chat template writes earlier turns otherwise "
                f"once more follow"
            )
        if source.unread:
            more = ", ..." if source.unread > len(source.unread_names) else ""
            lines.append(f"not read in {source.name}: {', '.join(source.unread_names)}{more}")
        return tuple(lines)

    def _places(self, lines: tuple[int, ...], count: int) -> str:
        return f"{', '.join(map(self.place, lines))}{', ...' if count > len(lines) else ''}"

    def place(self, line: int) -> str:
        """Where a line stands: file and number."""
        return self.meta.source.place(line)

    def lengths(self, documents: Integers) -> Integers:
        return self._offsets[documents + 1] - self._offsets[documents]

    def tokens_at(self, documents: Integers, places: Integers) -> Integers:
        """A token of each document."""
        return self._ids[self._offsets[documents] + places].astype(np.int64)

    def firsts(self, documents: Integers) -> Integers:
        """Each document's first place for an anchor: it and the token behind it are supervised."""
        return self._first[documents].astype(np.int64)

    def line(self, document: int) -> int:
        return int(self._lines[document])

    def document(self, index: int, most: int) -> Document:
        """A document's first `most` tokens. Raises DataError when the folder is not what was written."""
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        if not 0 <= begin < end <= self.meta.tokens:
            raise DataError(f"prepared data {self.folder}: document {index} is damaged; delete the folder")
        end = min(end, begin + most)
        ids = self._ids[begin:end].astype(np.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= self.meta.tokenizer.vocabulary:
            raise DataError(f"prepared data {self.folder}: document {index} is damaged; delete the folder")
        return Document(ids, self._mask[begin:end] != 0)

    def first_place_of(self, token: int) -> str:
        """The place of the first document with a token; "nowhere" when none has it."""
        for start in range(0, self.meta.tokens, SLICE):
            found = np.flatnonzero(self._ids[start : start + SLICE] == token)
            if found.size:
                document = int(np.searchsorted(self._offsets, start + int(found[0]), side="right")) - 1
                return self.place(self.line(document))
        return "nowhere"


def open_prepared(folder: Path, *, verify: bool = True, check: Callable[[], None] = lambda: None) -> Prepared:
    """Opens a folder that `prepare` has written. Raises DataError naming the folder and what is wrong with it.

    verify: read all of it and hold it against its sha256; check: see Prepared.verify.
    """
    try:
        content = (folder / META).read_bytes()
    except OSError as error:
        raise DataError(f"{folder} is no prepared data: {META} can't be read: {error.strerror}") from error
    again = f"prepare it again: delete {folder}"
    try:
        version = _Version.model_validate_json(content).schema_version
        if version > SCHEMA_VERSION:
            raise DataError(
                f"prepared data {folder}: schema_version {version} is newer than this trainer, "
                f"which knows {SCHEMA_VERSION}"
            )
        if version < SCHEMA_VERSION:
            raise DataError(
                f"prepared data {folder}: schema_version {version} is of an older trainer, this one writes "
                f"{SCHEMA_VERSION}: prepare it again"
            )
        meta = Meta.model_validate_json(content)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]
        place = ".".join(map(str, why["loc"]))
        raise DataError(f"prepared data {folder}: {META} is damaged ({place} {why['msg']}); {again}") from error
    if meta.own != meta.seal():
        raise DataError(f"prepared data {folder}: {META} is not what was written; {again}")
    for name, size in expected_bytes(meta).items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size or meta.bytes.get(name) != size:
            state = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise DataError(f"prepared data {folder} is damaged: {name} {state}; {again}")
    if not meta.documents:
        raise DataError(f"prepared data {folder} has no documents")
    prepared = Prepared(folder, meta)
    if verify:
        prepared.verify(check)
    if content != (folder / META).read_bytes():
        raise DataError(f"prepared data {folder} was replaced while it was opened: begin again")
    return prepared


class _Version(BaseModel):
    """All that is read of a meta.json before its version is known."""

    model_config = ConfigDict(extra="ignore")
    schema_version: int


def expected_bytes(meta: Meta) -> dict[str, int]:
    """How long each file has to be."""
    values = {
        "ids": meta.tokens,
        "mask": meta.tokens,
        "offsets": meta.documents + 1,
        "first": meta.documents,
        "lines": meta.documents,
        "counts": meta.tokenizer.vocabulary,
    }
    return {f"{name}.bin": values[name] * np.dtype(dtype).itemsize for name, dtype in FILES.items()}
