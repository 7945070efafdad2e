"""known_hosts as OpenSSH reads it: patterns, hashed names, ports, @revoked and @cert-authority. Pure.

paramiko's own reader knows one key of a kind for a host, no patterns, and fails at a line with a marker.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple


class Line(NamedTuple):
    """One key of a file. names: the field as it is written; marker: "@revoked", "@cert-authority" or ""."""

    file: Path
    number: int
    marker: str
    names: str
    kind: str
    blob: bytes

    def __str__(self) -> str:
        return f"{self.kind} {fingerprint(self.blob)} ({self.file}:{self.number})"


class Verdict(NamedTuple):
    """What the files say of a key that a host has shown; `lines` are those that say so.

    other: the host has keys, but none of this kind. authority: certificates alone would vouch for it.
    """

    word: Literal["known", "revoked", "changed", "other", "authority", "unknown"]
    lines: tuple[Line, ...] = ()


def fingerprint(blob: bytes) -> str:
    """As ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def read(text: str, file: Path) -> list[Line]:
    """The lines that hold a key. Others are passed over, as ssh does."""
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3 or marker not in ("", "@revoked", "@cert-authority"):
            continue
        blob = _blob(words[1], words[2])
        if blob is not None:
            lines.append(Line(file, number, marker, words[0], words[1], blob))
    return lines


def read_revoked(text: str, file: Path) -> list[Line]:
    """The public keys of a RevokedHostKeys file, each revoked for all hosts."""
    keys = [line.strip() for line in text.split("\n")]
    return read("\n".join(f"@revoked * {key}" if key and not key.startswith("#") else "" for key in keys), file)


def of(lines: Iterable[Line], name: str) -> list[Line]:
    """The lines that speak of a host. name: in lower case, `[host]:port` where the port is not 22."""
    return [line for line in lines if _matches(line.names, name)]


def judge(lines: Sequence[Line], names: Sequence[str], kind: str, blob: bytes, *, bare: str | None = None) -> Verdict:
    """Whether a host's key is the known one.

    names: what the host is called; each name that has keys must have this one. bare: its name without a port, under
    which the very same key is good enough.
    """
    spoken = (line for name in (*names, *([bare] if bare else [])) for line in of(lines, name))
    revoked = tuple(dict.fromkeys(line for line in spoken if line.marker == "@revoked" and line.blob == blob))
    if revoked:
        return Verdict("revoked", revoked)
    verdicts = [_judge(of(lines, name), kind, blob) for name in names]
    for word in ("changed", "known"):
        for verdict in verdicts:
            if verdict.word == word:
                return verdict
    if bare and (verdict := _judge(of(lines, bare), kind, blob)).word == "known":
        return verdict
    return next((verdict for verdict in verdicts if verdict.word != "unknown"), Verdict("unknown"))


def kinds(lines: Iterable[Line], names: Sequence[str]) -> list[str]:
    """The kinds of keys that are known of a host, in the files' order."""
    return list(dict.fromkeys(line.kind for name in names for line in of(lines, name) if not line.marker))


def _judge(spoken: Sequence[Line], kind: str, blob: bytes) -> Verdict:
    keys = tuple(line for line in spoken if not line.marker)
    same = tuple(line for line in keys if line.blob == blob)
    if same:
        return Verdict("known", same)
    changed = tuple(line for line in keys if line.kind == kind)
    if changed:
        return Verdict("changed", changed)
    if keys:
        return Verdict("other", keys)
    authorities = tuple(line for line in spoken if line.marker == "@cert-authority")
    return Verdict("authority", authorities) if authorities else Verdict("unknown")


def _blob(kind: str, text: str) -> bytes | None:
    """A key's bytes, when they are a key of that kind."""
    try:
        blob = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    head = kind.encode()
    return blob if blob[:4] == len(head).to_bytes(4, "big") and blob[4 : 4 + len(head)] == head else None


def _matches(names: str, name: str) -> bool:
    """Whether a line's first field means the host: patterns apart by commas, `!` for all but these; or a hash."""
    if names.startswith("|1|"):
        _, _, salt, digest = (names.split("|") + [""] * 4)[:4]
        try:
            made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except (binascii.Error, ValueError):
            return False
    found = False
    for pattern in names.lower().split(","):
        if _pattern(pattern.removeprefix("!")).fullmatch(name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), re.DOTALL)
