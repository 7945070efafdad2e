"""A deploy cut at each of its steps, in each way: `current` stays a whole release, the next deploy works and cleans up.

The client is the real command line; `--debug` makes it name each step on stderr as it begins it.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory
from proxy import Proxy

from dflash_ops import deploy as verbs
from dflash_ops.command import Command, Container
from dflash_ops.errors import OpsError, PreflightError
from dflash_ops.shell import Shell
from dflash_ops.source import Source

STEPS = ("reading", "asking", "staging", "sending", "pct push", "unpacking")
KINDS = ("client killed", "ssh dropped", "container stopped")
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


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    (folder / "trainer").mkdir(parents=True)
    for number in range(20):
        (folder / "trainer" / f"{number}.py").write_bytes(os.urandom(20_000))
    return Source(folder)


def check_whole(shell: Shell, container: Container, releases: set[str]) -> str:
    """The current release's id; it is one of these, and every file of it is as it was sent."""
    current = [item.id for item in verbs.releases(shell, container) if item.current]
    assert len(current) == 1 and current[0] in releases
    verbs.rollback(shell, container, current[0])  # it refuses what is not whole
    return current[0]


def leftovers(shell: Shell, container: Container) -> list[str]:
    """What a deploy must not leave: archives, half releases, staging folders, and its own process in the container."""
    path = container.path
    inside = f"find {path}/incoming {path}/releases -mindepth 1 -maxdepth 1 ( -name *.part -o -name *.tmp-* )"
    found = shell.run(container, Command(tuple(inside.split())), check=True).out
    found += shell.run(container.host, Command(("find", "/var/tmp", "-name", "dflash-ops-stage-*")), check=True).out
    found += shell.run(container, Command(("sh", "-c", "pgrep -af '[ ]receive$' || true"))).out
    return found.decode().split("\n")[:-1]


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def wait_for_step(client: subprocess.Popen[bytes], step: str) -> None:
    assert client.stderr is not None
    for line in client.stderr:
        if line.decode().startswith(step):
            return
    raise AssertionError(f"the deploy ended before {step!r}")


@pytest.fixture(scope="module")
def door() -> Generator[Shell, None, None]:
    """One connection for all that is asked and done beside the deploy that is cut."""
    with Shell() as shell:
        yield shell


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_cut_at_every_step_in_every_way(
    small: Box, source: Source, door: Shell, soak: bool, tmp_path: Path, step: str, kind: str
) -> None:
    container = replace(small.container, path=f"/opt/{step}-{kind}".replace(" ", "-"))
    known = {verbs.deploy(door, container, source).release}
    random_moment = random.Random(step + kind)
    for number in range(10 if soak else 1):
        (source.root / "trainer" / "0.py").write_text(f"{number}")
        with Proxy(container.host, tmp_path) as proxy:
            client = Cli(proxied(proxy, container, tmp_path)).start("--debug", "deploy", str(source.root))
            wait_for_step(client, step)
            time.sleep(random_moment.choice([0.0, 0.01, 0.03, 0.1]))
            match kind:
                case "client killed":
                    client.kill()
                case "ssh dropped":
                    proxy.cut()
                case _:
                    door.run(container.host, Command(("pct", "stop", "200")), check=True)
            out, err = client.communicate(timeout=60)
        if kind == "container stopped":
            door.run(container.host, Command(("pct", "start", "200")), check=True)
        if client.returncode == 0:
            known.add(out.decode().split()[1])
        else:
            assert client.returncode in (-signal.SIGKILL, 1, 4, 6), err.decode()
        # A release whose archive had arrived may still take its place: then it is whole.
        known |= {item.id for item in verbs.releases(door, container)}
        check_whole(door, container, known)
        known.add(verbs.deploy(door, container, source).release)
        assert check_whole(door, container, known) == max(known)
        until(lambda: leftovers(door, container) == [])
    door.run(container, Command(("rm", "-r", container.path)), check=True)  # the disk is small


def proxied(proxy: Proxy, container: Container, folder: Path) -> Path:
    """An inventory of the container as reached through the proxy."""
    file, host = folder / "proxied.toml", proxy.host
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


@pytest.mark.parametrize("step", ["asking", "staging", "sending", "pct push", "unpacking"])
def test_the_containers_disk_is_full(small: Box, source: Source, step: str) -> None:
    """From any step on; pct push itself says nothing then."""
    container = replace(small.container, path=f"/opt/full-{step.split()[0]}")
    with Shell() as shell:
        first = verbs.deploy(shell, container, source).release

        def fill(now: str) -> None:
            if now.startswith(step):
                # Room for a part of the archive; at the last step the archive is there, and not all its files fit.
                filled(shell, container, "/opt/ballast", 100_000)

        with pytest.raises(PreflightError, match=r"the container's disk is (too )?full .*df -h /opt/full"):
            verbs.deploy(shell, container, source, on_step=fill)
        assert check_whole(shell, container, {first}) == first
        shell.run(container, Command(("rm", "/opt/ballast")), check=True)
        verbs.deploy(shell, container, source)
        assert leftovers(shell, container) == []


@pytest.mark.parametrize("left", [0, 100_000])
def test_the_hosts_disk_is_full(small: Box, source: Source, left: int) -> None:
    container = replace(small.container, path=f"/opt/host-full-{left}")
    with Shell() as shell:
        first = verbs.deploy(shell, container, source).release
        filled(shell, container.host, "/var/tmp/ballast", left)
        try:
            with pytest.raises(PreflightError, match=r"the host's disk is full .*: df -h /$") as caught:
                verbs.deploy(shell, container, source)
            assert "\n" not in caught.value.line()
        finally:
            shell.run(container.host, Command(("rm", "/var/tmp/ballast")), check=True)
        assert check_whole(shell, container, {first}) == first
        verbs.deploy(shell, container, source)
        assert leftovers(shell, container) == []


def test_a_source_larger_than_the_disk_is_refused_before_anything_is_sent(small: Box, source: Source) -> None:
    with (source.root / "big").open("wb") as file:
        file.truncate(DISK)
    steps: list[str] = []
    with Shell() as shell, pytest.raises(OpsError, match="bytes are needed"):
        verbs.deploy(shell, small.container, source, on_step=steps.append)
    assert [step.split()[0] for step in steps] == ["reading", "asking"]
