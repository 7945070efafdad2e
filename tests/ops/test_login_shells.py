"""What a login shell does before our command: it talks, dawdles, hangs, or never runs it. On OpenSSH's own server."""

import hashlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Box
from openssh import Sshd, make_key, need

from dflash_ops import deploy, framing, source, status
from dflash_ops.command import Command, Host
from dflash_ops.errors import OpsError, TimedOutError, UnreachableError
from dflash_ops.shell import Shell

# Each shell's file that is read for a command too, and lines in it that print on both outputs.
ROOTS_HOME = "/root"  # of the sandbox's hypervisor

NOISE = {
    "/bin/bash": (
        ".bashrc",
        "echo Welcome; echo warning: disk is full >&2; printf 'no line end'; printf 'nor here' >&2",
    ),
    "/usr/bin/fish": (".config/fish/config.fish", "echo Welcome; echo warning >&2; printf 'no line end'"),
    "/bin/tcsh": (
        ".tcshrc",
        "echo Welcome; sh -c 'echo warning >&2'; printf 'no line end'; alias printf rm; alias sh rm",
    ),
}
SAYS = Command(("sh", "-c", "echo out; echo err >&2; cat; exit 5"), stdin=b"the input")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "id")


@pytest.fixture
def serve(tmp_path: Path, key: Path) -> Generator[Callable[..., Sshd]]:
    """An sshd with root's login shell, and a file in root's home."""
    servers: list[Sshd] = []

    def begin(program: str = "/bin/bash", file: str = ".bashrc", text: str = "", config: str = "") -> Sshd:
        need(program)
        server = Sshd(tmp_path / f"sshd{len(servers)}", shells={"root": program}, config=config).authorize(key)
        servers.append(server)
        path = server.home() / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return server

    yield begin
    for server in servers:
        server.end()


def says_what_it_says(shell: Shell, host: Host) -> None:
    result = shell.run(host, SAYS)
    assert (result.out, result.err, result.code) == (b"out\nthe input", b"err\n", 5)


@pytest.mark.parametrize("program", NOISE)
def test_noise_reaches_nobody(program: str, serve: Callable[..., Sshd], key: Path, shell: Shell) -> None:
    """Not run, stream or converse; a banner and a message of the day neither."""
    file, text = NOISE[program]
    host = serve(program, file, text, "Banner /etc/passwd\nPrintMotd yes").host(key)
    says_what_it_says(shell, host)
    out, err = bytearray(), bytearray()
    assert shell.stream(host, SAYS, on_out=out.extend, on_err=err.extend) == 5
    assert (bytes(out), bytes(err)) == (b"out\nthe input", b"err\n")
    with shell.converse(host, Command(("sh", "-c", "echo ready; read x; echo $x"))) as talk:
        assert talk.hear() == b"ready"
        talk.say(b"word\n")
        assert talk.hear() == b"word"
        assert talk.finish().err == b""


def test_a_shell_that_shows_each_line(serve: Callable[..., Sshd], key: Path, shell: Shell) -> None:
    """`set -xv` shows the line with our mark in it; that is not yet the mark."""
    says_what_it_says(shell, serve(text="set -xv; echo 'dflash-ops:'").host(key))


def test_much_noise(serve: Callable[..., Sshd], key: Path, shell: Shell) -> None:
    text = "head -c 4000000 /dev/zero | tr '\\0' x; head -c 4000000 /dev/zero | tr '\\0' y >&2"
    says_what_it_says(shell, serve(text=text).host(key))


def test_files_arrive_though_a_login_script_talks_into_sftp(
    serve: Callable[..., Sshd], key: Path, shell: Shell, tmp_path: Path
) -> None:
    """The server's SFTP is a program behind the login shell, as on Debian; or there is none."""
    data, sent = os.urandom(3 << 20), list[int]()
    program = next(Path("/usr/lib").glob("**/sftp-server"), None)
    configs = ["Subsystem sftp /no/such/program"]
    if program is not None:
        configs.append(f"Subsystem sftp {program}")
    for config in configs:
        host = serve(text="echo Welcome", config=config).host(key)
        for name in ("a", "b"):
            to = f"/run/here/{name}"
            assert shell.send(host, data, to, on_sent=sent.append) == len(data) == sum(sent)
            assert shell.run(host, Command(("sha256sum", to))).out[:64].decode() == hashlib.sha256(data).hexdigest()
            sent.clear()
        assert shell.send(host, b"", "/run/here/empty") == 0
        with pytest.raises(OpsError, match=r"the upload failed .*/no/such/folder/x\): .*[Dd]irectory"):
            shell.send(host, b"x", "/no/such/folder/x")


def test_a_slow_login_shell_only_delays(serve: Callable[..., Sshd], key: Path, shell: Shell) -> None:
    """The command's own time begins when it does."""
    host = serve(text="sleep 4").host(key)

    def streamed() -> int:
        return shell.stream(host, SAYS, on_out=bytearray().extend, timeout=3)

    def too_long() -> None:
        with pytest.raises(TimedOutError, match=r"no answer within 0\.3 s"):
            shell.run(host, Command(("sleep", "30")), timeout=0.3)

    with ThreadPoolExecutor() as pool:
        ran, stream, late = pool.submit(shell.run, host, SAYS, timeout=3), pool.submit(streamed), pool.submit(too_long)
    assert (ran.result().code, stream.result(), late.result()) == (5, 5, None)


def test_a_login_shell_that_never_gets_there(
    serve: Callable[..., Sshd], key: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for within bounds, and its last words are told, be it silent since or never."""
    monkeypatch.setattr(framing, "START_SECONDS", 4.0)
    texts = ("echo 'waiting for the licence server' >&2; sleep 1000", "while :; do echo again; sleep 0.02; done")
    hosts = [serve(text=text).host(key) for text in texts]

    def told(host: Host) -> str:
        with pytest.raises(
            TimedOutError, match=r"has not begun our command in 4 s \(box\): .*\. Next: .*ssh 127"
        ) as caught:
            shell.run(host, SAYS)
        return caught.value.why

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(told, hosts)) == ["waiting for the licence server", "again"]


@pytest.mark.parametrize(
    ("program", "config", "why"),
    [
        ("/usr/sbin/nologin", "", "not available"),
        ("/bin/bash", "ForceCommand echo 'backups only'; exit 3", "backups only"),
        ("/bin/bash", "ForceCommand exit 3", "it ended with code 3 and said nothing"),
        ("/bin/false", "", "it ended with code 1 and said nothing"),
    ],
)
def test_a_shell_that_runs_nothing(
    program: str, config: str, why: str, serve: Callable[..., Sshd], key: Path, shell: Shell
) -> None:
    host = serve(program, config=config).host(key)
    for ask in (
        lambda: shell.run(host, SAYS),
        lambda: shell.stream(host, SAYS, on_out=print),
        lambda: shell.converse(host, SAYS).__enter__(),
    ):
        with pytest.raises(UnreachableError, match=rf"login shell did not run our command \(box\): .*{why}.*\. Next: "):
            ask()


def test_verbs_on_a_host_that_talks(box: Box, shell: Shell, tmp_path: Path) -> None:
    """A deploy by pct push, whose every word on stderr is a failure; and a look at the GPUs."""
    shell.send(box.host, b"echo Welcome; echo beware >&2\n", f"{ROOTS_HOME}/.bashrc")
    try:
        (tmp_path / "trainer").mkdir()
        (tmp_path / "trainer" / "__init__.py").write_bytes(os.urandom(100_000))
        warned: list[str] = []
        deploy.deploy(shell, box.container, source.choose(tmp_path, None, here=tmp_path), warn=warned.append)
        assert warned == []
        assert status.gpu_status(shell, box.host, [box.container]).problems == ()
    finally:
        shell.run(box.host, Command(("rm", f"{ROOTS_HOME}/.bashrc")))
