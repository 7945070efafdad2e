"""The terminal of what is attached to a container. Apart from attach.py, since few calls have one."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import tty
from pathlib import Path

from dflash_ops.sandbox import kernel


class Terminal:
    """A pseudo-terminal of the container's own, standing in for those of descriptors 0, 1, 2 that are terminals."""

    def __init__(self, master: int, name: str, descriptors: list[int]) -> None:
        self.master = master
        self.name = name
        self.descriptors = descriptors

    @classmethod
    def open(cls, init_pid: int, descriptors: list[int]) -> "Terminal":
        root = Path(f"/proc/{init_pid}/root")
        master = os.open(root / "dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(master, kernel.TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, kernel.TIOCGPTN, b"\0" * 4))[0]
        # Opened by the machine's root; it has to be the container's root that owns it.
        os.chown(root / f"dev/pts/{number}", root.stat().st_uid, -1)
        return cls(master, f"/dev/pts/{number}", descriptors)

    def become_controlling(self) -> None:
        """In the child, inside the container: the slave becomes its terminal."""
        os.setsid()
        slave = os.open(self.name, os.O_RDWR)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for descriptor in self.descriptors:
            os.dup2(slave, descriptor)
        os.close(slave)
        os.close(self.master)

    def relay(self, child: int) -> None:
        """Copy bytes and window sizes between the outer terminal and ours until the child's side is closed."""
        outside = self.descriptors[0]

        def resized(_signal: int, _frame: object) -> None:
            self._copy_size(outside)

        signal.signal(signal.SIGWINCH, resized)
        self._copy_size(outside)
        saved = termios.tcgetattr(outside)
        reading = [self.master] + ([0] if 0 in self.descriptors else [])
        output = 1 if 1 in self.descriptors else outside
        try:
            tty.setraw(outside)
            while True:
                for ready in select.select(reading, [], [], 0.2)[0]:
                    if ready == self.master:
                        data = _read(self.master)
                        if not data:
                            return
                        _write_all(output, data)
                    else:
                        data = _read(0)
                        if data:
                            _write_all(self.master, data)
                        else:
                            reading.remove(0)
                if self.ended(child) and not select.select([self.master], [], [], 0)[0]:
                    return
        finally:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(outside, termios.TCSADRAIN, saved)

    @staticmethod
    def ended(child: int) -> bool:
        """Whether the child has ended; it stays to be waited for."""
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _copy_size(self, outside: int) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(outside, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""  # EIO: the other side of a pseudo-terminal is closed


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
