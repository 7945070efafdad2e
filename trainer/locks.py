"""One process at a time: a lock that lies beside what it guards, and goes away with its holder, however that ends."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Generator
from pathlib import Path


class Locked(OSError):
    """Another process has it."""


@contextlib.contextmanager
def locked(lock: Path, what: str) -> Generator[None]:
    """Holds a lock file for the time of the block. Raises Locked, at once, naming `what` and its holder.

    The file's content is for people. On a file system without locks there is none: the block then runs all the same.
    """
    descriptor = _taken(lock, what)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        # First the name: whoever opens it from now on makes a file of their own, and whoever has this one open finds
        # that it has no name.
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _taken(lock: Path, what: str) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.lexists(lock) and os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise Locked(f"{what} is in use by {holder}: wait for it, or end it first") from error
        except FileNotFoundError:
            pass  # unlinked between the two looks
        except OSError as error:
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)
