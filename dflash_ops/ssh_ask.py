"""Asking for a key's passphrase on the terminal: once for each key, whoever needs it."""

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Callable
from contextlib import AbstractContextManager

from dflash_ops import leaving
from dflash_ops.errors import CancelledError

TRIES = 3

# What is done around a question: whoever draws on the terminal stops meanwhile.
around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

_cancelled = False  # by Ctrl-C or Ctrl-D: the program ends, and asks no more


def possible() -> bool:
    """Whether somebody is there to answer: a terminal to ask on, and one that we read from or speak to."""
    if not (sys.stdin.isatty() or sys.stderr.isatty()):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def passphrase(prompt: str) -> bytes:
    """Asks without echo. CancelledError on Ctrl-C, which then also reaches the program as SIGINT, and for whoever would
    ask after that.

    Ctrl-C is read as a character here: the signal would end the program in another thread, with the echo still off.
    """
    global _cancelled
    if _cancelled:
        raise CancelledError("no passphrase was given")
    terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[3] &= ~(termios.ECHO | termios.ISIG)
    quiet[6][termios.VEOL] = b"\x03"  # ends a line, too

    def restore() -> None:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
        os.write(terminal, b"\r\n")

    try:
        with leaving.undone(restore):
            termios.tcsetattr(terminal, termios.TCSAFLUSH, quiet)
            if leaving.begun():
                raise CancelledError("no passphrase was given")
            os.write(terminal, prompt.encode("utf-8", "replace"))
            line = os.read(terminal, 4096)
    finally:
        os.close(terminal)
    if line.endswith(b"\x03") or not line:  # nothing: Ctrl-D
        _cancelled = True
        os.kill(os.getpid(), signal.SIGINT)
        raise CancelledError("no passphrase was given")
    return line.rstrip(b"\r\n")
