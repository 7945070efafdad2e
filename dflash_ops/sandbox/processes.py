"""Who a process is: pid, raw start time and boot id together; a pid alone is used again.

Standard library only and light: the state file's reader and the programs inside the sandbox import it.
"""

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """pid as this /proc shows it; start: field 22 of /proc/PID/stat, in clock ticks since the machine's boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The identity of the process that has this pid now; None when none has, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name in parentheses may hold spaces and parentheses itself.
        fields = stat[stat.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    @classmethod
    def parse(cls, text: str) -> "ProcessId | None":
        """Read `str(identity)`; None when it is something else, such as a file half written."""
        words = text.split()
        return cls(int(words[0]), int(words[1])) if len(words) == 2 and all(map(str.isdigit, words)) else None

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send the signal, unless the process is gone."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False when it still lives after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self, seconds: float = 10.0) -> bool:
        """SIGKILL it and wait for its end."""
        self.signal(signal.SIGKILL)
        return self.wait(seconds)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Watch:
    """Says whether a process has ended, for use in a `select.poll` loop where the kernel has pidfds.

    `descriptor` is None where it has none (some user-space kernels): then ask `ended` now and then.
    """

    def __init__(self, identity: ProcessId) -> None:
        self.identity = identity
        self.descriptor: int | None
        try:
            self.descriptor = os.pidfd_open(identity.pid)
        except OSError:
            self.descriptor = None

    @property
    def ended(self) -> bool:
        if self.descriptor is not None and select.select([self.descriptor], [], [], 0)[0]:
            return True
        return not self.identity.alive
