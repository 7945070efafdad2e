"""Locks on files and folders: seen from outside, whoever has them and however."""

import fcntl
import os
from pathlib import Path

import pytest

from dflash_ops.remote import locks


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
