"""The files that `regenerate` makes: rows where they belong, and beside FILE how they came to be.

FILE.origin.json names each file with its size and SHA-256. By it the command knows its own files again, and puts none
in the place of another's, or of one that was changed since.
"""

import json
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from trainer.files import file_digest
from trainer.finished import FinishedError, differences

Share = tuple[int, Path] | None
"""So many rows, and their file."""


class Sorter:
    """Sends each row where it belongs: the first rows held out, then a copy of the first short ones, all to `out`."""

    def __init__(
        self, out: TextIO, heldout: tuple[int, TextIO] | None, excerpt: tuple[int, TextIO] | None, largest: int
    ) -> None:
        self._out, self._largest = out, largest
        self._heldout, self._excerpt = heldout, excerpt
        self._held = self._copied = 0
        self.written = 0
        """Rows in `out`."""

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False) + "\n"
        if self._heldout and self._held < self._heldout[0]:
            self._held += 1
            self._heldout[1].write(line)
            return
        self._out.write(line)
        self.written += 1
        if self._excerpt and self._copied < self._excerpt[0] and len(line.encode()) <= self._largest:
            self._copied += 1
            self._excerpt[1].write(line)


class Places:
    """Where rows go."""

    def __init__(self, out: Path, heldout: Share, excerpt: Share, largest: int) -> None:
        self.out, self._heldout, self._excerpt, self._largest = out, heldout, excerpt, largest
        self.origin = part_of(out, "origin.json")
        self._shares = {"heldout": heldout, "excerpt": excerpt}
        self._paths = {"out": out} | {name: share[1] for name, share in self._shares.items() if share}

    def settings(self) -> dict[str, Any]:
        """What makes other files, not other answers."""
        shares = {name: None if share is None else [share[0], str(share[1])] for name, share in self._shares.items()}
        return shares | {"excerpt_bytes": self._largest}

    def are_whole(self, settings: Mapping[str, Any], part: Path) -> bool:
        """Whether all files were made with these settings, to their end.

        Raises FinishedError: one of them is another's, or no longer as it was written.
        """
        origin = self._read()
        found = origin.get("settings")
        if self.out.exists():
            if not isinstance(found, dict):
                raise FinishedError(f"{self.out} is there already, and not this command's: name another, or remove it")
            if told := differences(cast("dict[str, Any]", found), json.loads(json.dumps(settings))):
                raise FinishedError(
                    f"{self.out} was made with other settings: {told}. Name another --out, or remove it"
                )
        elif found != json.loads(json.dumps(settings)):
            origin = {}
        complete = self.out.exists() and origin.get("complete", True) and not part.exists()
        for name, path in self._paths.items():
            self._check(path, origin, name, complete=complete)
        return complete

    def _check(self, path: Path, origin: Mapping[str, Any], name: str, *, complete: bool) -> None:
        """Raises FinishedError when a file may not be replaced, or is not what a complete origin says."""
        if not path.exists():
            if complete:
                raise FinishedError(f"{path} is gone, which was made with {self.out}: remove that to make both anew")
            return
        if origin and "files" not in origin:
            return  # an older version's, which says nothing of them
        known = [origin.get(which, {}).get(name) for which in (("files",) if complete else ("files", "replaces"))]
        if looks(path) in known:
            return
        if any(known):
            raise FinishedError(f"{path} was changed since it was made: name another, or remove it")
        raise FinishedError(f"{path} is there already, and not this command's: name another, or remove it")

    def _read(self) -> dict[str, Any]:
        """How the files came to be; {} when that is not known."""
        try:
            if not self.origin.exists():  # as older versions named it, where two FILEs may share it
                old = self.out.with_suffix(".origin.json")
                found: Any = json.loads(old.read_text())
                mine = any(Path(word.split("=", 1)[-1]).name == self.out.name for word in found["command"])
                return cast("dict[str, Any]", found) if mine else {}
            found = json.loads(self.origin.read_text())
            return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    @contextmanager
    def written(self) -> Generator[tuple[Sorter, dict[str, Any]]]:
        """Where rows are written, and an origin to fill in; all take their places when the block ends well.

        The origin comes first, so that a kill between two of them leaves no file that nobody knows.
        """
        with ExitStack() as stack:
            files = {name: stack.enter_context(in_place_of(path)) for name, path in self._paths.items()}
            heldout, excerpt = (
                (share[0], files[name]) if (share := self._shares[name]) else None for name in ("heldout", "excerpt")
            )
            origin: dict[str, Any] = {}
            before = self._read().get("files")
            yield Sorter(files["out"], heldout, excerpt, self._largest), origin
            for file in files.values():
                file.flush()
            origin["files"] = {name: looks(Path(file.name)) for name, file in files.items()}
            if before:
                origin["replaces"] = before
            with in_place_of(self.origin) as file:
                file.write(json.dumps(origin, indent=2) + "\n")


def looks(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def part_of(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


@contextmanager
def in_place_of(path: Path) -> Generator[TextIO]:
    """A file that takes the place of `path` when the block ends well; after an error `path` is as it was."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
