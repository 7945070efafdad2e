"""The GPUs that a container's configuration passes into it. Pure.

Three ways are in use, and may be mixed: `devN: /dev/nvidia0,mode=0666`, which permits the device by itself;
`lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,...`, which needs `lxc.cgroup2.devices.allow: c 195:* rwm` beside
it; and NVIDIA's hook, which reads NVIDIA_VISIBLE_DEVICES.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

_MAJOR = 195  # of /dev/nvidiaN and nvidiactl; those of nvidia-uvm and nvidia-caps change with boot and kernel
_GPU = re.compile(r"/dev/nvidia(\d+)")
_CAP = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)")
# A container needs these too before it can compute.
_NEEDED = {"/dev/nvidiactl": "nvidiactl", "/dev/nvidia-uvm": "nvidia-uvm"}
_MINOR_OF_CTL = 255
# The first two are for MIG's settings; a MIG instance has caps of higher numbers.
_CAPS_OF_SETTINGS = (1, 2)


@dataclass(frozen=True)
class PassedGpus:
    """minors: N of each /dev/nvidiaN; caps: N of each nvidia-capN (MIG); hook: what NVIDIA_VISIBLE_DEVICES says where
    NVIDIA's hook passes them; problems: what would keep a program from them, in words."""

    minors: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    hook: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.minors or self.hook)

    @property
    def mig(self) -> bool:
        """Whether MIG instances are passed."""
        return any(cap not in _CAPS_OF_SETTINGS for cap in self.caps)


def passed_gpus(config: Mapping[str, Any]) -> PassedGpus:
    """Reads a configuration as `/nodes/N/lxc/ID/config` gives it: keys, and the raw lines under `lxc`."""
    by_key = [_device_of_key(str(value)) for key, value in config.items() if re.fullmatch(r"dev\d+", key)]
    raw = list(_raw_lines(config))
    mounted = [source for key, value in raw if key == "lxc.mount.entry" if (source := _mounted_device(value))]
    every = {*by_key, *mounted}
    minors = {int(found[1]) for path in every if (found := _GPU.fullmatch(path))}
    caps = {int(found[1]) for path in every if (found := _CAP.fullmatch(path))}
    hook = _hook(raw)
    if hook is not None:
        minors |= {int(part) for part in hook.split(",") if part.isascii() and part.isdigit()}
    problems: list[str] = []
    if minors and hook is None:
        problems += [f"{name} is not passed" for path, name in _NEEDED.items() if path not in every]
    if hook is None:
        problems += _not_permitted(mounted, raw)
    return PassedGpus(tuple(sorted(minors)), tuple(sorted(caps)), hook, tuple(problems))


def index_of_minors(text: str) -> dict[int, int]:
    """Minor number -> nvidia-smi's index, from all of /proc/driver/nvidia/gpus/*/information: the index counts by place
    on the bus."""
    found: list[tuple[str, int]] = []
    bus = ""
    for line in text.split("\n"):
        key, _, value = line.partition(":")
        if key.strip() == "Bus Location":
            bus = value.strip().lower()
        elif key.strip() == "Device Minor" and value.strip().isdigit() and bus:
            found.append((bus, int(value)))
            bus = ""
    return {minor: index for index, (_, minor) in enumerate(sorted(found))}


def _device_of_key(value: str) -> str:
    """The path that `devN` names: its first word, or `path=`."""
    words = value.split(",")
    named = [word.removeprefix("path=") for word in words if word.startswith("path=")]
    return named[0] if named else words[0]


def _mounted_device(value: str) -> str | None:
    """The device that a mount entry binds."""
    words = value.split()
    if len(words) < 4 or not {"bind", "rbind"} & set(words[3].split(",")) or not words[0].startswith("/dev/nvidia"):
        return None
    return words[0]


def _hook(raw: list[tuple[str, str]]) -> str | None:
    if not any(key == "lxc.hook.mount" and value.rstrip().endswith("/nvidia") for key, value in raw):
        return None
    for key, value in raw:
        if key == "lxc.environment" and value.startswith("NVIDIA_VISIBLE_DEVICES="):
            return value.partition("=")[2].strip() or None
    return None


def _not_permitted(mounted: list[str], raw: list[tuple[str, str]]) -> list[str]:
    """Which mounted devices the device cgroup would refuse."""
    allowed = [rule for key, value in raw if key == "lxc.cgroup2.devices.allow" if (rule := _rule(value))]
    problems: list[str] = []
    for path in mounted:
        gpu = _GPU.fullmatch(path)
        minor = int(gpu[1]) if gpu else _MINOR_OF_CTL if path == "/dev/nvidiactl" else None
        if minor is not None and not any(
            major in ("*", str(_MAJOR)) and it in ("*", str(minor)) for major, it in allowed
        ):
            problems.append(f"{path} is mounted, but no lxc.cgroup2.devices.allow permits {_MAJOR}:{minor}")
    if "/dev/nvidia-uvm" in mounted and not any(major != str(_MAJOR) for major, _ in allowed):
        problems.append("/dev/nvidia-uvm is mounted, but no lxc.cgroup2.devices.allow permits it")
    if problems and any(key == "lxc.cgroup.devices.allow" for key, _ in raw):
        problems.append("lxc.cgroup.devices.allow does nothing since Proxmox VE 7: write lxc.cgroup2.devices.allow")
    return problems


def _rule(value: str) -> tuple[str, str] | None:
    """(major, minor) that a rule permits to read and to write; * for any."""
    words = value.split()
    if words[:1] == ["a"]:
        return "*", "*"
    if len(words) != 3 or words[0] != "c" or not {"r", "w"} <= set(words[2]):
        return None
    major, colon, minor = words[1].partition(":")
    return (major, minor) if colon else None


def _raw_lines(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    listed = config.get("lxc")
    for pair in cast(list[Any], listed) if isinstance(listed, list) else []:
        if isinstance(pair, list) and len(cast(list[Any], pair)) == 2:
            yield str(pair[0]), str(pair[1])  # pyright: ignore[reportUnknownArgumentType]
