"""A folder of wheels, for a container that reaches no package index: which of them a build needs, what it lacks."""

import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import NotFoundError, PreflightError, VerificationError
from dflash_ops.release import printable
from dflash_ops.remote import transfer
from dflash_ops.remote.requirements import normal, same

_NAME = re.compile(
    r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)
_OLD_MANYLINUX = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_SHOWN = 5


@dataclass(frozen=True)
class Machine:
    """What a wheel must fit. python: (3, 11); machine: x86_64; glibc: (2, 36), None for another C library."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int] | None

    @classmethod
    def of(cls, facts: Mapping[str, str], glibc: str) -> "Machine":
        major, minor = (int(part) for part in facts["python_version"].split("."))
        numbers = [int(part) for part in glibc.split(".")[:2]] if re.match(r"\d+\.\d+", glibc) else []
        return cls((major, minor), facts["platform_machine"], (numbers[0], numbers[1]) if numbers else None)

    def takes(self, python: str, abi: str, platform: str) -> bool:
        """Whether a wheel with these tags, as its name spells them, can be installed."""
        own = f"cp{self.python[0]}{self.python[1]}"
        abis = set(abi.split("."))
        fits = False
        for tag in python.split("."):
            match = re.fullmatch(r"(cp|py)3(\d*)", tag)
            older = match is not None and (not match.group(2) or int(match.group(2)) <= self.python[1])
            fits |= (tag == own and bool(abis & {own, "abi3", "none"})) or (
                older and (tag.startswith("py") or "abi3" in abis)
            )
        return fits and any(self._runs_on(tag) for tag in platform.split("."))

    def _runs_on(self, platform: str) -> bool:
        if platform == "any":
            return True
        if not platform.endswith(f"_{self.machine}"):
            return False
        kind = platform.removesuffix(f"_{self.machine}")
        match = re.fullmatch(r"manylinux_(\d+)_(\d+)", kind)
        needs = (int(match.group(1)), int(match.group(2))) if match else _OLD_MANYLINUX.get(kind)
        if needs is not None:
            return self.glibc is not None and needs <= self.glibc
        return kind == "linux" or (self.glibc is None and kind.startswith("musllinux"))


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    place: Path
    tags: tuple[str, str, str]

    @property
    def unpacked_bytes(self) -> int:
        """VerificationError when it is no wheel."""
        try:
            with zipfile.ZipFile(self.place) as archive:
                return sum(entry.file_size for entry in archive.infolist())
        except (OSError, zipfile.BadZipFile) as error:
            where, why = printable(str(self.place)), getattr(error, "strerror", None) or str(error)
            raise VerificationError("that is no wheel", where=where, why=why, next="download it again") from error


def in_folder(folder: Path) -> list[Wheel]:
    """The wheels of a folder, by name. NotFoundError when there is none."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        why = error.strerror or str(error)
        raise NotFoundError("no such wheelhouse", where=printable(str(folder)), why=why, next="--wheels DIR") from error
    found: list[Wheel] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            tags = (match["python"], match["abi"], match["platform"])
            found.append(Wheel(normal(match["name"]), match["version"], folder / name, tags))
    if not found:
        how = "pip download --require-hashes -r trainer/requirements.lock -d DIR, where there is an index"
        raise NotFoundError("no wheel in the wheelhouse", where=printable(str(folder)), next=how)
    return found


def chosen(
    wheels: Iterable[Wheel],
    packages: Iterable[tuple[str, str, list[str]]],
    pinned: Mapping[str, str],
    machine: Machine,
    folder: Path,
) -> list[Wheel]:
    """The wheels to send. packages: name, version, `sha256:...` hashes of what is locked; pinned: what replaces it,
    whose own needs nobody has locked: with one, every other wheel that fits goes too.

    PreflightError names what is missing, VerificationError a wheel that is not the locked one."""
    fitting = [wheel for wheel in wheels if machine.takes(*wheel.tags)]
    taken: list[Wheel] = []
    missing: list[str] = []
    for name, version, hashes in [*packages, *((name, version, []) for name, version in pinned.items())]:
        found = [wheel for wheel in fitting if wheel.name == name and same(version, wheel.version)]
        taken += found
        if not found:
            others = sorted({wheel.version for wheel in wheels if wheel.name == name})
            missing.append(f"{name} {version}" + (f" (has {', '.join(others)})" if others else ""))
        elif hashes:
            _check_hashes(found, hashes)
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        python = ".".join(map(str, machine.python))
        raise PreflightError(
            "the wheelhouse lacks packages",
            where=printable(str(folder)),
            why=f"{', '.join(missing[:_SHOWN])}{more}, for Python {python} on {machine.machine}",
            next="pip download those there, for that Python, and run it again",
        )
    if pinned:
        names = {wheel.name for wheel in taken}
        taken += [wheel for wheel in fitting if wheel.name not in names]
    return taken


def _check_hashes(found: list[Wheel], hashes: list[str]) -> None:
    for wheel in found:
        with wheel.place.open("rb") as content:
            digest, _ = transfer.hashed(content, wheel.place.stat().st_size)
        if f"sha256:{digest.hexdigest()}" in hashes:
            return
    raise VerificationError(
        "a wheel is not the locked one",
        where=printable(str(found[0].place)),
        why=f"its sha256 is none of the {len(hashes)} in the lock",
        next="download it again",
    )
