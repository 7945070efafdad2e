"""put and get: bytes, names and modes both ways, broken links gone on with, and what is refused."""

import fcntl
import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Box, Cli
from in_container import folder_of
from stand_in import retry_until
from typer.testing import CliRunner

from dflash_ops import data, fetch
from dflash_ops.cli import app as cli_app
from dflash_ops.command import Command, Container
from dflash_ops.conversation import Conversation
from dflash_ops.errors import (
    BusyError,
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    UsageFault,
    VerificationError,
)
from dflash_ops.progress import Progress
from dflash_ops.shell import Shell

ODD = os.fsdecode(b"odd \xff\n'name")
BIG = os.urandom(3 << 20)


@pytest.fixture(params=["200", "201", "200 by pct"])
def anywhere(request: pytest.FixtureRequest, box: Box) -> Container:
    """A privileged container, an unprivileged one, and one that is entered by pct exec."""
    vmid, _, by_pct = request.param.partition(" ")
    return replace(box.container, vmid=int(vmid), via="pct" if by_pct else "lxc-attach")


def listing(shell: Shell, container: Container, folder: str = "shared") -> list[str]:
    """Mode, owner, size and name of everything in a folder of the container's path."""
    words = ("find", f"{container.path}/{folder}", "-mindepth", "1", "-printf", "%M %u %s %P\\0")
    out = shell.run(container, Command(words), check=True).out
    return sorted(os.fsdecode(line) for line in out.split(b"\0") if line)


def content(container: Container, name: str) -> bytes:
    return (folder_of(container) / name).read_bytes()


def in_its_folder(container: Container, script: str) -> None:
    """Runs the script where the container's files are, on this machine."""
    folder = folder_of(container)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["sh", "-c", script], cwd=folder, check=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with odd names, an empty file and folder, links, a program."""
    folder = tmp_path / "tree"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "sub" / ODD).write_bytes(b"odd")
    (folder / "nothing").touch()
    (folder / "big").write_bytes(BIG)
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o750)
    # As a Hugging Face cache: names that lead to content elsewhere.
    (tmp_path / "blob").write_bytes(b"blob")
    (folder / "link").symlink_to("../blob")
    return folder


def test_a_folder_there_and_back(shell: Shell, anywhere: Container, tree: Path, tmp_path: Path) -> None:
    done = data.put(shell, anywhere, [tree], "shared/models/")
    assert done.paths == (f"{anywhere.path}/shared/models/tree",)
    assert (done.files, done.size, done.sent, done.unchanged) == (5, len(BIG) + 17, len(BIG) + 17, 0)
    there = listing(shell, anywhere)
    assert {line for line in there if not line.startswith("d")} == {
        "-rw-r--r-- root 0 models/tree/nothing",
        f"-rw-r--r-- root 3 models/tree/sub/{ODD}",
        "-rw-r--r-- root 4 models/tree/link",
        f"-rw-r--r-- root {len(BIG)} models/tree/big",
        "-rwxr-xr-x root 10 models/tree/run",
    }
    assert any(line.endswith("models/tree/sub/empty") for line in there)
    back = tmp_path / "back"
    back.mkdir()
    got = data.get(shell, anywhere, "shared/models/tree", back)
    assert (got.paths, got.files, got.sent, got.unchanged) == ((str(back / "tree"),), 5, done.sent, 0)
    for name in ("big", "link", "nothing", "run", f"sub/{ODD}"):
        assert (back / "tree" / name).read_bytes() == (tree / name).read_bytes()
    assert (back / "tree" / "sub" / "empty").is_dir() and os.access(back / "tree" / "run", os.X_OK)
    assert not os.access(back / "tree" / "big", os.X_OK)
    assert sorted(path.name for path in (back / "tree").iterdir()) == ["big", "link", "nothing", "run", "sub"]
    # Nothing of it travels again.
    assert data.put(shell, anywhere, [tree], "shared/models/").sent == 0
    assert data.get(shell, anywhere, f"{anywhere.path}/shared/models/tree/", back).unchanged == 5


def test_a_file_takes_a_name_and_replaces_what_had_it(shell: Shell, box: Box, tmp_path: Path) -> None:
    file, other = tmp_path / "one", tmp_path / "two"
    file.write_bytes(b"1" * 1000)
    other.write_bytes(b"2")
    container = box.container
    assert data.put(shell, container, [file], "shared/data/renamed").paths == (f"{container.path}/shared/data/renamed",)
    file.write_bytes(b"longer than before" * 100)
    assert data.put(shell, container, [file], "shared/data/renamed").sent == 1800
    assert content(container, "shared/data/renamed") == file.read_bytes()
    file.write_bytes(b"as long as it was!" * 100)
    assert data.put(shell, container, [file], "shared/data/renamed").sent == 1800
    assert content(container, "shared/data/renamed") == file.read_bytes()
    done = data.put(shell, container, [file, other], f"{container.path}/shared/new folder/")
    assert [path.rpartition("shared/")[2] for path in done.paths] == ["new folder/one", "new folder/two"]
    assert data.get(shell, container, "shared/data/renamed", other).unchanged == 0
    assert other.read_bytes() == file.read_bytes()
    empty = tmp_path / "empty"
    empty.touch()
    # As long as a name can be, so that a part's own has no room for more.
    long = tmp_path / ("n" * 255)
    long.write_bytes(b"long")
    data.put(shell, container, [long], "shared/data/")
    assert data.get(shell, container, f"shared/data/{long.name}", tmp_path / "back").sent == 4
    (tmp_path / "back").rename(long)
    data.put(shell, container, [empty], "shared/data/renamed")
    assert data.get(shell, container, "shared/data/renamed", other).files == 1
    assert other.read_bytes() == b""


def cut_after(monkeypatch: pytest.MonkeyPatch, place: Any, method: str, counts: list[int], bytes_of: Callable) -> None:
    """Breaks the ssh connection once so many bytes have gone through a method, for each of `counts` in turn."""
    original = getattr(place, method)
    gone = [0]

    def counted(self: Any, *words: Any, **rest: Any) -> Any:
        result = original(self, *words, **rest)
        gone[0] += bytes_of(words, result)
        if counts and gone[0] > counts[0]:
            counts.pop(0)
            self._process._process._link.close()
        return result

    monkeypatch.setattr(place, method, counted)


def test_a_put_goes_on_after_broken_links(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "_WAITS", (0.01, 0.01))
    file = tmp_path / "big"
    file.write_bytes(BIG)
    counts = [1 << 19, 3 << 19, 5 << 19]
    cut_after(monkeypatch, Conversation, "say", counts, lambda words, _: len(words[0]))
    done = data.put(shell, box.container, [file], "shared/data/")
    assert counts == [] and content(box.container, "shared/data/big") == BIG
    # What was in the pipes when the link broke is sent again, and no more than that.
    assert len(BIG) <= done.sent < 2 * len(BIG)
    assert listing(shell, box.container) == [f"-rw-r--r-- root {len(BIG)} data/big", *folders("data")]


def folders(*names: str) -> list[str]:
    return sorted(f"drwxr-xr-x root {size} {name}" for name, size in ((name, 60) for name in names))


def test_a_get_goes_on_after_broken_links(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "_WAITS", (0.01, 0.01))
    file, here = tmp_path / "big", tmp_path / "here"
    file.write_bytes(BIG)
    data.put(shell, box.container, [file], "shared/data/")
    counts = [1 << 19, 3 << 19]
    cut_after(monkeypatch, Conversation, "take", counts, lambda _, got: len(got))
    done = data.get(shell, box.container, "shared/data/big", here)
    assert counts == [] and here.read_bytes() == BIG
    assert done.sent == len(BIG)  # what had come was kept, to the byte
    assert not (tmp_path / ".here.get-part").exists()


def test_a_link_that_stays_away_leaves_what_came(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "_WAITS", ())
    file = tmp_path / "big"
    file.write_bytes(BIG)
    with monkeypatch.context() as patch:
        cut_after(patch, Conversation, "say", [1 << 20], lambda words, _: len(words[0]))
        with pytest.raises(LinkLostError, match="the same command goes on from there"):
            data.put(shell, box.container, [file], "shared/data/")
    assert [line.split()[3] for line in listing(shell, box.container) if line[0] == "-"] == ["data/.big.put-part"]
    done = data.put(shell, box.container, [file], "shared/data/")
    assert 0 < done.sent < len(BIG)
    assert content(box.container, "shared/data/big") == BIG


def test_a_killed_put_is_gone_on_with_unless_the_file_is_another(
    shell: Shell, box: Box, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "big"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)  # far more than goes until it is killed
    part = folder_of(box.container) / "shared" / "data" / ".big.put-part"
    process = cli.start("put", str(file), "shared/data/")
    retry_until(lambda: part.exists() and part.stat().st_size > 1_000_000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The other end's lock is free once it has noticed.
    with part.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        came = part.stat().st_size
    os.truncate(file, came + 1000)
    assert 1_000_000 < came < 1 << 30 and data.put(shell, box.container, [file], "shared/data/").sent == 1000
    file.write_bytes(b"begins otherwise" + BIG)
    part.write_bytes(bytes(100_000))
    assert data.put(shell, box.container, [file], "shared/data/").sent == len(BIG) + 16
    assert content(box.container, "shared/data/big") == file.read_bytes()


def test_what_arrives_wrong_comes_again_and_then_is_refused(
    shell: Shell, box: Box, tmp_path: Path, monkeypatch
) -> None:
    file, here = tmp_path / "file", tmp_path / "here"
    file.write_bytes(BIG)
    said = Conversation.say
    wrong = [1]

    def garbled(self: Conversation, words: bytes) -> None:
        if len(words) > 100_000 and wrong[0]:
            wrong[0] -= 1
            words = words[:-1] + bytes([words[-1] ^ 1])
        said(self, words)

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "say", garbled)
        assert data.put(shell, box.container, [file], "shared/data/").sent == 2 * len(BIG)
        wrong[0] = 2**30
        file.write_bytes(BIG[::-1])
        with pytest.raises(VerificationError, match=r"what arrived is not what was sent .*data/file"):
            data.put(shell, box.container, [file], "shared/data/")
    assert content(box.container, "shared/data/file") == BIG  # as it was
    took = Conversation.take

    def garbled_take(self: Conversation, count: int) -> bytes:
        part = took(self, count)
        if wrong[0]:
            wrong[0] -= 1
            part = part[:-1] + bytes([part[-1] ^ 1])
        return part

    monkeypatch.setattr(Conversation, "take", garbled_take)
    wrong[0] = 1
    assert data.get(shell, box.container, "shared/data/file", here).sent == 2 * len(BIG)
    assert here.read_bytes() == BIG
    wrong[0] = 2**30
    here.write_bytes(b"as it was")
    with pytest.raises(VerificationError, match="what arrived is not what was sent"):
        data.get(shell, box.container, "shared/data/file", here)
    assert here.read_bytes() == b"as it was"


def test_a_file_that_changes_while_it_is_read(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(BIG)
    said, times = Conversation.say, [1]

    def meanwhile(self: Conversation, words: bytes) -> None:
        said(self, words)
        if len(words) > 100_000 and times[0]:
            times[0] -= 1
            with file.open("ab") as more:
                more.write(b"more")

    monkeypatch.setattr(Conversation, "say", meanwhile)
    data.put(shell, box.container, [file], "shared/data/")
    assert content(box.container, "shared/data/file") == BIG + b"more"
    times[0] = 2**30
    file.write_bytes(BIG[::-1])
    with pytest.raises(OpsError, match=r"a file changes while it is read .*/file"):
        data.put(shell, box.container, [file], "shared/data/")
    assert content(box.container, "shared/data/file") == BIG + b"more"


def test_a_log_that_grows_is_got_as_long_as_it_was(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    """A file that is written anew is refused."""
    in_its_folder(box.container, "mkdir -p runs/x && head -c 3000000 /dev/zero > runs/x/log")
    took, script = Conversation.take, ["echo more >> runs/x/log"]

    def meanwhile(self: Conversation, count: int) -> bytes:
        if script and (line := script.pop()):
            in_its_folder(box.container, line)
        return took(self, count)

    monkeypatch.setattr(Conversation, "take", meanwhile)
    data.get(shell, box.container, "runs/x/log", tmp_path)
    assert (tmp_path / "log").read_bytes() == bytes(3_000_000)
    # More than what is under way at once: else the other end might have read it all before it is written anew.
    anew = "{ head -c 1000 /dev/urandom; head -c 20000000 /dev/zero; } > runs/x/log"
    script += [*[""] * 63, anew] * 100
    (tmp_path / "log").unlink()
    in_its_folder(box.container, anew)
    with pytest.raises(OpsError, match=r"a file changes while it is read"):
        data.get(shell, box.container, "runs/x/log", tmp_path)
    script.clear()
    assert not (tmp_path / "log").exists()
    # Written anew at its start while it grows: what was read until then, and what comes, never were there together.
    script += ["printf new | dd of=runs/x/torn conv=notrunc status=none; echo more >> runs/x/torn"]
    in_its_folder(box.container, "head -c 3000000 /dev/zero > runs/x/torn")
    data.get(shell, box.container, "runs/x/torn", tmp_path)
    # As it was before or after: on a busy machine all may have been read before it was written anew.
    assert (tmp_path / "torn").read_bytes() in (bytes(3_000_000), b"new" + bytes(2_999_997))


def test_two_puts_of_one_file(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "_PATIENCE_SECONDS", 0.2)
    file, small = tmp_path / "file", tmp_path / "small"
    file.write_bytes(BIG)
    small.write_bytes(b"small")
    said, tried = Conversation.say, []

    def meanwhile(self: Conversation, words: bytes) -> None:
        said(self, words)
        if len(words) > 100_000 and not tried:
            tried.append(True)
            wait = "until [ -s shared/data/.file.put-part ]; do sleep 0.01; done"
            in_its_folder(box.container, wait)
            with pytest.raises(BusyError, match=r"another put writes this file .*held by put by \w+@.* since 20"):
                data.put(other, box.container, [file], "shared/data/")
            # Another file is nobody's business.
            assert data.put(other, box.container, [small], "shared/data/").sent == 5

    with Shell() as other:
        monkeypatch.setattr(Conversation, "say", meanwhile)
        data.put(shell, box.container, [file], "shared/data/")
    assert content(box.container, "shared/data/file") == BIG


def test_two_gets_of_one_file(shell: Shell, box: Box, tmp_path: Path) -> None:
    in_its_folder(box.container, "mkdir shared && echo x > shared/file")
    with (tmp_path / ".file.get-part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match=r"another get writes this file .*/file"):
            data.get(shell, box.container, "shared/file", tmp_path)
    assert data.get(shell, box.container, "shared/file", tmp_path).sent == 2


def test_many_small_files(shell: Shell, box: Box, tmp_path: Path, soak: bool) -> None:
    count = 20_000 if soak else 300
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}").write_bytes(b"%d" % number)
    assert data.put(shell, box.container, [folder], "shared/").files == count
    assert data.put(shell, box.container, [folder], "shared/").unchanged == count
    assert data.get(shell, box.container, "shared/many", tmp_path / "back").files == count
    assert all((tmp_path / "back" / f"{n:05}").read_bytes() == b"%d" % n for n in range(count))


@pytest.mark.parametrize("direction", ["put", "get"])
def test_too_little_room_is_said_before(shell: Shell, box: Box, tmp_path: Path, direction: str) -> None:
    file = tmp_path / "file"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 43)
    if direction == "get":
        in_its_folder(box.container, "mkdir -p shared && truncate -s 8T shared/file")
    with pytest.raises(PreflightError, match=r"disk is too full .*8796093022208 bytes are needed, \d+ are free"):
        if direction == "put":
            data.put(shell, box.container, [file], "shared/")
        else:
            data.get(shell, box.container, "shared/file", tmp_path / "here")


def test_what_can_not_be_put(shell: Shell, box: Box, tmp_path: Path) -> None:
    file, container = tmp_path / "file", box.container
    file.write_text("x")
    with pytest.raises(NotFoundError, match="no such file to put"):
        data.put(shell, container, [tmp_path / "gone"], "shared/data/")
    data.put(shell, container, [file], "shared/data/")
    with pytest.raises(OpsError, match=r"that is a folder .*end it with /"):
        data.put(shell, container, [file], "shared/data")
    in_its_folder(container, "ln -s /etc shared/out")
    with pytest.raises(OpsError, match="would leave shared/"):
        data.put(shell, container, [file], "shared/out/x")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, leads, says in (
        ("dangling", "nowhere", "a link leads nowhere"),
        ("loop", ".", "leads back to a folder"),
        ("null", "/dev/null", "neither a file nor a folder"),
    ):
        (folder / name).symlink_to(leads)
        with pytest.raises(OpsError, match=rf"{says} .*folder/{name}"):
            data.put(shell, container, [folder], "shared/data/")
        (folder / name).unlink()


def test_what_can_not_be_got(shell: Shell, box: Box, tmp_path: Path) -> None:
    container = box.container
    with pytest.raises(NotFoundError, match=r"there is no shared/data/x .* has: nothing"):
        in_its_folder(container, "mkdir -p shared/data")
        data.get(shell, container, "shared/data/x", tmp_path)
    for name in ("/etc/passwd", "releases/x", "shared/../x", "..", ""):
        with pytest.raises(UsageFault, match="only below shared/ and runs/"):
            data.get(shell, container, name, tmp_path)
    in_its_folder(container, "echo x > shared/data/x")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OpsError, match="a file is in the way"):
        data.get(shell, container, "shared/data", tmp_path / "file")
    with pytest.raises(PreflightError, match="that can't be written"):
        data.get(shell, container, "shared/data", tmp_path / "file" / "below")


@pytest.mark.parametrize("kind", ["a fifo", "a link", "a dangling link", "a device", "a folder"])
def test_get_replaces_nothing_but_regular_files(shell: Shell, box: Box, tmp_path: Path, kind: str, soak: bool) -> None:
    """By its name, in a folder, as one of a folder's files; and it is refused before a byte comes."""
    in_its_folder(box.container, "mkdir -p shared/tree && echo a > shared/tree/a && echo new > shared/tree/x")
    (tmp_path / "theirs").write_text("precious")
    (place := tmp_path / "tree" / "x").parent.mkdir()
    if kind == "a fifo":
        os.mkfifo(place)
    elif kind == "a device":
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # a null of our own
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to("../theirs" if kind == "a link" else "nowhere")
    before = os.lstat(place)
    every = (("tree/x", place), ("tree/x", place.parent), ("tree", tmp_path), ("tree", place))
    for source, target in every if soak or kind in ("a fifo", "a link", "a folder") else every[::2]:
        if target != place or kind != "a folder":  # which is a folder to put it into
            with pytest.raises(OpsError, match=f"{kind.replace('dangling ', '')} is in the way .*/tree/x"):
                data.get(shell, box.container, f"shared/{source}", target)
    assert os.path.samestat(os.lstat(place), before) and list(place.parent.iterdir()) == [place]
    assert (tmp_path / "theirs").read_text() == "precious"


def test_get_writes_to_no_fifo_in_its_parts_place(shell: Shell, box: Box, tmp_path: Path) -> None:
    in_its_folder(box.container, "mkdir shared && echo new > shared/x")
    os.mkfifo(tmp_path / ".x.get-part")
    with pytest.raises(OpsError, match="a fifo is in the way"):
        data.get(shell, box.container, "shared/x", tmp_path)


def test_put_takes_the_place_of_no_fifo_or_device(shell: Shell, box: Box, tmp_path: Path) -> None:
    """A link gives way: what it leads to stays as it is."""
    (tmp_path / "x").write_text("new")
    in_its_folder(box.container, "mkdir shared; cd shared; mkfifo a; echo precious > b; ln -s b c")
    with pytest.raises(OpsError, match=r"that is a fifo .*shared/a.*name another place"):
        data.put(shell, box.container, [tmp_path / "x"], "shared/a")
    data.put(shell, box.container, [tmp_path / "x"], "shared/c")
    assert [it[0] for it in listing(shell, box.container)] == ["-", "-", "p"]
    assert content(box.container, "shared/b") == b"precious\n"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_names_that_come_are_not_trusted(box: Box, tmp_path: Path, name: str) -> None:
    tree = {"folder": True, "files": [[name, 1, 0o644]], "folders": []}
    with pytest.raises(VerificationError, match="would leave the folder"):
        fetch._listed(box.container, tree, tmp_path)


@pytest.mark.parametrize(
    "target", ["data/x", "/etc/x", "shared/../x", "shared", "releases/x", "shared//etc/x", "shared/a/../../b"]
)
def test_put_stays_below_shared(target: str) -> None:
    with pytest.raises(UsageFault, match="only below shared/"):
        data.shared_names("/opt/it", ["x"], target)


def test_several_files_need_a_folder_and_names_of_their_own() -> None:
    assert data.shared_names("/opt/it", ["a", "b"], "/opt/it/shared/d/") == ["d/a", "d/b"]
    assert data.shared_names("/opt/it", ["a"], "shared/") == ["a"]
    with pytest.raises(UsageFault, match="several files need a folder"):
        data.shared_names("/opt/it", ["a", "b"], "shared/d")
    with pytest.raises(UsageFault, match=r"two of these have one name .*a"):
        data.shared_names("/opt/it", ["a", "a"], "shared/d/")


def test_on_the_command_line(cli: Cli, tree: Path, tmp_path: Path) -> None:
    """One document, nothing on stderr that is no terminal; a folder named by dots has its own name."""
    done = cli("put", ".", "shared/models/", "--json", cwd=tree)
    assert (done.returncode, done.stderr) == (0, b"")
    document = json.loads(done.stdout)
    assert (document["files"], document["sent"], document["schema_version"]) == (5, len(BIG) + 17, 1)
    assert document["paths"][0].endswith("/shared/models/tree")
    got = cli("get", "shared/models/tree", cwd=tmp_path / "tree" / "sub" / "empty")
    assert got.returncode == 0 and got.stderr == b"" and b"5 files, 3.0 MiB; 3.0 MiB sent" in got.stdout
    assert (tree / "sub" / "empty" / "tree" / "big").read_bytes() == BIG
    steps = cli("--debug", "get", "shared/models/tree/big", "new/", cwd=tree).stderr
    assert (tree / "new" / "big").read_bytes() == BIG
    assert steps.startswith(b"asking box / container 200")


@pytest.mark.parametrize(
    "words",
    [
        ["put", "", "shared/"],
        ["get", "shared/x", ""],
        ["deploy", ""],
        ["env", "sync", "--wheels", ""],
        ["releases", "--inventory", ""],
    ],
)
def test_an_empty_word_is_not_the_working_folder(words: list[str]) -> None:
    done = CliRunner().invoke(cli_app, words)
    assert isinstance(done.exception, UsageFault) and "empty word" in str(done.exception)


class Counting(Progress):
    total = seen = 0

    @contextmanager
    def bytes(self, what: str, total: int, done: int = 0) -> Generator[Callable[[int], None], None, None]:
        self.total, self.seen = total, done

        def advance(count: int) -> None:
            self.seen += count

        yield advance


def test_progress_counts_every_byte_once(shell: Shell, box: Box, tree: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    back.mkdir()
    for unchanged in (0, 5):  # the second time nothing travels
        way = Counting()
        assert data.put(shell, box.container, [tree], "shared/", progress=way).unchanged == unchanged
        assert way.seen == way.total == len(BIG) + 17
        way = Counting()
        assert data.get(shell, box.container, "shared/tree", back, progress=way).unchanged == unchanged
        assert way.seen == way.total == len(BIG) + 17


def test_a_refusal_is_heard_while_bytes_go(shell: Shell, box: Box, tmp_path: Path, monkeypatch) -> None:
    """Not when all of a gigabyte has been read."""
    monkeypatch.setattr(data, "_PATIENCE_SECONDS", 0.1)
    file, way = tmp_path / "file", Counting()
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    in_its_folder(box.container, "mkdir shared && touch shared/.file.put-part")
    hold = ("flock", f"{box.container.path}/shared/.file.put-part", "sh", "-c", "echo held; cat")
    with shell.converse(box.container, Command(hold)) as talk:
        assert talk.hear() == b"held"
        with Shell() as other, pytest.raises(BusyError, match="another put writes this file"):
            data.put(other, box.container, [file], "shared/", progress=way)
    assert way.seen < way.total == 1 << 30
