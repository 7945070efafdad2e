# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (transformers gives its tokenizers no types)
"""Tokens as text for a terminal, as they come: whole characters only, drafted ones in green."""

from collections.abc import Sequence
from typing import Any

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"
TORN = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character."""

Piece = tuple[str, bool]
"""Text, and whether the drafter proposed it."""


class Pieces:
    """An answer's tokens, turned into text piece by piece.

    A character of several tokens comes with the token that completes it. Only the last few tokens are decoded anew each
    time, behind those of the piece before: a tokenizer may write a word otherwise at a text's begin.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._new: list[int] = []

    def add(self, token: int, drafted: bool) -> list[Piece]:
        """The text that is complete with this token, if any."""
        self._new.append(token)
        text = self._text()
        if text.endswith(TORN):
            return []
        if not text:  # a special token: it is no place to begin from
            self._before, self._new = self._before + self._new, []
            return []
        self._before, self._new = self._new, []
        return [(text, drafted)]

    def rest(self) -> str:
        """What is left at the answer's end: bytes that never became a character."""
        text = self._text() if self._new else ""
        self._before, self._new = self._new, []
        return text

    def _text(self) -> str:
        before = str(self._tokenizer.decode(self._before, skip_special_tokens=True))
        return str(self._tokenizer.decode(self._before + self._new, skip_special_tokens=True))[len(before) :]


def pieces_of(tokenizer: Any, tokens: Sequence[int], drafted: Sequence[bool]) -> list[Piece]:
    """A whole answer's text; neighbouring pieces that are alike are one."""
    stream, found = Pieces(tokenizer), list[Piece]()
    for token, proposed in zip(tokens, drafted, strict=True):
        for text, _ in stream.add(token, proposed):
            if found and found[-1][1] == proposed:
                found[-1] = (found[-1][0] + text, proposed)
            else:
                found.append((text, proposed))
    if rest := stream.rest():
        found.append((rest, drafted[-1]))
    return found


def coloured(pieces: Sequence[Piece]) -> str:
    """Drafted text in green, line by line, so that a pager keeps the colour."""

    def paint(text: str) -> str:
        return "\n".join(f"{GREEN}{line}{RESET}" if line else line for line in text.split("\n"))

    return "".join(paint(text) if drafted else text for text, drafted in pieces)


def printable(text: str) -> str:
    """Without what would steer a terminal: a model may write anything."""
    return "".join(each if each in "\n\t" or not (ord(each) < 32 or 127 <= ord(each) < 160) else TORN for each in text)
