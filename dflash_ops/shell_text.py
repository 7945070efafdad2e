"""Words as one line of text that every login shell reads alike. Pure.

Nobody knows which shell a host's user has: bash, dash, zsh, fish, csh. Between single quotes all of them take printable
ASCII as it is, less `!` (csh's history), `\\` (fish's escapes) and line breaks (csh's lines end there). A line with
anything else carries its words as octal numbers, which a `sh` on the other side turns back.
"""

import re
from collections.abc import Sequence

_BARE = re.compile(
    r"[A-Za-z0-9_/.,:@+-][A-Za-z0-9_/.,:@+=%-]*"
)  # zsh expands a word that begins with =, fish one with %
_ODD = re.compile(rb"[^ -~]|[!\\]")
_OCTAL = re.compile(rb"[^ -~]|[!\\']")

_EXEC = 'exec "$@"'
_EXEC_OCTAL = 'eval "exec $(printf %b "$1")"'
# What a login script prints comes before these; ours after them. In two pieces: `set -x` shows the line itself.
_MARKS = 'echo "dflash-ops:$1"; echo "dflash-ops:$1" >&2; shift; '


def mark(token: str) -> bytes:
    """The line that stands before what a command of `text(words, token)` prints, on stdout and on stderr."""
    return f"dflash-ops:{token}\n".encode()


def text(words: Sequence[str], token: str = "") -> bytes:
    """The words as shell text, run in the shell's place. With a token, `mark(token)` comes first on both outputs."""
    plain = " ".join(map(_quoted, words)).encode("utf-8", "surrogateescape")
    odd = _ODD.search(plain) is not None
    if not odd and not token:
        return b"exec " + plain
    script = (_MARKS if token else "") + (_EXEC_OCTAL if odd else _EXEC)
    head = f"exec /bin/sh -c {_quoted(script)} sh{f' {token}' if token else ''} ".encode()
    return head + (b"'%b'" % _OCTAL.sub(_octal, plain) if odd else plain)


def _quoted(word: str) -> str:
    if _BARE.fullmatch(word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _octal(found: "re.Match[bytes]") -> bytes:
    return b"\\0%03o" % found.group()[0]
