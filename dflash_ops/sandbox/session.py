"""One SSH session: a shell that runs a command, on pipes or on a pseudo-terminal, as OpenSSH's sshd starts it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (paramiko carries no types.)

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass

import paramiko

SHELL = "/bin/bash"
HOME = "/root"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 1 << 15


@dataclass(frozen=True)
class WindowSize:
    rows: int
    columns: int
    width: int = 0
    height: int = 0


class Session:
    """The state of one session channel, from its opening to the end of its command."""

    def __init__(self, addresses: tuple[str, int, str, int]) -> None:
        client, client_port, server, server_port = addresses
        self.closed = False
        self.environment = {
            "HOME": HOME,
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": SHELL,
            "PATH": PATH,
            "SSH_CLIENT": f"{client} {client_port} {server_port}",
            "SSH_CONNECTION": f"{client} {client_port} {server} {server_port}",
        }
        self._master: int | None = None
        self._slave: int | None = None

    def want_terminal(self, term: str, size: WindowSize) -> None:
        """Give the session a pseudo-terminal; before the command is started."""
        self._master, self._slave = os.openpty()
        self.environment["TERM"] = term
        self.environment["SSH_TTY"] = os.ttyname(self._slave)
        self.resize(size)

    def resize(self, size: WindowSize) -> None:
        if self._master is not None:
            with contextlib.suppress(OSError):
                packed = struct.pack("HHHH", size.rows, size.columns, size.width, size.height)
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, packed)

    def start(self, channel: paramiko.Channel, command: bytes | None) -> bool:
        """Start the login shell with `command`, or for a person (None); its end closes the channel."""
        words: list[bytes] = [b"-bash"] if command is None else [b"bash", b"-c", command]
        try:
            if self._slave is None:
                process = subprocess.Popen(
                    words,
                    executable=SHELL,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self.environment,
                    cwd=HOME,
                    start_new_session=True,
                    bufsize=0,
                )
            else:
                # `setsid --ctty` makes the terminal the controlling one, which Popen can't.
                login = [b"--login"] if command is None else words[1:]
                process = subprocess.Popen(
                    [b"setsid", b"--ctty", SHELL.encode(), *login],
                    stdin=self._slave,
                    stdout=self._slave,
                    stderr=self._slave,
                    env=self.environment,
                    cwd=HOME,
                )
                os.close(self._slave)
        except OSError:
            self.closed = True
            return False
        threading.Thread(target=self._carry, args=(channel, process), daemon=True).start()
        return True

    def _carry(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        """Carry the command's bytes until its output ends, report how it ended, close the channel."""
        try:
            if self._master is None:
                self._carry_pipes(channel, process)
            else:
                self._carry_terminal(channel, process, self._master)
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.close()
            self.closed = True
            process.wait()

    def _carry_pipes(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout and process.stderr
        into, out, err = process.stdin, process.stdout, process.stderr
        threads = [
            threading.Thread(target=_feed, args=(channel, into.fileno(), into.close), daemon=True),
            threading.Thread(target=_drain, args=(err.fileno(), channel.sendall_stderr), daemon=True),
            threading.Thread(target=_drain, args=(out.fileno(), channel.sendall), daemon=True),
        ]
        for thread in threads:
            thread.start()
        # As sshd: the status as soon as the shell has ended, the end of the channel when nobody holds its output.
        process.wait()
        for thread in threads[1:]:
            thread.join()
        _report(channel, process)
        for stream in (out, err):
            stream.close()

    def _carry_terminal(self, channel: paramiko.Channel, process: subprocess.Popen[bytes], master: int) -> None:
        feeder = threading.Thread(target=_feed, args=(channel, master, lambda: None), daemon=True)
        feeder.start()
        drainer = threading.Thread(target=_drain, args=(master, channel.sendall), daemon=True)
        drainer.start()
        feeder_gone = threading.Event()

        def watch() -> None:
            feeder.join()
            feeder_gone.set()

        threading.Thread(target=watch, daemon=True).start()
        while process.poll() is None and not (feeder_gone.wait(0.02) and channel.closed):
            pass
        if process.poll() is None:
            os.close(master)  # the client hung up: so does the terminal, and its session gets SIGHUP
            self._master = None
            return
        drainer.join(2)
        _report(channel, process)
        self._master = None
        os.close(master)


def _feed(channel: paramiko.Channel, descriptor: int, close: Callable[[], None]) -> None:
    """The client's bytes to the command, then end of file."""
    with contextlib.suppress(OSError, EOFError):
        while data := channel.recv(_CHUNK):
            while data:
                data = data[os.write(descriptor, data) :]
    with contextlib.suppress(OSError):
        close()


def _drain(descriptor: int, send: Callable[[bytes], None]) -> None:
    """The command's bytes to the client."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while data := os.read(descriptor, _CHUNK):
            send(data)


def _report(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if code >= 0:
            channel.send_exit_status(code)
        else:
            _send_exit_signal(channel, -code)


def _send_exit_signal(channel: paramiko.Channel, number: int) -> None:
    """RFC 4254, section 6.10: paramiko has a method for the status only."""
    message = paramiko.Message()
    message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(signal.Signals(number).name.removeprefix("SIG"))
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    channel.transport._send_user_message(message)
