"""deploy, releases and rollback, through ssh, pct push and the container's own Python."""

import os
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from conftest import Box, Cli

from dflash_ops import deploy as verbs
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError, VerificationError
from dflash_ops.release import Manifest, Release
from dflash_ops.sandbox.session import HOME
from dflash_ops.shell import Shell
from dflash_ops.source import Source

ODD = os.fsdecode(b"odd \xff\n'name")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__init__.py").write_text('"""one"""\n')
    (folder / "trainer" / ODD).write_bytes(b"x" * 100_000)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("trainer/__init__.py")
    return Source(folder)


@pytest.fixture(params=["200", "201", "200 by pct"])
def anywhere(request: pytest.FixtureRequest, box: Box) -> Container:
    """A privileged container, an unprivileged one, and one that is entered by pct exec."""
    vmid, _, by_pct = request.param.partition(" ")
    return replace(box.container, vmid=int(vmid), via="pct" if by_pct else "lxc-attach")


def listing(shell: Shell, container: Container, folder: str) -> list[str]:
    """Mode, owner, size and name of everything in a folder of the container."""
    words = ("find", folder, "-mindepth", "1", "-printf", "%M %u %s %P %l\\0")
    out = shell.run(container, Command(words), check=True).out
    return sorted(os.fsdecode(line) for line in out.split(b"\0") if line)


def test_a_release_arrives_as_it_is_here(shell: Shell, anywhere: Container, source: Source) -> None:
    steps: list[str] = []
    done = verbs.deploy(shell, anywhere, source, on_step=steps.append)
    assert (done.files, done.size, done.previous, done.commit) == (4, 100_020, None, None)
    assert done.sent > done.size and done.container == str(anywhere)
    assert [step.split()[0] for step in steps] == ["reading", "asking", "staging", "sending", "pct", "unpacking"]
    found = [line for line in listing(shell, anywhere, f"{anywhere.path}/current/") if "manifest" not in line]
    assert [line for line in found if not line.startswith("d")] == [
        "-rw-r--r-- root 10 trainer/__init__.py ",
        f"-rw-r--r-- root 100000 trainer/{ODD} ",
        "-rwxr-xr-x root 10 run.sh ",
        "lrwxrwxrwx root 19 link trainer/__init__.py",
    ]
    again = verbs.deploy(shell, anywhere, source)
    assert again.previous == done.release and again.release[-8:] == done.release[-8:]
    assert listing(shell, anywhere, f"{anywhere.path}/incoming") == []
    stages = shell.run(anywhere.host, Command(("find", "/var/tmp", "-name", "dflash-ops-stage-*")))
    assert stages.out == b""


def test_a_deploy_is_one_push_and_one_command_in_the_container(
    shell: Shell, box: Box, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pct call costs 0.6 s on a real host, whatever it does."""
    from dflash_ops import ssh

    lines: list[bytes] = []
    start = ssh.Link.start

    def counted(link: ssh.Link, line: bytes, **rest) -> ssh.RemoteProcess:
        lines.append(line)
        return start(link, line, **rest)

    monkeypatch.setattr(ssh.Link, "start", counted)
    verbs.deploy(shell, box.container, source)
    assert sum(b"pct " in line for line in lines) == 1
    assert sum(b"lxc-attach" in line for line in lines) == 1
    assert len(lines) == 3


def test_list_and_rollback(shell: Shell, box: Box, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    container = box.container
    assert verbs.releases(shell, container) == []
    with pytest.raises(NotFoundError, match="there are no releases yet"):
        verbs.rollback(shell, container)
    first = verbs.deploy(shell, container, source)
    (source.root / "trainer" / "new.py").write_text("new\n")
    second = verbs.deploy(shell, container, source)
    listed = verbs.releases(shell, container)
    assert [(item.id, item.current) for item in listed] == [(first.release, False), (second.release, True)]
    assert [(item.files, item.damaged) for item in listed] == [(4, False), (5, False)]
    assert verbs.rollback(shell, container).release == first.release
    assert [item.current for item in verbs.releases(shell, container)] == [True, False]
    assert verbs.rollback(shell, container, second.release).previous == first.release
    with pytest.raises(NotFoundError, match=r"there is no release 2026.*nearest: "):
        verbs.rollback(shell, container, "20260101-000000-nogit-00000000")
    harm = f"{container.path}/releases/{first.release}/trainer/__init__.py"
    shell.run(container, Command(("sh", "-c", 'echo more >> "$1"', "sh", harm)), check=True)
    with pytest.raises(VerificationError, match=r"is not whole .*__init__\.py"):
        verbs.rollback(shell, container)


def test_ids_sort_by_age_whatever_the_clock_does() -> None:
    now = datetime(2026, 11, 29, 16, 4, 5, 900_000, tzinfo=UTC)
    assert verbs.later_than(None, now) == now
    assert verbs.later_than("20261129-160404-nogit-00000000", now) == now
    for newest in ("20261129-160405-nogit-00000000", "20991231-235959-c0ffee1-00000000"):
        release = Release(verbs.later_than(newest, now), None, Manifest(()))
        assert release.id[:15] > newest[:15]


def test_two_deploys_at_once(shell: Shell, box: Box, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_PATIENCE_SECONDS", 0.3)
    container = box.container

    def meanwhile(step: str) -> None:
        if step.startswith("pct push"):
            with pytest.raises(BusyError, match=r"another deploy is going on .*held by \w+@.* since 20"):
                verbs.deploy(shell, container, source)

    done = verbs.deploy(shell, container, source, on_step=meanwhile)
    assert [item.id for item in verbs.releases(shell, container)] == [done.release]


def test_pcts_own_lock_is_waited_for(shell: Shell, box: Box, source: Source) -> None:
    """Whatever pct does to the container holds its lock meanwhile, and says so on stderr, with exit code 0."""
    lock = "/run/lock/lxc/pve-config-200.lock"
    with shell.converse(box.host, Command(("flock", lock, "sh", "-c", "echo held; sleep 1"))) as talk:
        assert talk.hear() == b"held"
        assert verbs.deploy(shell, box.container, source).files == 4


@pytest.mark.parametrize(
    ("err", "complaint"),
    [
        (b"", ""),
        (b"trying to acquire lock... OK\n", ""),
        (b"trying to acquire lock...\n OK\n", ""),
        (b"trying to acquire lock...\ncan't lock file 'x' - got timeout\n", "can't lock file 'x' - got timeout"),
        (b"failed to create file: /x/y: No such file\n", "failed to create file: /x/y: No such file"),
    ],
)
def test_what_pct_push_says(box: Box, err: bytes, complaint: str) -> None:
    assert verbs.push_complaint(Result(box.host, Command(("pct",)), 0, b"", err)) == complaint


# -- what may be missing


def test_a_container_that_is_stopped_or_missing(shell: Shell, box: Box, source: Source) -> None:
    with pytest.raises(PreflightError, match="container 202 is stopped"):
        verbs.deploy(shell, replace(box.container, vmid=202), source)
    with pytest.raises(NotFoundError, match="there is no container 999"):
        verbs.deploy(shell, replace(box.container, vmid=999), source)


def test_no_python_in_it(shell: Shell, box: Box, source: Source) -> None:
    bare = replace(box.container, python="/no/such/python3")
    for ask in (
        lambda: verbs.deploy(shell, bare, source),
        lambda: verbs.releases(shell, bare),
    ):
        with pytest.raises(PreflightError, match=r"there is no Python .*/no/such/python3"):
            ask()


def test_a_folder_that_may_not_be_written(shell: Shell, box: Box, source: Source) -> None:
    with pytest.raises(PreflightError, match=r"does not let us write there \(.*/usr/share/x"):
        verbs.deploy(shell, replace(box.container, path="/usr/share/x"), source)


def test_a_local_disk_that_fills_up(box: Box, cli: Cli, tmp_path: Path) -> None:
    """On a file system of 64 KiB, seen by this one process only."""
    small, code = tmp_path / "small", tmp_path / "code"
    for folder in (small, code):
        folder.mkdir()
    (code / "big").write_bytes(bytes(1 << 20))
    line = 'mount -t tmpfs -o size=64k none "$TMPDIR" && exec "$@"'
    words = ("unshare", "-m", "sh", "-c", line, "sh", *cli.words("deploy", str(code)))
    done = subprocess.run(words, env={**cli.environment(), "TMPDIR": str(small)}, capture_output=True)
    text = done.stderr.decode()
    assert (done.returncode, text.count("\n")) == (6, 1) and f"the local disk is full ({small})" in text


def test_an_empty_source(shell: Shell, box: Box, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="nothing to deploy"):
        verbs.deploy(shell, box.container, Source(tmp_path / "nothing"))


@pytest.fixture
def bashrc(shell: Shell, box: Box) -> Generator[Callable[[str], None], None, None]:
    """Writes the start file that root's shell on the host reads before each command over ssh."""
    yield lambda text: void(shell.send(box.host, text.encode(), f"{HOME}/.bashrc"))
    shell.run(box.host, Command(("rm", "-f", f"{HOME}/.bashrc")), check=True)


def void(_: object) -> None:
    pass


def test_noise_of_a_login_script_harms_nothing(shell: Shell, box: Box, source: Source, bashrc) -> None:
    bashrc("echo welcome; echo '{}'\n")
    assert verbs.deploy(shell, box.container, source).files == 4
    assert len(verbs.releases(shell, box.container)) == 1


LIAR = """#!/bin/sh
# A pct whose push goes wrong and says nothing, as the real one does.
[ "$1" = push ] || exec /usr/sbin/pct "$@"
%s
exit 0
"""


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        ('head -c 5000 "$3" > "$3.cut"; /usr/sbin/pct push "$2" "$3.cut" "$4"', "5000 of"),
        ('tr x y < "$3" > "$3.bad"; /usr/sbin/pct push "$2" "$3.bad" "$4"', "sha256"),
        (":", "nothing arrived"),
        ('echo "failed to write: Input/output error" >&2', "failed to write: Input/output error"),
    ],
)
def test_a_push_that_lies_is_found_out(shell: Shell, box: Box, source: Source, bashrc, instead: str, why: str) -> None:
    first = verbs.deploy(shell, box.container, source)
    shell.run(box.host, Command(("mkdir", "-p", "/root/liar")), check=True)
    shell.send(box.host, (LIAR % instead).encode(), "/root/liar/pct")
    shell.run(box.host, Command(("chmod", "755", "/root/liar/pct")), check=True)
    bashrc("PATH=/root/liar:$PATH\n")
    with pytest.raises(OpsError, match=why) as caught:
        verbs.deploy(shell, box.container, source)
    assert isinstance(caught.value, VerificationError) or "pct push failed" in str(caught.value)
    bashrc("")
    assert [(item.id, item.current) for item in verbs.releases(shell, box.container)] == [(first.release, True)]
    assert listing(shell, box.container, f"{box.container.path}/incoming") == []
