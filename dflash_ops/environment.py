"""env sync, check, warm, list, prune: the packages that the trainer runs with, in the container."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_ops import answers, data, gpu_locks, wheels
from dflash_ops.command import Container, Query
from dflash_ops.deployed import Kept, Pruned
from dflash_ops.errors import PreflightError
from dflash_ops.exchange import client, exchange
from dflash_ops.progress import Progress
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

_PATIENCE_SECONDS = 5.0
_ASK_SECONDS = 90.0
_PRUNE_SECONDS = 600.0  # one with torch is 5 GB in 30,000 files


@dataclass(frozen=True)
class Row:
    """One thing that a release wants, and what there is. wanted: None when nothing is; has: None when it is not
    there."""

    name: str
    wanted: str | None
    has: str | None
    ok: bool


@dataclass(frozen=True)
class Checked:
    """python: the interpreter that was looked at; environment: its id, None for a Python that is not ours."""

    container: str
    release: str
    environment: str | None
    python: str
    ok: bool
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Environment:
    """One environment. whole: its build was finished; used_by: living runs, and "env warm"; size:
    bytes."""

    id: str
    current: bool
    whole: bool
    made_at: str | None
    release: str | None
    python: str | None
    torch: str | None
    transformers: str | None
    size: int | None
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Synced:
    """made: whether it had to be built; previous: the one that was current before, which is kept; sent: bytes of
    wheels; need_bytes: the room that was asked for (0: nothing was built)."""

    container: str
    environment: str
    made: bool
    previous: str | None
    release: str
    installer: str | None
    python: str | None
    torch: str | None
    transformers: str | None
    size: int | None
    sent: int
    need_bytes: int
    seconds: float


@dataclass(frozen=True)
class WarmedUp:
    """devices: what the trainer says of each: device, state before, graphs compiled and found, seconds; saved_seconds:
    what a start needs less from now on, measured by warming up once more; None when nothing was compiled."""

    container: str
    release: str
    cache: str | None
    devices: tuple[Mapping[str, Any], ...]
    seconds: float
    saved_seconds: float | None


def wanted(container: Container) -> dict[str, Any]:
    """What the scripts in the container are told of its environment."""
    return {"pins": asdict(container.pins), "check": container.env_check, "gpus": bool(container.gpus)}


def check(shell: Shell, container: Container, release: str | None = None) -> Checked:
    """Compares what the trainer would run with, with what a release (the current one) wants."""
    reply = shell.ask(container, _query(container, {"do": "check", "release": release}), timeout=_ASK_SECONDS)
    rows = tuple(Row(**row) for row in reply["rows"])
    return Checked(
        str(container), reply["release"], reply["environment"], reply["python"], all(row.ok for row in rows), rows
    )


def list_all(shell: Shell, container: Container) -> list[Environment]:
    """The container's environments, the oldest first."""
    reply = shell.ask(container, _query(container, {"do": "list"}))
    return [_environment(each) for each in reply["environments"]]


def prune(shell: Shell, container: Container, keep: int, *, dry_run: bool = False) -> Pruned:
    """Removes all but the newest `keep` environments; never the current one, or one that a run or a warm-up uses.
    BusyError while a sync goes on."""
    common = {"path": container.path, "client": client(), "patience": _PATIENCE_SECONDS}
    parameters = {**common, "do": "prune", "keep": keep, "dry_run": dry_run}
    command = bundle.command(container.python, "venv", parameters)
    reply = shell.ask(container, Query(command, answers.answer), timeout=_PRUNE_SECONDS)
    kept = tuple(Kept(item["id"], item["why"]) for item in reply["kept"])
    return Pruned(str(container), dry_run, tuple(reply["removed"]), kept, reply["freed_bytes"])


def _environment(record: Mapping[str, Any]) -> Environment:
    same = ("id", "current", "whole", "made_at", "release", "python", "torch", "transformers")
    return Environment(**{key: record[key] for key in same}, size=record["bytes"], used_by=tuple(record["used_by"]))


def _query(container: Container, parameters: dict[str, Any]) -> Query[dict[str, Any]]:
    common = {"path": container.path, "python": container.python, **wanted(container)}
    return Query(bundle.command(container.python, "environment", {**common, **parameters}), answers.answer)


def sync(
    shell: Shell,
    container: Container,
    release: str | None = None,
    *,
    wheelhouse: Path | None = None,
    progress: Progress | None = None,
    on_build: Callable[[str], None] | None = None,
) -> Synced:
    """Makes the environment that a release (the current one) wants the current one: built when it is not there.

    wheelhouse: a folder of wheels, for a container that reaches no index; on_build: hears what is built, and by what,
    instead of `progress`: it takes a minute. PreflightError before anything is built when
    it lacks one, or there is no room; and when pip or uv fails. BusyError while another sync goes on."""
    progress, begun = progress or Progress(), time.monotonic()
    house = wheels.in_folder(wheelhouse) if wheelhouse else []
    parameters = {**wanted(container), "do": "sync", "release": release, "patience": _PATIENCE_SECONDS}
    progress.step(f"asking {container}")
    sent = need = 0
    installer = None
    with exchange(shell, container, "venv", parameters, what="env sync") as other:
        reply = other.answer()
        if reply["event"] == "plan":
            installer = reply["installer"]
            folder = None
            need = reply["need_bytes"]
            chosen: list[wheels.Wheel] = []
            if wheelhouse:
                machine = wheels.Machine.of(reply["facts"], reply["glibc"])
                chosen = wheels.chosen(house, reply["packages"], reply["pinned"], machine, wheelhouse)
                need = sum(wheel.unpacked_bytes + wheel.place.stat().st_size for wheel in chosen)
            _check_room(container, reply, need, progress)
            if wheelhouse:
                folder = f"env/.wheels-{reply['id']}"
                sources = [(wheel.place.name, wheel.place) for wheel in chosen]
                sent = data.put_below(shell, container, folder, sources, progress=progress).sent
            (on_build or progress.step)(f"building {container.path}/env/{reply['id']} with {installer}")
            other.say({"go": True, "wheels": folder and f"{container.path}/{folder}"})
            while (reply := other.answer())["event"] != "done":
                if reply["event"] == "line":
                    progress.step(f"  {reply['text']}")
    record = reply["record"]
    return Synced(
        str(container),
        reply["id"],
        reply["made"],
        reply["previous"],
        reply["release"],
        installer,
        record.get("python"),
        record.get("torch"),
        record.get("transformers"),
        record.get("bytes"),
        sent,
        need,
        time.monotonic() - begun,
    )


def _check_room(container: Container, plan: Mapping[str, Any], need: int, progress: Progress) -> None:
    free = int(plan["free_bytes"])
    progress.step(f"about {need / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
    if free < need:
        unused = ", ".join(f"{each['id']} ({(each['bytes'] or 0) / 2**30:.1f} GiB)" for each in plan["unused"])
        path = f"{container.path}/env"
        raise PreflightError(
            "no space for the environment",
            where=f"{container}: {path}",
            why=f"about {need} bytes are needed, {free} are free" + (f"; not in use: {unused}" if unused else ""),
            next="dflash-ops env prune --keep 1" if unused else "make room there",
        )


def warm(
    shell: Shell,
    container: Container,
    config: str,
    config_name: str,
    *,
    settings: tuple[str, ...] = (),
    gpus: tuple[int, ...] | None = None,
    release: str | None = None,
    progress: Progress | None = None,
) -> WarmedUp:
    """Compiles what a training with this config will run, so that its start finds it in the compile cache. It holds the
    GPUs' locks meanwhile. config: its text; gpus: as the container numbers them, None for all that are declared.

    BusyError when a run has one of the GPUs; ConfigError when the trainer refuses the config."""
    progress = progress or Progress()
    chosen = gpus if gpus is not None else tuple(range(len(container.gpus))) if container.gpus else None
    parameters = {
        **wanted(container),
        "python": container.python,
        "release": release,
        "config": config,
        "config_name": config_name,
        "set": list(settings),
        "gpus_chosen": None if chosen is None else list(chosen),
    }
    progress.step(f"asking {container}")
    locks = gpu_locks.words(container, chosen or ())
    with exchange(shell, container, "warm", parameters, what="env warm", host_prefix=locks) as other:
        while (reply := other.answer())["event"] != "done":
            if reply["event"] == "line":
                progress.step(reply["text"])
    first, again = reply["first"], reply["again"]
    took = sum(device["seconds"] for device in first["devices"])
    saved = None if again is None else took - sum(device["seconds"] for device in again["devices"])
    return WarmedUp(
        str(container),
        reply["release"],
        first["cache"],
        tuple(first["devices"]),
        took,
        None if saved is None else max(saved, 0.0),
    )
