"""Locks on files and folders: seen from outside, whoever has them and however."""

import fcntl
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_ops.remote import answers, locks, receive, rundir, venv

PARAMETERS = {"client": "tester", "patience": 0.0}


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
@pytest.mark.parametrize("kind", ["file", "folder", "pipe"])
def test_what_is_held_is_seen_until_it_is_closed(tmp_path: Path, kind: str, how: int) -> None:
    place = tmp_path / "it"
    {"file": Path.touch, "folder": Path.mkdir, "pipe": os.mkfifo}[kind](place)
    assert not locks.is_held(str(place))
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.flock(descriptor, how)
    assert locks.is_held(str(place)) and locks.is_held(str(place))
    assert locks.take(descriptor)  # by whoever has it already
    os.close(descriptor)
    assert not locks.is_held(str(place)) and not locks.is_held(str(tmp_path / "nothing"))


def test_a_link_is_no_lock_and_what_can_not_be_told_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    with (tmp_path / "file").open() as file:
        assert locks.take(file.fileno())
        assert locks.is_held(str(tmp_path / "file")) and not locks.is_held(str(tmp_path / "link"))

    def refuses(*_: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert locks.is_held(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["deploy", "start"])
@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "fifo", "socket", "locks", "dangling locks"])
def test_what_is_no_file_in_a_locks_place_is_refused(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a link leads to keeps its text."""
    (theirs := tmp_path / "theirs").write_text("precious")
    (tmp_path / "locks").mkdir()
    monkeypatch.chdir(tmp_path)  # a socket's path may be short only
    place = Path("locks", f"{name}.lock")
    if kind == "link":
        place.symlink_to(theirs)
    elif kind == "dangling":
        place.symlink_to(tmp_path / "nothing")
    elif kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as it:
            it.bind(str(place))
    else:
        place = place.parent
        place.rmdir()
        place.touch() if kind == "locks" else place.symlink_to("nothing")
    lock = locks.named(tmp_path, name, name, PARAMETERS) if name != "start" else rundir.start_lock(tmp_path, 0.0)
    with pytest.raises(answers.Fault) as caught, lock:
        raise AssertionError("it is held")
    parts = caught.value.parts
    assert answers.EXIT_CODES[caught.value.kind] == 6
    assert f"{name}.lock" in parts["what"] and parts["where"] == str(tmp_path / "locks" / f"{name}.lock")
    what = "a link" if "dangling" in kind else "a file" if kind == "locks" else f"a {kind}"
    must = "a folder" if "locks" in kind else "a regular file"
    assert parts["why"] == f"{tmp_path / place} is {what}, and must be {must}"
    assert parts["next"].endswith(f"rm {'-r ' if kind == 'folder' else ''}{tmp_path / place}")
    assert theirs.read_text() == "precious" and not (tmp_path / "nothing").exists()


def test_nothing_is_made_where_the_locks_have_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = SimpleNamespace(hear=lambda: {"files": [], "folders": []}, check=lambda: None)
    monkeypatch.setattr(receive, "Talk", lambda: talk)
    deploying = {"user": None, "activate": True, "part": "deploy-0123abcd.part"}
    there = {"locks", "releases", "env"}
    for name in there - {"locks"}:
        (tmp_path / name).mkdir()
    (tmp_path / "locks").touch()
    for verb in (receive.deploy, receive.prune, venv.prune):
        with pytest.raises(answers.Fault, match="can't be held") as caught:
            verb(tmp_path, {**PARAMETERS, **deploying, "keep": 1, "dry_run": False})
        assert caught.value.parts["next"].endswith(f": rm {tmp_path / 'locks'}")
        assert {it.name for it in tmp_path.iterdir()} == there


def test_a_lock_says_who_has_it_whatever_their_name(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    place = tmp_path / "locks" / "deploy.lock"
    place.write_bytes(b"\xff" * 5000)
    with locks.named(tmp_path, "deploy", "deploy", {**PARAMETERS, "client": "m\udcff"}):
        assert place.read_text().startswith("m? since 2")
        with pytest.raises(answers.Fault, match="another deploy is going on") as caught:
            locks.named(tmp_path, "deploy", "deploy", PARAMETERS).__enter__()
        assert caught.value.parts["why"].startswith("held by m? since 2")
    with locks.named(tmp_path, "deploy", "deploy", PARAMETERS):
        assert place.read_text().startswith("tester since 2")
