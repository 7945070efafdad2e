"""Users who are not root: what sudo says they may do, and every verb by it."""

import os
import secrets
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_in
from conftest import Box, write_inventory
from in_container import wait_for_log

from dflash_ops import data, deploy, doctor, source, status, sudo, train
from dflash_ops.command import Command, Container, Host, Local, Place, Result, Sudo, line, pct
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError
from dflash_ops.gate import Gate
from dflash_ops.run_request import StartRequest
from dflash_ops.runs import RunState
from dflash_ops.sandbox.state import SandboxState
from dflash_ops.sandbox.users import SUDOERS, SUDOERS_TEXT
from dflash_ops.shell import Shell

BOTH = SUDOERS_TEXT
PCT_ALONE = "ops ALL=(root) NOPASSWD: /usr/sbin/pct\n"
ATTACH_ALONE = "ops ALL=(root) NOPASSWD: /usr/bin/lxc-attach\n"
ALL = "ops ALL=(ALL:ALL) NOPASSWD: ALL\n"
HOST = Host("lab", "lab.example", user="ops")
LIMITED = Sudo(pct=True, attach=True)


# -- what sudo says


def listing(
    rows: str, defaults: str = "env_reset, mail_badpass,\n    secure_path=/usr/sbin\\:/usr/bin,\n    use_pty"
) -> Result:
    text = f"Matching Defaults entries for ops on pve:\n    {defaults}\n\n"  # as sudo 1.9.13 was seen to print it
    text += f"User ops may run the following commands on pve:\n{rows}\n\nhas-lxc-attach\n"
    return Result(HOST, sudo.QUESTION, 0, text.encode(), b"")


@pytest.mark.parametrize(
    ("rows", "allowed"),
    [
        ("    (root) NOPASSWD: /usr/sbin/pct, /usr/bin/lxc-attach", Sudo(pct=True, attach=True)),
        ("    (root) NOPASSWD: /usr/sbin/pct", Sudo(pct=True)),
        ("    (root) /usr/sbin/pct, NOPASSWD: /usr/bin/lxc-attach", Sudo(attach=True)),
        ("    (root) NOPASSWD: /usr/sbin/pct, PASSWD: /usr/bin/lxc-attach", Sudo(pct=True)),
        ("    (ALL : ALL) NOPASSWD: ALL", Sudo(everything=True, pct=True, attach=True)),
        ("    (ALL : ALL) ALL\n    (root) NOPASSWD: /usr/sbin/pct", Sudo(pct=True)),
        ("    (root) NOPASSWD: /usr/sbin/pct\n    (ALL : ALL) ALL", Sudo()),
        ("    (ALL) NOPASSWD: ALL, !/usr/sbin/pct", Sudo(everything=True, attach=True)),
        ("    (postgres) NOPASSWD: ALL", Sudo()),
        ("    (ALL, !root) NOPASSWD: ALL", Sudo()),
        ("    (root) NOEXEC: NOPASSWD: /usr/sbin/pc?, /usr/bin/", Sudo(pct=True, attach=True)),
        ("    (root) NOPASSWD: sha256:0123abcd /usr/sbin/pct exec 200 *, /bin/a\\,b", Sudo(pct=True)),
        # As sudo 1.9.13 wraps it, also where there is no terminal.
        (
            "    (ALL : ALL) ALL, NOPASSWD: /usr/sbin/pct, PASSWD: /bin/ls, SETENV:\n"
            "        NOPASSWD: /usr/bin/lxc-attach -n 200 *",
            Sudo(pct=True, attach=True),
        ),
        ("    (root) NOPASSWD: /usr/local/sbin/pct, /usr/sbin/pctx", Sudo()),
    ],
)
def test_what_a_listing_allows(rows: str, allowed: Sudo) -> None:
    found = sudo.read(listing(rows), "ops")
    assert found == sudo.Rights("ops", allowed, has_lxc_attach=True, pvesh=found.pvesh)
    assert sudo.read(listing("    (root) NOPASSWD: /usr/sbin/pct, /usr/bin/pvesh"), "ops").pvesh
    assert not sudo.read(listing("    (root) NOPASSWD: /usr/sbin/pct"), "ops").pvesh


def test_a_sudo_that_never_asks() -> None:
    assert sudo.read(listing("    (root) /usr/sbin/pct", "env_reset,\n    use_pty, !authenticate"), "ops").sudo.pct


@pytest.mark.parametrize(
    ("code", "err", "why"),
    [
        (1, b"sudo: a password is required\n", "sudo: a password is required"),
        (1, b"sudo: unable to resolve host pve: x\nsudo: a password is required\n", "sudo: a password is required"),
        (127, b"sh: 1: sudo: not found\n", "the host has no sudo"),
        (
            1,
            b"sudo: account validation failure, is your account locked?\nsudo: a password is required\n",
            "sudo: account validation failure, is your account locked?; sudo: a password is required",
        ),
        (1, b"", "sudo: code 1"),
    ],
)
def test_what_a_refusal_says(code: int, err: bytes, why: str) -> None:
    rights = sudo.read(Result(HOST, sudo.QUESTION, code, b"", err), "DOM\\an op")
    assert rights.refused == why and rights.sudo == Sudo()
    told = str(sudo.error(HOST, rights))
    assert why in told and r"DOM\\an\ op ALL=(root) NOPASSWD: /usr/sbin/pct, /usr/bin/lxc-attach" in told


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_sudo_that_does_not_know_its_hosts_name_hides_no_reason(cut: int) -> None:
    """However the bytes come; and what else it says is passed on."""
    warning = b"sudo: unable to resolve host pve: Name or service not known\n"
    reason = b"lxc-attach: 202: attach.c: get_attach_context: 405 - Failed to get init pid\n"
    for said, held, passed in ((reason, reason, b""), (b"my own\n", b"", b"my own\n")):
        heard = bytearray()
        gate = Gate(heard.extend)
        for part in ((warning + said)[:cut], (warning + said)[cut:]):
            gate(part)
        assert (bytes(gate.held), bytes(heard)) == (held, passed)


# -- the line


def test_where_sudo_stands() -> None:
    """Before the programs that sudoers names, by their full names; locks where they outlive it."""
    command = Command(("nvidia-smi",), host_prefix=("flock", "/run/lock/x"))
    box = Container(HOST, 200)
    inside = "env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8"
    assert line(box, command, LIMITED).text.decode() == (
        f"exec sudo -n -- /usr/bin/lxc-attach -n 200 --clear-env -- {inside} flock /run/lock/x nvidia-smi"
    )
    assert line(replace(box, via="pct"), command, LIMITED).text.decode() == (
        f"exec env LC_ALL=C.UTF-8 sudo -n -- /usr/sbin/pct exec 200 -- {inside} flock /run/lock/x nvidia-smi"
    )
    everything = Sudo(everything=True)
    assert line(box, command, everything).text.startswith(b"exec sudo -n -- flock /run/lock/x lxc-attach -n 200")
    assert line(HOST, pct("list"), everything).text == b"exec sudo -n -- env LC_ALL=C.UTF-8 pct list"
    assert line(HOST, pct("list"), LIMITED).text == b"exec env LC_ALL=C.UTF-8 sudo -n -- /usr/sbin/pct list"
    assert line(HOST, pct("list")).text == b"exec env LC_ALL=C.UTF-8 pct list"
    for root, what, text in (
        (True, everything, b"exec sudo -n -- id"),
        (True, LIMITED, b"exec id"),
        (False, everything, b"exec id"),
    ):
        assert line(HOST, Command(("id",), root=root), what).text == text


def test_words_that_a_strict_sudo_would_lose_go_by_stdin() -> None:
    """Whether LC_ALL passes is for its configuration to say, and pct needs it for all that is not ASCII."""
    by_pct = Container(HOST, 200, via="pct")
    assert line(by_pct, Command(("echo", "é")), LIMITED).stdin_head
    assert not line(by_pct, Command(("echo", "é")), Sudo(everything=True)).stdin_head
    assert not line(by_pct, Command(("echo", "é")), LIMITED, terminal=True).stdin_head


# -- the sandbox's


@pytest.fixture
def sudoers(sandbox: SandboxState) -> Generator[Callable[[str], None]]:
    """Writes what ops may do; at the end it is as it was."""
    root = Host("root", sandbox.host, sandbox.port, "root", sandbox.key, sandbox.known_hosts)
    with Shell() as shell:
        yield lambda text: shell.run(root, Command(("tee", str(SUDOERS)), text.encode()), check=True) and None
        shell.run(root, Command(("tee", str(SUDOERS)), BOTH.encode()), check=True)


@pytest.fixture
def ours(sandbox: SandboxState, tmp_path: Path) -> Container:
    """Container 200, for ops."""
    container = Box(write_inventory(tmp_path, sandbox.name, more="gpus = [0, 1]\n"), sandbox).container
    return replace(container, host=replace(container.host, user="ops"))


@pytest.mark.parametrize("allowed", [BOTH, PCT_ALONE], ids=["both", "pct alone"])
def test_every_verb_as_a_user_who_is_not_root(
    allowed: str, ours: Container, sudoers: Callable[[str], None], shell: Shell, tmp_path: Path, soak: bool
) -> None:
    """A deploy by pct push, data there and back, a run from start to stop with its GPU's lock, GPUs, doctor."""
    sudoers(allowed)
    folder = stand_in.make_release(tmp_path / "stand-in")
    (folder / "trainer" / "data.bin").write_bytes(os.urandom(300_000))
    done = deploy.deploy(shell, ours, source.choose(folder, None, here=folder))
    assert done.release in shell.run(ours, Command(("readlink", f"{ours.path}/current"))).out.decode()
    assert shell.run(ours.host, Command(("sh", "-c", "ls -d /var/tmp/dflash-ops-stage-*"))).code != 0
    started = train.start(shell, ours, StartRequest("a", "", "mine.toml", gpus=(0,)))
    with pytest.raises(BusyError, match="GPU"):
        train.start(shell, ours, StartRequest("b", "", "mine.toml", gpus=(0,)))
    if soak or allowed == BOTH:
        (tmp_path / "a é").write_bytes(os.urandom(100_000))
        data.put(shell, ours, [tmp_path / "a é"], "shared/")
        data.get(shell, ours, "shared/a é", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "a é").read_bytes()
        wait_for_log(ours, started.run.id)
        heard = bytearray()
        train.logs(shell, ours, started.run.id, on_out=heard.extend)
        assert b"step" in heard
        assert len(status.gpu_status(shell, ours.host, [ours], ours).gpus) == 2
        assert [check.name for check in doctor.doctor(shell, ours).checks if check.where == str(ours)]
    assert train.stop(shell, ours, "a", grace=20).run.state is RunState.STOPPED


@pytest.mark.parametrize(
    ("text", "why", "step"),
    [
        ("", "sudo: a password is required", BOTH),
        ("ops ALL=(ALL) ALL\n", "sudo: a password is required", BOTH),
        ("ops ALL=(root) NOPASSWD: /bin/true\n", "sudo lets ops run neither without a password", BOTH),
        (f"Defaults:ops requiretty\n{BOTH}", "you must have a tty", f"Defaults:ops !requiretty\n{BOTH}"),
    ],
)
def test_what_is_missing_is_told_with_the_line_that_mends_it(
    text: str, why: str, step: str, ours: Container, sudoers: Callable[[str], None]
) -> None:
    sudoers(text)
    with Shell() as shell:
        for ask in (
            lambda: shell.run(ours, Command(("true",))),
            lambda: shell.stream(ours, Command(("true",)), on_out=print),
            lambda: shell.converse(ours, Command(("true",))).__enter__(),
        ):
            with pytest.raises(
                PreflightError, match=f"ops may not run pct and lxc-attach as root .box.: .*{why}"
            ) as caught:
                ask()
        told = caught.value.next.partition("the line: ")[2]
        assert f"{told}\n" == step.partition("\n")[0] + "\n"
    sudoers(step)
    with Shell() as shell:
        assert shell.run(ours, Command(("true",))).code == 0


def test_what_ops_may_do_is_asked_once_and_root_is_asked_nothing(
    ours: Container, sudoers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sudoers(BOTH)
    asked: list[Command] = []
    run = Shell.run

    def noted(self: Shell, place: Place, command: Command, **more: Any) -> Result:
        asked.append(command)
        return run(self, place, command, **more)

    monkeypatch.setattr(Shell, "run", noted)
    for user in ("ops", "root"):
        with Shell() as shell:
            for _ in range(3):
                shell.stream(replace(ours, host=replace(ours.host, user=user)), Command(("true",)), on_out=print)
    assert asked == [sudo.QUESTION]


def test_stopped_and_missing_containers(ours: Container, sudoers: Callable[[str], None]) -> None:
    """Without pct nobody can say which."""
    for allowed in (BOTH, ATTACH_ALONE):
        sudoers(allowed)
        with Shell() as shell:
            if allowed == ATTACH_ALONE:
                assert shell.run(ours, Command(("true",))).code == 0
                for vmid in (202, 999):
                    with pytest.raises(PreflightError, match=f"{vmid} is stopped, or there is none .*visudo"):
                        shell.run(replace(ours, vmid=vmid), Command(("true",)))
                continue
            with pytest.raises(PreflightError, match="container 202 is stopped"):
                shell.run(replace(ours, vmid=202), Command(("true",)))
            with pytest.raises(NotFoundError, match="there is no container 999"):
                shell.run(replace(ours, vmid=999), Command(("true",)))


def test_as_root_where_sudo_allows_everything(ours: Container, sudoers: Callable[[str], None]) -> None:
    """A host's question that needs root has it; locks are the host's."""
    sudoers(ALL)
    lock = f"/run/lock/test-{secrets.token_hex(4)}"
    held = Command(("sh", "-c", "echo held; cat"), host_prefix=("flock", "-n", "-E", "7", "-F", lock))
    with Shell() as shell:
        assert shell.run(ours.host, Command(("id", "-u"), root=True)).out == b"0\n"
        assert shell.run(ours.host, Command(("id", "-u"))).out != b"0\n"
        with shell.converse(ours, held) as talk:
            assert talk.hear() == b"held"
            assert shell.run(ours, held).code == 7
            assert shell.run(ours.host, Command(("flock", "-n", "-E", "7", lock, "true"))).code == 7
    sudoers(BOTH)
    with Shell() as shell:
        assert shell.run(ours.host, Command(("id", "-u"), root=True)).out != b"0\n"
        with shell.converse(ours, held) as talk:
            assert talk.hear() == b"held"
            assert shell.run(ours, held).code == 7
    assert shell.run(Local(), Command(("true",))).code == 0


def test_what_ops_sends_is_theirs(ours: Container, shell: Shell) -> None:
    """SFTP in the sandbox acts as who logged in, as a real server's does."""
    assert shell.send(ours.host, b"x", "/home/ops/mine") == 1
    assert shell.run(ours.host, Command(("stat", "-c", "%U", "/home/ops/mine"))).out == b"ops\n"
    with pytest.raises(OpsError, match=r"the upload failed .*/etc/theirs.*[Pp]ermission"):
        shell.send(ours.host, b"x", "/etc/theirs")
