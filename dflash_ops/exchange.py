"""A script in a container that we talk with: what it answers, its refusals as our errors, and why it fell silent."""

import getpass
import json
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from dflash_ops import answers
from dflash_ops.command import Container
from dflash_ops.conversation import Conversation
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

_ANSWER_SECONDS = 60.0
LOCK_TAKEN = 7  # flock's exit code, as gpu_locks asks for it


class Exchange:
    """talk: the conversation with the script; the other methods are the reading of it."""

    def __init__(self, shell: Shell, container: Container, talk: Conversation, taken: BusyError | None = None) -> None:
        self._shell, self._container, self.talk, self._taken = shell, container, talk, taken

    def say(self, request: dict[str, Any]) -> None:
        """One request. An ended script is no error here: the next answer tells."""
        self.talk.say(json.dumps(request).encode() + b"\n")

    def answer(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The next answer; raises its refusal, or why there is none."""
        while (line := self.talk.hear(timeout=timeout)) is not None:
            if (reply := self.read(line)) is not None:
                return reply
        raise self.why_ended()

    def answers_now(self) -> list[dict[str, Any]]:
        """Those that have come meanwhile; does not wait."""
        replies = [reply for line in self.talk.heard() if (reply := self.read(line)) is not None]
        if not replies and self.talk.ended:
            raise self.why_ended()
        return replies

    def read(self, line: bytes) -> dict[str, Any] | None:
        """A line as an answer, None for noise. Raises a refusal."""
        reply = answers.document(line)
        return None if reply is None else answers.accepted(reply, str(self._container))

    def why_ended(self) -> OpsError:
        """LinkLostError is raised at once: then nobody knows."""
        result = self.talk.finish()
        if self._taken is not None and result.code == LOCK_TAKEN:
            return self._taken
        error = self._shell.explain(self._container, result)
        return error if isinstance(error, PreflightError | NotFoundError) else answers.no_answer(result)


@contextmanager
def exchange(
    shell: Shell,
    container: Container,
    verb: str,
    parameters: dict[str, Any],
    *,
    what: str,
    host_prefix: tuple[str, ...] = (),
) -> Generator[Exchange, None, None]:
    """Starts a script of `remote/` and talks with it; it gets signs of life while the block runs.

    what: for the container's process list, before who asked and since when. host_prefix: as `gpu_locks.words` gives it;
    BusyError when a GPU is taken."""
    parameters = {"path": container.path, "client": client(), **parameters}
    mark = f"{what} by {client()} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    command = bundle.command(container.python, verb, parameters, mark=mark, host_prefix=host_prefix)
    with shell.converse(container, command, timeout=_ANSWER_SECONDS) as talk, talk.beating():
        taken = BusyError("a GPU is taken", where=str(container), next="dflash-ops gpu-status shows by whom")
        yield Exchange(shell, container, talk, taken if host_prefix else None)


def client() -> str:
    """Who we are, for those who have to wait for us."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
