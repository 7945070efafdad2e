"""The receiving end alone: what arrives, killed before each thing it does to the disk, and lied to."""

import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from receiving import DEPLOY, Receiver, versions

from dflash_ops.command import Local
from dflash_ops.deploy import _entries
from dflash_ops.release import Release
from dflash_ops.remote import releases
from dflash_ops.shell import Shell
from dflash_ops.source import Source, read, write_archive


@pytest.fixture
def receiver(shell: Shell, tmp_path: Path) -> Receiver:
    return Receiver(shell, tmp_path / "box")


@pytest.fixture
def made(shell: Shell, tmp_path: Path) -> Callable[[int], tuple[Release, Path]]:
    return versions(shell, tmp_path)


def shared(one: Path, other: Path) -> bool:
    return one.stat().st_ino == other.stat().st_ino


@pytest.mark.parametrize("via", ["push", "stream"])
def test_a_release_arrives_whole_and_read_only(receiver: Receiver, made, via: str) -> None:
    release, source = made(1)
    code, done = receiver.deploy(release, source, via=via)
    assert (code, done and done["release"], done and done["previous"]) == (0, release.id, None)
    folder = receiver.path / "current"
    assert str((receiver.path / "current").readlink()) == f"releases/{release.id}"
    assert releases.verify(folder, release.id) == [file.path for file in release.manifest.files]
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o555
    assert str((folder / "link").readlink()) == "trainer/a.py"
    assert (folder / "empty" / "deep").is_dir()
    modes = [place.lstat().st_mode for place in (folder.resolve(), *folder.resolve().rglob("*"))]
    assert [mode for mode in modes if mode & 0o222 and not stat.S_ISLNK(mode)] == []
    assert receiver.leftovers() == []
    assert (receiver.path / "incoming").stat().st_mode & 0o777 == 0o700
    manifest = json.loads((folder / releases.MANIFEST).read_bytes())
    assert (manifest["schema_version"], manifest["release"], manifest["folders"]) == (1, release.id, ["empty/deep"])


@pytest.mark.parametrize("via", ["push", "stream"])
def test_only_what_is_lacking_travels(receiver: Receiver, made, via: str) -> None:
    """Known by its content, whatever its name; unchanged files share their bytes."""
    first, second = made(1), made(2)
    receiver.deploy(*first)
    (second[1] / "moved.py").write_text("version = 1\n" * 1000)
    (second[1] / "twice.py").write_text("version = 2\n" * 1000)
    reading = read(receiver.shell, Source(second[1]))
    second = (Release(second[0].created_at, None, reading.manifest), second[1])
    code, done = receiver.deploy(*second, via=via)
    assert code == 0 and done
    assert receiver.sent == [["only2.py", "twice.py"]]
    one, two = (receiver.path / "releases" / release.id for release, _ in (first, second))
    assert shared(one / "trainer" / "same.py", two / "trainer" / "same.py")
    assert shared(one / "trainer" / "a.py", two / "moved.py")
    assert shared(two / "trainer" / "a.py", two / "twice.py")
    releases.verify(two, second[0].id)
    again = Release(second[0].created_at + timedelta(1), None, second[0].manifest)
    assert receiver.deploy(again, second[1])[0] == 0 and receiver.sent == [[]]


def test_another_mode_is_a_copy(receiver: Receiver, made) -> None:
    first, second = made(1), made(2)
    receiver.deploy(*first)
    (second[1] / "trainer" / "same.py").chmod(0o755)
    reading = read(receiver.shell, Source(second[1]))
    second = (Release(second[0].created_at, None, reading.manifest), second[1])
    assert receiver.deploy(*second)[0] == 0
    assert len(receiver.sent) == 1  # it was not linked, found to differ, and asked for again
    one, two = (receiver.path / "releases" / release.id / "trainer" / "same.py" for release, _ in (first, second))
    assert not shared(one, two)
    assert [place.stat().st_mode & 0o777 for place in (one, two)] == [0o444, 0o555]


@pytest.mark.parametrize(
    ("harm", "meanwhile", "archives"),
    [
        ("removed", False, [3]),
        ("a link now", False, [3]),
        ("changed", False, [2, 1]),
        ("changed", True, [2, 1]),
        ("changed, another mode wanted", False, [2, 1]),
        ("removed", True, None),  # what was linked by then is safe
    ],
)
@pytest.mark.parametrize("via", ["push", "stream"])
def test_content_that_is_not_what_it_was_is_sent(
    receiver: Receiver, made, harm: str, meanwhile: bool, archives: list[int] | None, via: str
) -> None:
    """Of what an earlier release's manifest promises: gone already, found to differ when used, or harmed after that."""
    first, second = made(1), made(2)
    receiver.deploy(*first)
    if "another mode" in harm:
        (second[1] / "trainer" / "same.py").chmod(0o755)
        reading = read(receiver.shell, Source(second[1]))
        second = (Release(second[0].created_at, None, reading.manifest), second[1])
    place = receiver.path / "releases" / first[0].id / "trainer" / "same.py"
    place.parent.chmod(0o755)

    def do_harm() -> None:
        match harm.split(",")[0]:
            case "removed":
                place.unlink(missing_ok=True)
            case "changed":
                place.chmod(0o644)
                place.write_text("the same ALWAYS\n" * 3000)
                place.chmod(0o444)
            case _:
                place.unlink()
                place.symlink_to("a.py")

    if not meanwhile:
        do_harm()
    code, done = receiver.deploy(*second, meanwhile=do_harm if meanwhile else lambda: None, via=via)
    assert code == 0 and done and done["event"] == "done"
    if archives is not None:
        assert [len(names) for names in receiver.sent] == archives and "trainer/same.py" in receiver.sent[-1]
    releases.verify(receiver.path / "current", second[0].id)
    assert receiver.leftovers() == []


def test_the_other_end_may_leave_at_any_time(receiver: Receiver, made, shell: Shell) -> None:
    """Whatever was not finished by then is not there."""
    release, folder = made(1)
    manifest = release.manifest
    described = json.dumps({"files": manifest.records(), "folders": list(manifest.folders)}).encode() + b"\n"
    archive = BytesIO()
    write_archive(_entries(manifest, [file.sha256 for file in manifest.files]), folder, archive)
    request = json.dumps({"id": release.id, "record": release.record(), "by": "stream"}).encode() + b"\n"
    frame = json.dumps({"bytes": len(archive.getvalue())}).encode() + b"\n" + archive.getvalue()
    for said in (None, b"", request[:20], request, request + frame[:5000], request + frame):
        with shell.converse(Local(), receiver.command("deploy", **DEPLOY)) as talk:
            assert json.loads(talk.hear() or b"")["event"] == "hello"
            if said is not None:
                talk.say(described)
                assert json.loads(talk.hear() or b"")["event"] == "ready"
                talk.say(said)
            done = talk.finish()
        assert (done.code, json.loads(done.out)["event"]) == (0, "left"), said
        assert releases.names(receiver.path) == [] and receiver.leftovers() == []
    assert receiver.deploy(release, folder)[0] == 0


def test_killed_at_every_step_current_stays_whole_and_the_next_deploy_works(
    receiver: Receiver, made, share, tmp_path: Path
) -> None:
    """Before each thing that the receiver does to the disk; daily the first and last of each kind, and some more."""
    first, second, third = made(1), made(2), made(3)
    assert receiver.deploy(*first)[0] == 0
    before = tmp_path / "before"
    shutil.copytree(receiver.path, before, symlinks=True)
    assert receiver.deploy(*second, kill_at=1000)[0] == 0
    steps = receiver.said.split()
    assert len(steps) > 50 and {"os.mkdir", "os.symlink", "os.link", "os.rename", "os.remove", "os.chmod"} <= set(steps)
    ends = {at for kind in set(steps) for at in (steps.index(kind), len(steps) - 1 - steps[::-1].index(kind))}
    for step in sorted({*ends, *share(list(range(len(steps))))}):
        shutil.rmtree(receiver.path)
        shutil.copytree(before, receiver.path, symlinks=True)
        code, _ = receiver.deploy(*second, kill_at=step)
        assert code == 137, step
        now = releases.current(receiver.path)
        assert now in (first[0].id, second[0].id), step
        releases.verify(receiver.path / "current", now)
        assert receiver.deploy(*third)[0] == 0, step
        assert releases.current(receiver.path) == third[0].id
        assert receiver.leftovers() == [], step
        for name in releases.names(receiver.path):
            releases.verify(receiver.path / "releases" / name, name)


def flip(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def cut(part: Path) -> None:
    os.truncate(part, part.stat().st_size // 2)


@pytest.mark.parametrize(
    ("push", "why"),
    [(flip, "sha256"), (cut, "of"), (Path.unlink, "no ")],
)
def test_what_is_not_as_sent_is_refused(receiver: Receiver, made, push, why: str) -> None:
    first = made(1)
    receiver.deploy(*first)
    code, answer = receiver.deploy(*made(2), push=push)
    assert code == 9 and answer is not None and answer["kind"] == "verification" and why in answer["why"]
    assert releases.current(receiver.path) == first[0].id
    assert releases.names(receiver.path) == [first[0].id]
    assert receiver.leftovers() == []


def test_an_archive_that_lies_is_refused(receiver: Receiver, made) -> None:
    """Its sha256 is right, but what is in it is not what was asked for."""
    release, folder = made(1)
    wanted = next(file for file in release.manifest.files if file.path == "run.sh")

    def lie(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
        out = BytesIO()
        with tarfile.open(fileobj=out, mode="w") as members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data), kind
            members.addfile(member, BytesIO(data))
        return out.getvalue()

    lies = [
        (lie("../../escape", b""), "nobody asked"),
        (lie(wanted.sha256, b"short"), "nobody asked"),
        (lie(wanted.sha256, b"", tarfile.SYMTYPE), "nobody asked"),
        (lie(wanted.sha256, b"x" * wanted.size), "not what was sent"),
        (b"no archive" * 1000, "can't be read"),
    ]
    for archive, what in lies:
        code, answer = receiver.deploy(release, folder, push=partial(Path.write_bytes, data=archive), honest=False)
        assert code == 9 and answer is not None and what in answer["what"], answer
        assert releases.names(receiver.path) == [] and receiver.leftovers() == []


def test_a_name_that_leaves_the_release_is_refused(receiver: Receiver, made) -> None:
    release, folder = made(1)
    for name in ("../escape", "/etc/x", "a/../../b"):
        files = [{**release.manifest.records()[0], "path": name}]
        code, answer = receiver.deploy(release, folder, files=files)
        assert code == 9 and answer is not None and "would leave" in answer["what"]


def test_one_at_a_time_and_the_loser_is_told_who(receiver: Receiver, made, shell: Shell) -> None:
    receiver.deploy(*made(0))
    with shell.converse(Local(), receiver.command("deploy", **DEPLOY)) as talk:
        assert json.loads(talk.hear() or b"")["event"] == "hello"
        talk.say(b'{"files": [], "folders": []}\n')
        assert json.loads(talk.hear() or b"")["event"] == "ready"
        others = (
            lambda: receiver.deploy(*made(1)),
            lambda: receiver.ask("rollback", release=None),
            lambda: receiver.ask("prune", keep=1, dry_run=False),
        )
        for ask in others:
            code, answer = ask()
            assert code == 7 and answer is not None
            assert answer["why"].startswith("held by tester since 20")
    assert receiver.deploy(*made(2))[0] == 0  # its end freed the lock


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_path_that_can_be_no_folder(shell: Shell, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with shell.converse(Local(), Receiver(shell, tmp_path / below).command("deploy", **DEPLOY)) as talk:
        assert json.loads(talk.hear() or b"")["event"] == "hello"
        talk.say(b'{"files": [], "folders": []}\n')
        answer = json.loads(talk.hear() or b"")
    assert (answer["ok"], answer["kind"]) == (False, "preflight")
    assert str(tmp_path) in answer["where"] and "correct `path`" in answer["next"]


def test_a_folder_current_is_told_before_anything_is_sent(receiver: Receiver, made) -> None:
    (receiver.path / "current").mkdir(parents=True)
    code, answer = receiver.deploy(*made(1))
    assert (code, answer and answer["what"]) == (6, "`current` can't be replaced")
    assert receiver.sent == [] and receiver.leftovers() == []
    assert receiver.ask("releases")[1]["current_damaged"] == "it is a folder"
    assert receiver.deploy(*made(2), activate=False)[0] == 0


def test_a_user_that_the_container_does_not_know(receiver: Receiver, made) -> None:
    code, answer = receiver.deploy(*made(1), user="nobody-of-that-name")
    assert code == 6 and answer and "no user 'nobody-of-that-name'" in answer["what"] and "useradd" in answer["next"]
