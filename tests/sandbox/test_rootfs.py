"""Mounts where the kernel lacks what we use first: no mount_setattr, no overlay file system."""

import os
import stat
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_ops.sandbox import kernel, rootfs

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
    # Python 3.12 warns of forking beside threads (other tests' connections); this child takes no lock of theirs.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def in_own_mounts(act: Callable[[], None]) -> None:
    """Run `act` in a process with mounts of its own; its failure is ours."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            act()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        words = said.read()
    os.waitpid(pid, 0)
    assert not words, words


@pytest.mark.parametrize("modern", [True, False])
def test_read_only_reaches_every_submount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modern: bool) -> None:
    if not modern:
        monkeypatch.setattr(kernel, "_SYS_MOUNT_SETATTR", 100_000)
    source, target = tmp_path / "a b", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()

    def act() -> None:
        kernel.mount("x", str(source), "tmpfs")
        (source / "deeper").mkdir()
        kernel.mount("x", str(source / "deeper"), "tmpfs", kernel.MS_NOEXEC)
        kernel.bind(str(source), str(target))
        for folder in (target, target / "deeper"):
            with pytest.raises(OSError, match="Read-only"):
                (folder / "file").touch()
            (source / folder.relative_to(target) / "file").touch()
        assert os.statvfs(target / "deeper").f_flag & os.ST_NOEXEC

    in_own_mounts(act)


@pytest.mark.parametrize("overlay", [True, False])
def test_programs_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlay: bool) -> None:
    root, scratch, added = tmp_path / "root", tmp_path / "scratch", tmp_path / "added"
    real_mount = kernel.mount

    def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
        if kind == "overlay" and not overlay:
            raise OSError("no such file system")
        real_mount(source, target, kind, flags, options)

    monkeypatch.setattr(kernel, "mount", mount)

    def act() -> None:
        # As in use: the scratch folder lies on a tmpfs.
        real_mount("x", str(tmp_path), "tmpfs")
        for folder in (root / "usr/bin", root / "usr/local/sbin", scratch):
            folder.mkdir(parents=True)
        for file in (added, root / "usr/bin/tar", root / "usr/bin/cat", root / "usr/local/sbin/there"):
            file.write_text("#!/bin/sh\necho ran\n")
            file.chmod(0o755)
        layer = rootfs.Layer({"new": added}, {"tar", "not-there"})
        rootfs.apply_layers(root, {"/usr/bin": layer}, scratch)
        new = root / ("usr/bin/new" if overlay else "usr/local/sbin/new")
        assert new.read_text() == added.read_text() and os.access(new, os.X_OK)
        assert (root / "usr/bin/cat").exists() and (root / "usr/local/sbin/there").exists()
        gone = root / "usr/bin/tar"
        assert not gone.exists() if overlay else stat.S_IMODE(gone.stat().st_mode) == 0

    in_own_mounts(act)


def test_what_holds_secrets_is_not_on_the_list() -> None:
    listed = {*rootfs.ETC_FILES, *rootfs.ETC_FOLDERS}
    assert not listed & {
        "shadow",
        "gshadow",
        "ssh",
        "ssl",
        "ssl/private",
        "environment",
        "pip.conf",
        "gitconfig",
        "pve",
    }
