"""A release whose trainer is a small program, for tests of what happens to processes rather than of training.

It is a real process tree under the real supervisor; only the training is left out. Its config says what it does: one
`name = value` per line, read by the trainer itself.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked

from dflash_ops.remote import bundle, cgroups, processes, rundir

TRAINER = r"""
import datetime, faulthandler, json, os, signal, subprocess, sys, time
from pathlib import Path

words = sys.argv[1:]
does = dict(line.split(" = ", 1) for line in Path(words[1]).read_text().split("\n") if " = " in line)
if words[0] == "check":
    time.sleep(float(does.get("check_seconds", 0)))
    if "steeps" in does or "steeps=1" in words:
        sys.exit(sys.stderr.write(f"{words[1]}: steeps: not known; did you mean steps?\n") and 3)
    print(does.get("check_says", "{}"))
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


if "stacks" in does:
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
if "gpu" in does:  # the fake nvidia-smi beside this charges whoever is named in the file while anybody has it open
    card = os.open(does["gpu"], os.O_RDWR)
    os.write(card, str(os.getpid()).encode())
    os.set_inheritable(card, True)
if "child" in does:
    spawn("child.pid", detach=False)
if "runaway" in does:
    spawn("runaway.pid", detach=True)
if "setsid" in does:
    subprocess.Popen(["setsid", "sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if "tmux" in does:
    subprocess.run(["tmux", "-L", "default", "new-session", "-d", "-s", "theirs", does["tmux"]], check=True)
if "stranger" in does:  # no descent, no session, no process group, no environment of the run
    if not os.fork():
        os.setsid()
        if not os.fork():
            words = ["sh", "-c", 'echo $$ > "$1"; exec sleep 1000', "sh", str(run_dir / "stranger.pid")]
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (1, 2):
                os.dup2(null, fd)
            os.execve("/bin/sh", words, {})
        os._exit(0)
if "oom" in does:
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (4 << 20))
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
attempt = 1
if "heals_after" in does:
    count = Path(run_dir, "attempts")
    attempt = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(attempt))
    if attempt > int(does["heals_after"]):
        does.pop("code", None), does.pop("signal", None), does.pop("hangs_at", None)


def record(state, step):
    moment = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    status = {"schema_version": 1, "state": state, "step": step, "total_steps": 100, "updated_at": moment}
    Path(run_dir, "status.part").write_text(json.dumps(status))
    os.replace(Path(run_dir, "status.part"), Path(run_dir, "status.json"))
    if state == "training":
        with open(Path(run_dir, "metrics.jsonl"), "a") as file:
            file.write(json.dumps({"step": step, "time": moment}) + "\n")


step = 0
if "--resume" in words:
    earlier = sorted(Path(words[words.index("--resume") + 1], "checkpoints").iterdir())
    step = int(earlier[-1].name.split("-")[1])
    print(f"resumed at step {step}", flush=True)
Path(run_dir, "trainer.pid").write_text(str(os.getpid()))
for step in range(step + 1, int(does.get("steps", 10**9)) + 1):
    if asked:
        break
    if "records" in does:
        record("training", step)
    if step == int(does.get("hangs_at", -1)):
        while "hangs_at" in does and not Path(run_dir, "wake").exists():
            time.sleep(0.02)
    print(f"step {step} " + "x" * int(does.get("width", 0)), flush=True)
    time.sleep(float(does.get("pause", 0.02)))
if "code" in does:
    sys.exit(int(does["code"]))
if "signal" in does:
    os.kill(os.getpid(), int(does["signal"]))
Path(run_dir, "checkpoints", f"step-{step:08d}").mkdir(parents=True)
if "records" in does:
    record("stopped" if asked else "finished", step)
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
    """Runs a remote script here; its exit code and its answer. Without a prefix in a process that is forked from one
    which has Python loaded: to begin it anew and compile the script takes longer than most of them."""
    can_be_forked = not prefix and forked.can_be(os.environ)
    done = _call_forked(verb, parameters) if can_be_forked else call_bytes(verb, parameters, prefix=prefix)
    assert done.stdout.strip(), done.stderr.decode()
    return done.returncode, json.loads(done.stdout.strip().split(b"\n")[-1])  # before it: signs of life


def _call_forked(verb: str, parameters: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        for file in (out, err):
            file.touch()
        with forked.Forked(_become, verb, parameters, str(out), str(err), str(Path.cwd()), dict(os.environ)) as process:
            code = process.code(100)
        if code is None:
            raise subprocess.TimeoutExpired(verb, 100, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess((verb,), code, out.read_bytes(), err.read_bytes())


def _become(verb: str, parameters: dict[str, Any], out: str, err: str, cwd: str, environment: dict[str, str]) -> None:
    """In the new process: what `bundle` does on the box."""
    forked.settle(cwd, environment)
    for descriptor, name in enumerate((os.devnull, out, err)):
        opened = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["-c", verb]
    script: Any = importlib.import_module(f"dflash_ops.remote.{verb}")
    script.SOURCES = {name: bundle.source(name) for name in bundle.needs(verb)}
    sys.exit(script.main(parameters))


def call_bytes(
    verb: str, parameters: dict[str, Any], *, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Runs a remote script here, as it is sent."""
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


SMI = r"""#!{python}
# nvidia-smi for one card, a file: in use while anybody has it open, and charged to the pid that stands in it.
import os, sys
held = False
for name in os.listdir("/proc"):
    try:
        for link in os.scandir(f"/proc/{{name}}/fd"):
            held = held or os.readlink(link.path) == "{card}"
    except OSError:
        continue
used = 1009 if held else 0
if os.path.exists("{card}.leaks"):
    used = 1009
if any("--query-gpu" in word for word in sys.argv):
    print(f"0, GPU-1, 00000000:01:00.0, {{used}}, 24576")
elif held:
    print(f"GPU-1, {{open('{card}').read()}}, 1000")
"""


def fake_gpu(folder: Path) -> Path:
    """A card, and an nvidia-smi for it in folder/bin."""
    (folder / "bin").mkdir(exist_ok=True)
    card = folder / "card"
    card.touch()
    program = folder / "bin" / "nvidia-smi"
    program.write_text(SMI.format(python=sys.executable, card=card))
    program.chmod(0o755)
    return card


class LocalBox:
    """A folder like a container's, with the stand-in trainer deployed, and a tmux server of its own (TMUX_TMPDIR)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_release(path)

    def start(self, name: str, config: str = "", **more: Any) -> Path:
        code, reply = self.try_start(name, config, **more)
        assert code == 0, reply
        return self.path / "runs" / reply["facts"]["run_id"]

    def try_start(self, name: str, config: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
        prefix = more.pop("prefix", ())
        return call("start", start_parameters(self.path, name, config, **more), prefix=prefix)

    def stop(self, run: str | None = None, grace: float = 20.0, **more: Any) -> tuple[int, dict[str, Any]]:
        return call("stop", {"path": str(self.path), "run": run, "grace": grace, **more})

    def facts(self, run: str) -> dict[str, Any]:
        code, reply = call("report", {"path": str(self.path), "run": run})
        assert code == 0
        return reply["runs"][0]

    def all_facts(self) -> list[dict[str, Any]]:
        code, reply = call("report", {"path": str(self.path), "run": None})
        assert code == 0
        return reply["runs"]

    def ended(self, folder: Path) -> dict[str, Any]:
        return retry_until(lambda: rundir.read_json(folder / "exit.json"))

    def trainer(self, folder: Path, label: str = "trainer.pid") -> int:
        return int(retry_until(lambda: (folder / label).exists() and (folder / label).read_text()))


@contextlib.contextmanager
def local_box(folder: Path, *, windows: bool = True) -> Iterator[LocalBox]:
    """A LocalBox; at the end nothing of its runs lives. windows: whether tmux is the real one, else it does nothing:
    each window is a Python that most tests never look at."""
    sockets = folder / "tmux"
    sockets.mkdir()
    before = {name: os.environ.get(name) for name in ("TMUX_TMPDIR", "PATH")}
    os.environ["TMUX_TMPDIR"] = str(sockets)
    if not windows:
        (sockets / "tmux").write_text("#!/bin/sh\n")
        (sockets / "tmux").chmod(0o755)
        os.environ["PATH"] = f"{sockets}:{before['PATH']}"
    box = LocalBox(folder / "opt")
    try:
        yield box
    finally:
        for run_folder in rundir.folders(box.path):
            run = rundir.facts(run_folder, processes.boot_id())
            supervisor = processes.find(run["state"].get("supervisor"))
            if supervisor:
                processes.send(supervisor, signal.SIGTERM)
            processes.kill_all(lambda run=run: rundir.members(run), 10)
            if supervisor:
                processes.wait_until(lambda s=supervisor: not processes.alive(s.identity()), 10)
            cgroups.remove(run["state"].get("cgroup"), run["run_id"])
        for server in ("dflash", "default"):
            subprocess.run(["tmux", "-L", server, "kill-server"], capture_output=True, check=False)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def retry_until(condition: Callable[[], Any], seconds: float = 60.0, *, every: float = 0.02) -> Any:
    """The condition's first true value. every: seconds between two looks; more where one is a command."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(every)
    return value


def exists(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False


def carriers(run_id: str) -> list[int]:
    """Every living process with the run's id in its environment: what a stop must leave empty."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"DFLASH_RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if exists(pid)]
