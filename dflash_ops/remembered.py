"""What the last deploys from this machine left in a container: a guess at what it has, and at what has changed here.

One small file for each container's folder, in the user's cache. It may be wrong, old or gone at any time: it decides
only what is begun early, never what is sent or believed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.command import Container
from dflash_ops.release import FileEntry

_SCHEMA_VERSION = 1
# The first digits of a sha256 are enough for a guess.
_DIGITS = 16
_MOST_CONTENTS = 20_000
# A push that is begun before the source is read waits for that, and so it must not take long.
_MOST_STATES, _MOST_BYTES = 2_000, 100_000_000
_MOST_FILES = 64


@dataclass(frozen=True)
class Memory:
    """contents: the first digits of the sha256s there; root: the folder of the last deploy, states: its files'
    (name, size, mtime in ns)."""

    contents: frozenset[str]
    root: str
    states: tuple[tuple[str, int, int], ...]

    def lacks(self, files: Sequence[FileEntry]) -> list[FileEntry]:
        """Those whose content is not there, as far as we know."""
        return [file for file in files if file.link is None and file.sha256[:_DIGITS] not in self.contents]

    def differs(self, root: Path) -> bool:
        """Whether a file of the last deploy looks otherwise now. Where another folder is sent, nothing is known."""
        return str(root) == self.root and any(_state(root, name) != (size, time) for name, size, time in self.states)


NOTHING = Memory(frozenset(), "", ())


def recall(container: Container) -> Memory | None:
    """What is remembered of a container; None when that is nothing, or can't be read."""
    # RuntimeError: there is no home folder; RecursionError is one too.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        found = json.loads(_file(container).read_bytes())
        contents, root, states = found["contents"], found["root"], found["states"]
        if (
            found["schema_version"] == _SCHEMA_VERSION
            and [type(part) for part in (contents, root, states)] == [list, str, list]
            and all(type(digits) is str for digits in contents)
            and all([type(part) for part in state] == [str, int, int] for state in states)
        ):
            return Memory(frozenset(contents), root, tuple((name, size, time) for name, size, time in states))
    return None


def remember(container: Container, root: Path, files: Sequence[FileEntry]) -> None:
    """Notes that a container has these files now, read below `root`. Where that can't be written down, it is not."""
    regular = [file for file in files if file.link is None]
    known = (recall(container) or NOTHING).contents
    contents = list(dict.fromkeys([*(file.sha256[:_DIGITS] for file in regular), *sorted(known)]))[:_MOST_CONTENTS]
    quick = len(regular) <= _MOST_STATES and sum(file.size for file in regular) <= _MOST_BYTES
    states = [(file.path, *_state(root, file.path)) for file in regular] if quick else []
    memory: dict[str, Any] = {"contents": contents, "root": str(root), "states": states}
    with contextlib.suppress(OSError, RuntimeError):
        file = _file(container)
        new = file.with_name(f".{file.name}-{os.getpid()}")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(file.parent)
        try:
            new.write_text(json.dumps({"schema_version": _SCHEMA_VERSION, **memory}), encoding="ascii")
            new.replace(file)
        except OSError:
            new.unlink(missing_ok=True)


def _state(root: Path, name: str) -> tuple[int, int]:
    """Size and mtime; of what is not there, or can't be a file's name, no file's."""
    try:
        state = os.lstat(root / name)
    except (OSError, ValueError):
        return -1, 0
    return state.st_size, state.st_mtime_ns


def _file(container: Container) -> Path:
    import platformdirs

    host = container.host
    place = json.dumps([host.address, host.port, container.vmid, container.path])
    name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return platformdirs.user_cache_path("dflash-ops") / "deployed" / f"{name}.json"


def _forget_old(folder: Path) -> None:
    """Makes room for one more: containers come and go."""
    files = sorted((file.stat().st_mtime, file) for file in folder.iterdir())
    for _, file in files[: max(0, len(files) - _MOST_FILES + 1)]:
        file.unlink(missing_ok=True)
