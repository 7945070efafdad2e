"""What a deploy would change of the current release: names, and text as `diff -u` shows it. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ops.release import FileEntry, Manifest, printable

# Larger files are compared by name alone.
MAX_TEXT_BYTES = 256 << 10
_MODE_BITS = 0o555


@dataclass(frozen=True)
class Changes:
    """Paths, sorted; a folder's ends with "/". changed: other content, another mode, or another kind of thing."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def changes(files: Sequence[Mapping[str, Any]], folders: Sequence[str], new: Manifest) -> Changes:
    """files, folders: the current release's, as its manifest has them."""
    old = {str(file["path"]): _essence(file) for file in files}
    sent = {file.path: _essence(vars(file)) for file in new.files}
    added = [name for name in sent if name not in old]
    removed = [name for name in old if name not in sent]
    added += [f"{name}/" for name in new.folders if name not in folders]
    removed += [f"{name}/" for name in folders if name not in new.folders]
    changed = [name for name, file in sent.items() if name in old and old[name] != file]
    return Changes(tuple(sorted(added)), tuple(sorted(changed)), tuple(sorted(removed)))


def _essence(file: Mapping[str, Any]) -> tuple[object, ...]:
    # Releases of earlier versions have write bits in their manifests.
    return file["sha256"], file["link"], file["mode"] & _MODE_BITS


def unified(
    name: str, old: Mapping[str, Any] | None, new: FileEntry | None, was: bytes | None, now: bytes | None
) -> str:
    """One file's change as text. old, new: its entries, None where it is not; was, now: its contents, None where they
    are not to be had or too large."""
    shown = printable(name)
    lines: list[str] = []
    if old is not None and new is not None and old["mode"] & _MODE_BITS != new.mode & _MODE_BITS:
        lines.append(f"mode of {shown}: {old['mode'] & _MODE_BITS:o} -> {new.mode:o}")
    links = (old["link"] if old else None), (new.link if new else None)
    if links != (None, None):
        if links[0] != links[1]:
            lines.append(f"link {shown}: {_target(links[0])} -> {_target(links[1])}")
    elif (old["sha256"] if old else None) != (new.sha256 if new else None):
        lines += _text(shown, was if old else b"", now if new else b"", old is None, new is None)
    return "".join(f"{line}\n" for line in lines)


def _target(link: str | None) -> str:
    return "none" if link is None else printable(link)


def _text(shown: str, was: bytes | None, now: bytes | None, is_new: bool, is_gone: bool) -> list[str]:
    texts = [_decoded(data) for data in (was, now)]
    if texts[0] is None or texts[1] is None:
        what = "added" if is_new else "removed" if is_gone else "differs"
        return [f"{shown} {what} (binary, or too large to show)"]
    before, after = "/dev/null" if is_new else f"current/{shown}", "/dev/null" if is_gone else f"here/{shown}"
    found: list[str] = []
    for line in difflib.unified_diff(_lines(texts[0]), _lines(texts[1]), before, after):
        body = line.removesuffix("\n")
        found.append(body)
        if not line.endswith("\n") and line[:1] in "+- ":
            found.append("\\ No newline at end of file")
    return found


def _lines(text: str) -> list[str]:
    """Split at line feeds alone, each kept."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.rpartition("\n")[2]) else [])


def _decoded(data: bytes | None) -> str | None:
    if data is None or b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
