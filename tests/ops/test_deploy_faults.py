"""A deploy cut at each step, in each way: `current` stays a whole release, the next deploy works and cleans up.

200 cases with --soak, twenty of them daily. The client is the library in this process, on a connection of its own;
where it is killed, the real command line, which names each step on stderr with --debug as it begins it.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory
from in_container import current_release, folder_of, left_by_deploys
from proxy import Proxy

from dflash_ops import deploy as verbs
from dflash_ops import remembered
from dflash_ops.command import Command, Container
from dflash_ops.errors import BusyError, OpsError, PreflightError
from dflash_ops.progress import Progress
from dflash_ops.sandbox.transfer import PUSH_FAULT
from dflash_ops.sending import Via
from dflash_ops.shell import Shell
from dflash_ops.source import Source

# The ways, with the steps at which they are cut: a push that is begun ahead of the container's answer, one that is not,
# and the stream.
STEPS = {
    "ahead": ("reading", "staging", "asking", "sending", "pct push", "unpacking"),
    "push": ("staging", "sending", "pct push", "unpacking"),
    "stream": ("reading", "asking", "streaming", "checking"),
}
MOMENTS = (0.0, 0.01, 0.03, 0.1)
DISK = 48 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Generator[Box, None, None]:
    """A sandbox of this file's own, since its containers are stopped and its disks filled."""
    if os.geteuid() != 0:
        pytest.skip("the sandbox needs root")
    from dflash_ops.sandbox import down, up

    name = f"test-{os.getpid()}-faults"
    state = up(name=name, owner=os.getpid(), disks={"200": str(DISK), "host": str(DISK)})
    yield Box(write_inventory(tmp_path_factory.mktemp("faults"), name), state)
    down(name)


@pytest.fixture(scope="module")
def door() -> Generator[Shell, None, None]:
    """One connection for all that is asked and done beside the deploy that is cut."""
    with Shell() as shell:
        yield shell


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    (folder / "trainer").mkdir(parents=True)
    for number in range(20):
        (folder / "trainer" / f"{number}.py").write_bytes(os.urandom(20_000))
    return Source(folder)


class Hook(Progress):
    """Calls back when the deploy begins a step."""

    def __init__(self, hook: Callable[[str], None]) -> None:
        self.hook = hook

    def step(self, text: str) -> None:
        self.hook(text)


@dataclass(frozen=True)
class Case:
    """moment: seconds from the step's begin to the harm; None: one of MOMENTS."""

    way: str
    step: str
    moment: float | None

    @property
    def via(self) -> Via:
        return "stream" if self.way == "stream" else "push"


class Target:
    """The container that deploys go into, and what happens to it."""

    def __init__(self, door: Shell, container: Container, source: Source, folder: Path, rng: random.Random) -> None:
        self.door, self.container, self.source, self.folder, self.rng = door, container, source, folder, rng
        self.known = {verbs.deploy(door, container, source).release}
        self.memory = remembered._file(container).read_bytes()

    def expect(self, container: Container, case: Case) -> None:
        """Lets deploys to the container go the case's way."""
        remembered._file(container).unlink(missing_ok=True)
        if case.way == "ahead":
            remembered._file(container).write_bytes(self.memory)

    def change(self) -> None:
        """New content for a few files; the others are there already."""
        for number in self.rng.sample(range(20), 5):
            (self.source.root / "trainer" / f"{number}.py").write_bytes(self.rng.randbytes(20_000))

    def check(self) -> None:
        """Current is one of the releases, whole; the next deploy works and leaves nothing but releases."""
        listed = {it.name for it in (folder_of(self.container) / "releases").iterdir() if ".tmp-" not in it.name}
        # A release whose content had arrived may still have taken its place: then it is whole.
        self.known |= listed
        current = current_release(self.container)
        assert current in listed
        assert (folder_of(self.container) / "current").readlink() == Path("releases", current)
        verbs.rollback(self.door, self.container, current)  # it refuses what is not whole
        self.change()
        done = verbs.deploy(self.door, self.container, self.source)
        assert done.release > max(self.known)
        self.known.add(done.release)
        self.memory = remembered._file(self.container).read_bytes()
        until(lambda: left_by_deploys(self.container) == [])
        if len(listed) > 10:
            verbs.prune(self.door, self.container, 2)  # the disk is small


def check_whole(shell: Shell, container: Container, releases: set[str]) -> str:
    """The current release's id; it is one of these, and every file of it is as it was sent."""
    current = current_release(container)
    assert current in releases
    verbs.rollback(shell, container, current)  # it refuses what is not whole
    return current


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


# -- the faults: each deploys, and does its harm when a step begins, or a moment later


def at_step(case: Case, harm: Callable[[], object], stack: ExitStack, *, at_once: bool = False) -> Hook:
    """Does the harm once; in a thread when it comes a moment later, or may have to wait for our own push."""
    left = [harm]

    def hook(text: str) -> None:
        if not text.startswith(case.step) or not left:
            return
        if at_once or (not case.moment and case.way != "ahead"):
            left.pop()()
            return
        timer = threading.Timer(case.moment or 0.0, left.pop())
        stack.callback(timer.join)
        timer.start()

    return Hook(hook)


def cut_link(target: Target, case: Case, stack: ExitStack) -> None:
    proxy = stack.enter_context(Proxy(target.container.host, target.folder))
    container = proxy.before(target.container)
    target.expect(container, case)
    with Shell() as shell:
        verbs.deploy(shell, container, target.source, via=case.via, way=at_step(case, proxy.cut, stack))


def kill_client(target: Target, case: Case, stack: ExitStack) -> None:
    inventory = proxied(target.container, target.folder)
    client = Cli(inventory).start("--debug", "deploy", "--via", case.via, str(target.source.root))
    assert client.stderr is not None
    for line in client.stderr:
        if line.decode().startswith(case.step):
            break
    else:
        raise AssertionError(f"the deploy ended before {case.step!r}")
    time.sleep(case.moment or 0.0)
    client.kill()
    client.communicate(timeout=60)


def stop_container(target: Target, case: Case, stack: ExitStack) -> None:
    host = target.container.host

    def start() -> None:
        if b"stopped" in target.door.run(host, Command(("pct", "status", "200"))).out:
            target.door.run(host, Command(("pct", "start", "200")), check=True)

    def stop() -> None:
        target.door.run(host, Command(("pct", "stop", "200")), check=True)

    stack.callback(start)
    deploy_beside(target, case, at_step(case, stop, stack))


def fill_container(target: Target, case: Case, stack: ExitStack) -> None:
    fill_disk(target, target.container, "/opt/ballast", case, stack)


def fill_host(target: Target, case: Case, stack: ExitStack) -> None:
    fill_disk(target, target.container.host, "/var/tmp/ballast", case, stack)


def fill_disk(target: Target, place, file: str, case: Case, stack: ExitStack) -> None:
    left = target.rng.choice([0, 50_000, 150_000])
    stack.callback(lambda: target.door.run(place, Command(("rm", "-f", file)), check=True))
    filling = at_step(case, lambda: filled(target.door, place, file, left), stack, at_once=True)
    deploy_beside(target, case, filling)


def cut_push(target: Target, case: Case, stack: ExitStack) -> None:
    push_badly(target, f"cut {target.rng.randrange(100_000)}", stack)


def change_byte(target: Target, case: Case, stack: ExitStack) -> None:
    push_badly(target, f"flip {target.rng.randrange(100_000)}", stack)


def push_badly(target: Target, fault: str, stack: ExitStack) -> None:
    host = target.container.host
    stack.callback(lambda: target.door.run(host, Command(("rm", "-f", str(PUSH_FAULT))), check=True))
    target.door.run(host, Command(("sh", "-c", 'echo "$1" > "$2"', "sh", fault, str(PUSH_FAULT))), check=True)
    with pytest.raises(OpsError, match="what arrived is not what was sent"):
        verbs.deploy(target.door, target.container, target.source)


def hold_lock(target: Target, case: Case, stack: ExitStack) -> None:
    """pct's own, for a second: it is waited for; or another deploy's, which is named."""
    host = target.container.host
    if case.via == "push":
        lock = Command(("flock", "/run/lock/lxc/pve-config-200.lock", "sh", "-c", "echo held; sleep 1"))

        def hold() -> None:
            talk = stack.enter_context(target.door.converse(host, lock))
            assert talk.hear() == b"held"

        def want() -> None:  # a push that waits for its file has it until then
            thread = threading.Thread(target=target.door.run, args=(host, lock))
            thread.start()
            stack.callback(thread.join)

        holding = at_step(case, want if case.way == "ahead" else hold, stack, at_once=True)
        verbs.deploy(target.door, target.container, target.source, way=holding)
        return
    part = "deploy-00000000.part"
    other = stack.enter_context(verbs._receiver(target.door, target.container, None, True, part))
    other.say({"files": [], "folders": []})
    assert other.answer()["event"] == "ready"
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(verbs, "_PATIENCE_SECONDS", 0.3)
    with pytest.raises(BusyError, match=r"another deploy is going on .*held by \w+@.* since 20"):
        deploy_beside(target, case, Progress())


def jump_clock(target: Target, case: Case, stack: ExitStack) -> None:
    """Forwards or backwards by years: ids still sort by age."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    years, real = target.rng.choice([-3, 1]), verbs.now

    def jump() -> None:
        patch.setattr(verbs, "now", lambda: real() + timedelta(days=365 * years))

    jumping = at_step(case, jump, stack, at_once=True)
    done = verbs.deploy(target.door, target.container, target.source, via=case.via, way=jumping)
    assert done.release > max(target.known)


def deploy_twice(target: Target, case: Case, stack: ExitStack) -> None:
    """The other one begins at a step of ours; it waits its turn, or is told who is at work."""
    other = Source(target.folder / "other")
    (other.root / "trainer").mkdir(parents=True, exist_ok=True)
    (other.root / "trainer" / "other.py").write_bytes(target.rng.randbytes(1000))
    ended: list[object] = []

    def run() -> None:
        try:
            with Shell() as shell:
                ended.append(verbs.deploy(shell, target.container, other, via=case.via).release)
        except OpsError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    stack.callback(thread.join)
    ours = deploy_beside(target, case, at_step(case, thread.start, stack, at_once=True))
    thread.join()
    assert isinstance(ended[0], str | BusyError)
    assert current_release(target.container) in (ours.release, ended[0])


def deploy_beside(target: Target, case: Case, way: Progress) -> verbs.Deployed:
    with Shell() as shell:
        return verbs.deploy(shell, target.container, target.source, via=case.via, way=way)


FAULTS = {
    "the link is cut": cut_link,
    "the client is killed": kill_client,
    "the container is stopped": stop_container,
    "the container's disk is full": fill_container,
    "the host's disk is full": fill_host,
    "the push is cut short": cut_push,
    "a byte is another": change_byte,
    "a lock is held": hold_lock,
    "the clock jumps": jump_clock,
    "two at once": deploy_twice,
}
CASES = [
    Case(way, step, moment)
    for way, steps in STEPS.items()
    for step in steps
    # What is begun ahead is cut as each step begins, and a moment later; of the others a few are.
    for moment in ((0.0, None) if way == "ahead" else (None,))
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FAULTS)
def test_after_any_fault_at_any_step(small: Box, source: Source, door: Shell, share, tmp_path: Path, kind: str) -> None:
    assert len(CASES) * len(FAULTS) == 200
    rng = random.Random(kind)
    target = Target(door, replace(small.container, path=f"/opt/{kind.replace(' ', '-')}"), source, tmp_path, rng)
    ahead = [case for case in CASES if case.way == "ahead"]
    for case in (*share(ahead), *share([case for case in CASES if case not in ahead])):
        case = replace(case, moment=rng.choice(MOMENTS) if case.moment is None else case.moment)
        target.expect(target.container, case)
        target.change()
        with ExitStack() as stack, refused_at_most():
            FAULTS[kind](target, case, stack)
        target.check()
    shutil.rmtree(folder_of(target.container))  # the disk is small


@contextmanager
def refused_at_most() -> Generator[None, None, None]:
    """A deploy under a fault may fail, with one of our errors; any other exception is a fault of ours."""
    try:
        yield
    except OpsError as error:
        assert "\n" not in error.line()


def proxied(container: Container, folder: Path) -> Path:
    """An inventory of the container, without the sandbox's help."""
    file, host = folder / "plain.toml", container.host
    file.write_text(
        f'[hosts.box]\naddress = "{host.address}"\nport = {host.port}\nuser = "root"\nkey = "{host.key}"\n'
        f'known_hosts = "{host.known_hosts}"\n[containers.c]\nhost = "box"\nvmid = 200\n'
        f'path = "{container.path}"\npython = "{container.python}"\n'
    )
    return file


def filled(shell: Shell, place, file: str, leave: int) -> None:
    """Fills a disk but for `leave` bytes."""
    script = 'free=$(df -B1 --output=avail "${1%/*}" | tail -1); head -c $((free - $2)) /dev/zero > "$1"'
    shell.run(place, Command(("sh", "-c", script, "sh", file, str(leave))), check=True)


def change_all(source: Source) -> None:
    for place in (source.root / "trainer").iterdir():
        place.write_bytes(os.urandom(20_000))


@pytest.mark.parametrize("step", ["asking", "staging", "sending", "pct push", "unpacking"])
def test_the_containers_disk_is_full(small: Box, source: Source, step: str) -> None:
    """From any step on; pct push itself says nothing then."""
    container = replace(small.container, path=f"/opt/full-{step.split()[0]}")
    with Shell() as shell:
        first = verbs.deploy(shell, container, source).release
        change_all(source)

        def fill(now: str) -> None:
            if now.startswith(step):
                # Room for a part of the archive; at the last step the archive is there, and not all its files fit.
                filled(shell, container, "/opt/ballast", 100_000)

        with pytest.raises(PreflightError, match=r"the container's disk is (too )?full .*df -h /opt/full"):
            verbs.deploy(shell, container, source, way=Hook(fill))
        assert check_whole(shell, container, {first}) == first
        shell.run(container, Command(("rm", "/opt/ballast")), check=True)
        verbs.deploy(shell, container, source)
        assert left_by_deploys(container) == []


@pytest.mark.parametrize("left", [0, 100_000])
def test_the_hosts_disk_is_full(small: Box, source: Source, left: int) -> None:
    container = replace(small.container, path=f"/opt/host-full-{left}")
    with Shell() as shell:
        first = verbs.deploy(shell, container, source).release
        change_all(source)
        filled(shell, container.host, "/var/tmp/ballast", left)
        try:
            with pytest.raises(PreflightError, match=r"the host's disk is full .*: df -h /$") as caught:
                verbs.deploy(shell, container, source)
            assert "\n" not in caught.value.line()
        finally:
            shell.run(container.host, Command(("rm", "/var/tmp/ballast")), check=True)
        assert check_whole(shell, container, {first}) == first
        verbs.deploy(shell, container, source)
        assert left_by_deploys(container) == []


def test_a_source_larger_than_the_disk_is_refused_before_anything_is_sent(small: Box, source: Source) -> None:
    with (source.root / "big").open("wb") as file:
        file.truncate(DISK)
    steps: list[str] = []
    with Shell() as shell, pytest.raises(OpsError, match="bytes are needed"):
        verbs.deploy(shell, small.container, source, way=Hook(steps.append))
    assert [step.split()[0] for step in steps] == ["reading", "asking"]
