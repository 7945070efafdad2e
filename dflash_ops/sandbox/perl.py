"""What every pct call owes to perl and to PVE's libraries: lost bytes, odd exit codes, the config lock, its time."""

import os
import time

from dflash_ops.sandbox import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

LOCK_SECONDS = 10.0
_BEGAN = time.monotonic()


class Failure(Exception):
    """The end of a pct call: text for stderr and the exit code, which perl's `die` takes from errno, else 255."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.code = code


def through_perl(words: list[bytes], environment: dict[bytes, bytes]) -> list[bytes]:
    """What arrives of the words: perl decodes them by the locale and encodes them again."""
    locale = next((environment[name] for name in (b"LC_ALL", b"LC_CTYPE", b"LANG") if environment.get(name)), b"C")
    utf8 = b"utf8" in locale.lower() or b"utf-8" in locale.lower()
    return [_decode_utf8(word) if utf8 else word.decode("ascii", "replace").encode() for word in words]


def _decode_utf8(word: bytes) -> bytes:
    """Valid UTF-8 as it is; a start byte with the continuation bytes it may claim becomes one U+FFFD, as in perl."""
    if word.isascii():
        return word
    out, at = bytearray(), 0
    while at < len(word):
        first = word[at]
        claimed = 1 if first < 0xC0 else (8 - (first ^ 0xFF).bit_length() if first < 0xFF else 13)
        end = at + 1
        while end < min(len(word), at + claimed) and 0x80 <= word[end] < 0xC0:
            end += 1
        piece = word[at:end]
        out += piece.decode("utf-8", "ignore").encode() or "\ufffd".encode()
        at = end
    return bytes(out)


def say(text: str) -> None:
    try:
        os.write(2, (text + "\n").encode("utf-8", "surrogateescape"))
    except OSError:
        pass


def take_time() -> None:
    """A real call costs 0.6 s whatever it does; `up --pct-delay` says how long ours takes at least."""
    try:
        with open(layout.PCT_DELAY) as file:
            rest = float(file.read()) - (time.monotonic() - _BEGAN)
    except (OSError, ValueError):
        return
    if rest > 0:
        time.sleep(rest)


class ConfigLock:
    """The container's config lock: waits ten seconds at most, and says so on stderr."""

    def __init__(self, vmid: int) -> None:
        self._path = f"{layout.LOCKS}/pve-config-{vmid}.lock"

    def __enter__(self) -> None:
        import fcntl  # only here and below: most calls lock nothing

        os.makedirs(layout.LOCKS, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.write(2, b"trying to acquire lock...")
            try:
                self._wait()
            except BaseException:
                os.close(self._descriptor)
                raise
            os.write(2, b" OK\n")

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _wait(self) -> None:
        import fcntl
        import signal

        def expired(*_: object) -> "NoReturn":
            raise TimeoutError

        previous = signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, LOCK_SECONDS)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except TimeoutError:
            raise Failure(f"can't lock file '{self._path}' - got timeout", 4) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
