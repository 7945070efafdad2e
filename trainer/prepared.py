"""A folder of prepared documents: what it holds, and how it is read without being loaded.

meta.json     Meta: what was read, by which tokenizer, what was left out and why; sizes of the files; written last
ids.bin       int32, all documents' tokens one after another
mask.bin      uint8, 1 where the assistant speaks
offsets.bin   int64, where each document begins, and where the last one ends
first.bin     int32, the first place for an anchor in each document
lines.bin     int64, each document's line (or record) in the source
counts.bin    int64, how often each token of the vocabulary occurs
"""

import hashlib
from bisect import bisect_right
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.conversations import Document

SCHEMA_VERSION = 1
META = "meta.json"
FILES = {"ids": "<i4", "mask": "u1", "offsets": "<i8", "first": "<i4", "lines": "<i8", "counts": "<i8"}
SLICE = 1 << 16  # values looked at together in a pass over all of them

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
    digest: str
    """sha256 of all tokens and masks: tells whether two folders hold the same documents."""
    bytes: dict[str, int]
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
        self.folder, self.meta = folder, meta
        self._ids, self._mask, self._offsets, self._first, self._lines, counts = (
            np.asarray(np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")) for name, dtype in FILES.items()
        )
        self.counts: Integers = np.array(counts, dtype=np.int64)
        """How often each token occurs."""

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
        lines = [
            f"left out {one.count:,} of {self.meta.records:,} records of {self.meta.source.name}: {one.reason} "
            f"({', '.join(map(self.place, one.lines))}{', ...' if one.count > len(one.lines) else ''})"
            for one in self.meta.dropped
        ]
        if self.meta.wordless:
            lines.append(
                f"left out {self.meta.wordless:,} of {self.meta.records:,} records of {self.meta.source.name}: "
                "no answer of two tokens"
            )
        return tuple(lines)

    def place(self, line: int) -> str:
        """Where a line stands: file and number."""
        files = self.meta.source.files
        name, first = files[max(0, bisect_right([first for _, first in files], line) - 1)]
        return f"{name}:{line - first + 1}"

    def lengths(self, documents: Integers) -> Integers:
        return self._offsets[documents + 1] - self._offsets[documents]

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


def open_prepared(folder: Path) -> Prepared:
    """Opens a folder that `prepare` has written. Raises DataError naming the folder and what is wrong with it."""
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
    return Prepared(folder, meta)


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
