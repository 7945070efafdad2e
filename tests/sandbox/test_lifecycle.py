"""A sandbox's beginning and end: whatever dies, nothing stays."""

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from sandbox_client import Client, living, retry_until, tree

from dflash_ops import sandbox
from dflash_ops.errors import BusyError, NotFoundError, OpsError, PreflightError, UsageFault
from dflash_ops.sandbox import cgroups, state
from dflash_ops.sandbox.processes import ProcessId
from dflash_ops.sandbox.state import SandboxState

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the sandbox needs root")

NAME = f"life-{os.getpid()}"


@pytest.fixture(autouse=True)
def _swept() -> Generator[None]:
    yield
    sandbox.down(NAME)


def groups(name: str = NAME) -> list[Path]:
    base = cgroups.unified_hierarchy()
    return list(Path(base).glob(f"dflash-sandbox-{name}-*")) if base else []


def busy_sandbox() -> tuple[SandboxState, set[ProcessId]]:
    """A sandbox with something running everywhere, and every process of it."""
    up = sandbox.up(NAME, owner=os.getpid())
    with Client(up) as client:
        client.text(200, "setsid sleep 1000 >/dev/null 2>&1 &")
        client.text(201, "sleep 1000 >/dev/null 2>&1 &")
        client.run("setsid sleep 1000 >/dev/null 2>&1 &")
        processes = tree(up.pid)
    assert len(processes) > 7
    return up, processes


def child_of(up: SandboxState, name: str) -> ProcessId:
    return next(p for p in tree(up.pid) if Path(f"/proc/{p.pid}/comm").read_text() == f"{name}\n")


def test_up_and_down_leave_nothing(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    up, processes = busy_sandbox()
    assert state.read(NAME) == up and up.folder.exists()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    with pytest.raises(BusyError):
        sandbox.up(NAME)
    assert sandbox.down(NAME) is True
    assert (living(processes), up.folder.exists(), groups()) == ([], False, [])
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sandbox.down(NAME) is False
    with pytest.raises(NotFoundError, match=f"dflash-ops sandbox up --name {NAME}"):
        state.read(NAME)


@pytest.mark.parametrize("victim", ["init", "sshd", "gpud", "guard"])
def test_the_death_of_any_part_is_the_end_of_all(victim: str) -> None:
    up, processes = busy_sandbox()
    parts: dict[str, Callable[[], ProcessId]] = {"guard": lambda: up.guard, "init": lambda: up.init}
    try:
        chosen = parts[victim]() if victim in parts else child_of(up, victim)
    except StopIteration:
        pytest.skip("real GPUs here: there is no such process")
    os.kill(chosen.pid, signal.SIGKILL)
    retry_until(lambda: not living(processes))
    with pytest.raises(NotFoundError):
        state.read(NAME)
    if victim == "guard":
        # Nobody is left to clear up: the state stays, and is known to be stale.
        assert up.folder.exists()
        assert sandbox.down(NAME) is True
    retry_until(lambda: not up.folder.exists() and not groups())


def test_up_clears_what_a_crash_left() -> None:
    up, processes = busy_sandbox()
    os.kill(up.pid, signal.SIGKILL)
    retry_until(lambda: not living(processes))
    again = sandbox.up(NAME, owner=os.getpid())
    assert again.pid != up.pid and len(groups()) <= 1
    with Client(again) as client:
        assert client.text(200, "hostname") == "train200"


def test_it_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    up = sandbox.up(NAME, owner=owner.pid)
    processes = tree(up.pid)
    owner.kill()
    owner.wait()
    retry_until(lambda: not living(processes) and not up.folder.exists())
    with pytest.raises(UsageFault):
        sandbox.up(NAME, owner=owner.pid)


UP = [sys.executable, "-c", f"from dflash_ops import sandbox; sandbox.up({NAME!r})"]


def test_up_killed_half_way_is_taken_over(share: Callable[[list[float]], list[float]]) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    folder = state.folder_of(NAME)
    for delay in share([step / 100 for step in range(40)]):
        process = subprocess.Popen(UP)
        retry_until(folder.exists)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        process.kill()
        process.wait()
        with contextlib.suppress(BusyError):  # the killed one had done its work already
            sandbox.up(NAME, owner=os.getpid())
        processes = tree(state.read(NAME).pid)
        sandbox.down(NAME)
        assert (living(processes), ours(), groups(), folder.exists()) == ([], [], [], False), delay
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_up_waits_for_the_guard_of_a_killed_one() -> None:
    """The guard outlives the `up` that started it; held up before it has said who it is, it must not be missed."""
    first = subprocess.Popen(UP)
    retry_until(ours)
    (guard,) = ours()
    os.kill(guard.pid, signal.SIGSTOP)
    with Path(f"/proc/{guard.pid}/fd/0").open("rb") as settings:
        retry_until(lambda: select.select([settings], [], [], 0)[0])
    first.kill()
    first.wait()
    second = subprocess.Popen(UP)
    with contextlib.suppress(subprocess.TimeoutExpired):
        second.wait(2)  # long enough to start beside the first guard, if nothing held it back
    os.kill(guard.pid, signal.SIGCONT)
    assert second.wait() == 0
    assert set(ours()) <= tree(state.read(NAME).pid)  # of the first, nothing
    assert sandbox.down(NAME) is True
    assert (ours(), groups(), state.folder_of(NAME).exists()) == ([], [], False)


def test_a_folder_half_removed_is_removed() -> None:
    away = state.folder_of(NAME).with_name(f".{NAME}.ended")
    away.mkdir(parents=True)
    (away / "client_key").touch()
    assert sandbox.down(NAME) is False
    assert not away.exists()


def ours() -> list[ProcessId]:
    """The processes of this name's sandboxes, dead `up`s' too: guards, and the children that only forked."""
    words = b"dflash_ops.sandbox\0guard\0" + NAME.encode() + b"\0"
    found: list[ProcessId] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found_here = words in (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if found_here and (identity := ProcessId.of(int(folder.name))):
            found.append(identity)
    return found


def test_several_side_by_side_do_not_meet(proxmox: SandboxState, client: Client) -> None:
    other = sandbox.up(NAME, owner=os.getpid())
    with Client(other) as beside:
        beside.text(200, "touch /opt/mine; sleep 987 >/dev/null 2>&1 &")
        assert client.inside(200, "test -e /opt/mine").code == 1
        assert client.run("pgrep -f 'sleep 987'").code == 1
        assert beside.run("nvidia-smi -L").out != client.run("nvidia-smi -L").out
    sandbox.down(NAME)
    assert client.run("pct status 200").code == 0


def test_options_take_away_and_bound(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "deep").mkdir(parents=True)
    (shown / "deep/file").write_text("here")
    models = tmp_path / "models/tiny"
    models.mkdir(parents=True)
    up = sandbox.up(
        NAME,
        owner=os.getpid(),
        pct_delay=0.3,
        lxc_attach=False,
        disks={"200": "8M", "host": "8M"},
        without={"200": ["tar", "tmux"], "host": ["flock"]},
        binds=[shown],
        models=tmp_path / "models",
    )
    with Client(up) as client:
        assert client.run("lxc-attach -n 200 -- true").code == 127
        assert client.run("command -v flock").code != 0
        missing = client.run("pct exec 200 -- tar --version")
        assert missing.code == 127 and b"No such file or directory" in missing.err
        assert client.run("pct exec 200 -- sh -c 'ls /usr/bin | grep -x tar'").code == 1
        assert client.run("pct exec 201 -- tar --version").code == 0
        assert client.run(f"pct exec 201 -- cat {shown}/deep/file").out == b"here"
        assert client.run(f"pct exec 200 -- touch {shown}/deep/x").code == 1
        assert client.run("pct exec 201 -- ls /opt/dflash/shared/models").out == b"tiny\n"
        assert client.run("pct exec 200 -- touch /opt/dflash/shared/models/x").code == 1
        full = client.run("pct exec 200 -- sh -c 'head -c 9000000 /dev/zero > /opt/big'")
        assert b"No space left on device" in full.err
        with client.ssh.open_sftp() as sftp, pytest.raises(OSError, match="size mismatch"):
            sftp.putfo(io.BytesIO(b"\0" * 9_000_000), "/root/big")
        begin_end = client.run("date +%s%N; pct status 200 >/dev/null; date +%s%N").text.split()
        # The one time that a test may speak of: sleeping less than asked for is an error.
        assert int(begin_end[1]) - int(begin_end[0]) >= 300_000_000


def test_signals_that_the_caller_ignores_work_inside() -> None:
    """As when `up` runs in a shell's background or under nohup."""
    ignored = [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP]
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        up = sandbox.up(NAME, owner=os.getpid())
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    with Client(up) as client:
        for line in (
            client.run("grep SigIgn /proc/self/status").text,
            client.text(200, "grep SigIgn /proc/self/status"),
        ):
            mask = int(line.split()[1], 16)
            # Of these: make has the C library's own signals ignored in all that it starts.
            assert not [number for number in ignored if mask >> (number - 1) & 1]


def test_status_tells_how_containers_are_now() -> None:
    up = sandbox.up(NAME, owner=os.getpid())
    with Client(up) as client:
        client.run("pct stop 201; pct start 202")
    assert {vmid: entry["status"] for vmid, entry in sandbox.status(NAME).containers.items()} == {
        200: "running",
        201: "stopped",
        202: "running",
    }


@pytest.mark.parametrize(
    "options",
    [
        {"name": "../x"},
        {"name": "UPPER"},
        {"disks": {"300": "1M"}},
        {"disks": {"200": "lots"}},
        {"without": {"x": ["tar"]}},
        {"binds": ["/"]},
        {"binds": ["relative"]},
        {"binds": ["/no/such/folder"]},
    ],
)
def test_bad_options_start_nothing(options: dict[str, object]) -> None:
    with pytest.raises(UsageFault):
        sandbox.up(**{"name": NAME, **options})
    assert not state.folder_of(NAME).exists()


def test_root_is_asked_for_in_one_line() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(PreflightError, match="needs root"):
            sandbox.up(NAME)
    finally:
        os.seteuid(0)


def test_a_failed_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OpsError, match="did not start"):
        sandbox.up(NAME, disks={"200": "4k"})  # not even its /etc fits
    assert not state.folder_of(NAME).exists() and not groups()


def test_a_state_of_another_boot_is_stale(tmp_path: Path) -> None:
    up = sandbox.up(NAME, owner=os.getpid())
    file = up.folder / "state.json"
    text = file.read_text()
    file.write_text(text.replace(up.boot_id, "00000000-0000-0000-0000-000000000000"))
    with pytest.raises(NotFoundError):
        state.read(NAME)
    for broken in ("", "{", '{"schema_version": 2}', "[]"):
        file.write_text(broken)
        with pytest.raises(NotFoundError):
            state.read(NAME)
    file.write_text(text)


def test_reading_the_state_loads_no_ssh() -> None:
    script = "import sys, dflash_ops.sandbox.state; print({'paramiko', 'cryptography'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).stdout == b"set()\n"
