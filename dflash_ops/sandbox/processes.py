"""Who a process is: pid, raw start time and boot id together; a pid alone is used again. And what it was called with.

Light: the state file's reader and the programs inside the sandbox import it.
"""

import os
import sys
import time


class ProcessId:
    """pid as this /proc shows it; start: field 22 of /proc/PID/stat, in clock ticks since the machine's boot."""

    __slots__ = ("pid", "start")

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The identity of the process that has this pid now; None when none has, or only a zombie."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read()
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessId) and (self.pid, self.start) == (other.pid, other.start)

    def __hash__(self) -> int:
        return hash((self.pid, self.start))

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    def __repr__(self) -> str:
        return f"ProcessId({self.pid}, {self.start})"

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
        import signal

        self.signal(signal.SIGKILL)
        return self.wait(seconds)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def own_words() -> list[bytes]:
    """The words after the program's name, as bytes: the interpreter's decoding would depend on the locale."""
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[:-1]
    # interpreter, its options, the script, and then what was typed
    return words[len(words) - len(sys.argv) + 1 :]


def own_environment() -> dict[bytes, bytes]:
    """The environment as it was given: Python adds LC_CTYPE to its own when the locale is C."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    return {name: value for name, _, value in pairs}
