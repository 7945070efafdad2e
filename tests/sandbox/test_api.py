"""The sandbox's Proxmox API, asked through proxmoxer as users ask it: each row of what a real one was seen to answer."""

import pytest
from proxmoxer import ProxmoxAPI

from dflash_ops.sandbox.state import SandboxState


def connect(
    state: SandboxState, token: str = "bot@pve!dflash", secret: str | None = None, **options: object
) -> ProxmoxAPI:
    user, _, name = token.partition("!")
    return ProxmoxAPI(
        "127.0.0.1",
        port=state.api_port,
        user=user,
        token_name=name,
        token_value=secret or (state.api_tokens / token).read_text(),
        verify_ssl=str(state.api_ca),
        timeout=20,
        **options,
    )


@pytest.fixture(scope="session")
def bot(proxmox: SandboxState) -> ProxmoxAPI:
    return connect(proxmox)


def test_the_version(bot: ProxmoxAPI) -> None:
    version = bot.version.get()
    assert set(version) == {"release", "version", "repoid"} and version["version"].startswith(version["release"])
