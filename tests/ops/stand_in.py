"""A release whose trainer is a small program, for tests of what happens to processes rather than of training.

It is a real process tree under the real supervisor; only the training is left out. Its config says what it does: one
`name = value` per line, read by the trainer itself.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ops.remote import bundle

TRAINER = r"""
import os, signal, subprocess, sys, time
from pathlib import Path

words = sys.argv[1:]
does = dict(line.split(" = ", 1) for line in Path(words[1]).read_text().split("\n") if " = " in line)
if words[0] == "check":
    time.sleep(float(does.get("check_seconds", 0)))
    if "steeps" in does:
        sys.exit(sys.stderr.write(f"{words[1]}: steeps: not known; did you mean steps?\n") and 3)
    sys.exit(0)
run_dir = Path(words[2])
asked = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if does.get("sigterm") == "ignored" else lambda *_: asked.append(1))


def step_on(label):
    Path(run_dir, label).write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)


def spawn(label, detach):
    if os.fork():
        return
    if detach:
        os.setsid()
        if os.fork():
            os._exit(0)
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    step_on(label)


if "child" in does:
    spawn("child.pid", detach=False)
if "runaway" in does:
    spawn("runaway.pid", detach=True)
if "setsid" in does:
    subprocess.Popen(["setsid", "sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if "holds" in does:
    os.set_inheritable(os.open(does["holds"], os.O_RDONLY), True)
if "binary" in does:
    os.write(1, bytes(range(256)) * 1000 + b"\xff\xfe no line end")
if "burst" in does:
    data = b"0123456789abcde\n" * 300_000
    while data:
        data = data[os.write(1, data):]
    os._exit(0)
if "environment" in does:
    Path(run_dir, "environment").write_bytes(b"\0".join(k + b"=" + v for k, v in os.environb.items()))
    links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    Path(run_dir, "descriptors").write_text("\n".join(links))
step = 0
if "--resume" in words:
    earlier = sorted(Path(words[words.index("--resume") + 1], "checkpoints").iterdir())
    step = int(earlier[-1].name.split("-")[1])
    print(f"resumed at step {step}", flush=True)
Path(run_dir, "trainer.pid").write_text(str(os.getpid()))
for step in range(step + 1, int(does.get("steps", 10**9)) + 1):
    if asked:
        break
    print(f"step {step} " + "x" * int(does.get("width", 0)), flush=True)
    time.sleep(float(does.get("pause", 0.02)))
if "code" in does:
    sys.exit(int(does["code"]))
if "signal" in does:
    os.kill(os.getpid(), int(does["signal"]))
Path(run_dir, "checkpoints", f"step-{step:08d}").mkdir(parents=True)
print("saved", flush=True)
"""

RELEASE = "20261129-120000-nogit-0123abcd"


def make_release(path: Path) -> Path:
    """<path>/releases/RELEASE with the stand-in trainer, and `current` on it."""
    package = path / "releases" / RELEASE / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TRAINER)
    (path / "current").symlink_to(f"releases/{RELEASE}")
    return package.parent


def call(verb: str, parameters: dict[str, Any], *, prefix: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Runs a remote script here, as it is sent; its exit code and its answer."""
    done = call_bytes(verb, parameters, prefix=prefix)
    assert done.stdout.strip(), done.stderr.decode()
    return done.returncode, json.loads(done.stdout.strip().split(b"\n")[-1])  # before it: signs of life


def call_bytes(
    verb: str, parameters: dict[str, Any], *, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    command = bundle.command(sys.executable, verb, parameters)
    return subprocess.run((*prefix, *command.argv), input=command.stdin, capture_output=True, timeout=100)


def start_parameters(path: Path, name: str, config: str, **more: Any) -> dict[str, Any]:
    serial = f"{time.time_ns() // 1000 % 0x10000:04x}"
    return {
        "path": str(path),
        "python": sys.executable,
        "run_id": f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{serial}",
        "name": name,
        "release": None,
        "gpus": None,
        "config": config,
        "config_name": "mine.toml",
        "env": None,
        "env_names": [],
        "set": [],
        "resume": None,
        "init_from": None,
        "client": "tests",
        "room_bytes": 0,
        **more,
    }


def retry_until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.02)
    return value


def exists(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False


def carriers(run_id: str) -> list[int]:
    """Every living process with the run's id in its environment: what a stop must leave empty."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"DFLASH_RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if exists(pid)]
