"""What `up` tells the sandbox's processes: one value, sent as JSON on the guard's stdin."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Settings:
    """name, folder: the sandbox's name and its state folder
    owner: pid and raw start time of the process to end with, or None
    pct_delay: the least seconds that a pct call takes
    lxc_attach: whether the hypervisor has the program lxc-attach
    disks: "host" or a vmid -> size as tmpfs takes it ("64M")
    without: vmid -> names of programs which that container lacks
    binds: folders that show, read-only, at their own path everywhere: the trainer's Python, and what the user adds
    models: folder to show at /opt/dflash/shared/models, or None
    python: the trainer's Python; base_python: the interpreter that the sandbox's own programs run by
    stdlib: folder of that interpreter's standard library, where containers find sitecustomize.py
    fake_gpus: how many nodes stand in for GPUs; 0 where the machine has its own
    nvidia_smi: the machine's own nvidia-smi, when it is not where programs usually are
    libraries: folders of the machine (a GPU driver's) that its loader finds by LD_LIBRARY_PATH alone
    """

    name: str
    folder: str
    python: str
    base_python: str
    stdlib: str
    owner: tuple[int, int] | None = None
    pct_delay: float = 0.0
    lxc_attach: bool = True
    disks: dict[str, str] = field(default_factory=dict[str, str])
    without: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    binds: list[str] = field(default_factory=list[str])
    models: str | None = None
    fake_gpus: int = 0
    nvidia_smi: str | None = None
    libraries: list[str] = field(default_factory=list[str])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        data = json.loads(text)
        data["owner"] = tuple(data["owner"]) if data["owner"] else None
        return cls(**data)
