"""What an inventory may say, key by key: the shape that its TOML is checked against, and the JSON schema for editors.

Pure: nothing here looks at a file or another table; what must hold between tables is in `inventory_faults`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

# Letters and digits of any script: a name is a word of --on, where commas part them, and part of a file's name.
NAME = r"^\w[\w.-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
Word = Annotated[str, StringConstraints(min_length=1)]
Index = Annotated[int, Field(ge=0, le=4095)]


SANDBOX = "sandbox"  # as a container's `python`: the sandbox's own


class _Table(BaseModel):
    # No input in pydantic's own texts: a traceback may show them, and a file may hold a secret where none belongs.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class ApiTable(_Table):
    """[hosts.NAME.api]: the host's Proxmox VE API. The token's secret stands in a variable or a file, never here."""

    address: str | None = Field(
        default=None, pattern=r"^[^\s@/]+$", description="Where the API listens. Default: the host's own address."
    )
    port: int = Field(8006, ge=1, le=65535, description="The API's port.")
    user: str | None = Field(
        default=None,
        pattern=r"^[^\s!=:/]+@[\w.-]+$",
        description='The user the token belongs to, with its realm: "bot@pve".',
    )
    token_name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z][\w.-]*$",
        description='The token\'s name: what follows the "!" of bot@pve!dflash.',
    )
    token_env: str = Field(
        "DFLASH_OPS_PVE_TOKEN",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="The environment variable that holds the token's secret.",
    )
    token_file: Word | None = Field(
        default=None, description="A file of mode 0600 that holds the token's secret. Relative to the inventory."
    )
    ca: Word | None = Field(
        default=None,
        description="The certificate authority of the node (its /etc/pve/pve-root-ca.pem). Relative to the inventory.",
    )
    fingerprint: str | None = Field(
        default=None,
        pattern=r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){31}$",
        description='Instead of `ca`: the SHA-256 fingerprint of the certificate, "AA:BB:...".',
    )
    node: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$",
        description="The node's name in its cluster. Default: asked for.",
    )


class HostTable(_Table):
    """[hosts.NAME]: either `sandbox`, or `address` and what ssh's own configuration does not say of it."""

    address: str | None = Field(
        default=None, pattern=r"^[^\s@]+$", description="A host name, an address, or an alias of ~/.ssh/config."
    )
    port: int | None = Field(default=None, ge=1, le=65535, description="The port of its ssh server.")
    user: str | None = Field(
        default=None,
        pattern=r"^[^\s@-][^\s@]*$",
        description="Who logs in. Someone else than root needs `sudo -n` there.",
    )
    key: Word | None = Field(default=None, description="The private key. Relative to the inventory.")
    known_hosts: Word | None = Field(
        default=None, description="The file that knows the host's key. Relative to the inventory."
    )
    ssh_config: Word | None = Field(
        default=None, description="Read instead of ~/.ssh/config, as `ssh -F` does. Relative to the inventory."
    )
    sandbox: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$",
        description="Instead of all else: the name of a running `dflash-ops sandbox`.",
    )
    api: ApiTable | None = None

    @model_validator(mode="after")
    def _one_way_there(self) -> "HostTable":
        if self.sandbox is None and self.address is None:
            raise ValueError("needs `address`, or `sandbox`")
        if self.sandbox is not None and self.model_fields_set != {"sandbox"}:
            others = ", ".join(sorted(self.model_fields_set - {"sandbox"}))
            raise ValueError(f"`sandbox` says all there is to say; remove: {others}")
        return self


class PinsTable(_Table):
    """[containers.NAME.pins]: what its environment has instead of what the release's lock says."""

    torch: str | None = Field(
        default=None,
        pattern=r"^(cpu|cu\d{3}|\d[\w.+!]*)$",
        description='Another build of the locked torch ("cu126", "cpu"), or a whole version ("2.12.1+cu126").',
    )
    cuda_index: str | None = Field(
        default=None,
        pattern=r"^(https?|file)://\S+$",
        description="The package index that has that torch; PyTorch's site names one for each CUDA.",
    )
    transformers: str | None = Field(
        default=None, pattern=r"^\d[\w.+!]*$", description="Another version of transformers."
    )


class ContainerTable(_Table):
    """[containers.NAME]: an LXC container on one of the hosts, and where the trainer lives in it."""

    host: str = Field(description="The name of its host in this file.")
    vmid: int = Field(ge=100, le=999_999_999, description="Its number, as `pct list` shows it.")
    path: str = Field(
        "/opt/dflash",
        pattern=r"^/[^\x00]*[^\x00/]$",
        description="Its folder in the container: releases, runs, shared and env lie in it.",
    )
    python: Word = Field(
        "python3",
        description="What `env sync` makes the trainer's environment of; it runs the trainer where none was made.",
    )
    user: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*\$?$",
        description="Who runs the trainer in the container. Default: root.",
    )
    gpus: list[Index] = Field(
        [], description="The host's numbers of its GPUs, in the order in which the container sees them."
    )
    via: Literal["lxc-attach", "pct"] = Field(
        "lxc-attach", description='How commands enter it; "pct" where lxc-attach may not be called.'
    )
    env_check: bool = Field(True, description="Whether `train start` compares its packages with the release's lock.")
    pins: PinsTable = PinsTable()


class InventoryFile(_Table):
    """An inventory of dflash-ops: hosts, the containers on them, and groups of those."""

    default: str | None = Field(default=None, description="The container meant when none is named.")
    source: Word | None = Field(default=None, description="What `deploy` sends. Relative to this file.")
    hosts: dict[Name, HostTable] = Field({}, description="The hypervisors, by a name of your choice.")
    containers: dict[Name, ContainerTable] = Field({}, description="The containers, by a name of your choice.")
    groups: dict[Name, Annotated[list[str], Field(min_length=1)]] = Field(
        {}, description="Names for several: of containers, hosts (all containers there) and other groups."
    )
