"""That a training over several GPUs learns the same as any other, whatever ends it: real trainings, each a process.

    python benchmarks/courses.py [whole] [broken] [alone] [large] [cold] [bare] [--folder FOLDER] [--out FILE]

whole   a target and a drafter on each GPU, from the first step to the last
broken  the same, ended by SIGTERM, by SIGKILL and by an out-of-memory in a target worker and started again each time:
        figures and checkpoint must be whole's to the bit
alone   as many replicas and the same rows on one GPU: how far its losses are from whole's
large   Qwen3-8B's shape, targets on the first five of eight GPUs and drafters on the others
cold    some steps, nothing compiled before
bare    the same without the FX fix and without a warm-up: for the record of what happens then
Targets have random weights of --size; rows are made-up conversations that fill them. broken and alone want whole's
folder: with --folder they may come in another call. Prints one JSON object, which --out has after each process;
"wrong" in it lists what was not as it should be, and then the exit code is 1. --quick: tiny shapes on a CPU, which
proves this script only.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from layouts import config_text, say, targets_of, words
from pipeline import write_data
from shapes import SIZES, Size, save, why

import trainer.train as training
import trainer.workers as workers
from trainer.__main__ import main as trainer_main
from trainer.speed import where
from trainer.target import TargetModel

PARTS = ("whole", "broken", "alone", "large", "cold", "bare")
PR_SET_PDEATHSIG = 1
ROOM = 48 << 30  # bytes: seven checkpoints of Qwen3-4B's shape with their moments


def nothing_warmed(*given: Any, **named: Any) -> list[Any]:
    return []


def child(plan: dict[str, Any]) -> int:
    """The trainer's own command, but for a target that is made instead of read, and the faults of the plan."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever started it may be ended with its time
    size = SIZES[plan["size"]]
    training.load_targets = lambda config, layout: targets_of(size, layout, {})
    if plan.get("bare"):
        import torch._dynamo.config as dynamo

        # What the warm-up would allow, in every thread: that too few forms are kept is not what is looked for.
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            dynamo._config[name].default = 4096
        for name in ("warm_up", "warm_up_targets"):
            setattr(training, name, nothing_warmed)
        training.nothing_compiles = lambda devices: contextlib.nullcontext()
    if due := plan.get("out_of_memory_at"):
        left, of = list(range(due)), workers.features_of

        def features(target: TargetModel, *given: Any, **named: Any) -> Any:
            if left and left.pop() == 0:  # once, whichever worker's call it is
                torch.empty(1 << 45, dtype=torch.uint8, device=target.device)
            return of(target, *given, **named)

        workers.features_of = features
    return trainer_main(["train", plan["config"], plan["run"]])


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


class Course:
    """A training's folder, and the processes that train in it."""

    def __init__(self, name: str, size_name: str, folder: Path, seconds: float, keep: Callable[[], None]) -> None:
        """seconds: that a process may take. keep: called after each."""
        self.run, self.size, self.seconds, self.keep = folder / name, size_name, seconds, keep
        self.config, self.log = folder / f"{name}.toml", folder / f"{name}.log"
        self.ends: list[dict[str, Any]] = []

    def go(self, *, until: int | None = None, how: int = 0, **plan: Any) -> int | str:
        """Trains to the end; or until a step, at which the signal `how` comes. The exit code, or that it hung."""
        wanted = json.dumps({"size": self.size, "config": str(self.config), "run": str(self.run), **plan})
        begun, environment = time.monotonic(), dict(os.environ)
        if plan.get("cold") or plan.get("bare"):
            names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            environment |= {name: str(self.run.with_name(f"{self.run.name}-cache") / name) for name in names}
        line = [sys.executable, __file__, "--child", wanted]
        told: dict[str, Any] = {"asked": signal.Signals(how).name if how else plan or "the end"}
        with self.log.open("ab") as log:
            process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        try:
            while until is not None and process.poll() is None and time.monotonic() - begun < self.seconds:
                if self.reached() >= until:
                    process.send_signal(how)
                    told["at"], sent = self.reached(), time.monotonic()
                    told["code"] = process.wait(60)
                    told["ended_after_s"] = round(time.monotonic() - sent, 2)
                    break
                time.sleep(0.02)
            told["code"] = process.wait(max(1.0, self.seconds - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # its threads' stacks, into the log
            time.sleep(3)
            told["code"] = f"hung: killed after {time.monotonic() - begun:.0f} s"
            told["stacks"] = self.lines("")[-250:]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        told |= {"seconds": round(time.monotonic() - begun, 1), "reached": self.reached()}
        self.ends.append(told)
        say(f"{self.run.name}: { {key: value for key, value in told.items() if key != 'stacks'} }")
        self.keep()
        return told["code"]

    def records(self) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().split("\n") if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def reached(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def lines(self, *about: str) -> list[str]:
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return [line[:400] for line in lines if any(word in line for word in about)]

    def errors(self) -> list[str]:
        """Of each traceback its last words, the first ones first: what comes after is mostly their consequence."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return [line[:300] for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)][:8]

    def digest(self, step: int) -> dict[str, str]:
        """Of each tensor file of a checkpoint."""
        files = sorted((self.run / "checkpoints" / f"step-{step:08d}").rglob("*.safetensors"))
        with ThreadPoolExecutor(8) as pool:
            made = pool.map(sha256, files)
            return dict(zip([file.name for file in files], made, strict=True))

    def report(self) -> dict[str, Any]:
        records = self.records()
        if len(records) < 20:
            return {"ends": self.ends, "records": len(records), "errors": self.errors(), "log": self.lines("")[-12:]}
        speeds = sorted(record["tokens_per_s"] for record in records[10:])
        waits: dict[str, float] = {}
        for name in records[-1].get("workers") or {}:
            spent = [record["workers"][name] for record in records[10:] if record.get("workers")]
            waiting = sum(one["waiting"] for one in spent)
            waits[name] = round(waiting / max(1e-9, waiting + sum(one["working"] for one in spent)), 3)
        return {
            "ends": self.ends,
            "tokens_per_s": statistics.median(speeds),
            "from_to": [speeds[len(speeds) // 10], speeds[-1 - len(speeds) // 10]],
            "waiting": waits,
            "losses": [record["loss"] for record in records][:: max(1, len(records) // 20)],
            "skipped": records[-1]["skipped"],
            "memory_mib": max(record["memory_mib"] or 0 for record in records),
            "said": self.lines("warmed up", "finished", "stopped at", "Error", "equal", "out of memory")[-20:],
        }


class Courses:
    """The parts. Each fills what is told of it as it goes."""

    def __init__(self, size: Size, gpus: int, folder: Path, options: Any) -> None:
        self.size, self.gpus, self.folder, self.options = size, gpus, folder, options
        self.found: dict[str, Any] = options.found
        self.replicas = max(2, gpus)
        self.wrong: list[str] = self.found.setdefault("wrong", [])

    def keep(self) -> None:
        save(self.found, self.options.out)

    def course(self, name: str, size_name: str | None = None) -> Course:
        one = Course(name, size_name or self.options.size, self.folder, self.options.seconds, self.keep)
        self.found[name] = {"ends": one.ends}
        return one

    def amiss(self, what: str) -> None:
        say(f"WRONG: {what}")
        self.wrong.append(what)

    def text(self, alone: bool = False) -> str:
        """The config of whole, broken and alone, which the last one has on one GPU."""
        steps, count = self.options.steps, self.replicas
        many = words(0, self.gpus) if self.gpus else ["cpu"]
        one = ["cuda:0"] if self.gpus else ["cpu"]
        shared = alone or self.gpus < 2
        targets, drafters = (one, one * count) if shared else (many, many)
        often = {"rows_per_step": count, "checkpoint_every": 2 * steps // 5, "keep": 3, "eval_every": steps // 2}
        return config_text(self.size, self.folder, targets, drafters, steps, shared, **often)

    def whole(self) -> None:
        one = self.course("whole")
        one.config.write_text(self.text())
        if one.go() != 0:
            self.amiss(f"whole ended with {one.ends[-1]['code']}: {one.errors()[:1]}")
        self.found["whole"] |= one.report()

    def broken(self) -> None:
        """Its last process is ended behind the checkpoint that is compared."""
        steps, whole, one = self.options.steps, self._whole(), self.course("broken")
        one.config.write_text(self.text())
        compared = 2 * steps // 5
        codes = [
            one.go(until=steps * 3 // 20, how=signal.SIGTERM),
            one.go(until=steps * 3 // 10, how=signal.SIGKILL),
            one.go(out_of_memory_at=self.replicas * max(1, steps // 25)),
            one.go(until=compared + 1, how=signal.SIGTERM),
        ]
        here = self.found["broken"]
        here |= one.report()
        if codes != [0, -signal.SIGKILL, 1, 0]:
            self.amiss(f"broken's processes ended with {codes}, and not with 0, -9, 1, 0")
        if not one.lines("ran out of memory on"):
            self.amiss("broken's third process said nothing of memory")
        digests = [each.digest(compared) for each in (whole, one)]
        here["same_checkpoint_to_the_bit"] = bool(digests[0]) and digests[0] == digests[1]
        here["digests"] = digests
        first, second = ([(r["step"], r["loss"], r["grad_norm"]) for r in each.records()] for each in (whole, one))
        same = len(second) >= compared and first[: len(second)] == second
        here["same_figures"] = {"steps": len(second), "same": same}
        if not (same and here["same_checkpoint_to_the_bit"]):
            self.amiss("broken did not learn what whole did")
        for each in (whole, one):
            shutil.rmtree(each.run / "checkpoints", ignore_errors=True)

    def alone(self) -> None:
        whole, one = self._whole(), self.course("alone")
        one.config.write_text(self.text(alone=True))
        if one.go(until=self.options.alone_steps, how=signal.SIGTERM) != 0:
            self.amiss(f"alone ended with {one.ends[-1]['code']}: {one.errors()[:1]}")
        here = self.found["alone"]
        here |= one.report()
        pairs = [(a["loss"], b["loss"]) for a, b in zip(whole.records(), one.records(), strict=False)]
        apart = [abs(a - b) / abs(a) for a, b in pairs]
        here["losses_apart"] = {
            "steps": len(apart),
            "most": max(apart, default=None),
            "equal": sum(a == b for a, b in pairs),
        }
        if not apart or max(apart) > 0.02:
            self.amiss(f"alone's losses are up to {max(apart, default=1):.1%} from whole's")
        shutil.rmtree(one.run / "checkpoints", ignore_errors=True)

    def large(self) -> None:
        name, one = "tiny" if self.options.quick else "qwen3-8b", self.course("large", None)
        one.size = name
        place = self.folder / "large-data"
        place.mkdir(exist_ok=True)
        write_data(SIZES[name], place)
        targets = max(1, round(self.gpus * 5 / 8))
        if self.gpus > 1:
            layout = words(0, targets), words(targets, self.gpus - targets)
        else:
            layout = (["cuda:0"], ["cuda:0"]) if self.gpus else (["cpu"], ["cpu"])
        more = {"rows_per_step": max(1, self.gpus - targets), "checkpoint_every": 10**6}
        one.config.write_text(config_text(SIZES[name], place, *layout, self.options.steps, **more))
        if one.go() != 0:
            self.amiss(f"large ended with {one.ends[-1]['code']}: {one.errors()[:1]}")
        self.found["large"] |= {"layout": layout, **one.report()}
        shutil.rmtree(one.run / "checkpoints", ignore_errors=True)

    def cold(self) -> None:
        if self._short("cold", cold=True) != 0:
            self.amiss(f"cold ended with {self.found['cold']['ends'][-1]['code']}")

    def bare(self) -> None:
        self._short("bare", bare=True)

    def _short(self, name: str, **plan: bool) -> int | str:
        """Twenty steps, a target and a drafter on each GPU; nobody but this script ends what stands still."""
        places = words(0, self.gpus) if self.gpus else ["cpu"]
        one, shared = self.course(name), self.gpus < 2
        more = {"rows_per_step": self.replicas, "fx_fix": "off" if plan.get("bare") else "per-thread"}
        drafters = places * 2 if shared else places
        text = config_text(self.size, self.folder, places, drafters, 20, shared, **more)
        one.config.write_text(text.replace("stall_seconds = 120", "stall_seconds = 0"))
        code = one.go(**plan)
        self.found[name] |= one.report() | {"errors": one.errors()}
        return code

    def _whole(self) -> Course:
        one = Course("whole", self.options.size, self.folder, self.options.seconds, self.keep)
        if not one.records():
            raise FileNotFoundError(
                f"{one.run}: there is no whole to compare with; run it first, with the same --folder"
            )
        return one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), default=[])
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--steps", type=int, default=500, help="of a training")
    parser.add_argument("--alone-steps", type=int, default=150, help="of the one on one GPU")
    parser.add_argument("--seconds", type=float, default=480, help="that a process may take; longer is said to hang")
    parser.add_argument("--folder", type=Path, help="where trainings are kept (default: for this call only)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.child:
        return child(json.loads(options.child))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is under way ends, what is no more wanted goes
    if options.quick:
        options.size, options.steps, options.alone_steps = "tiny", 40, 20
    gpus, size = torch.cuda.device_count(), SIZES[options.size]
    if not gpus and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    place = where(torch.device("cuda:0" if gpus else "cpu"))
    options.found = found = {"what": "courses", "size": options.size, "gpus": gpus, "where": place}
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    kept = contextlib.nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory()
    with kept as name:
        folder = Path(name)
        if gpus and (free := shutil.disk_usage(folder).free) < ROOM:
            parser.error(f"{folder} has {free >> 30} GiB free, and the checkpoints may take {ROOM >> 30}: --folder")
        if not (folder / "train.jsonl").exists():
            write_data(size, folder)
        courses = Courses(size, gpus, folder, options)
        for part in options.parts or PARTS:
            begun = time.monotonic()
            try:
                getattr(courses, part)()
            except Exception as error:  # the other parts needn't be lost
                courses.amiss(f"{part}: {why(error)}")
            say(f"{part}: {time.monotonic() - begun:.0f} s")
            courses.keep()
    print(json.dumps(found, indent=1))
    return 1 if courses.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
