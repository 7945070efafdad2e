"""What `nvidia-smi` prints, from values: pure. Formats as driver 580 gives them."""

from collections.abc import Callable
from dataclasses import dataclass

TOTAL_MIB = 24576
RESERVED_MIB = 310
DRIVER = "580.159.04"
NAME = "NVIDIA Sandbox GPU"
# The driver itself takes a little on a card that is in use: memory.used is not the sum of the processes.
OVERHEAD_MIB = 9


@dataclass(frozen=True)
class Holder:
    """A process charged with memory; name None: the process is dead and a descriptor of it lives on."""

    pid: int
    name: str | None
    mib: int


@dataclass(frozen=True)
class Gpu:
    """held_mib: all that is held, also by processes that the caller can't see (which holders lack)."""

    index: int
    uuid: str
    held_mib: int
    holders: list[Holder]

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.index + 1:02X}:00.0"

    @property
    def used_mib(self) -> int:
        return self.held_mib + OVERHEAD_MIB if self.held_mib else 0


# field -> (header, unit, value)
_GPU_FIELDS: dict[str, tuple[str, str, Callable[[Gpu], object]]] = {
    "timestamp": ("timestamp", "", lambda _: "2026/01/01 00:00:00.000"),
    "index": ("index", "", lambda gpu: gpu.index),
    "uuid": ("uuid", "", lambda gpu: gpu.uuid),
    "name": ("name", "", lambda _: NAME),
    "count": ("count", "", lambda _: 2),
    "pci.bus_id": ("pci.bus_id", "", lambda gpu: gpu.bus_id),
    "driver_version": ("driver_version", "", lambda _: DRIVER),
    "serial": ("serial", "", lambda gpu: f"000000000000{gpu.index}"),
    "pstate": ("pstate", "", lambda gpu: "P0" if gpu.held_mib else "P8"),
    "utilization.gpu": ("utilization.gpu", "%", lambda gpu: 50 if gpu.held_mib else 0),
    "utilization.memory": ("utilization.memory", "%", lambda gpu: 10 if gpu.held_mib else 0),
    "memory.used": ("memory.used", "MiB", lambda gpu: gpu.used_mib),
    "memory.free": ("memory.free", "MiB", lambda gpu: TOTAL_MIB - RESERVED_MIB - gpu.used_mib),
    "memory.total": ("memory.total", "MiB", lambda _: TOTAL_MIB),
    "memory.reserved": ("memory.reserved", "MiB", lambda _: RESERVED_MIB),
    "temperature.gpu": ("temperature.gpu", "", lambda gpu: 45 if gpu.held_mib else 31),
    "temperature.memory": ("temperature.memory", "", lambda _: "N/A"),
    "power.draw": ("power.draw", "W", lambda gpu: "120.50" if gpu.held_mib else "15.25"),
    "power.limit": ("power.limit", "W", lambda _: "300.00"),
    "enforced.power.limit": ("enforced.power.limit", "W", lambda _: "300.00"),
    "clocks.sm": ("clocks.current.sm", "MHz", lambda _: 1200),
    "clocks.mem": ("clocks.current.memory", "MHz", lambda _: 5000),
    "fan.speed": ("fan.speed", "%", lambda _: "[N/A]"),
    "compute_mode": ("compute_mode", "", lambda _: "Default"),
    "compute_cap": ("compute_cap", "", lambda _: "8.6"),
    "persistence_mode": ("persistence_mode", "", lambda _: "Enabled"),
    "mig.mode.current": ("mig.mode.current", "", lambda _: "[N/A]"),
    "ecc.mode.current": ("ecc.mode.current", "", lambda _: "Enabled"),
    "ecc.errors.corrected.volatile.total": ("ecc.errors.corrected.volatile.total", "", lambda _: 0),
    "ecc.errors.uncorrected.volatile.total": ("ecc.errors.uncorrected.volatile.total", "", lambda _: 0),
    "clocks_event_reasons.active": ("clocks_event_reasons.active", "", lambda _: "0x0000000000000001"),
    "gpu_recovery_action": ("gpu_recovery_action", "", lambda _: "None"),
    "power.default_limit": ("power.default_limit", "W", lambda _: "300.00"),
    "power.max_limit": ("power.max_limit", "W", lambda _: "350.00"),
    "remapped_rows.pending": ("remapped_rows.pending", "", lambda _: "No"),
    "pcie.link.gen.current": ("pcie.link.gen.current", "", lambda _: 4),
    "pcie.link.gen.max": ("pcie.link.gen.max", "", lambda _: 4),
    "pcie.link.width.current": ("pcie.link.width.current", "", lambda _: 16),
    "pcie.link.width.max": ("pcie.link.width.max", "", lambda _: 16),
}
_ALIASES = {
    "gpu_uuid": "uuid",
    "gpu_name": "name",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "clocks.current.sm": "clocks.sm",
    "clocks.current.memory": "clocks.mem",
    "clocks.gr": "clocks.sm",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}
_APP_FIELDS: dict[str, tuple[str, str, Callable[[Gpu, Holder], object]]] = {
    "timestamp": ("timestamp", "", lambda _gpu, _holder: "2026/01/01 00:00:00.000"),
    "gpu_name": ("gpu_name", "", lambda _gpu, _holder: NAME),
    "gpu_bus_id": ("gpu_bus_id", "", lambda gpu, _holder: gpu.bus_id),
    "gpu_serial": ("gpu_serial", "", lambda gpu, _holder: f"000000000000{gpu.index}"),
    "gpu_uuid": ("gpu_uuid", "", lambda gpu, _holder: gpu.uuid),
    "pid": ("pid", "", lambda _gpu, holder: holder.pid),
    "process_name": ("process_name", "", lambda _gpu, holder: holder.name or "[Not Found]"),
    "used_gpu_memory": ("used_gpu_memory", "MiB", lambda _gpu, holder: holder.mib),
}
_APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}


def smi(words: list[str], gpus: list[Gpu]) -> tuple[int, str]:
    """The exit code and the stdout of nvidia-smi called with `words`. Errors go to stdout too."""
    options: dict[str, str] = {}
    pending = list(words)
    while pending:
        word = pending.pop(0)
        key, equals, value = word.partition("=")
        if key in ("-i", "--id") and not equals:
            value = pending.pop(0) if pending else ""
        options["-i" if key == "--id" else key] = value
    if "-i" in options:
        chosen = options.pop("-i").split(",")
        gpus = [gpu for gpu in gpus if str(gpu.index) in chosen or gpu.uuid in chosen]
        if not gpus:
            return 6, "No devices were found\n"
    match sorted(options):
        case []:
            return 0, _table(gpus)
        case ["-L"] | ["--list-gpus"]:
            return 0, "".join(f"GPU {gpu.index}: {NAME} (UUID: {gpu.uuid})\n" for gpu in gpus)
        case ["--help-query-gpu"]:
            fields = "".join(f'"{field}"\nAs nvidia-smi gives it.\n\n' for field in _GPU_FIELDS)
            return 0, f'List of valid properties to query for the switch "--query-gpu=":\n\n{fields}'
        case ["--version"]:
            return 0, f"NVIDIA-SMI version  : {DRIVER}\nDRIVER version      : {DRIVER}\n"
        case ["--format", "--query-gpu"]:
            return _query_gpu(options["--query-gpu"], options["--format"].split(","), gpus)
        case ["--format", "--query-compute-apps"]:
            return _query_apps(options["--query-compute-apps"], options["--format"].split(","), gpus)
        case _:
            return 2, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"


def _query_gpu(query: str, style: list[str], gpus: list[Gpu]) -> tuple[int, str]:
    names = [name.strip() for name in query.split(",")]
    fields = [_GPU_FIELDS.get(_ALIASES.get(name, name)) for name in names]
    known = [field for field in fields if field is not None]
    if len(known) < len(fields):
        return _unknown(next(name for name, field in zip(names, fields, strict=True) if field is None))
    heads = [(header, unit) for header, unit, _ in known]
    return 0, _csv(heads, [[value(gpu) for _, _, value in known] for gpu in gpus], style)


def _query_apps(query: str, style: list[str], gpus: list[Gpu]) -> tuple[int, str]:
    names = [name.strip() for name in query.split(",")]
    fields = [_APP_FIELDS.get(_APP_ALIASES.get(name, name)) for name in names]
    known = [field for field in fields if field is not None]
    if len(known) < len(fields):
        return _unknown(next(name for name, field in zip(names, fields, strict=True) if field is None))
    heads = [(header, unit) for header, unit, _ in known]
    rows = [[value(gpu, holder) for _, _, value in known] for gpu in gpus for holder in gpu.holders]
    return 0, _csv(heads, rows, style)


def _unknown(name: str) -> tuple[int, str]:
    return 2, f'Field "{name}" is not a valid field to query.\n\n'


def _csv(heads: list[tuple[str, str]], rows: list[list[object]], style: list[str]) -> str:
    lines: list[str] = []
    if "noheader" not in style:
        lines.append(", ".join(f"{header} [{unit}]" if unit else header for header, unit in heads))
    for row in rows:
        units = [
            "" if "nounits" in style or not isinstance(value, int) else unit
            for value, (_, unit) in zip(row, heads, strict=True)
        ]
        lines.append(", ".join(f"{value} {unit}".rstrip() for value, unit in zip(row, units, strict=True)))
    return "".join(f"{line}\n" for line in lines)


def _table(gpus: list[Gpu]) -> str:
    lines = [f"NVIDIA-SMI {DRIVER}   Driver Version: {DRIVER}   CUDA Version: 13.0"]
    lines += [f"| {gpu.index}  {NAME}  {gpu.bus_id} | {gpu.used_mib}MiB / {TOTAL_MIB}MiB |" for gpu in gpus]
    lines += [
        f"| {gpu.index}  {holder.pid}  C  {holder.name or '[Not Found]'}  {holder.mib}MiB |"
        for gpu in gpus
        for holder in gpu.holders
    ]
    return "".join(f"{line}\n" for line in lines)
