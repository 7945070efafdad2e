"""Any words arrive as they were given, whatever shell the host's user has, and nothing in them ever runs."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from openssh import Sshd, make_key, need
from words import Canary, as_words, batch

from dflash_ops.command import Command, Container, Host
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.shell import Shell

# As Proxmox's: what is behind `--` is run as it is.
LXC_ATTACH = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'


def arrive(shell: Shell, place: Host | Container, numbers: list[int], *, soak: bool) -> None:
    """Each batch comes back as it was sent, with nothing beside it, and no word has done anything. soak: each in a
    command of its own."""
    canary = Canary()
    for together in [[number] for number in numbers] if soak else commands(numbers):
        raw = [word for number in together for word in batch(number, canary)]
        result = shell.run(place, Command(("printf", "[%s]", *as_words(raw))))
        assert (result.out, result.err, result.code) == (b"".join(b"[%s]" % word for word in raw), b"", 0), together
    where = (place, place.host) if isinstance(place, Container) else (place,)
    for each in where:
        assert shell.run(each, Command(("ls", canary.path))).code == 2
    assert not Path(canary.path).exists()


def commands(numbers: list[int]) -> list[list[int]]:
    """Ten batches a command at most, of one kind: what has to be packed in some way is beside nothing else."""
    kinds = [[number for number in numbers if number % 6 == kind] for kind in range(6)]
    return [kind[begin : begin + 10] for kind in kinds for begin in range(0, len(kind), 10)]


@contextmanager
def login_shell(shell: Shell, box: Host, user: str, program: str) -> Generator[None]:
    """The user's login shell in the sandbox's hypervisor, for a while. box: root there."""

    def change(to: str) -> None:
        line = (
            f"sed -i 's|^{user}:\\(.*\\):[^:]*$|{user}:\\1:{to}|' /etc/passwd && grep -q '^{user}:.*:{to}$' /etc/passwd"
        )
        shell.run(box, Command(("sh", "-c", line)), check=True)

    change(program)
    try:
        yield
    finally:
        change("/bin/bash")


@pytest.mark.timeout(900)  # whole, on a busy machine
@pytest.mark.parametrize("via", ["lxc-attach", "pct"])
def test_10_000_words(
    via: str, sandbox: SandboxState, shell: Shell, share: Callable[[list[int]], list[int]], soak: bool
) -> None:
    host = Host("box", sandbox.host, sandbox.port, sandbox.user, sandbox.key, sandbox.known_hosts)
    container = Container(host, 200, python="/usr/bin/python3", via=via)  # pyright: ignore[reportArgumentType]
    arrive(shell, container, share(list(range(500))), soak=soak)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "via"), [("/usr/bin/fish", "lxc-attach"), ("/usr/bin/tcsh", "pct")])
def test_words_through_sudo_and_an_odd_login_shell(
    program: str, via: str, sandbox: SandboxState, shell: Shell, share: Callable[[list[int]], list[int]], soak: bool
) -> None:
    need(program)
    root = Host("box", sandbox.host, sandbox.port, "root", sandbox.key, sandbox.known_hosts)
    ops = replace(root, user="ops")
    container = Container(ops, 200, python="/usr/bin/python3", via=via)  # pyright: ignore[reportArgumentType]
    with login_shell(shell, root, "ops", program):
        assert shell.run(ops, Command(("sh", "-c", "echo $SHELL"))).out == f"{program}\n".encode()
        arrive(shell, container, share(list(range(500, 560))), soak=soak)


@pytest.mark.parametrize("program", ["/bin/bash", "/bin/dash", "/usr/bin/fish", "/bin/tcsh"])
def test_words_through_openssh(
    program: str, tmp_path: Path, shell: Shell, share: Callable[[list[int]], list[int]], soak: bool
) -> None:
    need(program)
    key = make_key(tmp_path / "id")
    path = "SetEnv PATH=/run/here/home/root:/usr/bin:/bin"
    with Sshd(tmp_path / "sshd", shells={"root": program}, config=path).authorize(key) as server:
        attach = server.home() / "lxc-attach"
        attach.write_text(LXC_ATTACH)
        attach.chmod(0o755)
        host = server.host(key)
        arrive(shell, host, share(list(range(600, 650))), soak=soak)
        arrive(shell, Container(host, 200), share(list(range(650, 700))), soak=soak)
