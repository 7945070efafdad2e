"""Every failure that a user can meet, each with its exit code.

OpsError (1)
├── UsageFault (2)           the words of the command line do not fit together
├── ConfigError (3)          an inventory or a trainer config is wrong
├── UnreachableError (4)     the host does not answer, or refuses us
│   └── LinkLostError (4)    the connection broke: what was asked may have happened
├── HostKeyError (5)         the host key is unknown or has changed
├── PreflightError (6)       something needed is missing: container stopped, no tmux, disk full
├── BusyError (7)            somebody else holds it: a GPU, a deploy, a run of that name
├── NotFoundError (8)        no such container, release, run
├── VerificationError (9)    what arrived is not what was sent
├── RunFailedError (100)     the run ended with a failure
├── StillRunningError (101)  the run has not ended
├── CancelledError (103)     the user said no, or stopped it
└── TimedOutError (124)      no answer in time

An error says what failed, where, why, and what to run next, and prints as one line.
"""

from typing import ClassVar


class OpsError(Exception):
    """One line for the user: what failed, where, why; and the command to run next.

    what: the thing that failed, e.g. "deploy stopped"
    where: the place or file it failed at, e.g. "lab / container 200"
    why: the last words of the program that refused, or our own finding
    next: what to run or change now
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", next: str = "") -> None:
        self.what, self.where, self.why, self.next = what, where, why, next
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line of text; line breaks inside the parts become "; "."""
        head = self.what if not self.where else f"{self.what} ({self.where})"
        parts = [head, self.why] if self.why else [head]
        text = ": ".join(parts)
        if self.next:
            text += f". Next: {self.next}"
        return "; ".join(part.strip() for part in text.split("\n") if part.strip())


class UsageFault(OpsError):
    exit_code = 2


class ConfigError(OpsError):
    exit_code = 3


class UnreachableError(OpsError):
    exit_code = 4


class LinkLostError(UnreachableError):
    pass


class HostKeyError(OpsError):
    exit_code = 5


class PreflightError(OpsError):
    exit_code = 6


class BusyError(OpsError):
    exit_code = 7


class NotFoundError(OpsError):
    exit_code = 8


class VerificationError(OpsError):
    exit_code = 9


class RunFailedError(OpsError):
    exit_code = 100


class StillRunningError(OpsError):
    exit_code = 101


class CancelledError(OpsError):
    exit_code = 103


class TimedOutError(OpsError):
    exit_code = 124
