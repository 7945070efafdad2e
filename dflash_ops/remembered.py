"""What earlier deploys from this machine left in a container: a guess at what it has, before it is asked.

One small file for each container's folder, in the user's cache. It may be wrong, old or gone at any time: it decides
only what is begun early, never what is sent or believed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from dflash_ops.command import Container

_SCHEMA_VERSION = 1
# The first digits of a sha256 are enough for a guess.
_DIGITS = 16
_MOST_CONTENTS = 20_000
_MOST_FILES = 64


def recall(container: Container) -> frozenset[str] | None:
    """The contents that a container had, as `brief` writes them; None when nothing is known of it."""
    try:
        found = json.loads(_file(container).read_bytes())
        if found["schema_version"] == _SCHEMA_VERSION:
            return frozenset(found["contents"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def remember(container: Container, sha256s: Iterable[str]) -> None:
    """Adds contents that a container has now. Where that can't be written down, nothing is remembered."""
    contents = list(dict.fromkeys([*(brief(sha) for sha in sha256s), *sorted(recall(container) or ())]))
    text = json.dumps({"schema_version": _SCHEMA_VERSION, "contents": contents[:_MOST_CONTENTS]})
    file = _file(container)
    new = file.with_name(f".{file.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(file.parent)
        new.write_text(text, encoding="ascii")
        new.replace(file)


def brief(sha256: str) -> str:
    """A content's sha256, as it is remembered."""
    return sha256[:_DIGITS]


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
