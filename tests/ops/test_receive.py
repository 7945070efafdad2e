"""The receiving end alone, in a folder of this machine: killed before each thing it does to the disk, and lied to."""

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.command import Command, Local, Result
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
    if touched and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.symlink", "os.chmod", "os.rmdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        os.write(2, event.encode() + b"\\n")
sys.addaudithook(hook)
"""


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
        archive: Path,
        kill_at: int | None = None,
        *,
        push: Callable[[Path], None] | None = None,
    ) -> tuple[int, dict[str, Any] | None]:
        """The exit code and the last answer; stderr is kept in `self.said`."""
        with self.shell.converse(Local(), self.command("deploy", kill_at)) as talk:
            last = ready = talk.hear()
            if ready is not None and json.loads(ready)["ok"]:
                part = Path(json.loads(ready)["part"])
                shutil.copyfile(archive, part)
                if push is not None:
                    push(part)
                with archive.open("rb") as file:
                    size, sha256 = sha256_of(file)
                request = {"id": release.id, "size": size, "sha256": sha256}
                talk.say(b"\n\n" + json.dumps(request).encode() + b"\n")
                last = talk.hear()
            result = talk.finish()
            self.said = result.err.decode()
            return result.code, json.loads(last) if last else None

    def ask(self, do: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        result: Result = self.shell.run(Local(), self.command(do, **parameters))
        return result.code, json.loads(result.out)

    def leftovers(self) -> list[str]:
        found = [*(self.path / "incoming").iterdir(), *self.path.glob(".current-*")]
        found += (self.path / "releases").glob("*.tmp-*")
        return [str(each) for each in found]


@pytest.fixture
def receiver(shell: Shell, tmp_path: Path) -> Receiver:
    return Receiver(shell, tmp_path / "box")


@pytest.fixture
def made(shell: Shell, tmp_path: Path) -> Callable[[int], tuple[Release, Path]]:
    """Makes the archive of the n-th version of a small tree."""

    def make(version: int) -> tuple[Release, Path]:
        folder = tmp_path / f"source{version}"
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "a.py").write_text(f"version = {version}\n" * 1000)
        (folder / "trainer" / os.fsdecode(b"odd\xff")).write_text("")
        (folder / "run.sh").write_text("#!/bin/sh\n")
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("trainer/a.py")
        commit, manifest = read(shell, Source(folder))
        release = Release(WHEN + timedelta(minutes=version), commit, manifest)
        archive = tmp_path / f"{version}.tar"
        with archive.open("w+b") as file:
            write_archive(release, folder, file)
        return release, archive

    return make


def test_a_release_arrives_whole(receiver: Receiver, made) -> None:
    release, archive = made(1)
    code, done = receiver.deploy(release, archive)
    assert (code, done and done["release"], done and done["previous"]) == (0, release.id, None)
    folder = receiver.path / "current"
    assert str((receiver.path / "current").readlink()) == f"releases/{release.id}"
    assert releases.verify(folder, release.id) == [file.path for file in release.manifest.files]
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o755
    assert str((folder / "link").readlink()) == "trainer/a.py"
    assert receiver.leftovers() == []
    assert (receiver.path / "incoming").stat().st_mode & 0o777 == 0o700


def test_killed_at_every_step_current_stays_whole_and_the_next_deploy_works(
    receiver: Receiver, made, share, tmp_path: Path
) -> None:
    """Before each thing that the receiver does to the disk; of the mere openings of files, a tenth will do."""
    first, second, third = made(1), made(2), made(3)
    assert receiver.deploy(*first)[0] == 0
    before = tmp_path / "before"
    shutil.copytree(receiver.path, before, symlinks=True)
    assert receiver.deploy(*second, kill_at=1000)[0] == 0
    steps = receiver.said.split()
    openings = [number for number, step in enumerate(steps) if step == "open"]
    others = [number for number, step in enumerate(steps) if step != "open"]
    assert len(openings) > 20 and {"os.mkdir", "os.symlink", "os.rename", "os.remove"} <= set(steps)
    for step in [*others, *share(openings)]:
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


def test_an_archive_that_lies_is_refused(receiver: Receiver, made, tmp_path: Path) -> None:
    """Its sha256 is right, but there is more in it than its manifest says."""
    release, archive = made(1)
    for name, what in (("link", "comes twice"), ("../escape", "would leave"), ("more.py", "is not whole")):
        file = tmp_path / "lie.tar"
        shutil.copyfile(archive, file)
        with tarfile.open(file, "a") as members:
            members.addfile(tarfile.TarInfo(name))
        code, answer = receiver.deploy(release, file)
        assert code == 9 and answer is not None and what in answer["what"]
        assert releases.names(receiver.path) == [] and receiver.leftovers() == []


def test_list_and_rollback(receiver: Receiver, made) -> None:
    assert receiver.ask("releases") == (0, {"schema_version": 1, "ok": True, "current": None, "releases": []})
    assert receiver.ask("rollback", release=None)[1]["what"] == "there are no releases yet"
    one, two, three = made(1), made(2), made(3)
    for each in (one, two, three):
        receiver.deploy(*each)
    listed = receiver.ask("releases")[1]
    assert [item["id"] for item in listed["releases"]] == [one[0].id, two[0].id, three[0].id]
    assert listed["releases"][0]["files"] == 4 and listed["current"] == three[0].id
    assert receiver.ask("rollback", release=None)[1]["release"] == two[0].id
    assert receiver.ask("rollback", release=None)[1]["release"] == one[0].id
    code, answer = receiver.ask("rollback", release=None)
    assert (code, answer["what"]) == (8, "there is no earlier release")
    assert receiver.ask("rollback", release=three[0].id)[1]["previous"] == one[0].id
    code, answer = receiver.ask("rollback", release="20261129-999999")
    assert code == 8 and three[0].id in answer["why"]


@pytest.mark.parametrize("harm", ["changed", "missing", "mode", "manifest"])
def test_rollback_refuses_a_release_that_is_not_whole(receiver: Receiver, made, harm: str) -> None:
    one, two = made(1), made(2)
    receiver.deploy(*one)
    receiver.deploy(*two)
    folder = receiver.path / "releases" / one[0].id
    match harm:
        case "changed":
            (folder / "trainer" / "a.py").write_text("version = 9\n" * 1000)
        case "missing":
            (folder / "link").unlink()
        case "mode":
            (folder / "run.sh").chmod(0o644)
        case _:
            (folder / releases.MANIFEST).write_text("{}")
    code, answer = receiver.ask("rollback", release=one[0].id)
    assert (code, answer["kind"]) == (9, "verification")
    assert releases.current(receiver.path) == two[0].id
    assert receiver.ask("releases")[1]["releases"][0]["damaged"] == (harm == "manifest")


def test_one_at_a_time_and_the_loser_is_told_who(receiver: Receiver, made, shell: Shell) -> None:
    with shell.converse(Local(), receiver.command("deploy")) as talk:
        assert json.loads(talk.hear() or b"")["event"] == "ready"
        for ask in (lambda: receiver.deploy(*made(1)), lambda: receiver.ask("rollback", release=None)):
            code, answer = ask()
            assert code == 7 and answer is not None
            assert answer["why"].startswith("held by tester since 20")
    assert receiver.deploy(*made(2))[0] == 0  # its end freed the lock


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_path_that_can_be_no_folder(shell: Shell, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with shell.converse(Local(), Receiver(shell, tmp_path / below).command("deploy")) as talk:
        answer = json.loads(talk.hear() or b"")
    assert (answer["ok"], answer["kind"]) == (False, "preflight")
    assert str(tmp_path) in answer["where"] and "correct `path`" in answer["next"]


def test_a_current_that_is_no_link_is_told(receiver: Receiver, made) -> None:
    (receiver.path / "current").mkdir(parents=True)
    code, answer = receiver.deploy(*made(1))
    assert (code, answer and answer["what"]) == (1, "`current` can't be replaced")
    assert receiver.leftovers() == []
