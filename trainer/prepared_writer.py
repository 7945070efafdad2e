"""Writes a folder of prepared documents: see prepared.py for what it holds."""

import hashlib
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.files import sync, write_synced
from trainer.prepared import FILES, META, Dropped, Fingerprint, Meta, Settings, expected_bytes
from trainer.prepared import Source as SourceMark
from trainer.tokenise import Tokens

SHOWN = 5  # reasons and lines that are named one by one
KINDS = 25  # reasons that are counted apart; as many more without the words that they quote
ALIKE = ", or the like"  # of a reason that stands for others with other numbers or words
OTHERS = "other reasons"


class Reasons:
    """Why records were left out: counted by kind, the first lines of each kept."""

    def __init__(self) -> None:
        self.count = 0
        self._kinds: dict[str, tuple[str, int, tuple[int, ...]]] = {}

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        kind = re.sub(r"0x\w+|\d+", "#", reason)  # the same fault in another place
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = re.sub(r"'[^']*'", "'#'", kind)  # or of another word
        if kind not in self._kinds and len(self._kinds) >= 2 * KINDS:
            kind, reason = "", OTHERS
        first, count, lines = self._kinds.get(kind, (reason, 0, ()))
        if reason != first and not first.endswith(ALIKE):
            first += ALIKE
        self._kinds[kind] = first, count + 1, lines + (line,) * (len(lines) < SHOWN)

    def all(self) -> tuple[Dropped, ...]:
        """The most frequent ones first."""
        found = sorted(self._kinds.values(), key=lambda kind: (-kind[1], kind[2]))
        return tuple(Dropped(reason=reason, count=count, lines=lines) for reason, count, lines in found)


class Writer:
    """The files of a folder of prepared data, written document by document."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        with ExitStack() as opened:
            self._opened = {name: opened.enter_context((folder / f"{name}.bin").open("wb")) for name in FILES}
            self._files = opened.pop_all()
        self._counts = np.zeros(vocabulary, dtype=np.int64)
        self._digest = hashlib.sha256()
        self._hashes = {name: hashlib.sha256() for name in FILES}
        self.documents = self.tokens = self.learned = self.wordless = self.split = self.split_documents = 0
        self.wordless_lines: tuple[int, ...] = ()
        self._write("offsets", np.int64(0))

    def add(self, records: Collection[tuple[int, Sequence[Tokens]]]) -> None:
        """Writes records' documents with their lines; those with no place for an anchor are counted and left out."""
        kept: list[npt.NDArray[np.int32]] = []
        for line, documents in records:
            before = self.documents
            for ids, mask in documents:
                places = np.flatnonzero(mask[:-1] & mask[1:])
                if not places.size:
                    continue
                kept.append(ids)
                self.documents += 1
                self.tokens += len(ids)
                self.learned += int(np.count_nonzero(mask))
                self._digest.update(self._write("ids", ids) + self._write("mask", mask))
                self._digest.update(len(ids).to_bytes(8, "little"))
                self._write("offsets", np.int64(self.tokens))
                self._write("first", np.int32(places[0]))
                self._write("lines", np.int64(line))
            if self.documents == before:
                self.wordless += 1
                self.wordless_lines += (line,) * (len(self.wordless_lines) < SHOWN)
            elif len(documents) > 1:
                self.split += 1
                self.split_documents += self.documents - before
        if kept:
            self._counts += np.bincount(np.concatenate(kept), minlength=len(self._counts))

    def _write(self, name: str, values: Any) -> bytes:
        """Values at the end of a file, as its bytes."""
        content: bytes = values.astype(FILES[name]).tobytes()
        self._hashes[name].update(content)
        self._opened[name].write(content)
        return content

    def close(self) -> None:
        self._files.close()

    def finish(self, source: SourceMark, mark: Fingerprint, settings: Settings, records: int, reasons: Reasons) -> None:
        """Writes the last files, meta.json as the very last."""
        self._write("counts", self._counts)
        self.close()
        meta = Meta(
            source=source,
            tokenizer=mark,
            settings=settings,
            records=records,
            documents=self.documents,
            tokens=self.tokens,
            learned=self.learned,
            dropped=reasons.all(),
            wordless=self.wordless,
            wordless_lines=self.wordless_lines,
            split=self.split,
            split_documents=self.split_documents,
            files={f"{name}.bin": digest.hexdigest() for name, digest in self._hashes.items()},
            digest=self._digest.hexdigest(),
            bytes={},
        )
        meta = meta.model_copy(update={"bytes": expected_bytes(meta)})
        for name in meta.bytes:
            sync(self._folder / name)
        write_synced(self._folder / META, meta.sealed().model_dump_json(indent=2).encode() + b"\n")
