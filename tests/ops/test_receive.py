"""The receiving end alone, in a folder of this machine: killed before each thing it does to the disk, and lied to."""

import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.command import Command, Local, Result
from dflash_ops.deploy import _entries
from dflash_ops.release import Release
from dflash_ops.remote import bundle, releases
from dflash_ops.shell import Shell
from dflash_ops.source import Source, read, sha256_of, write_archive

WHEN = datetime(2026, 11, 29, tzinfo=UTC)

# Names each thing that its process does below a folder on stderr, and ends it, as SIGKILL does, before the n-th.
KILLER = """
import os, sys
left, below = int(sys.argv[2]), sys.argv[3]
def hook(event, args):
    global left
    touched = args and any(isinstance(arg, (str, os.PathLike)) and os.fspath(arg).startswith(below) for arg in args[:2])
    kinds = "open os.mkdir os.rename os.remove os.symlink os.link os.chmod os.chown os.rmdir".split()
    if touched and event in kinds:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        os.write(2, event.encode() + b"\\n")
sys.addaudithook(hook)
"""


DEPLOY = {"user": None, "activate": True, "part": "deploy-0123abcd.part"}


class Receiver:
    """Talks with receive.py as deploy.py does, and "pushes" by copying."""

    def __init__(self, shell: Shell, path: Path) -> None:
        self.shell, self.path = shell, path

    def command(self, do: str, kill_at: int | None = None, **parameters: Any) -> Command:
        common = {"path": str(self.path), "client": "tester", "patience": 0.3}
        command = bundle.command(sys.executable, "receive", {**common, "do": do, **parameters})
        if kill_at is None:
            return command
        python, isolated, option, boot, *rest = command.argv
        words = (python, isolated, option, KILLER + boot, *rest, str(kill_at), str(self.path))
        return Command(words, command.stdin)

    def deploy(
        self,
        release: Release,
        folder: Path,
        kill_at: int | None = None,
        *,
        push: Callable[[Path], None] | None = None,
        honest: bool = True,
        via: str = "push",
        meanwhile: Callable[[], None] = lambda: None,
        files: list[dict[str, Any]] | None = None,
        **more: Any,
    ) -> tuple[int, dict[str, Any] | None]:
        """The exit code and the last answer; stderr is kept in `self.said`, the archives' contents in `self.sent`.

        push: harms the archive; honest: after its sha256 was taken.
        """
        manifest = release.manifest
        described = {"files": files or manifest.records(), "folders": list(manifest.folders)}
        self.sent: list[list[str]] = []
        with self.shell.converse(Local(), self.command("deploy", kill_at, **{**DEPLOY, **more})) as talk:
            last = ready = talk.hear()
            if last is not None and json.loads(last)["ok"]:
                talk.say(json.dumps(described).encode() + b"\n")
                last = ready = talk.hear()
            if last is not None and json.loads(last).get("event") == "waiting":
                last = ready = talk.hear()
            answer = json.loads(last) if last else {"ok": False}
            while answer["ok"] and answer["event"] in ("ready", "again"):
                meanwhile()
                lacking = _entries(manifest, answer["lacking"])
                self.sent.append([file.path for file in lacking])
                request = {"id": release.id, "record": release.record(), "by": via if lacking else None}
                archive = BytesIO()
                write_archive(lacking, folder, archive)
                if lacking and via == "push":
                    part = Path(json.loads(ready or b"")["part"])
                    part.write_bytes(archive.getvalue())
                    if push is not None and not honest:
                        push(part)
                        archive = BytesIO(part.read_bytes())
                    request["size"], request["sha256"] = sha256_of(archive)
                    if push is not None and honest:
                        push(part)
                talk.say(b"\n\n" + json.dumps(request).encode() + b"\n")
                if request["by"] == "stream":
                    data = archive.getvalue()
                    for piece in (data[:7], data[7:]):
                        talk.say(b"\n" + json.dumps({"bytes": len(piece)}).encode() + b"\n" + piece)
                    talk.say(b'{"end": true}\n')
                last = talk.hear()
                answer = json.loads(last) if last else {"ok": False}
            result = talk.finish()
            self.said = result.err.decode()
            return result.code, json.loads(last) if last else None

    def ask(self, do: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        result: Result = self.shell.run(Local(), self.command(do, **parameters))
        return result.code, json.loads(result.out)

    def leftovers(self) -> list[str]:
        found = [*self.path.glob("incoming/*"), *self.path.glob(".current-*")]
        found += (self.path / "releases").glob("*.tmp-*")
        return [str(each) for each in found]


@pytest.fixture
def receiver(shell: Shell, tmp_path: Path) -> Receiver:
    return Receiver(shell, tmp_path / "box")


@pytest.fixture
def made(shell: Shell, tmp_path: Path) -> Callable[[int], tuple[Release, Path]]:
    """Makes the n-th version of a small tree; one file differs, and one is in this version alone."""

    def make(version: int) -> tuple[Release, Path]:
        folder = tmp_path / f"source{version}"
        (folder / "trainer").mkdir(parents=True)
        (folder / "empty" / "deep").mkdir(parents=True)
        (folder / "trainer" / "a.py").write_text(f"version = {version}\n" * 1000)
        (folder / "trainer" / "same.py").write_text("the same always\n" * 3000)
        (folder / f"only{version}.py").write_text(f"{version}")
        (folder / "trainer" / os.fsdecode(b"odd\xff")).write_text("")
        (folder / "run.sh").write_text("#!/bin/sh\n")
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("trainer/a.py")
        reading = read(shell, Source(folder))
        return Release(WHEN + timedelta(minutes=version), reading.commit, reading.manifest), folder

    return make


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


def test_a_user_that_the_container_does_not_know(receiver: Receiver, made) -> None:
    code, answer = receiver.deploy(*made(1), user="nobody-of-that-name")
    assert code == 6 and answer and "no user 'nobody-of-that-name'" in answer["what"] and "useradd" in answer["next"]


def test_live_runs_are_told(receiver: Receiver, made) -> None:
    first = made(1)
    code, done = receiver.deploy(*first)
    assert code == 0 and done and done["runs"] == []
    run_with(receiver.path, first[0].id, ended=False)  # made a moment ago: it is starting
    run_with(receiver.path, first[0].id, ended=True, number=2)
    code, done = receiver.deploy(*made(2))
    assert done and done["runs"] == [{"run_id": "run-20261129-000001-aaaa", "release": first[0].id}]
