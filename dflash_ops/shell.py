"""The one door to the world: commands on this machine, on a host, in a container; bytes in, bytes out, an exit code.

    with Shell() as shell:
        result = shell.run(container, Command(("nvidia-smi", "-L")))

One connection per host, opened when first needed and anew after a break, with many channels; safe to use from several
threads. A `Result` of a container's command means that the command ran in there: when the container is stopped or
missing, that is raised. A command in a container outlives its connection: TimedOutError and LinkLostError say that we
stopped waiting, not that it has ended.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from dflash_ops import framing, sudo
from dflash_ops.command import Command, Container, Host, Local, Place, Query, Result, Sudo, line, pct
from dflash_ops.connection import Connection
from dflash_ops.conversation import CODE_SECONDS, TICK_SECONDS, Conversation, Process, brief, feed_process, timed_out
from dflash_ops.errors import LinkLostError, NotFoundError, OpsError, PreflightError, UnreachableError, UsageFault
from dflash_ops.framing import Framed
from dflash_ops.gate import Gate, never_entered, no_config, no_container, node_command, not_entered
from dflash_ops.local_process import LocalProcess, on_terminal
from dflash_ops.upload import cat_command, not_sent, over_sftp, room_command, through_cat

if TYPE_CHECKING:
    from dflash_ops.ssh import Link

T = TypeVar("T")
OnBytes = Callable[[bytes], None]

_ASIDE_SECONDS = 15.0  # for a question of our own beside the caller's command
# On a terminal the words travel in the one line that sshd gives the login shell, and Linux takes no longer word.
_LONGEST_LINE = (1 << 17) - 1


class Shell:
    """The door. connect_timeout: seconds to be connected and logged in; command_timeout: seconds for a command to end,
    where the call does not say otherwise; on_break: takes a line when a verb goes on after a broken link (`again`)."""

    def __init__(
        self,
        *,
        connect_timeout: float = 15.0,
        command_timeout: float = 60.0,
        on_break: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._command_timeout = command_timeout
        self._on_break = on_break
        self._lock = threading.Lock()
        self._hosts: dict[Host, Connection] = {}
        self._token = secrets.token_hex(4)  # no login script prints it

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections. Whoever waits for one that is coming hears that at once."""
        with self._lock:
            hosts, self._hosts = self._hosts, {}
        for known in hosts.values():
            known.close()

    def again(self, error: UnreachableError) -> None:
        """For a verb that goes on after a broken link: says so, and the next command connects anew."""
        if isinstance(error, LinkLostError):  # else it is one more try in vain
            self._on_break(f"the connection broke ({error.where}); trying again")
        self.close()

    @staticmethod
    def load() -> None:
        """Loads the SSH library. For whoever connects in a thread: Python's threads would only take turns at it."""
        from dflash_ops.ssh import load

        load()

    def begin(self, host: Host) -> None:
        """Begins to connect in a thread. Whoever needs the connection next waits for it, or hears why there is none."""
        self._known(host).begin()

    # -- commands

    def run(self, place: Place, command: Command, *, timeout: float | None = None, check: bool = False) -> Result:
        """Runs a command to its end. With `check`, an exit code other than 0 raises OpsError with its last words.

        TimedOutError after `timeout` seconds; LinkLostError when the link breaks.
        """
        out, err = bytearray(), bytearray()
        limit = self._command_timeout if timeout is None else timeout

        def once(place: Place) -> Result:
            out.clear()
            err.clear()
            code = self._pump(place, command, out.extend, err.extend, None, total=limit)
            return Result(place, command, code, bytes(out), bytes(err))

        result = self._inside(place, once)
        if check and result.code != 0:
            raise _failed(result)
        return result

    def ask(self, place: Place, query: Query[T], *, timeout: float | None = None) -> T:
        """Runs a question and reads its answer."""
        return query.parse(self.run(place, query.command, timeout=timeout))

    def stream(
        self,
        place: Place,
        command: Command,
        *,
        on_out: OnBytes,
        on_err: OnBytes | None = None,
        stdin: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Runs a command and hands its output on as it comes; gives its exit code.

        stdin: a file descriptor to feed the command from, after its own stdin. timeout: the longest silence, in
        seconds; None waits for ever, as long as the host shows signs of life.
        """
        if stdin is not None and isinstance(place, Container):
            self._settle(place)  # live input can't be sent twice
        emit_err = on_err or _drop

        def once(place: Place) -> Result:
            gate = Gate(emit_err) if isinstance(place, Container) else None
            code = self._pump(place, command, on_out, gate or emit_err, stdin, idle=timeout)
            return Result(place, command, code, b"", bytes(gate.held) if gate else b"")

        result = self._inside(place, once)
        if result.err:
            emit_err(result.err)
        return result.code

    @contextlib.contextmanager
    def converse(
        self, place: Place, command: Command, *, timeout: float | None = None
    ) -> Generator[Conversation, None, None]:
        """A command that we talk with while it runs. Its stdin stays open, after command.stdin, until the block ends.

        The command speaks first: the block begins with its first words, or its end.
        timeout: the longest wait for a line, in seconds, unless `hear` says otherwise.
        """
        limit = self._command_timeout if timeout is None else timeout
        talk: Conversation | None = None

        def once(place: Place) -> Result:
            nonlocal talk
            if talk is not None:
                talk.end()
            process, head = self._start(place, command)
            talk = Conversation(place, command, process, limit)
            try:
                talk.say(head + command.stdin)
                return Result(place, command, 0, b"", b"") if talk.speaks() else talk.finish()
            except BaseException:
                talk.end()
                raise

        try:
            self._inside(place, once)
            assert talk is not None
            yield talk
        finally:
            if talk is not None:
                talk.end()

    def interactive(self, place: Place, command: Command) -> int:
        """Runs a command on the user's own terminal; gives its exit code."""
        from dflash_ops.terminal import attach, size

        command = replace(command, env={"TERM": os.environ.get("TERM", "xterm-256color"), **command.env})
        if isinstance(place, Local):
            return on_terminal(command)
        if isinstance(place, Container):
            place = self._settle(place)
        # No mark: what a login script prints is for whoever sits there.
        text = line(place, command, self._sudo(place, command), terminal=True).text
        if len(text) > _LONGEST_LINE:
            raise UsageFault(
                "the words are too long for a terminal",
                where=str(place),
                why=f"{len(text)} bytes; a command line there takes {_LONGEST_LINE}",
                next="put them into a file, or let the command have no terminal: | cat",
            )
        columns, rows = size()
        process = self._link(_host(place)).start(text, terminal=(command.env["TERM"], columns, rows))
        try:
            begin = attach(process)
            code = process.code(CODE_SECONDS)
            if code is None:
                raise timed_out(place, command, CODE_SECONDS)
        finally:
            process.end()
        if isinstance(place, Container):
            self._check_entered(place, Result(place, command, code, b"", begin))
        return code

    # -- files

    def send(
        self, host: Host, source: bytes | BinaryIO, remote_path: str, *, on_sent: Callable[[int], None] | None = None
    ) -> int:
        """Writes a file on the host, over SFTP where it has that, checks its size, and gives it. source: all of an open
        file, or bytes. on_sent: hears how many more bytes have left. A full disk raises PreflightError."""
        from dflash_ops.ssh import NoSftpError

        file = BytesIO(source) if isinstance(source, bytes) else source
        wanted = file.seek(0, os.SEEK_END)
        known = self._known(host)
        got, why = None, ""
        if not known.without_sftp:
            try:
                got, why = over_sftp(self._link(host), file, remote_path, wanted, on_sent)
            except NoSftpError:
                known.without_sftp = True
        if known.without_sftp:
            with self.converse(host, cat_command(remote_path)) as talk:
                got, why = through_cat(talk, file, on_sent)
        if got != wanted:
            raise not_sent(host, remote_path, wanted, why, self.run(host, room_command(remote_path)))
        return wanted

    # -- containers

    def explain(self, container: Container, result: Result) -> OpsError:
        """Why a command for a container failed: asks `pct status`, which tells stopped from missing."""
        host, vmid = container.host, container.vmid
        status = self.run(host, pct("status", str(vmid)), timeout=_ASIDE_SECONDS)
        if (error := not_entered(container, status)) is not None:
            return error
        if no_config(status):
            return no_container(container, status, self.run(host, node_command(vmid), timeout=_ASIDE_SECONDS))
        rights = self._known(host).rights
        if rights is not None and not (rights.sudo.everything or rights.sudo.pct):
            return sudo.pct_refused(container, rights)
        return _failed(result)

    def _inside(self, place: Place, once: Callable[[Place], Result]) -> Result:
        """Runs `once` at the place; by pct if it turns out that the host has no lxc-attach, or lets us use pct alone.
        Raises when the command never got into its container."""
        if not isinstance(place, Container):
            return once(place)
        if self._rights(place.host) is not None or self._known(place.host).has_lxc_attach is not None:
            place = self._settle(place)
        result = once(place)
        if result.code in (69, 127) and place.via == "lxc-attach" and self._known(place.host).has_lxc_attach is None:
            settled = self._settle(place)
            if settled != place:
                return self._inside(settled, once)
        self._check_entered(place, result)
        return result

    def _check_entered(self, container: Container, result: Result) -> None:
        """Raises when the command never got into its container."""
        if never_entered(result):
            error = self.explain(container, result)
            if isinstance(error, PreflightError | NotFoundError):
                raise error

    def _settle(self, container: Container) -> Container:
        """The container, by pct if its host has no lxc-attach or if that is all that sudo allows. Asks the host once.
        PreflightError when sudo allows nothing."""
        rights = self._rights(container.host)
        if rights is not None:
            return sudo.way(container, rights)
        if container.via == "pct":
            return container
        known = self._known(container.host)
        if known.has_lxc_attach is None:
            asked = self.run(container.host, Command(("sh", "-c", "command -v lxc-attach")), timeout=_ASIDE_SECONDS)
            known.has_lxc_attach = asked.code == 0
        return container if known.has_lxc_attach else replace(container, via="pct")

    # -- users who are not root

    def _rights(self, host: Host) -> sudo.Rights | None:
        """What sudo lets the login user do, asked once; None for root."""
        user = self._link(host).user
        if user == "root":
            return None
        known = self._known(host)
        with known.asking:
            if known.rights is None:
                known.rights = sudo.read(self.run(host, sudo.QUESTION, timeout=_ASIDE_SECONDS), user)
            return known.rights

    def lacks_pvesh(self, host: Host) -> str | None:
        """The login user's name, when sudo does not let them run pvesh there; for a host that answered already."""
        if self._known(host).link is None:
            return None
        rights = self._rights(host)
        return None if rights is None or rights.pvesh else rights.user

    def _sudo(self, place: Host | Container, command: Command) -> Sudo | None:
        """For `line`. PreflightError where pct is asked for and nothing is allowed."""
        if isinstance(place, Host) and not command.root:
            return None
        rights = self._rights(_host(place))
        if rights is None:
            return None
        if isinstance(place, Host) and command.argv[0] == "pct" and rights.refused:
            raise sudo.error(place, rights)
        return rights.sudo

    # -- underneath

    def _known(self, host: Host) -> Connection:
        with self._lock:
            return self._hosts.setdefault(host, Connection(host, self._connect_timeout))

    def _link(self, host: Host) -> "Link":
        """The open connection. One that was begun long ago may have broken since: then it is made once more."""
        link = self._known(host).connected()
        return link if link.is_open else self._known(host).connected()

    def _confirm(self, place: Place) -> None:
        """After a time-out: LinkLostError if it is the link that is silent."""
        if not isinstance(place, Local) and (link := self._known(_host(place)).link) is not None:
            link.confirm()

    def _start(self, place: Place, command: Command) -> tuple[Process, bytes]:
        """The running command, and the bytes that must precede its stdin."""
        if isinstance(place, Local):
            return LocalProcess(command), b""
        host = _host(place)
        text = line(place, command, self._sudo(place, command), token=self._token)
        return Framed(host, command, self._link(host).start(text.text), self._token), text.stdin_head

    def _pump(
        self,
        place: Place,
        command: Command,
        on_out: OnBytes,
        on_err: OnBytes,
        stdin: int | None,
        *,
        total: float | None = None,
        idle: float | None = None,
    ) -> int:
        """Runs a command with input and output at once, so that neither can block the other. Gives its exit code.

        total, idle: seconds for all of it, or for a silence, from when the login shell has begun it.
        """
        try:
            process, head = self._start(place, command)
        except FileNotFoundError:
            on_err(f"{command.argv[0]}: not found\n".encode("utf-8", "replace"))
            return 127
        except PermissionError as error:
            on_err(f"{command.argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
            return 126
        limit = total if total is not None else idle
        try:
            feed_process(process, head + command.stdin, stdin)
            starting = process if isinstance(process, Framed) else None
            deadline = time.monotonic() + framing.START_SECONDS if starting else _after(limit)
            ended = False
            while not ended:
                left = TICK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    self._confirm(place)
                    raise starting.too_slow() if starting else timed_out(place, command, limit or 0)
                out, err, ended = process.read(min(left, TICK_SECONDS))
                if starting and starting.started:
                    starting, deadline = None, _after(limit)
                if out:
                    on_out(out)
                if err:
                    on_err(err)
                if idle is not None and (out or err):
                    deadline = time.monotonic() + idle
            code = process.code(CODE_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.1))
            if code is None:
                raise timed_out(place, command, limit or CODE_SECONDS)
            return code
        finally:
            process.end()


def _after(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _drop(data: bytes) -> None:
    del data


def _host(place: Host | Container) -> Host:
    return place.host if isinstance(place, Container) else place


def _failed(result: Result) -> OpsError:
    return OpsError(f"{brief(result.command)} failed", where=str(result.place), why=result.last_words)
