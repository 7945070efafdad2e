"""deploy, plan, releases, rollback, prune: code into a container, whole or not at all.

A deploy is one conversation with `receive.py` in the container, which holds the deploy lock as long as it lasts, and at
most one archive:

    container: greets, while the source is read here
    container: takes the lock, clears leftovers, compares the manifest with what it has, says what it lacks
    host:      what is lacking comes as one archive, by `pct push` or through the container's stdin (sending.py)
    container: links and unpacks in a fresh folder, checks every file, fsync, rename, swaps `current`

No exit code and no silence counts as success: `pct push` has exit code 0 on a full disk. Only the container's own
count of the bytes does.
"""

import base64
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dflash_ops import answers, remembered, sending
from dflash_ops import source as sources
from dflash_ops.changes import MAX_TEXT_BYTES, Changes, changes, unified
from dflash_ops.command import Container, Query
from dflash_ops.deployed import Deployed, Kept, ListedRelease, Listing, LiveRun, Plan, Pruned, RolledBack
from dflash_ops.errors import OpsError, PreflightError
from dflash_ops.exchange import Exchange, client, exchange
from dflash_ops.progress import Progress
from dflash_ops.release import FileEntry, Manifest, Release, printable
from dflash_ops.remote import bundle
from dflash_ops.sending import ANSWER_SECONDS, SLOWEST_BYTES_PER_SECOND, Via
from dflash_ops.shell import Shell
from dflash_ops.source import Reading, Source, SourceChanged

OnWarning = Callable[[str], None]
Read = Callable[[Shell, Source], Reading]

# A killed deploy lets go of the lock within moments; a living one may take minutes, which nobody should wait out.
_PATIENCE_SECONDS = 5.0
# Code is small; more than this is likely to be data, which belongs into shared/.
_LARGE_BYTES = 50_000_000
_LARGE_FILE_BYTES = 1_000_000  # what is told of by name


def deploy(
    shell: Shell,
    container: Container,
    source: Source,
    *,
    via: Via = "push",
    activate: bool = True,
    user: str | None = None,
    way: Progress | None = None,
    warn: OnWarning = lambda text: None,
    read: Read = sources.read,
    moment: datetime | None = None,
) -> Deployed:
    """Sends the source as a new release, and makes it current unless told not to. user: whose the files are there,
    instead of the inventory's `user`. Several may run at once, in threads, with one Shell and a `way` of their own.

    A source that changes while it is read is read once more, then SourceChanged; BusyError names another deploy. read:
    reads the source, for whoever has read it already. moment: the release's time, where no newer one is there.
    """
    way = way or Progress()
    rest = (via, activate, user or container.user, way, warn, read, moment)
    try:
        return _deploy(shell, container, source, *rest)
    except SourceChanged as error:
        way.step(f"{error.where} changed meanwhile: once more")
        return _deploy(shell, container, source, *rest)


def _deploy(
    shell: Shell,
    container: Container,
    source: Source,
    via: Via,
    activate: bool,
    user: str | None,
    way: Progress,
    warn: OnWarning,
    read: Read,
    moment: datetime | None,
) -> Deployed:
    begun = time.monotonic()
    way.step(f"reading {source}")
    shell.load()
    part = f"deploy-{os.urandom(4).hex()}.part"
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        # A connection and a Python there take as long as the reading here.
        greeted = pool.submit(stack.enter_context, _receiver(shell, container, user, activate, part))
        with sending.ahead(shell, container, f"{container.path}/incoming/{part}", way) as ahead:
            memory = remembered.recall(container) if via == "push" else None
            if memory is not None and memory.differs(source.root):
                ahead.begin()
            reading = read(shell, source)
            manifest = reading.manifest
            if memory is not None and (likely := memory.lacks(manifest.files)):
                ahead.begin(likely)
            way.step(f"asking {container}")
            import tarfile  # noqa: F401  # pyright: ignore[reportUnusedImport] (needed next; now there is time)

            other = greeted.result()
            other.say(_described(manifest))
            ready = other.answer(timeout=_patience(manifest.size))
            if ready["event"] == "waiting":
                way.step(f"waiting for another deploy to {container}")
                ahead.withdraw()  # whoever has the deploy's lock may need pct's
                ready = other.answer(timeout=_patience(manifest.size))
            created_at = later_than(ready["newest"], moment or now())
            release = Release(created_at, reading.commit, manifest, user, reading.branch, reading.dirty)
            lacking, sent = _entries(manifest, ready["lacking"]), 0
            reused = len(manifest.files) - len(_files_of(manifest, ready["lacking"]))
            _check_room(container, ready, lacking, via)
            _warn_of_much(lacking, container, warn)
            while True:  # the container asks again for what vanished meanwhile, but not for ever
                request = {"id": release.id, "record": release.record()}
                if lacking and via == "stream":
                    other.say({**request, "by": "stream"})
                    sent += sending.by_stream(other.talk, lacking, source.root, way)
                    way.step(f"checking {release.id}")
                else:
                    told: dict[str, Any] = {}
                    if lacking:
                        told = ahead.carry(lacking, source.root) or sending.by_push(
                            shell, container, lacking, source.root, ready["part"], way
                        )
                    ahead.withdraw()
                    sent += told.get("size", 0)
                    way.step(f"unpacking and checking {release.id}")
                    other.say({**request, "by": None, **told})
                # Now there is time. What is remembered is but a guess.
                ahead.clear()
                remembered.remember(container, source.root, manifest.files)
                done = other.answer(timeout=_patience(manifest.size))
                if done["event"] == "left":
                    raise OpsError("the container gave up waiting for us", where=str(container), next="deploy again")
                if done["event"] == "done":
                    break
                lacking = _entries(manifest, done["lacking"])
                way.step(f"{len(lacking)} files have vanished there meanwhile")
    return Deployed(
        container=str(container),
        release=release.id,
        commit=reading.commit,
        files=len(manifest.files),
        size=manifest.size,
        sent=sent,
        seconds=time.monotonic() - begun,
        previous=done["previous"],
        activated=activate,
        reused=reused,
        via=via,
        left_out=reading.left_out,
        runs=_live_runs(done),
    )


def plan(
    shell: Shell,
    container: Container,
    source: Source,
    *,
    texts: bool = False,
    way: Progress | None = None,
    read: Read = sources.read,
) -> Plan:
    """What a deploy would do now; nothing changes. texts: with the changes of files as text. read: as of `deploy`."""
    way = way or Progress()
    way.step(f"reading {source}")
    reading = read(shell, source)
    manifest = reading.manifest
    way.step(f"asking {container}")
    parameters = {**_described(manifest), "do": "compare", "texts": MAX_TEXT_BYTES if texts else 0}
    reply = shell.ask(container, _query(container, parameters), timeout=_patience(manifest.size))
    found = changes(reply["files"], reply["folders"], manifest)
    lacking = _entries(manifest, reply["lacking"])
    return Plan(
        container=str(container),
        current=reply["current"],
        damaged=reply["current_damaged"],
        commit=reading.commit,
        files=len(manifest.files),
        size=manifest.size,
        lacking=len(_files_of(manifest, reply["lacking"])),
        to_send=sum(file.size for file in lacking),
        changes=found,
        diff=_diff(found, reply, reading, source.root) if texts else None,
        left_out=reading.left_out,
        runs=_live_runs(reply),
    )


def _diff(found: Changes, reply: dict[str, Any], reading: Reading, root: Path) -> str:
    old = {str(file["path"]): file for file in reply["files"]}
    new = {file.path: file for file in reading.manifest.files}
    text: list[str] = []
    for name in sorted((*found.added, *found.changed, *found.removed)):
        if name.endswith("/"):
            text.append(f"empty folder {name} {'added' if name in found.added else 'removed'}\n")
            continue
        was = base64.b64decode(reply["texts"][name]) if name in reply["texts"] else None
        entry = new.get(name)
        try:
            small = entry is not None and entry.link is None and entry.size <= MAX_TEXT_BYTES
            is_now = (root / name).read_bytes() if small else None
        except OSError as error:
            raise SourceChanged(name) from error
        text.append(unified(name, old.get(name), entry, was, is_now))
    return "".join(text)


def releases(shell: Shell, container: Container) -> Listing:
    """The container's releases."""
    reply = shell.ask(container, _query(container, {"do": "releases"}))
    listed = tuple(
        ListedRelease(
            id=item["id"],
            current=item["id"] == reply["current"],
            files=item["files"],
            size=item["bytes"],
            commit=item["commit"],
            damaged=item["damaged"],
        )
        for item in reply["releases"]
    )
    return Listing(listed, reply["current_damaged"])


def rollback(shell: Shell, container: Container, release: str | None = None) -> RolledBack:
    """Makes another release current: the one named, else the newest before the current one. Every file of it is checked
    first."""
    reply = shell.ask(container, _query(container, {"do": "rollback", "release": release}))
    return RolledBack(str(container), reply["release"], reply["previous"])


def prune(shell: Shell, container: Container, keep: int, *, dry_run: bool = False) -> Pruned:
    """Removes all but the newest `keep` releases; never the current one, one that a run uses, or the newest that is
    whole."""
    parameters = {"do": "prune", "keep": keep, "dry_run": dry_run}
    reply = shell.ask(container, _query(container, parameters), timeout=10 * ANSWER_SECONDS)
    kept = tuple(Kept(item["id"], item["why"]) for item in reply["kept"])
    return Pruned(str(container), dry_run, tuple(reply["removed"]), kept, reply["freed_bytes"])


def now() -> datetime:
    return datetime.now(UTC)


def later_than(newest: str | None, now: datetime) -> datetime:
    """The time of a new release: now, but after the newest one, so that ids sort by age though clocks jump, differ
    between laptops, and count no fractions."""
    if newest is None:
        return now
    before = datetime.strptime(newest[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    return max(now, before + timedelta(seconds=1))


# -- what is lacking


def _described(manifest: Manifest) -> dict[str, Any]:
    return {"files": manifest.records(), "folders": list(manifest.folders)}


def _files_of(manifest: Manifest, lacking: Sequence[str]) -> list[FileEntry]:
    """Every file with one of these contents."""
    wanted = set(lacking)
    return [file for file in manifest.files if file.link is None and file.sha256 in wanted]


def _entries(manifest: Manifest, lacking: Sequence[str]) -> list[FileEntry]:
    """One file for each of these contents."""
    return list({file.sha256: file for file in _files_of(manifest, lacking)}.values())


def _check_room(container: Container, ready: dict[str, Any], lacking: Sequence[FileEntry], via: Via) -> None:
    sent = sum(file.size for file in lacking)
    # A pushed archive lies there beside what is unpacked of it.
    need = ready["copied"] + (2 if via == "push" else 1) * sent
    if ready["free_bytes"] < need:
        raise PreflightError(
            "the container's disk is too full",
            where=str(container),
            why=f"{need} bytes are needed, {ready['free_bytes']} are free",
            next=f"dflash-ops prune --keep 3, or in the container: df -h {container.path}",
        )


def _warn_of_much(lacking: Sequence[FileEntry], container: Container, warn: OnWarning) -> None:
    sent = sum(file.size for file in lacking)
    if sent > _LARGE_BYTES:
        large = (file for file in lacking if file.size > _LARGE_FILE_BYTES)
        largest = sorted(large, key=lambda file: file.size, reverse=True)[:3]
        names = ", ".join(f"{printable(file.path)} ({file.size / (1 << 20):.1f} MiB)" for file in largest)
        among = f", among them {names}" if names else ""
        warn(
            f"{sent / (1 << 20):.1f} MiB go to {container}{among}. Data belongs into shared/: dflash-ops put; "
            "what no release needs, into .dflashignore"
        )


def _live_runs(reply: dict[str, Any]) -> tuple[LiveRun, ...]:
    return tuple(LiveRun(run["run_id"], run["release"]) for run in reply["runs"])


# -- the conversation with receive.py


@contextmanager
def _receiver(
    shell: Shell, container: Container, user: str | None, activate: bool, part: str
) -> Generator[Exchange, None, None]:
    """receive.py, which has greeted and waits for a manifest; it holds its lock from then on until the block ends."""
    parameters = {"do": "deploy", "user": user, "activate": activate, "part": part, "patience": _PATIENCE_SECONDS}
    with exchange(shell, container, "receive", parameters, what="deploy") as other:
        other.answer()
        yield other


def _patience(size: int) -> float:
    return ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def _query(container: Container, parameters: dict[str, Any]) -> Query[dict[str, Any]]:
    common = {"path": container.path, "client": client(), "patience": _PATIENCE_SECONDS}
    return Query(bundle.command(container.python, "receive", {**common, **parameters}), answers.answer)
