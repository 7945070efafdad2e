"""A sandbox of these tests' own, since some of them stop its containers and change its files."""

import os
from collections.abc import Generator

import pytest
from api_client import connect
from proxmoxer import ProxmoxAPI
from sandbox_client import Client

from dflash_ops import sandbox
from dflash_ops.sandbox.state import SandboxState


@pytest.fixture(scope="session")
def proxmox() -> Generator[SandboxState]:
    """Ends with this process, however that ends."""
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    name = f"own-{os.getpid()}"
    yield sandbox.up(name, owner=os.getpid())
    sandbox.down(name)


@pytest.fixture(scope="session")
def client(proxmox: SandboxState) -> Generator[Client]:
    with Client(proxmox) as client:
        yield client


@pytest.fixture(scope="session")
def bot(proxmox: SandboxState) -> ProxmoxAPI:
    """The API as the user that dflash-ops is meant to be."""
    return connect(proxmox)


@pytest.fixture(scope="session")
def root(proxmox: SandboxState) -> ProxmoxAPI:
    """The API with all rights."""
    return connect(proxmox, "root@pam!full")
