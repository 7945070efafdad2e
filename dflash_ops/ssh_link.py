"""An open connection to a host: commands and SFTP over channels of it, and how a dead one is noticed."""

# paramiko carries no types: what comes from it is unknown to the checker. Its objects are Any in here, and none leaves
# this file.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from dflash_ops.command import Host
from dflash_ops.errors import LinkLostError, OpsError, TimedOutError
from dflash_ops.ssh_hop import Opened
from dflash_ops.ssh_library import paramiko

# Connections to one host, beside the first, for when its server allows no more sessions on one (MaxSessions).
MAX_FURTHER = 7
# Of two refusals at once paramiko keeps one, for whoever asks first; the other thread hears this.
_REFUSED_TOO = "Unable to open channel."


# A look round that comes so much too late was held up itself: by Ctrl-Z, by a machine that was busy or asleep.
_LATE_SECONDS = 3.0


class NoSftpError(OpsError):
    """The host gives no SFTP session: it has no such subsystem, or a login script talks into it."""


class Link:
    """One open connection to one host, with as many channels as asked for at once; `user` is who has logged in.

    One thread asks the server for a sign of life every 5 s, another closes the connection once the last word of it is
    15 s old: whatever anybody waits for on it ends then, so that a pulled cable and a frozen server are noticed.

    hops: the connections to the host and to the jumps before it, the host's last. again: opens them anew; used when
    the server allows no further session on this one.
    """

    def __init__(
        self,
        host: Host,
        hops: Sequence[Opened],
        again: Callable[[], Sequence[Opened]],
        *,
        keepalive_s: float,
        dead_after_s: float,
        further: int = MAX_FURTHER,
    ) -> None:
        self.host = host
        self._hops = hops
        self._transport: Any = hops[-1].transport
        self.user: str = self._transport.get_username()
        self._again, self._further_left = again, further
        self._keepalive_s, self._dead_after_s = keepalive_s, dead_after_s
        self._further: Link | None = None
        self._mutex = threading.Lock()  # of _further
        self._starting: dict[Any, float] = {}  # channels whose command is being started, and until when they may
        self._sessions = 0  # that were opened so far, or are being opened
        self._counting = threading.Lock()
        self._answered_at = time.monotonic()
        self._note_answers()
        self._closed = threading.Event()
        self._why_closed = "the connection was closed"
        for work in (self._keep_alive, self._watch):
            threading.Thread(target=work, name=f"{work.__name__.strip('_')} {host}", daemon=True).start()

    def _note_answers(self) -> None:
        """Counts every message as a sign of life: on a slow line our questions queue behind the data that we send."""
        packets: Any = self._transport.packetizer
        read: Callable[[], Any] = packets.read_message

        def noted() -> Any:
            message = read()
            self._answered_at = time.monotonic()
            return message

        packets.read_message = noted

    def _keep_alive(self) -> None:
        while not self._closed.wait(self._keepalive_s):
            with contextlib.suppress(Exception):  # a broken transport: `check` and the channels say so
                self._transport.global_request("keepalive@openssh.com", wait=True)  # returns when answered, or broken
            if not self._transport.is_active():
                return
            self._answered_at = time.monotonic()

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._keepalive_s / 5):
            now = time.monotonic()
            if (late_s := now - looked_at - self._keepalive_s / 5) > _LATE_SECONDS:
                # What was answered meanwhile has not been read: neither the link nor a command's start is late by that.
                self._answered_at = now
                for channel in list(self._starting):
                    with contextlib.suppress(KeyError):  # it has just started
                        self._starting[channel] += late_s
            looked_at = now
            for channel, until in list(self._starting.items()):
                if now > until:
                    with contextlib.suppress(Exception):  # a broken transport
                        channel.close()  # whoever waits for it hears of that
            silent_s = now - self._answered_at
            if silent_s > self._dead_after_s:
                self._why_closed = f"no sign of life for {silent_s:.0f} s"
                self.close()

    @property
    def is_open(self) -> bool:
        return bool(self._transport.is_active())

    def check(self) -> None:
        """Raises LinkLostError when the link is broken."""
        if not self.is_open:
            raise self.lost(self._why_closed)

    def confirm(self) -> None:
        """Waits while the link is silent for longer than it ever is, and raises LinkLostError if it is dead."""
        while self.is_open and time.monotonic() - self._answered_at > 2 * self._keepalive_s:
            self._closed.wait(self._keepalive_s / 5)
        self.check()

    def lost(self, why: str) -> LinkLostError:
        return LinkLostError(
            "the connection broke", where=str(self.host), why=why, next="run it again once the host answers"
        )

    def start(self, line: bytes, *, terminal: tuple[str, int, int] | None = None) -> "RemoteProcess":
        """Starts a line of shell text; `terminal` is (TERM, columns, rows) for a command that wants a tty."""
        link, channel = self._session()
        try:
            with link._bounded(channel):
                if terminal is not None:
                    channel.get_pty(*terminal)
                channel.exec_command(line)
        except (paramiko.SSHException, OSError, EOFError) as error:
            link.confirm()
            raise OpsError("the host refused to start a command", where=str(self.host), why=str(error)) from error
        return RemoteProcess(link, channel)

    def _session(self) -> "tuple[Link, Any]":
        """A new session's channel, and the link that it is on: this one, or a further one to the same host."""
        self.check()
        try:
            with self._counted():
                return self, self._transport.open_session(timeout=self._dead_after_s)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.confirm()  # no answer in time: of the host, or to this alone?
            if not isinstance(error, paramiko.ChannelException) and str(error) != _REFUSED_TOO:
                raise OpsError("the host refused to start a command", where=str(self.host), why=str(error)) from error
            if self._sessions == 0 or self._further_left == 0:  # it refuses not one more, but any
                why = getattr(error, "text", str(error))
                raise OpsError("the host refused a session", where=str(self.host), why=why) from error
        with self._mutex:
            if self._further is None or not self._further.is_open:
                self._further = Link(
                    self.host,
                    self._again(),
                    self._again,
                    keepalive_s=self._keepalive_s,
                    dead_after_s=self._dead_after_s,
                    further=self._further_left - 1,
                )
            further = self._further
        return further._session()

    @contextlib.contextmanager
    def _counted(self) -> Generator[None, None, None]:
        """Counts a session from before it is asked for: another thread's may be refused for it at once."""
        with self._counting:
            self._sessions += 1
        try:
            yield
        except BaseException:
            with self._counting:
                self._sessions -= 1
            raise

    @contextlib.contextmanager
    def _bounded(self, channel: Any) -> Generator[None, None, None]:
        """A time in which the server answers what is asked on a channel, or TimedOutError."""
        until = self._starting[channel] = time.monotonic() + self._dead_after_s
        try:
            yield
        except (paramiko.SSHException, OSError, EOFError) as error:
            if time.monotonic() > until and self.is_open:
                raise TimedOutError(
                    f"no answer within {self._dead_after_s:g} s",
                    where=str(self.host),
                    why="it answers, but starts no command",
                    next="look at its load and disks",
                ) from error
            raise
        finally:
            del self._starting[channel]

    @contextlib.contextmanager
    def sftp(self) -> Generator[paramiko.SFTPClient, None, None]:
        """An SFTP session whose every wait is bounded; a break of the link raises LinkLostError. NoSftpError when there
        is none to be had."""
        link, channel = self._session()
        client: paramiko.SFTPClient | None = None
        try:
            client = link._sftp_client(channel)
            yield client
        except TimeoutError as error:
            raise self.lost(f"no progress for {self._dead_after_s:.0f} s") from error
        except (paramiko.SSHException, paramiko.SFTPError, EOFError) as error:
            link.check()
            raise OpsError("SFTP failed", where=str(self.host), why=str(error)) from error
        except OSError:
            link.check()
            raise
        finally:
            with contextlib.suppress(Exception):  # the link may be gone
                channel.close() if client is None else client.close()

    def _sftp_client(self, channel: Any) -> paramiko.SFTPClient:
        try:
            with self._bounded(channel):
                channel.invoke_subsystem("sftp")
                channel.settimeout(self._dead_after_s)
                return paramiko.SFTPClient(channel)  # says hello, and waits for the answer
        except TimeoutError:
            raise
        except (paramiko.SSHException, paramiko.SFTPError, OSError, EOFError) as error:
            self.check()
            raise NoSftpError(
                "the host gives no SFTP session",
                where=str(self.host),
                why=str(error) or "it ended at once",
                next="let no login script print anything, and have `Subsystem sftp` in its sshd_config",
            ) from error

    def close(self) -> None:
        self._closed.set()
        if self._further is not None:
            self._further.close()
        for hop in reversed(self._hops):
            hop.close()


class RemoteProcess:
    """A command running behind a channel. `read` gives what has come; the code is known once `finished`."""

    def __init__(self, link: Link, channel: Any) -> None:
        self._link = link
        self._channel = channel
        self._news = News()
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.set_event(self._news)
        self._poll = select.poll()
        self._poll.register(self._news.fileno(), select.POLLIN)

    def read(self, seconds: float) -> tuple[bytes, bytes, bool]:
        """Waits at most `seconds` for output: new stdout, new stderr, and whether that was the end of both."""
        self._poll.poll(math.ceil(max(seconds, 0.0) * 1000))
        self._news.heard()
        ended = self._channel.eof_received or self._channel.closed  # before draining, so that nothing is missed
        out = self._channel.recv(1 << 20) if self._channel.recv_ready() else b""
        err = self._channel.recv_stderr(1 << 20) if self._channel.recv_stderr_ready() else b""
        if not ended:
            self._link.check()
        if ended or self._channel.recv_ready() or self._channel.recv_stderr_ready():
            self._news.set()  # there is more
        return out, err, bool(ended and not out and not err)

    def write(self, data: bytes, seconds: float | None = None) -> None:
        """Blocks while the other side does not read, at most `seconds` (TimeoutError); OSError once it has ended."""
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise BrokenPipeError(str(error)) from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it has ended already
            self._channel.shutdown_write()

    def code(self, seconds: float) -> int | None:
        """The exit code; None when there is none yet. LinkLostError when the link broke before it came."""
        if not self._channel.status_event.wait(seconds):
            self._link.check()
            return None
        code = int(self._channel.exit_status)
        if code == -1:
            # No code, but the link lives: a signal ended it on the host. ssh too says 255 then, and paramiko not which.
            self._link.check()
            return 255
        return code

    def resize(self, columns: int, rows: int) -> None:
        with contextlib.suppress(OSError, paramiko.SSHException):  # it has ended already
            self._channel.resize_pty(columns, rows)

    def fileno(self) -> int:
        return self._news.fileno()

    def end(self) -> None:
        self._channel.close()
        self._news.close()


class News:
    """An event of a channel's buffers that can be waited for by poll: output has come, or its end.

    Takes the place of paramiko's own, which the transport's thread may write to while another closes it: the write
    then fails, which ends the connection, or goes to whoever has the descriptor by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading, self._writing = os.pipe()
        self._set = self._closed = False

    def set(self) -> None:
        with self._lock:
            if not (self._set or self._closed):
                self._set = True
                os.write(self._writing, b".")

    def clear(self) -> None:
        """A buffer is empty, which does not say that the other one is."""

    def heard(self) -> None:
        """To be called before the buffers are looked at: what comes later is news again."""
        with self._lock:
            if self._set and not self._closed:
                os.read(self._reading, 1)
                self._set = False

    def fileno(self) -> int:
        return self._reading

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reading)
                os.close(self._writing)
