"""A connection on its way to being open: where it goes, how long it may still take, and how its errors are told."""

import shlex
import time
from typing import NamedTuple

from dflash_ops.errors import UnreachableError
from dflash_ops.ssh_config import Hop


class Clock:
    """How long connecting to one host may still take. What a person needs for a passphrase is given back."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, never less than a hundredth: what gets that ends with its own error."""
        return max(self._until - time.monotonic(), 0.01)

    def give_back(self, seconds: float) -> None:
        self._until += seconds


class Opening(NamedTuple):
    """A hop on its way to being open. where: for errors."""

    hop: Hop
    where: str
    clock: Clock

    def unreachable(self, why: str) -> UnreachableError:
        plain = shlex.join(("ssh", *self.hop.plain, "true"))
        return UnreachableError("the host can't be reached", where=self.where, why=why, next=plain)

    def late(self, stage: str) -> UnreachableError:
        return self.unreachable(f"{stage} within {self.clock.seconds:g} s")
