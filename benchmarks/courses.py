"""That a training over several GPUs learns the same as any other, whatever ends it: real trainings, each a process.

    python benchmarks/courses.py [course] [large] [bare] [--steps 500] [--out FILE]

course  a target and a drafter on each GPU: one training as it comes; one that SIGTERM, SIGKILL and an out-of-memory in
        a target worker end and that is started again each time, whose figures and checkpoint must be the first's to the
        bit; and one on one GPU with as many replicas and the same rows, whose losses are compared
large   a training in Qwen3-8B's shape, targets on some GPUs and drafters on the others
bare    for the record: without the FX fix, without a warm-up, nothing compiled before
Targets have random weights of --size; rows are made-up conversations that fill them. Prints one JSON object, which
--out has after each training. --quick: tiny shapes on a CPU, which proves this script only.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
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

PARTS = ("course", "large", "bare")


def nothing_warmed(*given: Any, **named: Any) -> list[Any]:
    return []


def child(plan: dict[str, Any]) -> int:
    """The trainer's own command, but for a target that is made instead of read, and the faults of the plan."""
    size = SIZES[plan["size"]]
    training.load_targets = lambda config, layout: targets_of(size, layout, {})
    if plan.get("bare"):
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = 64  # of forms, which the warm-up would allow: not what is looked for
        for name in ("warm_up", "warm_up_targets"):
            setattr(training, name, nothing_warmed)
        training.nothing_compiles = lambda devices: contextlib.nullcontext()
    if last := plan.get("out_of_memory_at"):
        calls, of = [0], workers.features_of

        def features(target: TargetModel, *given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == last:
                torch.empty(1 << 45, dtype=torch.uint8, device=target.device)
            return of(target, *given, **named)

        workers.features_of = features
    return trainer_main(["train", plan["config"], plan["run"]])


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


class Course:
    """A training's folder, and the processes that train in it."""

    def __init__(self, name: str, size_name: str, folder: Path, text: str) -> None:
        self.run, self.size = folder / name, size_name
        self.config, self.log = folder / f"{name}.toml", folder / f"{name}.log"
        self.config.write_text(text)
        self.ends: list[dict[str, Any]] = []

    def go(self, *, until: int | None = None, how: int = 0, seconds: float = 900, **plan: Any) -> int:
        """Trains to the end; or until a step, at which the signal `how` comes. The exit code."""
        wanted = json.dumps({"size": self.size, "config": str(self.config), "run": str(self.run), **plan})
        begun, environment = time.monotonic(), dict(os.environ)
        if plan.get("bare"):
            environment |= {name: str(self.run / "cold") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", wanted], stdout=log, stderr=log, env=environment
            )
        told: dict[str, Any] = {"asked": signal.Signals(how).name if how else plan or "the end"}
        try:
            while until is not None and process.poll() is None and time.monotonic() - begun < seconds:
                if self.reached() >= until:
                    process.send_signal(how)
                    told["at"], sent = self.reached(), time.monotonic()
                    told["code"] = process.wait(seconds)
                    told["ended_after_s"] = round(time.monotonic() - sent, 2)
                    break
                time.sleep(0.02)
            told["code"] = process.wait(max(1.0, seconds - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # its threads' stacks, into the log
            time.sleep(3)
            process.kill()
            process.wait()
            told["code"] = f"hung: killed after {seconds:g} s"
        told |= {"seconds": round(time.monotonic() - begun, 1), "reached": self.reached()}
        self.ends.append(told)
        say(f"{self.run.name}: {told}")
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
            "said": self.lines("warmed up", "finished", "stopped at", "Error", "advice", "equal", "out of memory")[
                -20:
            ],
        }


def course(size: Size, gpus: int, folder: Path, options: Any) -> dict[str, Any]:
    steps, places = options.steps, words(0, gpus) if gpus else ["cpu"]
    replicas = max(2, gpus)
    if gpus < 2:  # all on one
        spread: tuple[list[str], list[str], bool] = (places, places * 2, True)
    else:
        spread = (places, places, False)
    found: dict[str, Any] = {}

    def made(name: str, layout: tuple[list[str], list[str], bool]) -> Course:
        often = {"rows_per_step": replicas, "checkpoint_every": steps // 5, "keep": 5, "eval_every": steps // 2}
        return Course(name, options.size, folder, config_text(size, folder, *layout[:2], steps, layout[2], **often))

    def keep() -> None:
        save(options.found | {"course": found}, options.out)

    whole = made("whole", spread)
    if whole.go():
        return {"whole": whole.report()}
    found["whole"] = whole.report()
    keep()
    broken, compared = made("broken", spread), 2 * (steps // 5)
    broken.go(until=steps * 3 // 20, how=signal.SIGTERM)
    broken.go(until=steps * 3 // 10, how=signal.SIGKILL)
    broken.go(out_of_memory_at=replicas * max(1, steps // 25))
    broken.go(until=compared + 1, how=signal.SIGTERM)
    found["broken"] = broken.report()
    digests = [one.digest(compared) for one in (whole, broken)]
    found["same_checkpoint_to_the_bit"] = bool(digests[0]) and digests[0] == digests[1]
    found["digests"] = digests[0]
    figures = [[(r["step"], r["loss"], r["grad_norm"]) for r in one.records()] for one in (whole, broken)]
    found["same_figures"] = {"steps": len(figures[1]), "same": figures[0][: len(figures[1])] == figures[1]}
    keep()
    if gpus > 1:
        alone = made("alone", (["cuda:0"], ["cuda:0"] * replicas, True))
        alone.go(until=options.alone_steps, how=signal.SIGTERM)
        found["on one GPU"] = alone.report()
        pairs = [(a["loss"], b["loss"]) for a, b in zip(whole.records(), alone.records(), strict=False)]
        apart = [abs(a - b) / abs(a) for a, b in pairs]
        found["losses_apart_from_one_gpu"] = {
            "steps": len(apart), "largest": max(apart, default=None), "equal": sum(a == b for a, b in pairs),
        }  # fmt: skip
    return found


def large(gpus: int, folder: Path, options: Any) -> dict[str, Any]:
    name = "tiny" if options.quick else "qwen3-8b"
    place = folder / "large"
    place.mkdir()
    write_data(SIZES[name], place)
    targets = max(1, round(gpus * 5 / 8)) if gpus > 1 else 1
    if gpus > 1:
        layout = words(0, targets), words(targets, gpus - targets)
    else:
        layout = (["cuda:0"], ["cuda:0"]) if gpus else (["cpu"], ["cpu"])
    rows = max(1, gpus - targets)
    text = config_text(SIZES[name], place, *layout, options.steps, rows_per_step=rows, checkpoint_every=10**6)
    one = Course("large-run", name, place, text)
    one.go()
    return {"layout": layout, **one.report()}


def bare(size: Size, gpus: int, folder: Path, options: Any) -> dict[str, Any]:
    places = words(0, gpus) if gpus else ["cpu"]
    text = config_text(
        size, folder, places, places if gpus > 1 else places * 2, 40, gpus < 2, rows_per_step=max(2, gpus), fx_fix="off"
    )
    one = Course("bare", options.size, folder, text)
    one.go(bare=True, seconds=options.bare_seconds)
    return one.report() | {"errors": one.errors()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), default=[])
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--steps", type=int, default=500, help="of a training")
    parser.add_argument("--alone-steps", type=int, default=150, help="of the one on one GPU")
    parser.add_argument("--bare-seconds", type=float, default=150, help="after which it is said to hang")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the trainer sets it, before CUDA starts
    if options.child:
        return child(json.loads(options.child))
    if options.quick:
        options.size, options.steps, options.alone_steps, options.bare_seconds = "tiny", 40, 20, 60
    gpus, size = torch.cuda.device_count(), SIZES[options.size]
    if not gpus and options.size != "tiny":
        parser.error("there is no GPU here: --quick runs tiny shapes")
    where_to = where(torch.device("cuda:0" if gpus else "cpu"))
    options.found = found = {"what": "courses", "size": options.size, "gpus": gpus, "where": where_to}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(size, folder)
        work = {
            "course": lambda: course(size, gpus, folder, options),
            "large": lambda: large(gpus, folder, options),
            "bare": lambda: bare(size, gpus, folder, options),
        }
        for part in options.parts or PARTS:
            begun = time.monotonic()
            try:
                found[part] = work[part]()
            except Exception as error:  # the other parts needn't be lost
                found[part] = {"failed": why(error)}
                say(f"{part}: {why(error)}")
            say(f"{part}: {time.monotonic() - begun:.0f} s")
            save(found, options.out)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
