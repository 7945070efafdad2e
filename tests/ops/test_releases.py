"""The releases on a container's disk: what is ours there, what is removed, and what never is."""

import os
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.remote import receive, releases
from dflash_ops.remote.answers import Fault

COMMON: dict[str, Any] = {"client": "tester", "patience": 0.3}


def name(number: int) -> str:
    return f"20260101-{number:06d}-nogit-00000000"


def precious(path: Path) -> Path:
    """A folder of somebody else."""
    (path / "precious" / "deep").mkdir(parents=True)
    (path / "precious" / "deep" / "file").write_text("precious")
    return path / "precious"


@pytest.fixture
def box(tmp_path: Path) -> Path:
    path = tmp_path / "box"
    for folder in ("releases", "incoming", "locks"):
        (path / folder).mkdir(parents=True)
    return path


def prune(box: Path, keep: int) -> dict[str, Any]:
    return receive.prune(box, {**COMMON, "keep": keep, "dry_run": False})


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 5, 6, 7, 8, 9, 100])
def test_prune_keeps_the_newest(box: Path, keep: int) -> None:
    names = [name(number) for number in range(4)]
    for each in names:
        (box / "releases" / each).mkdir()
    assert prune(box, keep)["removed"] == names[: max(0, 4 - keep)]
    assert releases.names(box) == names[max(0, 4 - keep) :]


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_not_ours_is_never_followed_nor_in_the_way(box: Path, tmp_path: Path, what: str) -> None:
    """Links and files with names of releases, of what killed ones leave, and near to those."""
    there = precious(tmp_path)
    ours = [f"releases/{name(1)}.tmp-prune", "releases/new.tmp-0123abcd", "incoming/deploy-0123abcd"]
    foreign = [f"releases/{name(0)}", f"releases/{name(2)}.tmp-old", "releases/x.tmp-prune", "incoming/deploy-x"]
    for each in (*ours, *foreign):
        if what == "link":
            (box / each).symlink_to(there)
        else:
            (box / each).write_text("a file")
    (box / "releases" / "mine.tmp-old").mkdir()
    (box / ".current-abc").mkdir()
    (box / ".current-0123abcd").symlink_to("releases/x")
    for number in (7, 8, 9):
        (box / "releases" / name(number)).mkdir()
    assert prune(box, 2)["removed"] == [name(7)] and releases.names(box) == [name(8), name(9)]
    assert (there / "deep" / "file").read_text() == "precious"
    assert [each for each in ours if os.path.lexists(box / each)] == []
    assert [each for each in foreign if not os.path.lexists(box / each)] == []
    assert (box / "releases" / "mine.tmp-old").is_dir() and (box / ".current-abc").is_dir()
    assert not (box / ".current-0123abcd").is_symlink()


def test_a_link_within_what_is_removed_is_not_followed(box: Path, tmp_path: Path) -> None:
    there = precious(tmp_path)
    gone = box / "releases" / "new.tmp-0123abcd"
    gone.mkdir()
    (gone / "link").symlink_to(there)
    (gone / "file").write_text("four")
    gone.chmod(0o555)
    assert releases.remove(gone) == 4 and not gone.exists()
    assert (there / "deep" / "file").exists()


@pytest.mark.parametrize("wrong", ["20261345-000000", "20260230-000000", "20260101-250000", "99991231-235959"])
def test_a_folder_whose_name_is_no_date_is_no_release(box: Path, wrong: str) -> None:
    for each in (f"{wrong}-nogit-00000000", "٢٠٢٦٠١٠١-000000-nogit-00000000", name(3)):
        (box / "releases" / each).mkdir()
    assert releases.names(box) == [name(3)]


def test_a_folder_current_is_refused_before_anything_is_sent(box: Path) -> None:
    (box / "releases" / name(1)).mkdir()
    (box / "current").mkdir()
    (box / "current" / "mine").touch()
    with pytest.raises(Fault, match="can't be replaced") as caught:
        receive.rollback(box, {**COMMON, "release": name(1)})
    assert f"mv {box}/current" in caught.value.parts["next"]
    assert (box / "current" / "mine").exists()
    assert receive.list_releases(box, COMMON)["current_damaged"] == "it is a folder"
