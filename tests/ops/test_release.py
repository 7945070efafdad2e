"""What goes in a release, what names it, and the archive that carries it."""

import contextlib
import os
import subprocess
import tarfile
import tempfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import source as sources
from dflash_ops.errors import ConfigError, NotFoundError, PreflightError
from dflash_ops.release import FileEntry, LeftOut, Manifest, Release, check_link, printable, select
from dflash_ops.remote.releases import MANIFEST, is_inside
from dflash_ops.shell import Shell
from dflash_ops.source import Source, SourceChanged

WHEN = datetime(2026, 11, 29, 16, 4, 5, tzinfo=UTC)
FILE = FileEntry("trainer/a.py", 0o644, 3, "ab" * 32)


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def names(shell: Shell, source: Source) -> list[str]:
    return [file.path for file in sources.read(shell, source).manifest.files]


def tree(folder: Path, *files: str) -> Path:
    for name in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(name)
    return folder


def test_an_id_is_time_commit_and_content() -> None:
    digest = Manifest((FILE,)).digest[:8]
    assert Release(WHEN, "c0ffee1" + "0" * 33, Manifest((FILE,))).id == f"20261129-160405-c0ffee1-{digest}"
    assert Release(WHEN, None, Manifest((FILE,))).id == f"20261129-160405-nogit-{digest}"
    other = Manifest((FileEntry("trainer/a.py", 0o755, 3, "ab" * 32),))
    assert other.digest != Manifest((FILE,)).digest
    assert Manifest((FILE,), ("empty",)).digest != Manifest((FILE,)).digest


def test_the_ignore_file_takes_away_and_caches_never_go() -> None:
    found = [
        "a.py",
        "data/x.bin",
        "data/keep.txt",
        "b/__pycache__/a.pyc",
        ".git/config",
        "sub/.git",
        MANIFEST,
        "b/x.pyc",
        "b/.DS_Store",
    ]
    assert select(found) == (["a.py", "data/keep.txt", "data/x.bin"], [])
    assert select(found, ["data/*", "!data/keep.txt", "# a remark", ""]) == (["a.py", "data/keep.txt"], [])


def test_secrets_and_checkpoints_are_left_out_and_told_unless_named() -> None:
    secrets = [".env", "conf/.env.prod", "id_ed25519", "conf/tls.key", ".ssh/config", "a.pem"]
    secrets += ["secrets.env", "conf/prod.env", ".git-credentials", ".npmrc", ".netrc", "a/credentials.json"]
    secrets += [".huggingface_token", "id_xmss", "id_rsa.old", "keys/id_work", ".docker/config.json", ".kube/config"]
    secrets += [".gnupg/pubring.kbx", "a.jks", "b.p12"]
    checkpoints = ["best.pt", "m/model.safetensors", "runs/step-00000008/state.json"]
    checkpoints += ["m/model-00001-of-00002.bin", "m/optimizer.bin", "out/checkpoint-500/trainer_state.json"]
    plain = [".env.example", "keys.py", "pt", "step-1/x", "trainer/checkpoint.py", "id_ed25519.pub", "id_map.py"]
    plain += ["id_tools/a.py", "docker/config.json", "kube/config", "checkpoint-new/a", "model.bin", "env/a", "grid_x"]
    sent, left_out = select([*plain, *secrets, *checkpoints])
    assert sent == sorted(plain)
    assert left_out == sorted(
        [*(LeftOut(name, "a secret") for name in secrets), *(LeftOut(name, "a checkpoint") for name in checkpoints)],
        key=lambda item: item.path,
    )
    sent, left_out = select(["best.pt", ".env", "x.pt"], include=["/best.pt"])
    assert (sent, [item.path for item in left_out]) == (["best.pt"], [".env", "x.pt"])
    # A folder that an ignore file takes back is no name of a secret in it; what is ignored is not told.
    assert select(["t/.env", "t/a", "b"], ["/*", "!/t/"])[0] == ["t/a"]
    assert select(["a", ".env"], [".env"]) == (["a"], [])
    with pytest.raises(ConfigError, match="--include"):
        select(["a"], include=["!"])


@pytest.mark.parametrize("line", ["!", "\\", "a\\"])
def test_an_ignore_line_that_is_no_pattern_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=r"\.dflashignore, line 2\)"):
        select(["a"], ["b", line])


@given(st.lists(st.text(alphabet="ab./\\\udcff\n é", min_size=1, max_size=12)))
def test_selection_is_sorted_by_bytes_and_without_doubles(found: list[str]) -> None:
    chosen, _ = select(found)
    assert chosen == sorted(set(chosen), key=os.fsencode)
    assert set(chosen) <= set(found)


def test_in_git_what_git_knows_and_what_it_would_add(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "src/kept.py", "src/deleted.py", "src/untracked.py", "src/ignored.log", "outside.py", "src/no.bin")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "init", "--initial-branch", "x/y")
    git(tmp_path, "add", "src/kept.py", "src/deleted.py")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "src" / "deleted.py").unlink()
    (tmp_path / "src" / ".dflashignore").write_text("*.bin\n")
    reading = sources.read(shell, Source(tmp_path / "src"))
    assert [file.path for file in reading.manifest.files] == [".dflashignore", "kept.py", "untracked.py"]
    assert reading.commit is not None and len(reading.commit) == 40
    assert (reading.branch, reading.dirty) == ("x/y", True)
    (tmp_path / "src" / "deleted.py").touch()
    git(tmp_path, "add", "src")
    git(tmp_path, "commit", "-m", "y")
    git(tmp_path, "checkout", "--detach")
    clean = sources.read(shell, Source(tmp_path / "src"))  # outside of it a file is new
    assert (clean.branch, clean.dirty, clean.commit == reading.commit) == (None, False, False)
    record = Release(WHEN, clean.commit, clean.manifest, None, "b", clean.dirty).record()
    assert (record["commit"], record["branch"], record["dirty"]) == (clean.commit, "b", False)


def test_empty_folders_go_too(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "src/a.py", "new/b.py", "cache/__pycache__/b.pyc")
    for name in ("src/empty", "new/deep/er", "off", "mine", "ignored", "é\n"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".dflashignore").write_text("/mine/\n")
    kept = {"src/empty", "new/deep/er", "off", "é\n"}
    assert set(sources.read(shell, Source(tmp_path)).manifest.folders) == {*kept, "ignored"}
    git(tmp_path, "init")
    git(tmp_path, "add", "src/a.py")
    (tmp_path / ".gitignore").write_text("/ignored/\n/new/nothing/\n")
    (tmp_path / "new" / "nothing").mkdir()
    assert set(sources.read(shell, Source(tmp_path)).manifest.folders) == kept


def test_a_repository_without_a_commit_has_none(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "a.py")
    git(tmp_path, "init")
    reading = sources.read(shell, Source(tmp_path))
    assert (reading.commit, reading.dirty) == (None, True)


def test_outside_git_every_file(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "a.py", "b/c.py", "b/__pycache__/c.pyc", ".hidden")
    assert names(shell, Source(tmp_path)) == [".hidden", "a.py", "b/c.py"]
    assert names(shell, Source(tmp_path, only="b", uses_git=False)) == ["b/c.py"]


def test_names_of_any_bytes(tmp_path: Path, shell: Shell) -> None:
    odd = [b"\xff\xfe", b"two\nlines", "é".encode(), b"-rf", b"'\"$(x)", b" "]
    for name in odd:
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    assert [os.fsencode(name) for name in names(shell, Source(tmp_path))] == sorted(odd)
    git(tmp_path, "init")
    assert [os.fsencode(name) for name in names(shell, Source(tmp_path))] == sorted(odd)


def test_modes_and_links_are_kept(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "run.sh", "b/file")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "b" / "link").symlink_to("../run.sh")
    (tmp_path / "folder").symlink_to("b")
    files = {file.path: file for file in sources.read(shell, Source(tmp_path)).manifest.files}
    assert (files["run.sh"].mode, files["b/file"].mode) == (0o555, 0o444)  # a release is read-only
    assert (files["b/link"].link, files["folder"].link) == ("../run.sh", "b")


@pytest.mark.parametrize("text", ["/etc/passwd", "..", "../x", "b/../../x"])
def test_a_link_that_leaves_the_source_is_refused(text: str) -> None:
    check_link("a/b", {"a/b": "../c"})
    with pytest.raises(PreflightError, match="leads out of the source"):
        check_link("a", {"a": text})


@pytest.mark.parametrize(
    ("links", "leaves"),
    [
        ({"a": "d1/d2/l/../../secret", "d1/d2/l": ".."}, True),
        ({"a": "d1/d2/l/../secret", "d1/d2/l": ".."}, False),
        ({"a": "d1/l/x", "d1/l": "../d2/l", "d2/l": "/etc"}, True),
        ({"a": "l/../x", "l": "d1/d2/d3"}, False),
        ({"a": "b/x", "b": "c", "c": "b"}, False),  # in a circle: nowhere
        ({"a": "x/l/../..", "x/l": "../y/z"}, True),
    ],
)
def test_a_link_that_leaves_the_source_by_way_of_others_is_refused(links: dict[str, str], leaves: bool) -> None:
    if not leaves:
        return check_link("a", links)
    with pytest.raises(PreflightError, match="leads out of the source"):
        check_link("a", links)
    return None


def test_a_deploy_follows_links_as_the_kernel_does(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path / "source", "d1/d2/file")
    tree(tmp_path, "secret")
    (tmp_path / "source" / "d1" / "d2" / "l").symlink_to("..")
    link = tmp_path / "source" / "sub2link"
    link.symlink_to("d1/d2/l/../../secret")
    assert link.read_text() == "secret"  # out of the source, though its words alone say otherwise
    with pytest.raises(PreflightError, match="leads out of the source"):
        sources.read(shell, Source(tmp_path / "source"))


def test_what_is_neither_file_nor_link_is_refused(tmp_path: Path, shell: Shell) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PreflightError, match=r"pipe.*neither a file nor a link.*\.dflashignore"):
        sources.read(shell, Source(tmp_path))
    (tmp_path / "pipe").unlink()
    tree(tmp_path, "inner/a")
    git(tmp_path / "inner", "init")
    git(tmp_path, "init")
    with pytest.raises(PreflightError, match="repository inside"):
        sources.read(shell, Source(tmp_path))


def test_an_empty_source_is_refused_with_its_reason(tmp_path: Path, shell: Shell) -> None:
    with pytest.raises(PreflightError, match="no file found"):
        sources.read(shell, Source(tmp_path))
    tree(tmp_path, "a.pyc")
    with pytest.raises(PreflightError, match="1 files found, all of them ignored or left out"):
        sources.read(shell, Source(tmp_path))
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("*\n")
    with pytest.raises(PreflightError, match="git knows no file"):
        sources.read(shell, Source(tmp_path))


def test_which_folder(tmp_path: Path) -> None:
    here = tree(tmp_path / "here", "x.py")
    other = tree(tmp_path / "other", "y.py")
    assert sources.choose(other, here, here=here) == Source(other)
    assert sources.choose(None, other, here=here) == Source(other)
    packaged = sources.choose(None, None, here=here)
    assert (packaged.only, packaged.uses_git) == ("trainer", False)
    assert (packaged.root / "trainer" / "__init__.py").is_file()
    tree(here, "trainer/a.py")
    assert sources.choose(None, None, here=here) == Source(here)
    with pytest.raises(NotFoundError, match=r"SOURCE names it\. Next: "):
        sources.choose(tmp_path / "gone", None, here=here)


def test_the_archive_holds_each_content_by_its_sha256(tmp_path: Path, shell: Shell) -> None:
    folder = tree(tmp_path / "in", "a.py", "x" * 200 + "/" + "y" * 200)
    files = sources.read(shell, Source(folder)).manifest.files
    with (tmp_path / "release.tar").open("w+b") as file:
        sources.write_archive(files, folder, file)
    with tarfile.open(tmp_path / "release.tar") as members:
        assert members.getnames() == [file.sha256 for file in files]
    assert (tmp_path / "release.tar").stat().st_size >= sources.archive_size(files)


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path, shell: Shell, change: str) -> None:
    folder = tree(tmp_path / "in", "a.py")
    manifest = sources.read(shell, Source(folder)).manifest
    if change == "gone":
        (folder / "a.py").unlink()
    else:
        (folder / "a.py").write_text({"longer": "a.py+", "shorter": "a", "other": "b.py"}[change])
    with pytest.raises(SourceChanged, match=r"a file changed while it was read \(a\.py\)"):
        sources.write_archive(manifest.files, folder, BytesIO())


def test_a_file_that_changes_while_it_is_hashed_is_read_once_more(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path / "in", "a.py")
    hashed, changes = sources.sha256_of, 1

    def changing(file):
        nonlocal changes
        result = hashed(file)
        if changes:
            changes -= 1
            with (folder / "a.py").open("a") as more:
                more.write("more")
        return result

    monkeypatch.setattr(sources, "sha256_of", changing)
    assert sources.read(shell, Source(folder)).manifest.size == len("a.pymore")
    changes = 2
    with pytest.raises(SourceChanged, match=r"a\.py"):
        sources.read(shell, Source(folder))


def test_git_refuses_to_list_it(tmp_path: Path, shell: Shell) -> None:
    tree(tmp_path, "a.py", ".git")
    with pytest.raises(PreflightError, match=r"git refused .*Next: .*git -C .* status"):
        sources.read(shell, Source(tmp_path))


def test_the_disk_under_the_archive_is_full(tmp_path: Path, shell: Shell) -> None:
    manifest = sources.read(shell, Source(tree(tmp_path, "a.py"))).manifest
    with contextlib.suppress(OSError), Path("/dev/full").open("wb") as full:
        with pytest.raises(PreflightError, match=r"the local disk is full .*Next: .*TMPDIR"):
            sources.write_archive(manifest.files, tmp_path, full)
            full.flush()
        full.close()


def test_there_is_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(PreflightError, match=r"no temporary file .*Next: .*TMPDIR"), sources.temporary_file():
        pass


@given(st.text(max_size=20))
def test_names_are_shown_on_one_line_without_control_characters(name: str) -> None:
    assert printable(name).isprintable()


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a//b", "a/", "a/../b", "a\0b"])
def test_names_that_are_not_inside(name: str) -> None:
    assert is_inside("a/b.c") and is_inside("..a")
    assert not is_inside(name)
