"""dflash-ops on a Mac: the whole client in a Python that lacks what only Linux has (as_mac.py), against the sandbox."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
from conftest import Box, write_inventory

from dflash_ops import fetch
from dflash_ops.command import Container, Host
from dflash_ops.errors import PreflightError
from dflash_ops.sandbox.state import SandboxState

HERE = Path(__file__).parent
EVERY_MODULE = """
import importlib, pkgutil
import dflash_ops
left_out = ("dflash_ops.remote.", "dflash_ops.sandbox.")
names = [it.name for it in pkgutil.walk_packages(dflash_ops.__path__, "dflash_ops.")]
names = [name for name in names if not name.startswith(left_out)]
for name in names:
    importlib.import_module(name)
print(*names)
"""


def on_a_mac(program: str, *words: str, platform: str = "darwin", **more) -> subprocess.CompletedProcess[str]:
    start = f"import as_mac; as_mac.become(); import sys; sys.platform = {platform!r}\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", start + program, *words],
        env=environment | more.pop("env", {}), capture_output=True, text=True, timeout=100, **more,
    )  # fmt: skip


def test_every_module_loads() -> None:
    done = on_a_mac(EVERY_MODULE)
    assert done.returncode == 0, done.stderr
    assert {"dflash_ops.cli", "dflash_ops.ssh", "dflash_ops.fetch", "dflash_ops.demo.run"} <= set(done.stdout.split())


def test_what_is_missing_on_a_mac_is_missing_here() -> None:
    """Else the other tests prove nothing."""
    program = """
import os, select, socket, selectors
for module, name in ((os, "pidfd_open"), (os, "memfd_create"), (select, "epoll"), (socket, "TCP_KEEPIDLE")):
    assert not hasattr(module, name), name
assert selectors.DefaultSelector is selectors.PollSelector
for path in ("/proc/self/stat", "/sys", b"/proc"):
    for look in (os.stat, os.listdir, open, lambda path: os.open(path, os.O_RDONLY)):
        try:
            look(path)
        except FileNotFoundError:
            continue
        raise AssertionError((look, path))
assert not os.path.exists("/proc")
"""
    done = on_a_mac(program)
    assert done.returncode == 0, done.stderr


def test_the_sandbox_says_that_it_needs_linux(tmp_path: Path) -> None:
    for verb in ("up", "status"):
        done = on_a_mac("from dflash_ops.cli import main; main()", "sandbox", verb)
        assert (done.returncode, done.stdout) == (6, ""), done
        assert done.stderr.startswith("dflash-ops: the sandbox needs Linux") and done.stderr.count("\n") == 1


def test_windows_is_one_sentence() -> None:
    done = on_a_mac("import dflash_ops.cli", platform="win32")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dflash-ops needs Linux or macOS; on Windows it works in WSL\n"


@pytest.fixture
def inventory(sandbox: SandboxState, tmp_path: Path) -> Path:
    """It names a host as one does for a real box: what the sandbox's own entry says is read from Linux's /proc."""
    box = Box(write_inventory(tmp_path, sandbox.name), sandbox)
    host, text = box.host, box.inventory.read_text()
    keys = {"address": host.address, "user": host.user, "key": str(host.key), "known_hosts": str(host.known_hosts)}
    table = "\n".join([*(f"{name} = {json.dumps(value)}" for name, value in keys.items()), f"port = {host.port}"])
    text = text.replace(f'sandbox = "{sandbox.name}"', table).replace('"sandbox"', json.dumps(box.container.python))
    box.inventory.write_text(text)
    return box.inventory


DAY = """
import json
from dflash_ops.cli import app
for words in json.loads(sys.argv[1]):
    try:
        code = app(words, standalone_mode=False) or 0
    except SystemExit as done:
        code = done.code
    print(f"[{' '.join(words[:2])}: {code}]", flush=True)
"""


def test_a_day_on_a_mac(inventory: Path, tmp_path: Path) -> None:
    """Paths lead through a link, as all of a Mac's temporary files, and names are decomposed."""
    (tmp_path / "private").mkdir()
    here = tmp_path / "tmp"
    here.symlink_to("private")
    source = stand_in.make_release(here / "release")
    (source / "cafe\u0301.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", source, *words], check=True)
    (here / "data").mkdir()
    (here / "data" / "u\u0308ber.jsonl").write_text("{}\n" * 1000)
    (here / "c.toml").write_text("steps = 3\n")
    day = [
        ["deploy", str(source), "--json"],
        ["exec", "--", "ls"],
        ["put", str(here / "data"), "shared/"],
        ["get", "shared/data", str(here / "back")],
        ["train", "start", "c.toml", "--name", "a", "--gpus", "none", "--follow"],
        ["train", "fetch", "a"],
        ["gpu-status"],
        ["inventory", "check", "--connect"],
        ["releases", "--on", "all"],
    ]
    done = on_a_mac(DAY, json.dumps(day), cwd=here, env={"DFLASH_OPS_INVENTORY": str(inventory), "TMPDIR": str(here)})
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[(.*): (\d+)\]$", done.stdout, re.MULTILINE) == [(" ".join(it[:2]), "0") for it in day]
    deployed = json.loads(done.stdout.split("\n")[0])
    assert deployed["commit"] and deployed["files"] == 3
    assert "\ncafe\u0301.py\n" in done.stdout and "step 3" in done.stdout
    assert (here / "back" / "u\u0308ber.jsonl").read_text() == "{}\n" * 1000
    assert len(list(here.glob("a-*/log"))) == 1


def test_two_names_that_are_one_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "not" / "yet"
    box = Container(Host("lab", "lab"), 200)
    twins = ["a/Log", "b", "a/log", "a/caf\u00e9", "A/cafe\u0301"]
    fetch._check_twins(box, twins, place)  # on this disk they are five
    assert list(tmp_path.iterdir()) == []
    for one, other, said in ((0, 2, "a/Log and a/log"), (3, 4, "and A/cafe")):
        monkeypatch.setattr(Path, "exists", lambda self: True)
        with pytest.raises(PreflightError, match=f"two files would be one here .*{said}"):
            fetch._check_twins(box, [twins[one], "b", twins[other]], place)
