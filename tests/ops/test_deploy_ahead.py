"""A push that is begun before the container has said what it lacks: when it serves, and when the guess was wrong."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Box, Cli
from in_container import current_release, folder_of, left_by_deploys
from stand_in import retry_until

from dflash_ops import deploy as verbs
from dflash_ops import remembered, sending, staging
from dflash_ops.command import Command, Container
from dflash_ops.errors import OpsError, PreflightError
from dflash_ops.progress import Progress
from dflash_ops.release import FileEntry
from dflash_ops.remembered import Memory
from dflash_ops.sandbox.session import HOME
from dflash_ops.sandbox.transfer import PUSH_FAULT
from dflash_ops.shell import Shell
from dflash_ops.source import Source
from dflash_ops.staging import waiting_push

# What a push ahead that did not get its file, or had no folder yet to write to, is followed by.
AGAIN = "pct"
USUAL = ["reading", "asking", "staging", "sending", "pct", "unpacking"]
AHEAD = ["reading", "staging", "asking", "sending", "pct", "unpacking"]


class Steps(Progress):
    """Remembers the steps' first words, and calls back when one begins."""

    def __init__(self, hooks: dict[str, Callable[[], object]] | None = None) -> None:
        self.steps: list[str] = []
        self._hooks = hooks or {}

    def step(self, text: str) -> None:
        self.steps.append(text.split()[0])
        hook = self._hooks.pop(self.steps[-1], None)
        if hook is not None:
            hook()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for 8 s lets a push ahead end without its file, which costs nothing but another step."""
    monkeypatch.setattr(staging, "_WORD_SECONDS", 60)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    (folder / "trainer").mkdir(parents=True)
    for number in range(5):
        (folder / "trainer" / f"{number}.py").write_bytes(os.urandom(3000))
    return Source(folder)


@pytest.fixture
def change(source: Source) -> Callable[[], None]:
    return lambda: void((source.root / "trainer" / "0.py").write_bytes(os.urandom(3000)))


def void(_: object) -> None:
    pass


def whole(shell: Shell, container: Container, release: str) -> bool:
    """Whether that release is current, each of its files checked."""
    verbs.rollback(shell, container, release)
    return current_release(container) == release


@pytest.mark.parametrize(("vmid", "user"), [(200, "root"), (201, "root"), (200, "ops")])
def test_the_push_is_begun_before_the_container_is_asked(
    shell: Shell, box: Box, source: Source, change, monkeypatch: pytest.MonkeyPatch, vmid: int, user: str
) -> None:
    """Once something is known of the container: two commands on the host, one of them in the container. `ops` may run
    pct and lxc-attach by sudo."""
    from dflash_ops import ssh

    lines: list[bytes] = []
    start = ssh.Link.start
    monkeypatch.setattr(ssh.Link, "start", lambda link, line, **rest: lines.append(line) or start(link, line, **rest))
    container, first = replace(box.container, vmid=vmid, host=replace(box.host, user=user)), Steps()
    verbs.deploy(shell, container, source, way=first)
    assert first.steps == USUAL
    for _ in range(2 if vmid == 200 and user == "root" else 1):
        change()
        lines.clear()
        way = Steps()
        done = verbs.deploy(shell, container, source, way=way)
        assert way.steps == AHEAD and (done.reused, done.files) == (4, 5) and done.sent > 3000
        assert sorted((b"lxc-attach" in line, b"push" in line) for line in lines) == [(False, True), (True, False)]
    lines.clear()
    assert verbs.deploy(shell, container, source).sent == 0
    assert len(lines) == 1  # nothing was likely to be lacking
    assert left_by_deploys(container) == []


def test_by_the_command_line(cli: Cli, shell: Shell, box: Box, source: Source, change) -> None:
    """What one process has left there, the next one knows."""
    for steps in (USUAL, AHEAD):
        done = cli("--debug", "deploy", str(source.root))
        said = [line.split()[0].decode() for line in done.stderr.splitlines()]
        assert done.returncode == 0 and said in (steps, [*steps[:-1], AGAIN, steps[-1]])
        change()
    assert left_by_deploys(box.container) == []


def test_what_somebody_else_has_sent_already_needs_no_push(shell: Shell, box: Box, source: Source, change) -> None:
    container = box.container
    verbs.deploy(shell, container, source)
    known = remembered._file(container).read_bytes()
    change()
    verbs.deploy(shell, container, source)
    remembered._file(container).write_bytes(known)  # as if that had been another laptop
    way = Steps()
    done = verbs.deploy(shell, container, source, way=way)
    assert way.steps == ["reading", "staging", "asking", "unpacking"] and done.sent == 0
    assert left_by_deploys(container) == [] and whole(shell, container, done.release)


@pytest.mark.parametrize("harm", ["all is gone", "incoming is gone", "more is lacking than one push ahead may carry"])
def test_a_container_that_is_not_as_we_left_it(
    shell: Shell, box: Box, source: Source, change, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    container = box.container
    verbs.deploy(shell, container, source)
    change()
    gone = "incoming" if "incoming" in harm else "releases" if "more" in harm else ""
    shutil.rmtree(folder_of(container) / gone)
    if "more" in harm:
        monkeypatch.setattr(sending, "_SMALL_BYTES", 10_000)
    way = Steps()
    done = verbs.deploy(shell, container, source, way=way)
    if "more" in harm:
        assert way.steps == [*AHEAD[:3], *USUAL[2:]]
    else:  # pct may find the folder that is made meanwhile
        assert way.steps in (AHEAD, [*AHEAD[:-1], AGAIN, AHEAD[-1]])
    assert left_by_deploys(container) == [] and whole(shell, container, done.release)


def test_what_another_took_for_a_leftover_is_sent_again(shell: Shell, box: Box, source: Source, change) -> None:
    container = box.container
    verbs.deploy(shell, container, source)
    change()

    def clear() -> None:
        parts = [*(folder_of(container) / "incoming").glob("*.part")]
        assert parts
        for part in parts:
            part.unlink()

    way = Steps({"unpacking": clear})
    done = verbs.deploy(shell, container, source, way=way)
    assert way.steps == [*AHEAD, "1", *USUAL[2:]]
    assert left_by_deploys(container) == [] and whole(shell, container, done.release)


@pytest.mark.parametrize(("fault", "heals"), [("cut 1000", True), ("flip 700", False)])
def test_a_push_that_goes_wrong_is_made_once_more(
    shell: Shell, box: Box, source: Source, change, fault: str, heals: bool
) -> None:
    container, host = box.container, box.host
    first = verbs.deploy(shell, container, source).release
    change()
    script = 'echo "$1" > "$2"'
    shell.run(host, Command(("sh", "-c", script, "sh", fault, str(PUSH_FAULT))), check=True)

    def heal() -> None:
        shell.run(host, Command(("rm", "-f", str(PUSH_FAULT))), check=True)

    way = Steps({"unpacking": heal} if heals else None)
    try:
        if heals:
            first = verbs.deploy(shell, container, source, way=way).release
        else:
            with pytest.raises(OpsError, match="what arrived is not what was sent"):
                verbs.deploy(shell, container, source, way=way)
    finally:
        heal()
    assert way.steps == [*AHEAD, "1", *USUAL[2:]]
    assert left_by_deploys(container) == [] and whole(shell, container, first)


def test_whoever_has_the_deploys_lock_gets_pcts(shell: Shell, box: Box, source: Source, change) -> None:
    """Two at once: the push of the one that has it needs the lock that our own push has while it waits for its file."""
    container, other = box.container, Source(source.root.with_name("other"))
    other.root.mkdir()
    (other.root / "file").write_bytes(os.urandom(5000))
    verbs.deploy(shell, container, source)
    change()
    remembered._file(container).unlink()
    ours: list[verbs.Deployed] = []
    waits = threading.Event()
    way = Steps({"waiting": waits.set})
    thread = threading.Thread(target=lambda: ours.append(verbs.deploy(shell, container, source, way=way)))

    def begin() -> None:
        remembered.remember(container, source.root, [])
        thread.start()
        assert waits.wait(20)

    try:
        theirs = verbs.deploy(shell, container, other, way=Steps({"staging": begin}))
    finally:
        thread.join(30)
    assert way.steps == [*AHEAD[:3], "waiting", *USUAL[2:]]
    assert ours[0].previous == theirs.release
    assert left_by_deploys(container) == [] and whole(shell, container, ours[0].release)


LATE = """#!/bin/sh
# A pct that opens its source late, as the real one does: loading perl takes it half a second.
while [ "$1" = push ] && [ ! -e /root/late/go ]; do sleep 0.01; done
exec /usr/sbin/pct "$@"
"""


def test_a_pct_that_begins_to_read_when_all_has_been_written(shell: Shell, box: Box, source: Source, change) -> None:
    verbs.deploy(shell, box.container, source)
    change()
    shell.run(box.host, Command(("mkdir", "-p", "/root/late")), check=True)
    shell.send(box.host, LATE.encode(), "/root/late/pct")
    shell.run(box.host, Command(("chmod", "755", "/root/late/pct")), check=True)
    shell.send(box.host, b"PATH=/root/late:$PATH\n", f"{HOME}/.bashrc")
    script = "while pgrep -x head || pgrep -f '^cat /var/tmp/dflash'; do sleep 0.01; done; touch /root/late/go"
    go = Command(("sh", "-c", script))
    thread = threading.Thread(target=lambda: shell.run(box.host, go, check=True))
    way = Steps({"pct": thread.start})
    try:
        done = verbs.deploy(shell, box.container, source, way=way)
        thread.join(30)
    finally:
        shell.run(box.host, Command(("rm", "-rf", f"{HOME}/.bashrc", "/root/late")), check=True)
    assert way.steps == AHEAD
    assert left_by_deploys(box.container) == [] and whole(shell, box.container, done.release)


def test_a_push_that_nobody_lets_go_ends(shell: Shell, box: Box) -> None:
    """Its lock, too: by a word, and by our silence at the end."""
    part = f"{box.container.path}/part"
    lock = Command(("flock", "-w", "20", "/run/lock/lxc/pve-config-200.lock", "true"))
    for withdraw in (True, False):
        with waiting_push(shell, box.container, part) as push:
            if withdraw:
                push.withdraw(timeout=20)
        shell.run(box.host, lock, check=True)
    script = "while pgrep -f 'pct push 200 /dev/[s]tdin' >/dev/null; do sleep 0.05; done"
    shell.run(box.host, Command(("timeout", "20", "sh", "-c", script)), check=True)


def test_an_upload_that_takes_longer_than_the_push_waits(
    shell: Shell, box: Box, source: Source, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made once, and pushed by another pct; the container's lock has long been free."""
    verbs.deploy(shell, box.container, source)
    change()
    monkeypatch.setattr(staging, "_WORD_SECONDS", 0.1)
    lock = Command(("flock", "-w", "20", "/run/lock/lxc/pve-config-200.lock", "true"))
    shown: list[int] = []

    def wait() -> None:
        retry_until(lambda: [*(folder_of(box.container) / "incoming").glob("*.part")])
        shell.run(box.host, lock, check=True)

    class Way(Steps):
        @contextmanager
        def bytes(self, what: str, total: int, done: int = 0) -> Generator[Callable[[int], None], None, None]:
            yield shown.append

    way = Way({"sending": wait})
    done = verbs.deploy(shell, box.container, source, way=way)
    assert way.steps == [*AHEAD[:-1], AGAIN, AHEAD[-1]] and sum(shown) > done.sent // 2 > 0
    assert left_by_deploys(box.container) == [] and whole(shell, box.container, done.release)


def test_a_folder_that_goes_before_the_upload(shell: Shell, box: Box, source: Source, change) -> None:
    verbs.deploy(shell, box.container, source)
    change()
    remove = Command(("sh", "-c", "rm -r /var/tmp/dflash-ops-stage-*"))
    way = Steps({"sending": lambda: shell.run(box.host, remove, check=True)})
    done = verbs.deploy(shell, box.container, source, way=way)
    assert way.steps == [*AHEAD[:4], *USUAL[2:]]
    assert left_by_deploys(box.container) == [] and whole(shell, box.container, done.release)


def test_a_container_that_stops_before_the_upload(
    shell: Shell, box: Box, source: Source, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_WORD_SECONDS", 0.1)  # pct stop waits for pct push
    container = replace(box.container, vmid=201)
    verbs.deploy(shell, container, source)
    change()
    stop = Command(("pct", "stop", "201"))
    way = Steps({"sending": lambda: shell.run(box.host, stop, check=True)})
    try:
        with pytest.raises(PreflightError, match="is stopped"):
            verbs.deploy(shell, container, source, way=way)
    finally:
        shell.run(box.host, Command(("pct", "start", "201")), check=True)


def test_pcts_lock_is_not_held_while_a_folder_is_waited_for(shell: Shell, box: Box, source: Source, change) -> None:
    verbs.deploy(shell, box.container, source)
    change()
    held = Command(("flock", "/run/lock/dflash-ops-stage.lock", "sh", "-c", "echo held; cat"))
    lock = Command(("flock", "-n", "/run/lock/lxc/pve-config-200.lock", "true"))
    way = Steps()
    with ThreadPoolExecutor(1) as pool:
        with shell.converse(box.host, held) as talk:
            assert talk.hear() == b"held"
            coming = pool.submit(verbs.deploy, shell, box.container, source, way=way)
            script = "until pgrep -fx 'flock -w 10 8' >/dev/null; do sleep 0.02; done"
            shell.run(box.host, Command(("timeout", "20", "sh", "-c", script)), check=True)
            assert shell.run(box.host, lock).code == 0
        done = coming.result()
    assert whole(shell, box.container, done.release)


@pytest.mark.parametrize("refused", ["the source", "the user"])
def test_a_deploy_that_is_refused_early_leaves_nothing(
    shell: Shell, box: Box, source: Source, change, refused: str
) -> None:
    verbs.deploy(shell, box.container, source)
    change()
    if refused == "the source":
        (source.root / "leaves").symlink_to("/etc/passwd")
    way = Steps()
    with pytest.raises(OpsError, match="leaves" if refused == "the source" else "nobodyhere"):
        verbs.deploy(shell, box.container, source, user=None if refused == "the source" else "nobodyhere", way=way)
    assert way.steps[:2] == AHEAD[:2]
    script = "while pgrep -f '[d]flash-ops-stage' >/dev/null; do sleep 0.02; done"  # nobody waits for these
    shell.run(box.host, Command(("timeout", "20", "sh", "-c", script)), check=True)
    assert left_by_deploys(box.container) == []


def test_what_is_remembered(box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    container, root = box.container, tmp_path / "source"
    root.mkdir()
    first, second, third = (
        FileEntry(name, 0o444, 1, digits * 32) for name, digits in (("a", "ab"), ("b", "cd"), ("c", "ef"))
    )
    link = FileEntry("link", 0o777, 0, "", "a")
    for file in (first, second):
        (root / file.path).write_bytes(b"x")
    assert remembered.recall(container) is None
    remembered.remember(container, root, [first, link])
    remembered.remember(container, root, [second])
    memory = remembered.recall(container)
    assert memory and memory.lacks([first, second, third, link]) == [third]
    assert not memory.differs(root) and not memory.differs(tmp_path)
    (root / "a").write_bytes(b"longer")  # the last deploy did not send it
    assert not memory.differs(root)
    for change in (lambda: os.utime(root / "b", (1, 1)), (root / "b").unlink):
        remembered.remember(container, root, [second])
        memory = remembered.recall(container)
        change()
        assert memory and memory.differs(root)
    remembered.remember(container, root, [replace(second, size=200_000_000)])  # reading it would take long
    memory = remembered.recall(container)
    assert memory and not memory.states and not memory.lacks([second])
    assert remembered.recall(replace(container, path="/opt/other")) is None
    for number in range(70):
        remembered.remember(replace(container, vmid=1000 + number), root, [])
    file = remembered._file(container)
    assert len(list(file.parent.iterdir())) == 64
    assert remembered.recall(replace(container, vmid=1069)) == Memory(frozenset(), str(root), ())
    whole = json.dumps({"schema_version": 1, "contents": [], "root": "/", "states": []})
    for text in (
        "",
        "[]",
        "\xff",
        whole.replace("1,", "2,"),
        whole.replace('[], "root"', '[[]], "root"'),
        whole[:-2] + "1]}",
        whole.replace("[]", '"abc"', 1),
        whole.replace("[]", '[1, "a", null]', 1),
        whole.replace("[]", '{"a": 1}', 1),
        whole[:-2] + '["a", Infinity, 1]]}',
        whole[:-2] + '["a", true, 1]]}',
        whole[:-2] + f'["a", {"9" * 5000}, 1]]}}',
        "[" * 200_000,
    ):
        file.write_text(text)
        assert remembered.recall(container) is None
        remembered.remember(container, root, [second])
        memory = remembered.recall(container)
        assert memory and memory.contents == {"cd" * 8}
    for name in ("a\0b", "\ud800"):
        file.write_text(json.dumps({**json.loads(whole), "root": str(root), "states": [[name, 1, 1]]}))
        memory = remembered.recall(container)
        assert memory and memory.differs(root)
    file.unlink()
    file.mkdir()  # it can't be replaced
    remembered.remember(container, root, [first])
    assert not list(file.parent.glob(".*"))
    file.rmdir()
    remembered.remember(container, root, [first])
    monkeypatch.delenv("XDG_CACHE_HOME")
    with monkeypatch.context() as context:
        context.setattr(os.path, "expanduser", lambda path: path)  # as where nobody knows our home
        assert remembered.recall(container) is None
        remembered.remember(container, root, [first])
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    remembered.remember(container, root, [first])
    assert remembered.recall(container) is None


def test_a_file_that_was_only_touched_needs_no_push(shell: Shell, box: Box, source: Source) -> None:
    verbs.deploy(shell, box.container, source)
    os.utime(source.root / "trainer" / "0.py", (1, 1))
    for steps in (["reading", "staging", "asking", "unpacking"], ["reading", "asking", "unpacking"]):
        way = Steps()
        done = verbs.deploy(shell, box.container, source, way=way)
        assert way.steps == steps and done.sent == 0
    assert left_by_deploys(box.container) == [] and whole(shell, box.container, done.release)


def test_a_new_file_begins_a_push_once_it_is_read(shell: Shell, box: Box, source: Source) -> None:
    verbs.deploy(shell, box.container, source)
    (source.root / "new").write_bytes(os.urandom(3000))
    way = Steps()
    assert verbs.deploy(shell, box.container, source, way=way).reused == 5
    assert way.steps == AHEAD
