"""The whole product on a machine with several GPUs, in the sandbox: deploy, train on all, look, stop, kill, resume.

    python benchmarks/product.py --out FOLDER [--cache FOLDER] [--seconds 420]
    python benchmarks/product.py --out FOLDER --size tiny --gpus 2     # without a GPU, which proves this script only

A target of Qwen3-4B's shape with random weights is made while the sandbox comes up and the trainer is deployed into
container 200. A run trains on every GPU, targets on the first five of eight of them, drafters on the others; gpu-status
must show it on each, and its stop must give the memory back, to within 10 MiB. The trainer of a second run is killed
with SIGKILL; gpu-status and gpu free must find nothing left, the memory must be back, and a run that resumes it must go
on after its last checkpoint. Without a GPU the sandbox's fake ones are held, and the trainer works on the CPU.

FOLDER of --out gets shown.txt, what each command showed with its exit code and seconds, and result.json, whose "wrong"
lists all that was not as it should be; both are written as it goes. A part that fails is told there, and the others
go on if they can. --cache: a folder whose compile-cache/, as a DFLASH_SHARED has it, the container gets; what had to be
compiled all the same is in it at the end. (One that was made below another path torch 2.11 did not find: it is for
runs of this program.) tmux has to be installed.
"""

import argparse
import ctypes
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_ops import train
from dflash_ops.command import Command
from dflash_ops.inventory import load
from dflash_ops.runs import Run
from dflash_ops.shell import Shell

ROOT = Path(__file__).resolve().parents[1]
MIB_APART = 10.0
PR_SET_PDEATHSIG = 1
BOX = "/opt/dflash"  # the folder in the container
CALL_SECONDS = "150"
# Of this machine, for the programs in the container: where packages and driver lie, what its owner has switched off.
HANDED_ON = (
    "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
)  # fmt: skip
SELDOM = ("--set", "train.checkpoint_every=1000")  # a stop's own is enough where nothing is killed
NO_KERNEL_LOG = "the kernel's log can't be read"
STEP = re.compile(r"^step (\d+)/", re.MULTILINE)
STARTED = re.compile(r"^run (\S+) started", re.MULTILINE)


class Ended(SystemExit):
    """By SIGTERM: no part goes on after it, and what is on the machine is tidied up."""


def ended(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # another one must not break the tidying off
    raise Ended(128 + number)


class Report:
    """What was shown and found, on the disk after every command."""

    def __init__(self, out: Path, environment: dict[str, str], folder: Path, seconds: float) -> None:
        self.out, self.environment, self.folder = out, environment, folder
        self.began, self.ends = time.monotonic(), time.monotonic() + seconds
        self.wrong, self.commands = list[str](), list[dict[str, Any]]()
        self.facts, self.parts = dict[str, Any](), dict[str, float]()
        self._lock = threading.Lock()
        (out / "shown.txt").write_text("")
        self.write()

    def write(self) -> None:
        value = {"wrong": self.wrong, "seconds": self.age(), "parts": self.parts, **self.facts}
        draft = self.out / ".result.json"  # never half of it: the machine may be gone the next moment
        draft.write_text(json.dumps({**value, "commands": self.commands}, indent=1) + "\n")
        draft.replace(self.out / "result.json")

    def age(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def say(self, line: str) -> None:
        print(f"{self.age():6.1f} s  {line}", file=sys.stderr, flush=True)

    def amiss(self, what: str) -> None:
        self.say(f"WRONG: {what}")
        self.wrong.append(what)
        self.write()

    def part(self, name: str, verb: Callable[[], Any], *, always: bool = False) -> Any:
        """What the part returns; None when it failed (by SystemExit: it said why), or when no time was left for it."""
        if time.monotonic() > self.ends and not always:
            self.amiss(f"{name}: no time was left for it")
            return None
        began = time.monotonic()
        self.say(name)
        try:
            return verb()
        except Ended:
            raise
        except (Exception, SystemExit) as fault:
            if not isinstance(fault, SystemExit):
                traceback.print_exc()
            self.amiss(f"{name}: {type(fault).__name__}: {str(fault)[-500:]}".replace(" SystemExit:", ""))
        finally:
            self.parts[name] = round(time.monotonic() - began, 1)
            self.write()
        return None

    def cli(self, *words: str, due: int = 0, python: tuple[str, ...] = ("-m", "dflash_ops")) -> str:
        """Runs `dflash-ops WORDS`, keeps all it showed, and gives its stdout. due: the exit code that is right."""
        began, at = time.monotonic(), self.age()
        line = ["timeout", "-k", "5", CALL_SECONDS, sys.executable, *python, *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            line, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        ) as done:
            try:
                out, said = (text.decode(errors="replace") for text in done.communicate())
            except BaseException:
                done.terminate()  # timeout hands it on
                raise
        seconds = round(time.monotonic() - began, 2)
        shown, told = f"$ dflash-ops {shlex.join(words)}", f"exit code {done.returncode}, {seconds} s"
        with self._lock:
            with (self.out / "shown.txt").open("a") as file:
                file.write(f"{shown}\n{out}{said}[{told}, begun at {at} s]\n\n")
            self.commands.append({"words": words, "code": done.returncode, "seconds": seconds, "at": at})
            self.say(f"{shown}: {told}")
            if done.returncode != due:
                last = (said.strip() or out.strip()).split("\n")[-1][:500]
                self.amiss(f"{shown}: exit code {done.returncode} and not {due}: {last}")
            self.write()
        return out

    def beside(self, *commands: list[str]) -> list[str]:
        """cli of commands that run side by side."""
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(lambda words: self.cli(*words), commands))


class Product:
    """The parts, in their order. Runs are looked at by dflash-ops' own verbs, over one connection."""

    def __init__(self, report: Report, shell: Shell, inventory: Path, config: Path, gpus: int) -> None:
        self.report, self.shell, self.config = report, shell, str(config)
        self.own = load(inventory).container()
        self.gpus = ",".join(map(str, range(gpus)))

    def used(self) -> dict[str, float]:
        """MiB in use, by GPU."""
        words = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
        said = self.shell.run(self.own.host, Command(words), check=True).out.decode()
        return {uuid: float(mib) for uuid, mib in (row.split(",") for row in said.split("\n") if row)}

    def memory_back(self, name: str, before: dict[str, float]) -> None:
        began, waited, apart = time.monotonic(), 0.0, {"": math.inf}
        while waited < 10.0 and any(abs(mib) > MIB_APART for mib in apart.values()):
            now = self.used()
            apart = {uuid: round(now.get(uuid, math.inf) - mib, 1) for uuid, mib in before.items()}
            waited = round(time.monotonic() - began, 2)
        self.report.facts.setdefault("memory", {})[name] = {"apart_mib": list(apart.values()), "waited_s": waited}
        if any(abs(mib) > MIB_APART for mib in apart.values()):
            raise SystemExit(f"memory is not back: {apart} MiB more than before")

    def until(self, run: str, wanted: Callable[[Run], bool], what: str) -> Run:
        """The run once it is as wanted. SystemExit when it ends or time is up before."""
        while True:
            found = train.status(self.shell, self.own, run)
            if wanted(found):
                return found
            if not found.state.live:
                raise SystemExit(f"{found.verdict()} before {what}: {' / '.join(found.last_lines[-5:])}")
            if time.monotonic() > self.report.ends:
                raise SystemExit(f"{found.verdict()}: no time is left to wait for {what}")
            time.sleep(0.2)

    def learns(self, name: str, steps: int, *more: str, after: int = 0) -> Run:
        """Starts a run and waits until it has done so many steps. after: the step that it goes on from."""
        began = time.monotonic()
        said = self.report.cli("train", "start", self.config, "--name", name, "--gpus", self.gpus, *more)
        if not (started := STARTED.search(said)):
            raise SystemExit("it did not start")
        begun = self.until(started[1], lambda run: _step(run) > after, "its first step")
        first = round(time.monotonic() - began, 1)
        self.report.say(begun.verdict())
        found = self.until(begun.id, lambda run: _step(run) >= after + steps, f"step {after + steps}")
        told = found.status.model_dump(include={"step", "tokens_per_s", "loss"}) if found.status else {}
        self.report.facts.setdefault("runs", []).append({"id": found.id, "first_step_s": first, **told})
        return found

    def look(self, run: Run) -> str:
        """gpu-status, log and status of a run that goes on: each GPU must show a process of it. Returns the log."""
        verbs = (["gpu-status", "--json"], ["gpu-status"], ["train", "logs", run.id], ["train", "status", run.id])
        found, _, log, _ = self.report.beside(*verbs)
        told = json.loads(found)
        for gpu in told["gpus"]:
            here = [it for it in told["processes"] if it["gpu_uuid"] == gpu["uuid"]]
            ours = [it for it in here if (it["run_id"], it["owner"], it["kind"]) == (run.id, "run", "run")]
            held = self.report.facts.setdefault("held_mib", {}).setdefault(run.id, [])
            held.append([it["used_mib"] for it in ours])
            if not ours or len(ours) < len(here):
                self.report.amiss(f"{run.id}: GPU {gpu['index']} is held by {here}, and should be by that run")
        self.report.facts["health"] = [(gpu["name"], gpu["health"], gpu["findings"]) for gpu in told["gpus"]]
        # A machine that shows its kernel's log to nobody is none of ours; all else that could not be seen is.
        problems = [it for it in told["problems"] if NO_KERNEL_LOG not in it]
        self.report.facts["problems"] = told["problems"]
        if problems or len(told["gpus"]) != len(self.own.gpus):
            self.report.amiss(f"gpu-status has {len(told['gpus'])} GPUs, problems: {problems}")
        self.report.facts["warmed_up"] += re.findall(r".* warmed up in .*", log)
        if not STEP.search(log):
            self.report.amiss(f"{run.id}: its log tells of no step")
        return log

    def nothing_held(self, name: str) -> None:
        found, *_ = self.report.beside(["gpu-status", "--json"], ["gpu-status"], ["train", "list"])
        if processes := json.loads(found)["processes"]:
            self.report.amiss(f"{name}: gpu-status shows {processes}")

    def stops(self, run: Run) -> None:
        """A stop that saves first."""
        self.report.cli("train", "stop", run.id)
        found = train.status(self.shell, self.own, run.id)
        if found.state.value != "stopped" or found.processes or found.code != 0:
            self.report.amiss(f"{found.verdict()}, code {found.code}, processes {found.processes}; not a clean stop")
        if _saved(found) != _step(found):
            self.report.amiss(f"{run.id}: stopped at step {_step(found)}, its newest checkpoint is {_saved(found)}")

    def killed(self, run: Run) -> Run:
        """SIGKILL for the trainer, after a checkpoint."""
        found = self.until(run.id, lambda it: bool(it.checkpoints) and _step(it) > _saved(it) + 1, "a checkpoint")
        pids = [str(it.pid) for it in found.processes if "-m trainer train" in it.command]
        if not pids:
            raise SystemExit(f"no process of {run.id} is its trainer: {found.processes}")
        self.report.say(f"{found.verdict()}, checkpoints {found.checkpoints}: SIGKILL")
        self.report.cli("exec", "--", "kill", "-9", *pids)
        self.report.cli("train", "wait", run.id, due=128 + 9)
        return train.status(self.shell, self.own, run.id)

    def went_on(self, before: Run, after: Run, log: str) -> None:
        saved, steps = _saved(before), [int(word) for word in STEP.findall(log)]
        self.report.facts["went_on"] = {"killed_at": _step(before), "saved": saved, "steps": steps[:3]}
        if after.resumes != before.id or steps[:1] != [saved + 1]:
            self.report.amiss(f"{after.id} resumes {after.resumes}, its first steps are {steps[:3]}; saved was {saved}")


def _step(run: Run) -> int:
    return run.status.step if run.status else 0


def _saved(run: Run) -> int:
    return int(run.checkpoints[-1].removeprefix("step-")) if run.checkpoints else 0


def course(product: Product, report: Report) -> None:
    """All that is done with runs, once sandbox, release and model are there."""
    if not (before := report.part("memory before", product.used)):
        return
    report.facts["memory_before_mib"] = list(before.values())
    if first := report.part("the first run learns", lambda: product.learns("first", 10, *SELDOM)):
        report.part("the first run is looked at", lambda: product.look(first))
        report.part("the first run stops", lambda: product.stops(first))
    else:
        last = (["train", "logs", "first"], ["train", "stop", "first", "--grace", "5"])
        report.part("its end", lambda: [report.cli(*words) for words in last], always=True)
    report.part("memory after the first run", lambda: product.memory_back("first", before))
    if not first:
        return report.amiss("nothing was killed and resumed: the first run did not learn")
    second = report.part("the second run learns", lambda: product.learns("second", 1))
    killed = report.part("the second run is killed", lambda: product.killed(second)) if second else None
    report.part("gpu-status after the kill", lambda: product.nothing_held("after the kill"))
    report.part("gpu free after the kill", lambda: report.cli("gpu", "free"))
    report.part("memory after the kill", lambda: product.memory_back("killed", before))
    if not killed:
        return report.amiss("nothing was resumed: the second run was not killed as it should be")
    again = ("--resume", killed.id, *SELDOM)
    if third := report.part("it is resumed", lambda: product.learns("third", 3, *again, after=_saved(killed))):
        log = report.part("the resumed run is looked at", lambda: product.look(third))
        report.part("it went on", lambda: product.went_on(killed, third, log or ""))
        report.part("the resumed run stops", lambda: product.stops(third))
    report.part("nothing is held at the end", lambda: product.nothing_held("at the end"))
    report.part("memory at the end", lambda: product.memory_back("end", before))


def layout(gpus: int) -> tuple[list[str], list[str]]:
    """Words of [layout] for so many GPUs: targets on five of eight, or half of four or two; drafters on the others."""
    if gpus < 2:
        return ["cuda:0"] * gpus or ["cpu"], ["cuda:0"] * gpus or ["cpu"]
    targets = max(1, round(gpus * 5 / 8))
    return [f"cuda:{number}" for number in range(targets)], [f"cuda:{number}" for number in range(targets, gpus)]


def make(size_name: str, models: Path, folder: Path, gpus: int) -> int:
    """In a process of its own, whose GPU memory goes with it: the target, the data and the config."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever started it may be killed
    sys.path.insert(0, str(ROOT / "tests" / "trainer"))
    import torch
    from pipeline import write_data
    from shapes import SIZES
    from tiny_targets import tiny_tokenizer

    size, (targets, drafters) = SIZES[size_name], layout(gpus)
    rows = (1 if size_name == "tiny" else 2) * len(drafters)
    write_data(size, folder)
    (folder / "config.toml").write_text(
        f'preset = "qwen3-4b"\n[target]\npath = "{BOX}/shared/models/target"\n[draft]\nlayers = {size.draft_layers}\n'
        f'[data]\ntrain = "{BOX}/shared/data/train.jsonl"\nrow_tokens = {size.row_tokens}\n'
        f"[train]\nsteps = 100_000\nrows_per_step = {rows}\nanchors = {size.anchors}\nlog_every = 1\n"
        f"checkpoint_every = 20\nkeep = 1\n"
        f"[layout]\ntargets = {json.dumps(targets)}\ndrafters = {json.dumps(drafters)}\n"
    )
    tiny_tokenizer().save_pretrained(models / "target")
    with torch.no_grad():
        model = size.model(torch.device("cuda:0" if gpus else "cpu"))
        model.save_pretrained(models / "target", max_shard_size="2GB")  # each is on the host as a whole
    return 0


def box(folder: Path, name: str, gpus: int, real: bool) -> list[str]:
    """Writes the inventory, and the Python of the container: this one, which finds there what it finds here. Returns
    the folders that the sandbox needs for it."""
    handed = {key: os.environ[key] for key in HANDED_ON if os.environ.get(key)}
    packages = [it for it in handed.pop("PYTHONPATH", "").split(":") if it and Path(it).resolve() != ROOT]
    packages = [str(Path(it).absolute()) for it in packages if Path(it).is_dir()]
    handed |= {"PYTHONPATH": ":".join(packages)} if packages else {}
    handed |= {} if real else {"OMP_NUM_THREADS": "1"}
    python = folder / "bin" / "python"
    python.parent.mkdir()
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in handed.items())
    python.write_text(f'#!/bin/sh\n{exports}exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (folder / "dflash-ops.toml").write_text(
        f'[hosts.box]\nsandbox = "{name}"\n[containers.own]\nhost = "box"\nvmid = 200\npath = "{BOX}"\n'
        f'python = "{python}"\ngpus = {list(range(gpus))}\nenv_check = false\n'
    )
    return [str(python.parent), *(it for it in packages if not it.startswith("/usr/"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for shown.txt and result.json")
    parser.add_argument("--size", default="qwen3-4b", help="of benchmarks/shapes.py")
    parser.add_argument("--gpus", type=int, default=2, help="fake ones, where there are none")
    parser.add_argument("--cache", type=Path, help="a folder with a compile-cache/, or for one")
    parser.add_argument("--seconds", type=float, default=420.0, help="no part begins after so many")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)  # the process that makes the model
    asked = parser.parse_args()
    if asked.make:
        return make(asked.size, Path(asked.make[0]), Path(asked.make[1]), gpus=int(asked.make[2]))
    real = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not real and asked.size != "tiny":
        parser.error("there is no GPU here: --size tiny")
    signal.signal(signal.SIGTERM, ended)
    if shutil.which("tmux") is None:
        parser.error("there is no tmux, which a run's window needs")
    asked.out.mkdir(parents=True, exist_ok=True)
    # 8 GB that are read by every target: in memory where there is room, else on the disk.
    place = "/dev/shm" if real and shutil.disk_usage("/dev/shm").free > 12 << 30 else None
    with tempfile.TemporaryDirectory(prefix="product-") as name, tempfile.TemporaryDirectory(dir=place) as cache:
        return whole(asked, Path(name), Path(cache), real)


def whole(asked: argparse.Namespace, folder: Path, cache: Path, real: int) -> int:
    """Everything, between a sandbox's up and down. cache: the user's cache folder of dflash-ops, where models are."""
    name, gpus = f"product-{os.getpid()}", real or asked.gpus
    models = cache / "dflash-ops" / "models"
    models.mkdir(parents=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")},
        "PYTHONPATH": ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "DFLASH_OPS_INVENTORY": str(folder / "dflash-ops.toml"),
        "XDG_CACHE_HOME": str(cache),
        "COLUMNS": "150",
    }
    report = Report(asked.out, environment, folder, asked.seconds)
    report.facts |= {"size": asked.size, "gpus": gpus, "real": bool(real), "layout": layout(real), "warmed_up": []}
    line = [sys.executable, __file__, "--out", asked.out, "--size", asked.size, "--make", models, folder, str(real)]
    making = subprocess.Popen(line)
    more = [word for path in box(folder, name, gpus, bool(real)) for word in ("--bind", path)]
    # A disk is half of the memory otherwise, and four checkpoints with their moments may be on it.
    more += ["--disk", "200:96G"] if real else []
    up = ("sandbox", "up", "--name", name, "--owner", str(os.getpid()), *more)
    fake = "from dflash_ops.sandbox import lifecycle; lifecycle.FAKE_GPUS = {}; from dflash_ops.cli import main; main()"
    python = ("-m", "dflash_ops") if real else ("-c", fake.format(gpus))

    def model() -> str:
        if making.wait(max(1.0, report.ends - time.monotonic())):
            raise SystemExit(f"the model was not made: exit code {making.returncode}")
        return report.cli("put", "train.jsonl", "shared/data/")

    kept = asked.cache.resolve() if asked.cache else None
    try:
        report.part("sandbox up", lambda: report.cli(*up, python=python))
        if not report.wrong:
            report.part("deploy", lambda: report.cli("deploy"))
            if kept and (kept / "compile-cache").is_dir():
                report.part("compile cache", lambda: report.cli("put", str(kept / "compile-cache"), "shared/"))
            if report.part("model and data", model):
                with Shell() as shell:
                    product = Product(report, shell, folder / "dflash-ops.toml", folder / "config.toml", gpus)
                    course(product, report)
            warmed = report.facts["warmed_up"] or [", cold:"]  # a first run that was cut off has compiled something too
            if kept and real and any(re.search(", (cold|partly warm):", it) for it in warmed):
                kept.mkdir(parents=True, exist_ok=True)
                report.part("cache filled", lambda: report.cli("get", "shared/compile-cache", str(kept)), always=True)
    finally:
        making.kill()  # where it has not ended long ago
        making.wait()
        report.part("sandbox down", lambda: report.cli("sandbox", "down", "--name", name), always=True)
    report.say(f"done; wrong: {report.wrong or 'nothing'}")
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
