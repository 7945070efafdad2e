"""The door to Proxmox VE: one set of questions, asked over HTTPS with a token, or by pvesh over ssh as root.

    with proxmox.connect(shell, host) as api:
        api.get("cluster", "resources", type="vm")

Which way: HTTPS when the inventory has the host's [api] and there is a token for it; pvesh otherwise. Both give the
same data and raise the same errors.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_ops import proxmox_faults, proxmox_values
from dflash_ops.command import Command, Host
from dflash_ops.errors import LinkLostError, OpsError, TimedOutError, UnreachableError
from dflash_ops.proxmox_faults import Asked, NotTheApiError
from dflash_ops.proxmox_values import PVESH_VERBS, Call, Upid
from dflash_ops.shell import Shell

OnLog = Callable[[str], None]

# One call of pvesh on a quiet host takes 0.7 s.
_PVESH_SECONDS = 30.0
_POLL_SECONDS = 1.0
_LOG_LINES = 500
# How long a task's node may be silent before we stop waiting for the task.
_SILENT_SECONDS = 30.0


class Way(Protocol):
    """HTTPS or pvesh."""

    asked: Asked

    def ask(self, call: Call) -> Any: ...
    def close(self) -> None: ...


class Pvesh:
    """pvesh on the host, over ssh. It runs tasks itself and says their lines as they come."""

    def __init__(self, shell: Shell, host: Host) -> None:
        self.asked = Asked(f"{host}, by pvesh", None)
        self._shell, self._host = shell, host
        self._by_sudo = False

    def close(self) -> None:
        """The connection is the shell's."""

    def ask(self, call: Call) -> Any:
        out, err = bytearray(), bytearray()

        def run(command: Command) -> int:
            result = self._shell.run(self._host, command, timeout=_PVESH_SECONDS)
            out[:], err[:] = result.out, result.err
            return result.code

        code = self._as_root(call, run, err)
        if code != 0:
            raise proxmox_faults.pvesh_refused(self.asked, call, code, _text(err or out))
        try:
            return proxmox_values.printed_json(_text(out))
        except ValueError as error:
            raise OpsError(f"pvesh's answer to {call} is no JSON", where=str(self._host), why=str(error)) from error

    def run_task(self, call: Call, on_log: OnLog, seconds: float) -> str:
        """Begins a task and waits for it; gives its id, whether it went well or not. seconds: the longest silence."""
        lines = _Lines(lambda line: None if _is_upid(line) else on_log(line))
        err = bytearray()

        def run(command: Command) -> int:
            err.clear()
            return self._shell.stream(self._host, command, on_out=lines.take, on_err=err.extend, timeout=seconds)

        code = self._as_root(call, run, err)
        lines.end()
        upid = next((line for line in reversed(lines.seen) if _is_upid(line)), None)
        if upid is None:
            raise proxmox_faults.pvesh_refused(self.asked, call, code, _text(err) or "\n".join(lines.seen))
        return upid.strip().strip('"')

    def _as_root(self, call: Call, run: Callable[[Command], int], err: bytearray) -> int:
        """Runs it as root; by sudo for pvesh alone where the login user is another, and may do that but not all."""
        if not self._by_sudo:
            code = run(Command(_words(call), env={"LC_ALL": "C.UTF-8"}, root=True))
            self._by_sudo = code != 0 and proxmox_faults.needs_root(_text(err))
            if not self._by_sudo:
                return code
        return run(Command(("sudo", "-n", "--", "/usr/bin/pvesh", *_words(call)[1:])))


@dataclass(frozen=True)
class Task:
    """A task that went well. warnings: what `WARNINGS: n` counts."""

    upid: Upid
    warnings: int
    log: tuple[str, ...]


class Proxmox:
    """One hypervisor's API, whichever way it is asked. Every method raises OpsError."""

    def __init__(self, way: Way, host: Host) -> None:
        self.host = host
        self._way = way

    @property
    def asked(self) -> Asked:
        return self._way.asked

    @property
    def by_pvesh(self) -> bool:
        return isinstance(self._way, Pvesh)

    def get(self, *path: str | int, **parameters: str | int) -> Any:
        """The data of a question."""
        return self._way.ask(_call("get", path, parameters))

    def run(self, call: Call, doing: str, *, on_log: OnLog = lambda line: None, seconds: float = 600.0) -> Task:
        """Begins a task and waits for its end. doing: what it does, for errors. on_log: hears its log as it grows.

        OpsError says why it failed; TimedOutError that it still goes on after so many seconds."""
        deadline = time.monotonic() + seconds
        if isinstance(self._way, Pvesh):
            log: list[str] = []

            def hear(line: str) -> None:
                log.append(line)
                on_log(line)

            with _told_of_a_break(proxmox_faults.active_tasks(call), on_log):
                try:
                    upid = self._upid(call, self._way.run_task(call, hear, seconds))
                except TimedOutError as error:
                    raise proxmox_faults.task_silent(self.asked, doing, call, seconds) from error
                except (LinkLostError, NotTheApiError) as error:
                    raise proxmox_faults.task_unknown(self.asked, doing, call, error) from error
                try:
                    status = self._status(upid)
                except OpsError as error:
                    raise proxmox_faults.task_lost(self.asked, doing, upid, error) from error
                return self._judged(upid, doing, status, log)
        with _told_of_a_break(proxmox_faults.active_tasks(call), on_log):
            try:
                upid = self._upid(call, self._way.ask(call))
            except (LinkLostError, TimedOutError, NotTheApiError) as error:
                raise proxmox_faults.task_unknown(self.asked, doing, call, error) from error
        with _told_of_a_break(f"pvesh get /nodes/{upid.node}/tasks/{upid.text}/log", on_log):
            return self._followed(upid, doing, on_log, seconds, deadline)

    def _followed(self, upid: Upid, doing: str, on_log: OnLog, seconds: float, deadline: float) -> Task:
        log: list[str] = []
        silent_since: float | None = None
        while True:
            try:
                # In this order: what it says at its end is in the log that is read after it.
                status = self._status(upid)
                for line in self._log(upid, len(log)):
                    log.append(line)
                    if not line.startswith("TASK "):
                        on_log(line)
                silent_since = None
            except (UnreachableError, TimedOutError, NotTheApiError) as error:  # a proxy that restarts ends no task
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > _SILENT_SECONDS:
                    raise proxmox_faults.task_lost(self.asked, doing, upid, error) from error
                status = {}
            except OpsError as error:  # a right that is gone, another certificate: that will not pass
                raise proxmox_faults.task_lost(self.asked, doing, upid, error) from error
            if status.get("status") == "stopped":
                return self._judged(upid, doing, status, log)
            if time.monotonic() > deadline:
                raise proxmox_faults.task_too_long(self.asked, doing, upid, seconds)
            waited = time.monotonic() - deadline + seconds
            time.sleep(min(_POLL_SECONDS, max(0.05, waited / 5)))

    def _status(self, upid: Upid) -> dict[str, Any]:
        answer = self.get(*(path := ("nodes", upid.node, "tasks", upid.text, "status")))
        if not isinstance(answer, dict):
            raise proxmox_faults.not_the_api(self.asked, _call("get", path, {}), f"no status: {answer!r:.100}")
        return answer  # pyright: ignore[reportUnknownVariableType]

    def _log(self, upid: Upid, after: int) -> list[str]:
        """The lines after the first so many."""
        answer = self.get("nodes", upid.node, "tasks", upid.text, "log", start=after, limit=_LOG_LINES)
        return [text for number, text in proxmox_values.log_lines(answer) if number > after]

    def _judged(self, upid: Upid, doing: str, status: dict[str, Any], log: list[str]) -> Task:
        how = str(status.get("exitstatus", ""))
        if how == "OK":
            return Task(upid, 0, tuple(log))
        if how.startswith("WARNINGS:"):
            count = how.partition(":")[2].strip()
            return Task(upid, int(count) if count.isdigit() else 1, tuple(log))
        raise proxmox_faults.task_failed(self.asked, doing, upid, how or "it says not how it ended", log)

    def _upid(self, call: Call, answer: Any) -> Upid:
        try:
            return Upid.parse(str(answer))
        except ValueError as error:
            raise proxmox_faults.not_the_api(self.asked, call, str(error)) from error


@contextlib.contextmanager
def _told_of_a_break(look: str, on_log: OnLog) -> Generator[None, None, None]:
    """Ctrl-C ends our waiting, and no task. look: the command that shows it."""
    try:
        yield
    except KeyboardInterrupt:
        on_log(f"its task goes on there; on the host: {look}")
        raise


@contextlib.contextmanager
def connect(shell: Shell, host: Host) -> Generator[Proxmox, None, None]:
    """The host's API. ConfigError when its token can't be used; nothing is asked yet."""
    way = _way(shell, host)
    try:
        yield Proxmox(way, host)
    finally:
        way.close()


def _way(shell: Shell, host: Host) -> Way:
    if host.api is not None:
        from dflash_ops.proxmox_token import read_token

        token = read_token(host.api, host.name)
        if token is not None:
            from dflash_ops.proxmox_https import Https
            from dflash_ops.ssh import hostname

            return Https(host.api, host.api.address or hostname(host), token)
    return Pvesh(shell, host)


def post(*path: str | int, **parameters: str | int) -> Call:
    """A call that begins a task, for Proxmox.run."""
    return _call("post", path, parameters)


def delete(*path: str | int, **parameters: str | int) -> Call:
    return _call("delete", path, parameters)


def _words(call: Call) -> tuple[str, ...]:
    options = [f"--{key}={value}" for key, value in call.parameters.items()]
    return ("pvesh", PVESH_VERBS[call.method], "/" + "/".join(call.path), *options, "--output-format", "json")


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")


def _call(method: proxmox_values.Method, path: tuple[str | int, ...], parameters: dict[str, str | int]) -> Call:
    return Call(method, tuple(str(word) for word in path), parameters)


def _is_upid(line: str) -> bool:
    try:
        Upid.parse(line.strip().strip('"'))
    except ValueError:
        return False
    return True


class _Lines:
    """Bytes as they come, handed on as lines."""

    def __init__(self, on_line: OnLog) -> None:
        self.seen: list[str] = []
        self._on_line, self._rest = on_line, b""

    def take(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            text = line.decode("utf-8", "replace").rstrip("\r")
            self.seen.append(text)
            self._on_line(text)

    def end(self) -> None:
        if self._rest:
            self.take(b"\n")
