"""Takes releases into <path>/releases; lists them, compares, swaps back, prunes.

`deploy` is a conversation: this end takes the lock, clears what killed ones left, and says what it lacks and where
`pct push` may write; the other end sends that, and hears whether it is whole. A link that ends, or is silent for 30 s,
ends the conversation and frees the lock.

Parameters: path; do, the verb; client, for others to read; patience, seconds to wait for a lock; the verb's own.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, build, locks, releases
from dflash_ops.remote.answers import Fault
from dflash_ops.remote.talk import Frames, Left, Talk

# How often content that vanished meanwhile is asked for again.
_TRIES = 3
# So many other releases are looked at for one that is whole, where the one asked for is not.
_LOOKED_AT = 5


def main(parameters: dict[str, Any]) -> int:
    """Runs one verb; its last line of output is its answer, or why not. Returns the exit code."""
    path = Path(parameters["path"])
    os.umask(0o022)

    def verb() -> dict[str, Any]:
        try:
            return _VERBS[parameters["do"]](path, parameters)
        except Left:
            return {"event": "left"}

    return answers.answer(path, verb)


# -- verbs


def deploy(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """user: the files' owner, or None; activate: whether it becomes current; part: the name of what may be pushed to
    `incoming`, perhaps before this end has begun.

    Greets, and hears the manifest's {"files", "folders"}, which may be read meanwhile. Says "waiting" when another has
    the lock. Says what is lacking, then hears {"id", "record", "by"}: by null (nothing is), "push" (an archive was
    pushed: its "size" and "sha256"; "ahead" when it is no fault if it has not arrived), or "stream" (it follows in
    frames). May say again that something is lacking.
    """
    talk = Talk()
    ids = build.owner(parameters["user"])
    answers.say({"event": "hello"})
    manifest = talk.hear()
    if manifest is None:
        raise Left
    files, folders = manifest["files"], manifest["folders"]
    with (
        _incoming(path, str(parameters["part"])) as part,
        _locked(path, parameters, on_wait=lambda: answers.say({"event": "waiting"})),
        _cleared(path, parameters["activate"], part),
        build.building(path, files, folders, ids, talk.check) as release,
    ):
        _say_ready(path, part, lacking=release.lacking(), copied=release.copied())
        lacking: list[str] = []
        release.place_known()  # while the archive is on its way
        for _ in range(_TRIES):
            request = talk.hear()
            if request is None:
                raise Left
            _unpack(release, talk, part, request)
            lacking = release.fill()
            if not lacking:
                break
            answers.say({"event": "again", "lacking": lacking})
        else:
            raise Fault("failed", "content vanishes again and again", f"{len(lacking)} are lacking", "deploy again")
        previous, name = releases.current(path), str(request["id"])
        releases.mark_unused(path, name)
        release.finish(name, request["record"])
        if parameters["activate"]:
            releases.activate(path, name)
    return {"event": "done", "release": name, "previous": previous, "files": len(files), "runs": _live_runs(path)}


def _unpack(release: build.Build, talk: Talk, part: Path, request: dict[str, Any]) -> None:
    if request["by"] == "stream":
        release.unpack(Frames(talk))
    elif request["by"] == "push":
        try:
            _check_part(part, request)
        except Fault as fault:
            # Another deploy took it for a leftover, or pct failed: it is lacking still, and asked for. A full disk
            # would be as full the next time.
            if not request.get("ahead") or fault.kind == "preflight":
                raise
            part.unlink(missing_ok=True)
            return
        with part.open("rb") as archive:
            release.unpack(archive)
        part.unlink()  # what it held lies beside it now


def _live_runs(path: Path) -> list[dict[str, str]]:
    """The runs that go on, each with the release that it started with."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path / "runs") as entries:
        if next(entries, None) is None:
            return []
    from dflash_ops.remote import rundir

    live = rundir.live_runs(path)
    return [{"run_id": run["run_id"], "release": str(run["run"].get("release") or "")} for run in live]


def list_releases(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """All releases, the oldest first."""
    described = [releases.describe(path, name) for name in releases.names(path)]
    now, why = releases.current_or_why(path)
    return {"current": now, "current_damaged": why, "releases": described}


def rollback(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Makes an earlier release current: the one asked for, else the newest that is older than the current one, of those
    that have been current."""
    release: str | None = parameters["release"]
    if not releases.names(path):
        raise Fault("not_found", "there are no releases yet", "", "dflash-ops deploy", str(path))
    with _locked(path, parameters):
        _refuse_folder(path)
        names, now = releases.names(path), releases.current(path)
        if release is None:
            older, unused = [name for name in names if now is None or name < now], releases.unused(path)
            skipped = [name for name in older if name in unused]
            older = [name for name in older if name not in unused]
            if not older:
                why = f"current: {now}" + (f"; {skipped[-1]} never was" if skipped else "")
                advice = f"dflash-ops rollback {skipped[-1]}" if skipped else "dflash-ops releases"
                raise Fault("not_found", "there is no earlier release", why, advice)
            release = older[-1]
        elif release not in names:
            why = releases.nearest(release, names)
            raise Fault("not_found", f"there is no release {release}", why, "dflash-ops releases")
        try:
            files = releases.verify(path / "releases" / release, release)
        except Fault as fault:
            # Releases share the files that are the same in them, and so what harms these.
            others = [name for name in reversed(names) if name != release][:_LOOKED_AT]
            whole = next((name for name in others if _is_whole(path, name)), None)
            advice = "dflash-ops deploy, which sends anew what is damaged"
            advice += f"; or dflash-ops rollback {whole}, which is whole" if whole and whole != now else ""
            why = fault.parts["why"] + ("" if whole else "; no other is whole either" if others else "")
            raise Fault(fault.kind, fault.parts["what"], why, advice) from None
        releases.activate(path, release)
    return {"release": release, "previous": now, "files": len(files)}


def prune(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Removes all releases but the newest `keep`, the current one, those that runs use, and the newest that is whole.
    dry_run: only says which."""
    from dflash_ops.remote import rundir

    if not (path / "releases").is_dir():
        return {"current": None, "removed": [], "kept": [], "freed_bytes": 0}
    # A start that is going on has chosen its release already, and shows it to nobody yet.
    with _locked(path, parameters), rundir.start_lock(path, parameters["patience"]):
        names, now = releases.names(path), releases.current(path)
        reasons = _used_releases(path)
        if now is not None:
            reasons[now] = "current"
        for name in names[max(0, len(names) - parameters["keep"]) :]:
            reasons.setdefault(name, "among the newest")
        whole = next((name for name in reversed(names) if _is_whole(path, name)), None)
        if whole is not None:
            reasons.setdefault(whole, "the newest that is whole")
        doomed, freed = [name for name in names if name not in reasons], 0
        if not parameters["dry_run"]:
            releases.remove_leftovers(path)
            for name in doomed:
                # By rename first: half a release has no release's name.
                gone = path / "releases" / f"{name}.tmp-prune"
                os.rename(path / "releases" / name, gone)
                freed += releases.remove(gone)
            releases.sync(path / "releases")
    kept = [{"id": name, "why": reasons[name]} for name in names if name in reasons]
    return {"current": now, "removed": doomed, "kept": kept, "freed_bytes": freed}


def _used_releases(path: Path) -> dict[str, str]:
    """The releases of runs that have not ended: those that go on, and those whose end nobody has seen, which may be
    resumed. A release is what the run's run.json says."""
    from dflash_ops.remote import processes, rundir

    used: dict[str, str] = {}
    boot = processes.boot_id()
    for folder in rundir.folders(path):
        run = rundir.facts(folder, boot)
        if run["exit"] is None:
            used.setdefault(str(run["run"].get("release")), f"run {run['run_id']} uses it")
    return used


def _is_whole(path: Path, name: str) -> bool:
    try:
        releases.verify(path / "releases" / name, name)
    except (Fault, OSError):
        return False
    return True


def compare(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """What a deploy of these files and folders would send, and what differs from the current release; changes nothing.
    texts: the most bytes of a file whose old content is given (base64), 0 for none."""
    import base64

    files = parameters["files"]
    sizes = {str(file["sha256"]): int(file["size"]) for file in files if file["link"] is None}
    known = build.contents(path, sizes)
    now, why = releases.current_or_why(path)
    old: dict[str, Any] = {"files": [], "folders": []}
    if now is not None:
        try:
            old = releases.manifest(path / "releases" / now)
        except (OSError, ValueError) as error:
            why = f"the manifest of {now} can't be read: {error}"
    sent = {str(file["path"]): file for file in files}
    texts: dict[str, str] = {}
    for file in old["files"]:
        name = str(file["path"])
        new = sent.get(name)
        if (
            file["link"] is None
            and file["size"] <= parameters["texts"]
            and (not new or new["sha256"] != file["sha256"])
        ):
            # A file that is gone from there has no text to show.
            with contextlib.suppress(OSError):
                texts[name] = base64.b64encode((path / "releases" / str(now) / name).read_bytes()).decode("ascii")
    lacking = [sha for sha in sizes if not any(place.exists() for place in known.get(sha, ()))]
    return {
        "current": now,
        "current_damaged": why,
        "lacking": lacking,
        "files": old["files"],
        "folders": old["folders"],
        "texts": texts,
        "runs": _live_runs(path),
    }


_VERBS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "deploy": deploy,
    "releases": list_releases,
    "rollback": rollback,
    "prune": prune,
    "compare": compare,
}


# -- parts of them


@contextlib.contextmanager
def _locked(
    path: Path, parameters: dict[str, Any], on_wait: Callable[[], None] = lambda: None
) -> Generator[None, None, None]:
    """Holds the lock of all that changes releases; whoever has it makes the folders."""
    with locks.named(path, "deploy", "deploy", parameters, on_wait=on_wait):
        for name in ("releases", "runs", "shared/data"):
            (path / name).mkdir(parents=True, exist_ok=True)
        (path / "incoming").mkdir(mode=0o700, exist_ok=True)
        yield


@contextlib.contextmanager
def _cleared(path: Path, activate: bool, part: Path) -> Generator[None, None, None]:
    if activate:
        _refuse_folder(path)
    releases.remove_leftovers(path, but=part)
    yield


def _refuse_folder(path: Path) -> None:
    """Nothing takes the place of a folder `current`: what is in it is not ours."""
    if releases.current_or_why(path)[1] == releases.IS_FOLDER:
        advice = f"in the container: mv {path}/current {path}/current.old, and run it again"
        raise Fault("preflight", "`current` can't be replaced", releases.IS_FOLDER, advice, str(path / "current"))


@contextlib.contextmanager
def _incoming(path: Path, name: str) -> Generator[Path, None, None]:
    """Where an archive may be pushed; what was pushed there is removed afterwards."""
    if not releases.may_come_in(name):
        raise Fault("verification", "an archive can't be called that", repr(name))
    part = path / "incoming" / name
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _say_ready(path: Path, part: Path, **more: Any) -> None:
    newest = releases.names(path)[-1:]
    more["newest"] = newest[0] if newest else None
    answers.say({"event": "ready", "part": str(part), "free_bytes": releases.free_bytes(path), **more})


def _check_part(part: Path, request: dict[str, Any]) -> None:
    """`pct push` exits 0 on nearly every failure, and is silent on a full disk: only the bytes tell."""
    wanted = int(request["size"])
    try:
        size = part.stat().st_size
        with part.open("rb") as file:
            sha256 = releases.sha256(file)
    except FileNotFoundError:
        raise Fault("verification", "nothing arrived in the container", f"no {part}", "run it again") from None
    if size == wanted and sha256 == request["sha256"]:
        return
    free = releases.free_bytes(part.parent)
    if size < wanted and free < wanted - size:
        raise answers.disk_full(part.parent, f"{size} of {wanted} bytes arrived, {free} are left")
    why = (
        f"{size} of {wanted} bytes" if size != wanted else f"sha256 {sha256[:16]}..., sent {request['sha256'][:16]}..."
    )
    raise Fault("verification", "what arrived is not what was sent", why, "run it again", str(part))
