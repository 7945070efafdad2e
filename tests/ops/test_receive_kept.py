"""The releases that a container keeps: listed, rolled back to, pruned, by the receiving end alone."""

import hashlib
import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from receiving import WHEN, Receiver, versions

from dflash_ops.command import Local
from dflash_ops.release import Release
from dflash_ops.remote import releases
from dflash_ops.shell import Shell
from dflash_ops.source import Source, read


@pytest.fixture
def receiver(shell: Shell, tmp_path: Path) -> Receiver:
    return Receiver(shell, tmp_path / "box")


@pytest.fixture
def made(shell: Shell, tmp_path: Path) -> Callable[[int], tuple[Release, Path]]:
    return versions(shell, tmp_path)


def test_not_activated(receiver: Receiver, made) -> None:
    first, second = made(1), made(2)
    receiver.deploy(*first)
    code, done = receiver.deploy(*second, activate=False)
    assert code == 0 and done and done["previous"] == first[0].id
    assert releases.current(receiver.path) == first[0].id
    third = made(3)
    receiver.deploy(*third)
    # What never was current is nothing to go back to, unless it is named.
    assert receiver.ask("rollback", release=None)[1]["release"] == first[0].id
    assert receiver.ask("rollback", release=second[0].id)[1]["previous"] == first[0].id
    receiver.ask("rollback", release=third[0].id)
    assert receiver.ask("rollback", release=None)[1]["release"] == second[0].id
    assert sorted(entry.name for entry in (receiver.path / "releases").iterdir()) == releases.names(receiver.path)


def test_what_never_was_current_is_named_where_there_is_nothing_else(receiver: Receiver, made) -> None:
    receiver.deploy(*made(1), activate=False)
    second = made(2)
    receiver.deploy(*second)
    code, answer = receiver.ask("rollback", release=None)
    assert (code, answer["kind"]) == (8, "not_found") and "never was" in answer["why"]
    receiver.ask("prune", keep=1, dry_run=False)
    receiver.ask("prune", keep=1, dry_run=False)
    assert [entry.name for entry in (receiver.path / "releases").iterdir()] == [second[0].id]


def test_harm_that_releases_share_is_told_with_one_that_is_whole(receiver: Receiver, made) -> None:
    first, second, third = made(1), made(2), made(3)
    receiver.deploy(*first)
    (third[1] / "trainer" / "same.py").write_text("it shares this with none\n")
    third = (Release(third[0].created_at, None, read(receiver.shell, Source(third[1])).manifest), third[1])
    receiver.deploy(*third)
    second = (Release(third[0].created_at + timedelta(1), None, second[0].manifest), second[1])
    receiver.deploy(*second)
    place = receiver.path / "releases" / first[0].id / "trainer" / "same.py"
    place.chmod(0o644)
    place.write_text("the same ALWAYS\n" * 3000)
    place.chmod(0o444)
    code, answer = receiver.ask("rollback", release=first[0].id)
    assert code == 9 and "dflash-ops deploy" in answer["next"] and f"rollback {third[0].id}" in answer["next"]
    code, done = receiver.deploy(Release(WHEN + timedelta(9), None, second[0].manifest), second[1])
    assert code == 0 and done  # it healed what it needs
    releases.verify(receiver.path / "current", done["release"])


def test_list_and_rollback(receiver: Receiver, made) -> None:
    assert receiver.ask("releases") == (
        0,
        {"schema_version": 1, "ok": True, "current": None, "current_damaged": "", "releases": []},
    )
    assert receiver.ask("rollback", release=None)[1]["what"] == "there are no releases yet"
    one, two, three = made(1), made(2), made(3)
    for each in (one, two, three):
        receiver.deploy(*each)
    listed = receiver.ask("releases")[1]
    assert [item["id"] for item in listed["releases"]] == [one[0].id, two[0].id, three[0].id]
    assert listed["releases"][0]["files"] == 6 and listed["current"] == three[0].id
    assert receiver.ask("rollback", release=None)[1]["release"] == two[0].id
    assert receiver.ask("rollback", release=None)[1]["release"] == one[0].id
    code, answer = receiver.ask("rollback", release=None)
    assert (code, answer["what"]) == (8, "there is no earlier release")
    assert receiver.ask("rollback", release=three[0].id)[1]["previous"] == one[0].id
    code, answer = receiver.ask("rollback", release="20261129-999999")
    assert code == 8 and three[0].id in answer["why"]


@pytest.mark.parametrize("harm", ["changed", "missing", "mode", "manifest", "added", "folder", "cache"])
def test_rollback_refuses_a_release_that_is_not_whole(receiver: Receiver, made, harm: str) -> None:
    one, two = made(1), made(2)
    receiver.deploy(*one)
    receiver.deploy(*two)
    folder = receiver.path / "releases" / one[0].id
    for place in (folder, *folder.rglob("*")):
        if not place.is_symlink():
            place.chmod(place.stat().st_mode | 0o200) if place.is_dir() or harm == "changed" else None
    match harm:
        case "changed":
            (folder / "trainer" / "a.py").write_text("version = 9\n" * 1000)
            (folder / "trainer" / "a.py").chmod(0o444)
        case "added":
            (folder / "json.py").touch()
        case "folder":
            (folder / "empty" / "deep").rmdir()
        case "cache":  # what Python keeps for itself harms nothing
            (folder / "trainer" / "__pycache__").mkdir()
            (folder / "trainer" / "__pycache__" / "a.pyc").touch()
        case "missing":
            (folder / "link").unlink()
        case "mode":
            (folder / "run.sh").chmod(0o644)
        case _:
            (folder / releases.MANIFEST).write_text("{}")

    code, answer = receiver.ask("rollback", release=one[0].id)
    if harm == "cache":
        assert (code, answer["release"]) == (0, one[0].id)
        return
    assert (code, answer["kind"]) == (9, "verification")
    assert releases.current(receiver.path) == two[0].id
    assert receiver.ask("releases")[1]["releases"][0]["damaged"] == (harm == "manifest")


@pytest.mark.parametrize(
    ("leads_to", "why"), [("releases/gone", "no release"), ("/etc", "no release"), ("", "missing")]
)
def test_a_damaged_current_is_told_and_replaced(receiver: Receiver, made, leads_to: str, why: str) -> None:
    first, second = made(1), made(2)
    receiver.deploy(*first)
    (receiver.path / "current").unlink()
    (receiver.path / "current").symlink_to(leads_to or "releases/20261129-000000-nogit-00000000")
    answer = receiver.ask("releases")[1]
    assert answer["current"] is None and why in answer["current_damaged"]
    assert receiver.ask("prune", keep=0, dry_run=True)[1]["removed"] == []  # it is the newest that is whole
    assert receiver.ask("rollback", release=None)[1]["release"] == first[0].id
    code, done = receiver.deploy(*second)
    assert code == 0 and done and done["previous"] == first[0].id


def run_with(path: Path, release: str, ended: bool, number: int = 1) -> None:
    folder = path / "runs" / f"run-20261129-00000{number}-aaaa"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"schema_version": 1, "release": release}))
    if ended:
        (folder / "exit.json").write_text(json.dumps({"schema_version": 1, "code": 0}))


def test_prune_keeps_what_is_needed(receiver: Receiver, made) -> None:
    made_ones = [made(number) for number in range(6)]
    for each in made_ones:
        receiver.deploy(*each)
    ids = [release.id for release, _ in made_ones]
    run_with(receiver.path, ids[1], ended=False)
    run_with(receiver.path, ids[2], ended=True, number=2)
    receiver.ask("rollback", release=ids[3])
    newest = receiver.path / "releases" / ids[5]
    (newest / "only5.py").chmod(0o777)  # no good one any more; what others share would harm them too
    planned = receiver.ask("prune", keep=0, dry_run=True)[1]
    assert releases.names(receiver.path) == ids and planned["freed_bytes"] == 0
    code, done = receiver.ask("prune", keep=0, dry_run=False)
    assert code == 0 and done["removed"] == planned["removed"] == [ids[0], ids[2], ids[5]]
    assert {item["id"]: item["why"].split()[0] for item in done["kept"]} == {
        ids[1]: "run",
        ids[3]: "current",
        ids[4]: "the",
    }
    assert releases.names(receiver.path) == [ids[1], ids[3], ids[4]]
    for name in releases.names(receiver.path):  # what they shared with the others is theirs alone now
        releases.verify(receiver.path / "releases" / name, name)
    # a.py, only<n>.py and the manifest of each were its own; same.py is larger than all of them, and stays.
    assert 3 * 12_000 < done["freed_bytes"] < 3 * 15_000
    assert receiver.ask("prune", keep=2, dry_run=False)[1]["removed"] == []
    assert receiver.leftovers() == []


def test_prune_killed_half_way_leaves_no_half_release(receiver: Receiver, made, share, tmp_path: Path) -> None:
    for number in range(3):
        receiver.deploy(*made(number))
    before, names = tmp_path / "before", releases.names(receiver.path)
    shutil.copytree(receiver.path, before, symlinks=True)
    command = receiver.command("prune", 10_000, keep=0, dry_run=False)
    steps = receiver.shell.run(Local(), command).err.decode().split()
    removals = [at for at, step in enumerate(steps) if step in ("os.rename", "os.remove", "os.rmdir", "os.chmod")]
    assert len(removals) > 20
    for at in sorted({removals[0], removals[4], removals[-1], *share(removals)}):
        releases.remove(receiver.path)
        shutil.copytree(before, receiver.path, symlinks=True)
        assert receiver.shell.run(Local(), receiver.command("prune", at, keep=0, dry_run=False)).code == 137
        left = releases.names(receiver.path)
        assert left[-1] == names[-1] and set(left) <= set(names)
        for name in left:
            releases.verify(receiver.path / "releases" / name, name)
        if at == removals[4]:
            assert receiver.deploy(*made(9))[0] == 0
            assert receiver.leftovers() == []


def test_a_release_of_an_earlier_version_is_taken_as_it_is(receiver: Receiver, made) -> None:
    """With write bits, and a manifest that knows no folders."""
    first, second = made(1), made(2)
    receiver.deploy(*first)
    folder = receiver.path / "releases" / first[0].id
    manifest = json.loads((folder / releases.MANIFEST).read_bytes())
    files = [{**file, "mode": file["mode"] | 0o200} for file in manifest["files"] if file["link"] is None]
    ending = hashlib.sha256(releases.canonical(files, [])).hexdigest()[:8]
    old = receiver.path / "releases" / f"20261101-000000-nogit-{ending}"
    shutil.copytree(folder, old, symlinks=True)
    old.chmod(0o755)
    for place in old.rglob("*"):
        if not place.is_symlink():
            place.chmod(place.stat().st_mode | 0o200)
    (old / "link").unlink()
    record = {"schema_version": 1, "release": old.name, "commit": None, "created_at": "x", "files": files}
    (old / releases.MANIFEST).write_text(json.dumps(record))
    assert receiver.ask("rollback", release=old.name)[0] == 0
    releases.remove(folder)
    assert receiver.deploy(*second)[0] == 0
    assert receiver.sent == [["only2.py", "trainer/a.py"]]  # the rest was copied, since its modes are others


def test_live_runs_are_told(receiver: Receiver, made) -> None:
    first = made(1)
    code, done = receiver.deploy(*first)
    assert code == 0 and done and done["runs"] == []
    run_with(receiver.path, first[0].id, ended=False)  # made a moment ago: it is starting
    run_with(receiver.path, first[0].id, ended=True, number=2)
    code, done = receiver.deploy(*made(2))
    assert done and done["runs"] == [{"run_id": "run-20261129-000001-aaaa", "release": first[0].id}]
