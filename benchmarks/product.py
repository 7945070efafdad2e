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
go on if they can. --cache: a folder whose compile-cache/, as a DFLASH_SHARED has it, the container gets; where there is
none yet, it is filled at the end. tmux has to be installed.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash_ops import train
from dflash_ops.command import Command
from dflash_ops.inventory import load
from dflash_ops.runs import Run
from dflash_ops.shell import Shell

ROOT = Path(__file__).resolve().parents[1]
MIB_APART = 10.0
BOX = "/opt/dflash"  # the folder in the container
MANY = 100_000  # steps: more than any of these runs does
CALL_SECONDS = 150.0
# Of this machine, for the programs in the container: where packages and driver lie, what its owner has switched off.
HANDED_ON = (
    "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
)  # fmt: skip
STEP = re.compile(r"^step (\d+)/", re.MULTILINE)
STARTED = re.compile(r"^run (\S+) started", re.MULTILINE)


class WrongError(Exception):
    """What keeps a part from going on."""


class Report:
    """What was shown and found, on the disk after every command."""

    def __init__(self, out: Path, environment: dict[str, str], folder: Path, seconds: float) -> None:
        self.out, self.environment, self.folder = out, environment, folder
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.wrong: list[str] = []
        self.facts: dict[str, Any] = {}
        self.parts: dict[str, float] = {}
        self.commands: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        (out / "shown.txt").write_text("")
        self.write()

    def write(self) -> None:
        value = {"wrong": self.wrong, "seconds": self.age(), "parts": self.parts, **self.facts}
        (self.out / "result.json").write_text(json.dumps({**value, "commands": self.commands}, indent=1) + "\n")

    def age(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def say(self, line: str) -> None:
        print(f"{self.age():6.1f} s  {line}", file=sys.stderr, flush=True)

    def amiss(self, what: str) -> None:
        self.say(f"WRONG: {what}")
        self.wrong.append(what)
        self.write()

    def part(self, name: str, verb: Callable[[], Any], *, always: bool = False) -> Any:
        """What the part returns; None when it failed, or when no time was left to begin it."""
        if time.monotonic() > self.ends and not always:
            self.amiss(f"{name}: no time was left for it")
            return None
        began = time.monotonic()
        self.say(name)
        try:
            return verb()
        except WrongError as fault:
            self.amiss(f"{name}: {fault}")
        except (Exception, SystemExit) as fault:
            traceback.print_exc()
            self.amiss(f"{name}: {type(fault).__name__}: {str(fault)[-500:]}")
        finally:
            self.parts[name] = round(time.monotonic() - began, 1)
            self.write()
        return None

    def cli(self, *words: str, due: int = 0, python: tuple[str, ...] = ("-m", "dflash_ops")) -> str:
        """Runs `dflash-ops WORDS`, keeps all it showed, and gives its stdout. due: the exit code that is right."""
        began, at = time.monotonic(), self.age()
        line = [sys.executable, *python, *words]
        try:
            done = subprocess.run(
                line, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=CALL_SECONDS,
            )  # fmt: skip
            code, out, said = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as fault:
            code, out, said = -1, fault.stdout or b"", (fault.stderr or b"") + b"no end of it"
        text, errors = out.decode(errors="replace"), said.decode(errors="replace")
        shown = f"$ dflash-ops {shlex.join(words)}"
        told = f"exit code {code}, {time.monotonic() - began:.2f} s"
        with self._lock:
            with (self.out / "shown.txt").open("a") as file:
                file.write(f"{shown}\n{text}{errors}[{told}, begun at {at} s]\n\n")
            seconds = round(time.monotonic() - began, 2)
            self.commands.append({"words": words, "code": code, "seconds": seconds, "at": at})
            self.say(f"{shown}: {told}")
            if code != due:
                last = (errors.strip() or text.strip()).split("\n")[-1][:500]
                self.amiss(f"{shown}: exit code {code} and not {due}: {last}")
            self.write()
        return text


class Product:
    """The parts, in their order. Runs are looked at by dflash-ops' own verbs, over one connection."""

    def __init__(self, report: Report, shell: Shell, inventory: Path, config: Path, gpus: int) -> None:
        self.report, self.shell, self.config = report, shell, str(config)
        self.own = load(inventory).container()
        self.gpus = ",".join(map(str, range(gpus)))

    def used(self) -> dict[str, float]:
        """MiB in use, by GPU."""
        words = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
        rows = self.shell.run(self.own.host, Command(words), check=True).out.decode().split("\n")
        return {uuid: float(mib) for uuid, _, mib in (row.partition(",") for row in rows if row)}

    def memory_back(self, name: str, before: dict[str, float], seconds: float = 10.0) -> None:
        began = time.monotonic()
        while True:
            now = self.used()
            apart = {uuid: round(now.get(uuid, math.inf) - mib, 1) for uuid, mib in before.items()}
            back = all(abs(mib) <= MIB_APART for mib in apart.values())
            waited = time.monotonic() - began
            if back or waited > seconds:
                break
            time.sleep(0.2)
        memory = self.report.facts.setdefault("memory_apart_mib", {})
        memory[name] = {"apart": list(apart.values()), "waited_s": round(waited, 2)}
        if not back:
            raise WrongError(f"memory is not back: {apart} MiB more than before")

    def until(self, run: str, wanted: Callable[[Run], bool], what: str) -> Run:
        """The run once it is as wanted. WrongError when it ends or time is up before."""
        while True:
            found = train.status(self.shell, self.own, run)
            if wanted(found):
                return found
            if not found.state.live:
                raise WrongError(f"{found.verdict()} before {what}: {' / '.join(found.last_lines[-5:])}")
            if time.monotonic() > self.report.ends:
                raise WrongError(f"{found.verdict()}: no time is left to wait for {what}")
            time.sleep(0.2)

    def learns(self, name: str, steps: int, resumed: Run | None = None) -> Run:
        """Starts a run and waits until it has done so many steps more than what it resumes."""
        began, after = time.monotonic(), _saved(resumed) if resumed else 0
        more = ("--resume", resumed.id) if resumed else ()
        said = self.report.cli("train", "start", self.config, "--name", name, "--gpus", self.gpus, *more)
        if not (started := STARTED.search(said)):
            raise WrongError("it did not start")
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
        found, _, log, _ = self.beside(*verbs)
        told = json.loads(found)
        held = self.report.facts.setdefault("held_mib", {})[run.id] = []
        for gpu in told["gpus"]:
            here = [it for it in told["processes"] if it["gpu_uuid"] == gpu["uuid"]]
            ours = [it for it in here if (it["run_id"], it["owner"], it["kind"]) == (run.id, "run", "run")]
            held.append([it["used_mib"] for it in ours])
            if not ours or len(ours) < len(here):
                self.report.amiss(f"{run.id}: GPU {gpu['index']} is held by {here}, and should be by that run")
        self.report.facts["health"] = [(gpu["name"], gpu["health"], gpu["findings"]) for gpu in told["gpus"]]
        if told["problems"] or len(told["gpus"]) != len(self.own.gpus):
            self.report.amiss(f"gpu-status has {len(told['gpus'])} GPUs, problems: {told['problems']}")
        if not STEP.search(log):
            self.report.amiss(f"{run.id}: its log tells of no step")
        return log

    def beside(self, *commands: list[str]) -> list[str]:
        """The stdout of commands that run side by side."""
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(lambda words: self.report.cli(*words), commands))

    def nothing_held(self, name: str) -> None:
        found, *_ = self.beside(["gpu-status", "--json"], ["gpu-status"], ["train", "list"])
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
            raise WrongError(f"no process of {run.id} is its trainer: {found.processes}")
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
    """The step of its newest checkpoint."""
    return int(run.checkpoints[-1].removeprefix("step-")) if run.checkpoints else 0


def course(product: Product, report: Report, steps: int) -> None:
    """All that is done with runs, once sandbox, release and model are there."""
    before = report.part("memory before", product.used)
    if before is None:
        return
    report.facts["memory_before_mib"] = list(before.values())
    if first := report.part("the first run learns", lambda: product.learns("first", steps)):
        report.part("the first run is looked at", lambda: product.look(first))
        report.part("the first run stops", lambda: product.stops(first))
    else:
        report.part("what the first run said", lambda: report.cli("train", "logs", "first"), always=True)
        report.part("its end", lambda: report.cli("train", "stop", "first", "--grace", "5"), always=True)
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
    if third := report.part("the killed run resumes", lambda: product.learns("third", 3, killed)):
        log = report.part("the resumed run is looked at", lambda: product.look(third))
        report.part("it went on", lambda: product.went_on(killed, third, log or ""))
        report.part("the resumed run stops", lambda: product.stops(third))
    report.part("nothing is held at the end", lambda: product.nothing_held("at the end"))
    report.part("memory at the end", lambda: product.memory_back("end", before))


def layout(gpus: int) -> tuple[list[str], list[str]]:
    """Words of [layout] for so many GPUs: targets on five of eight, drafters on the others."""
    if gpus < 2:
        word = f"cuda:{gpus - 1}" if gpus else "cpu"
        return [word], [word]
    targets = min(math.ceil(gpus * 5 / 8), gpus - 1)
    return [f"cuda:{number}" for number in range(targets)], [f"cuda:{number}" for number in range(targets, gpus)]


def make(size_name: str, models: Path, folder: Path, gpus: int) -> None:
    """In a process of its own, whose GPU memory goes with it: the target, the data and the config."""
    sys.path.insert(0, str(ROOT / "tests" / "trainer"))
    import torch
    from pipeline import write_data
    from shapes import SIZES
    from tiny_targets import tiny_tokenizer

    size, (targets, drafters) = SIZES[size_name], layout(gpus)
    write_data(size, folder)
    tiny = size_name == "tiny"
    (folder / "config.toml").write_text(
        f'preset = "qwen3-4b"\n[target]\npath = "{BOX}/shared/models/target"\n[draft]\nlayers = {size.draft_layers}\n'
        f'[data]\ntrain = "{BOX}/shared/data/train.jsonl"\nrow_tokens = {size.row_tokens}\n'
        f"[train]\nsteps = {MANY}\nrows_per_step = {(1 if tiny else 4) * len(drafters)}\nanchors = {size.anchors}\n"
        f"log_every = 1\ncheckpoint_every = 20\nkeep = 1\n"
        f"[layout]\ntargets = {json.dumps(targets)}\ndrafters = {json.dumps(drafters)}\n"
    )
    tiny_tokenizer().save_pretrained(models / "target")
    with torch.no_grad():
        model = size.model(torch.device("cuda:0" if gpus else "cpu"))
        model.save_pretrained(models / "target", max_shard_size="2GB")  # each is on the host as a whole


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
    parser.add_argument("--make", nargs=3, metavar="WORD", help=argparse.SUPPRESS)  # the process that makes the model
    asked = parser.parse_args()
    if asked.make:
        models, folder, count = asked.make
        make(asked.size, Path(models), Path(folder), int(count))
        return 0
    real = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not real and asked.size != "tiny":
        parser.error("there is no GPU here: --size tiny")
    if shutil.which("tmux") is None:
        parser.error("there is no tmux, which a run's window needs")
    asked.out.mkdir(parents=True, exist_ok=True)
    # 8 GB that are read by every target: in memory where there is room, else on the disk.
    shm = Path("/dev/shm")
    place = shm if real and shutil.disk_usage(shm).free > 12 << 30 else None
    with tempfile.TemporaryDirectory(prefix="product-") as name, tempfile.TemporaryDirectory(dir=place) as cache:
        return whole(asked, Path(name), Path(cache), real)


def whole(asked: argparse.Namespace, folder: Path, cache: Path, real: int) -> int:
    name, gpus = f"product-{os.getpid()}", real or asked.gpus
    models = cache / "dflash-ops" / "models"  # shown to containers as shared/models
    models.mkdir(parents=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")},
        "PYTHONPATH": ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "DFLASH_OPS_INVENTORY": str(folder / "dflash-ops.toml"),
        "XDG_CACHE_HOME": str(cache),
        "COLUMNS": "150",
    }
    binds = box(folder, name, gpus, bool(real))
    report = Report(asked.out, environment, folder, asked.seconds)
    report.facts |= {"size": asked.size, "gpus": gpus, "real": bool(real), "layout": layout(real)}
    line = [sys.executable, __file__, "--out", str(asked.out), "--size", asked.size]
    making = subprocess.Popen([*line, "--make", str(models), str(folder), str(real)], start_new_session=True)
    more = [word for path in binds for word in ("--bind", path)]
    # A disk is half of the memory otherwise, and four checkpoints with their moments may be on it.
    more += ["--disk", "200:96G"] if real else []
    fake = "from dflash_ops.sandbox import lifecycle; lifecycle.FAKE_GPUS = {}; from dflash_ops.cli import main; main()"
    python = ("-m", "dflash_ops") if real else ("-c", fake.format(gpus))

    def up() -> None:
        report.cli("sandbox", "up", "--name", name, "--owner", str(os.getpid()), *more, python=python)
        if report.wrong:
            raise WrongError("there is no sandbox")

    def model() -> bool:
        if making.wait(max(1.0, report.ends - time.monotonic())):
            raise WrongError(f"the model was not made: exit code {making.returncode}")
        report.cli("put", "train.jsonl", "shared/data/")
        return True

    kept = asked.cache.resolve() / "compile-cache" if asked.cache else None
    warm = False
    try:
        report.part("sandbox up", up)
        if not report.wrong:
            report.part("deploy", lambda: report.cli("deploy"))
            if kept and (warm := kept.is_dir()):
                report.part("compile cache", lambda: report.cli("put", str(kept), "shared/"))
            if report.part("model and data", model):
                with Shell() as shell:
                    product = Product(report, shell, folder / "dflash-ops.toml", folder / "config.toml", gpus)
                    course(product, report, steps=10 if real else 3)
            if kept and not warm and real:  # on the CPU nothing is compiled
                kept.parent.mkdir(parents=True, exist_ok=True)
                fill = ("get", "shared/compile-cache", str(kept))
                report.part("compile cache, filled", lambda: report.cli(*fill), always=True)
    finally:
        if making.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(making.pid, 9)
            making.wait()
        report.part("sandbox down", lambda: report.cli("sandbox", "down", "--name", name), always=True)
    report.say(f"done; wrong: {report.wrong or 'nothing'}")
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
