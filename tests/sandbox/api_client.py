"""Clients of the sandbox's API for its tests: proxmoxer with a token, HTTP as it comes, and what a fault said."""

import json
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from typing import Any

import pytest
from proxmoxer import ProxmoxAPI, ResourceException
from sandbox_client import retry_until

from dflash_ops.sandbox.faults import set_faults
from dflash_ops.sandbox.state import SandboxState

BOT = "bot@pve!dflash"
FORM = "application/x-www-form-urlencoded"


def secret(state: SandboxState, token: str) -> str:
    return (state.api_tokens / token).read_text()


def connect(state: SandboxState, token: str = BOT, value: str | None = None, **options: Any) -> ProxmoxAPI:
    user, _, name = token.partition("!")
    known = {"verify_ssl": str(state.api_ca), "timeout": 20, **options}
    value = secret(state, token) if value is None else value
    return ProxmoxAPI("127.0.0.1", port=state.api_port, user=user, token_name=name, token_value=value, **known)


def refusal(call: Callable[[], object]) -> tuple[int, str, object]:
    """The code, the reason phrase and the `errors` of a call that must fail."""
    with pytest.raises(ResourceException) as caught:
        call()
    return caught.value.status_code, caught.value.content, caught.value.errors


@dataclass(frozen=True)
class Raw:
    """An answer of HTTP as it came."""

    code: int
    reason: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def raw(
    state: SandboxState, method: str, path: str, token: str | None = BOT, body: str | None = None, kind: str = FORM
) -> Raw:
    headers = {} if token is None else {"Authorization": f"PVEAPIToken={token}={secret(state, token)}"}
    if body is not None:
        headers["Content-Type"] = kind
    context = ssl.create_default_context(cafile=state.api_ca)
    connection = HTTPSConnection("127.0.0.1", state.api_port, context=context, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return Raw(answer.status, answer.reason, dict(answer.headers), answer.read())
    finally:
        connection.close()


@contextmanager
def wrong(state: SandboxState, **faults: Any) -> Generator[None]:
    """With these faults, and without any afterwards."""
    set_faults(state.init_pid, **faults)
    try:
        yield
    finally:
        set_faults(state.init_pid)


def done(api: ProxmoxAPI, upid: str) -> dict[str, Any]:
    """A task's status once it has stopped."""
    status = api.nodes(upid.split(":")[1]).tasks(upid).status
    retry_until(lambda: status.get()["status"] == "stopped", 60)
    return status.get()


def log(api: ProxmoxAPI, upid: str) -> list[str]:
    return [row["t"] for row in api.nodes(upid.split(":")[1]).tasks(upid).log.get()]
