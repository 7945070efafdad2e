"""Kinds of numbers on the command line, for argparse: a wrong one is a usage error, told before anything is loaded."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


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


def temperature(word: str) -> float:
    """A number from 0 on."""
    return _number(word, "a temperature, 0 or more", lambda value: value >= 0)


def share(word: str) -> float:
    """A number above 0, at most 1."""
    return _number(word, "a share above 0 and at most 1", lambda value: 0 < value <= 1)


def seconds(word: str) -> float:
    """A number from 0 on."""
    return _number(word, "a number of seconds, 0 or more", lambda value: value >= 0)


def seconds_above_zero(word: str) -> float:
    """A number above 0."""
    return _number(word, "a number of seconds above 0", lambda value: value > 0)


def _number(word: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise ArgumentTypeError(f"{word!r} is not {what}")
    return value
