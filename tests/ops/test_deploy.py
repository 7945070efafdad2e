"""deploy, releases and rollback, through ssh, pct push and the container's own Python."""

import json
import os
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from conftest import Box, Cli
from in_container import current_release, folder_of, folder_of_host, left_by_deploys, run_folder

from dflash_ops import deploy as verbs
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError, VerificationError
from dflash_ops.progress import Progress
from dflash_ops.release import Manifest, Release, printable
from dflash_ops.sandbox.session import HOME
from dflash_ops.sending import Via, push_complaint
from dflash_ops.shell import Shell
from dflash_ops.source import Source, SourceChanged
from dflash_ops.staging import staging

ODD = os.fsdecode(b"odd \xff\n'name")


class Steps(Progress):
    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)


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


@pytest.mark.parametrize("via", ["push", "stream"])
def test_a_release_arrives_as_it_is_here(
    shell: Shell, anywhere: Container, source: Source, via: Via, soak: bool
) -> None:
    if not soak and (anywhere.vmid, anywhere.via, via) in ((200, "lxc-attach", "stream"), (200, "pct", "push")):
        pytest.skip("each way and each place are in the others: with --soak")
    (source.root / "empty").mkdir()
    way = Steps()
    done = verbs.deploy(shell, anywhere, source, via=via, way=way)
    assert (done.files, done.size, done.previous, done.commit) == (4, 100_020, None, None)
    assert done.sent > done.size and done.container == str(anywhere)
    sending = ["staging", "sending", "pct", "unpacking"] if via == "push" else ["streaming", "checking"]
    assert [step.split()[0] for step in way.steps] == ["reading", "asking", *sending]
    found = [line for line in listing(shell, anywhere, f"{anywhere.path}/current/") if "manifest" not in line]
    assert [line for line in found if not line.startswith("d")] == [
        "-r--r--r-- root 10 trainer/__init__.py ",
        f"-r--r--r-- root 100000 trainer/{ODD} ",
        "-r-xr-xr-x root 10 run.sh ",
        "lrwxrwxrwx root 19 link trainer/__init__.py",
    ]
    folders = [line.split() for line in found if line.startswith("d")]
    assert sorted((line[0], line[1], line[3]) for line in folders) == [
        ("dr-xr-xr-x", "root", "empty"),
        ("dr-xr-xr-x", "root", "trainer"),
    ]
    again = verbs.deploy(shell, anywhere, source, via=via)
    assert (again.sent, again.reused) == (0, 4)
    assert again.previous == done.release and again.release[-8:] == done.release[-8:]
    assert left_by_deploys(anywhere) == []


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every line of shell text that a host is asked to run."""
    from dflash_ops import ssh

    found: list[bytes] = []
    start = ssh.Link.start

    def counted(link: ssh.Link, line: bytes, **rest) -> ssh.RemoteProcess:
        found.append(line)
        return start(link, line, **rest)

    monkeypatch.setattr(ssh.Link, "start", counted)
    return found


def test_a_deploy_is_one_push_and_one_command_in_the_container(
    shell: Shell, box: Box, source: Source, lines: list[bytes]
) -> None:
    """A pct call costs 0.6 s on a real host, whatever it does. What is there already costs none."""
    verbs.deploy(shell, box.container, source)
    assert sum(b"pct " in line for line in lines) == 1
    assert sum(b"lxc-attach" in line for line in lines) == 1
    assert len(lines) == 3
    lines.clear()
    assert verbs.deploy(shell, box.container, source).sent == 0
    (source.root / "run.sh").write_text("#!/bin/sh\nexit\n")
    verbs.deploy(shell, box.container, source, via="stream")
    assert len(lines) == 2 and not any(b"pct " in line for line in lines)


def test_what_would_be_done_and_what_differs(shell: Shell, box: Box, source: Source, lines: list[bytes]) -> None:
    container, text = box.container, "trainer/__init__.py"
    planned = verbs.plan(shell, container, source)
    assert (planned.current, planned.files, planned.lacking, planned.diff) == (None, 4, 3, None)
    assert shell.run(container, Command(("ls", container.path))).code != 0  # nothing was made
    first = verbs.deploy(shell, container, source)
    assert not verbs.plan(shell, container, source, texts=True).changes
    (source.root / text).write_text('"""two"""\n')
    (source.root / "run.sh").chmod(0o644)
    (source.root / "link").unlink()
    (source.root / "link").symlink_to("run.sh")
    (source.root / "trainer" / ODD).unlink()
    (source.root / "empty").mkdir()
    (source.root / "new").write_text("no line end")
    lines.clear()
    planned = verbs.plan(shell, container, source, texts=True)
    assert len(lines) == 1
    assert (planned.current, planned.lacking, planned.to_send) == (first.release, 2, 21)
    assert planned.changes.added == ("empty/", "new")
    assert planned.changes.changed == ("link", "run.sh", text)
    assert planned.changes.removed == (f"trainer/{ODD}",)
    assert planned.diff == (
        "empty folder empty/ added\n"
        "link link: trainer/__init__.py -> run.sh\n"
        "--- /dev/null\n+++ here/new\n@@ -0,0 +1 @@\n+no line end\n\\ No newline at end of file\n"
        "mode of run.sh: 555 -> 444\n"
        f'--- current/{text}\n+++ here/{text}\n@@ -1 +1 @@\n-"""one"""\n+"""two"""\n'
        f"--- current/trainer/{printable(ODD)}\n+++ /dev/null\n@@ -1 +0,0 @@\n"
        f"-{'x' * 100_000}\n\\ No newline at end of file\n"
    )
    assert [item.id for item in verbs.releases(shell, container).releases] == [first.release]


def test_a_release_that_waits(shell: Shell, box: Box, source: Source) -> None:
    first = verbs.deploy(shell, box.container, source)
    second = verbs.deploy(shell, box.container, source, activate=False)
    assert (second.activated, second.previous) == (False, first.release)
    listed = verbs.releases(shell, box.container).releases
    assert [(item.id, item.current) for item in listed] == [(first.release, True), (second.release, False)]
    assert verbs.rollback(shell, box.container, second.release).previous == first.release
    pruned = verbs.prune(shell, box.container, 0)
    assert pruned.removed == (first.release,) and pruned.freed > 0


def test_files_of_a_user_that_is_not_root(shell: Shell, anywhere: Container, source: Source) -> None:
    """In an unprivileged container it is that container's user, too."""
    root = verbs.deploy(shell, anywhere, source)
    done = verbs.deploy(shell, anywhere, source, user="nobody")
    assert done.sent == 0  # copied there, for their owners differ
    found = listing(shell, anywhere, f"{anywhere.path}/releases/{done.release}")
    assert {line.split()[1] for line in found} == {"nobody"}
    again = verbs.deploy(shell, anywhere, source, user="nobody")
    script = 'stat -c %i "$@" | sort -u | wc -l'
    names = [f"{anywhere.path}/releases/{each.release}/run.sh" for each in (root, done, again)]
    assert shell.run(anywhere, Command(("sh", "-c", script, "sh", *names))).out == b"2\n"
    with pytest.raises(PreflightError, match=r"no user 'gone'.*useradd"):
        verbs.deploy(shell, anywhere, source, user="gone")


def test_much_is_warned_of_before_it_goes(
    shell: Shell, box: Box, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "_LARGE_BYTES", 90_000)
    warned: list[str] = []
    verbs.deploy(shell, box.container, source, warn=warned.append)
    assert len(warned) == 1 and "MiB go to" in warned[0] and ".dflashignore" in warned[0]
    assert "among them" not in warned[0]  # nothing of it is large
    verbs.deploy(shell, box.container, source, warn=warned.append)
    assert len(warned) == 1


@pytest.mark.parametrize("changes", [1, 2])
def test_a_file_that_changes_meanwhile_is_read_once_more(shell: Shell, box: Box, source: Source, changes: int) -> None:
    class Changing(Progress):
        left = changes

        def step(self, text: str) -> None:
            if text.startswith("asking") and self.left:
                self.left -= 1
                (source.root / "run.sh").write_text(f"#!/bin/sh\n# {self.left}\n")

    if changes == 1:
        verbs.deploy(shell, box.container, source, way=Changing())
        sent = folder_of(box.container) / "releases" / current_release(box.container) / "run.sh"
        assert sent.read_text().endswith("# 0\n")
    else:
        with pytest.raises(SourceChanged, match=r"run\.sh"):
            verbs.deploy(shell, box.container, source, way=Changing())
        assert left_by_deploys(box.container) == []
        assert [*folder_of(box.container).glob("releases/*")] == []


def test_a_run_that_goes_on_is_told_and_keeps_its_release(shell: Shell, box: Box, source: Source) -> None:
    first = verbs.deploy(shell, box.container, source)
    run = run_folder(box.container, "one-20261129-000000-aaaa")
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"schema_version": 1, "release": first.release}))
    second = verbs.deploy(shell, box.container, source)
    assert [(item.run_id, item.release) for item in second.runs] == [("one-20261129-000000-aaaa", first.release)]
    kept = {item.id: item.why for item in verbs.prune(shell, box.container, 1).kept}
    assert kept == {first.release: "run one-20261129-000000-aaaa uses it", second.release: "current"}


def test_list_and_rollback(shell: Shell, box: Box, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    container = box.container
    assert verbs.releases(shell, container) == verbs.Listing((), "")
    with pytest.raises(NotFoundError, match="there are no releases yet"):
        verbs.rollback(shell, container)
    first = verbs.deploy(shell, container, source)
    (source.root / "trainer" / "new.py").write_text("new\n")
    second = verbs.deploy(shell, container, source)
    listed = verbs.releases(shell, container).releases
    assert [(item.id, item.current) for item in listed] == [(first.release, False), (second.release, True)]
    assert [(item.files, item.damaged) for item in listed] == [(4, False), (5, False)]
    assert verbs.rollback(shell, container).release == first.release
    assert [item.current for item in verbs.releases(shell, container).releases] == [True, False]
    assert verbs.rollback(shell, container, second.release).previous == first.release
    with pytest.raises(NotFoundError, match=r"there is no release 2026.*nearest: "):
        verbs.rollback(shell, container, "20260101-000000-nogit-00000000")
    with (folder_of(container) / "releases" / first.release / "trainer" / "__init__.py").open("a") as harmed:
        harmed.write("more\n")
    with pytest.raises(VerificationError, match=r"is not whole .*__init__\.py.* is not what was sent"):
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

    class Meanwhile(Progress):
        def step(self, text: str) -> None:
            if text.startswith("pct push"):
                with pytest.raises(BusyError, match=r"another deploy is going on .*held by \w+@.* since 20"):
                    verbs.deploy(shell, container, source)

    done = verbs.deploy(shell, container, source, way=Meanwhile())
    assert [it.name for it in (folder_of(container) / "releases").iterdir()] == [done.release]


def test_what_a_killed_host_left_is_gone_after_the_next_push(shell: Shell, box: Box, source: Source) -> None:
    """A staging folder that nobody holds any more; one that somebody does stays."""
    with staging(shell, box.host) as held:
        stages = folder_of_host(box.host) / "var" / "tmp"
        (stages / "dflash-ops-stage-old").mkdir()
        verbs.deploy(shell, box.container, source)
        assert [it.name for it in stages.glob("dflash-ops-stage-*")] == [Path(held).name]


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
    assert push_complaint(Result(box.host, Command(("pct",)), 0, b"", err)) == complaint


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
def bashrc(box: Box) -> Generator[Callable[[str], None], None, None]:
    """Writes the start file that root's shell on the host reads before each command over ssh."""
    file = folder_of_host(box.host) / HOME.lstrip("/") / ".bashrc"
    yield lambda text: void(file.write_text(text))
    file.unlink()


def void(_: object) -> None:
    pass


def test_noise_of_a_login_script_harms_nothing(shell: Shell, box: Box, source: Source, bashrc) -> None:
    bashrc("echo welcome; echo '{}'\n")
    assert verbs.deploy(shell, box.container, source).files == 4
    assert len(verbs.releases(shell, box.container).releases) == 1


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
    (source.root / "trainer" / ODD).write_bytes(b"x" * 100_001)  # else nothing is pushed
    liar = folder_of_host(box.host) / "root" / "liar" / "pct"
    liar.parent.mkdir(exist_ok=True)
    liar.write_text(LIAR % instead)
    liar.chmod(0o755)
    bashrc("PATH=/root/liar:$PATH\n")
    with pytest.raises(OpsError, match=why) as caught:
        verbs.deploy(shell, box.container, source)
    assert isinstance(caught.value, VerificationError) or "pct push failed" in str(caught.value)
    bashrc("")
    assert left_by_deploys(box.container) == []
    assert [it.name for it in (folder_of(box.container) / "releases").iterdir()] == [first.release]
    assert current_release(box.container) == first.release
