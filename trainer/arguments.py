"""Kinds of numbers on the command line, for argparse: a wrong one is a usage error, told before anything is loaded."""

from argparse import ArgumentTypeError


def at_least_one(word: str) -> int:
    """A whole number from 1 on."""
    return _whole(word, 1)


def at_least_zero(word: str) -> int:
    """A whole number from 0 on."""
    return _whole(word, 0)


def _whole(word: str, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise ArgumentTypeError(f"{word!r} is no whole number from {least} on")
    return int(word)
